"""A raw row of data, and what a source of rows, a source of tasks and a tokenizer offer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Protocol

from sluice.config.models import TaskSourceConfig
from sluice.config.problems import KeyPath, Problem
from sluice.errors import ConfigError
from sluice.types import Task


class _Missing:
    """The value of a field that a row does not have, which is not the same as null."""

    def __repr__(self) -> str:
        return "nothing"


MISSING: Final = _Missing()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row as its source gives it: nothing is judged yet, so that any field may hold anything."""

    index: int  # position in its source, from 0: part of the task_id
    where: str  # for messages: "data/sums.jsonl line 3"
    prompt: object  # text, or a list of chat messages {"role", "content"}; MISSING: the row has no such field
    answer: object  # MISSING: the row has no such field
    domain: object  # label for a reward domain; None: the row has none
    tag: object  # label that `tag_included` maps to a reward domain; None: the row has none
    difficulty: float | None  # None: the row has no number there
    entry: Mapping[str, Any]  # the whole row, for the template and the verifier; picklable

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any], settings: TaskSourceConfig, *, index: int, where: str) -> Row:
        """A row of a data set with named fields: `domain`, `tag` and `difficulty` are read where they are there."""
        return cls(
            index=index,
            where=where,
            prompt=fields.get(settings.prompt_field, MISSING),
            answer=fields.get(settings.answer_field, MISSING),
            domain=fields.get("domain"),
            tag=fields.get("tag"),
            difficulty=number_or_none(fields.get("difficulty")),
            entry=fields,
        )


class Source(Protocol):
    """Where rows come from."""

    def __init__(self, settings: TaskSourceConfig, path: KeyPath, *, default_seed: int) -> None:
        """`path` is where the settings stand, ("tasks", "train", 0); `default_seed` is for sources that make their rows."""

    def problems(self) -> Iterator[Problem]:
        """What is wrong with the settings, as far as it shows without reading the data."""

    def rows(self) -> Iterator[Row]:
        """All rows in a fixed order. Raises `TaskError`, with the place, for data that cannot be read."""


class TaskSource(Protocol):
    """What the scheduler draws from."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks, in the order of the data."""

    def __len__(self) -> int:
        """Tasks of one epoch."""

    def draw(self, domain: str | None = None) -> tuple[Task, int] | None:
        """The next task (of a domain, or whatever comes next) and the epoch it is drawn in; None when nothing (of it) is left.

        Raises `TaskError` for a domain that cannot be asked for.
        """

    def put_back(self, task_id: str, epoch: int) -> None:
        """Give back a drawn prompt that was not used: it is drawn once more, before new ones."""

    def state_dict(self, outstanding: Iterable[tuple[str, int]] = ()) -> dict[str, Any]:
        """The position, as plain data; `outstanding` (task_id, epoch) are drawn prompts that a resumed run must draw again."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises `TaskError` that says what differs, and then changes nothing."""

    def fingerprint(self) -> str:
        """Digest of the data: the same for the same data only."""


class Tokenizer(Protocol):
    """The part of transformers' tokenizer interface that prompts need."""

    @property
    def chat_template(self) -> Any:
        """The chat template, or None."""

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text, if there is one."""

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text, if there is one."""

    @property
    def eos_token(self) -> str | None:
        """The same token as text."""

    @property
    def unk_token_id(self) -> int | None:
        """Id of the token for what the vocabulary lacks, if there is one."""

    def __call__(self, text: list[str], *, add_special_tokens: bool, return_attention_mask: bool) -> Mapping[str, Any]:
        """Tokenise many texts: "input_ids" holds one list of ids each."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool) -> Any:
        """Write one conversation as text."""


def number_or_none(value: object) -> float | None:
    """The value as a float when it is a finite number (a bool is none), else None."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        return None
    number = float(value)
    return number if abs(number) < float("inf") else None  # NaN compares False


def listed(names: Iterable[object], limit: int = 20) -> str:
    """Names in a message: all of a few, the first of many."""
    all_names: Sequence[str] = sorted(map(str, names))
    shown = ", ".join(all_names[:limit])
    return shown if len(all_names) <= limit else f"{shown} and {len(all_names) - limit} more"


def import_package(module: str, package: str, key: str) -> Any:
    """Import a heavy package at its first use. Raises `ConfigError` that says what to install."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{key}: needs the package {package}, which cannot be imported ({error}) - install sluice-rl[train]") from error
