"""Sluice decides which LLM rollouts deserve training.

It sits between rollout generation and a GRPO-style trainer: groups are sampled, scored and filtered, replacements are sampled until the
batch is full, and every token that was paid for is accounted for. `import sluice` is light: rooms and names load when they are first used,
and torch only with the rooms that compute with it (`sluice.correction`, `sluice.generation`, `sluice.trainer`, `sluice.pipeline`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.config import RlvrConfig as RlvrConfig
    from sluice.config import load_config as load_config
    from sluice.correction import apply_train_infer_correction as apply_train_infer_correction
    from sluice.correction import compute_train_infer_correction as compute_train_infer_correction
    from sluice.errors import ConfigError as ConfigError
    from sluice.errors import CorrectionError as CorrectionError
    from sluice.errors import FilterError as FilterError
    from sluice.errors import GateError as GateError
    from sluice.errors import GenerationError as GenerationError
    from sluice.errors import LoopError as LoopError
    from sluice.errors import RecordError as RecordError
    from sluice.errors import RequestRefused as RequestRefused
    from sluice.errors import ResampleError as ResampleError
    from sluice.errors import RewardError as RewardError
    from sluice.errors import SluiceError as SluiceError
    from sluice.errors import TaskError as TaskError
    from sluice.errors import TrainerError as TrainerError
    from sluice.execution import Judged as Judged
    from sluice.execution import LoopContext as LoopContext
    from sluice.execution import RolloutLoop as RolloutLoop
    from sluice.types import Batch as Batch
    from sluice.types import Failure as Failure
    from sluice.types import Group as Group
    from sluice.types import Rollout as Rollout
    from sluice.types import Sample as Sample
    from sluice.types import Task as Task
    from sluice.types import Turn as Turn
    from sluice.types import Verdict as Verdict

__version__ = "0.1.0"

_ROOMS = frozenset(
    {
        "advantage",
        "config",
        "correction",
        "environments",
        "errors",
        "execution",
        "filters",
        "gate",
        "generation",
        "integrations",
        "ledger",
        "pipeline",
        "records",
        "rewards",
        "roll",
        "scheduler",
        "sim",
        "tasks",
        "trainer",
        "types",
    }
)

_HOME_OF = {
    **dict.fromkeys(("Task", "Turn", "Failure", "Rollout", "Group", "Verdict", "Sample", "Batch"), "sluice.types"),
    **dict.fromkeys(
        (
            "SluiceError",
            "ConfigError",
            "CorrectionError",
            "TaskError",
            "GenerationError",
            "RequestRefused",
            "LoopError",
            "RewardError",
            "FilterError",
            "GateError",
            "TrainerError",
            "ResampleError",
            "RecordError",
        ),
        "sluice.errors",
    ),
    **dict.fromkeys(("RlvrConfig", "load_config"), "sluice.config"),
    **dict.fromkeys(("compute_train_infer_correction", "apply_train_infer_correction"), "sluice.correction"),
    **dict.fromkeys(("RolloutLoop", "LoopContext", "Judged"), "sluice.execution"),
}

__all__ = ["__version__", *sorted(_HOME_OF)]  # noqa: PLE0604 - names only


def __getattr__(name: str) -> Any:
    """Load a room or a public name on first use."""
    if name in _ROOMS:
        return import_module(f"sluice.{name}")
    if name in _HOME_OF:
        value = getattr(import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'sluice' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_ROOMS})
