"""Reads recorded rollouts back as the records that they were, without torch, also while the run goes on.

for group in read_rollouts("runs/RUN"):
    print(group.group_id, group.outcome, [member.reward for member in group.members])
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import numpy.typing as npt

from sluice.errors import RecordError
from sluice.records.rollouts import load_parts
from sluice.types import Category, Failure, Group, Rollout, Task, Turn

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER: Final = "rollouts"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """One group as it left the run. What run.db says of it stands there under the same `group_id`."""

    group_id: int
    task_id: str
    domain: str
    epoch: int
    round: int
    start_step: int  # global_step at launch
    end_step: int  # global_step at exit
    outcome: str  # "trained", "dropped", "expired", "surplus", "discarded"
    reason: str  # "kept", or why it was dropped or given up
    category: Category | None  # None unless dropped
    source: str  # the filter or the part of the machine that decided
    attempts: int  # launched for it, those that never delivered included
    sampled_tokens: int  # by all its attempts
    env_steps: int  # of all its attempts
    seconds: float  # from launch to exit
    members: tuple[Rollout, ...]  # in order of member_index; fewer than its size where it was dropped before all had delivered
    counted: tuple[bool, ...]  # parallel to members: which of them entered its statistics
    rejected: tuple[Rollout, ...]  # delivered, but taken out of the group again, in order of attempt_id

    @property
    def rewards(self) -> npt.NDArray[np.float64]:
        """Raw task rewards of the members. [G], NaN where a member has none."""
        return np.array([np.nan if member.reward is None else member.reward for member in self.members], dtype=np.float64)

    def as_group(self) -> Group:
        """What a filter judges. Its task has what was recorded: identity, domain and prompt tokens, neither texts nor answer."""
        first = next((turn.prompt_ids for member in self.members for turn in member.turns[:1]), np.zeros(0, dtype=np.int64))
        return Group(
            group_id=self.group_id,
            task=Task(task_id=self.task_id, domain=self.domain, prompt="", prompt_ids=first),
            rollouts=self.members,
            start_step=self.start_step,
            round=self.round,
            epoch=self.epoch,
            counted=self.counted,
        )


class Recording:
    """The recorded groups of one run: iterate as often as you like, a part (at most some thousand members) is in memory at a time."""

    def __init__(self, folder: Path, parts: Sequence[Path]) -> None:
        self.folder = folder
        self.parts = tuple(parts)  # files, in the order of writing
        self.facts: Mapping[str, Any] = {} if not parts else _facts(parts[0])
        """What is known of the run: `identity`, `exp_name`, `seed`, `schema_version` and others. Empty while there is no part."""

    def __iter__(self) -> Iterator[RecordedGroup]:
        """The groups, in the order in which they left.

        Raises:
            RecordError: a part is damaged, of another run or another version, or holds a group that came before.
        """
        seen: set[int] = set()
        for path in self.parts:
            for group in self._read(path):
                if group.group_id in seen:
                    raise RecordError(
                        f"{path} must hold groups that no other part holds, got group {group.group_id} again - a copy of a part was put "
                        f"into {self.folder}: take it out"
                    )
                seen.add(group.group_id)
                yield group

    def _read(self, path: Path) -> Iterator[RecordedGroup]:
        parts = load_parts()
        file, facts = parts.open_part(path)
        with file:
            if facts.get("identity") != self.facts.get("identity"):
                raise RecordError(
                    f"{path} must be of run {self.facts.get('identity')}, as the parts before it, got run {facts.get('identity')} - "
                    "keep the parts of each run in a folder of their own"
                )
            with parts.reading(path):
                table = file.read()
        yield from _groups(table)


def read_rollouts(run: Path | str) -> Recording:
    """The rollouts that a run has recorded so far.

    Args:
        run: the folder of a run, finished or not, or the folder of part files in it.

    Raises:
        RecordError: there are none, or the first part is not ours. Iterating raises the same for later parts.
    """
    run = Path(run)
    folder = run / FOLDER if (run / FOLDER).is_dir() else run
    parts = load_parts()
    try:
        files = [path for _, path in parts.part_files(folder)]
    except OSError as error:
        raise RecordError(
            f"{run} must be a run folder, got: {error.strerror or error} - give the folder that 'sluice train' printed"
        ) from error
    if not files and folder.name != FOLDER:
        raise RecordError(f"{run} must hold recorded rollouts, but has none - record them with 'sluice train --record'")
    return Recording(folder, files)


def _facts(path: Path) -> dict[str, Any]:
    file, facts = load_parts().open_part(path)
    file.close()
    return cast("dict[str, Any]", facts)


# ---------------------------------------------------------------- from columns to records

_OF_GROUP: Final = {  # column -> field of RecordedGroup
    **{name: name for name in ("group_id", "task_id", "domain", "epoch", "round", "start_step", "end_step")},
    **{name: name for name in ("outcome", "reason", "category", "source")},
    **{f"group_{name}": name for name in ("attempts", "sampled_tokens", "env_steps", "seconds")},
}
_OF_MEMBER: Final = ("attempt_id", "group_id", "member_index", "task_id", "finish_reason", "reward", "seconds", "env_id", "task_type")
_OTHERS: Final = ("is_in_group", "is_counted", "failure_cause", "failure_reason", "failure_detail", "flags", "metrics")
_OF_TURN: Final = {  # column -> field of Turn
    "observations": "observation",
    "texts": "text",
    "actions": "action",
    "is_admissible": "is_admissible",
    "step_rewards": "reward",
    "progress": "progress",
    "turn_finish_reasons": "finish_reason",
    "turn_policy_versions": "policy_version",
}
_OF_TOKENS: Final[Mapping[str, Any]] = {  # column and field of Turn -> type of its array
    "prompt_ids": np.int64,
    "token_ids": np.int64,
    "inference_logprobs": np.float32,
    "token_versions": np.int64,
}


def _groups(table: pa.Table) -> Iterator[RecordedGroup]:
    values = {name: table.column(name).to_pylist() for name in {*_OF_GROUP, *_OF_MEMBER, *_OTHERS}}
    rollouts = _rollouts(table, values)
    for _, same in groupby(range(len(rollouts)), key=values["group_id"].__getitem__):
        rows = list(same)
        inside = [row for row in rows if values["is_in_group"][row]]
        yield RecordedGroup(
            **{field: values[name][rows[0]] for name, field in _OF_GROUP.items()},
            members=tuple(rollouts[row] for row in inside),
            counted=tuple(values["is_counted"][row] for row in inside),
            rejected=tuple(rollouts[row] for row in rows if not values["is_in_group"][row]),
        )


def _rollouts(table: pa.Table, values: Mapping[str, list[Any]]) -> list[Rollout]:
    """One for each row."""
    turns = _turns(table)
    ends = np.cumsum([len(texts) for texts in table.column("texts").to_pylist()]).tolist()
    return [
        Rollout(
            **{name: values[name][row] for name in _OF_MEMBER},
            turns=tuple(turns[start:end]),
            metrics=dict(values["metrics"][row]),
            failure=_failure(*(values[f"failure_{part}"][row] for part in ("cause", "reason", "detail"))),
            flags=frozenset(values["flags"][row]),
        )
        for row, (start, end) in enumerate(pairwise([0, *ends]))
    ]


def _failure(cause: Any, reason: Any, detail: Any) -> Failure | None:
    return None if cause is None else Failure(cause=cause, reason=reason, detail=detail)


def _turns(table: pa.Table) -> list[Turn]:
    """All turns of all rows, one after another."""
    of_turn = [name for name in _OF_TURN if name not in load_parts().LATER or name in table.column_names]
    columns = [_inner(table, name).to_pylist() for name in of_turn]
    columns += [_arrays(_inner(table, name), kind) for name, kind in _OF_TOKENS.items()]
    fields = (*(_OF_TURN[name] for name in of_turn), *_OF_TOKENS)
    return [Turn(**dict(zip(fields, turn, strict=True))) for turn in zip(*columns, strict=True)]


def _inner(table: pa.Table, name: str) -> Any:
    """The lists of a column, joined."""
    return table.column(name).combine_chunks().flatten()


def _arrays(lists: Any, kind: type[np.generic]) -> list[Any]:
    """One array per list; None for null."""
    values = lists.values.to_numpy().astype(kind)
    arrays: list[Any] = [values[start:stop] for start, stop in pairwise(lists.offsets.to_numpy().tolist())]
    return arrays if not lists.null_count else [one if is_there else None for one, is_there in zip(arrays, lists.is_valid(), strict=True)]
