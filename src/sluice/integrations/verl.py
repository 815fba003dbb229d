"""The door to verl: filters and the gate on its `DataProto` and `AgentLoopOutput`, without importing verl.

verl keeps a batch as rows: `batch` holds tensors, `non_tensor_batch` numpy arrays with one entry per row. Rows of one prompt share their
`uid`, which is the key of a group here; what a reward function returned beside its score (`reward_extra_info`) stands in
`non_tensor_batch` under its own names. Names are those of verl 0.9 (PyPI package `verl`).

Which number is judged: with `metric` (of the filter's configuration) the column of that name; without it the raw score of a row, the sum of
`rm_scores` or `token_level_scores`. `token_level_rewards` holds the KL penalty too and is never read. A row that `response_mask` masks
altogether trains nothing and has no vote, whatever its score.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sluice.advantage import fold_rows, read_ids
from sluice.errors import FilterError, ResampleError
from sluice.filters import QueryFilter, RatioGuard
from sluice.filters.scores import named_metrics, require_named, scores_of
from sluice.gate import Gate
from sluice.integrations.judging import FilterLike, Member, group_of, query_filter, reason_of
from sluice.types import EMPTY, Verdict

SCORES: Final = ("rm_scores", "token_level_scores")
"""Columns of raw scores, one number per token [rows, T]; the first one that is there counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What became of a batch."""

    data: Any  # the rows of the groups that were kept, of the type that was given, in their order; None: no group was kept
    verdicts: Mapping[Hashable, Verdict]  # by uid, in order of first appearance
    rows: npt.NDArray[np.intp]  # of the given data, that were kept

    @property
    def kept(self) -> int:
        """Groups that were kept."""
        return sum([verdict.keep for verdict in self.verdicts.values()])

    def metrics(self) -> dict[str, float]:
        """Counts under Sluice's names."""
        return count(self.verdicts.values())


