"""Dynamic sampling inside TRL's GRPOTrainer: groups that teach nothing are replaced until every batch is full. See docs/trl.md.

- `settings.py`: `DynamicSampling`, what a user sets
- `trainer.py`: `DynamicSamplingGRPOTrainer`, and the mixin for trainers that are subclasses of TRL's
- `rollout.py`: `DynamicRollout`, the same as a `rollout_func` for a GRPOTrainer whose class cannot be changed
- `sampler.py`: fills generation batches by the scheduler's rounds, in every process alike
- `correction.py`: the train-infer correction on a generation batch
- `prompts.py`: in which order prompts are drawn; `rows.py`: completions as records, from TRL and back to it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice.integrations.trl.settings import DynamicSampling

if TYPE_CHECKING:
    from sluice.integrations.trl.rollout import DynamicRollout
    from sluice.integrations.trl.sampler import Watch
    from sluice.integrations.trl.trainer import DynamicSamplingGRPOTrainer, DynamicSamplingMixin

__all__ = ["DynamicRollout", "DynamicSampling", "DynamicSamplingGRPOTrainer", "DynamicSamplingMixin", "Watch"]

_FILE_OF = {
    "DynamicRollout": "rollout",
    "DynamicSamplingGRPOTrainer": "trainer",
    "DynamicSamplingMixin": "trainer",
    "Watch": "sampler",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch and trl only when it is asked for."""
    if name in _FILE_OF:
        from importlib import import_module

        return getattr(import_module(f"sluice.integrations.trl.{_FILE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
