"""The door to slime and miles: a filter of Sluice as the function that `--dynamic-sampling-filter-path` names.

Both frameworks call it with their arguments and the samples of one prompt, `f(args, samples, **kwargs)`, and read `keep` and `reason` of
what it answers (`DynamicFilterOutput`, in miles also called `FilterOutput`). A filter of your own is one line in a module of yours:

```python
# my_filters.py; then: --dynamic-sampling-filter-path my_filters.keep
from sluice.integrations.slime import dynamic_filter
keep = dynamic_filter({"type": "std_filter"})
```

`no_spread` in this module is that filter, ready to be named: `--dynamic-sampling-filter-path sluice.integrations.slime.no_spread`.

The surprising part: slime and miles wrap whatever is not of their own class as `keep`, and read its truth. So the answer is made with the
class of the framework that the samples come from, and ours is true exactly when it keeps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, Final

from sluice.errors import FilterError
from sluice.filters import RatioGuard, number_of
from sluice.filters.scores import named_metrics, require_named, scores_of
from sluice.integrations.judging import FilterLike, Member, group_of, query_filter, reason_of
from sluice.types import EMPTY, Group, RolloutFinish, Verdict

FRAMEWORKS: Final = ("slime", "miles")

ABORTED: Final = "aborted"  # status of a sample that could not end, through no fault of the policy: whatever it was given is no reward

_FINISHED: Final[Mapping[str, RolloutFinish]] = {"completed": "stop", "truncated": "length", "aborted": "cancelled", "failed": "cancelled"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterOutput:
    """The answer where neither framework is installed. True exactly when it keeps."""

    keep: bool
    reason: str | None = None  # None: kept
    keep_when_insufficient: bool = False  # slime: keep it all the same rather than sample another round

    def __bool__(self) -> bool:
        return self.keep


class DynamicFilter:
    """A filter of Sluice with the signature of slime's and miles' dynamic sampling filters. Made by `dynamic_filter`."""

    def __init__(
        self, given: FilterLike, *, guard: RatioGuard | None = None, min_members: int | None = None, keep_when_insufficient: bool = False
    ) -> None:
        self._filter = query_filter(given, where="dynamic_filter", min_members=min_members)
        self._guard = guard
        self._metrics = named_metrics(self._filter)
        self._keep_when_insufficient = keep_when_insufficient

    def __call__(self, args: Any, samples: Sequence[Any], **_: Any) -> Any:
        """What the framework calls, once per finished group."""
        verdict = self.judge(args, samples)
        reason = None if verdict.keep else reason_of(verdict.category, verdict.reason)
        return _answer(samples, verdict.keep, reason, self._keep_when_insufficient and verdict.category == "low_information")

    def judge(self, args: Any, samples: Sequence[Any]) -> Verdict:
        """The verdict behind the answer."""
        verdict = self._filter.judge(group_of_samples(args, samples, metrics=self._metrics))
        return verdict if self._guard is None else self._guard.admit(verdict)


def dynamic_filter(
    given: FilterLike, *, guard: RatioGuard | None = None, min_members: int | None = None, keep_when_insufficient: bool = False
) -> Callable[..., Any]:
    """Make the function that `--dynamic-sampling-filter-path` names.

    Args:
        given: a configuration, or a filter from `sluice.filters.build_query_filter`. With a `metric` it reads that entry of rewards that
            are mappings; without one it reads the reward, or the entry that `--reward-key` names.
        guard: bounds the share of judged groups that are dropped; None: no bound.
        min_members: samples with a reward that still make a group, where a configuration is given; None: all of them.
        keep_when_insufficient: slime only: a group that merely teaches nothing is trained after all where dropping it would start
            another round of sampling. Broken groups (category `invalid`) are never kept for that.

    Raises:
        ConfigError: the configuration cannot be.
    """
    return DynamicFilter(given, guard=guard, min_members=min_members, keep_when_insufficient=keep_when_insufficient)


def group_of_samples(args: Any, samples: Sequence[Any], *, metrics: Sequence[str] = ()) -> Group:
    """The samples of one prompt as a group. A sample that an agent has fanned out into several is a list of them, and has one vote; one of
    which no token trains has none. metrics: the entries of rewards that are mappings which a filter reads; the first stands for the reward
    where `--reward-key` names none.

    Raises `FilterError` for samples of different `group_index`, rewards that are no numbers, for mappings without `--reward-key` or without
    what is named in any of them, and for parts of one sample with different rewards. One sample of several that lacks what is named has no
    reward.
    """
    parts = [list(sample) if isinstance(sample, list | tuple) else [sample] for sample in samples]
    if not parts or not all(parts):
        raise FilterError("expected the samples of one prompt, got none - a group has at least one")
    reward_key = getattr(args, "reward_key", None)
    mappings = [reward for fragments in parts for fragment in fragments if isinstance(reward := _reward_of(fragment), Mapping)]
    if reward_key:
        require_named([reward_key], mappings, where="--reward-key", advice="name one")
    require_named(metrics, mappings, where="dynamic_filter.metric", advice="name one; another entry is never read in its place")
    read = reward_key or next(iter(metrics), None)
    members = [_member(fragments, index, read, metrics) for index, fragments in enumerate(parts)]
    keys = [getattr(fragments[0], "group_index", None) for fragments in parts]
    told = {key: index for index, key in reversed([*enumerate(keys)]) if key is not None}
    if len(told) > 1:
        (one, first), (other, second) = sorted(told.items(), key=lambda item: item[1])[:2]
        raise FilterError(
            f"expected the samples of one prompt, got group_index {one!r} of sample {first} and {other!r} of sample {second} - call the "
            "filter once for each group: rewards of different prompts say nothing of each other"
        )
    key = keys[0]
    return group_of(members, key=str(key), group_id=key if isinstance(key, int) else 0)


def _member(fragments: Sequence[Any], index: int, read: str | None, metrics: Sequence[str]) -> Member:
    last = fragments[-1]
    found = [_scores(fragment, index, read, metrics) for fragment in fragments]
    compared = [(reward, *[scores.get(name) for name in metrics]) for reward, scores in found]
    if any(other != compared[0] for other in compared[1:]):
        raise FilterError(
            f"sample {index}: expected one reward for all {len(fragments)} parts of one rollout, got "
            f"{[fragment.reward for fragment in fragments]} - a rollout has one reward: give each part that of the whole"
        )
    reward, scores = found[0]
    status = _status(last)
    is_aborted = any(_status(fragment) == ABORTED for fragment in fragments)
    return Member(
        reward=None if is_aborted else reward,
        metrics=EMPTY if is_aborted else scores,
        tokens=sum([_length(fragment) for fragment in fragments]),
        trains=any(_trains(fragment) for fragment in fragments),
        text=str(getattr(last, "response", "")),
        finish_reason=_FINISHED.get(status, "stop"),
        detail=f"its status is {status}",
    )


def _scores(sample: Any, index: int, read: str | None, metrics: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """The reward of a sample, None where it has none, and its named scores."""
    reward, who = _reward_of(sample), f"sample {index}"
    if not isinstance(reward, Mapping):
        return number_of(reward, who, "dynamic_filter"), {}
    if read is None:
        raise FilterError(
            f"{who}: expected one number as its reward, got a mapping with the fields {sorted(map(str, reward))} - set --reward-key to the "
            "one that trains, or the filter's metric to the one that it shall read"
        )
    scores = scores_of(reward, metrics)
    scores |= {name: number_of(scores[name], f"{who} ({name})", "dynamic_filter") for name in metrics if name in scores}
    return number_of(reward.get(read), f"{who} ({read})", "dynamic_filter"), scores


def _reward_of(sample: Any) -> Any:
    if not hasattr(sample, "reward"):
        raise FilterError(f"expected samples with a reward, or lists of them, got {type(sample).__name__} - give what the framework gave")
    return sample.reward


def _status(sample: Any) -> str:
    return str(getattr(getattr(sample, "status", None), "value", "completed"))


def _trains(sample: Any) -> bool:
    """Whether any token of it does, as far as it says."""
    is_known = getattr(sample, "loss_mask", None) is not None or getattr(sample, "response_length", None) is not None
    return not getattr(sample, "remove_sample", False) and not (is_known and _length(sample) == 0)


def _length(sample: Any) -> int:
    """Tokens that the policy sampled: those of the loss mask where there is one."""
    mask = getattr(sample, "loss_mask", None)
    return int(sum(mask)) if mask is not None else int(getattr(sample, "response_length", 0) or 0)


def _answer(samples: Sequence[Any], keep: bool, reason: str | None, keep_when_insufficient: bool) -> Any:
    first = samples[0][0] if isinstance(samples[0], list | tuple) else samples[0]
    package = type(first).__module__.partition(".")[0]
    cls: Any = FilterOutput
    if package in FRAMEWORKS and package in sys.modules:
        module = import_module(f"{package}.rollout.filter_hub.base_types")
        cls = module.DynamicFilterOutput
    extra = {"keep_when_insufficient": True} if keep_when_insufficient and "keep_when_insufficient" in {f.name for f in fields(cls)} else {}
    return cls(keep=keep, reason=reason, **extra)


no_spread = dynamic_filter({"type": "std_filter"})
"""Keeps groups whose rewards differ, whatever their size and rounding."""
