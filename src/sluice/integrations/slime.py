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
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, Final

from sluice.errors import FilterError
from sluice.filters import RatioGuard
from sluice.integrations.judging import FilterLike, Member, group_of, named_metric, query_filter, reason_of
from sluice.types import Group, RolloutFinish, Verdict

FRAMEWORKS: Final = ("slime", "miles")

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
        self._metric = named_metric(self._filter)
        self._keep_when_insufficient = keep_when_insufficient

    def __call__(self, args: Any, samples: Sequence[Any], **_: Any) -> Any:
        """What the framework calls, once per finished group."""
        verdict = self.judge(args, samples)
        reason = None if verdict.keep else reason_of(verdict.category, verdict.reason)
        return _answer(samples, verdict.keep, reason, self._keep_when_insufficient and verdict.category == "low_information")

    def judge(self, args: Any, samples: Sequence[Any]) -> Verdict:
        """The verdict behind the answer."""
        verdict = self._filter.judge(group_of_samples(args, samples, metric=self._metric))
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


def group_of_samples(args: Any, samples: Sequence[Any], *, metric: str | None = None) -> Group:
    """The samples of one prompt as a group. A sample that an agent has fanned out into several is a list of them, and has one vote.
    metric: the entry of rewards that are mappings which stands for the reward where `--reward-key` names none.

    Raises `FilterError` for rewards that are mappings without `--reward-key`, and for parts of one sample with different rewards.
    """
    parts = [list(sample) if isinstance(sample, list | tuple) else [sample] for sample in samples]
    if not parts or not all(parts):
        raise FilterError("expected the samples of one prompt, got none - a group has at least one")
    members = []
    for index, fragments in enumerate(parts):
        rewards: dict[Hashable, Any] = {_as_key(fragment.reward): fragment.reward for fragment in fragments}
        if len(rewards) > 1:
            raise FilterError(
                f"sample {index}: expected one reward for all {len(fragments)} parts of one rollout, got {list(rewards.values())} - a "
                "rollout has one reward: give each part that of the whole"
            )
        members.append(_member(args, fragments, index, metric))
    first = parts[0][0]
    key = getattr(first, "group_index", None)
    return group_of(members, key=str(key), group_id=key if isinstance(key, int) else 0)


def _member(args: Any, fragments: Sequence[Any], index: int, metric: str | None) -> Member:
    last = fragments[-1]
    reward, metrics = fragments[0].reward, {}
    reward_key = getattr(args, "reward_key", None)
    if isinstance(reward, Mapping):
        metrics = {str(name): value for name, value in reward.items() if isinstance(value, bool | int | float)}
        if reward_key and reward_key not in reward:
            raise FilterError(
                f"sample {index}: --reward-key is {reward_key!r}, but its reward has only {sorted(map(str, reward))} - name one"
            )
        if not reward_key and metric is None:
            raise FilterError(
                f"sample {index}: expected one number as its reward, got a mapping with the fields {sorted(map(str, reward))} - set "
                "--reward-key to the one that trains, or the filter's metric to the one that it shall read"
            )
        reward = reward.get(reward_key or metric)
    status = str(getattr(getattr(last, "status", None), "value", "completed"))
    return Member(
        reward=None if reward is None else float(reward),
        metrics=metrics,
        tokens=sum([_length(fragment) for fragment in fragments]),
        text=str(getattr(last, "response", "")),
        finish_reason=_FINISHED.get(status, "stop"),
        detail=f"its status is {status}",
    )


def _length(sample: Any) -> int:
    """Tokens that the policy sampled: those of the loss mask where there is one."""
    mask = getattr(sample, "loss_mask", None)
    return int(sum(mask)) if mask is not None else int(getattr(sample, "response_length", 0) or 0)


def _as_key(reward: Any) -> Hashable:
    return tuple(sorted((str(name), value) for name, value in reward.items())) if isinstance(reward, Mapping) else reward


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