@dataclass(kw_only=True)
class GroupFilter:
    """Judges the groups of verl's batches.

    Args:
        query_filter: a configuration, or a filter from `sluice.filters.build_query_filter`.
        guard: bounds the share of judged groups that are dropped; None: no bound.
        group_size: rollouts of a whole group, `rollout.n` of verl; a group of another number is dropped as `response_count`, unless it has
            `min_members` at least and not more. None: a group is as large as it comes.
        min_members: rows with a reward that still make a group, where a configuration is given; None: all of them.
        uid: the column that groups are told apart by.
        rollout_id: the column by which rows of one rollout are told, where a rollout is split into several rows: it has one vote. None:
            each row is a rollout.
    """

    query_filter: FilterLike = field(default_factory=lambda: {"type": "std_filter"})
    guard: RatioGuard | None = None
    group_size: int | None = None
    min_members: int | None = None
    uid: str = "uid"
    rollout_id: str | None = None

    def __post_init__(self) -> None:
        self._filter: QueryFilter = query_filter(
            self.query_filter, where="query_filter", group_size=self.group_size, min_members=self.min_members
        )
        self._metrics = named_metrics(self._filter)

    def judge(self, data: Any) -> Judged:
        """Judge every group of a `DataProto`, and choose the rows of those that are kept. The data are not changed.

        Raises `FilterError` for data without uids or scores, or without the column that the filter's `metric` names; for uids that tell no
        group from another, scores and metrics that are no numbers, and columns of different lengths.
        """
        uids = self.uids_of(data)
        rows_of: dict[Hashable, list[int]] = {}
        for row, uid in enumerate(uids):
            rows_of.setdefault(uid, []).append(row)
        members = self._members(data, len(uids))
        votes = list(range(len(uids))) if self.rollout_id is None else self._votes(data, uids, members)
        verdicts: dict[Hashable, Verdict] = {}
        for index, (uid, rows) in enumerate(rows_of.items()):
            verdicts[uid] = self.judge_members([members[row] for row in rows if votes[row] == row], key=str(uid), group_id=index)
        kept = np.array([row for row, uid in enumerate(uids) if verdicts[uid].keep], dtype=np.intp)
        return Judged(data=_select(data, kept) if len(kept) else None, verdicts=verdicts, rows=kept)

    def judge_outputs(self, outputs: Sequence[Any], *, key: str = "") -> Verdict:
        """Judge one group that an agent loop produced, a list of `AgentLoopOutput`: its members' `reward_score`, and the
        `reward_extra_info` of their `extra_fields`.
        """
        infos = [_extra(output).get("reward_extra_info") or {} for output in outputs]
        require_named(self._metrics, infos, where="query_filter.metric", advice="name one; another score is never read in its place")
        return self.judge_members([_member_of_output(*pair, self._metrics) for pair in zip(outputs, infos, strict=True)], key=key)

    def judge_members(self, members: Sequence[Member], *, key: str, group_id: int = 0) -> Verdict:
        """The verdict on a group of members, after the guard."""
        group = group_of(members, key=key, group_id=group_id)
        size = self.group_size
        if size is not None and not (size if self.min_members is None else self.min_members) <= len(members) <= size:
            return Verdict.dropped("response_count", "invalid", "verl", {"members": float(len(members)), "size": float(size)})
        verdict = self._filter.judge(group)
        return verdict if self.guard is None else self.guard.admit(verdict)

    def uids_of(self, data: Any) -> list[Hashable]:
        """The uid of each row. Raises `FilterError` where there are none, or one tells no group from another."""
        return self._column(data, self.uid)

    def _members(self, data: Any, rows: int) -> list[Member]:
        columns = {
            str(name): _listed(values, str(name), rows)
            for name, values in data.non_tensor_batch.items()
            if name not in (self.uid, self.rollout_id) and getattr(values, "ndim", 1) == 1
        }
        scores = _scores(data, rows)
        metric = next(iter(self._metrics), None)
        if scores is None and metric not in columns:
            raise FilterError(
                f"expected a column of scores ({' or '.join(SCORES)}) in batch, or of numbers in non_tensor_batch, got batch "
                f"{sorted(map(str, _keys(data.batch)))} and non_tensor_batch {sorted(map(str, data.non_tensor_batch))} - judge after the "
                "reward has been computed, or name one of these columns as the filter's metric"
            )
        lengths = _lengths(data, rows)
        tokens, trains = lengths or [0] * rows, self._trains(data, lengths)
        members = []
        for row in range(rows):
            metrics = scores_of({name: values[row] for name, values in columns.items()}, self._metrics)
            reward = metrics.get(str(metric)) if scores is None else scores[row]
            members.append(Member(reward=reward, metrics=metrics, tokens=tokens[row], trains=trains is None or trains[row]))
        return members

    def _trains(self, data: Any, lengths: Sequence[int] | None) -> list[bool] | None:
        """Whether anything trains of the rollout that each row is of; None: nobody says."""
        if lengths is None:
            return None
        ids: Sequence[Hashable] = range(len(lengths)) if self.rollout_id is None else self._column(data, self.rollout_id)
        alive = {rollout for rollout, length in zip(ids, lengths, strict=True) if length}
        return [rollout in alive for rollout in ids]

    def _votes(self, data: Any, uids: Sequence[Hashable], members: Sequence[Member]) -> list[int]:
        """For each row the one that votes for its rollout: the first one. What is judged must be the same in all of them."""
        assert self.rollout_id is not None
        ids = self._column(data, self.rollout_id)
        judged = [[member.metrics.get(name) for member in members] for name in self._metrics] or [[member.reward for member in members]]
        try:
            folded = [fold_rows(values, ids, uids) for values in judged]  # all of them, since each may disagree
        except ValueError as error:
            message = str(error).replace("give it in rollout_rewards", "name the column that holds it as the filter's metric")
            raise FilterError(f"{self.rollout_id}: {message}") from error
        first: dict[int, int] = {}
        return [first.setdefault(int(rollout), row) for row, rollout in enumerate(folded[0].rollout_of_row)]

    def _column(self, data: Any, name: str) -> list[Hashable]:
        columns = getattr(data, "non_tensor_batch", None)
        if columns is None or name not in columns:
            there = "no non_tensor_batch" if columns is None else f"the columns {sorted(map(str, columns))}"
            raise FilterError(
                f"expected a DataProto with the column {name!r} in non_tensor_batch, got {type(data).__name__} with {there} - verl gives "
                "every prompt a uid before it repeats it"
            )
        try:
            return read_ids(columns[name], name)
        except ValueError as error:
            raise FilterError(f"non_tensor_batch[{name!r}]: {error} - verl gives every prompt a uid before it repeats it") from None


