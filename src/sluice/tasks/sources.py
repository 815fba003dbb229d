"""The table from `type` to source, and the names and seeds of sources that the configuration leaves open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from sluice.config.models import TaskSourceConfig
from sluice.tasks.base import Source
from sluice.tasks.huggingface import HuggingFaceSource
from sluice.tasks.jsonl import JsonlSource
from sluice.tasks.reasoning_gym import ReasoningGymSource

Part = Literal["train", "validation"]

SOURCES: Final[Mapping[str, type[Source]]] = {
    "reasoning_gym": ReasoningGymSource,
    "jsonl": JsonlSource,
    "huggingface": HuggingFaceSource,
}

# Default data seeds do not follow the run's seed: three seeds of one experiment train on the same data in another order, and a task_id
# means the same prompt in all of them. They are farther apart than any data set is long, since reasoning-gym makes row k from seed + k,
# and below 2**32, the largest seed that numpy takes.
_SEED_STRIDE: Final = 10_000_000
_FIRST_VALIDATION_SEED: Final = 2_000_000_000


def data_seed(settings: TaskSourceConfig, part: Part, index: int) -> int:
    """The seed of a source's rows: its own, else one that depends on its place in the configuration."""
    if settings.seed is not None:
        return settings.seed
    return (_FIRST_VALIDATION_SEED if part == "validation" else 0) + index * _SEED_STRIDE


def name_of(settings: TaskSourceConfig) -> str:
    """The name by which `dataset_filter.source` selects the source: its own, else that of the data set, the folder, or the file's stem."""
    if settings.source_name is not None:
        return settings.source_name
    if settings.path is not None:
        return settings.path.name if settings.path.is_dir() else settings.path.stem
    return settings.name or settings.type


def id_prefixes(part: Part, sources: Sequence[TaskSourceConfig]) -> list[str]:
    """What the task_ids of each source begin with: its name, numbered where a name comes again, apart from the other part's."""
    lead = "validation/" if part == "validation" else ""
    used: set[str] = set()
    prefixes = []
    for settings in sources:
        name = name_of(settings)
        unique, count = name, 1
        while unique in used:
            count += 1
            unique = f"{name}#{count}"
        used.add(unique)
        prefixes.append(f"{lead}{unique}/")
    return prefixes


def build_source(settings: TaskSourceConfig, part: Part, index: int) -> Source:
    """The source that one entry of `tasks.train` or `tasks.validation` describes."""
    return SOURCES[settings.type](settings, ("tasks", part, index), default_seed=data_seed(settings, part, index))