class BatchFiller:
    """Collects kept groups over several generated batches until there are enough, as verl's DAPO trainers do.

    ```python
    filler = BatchFiller(groups=128, group_filter=GroupFilter(), max_gen_batches=10)
    while filler.missing:
        filler.add(generate_and_score(next(prompts)))
    batch = filler.take()
    ```

    `on_exhausted` says what happens when `max_gen_batches` have been added and groups are still missing: "raise", or "shrink", which makes
    `missing` 0, so that what is there is taken; with nothing there it is an error too. Kept groups beyond the batch wait for the next one
    with `surplus` "carry", in which case they are of older weights; "discard" counts and drops them. Two kept groups of one uid would be
    one group to verl's advantages: the second is a `FilterError`.
    """

    def __init__(
        self,
        *,
        groups: int,
        group_filter: GroupFilter,
        max_gen_batches: int = 10,
        on_exhausted: str = "raise",
        surplus: str = "discard",
    ) -> None:
        if groups < 1 or max_gen_batches < 1:
            raise ValueError(f"expected groups and max_gen_batches of at least 1, got {groups} and {max_gen_batches}")
        for name, value, valid in (("on_exhausted", on_exhausted, ("raise", "shrink")), ("surplus", surplus, ("discard", "carry"))):
            if value not in valid:
                raise ValueError(f"{name}: expected one of {', '.join(valid)}, got {value!r}")
        self.groups = groups
        self._group_filter = group_filter
        self._max_gen_batches = max_gen_batches
        self._on_exhausted = on_exhausted
        self._surplus = surplus
        self._parts: list[tuple[Hashable, Any]] = []  # uid and rows of one kept group each
        self._verdicts: list[Verdict] = []
        self._added = 0

    @property
    def missing(self) -> int:
        """Groups that the batch still lacks. Raises `ResampleError` when no further batch may be added and the policy is to raise."""
        lacking = max(0, self.groups - len(self._parts))
        if not lacking or self._added < self._max_gen_batches:
            return lacking
        if self._on_exhausted == "shrink" and self._parts:
            return 0
        dropped = Counter(reason_of(verdict.category, verdict.reason) for verdict in self._verdicts if not verdict.keep)
        kept = sum([verdict.keep for verdict in self._verdicts])
        raise ResampleError(
            f"expected a batch of {self.groups} groups, kept {len(self._parts)} after max_gen_batches ({self._max_gen_batches}) with an "
            f"acceptance rate of {kept / max(1, len(self._verdicts)):.1%}. Groups dropped: "
            f"{', '.join(f'{reason} {number}' for reason, number in dropped.most_common(3)) or 'none'} - loosen the filter that drops "
            "most, generate larger batches, raise max_gen_batches, or set on_exhausted to 'shrink'"
        )

    def add(self, data: Any) -> Judged:
        """Judge one generated and scored batch, and keep its groups."""
        judged = self._group_filter.judge(data)
        uids = self._group_filter.uids_of(data)
        rows_of: dict[Hashable, list[int]] = {}
        for row in judged.rows.tolist():
            rows_of.setdefault(uids[row], []).append(row)
        twice = [uid for uid, _ in self._parts if uid in rows_of]
        if twice:
            raise FilterError(
                f"expected groups with uids of their own, got {twice[0]!r} again, of which a kept group waits already - give a prompt "
                "that is sampled once more a new uid: advantages would take the two for one group"
            )
        self._added += 1
        self._verdicts += judged.verdicts.values()
        self._parts += [(uid, _select(data, np.array(rows, dtype=np.intp))) for uid, rows in rows_of.items()]
        return judged

    def take(self) -> tuple[Any, dict[str, float]]:
        """The batch, oldest groups first, and the counts of its filling. A new batch begins."""
        if not self._parts:
            raise ResampleError("expected at least one kept group, got none - ask `missing` before taking a batch")
        taken, rest = self._parts[: self.groups], self._parts[self.groups :]
        metrics = count(self._verdicts) | {
            "scheduler/rounds": float(self._added),
            "scheduler/collect_query_count": float(len(taken)),
            "scheduler/surplus_groups": float(len(rest)),
        }
        self._parts = rest if self._surplus == "carry" else []
        self._verdicts, self._added = [], 0
        parts = [part for _, part in taken]
        return (parts[0] if len(parts) == 1 else type(parts[0]).concat(parts)), metrics


def decide(
    gate: Gate, outputs: Sequence[Any], *, actions: str = "actions", observations: str | None = None, rewards: bool = True
) -> Verdict | None:
    """The gate's verdict on the members of a running group: `AgentLoopOutput`s, or whatever has `extra_fields` and `reward_score`.

    `actions` (and `observations`) name the entries of `extra_fields` in which an agent loop notes what it did (and saw), step by step. A
    member whose entry is None or missing is not compared. `rewards`: whether a `reward_score` says that its member has finished; leave it
    out in a replay of finished groups. None: no decision, the group runs on. Raises `GateError` for what cannot be compared.
    """
    fields = [_extra(output) for output in outputs]
    return gate.decide(
        [entry.get(actions) for entry in fields],
        None if observations is None else [entry.get(observations) for entry in fields],
        [getattr(output, "reward_score", None) for output in outputs] if rewards else None,
    )


def count(verdicts: Iterable[Verdict]) -> dict[str, float]:
    """How groups were judged, under Sluice's names."""
    judged = list(verdicts)
    kept = sum([verdict.keep for verdict in judged])
    out = {"scheduler/group_filter_count": float(len(judged) - kept)}
    if judged:
        out["scheduler/acceptance_rate"] = kept / len(judged)
    for (category, reason), number in Counter((v.category, v.reason) for v in judged if not v.keep).items():
        out[f"batch/rejected/{category}/{reason}"] = float(number)
    return out


def _scores(data: Any, rows: int) -> list[float] | None:
    """The raw score of each row; None where there are none. Scores per token are summed exactly: their order makes no difference."""
    name = next((name for name in SCORES if name in _keys(data.batch)), None)
    if name is None:
        return None
    values = _array(data.batch[name])
    if values.ndim not in (1, 2) or len(values) != rows:
        raise FilterError(
            f"{name}: expected one number per row or token of {rows} rows, got shape {values.shape} - one row is one response"
        )
    if values.ndim == 1:
        return list(values.tolist())
    with np.errstate(invalid="ignore", over="ignore"):
        summed: list[float] = values.sum(axis=1).tolist()
    if values.dtype.kind == "f":
        for row in np.flatnonzero(np.count_nonzero(values, axis=1) > 1).tolist():
            if math.isfinite(summed[row]):
                summed[row] = math.fsum(values[row].tolist())
    return summed


def _lengths(data: Any, rows: int) -> list[int] | None:
    """Tokens that the policy sampled, by `response_mask`; None where there is none."""
    if "response_mask" not in _keys(data.batch):
        return None
    mask = _array(data.batch["response_mask"])
    if mask.ndim != 2 or len(mask) != rows:
        raise FilterError(f"response_mask: expected one row per response, {rows} of them, got shape {mask.shape} - one row is one response")
    lengths: list[int] = mask.sum(axis=1).astype(np.int64).tolist()
    return lengths


def _array(values: Any) -> npt.NDArray[Any]:
    """A tensor of any device and type, or an array, as one that holds the same numbers: floats as float64."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values
    array = np.asarray(values)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def _listed(values: Any, name: str, rows: int) -> list[Any]:
    """The entries of a column, one per row."""
    entries: list[Any] = values.tolist() if hasattr(values, "tolist") else list(values)
    if len(entries) != rows:
        raise FilterError(f"non_tensor_batch[{name!r}]: expected one entry for each of {rows} rows, got {len(entries)}")
    return entries


def _keys(batch: Any) -> set[Any]:
    return set() if batch is None else set(batch.keys())


def _select(data: Any, rows: npt.NDArray[np.intp]) -> Any:
    return data.select_idxs(rows) if hasattr(data, "select_idxs") else data[rows]


def _member_of_output(output: Any, info: Mapping[str, Any], metrics: Sequence[str]) -> Member:
    reward = output.reward_score if output.reward_score is not None or not metrics else info.get(metrics[0])
    tokens = int(sum(output.response_mask))
    return Member(reward=reward, metrics=scores_of(info, metrics), tokens=tokens, trains=tokens > 0)


def _extra(output: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(output, "extra_fields", None) or EMPTY
    return found
