"""What a running trajectory and a running group have shown so far, as numbers.

`MemberTrace` is of one trajectory: told of every step, it has its features after each. `GroupTrace` is of a group: told of every step and
every end, in any interleaving, it can be looked at after any environment step t, and then tells what is known when every member has taken t
steps or has ended before. Members that run ahead are looked at as they were after step t, so that a running group and a recorded one give
the same numbers. A step costs the same however long a trajectory is; a look costs one edit distance for each pair of members.

Everything is counted within a trajectory, or compared between the members of one group: no word of an environment is known here. What is
told beside the actions is optional, but for all steps or for none (`inputs`):

- `reply`: what the environment answered, so that what is new can be told from what was there before
- `is_admissible`: whether an action was among the commands that do something
- `progress`: how far the environment says that the goal is reached
- `logprob`: mean log-prob of the sampled tokens of the action
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sluice.errors import ConfigError, GateError
from sluice.gate.decision import differ, read_reward
from sluice.gate.divergence import SIGNALS, encoded_signals, mixed_types
from sluice.gate.values import check_value, is_finite_number, read_truth

Floats = npt.NDArray[np.float64]

INPUTS: Final = ("reply", "is_admissible", "progress", "logprob")
"""What may be told of a step beside its action."""

RECENT: Final = 5  # steps that count as recent

_OF_STEP: Final[Mapping[str, tuple[str, ...]]] = {  # input -> the features of a member that need it; "": the action alone
    "": ("repeat_share", "repeat_recent"),
    "reply": ("since_new", "new_share", "new_recent", "loop_share", "loop_recent", "loop_most"),
    "is_admissible": ("refused_share", "refused_recent", "refused_row"),
    "progress": ("progress", "progress_best", "since_progress"),
    "logprob": ("logprob_mean", "logprob_recent"),
}
_TIME: Final = ("step", "time_left")
_GROUP: Final = (*_TIME, "share_ended", "ended_reward")
_SIGNALS: Final = tuple(name for name in SIGNALS if name not in ("obs_unique_ratio", "termination_fraction"))
_SPREAD: Final = ("mean", "least", "most")  # of a feature over the running members


def member_features(inputs: Iterable[str] = INPUTS) -> tuple[str, ...]:
    """The names of what is known of a running member, with these inputs."""
    return (*_own(inputs), *_TIME)


def group_features(inputs: Iterable[str] = INPUTS) -> tuple[str, ...]:
    """The names of what is known of a group that still runs, with these inputs."""
    own = _own(inputs)
    seen = ("reply_unique_ratio",) if "since_new" in own else ()
    return (*_GROUP, *_SIGNALS, *seen, *(f"{name}_{way}" for name in own for way in _SPREAD))


def check_inputs(inputs: Iterable[str]) -> tuple[str, ...]:
    """Known inputs, in order. Raises `ConfigError`."""
    given = [inputs] if isinstance(inputs, str) else [*inputs]
    for one in given:
        if one not in INPUTS:
            raise ConfigError(f"inputs: expected some of {', '.join(INPUTS)}, got {one!r} - name what every step brings")
    return tuple(one for one in INPUTS if one in given)


def _own(inputs: Iterable[str]) -> list[str]:
    given = check_inputs(inputs)
    return [name for kind, names in _OF_STEP.items() if not kind or kind in given for name in names]


class Step(NamedTuple):
    """One environment step of a member. What is no input of a trace is not read."""

    action: Hashable
    reply: Hashable = None  # what the environment answered; of the last step of a trajectory it is not needed
    is_admissible: bool | None = None
    progress: float | None = None  # after the step; any number that grows
    logprob: float | None = None


class MemberTrace:
    """What one trajectory has shown. `inputs`: checked ones.

    `first_observation`: what the reset answered; None: not known, then the first reply counts as new.
    """

    __slots__ = (
        "_horizon", "_inputs", "_last", "_loop_most", "_progress", "_progress_best", "_recent", "_refused_row", "_replies", "_since_new",
        "_since_progress", "_steps", "_sums", "_taken", "_tried",
    )  # fmt: skip

    def __init__(self, horizon: int, inputs: tuple[str, ...], first_observation: Hashable = None) -> None:
        self._horizon = horizon
        self._inputs = inputs
        self._steps = 0
        self._replies: set[Hashable] = set()
        self._last: Hashable = None  # the newest observation
        self._taken: set[Hashable] = set()
        self._tried: dict[tuple[Hashable, Hashable], int] = {}  # (observation, action after it) -> how often
        self._recent: dict[str, deque[float]] = {}  # of what is counted or summed up
        self._sums: dict[str, float] = {}
        self._since_new = self._loop_most = self._refused_row = self._since_progress = 0
        self._progress = 0.0
        self._progress_best = -math.inf
        if "reply" in inputs and first_observation is not None:
            check_value(first_observation, "an observation")
            self._replies.add(first_observation)
            self._last = first_observation

    def add(self, step: Step) -> tuple[float, ...]:
        """The next step. Answers with the features after it: `member_features`. Raises `GateError` for an input that is missing."""
        inputs = self._inputs
        self._steps += 1
        check_value(step.action, "an action")
        row = self._note("repeat", step.action in self._taken)
        self._taken.add(step.action)
        if "reply" in inputs:
            check_value(step.reply, "a reply")
            place = (self._last, step.action)
            tries = self._tried[place] = self._tried.get(place, 0) + 1
            self._loop_most = max(self._loop_most, tries)
            is_new = step.reply not in self._replies
            self._replies.add(step.reply)
            self._last = step.reply
            self._since_new = 0 if is_new else self._since_new + 1
            row += [self._since_new, *self._note("new", is_new), *self._note("loop", tries > 1), self._loop_most]
        if "is_admissible" in inputs:
            is_admissible = read_truth(step.is_admissible, "is_admissible")
            if is_admissible is None:
                raise _missing("is_admissible", None)
            self._refused_row = 0 if is_admissible else self._refused_row + 1
            row += [*self._note("refused", not is_admissible), self._refused_row]
        if "progress" in inputs:
            self._progress = _finite("progress", step.progress)
            self._since_progress = 0 if self._progress > self._progress_best else self._since_progress + 1
            self._progress_best = max(self._progress_best, self._progress)
            row += [self._progress, self._progress_best, self._since_progress]
        if "logprob" in inputs:
            row += self._note("logprob", _finite("logprob", step.logprob))
        return (*map(float, row), float(self._steps), (self._horizon - self._steps) / self._horizon)

    def _note(self, name: str, value: float) -> list[float]:
        """One more value of a kind. Answers with its mean so far, and that of the newest ones."""
        recent = self._recent.get(name)
        if recent is None:
            recent = self._recent[name] = deque(maxlen=RECENT)
        recent.append(value)
        total = self._sums[name] = self._sums.get(name, 0.0) + value
        return [total / self._steps, math.fsum(recent) / len(recent)]


@dataclass(slots=True, kw_only=True)
class _Member:
    trace: MemberTrace
    first: Hashable  # observation; None: not known
    prefix: list[str] = field(default_factory=list)  # encoded actions
    replies: list[Hashable] = field(default_factory=list)
    rows: list[tuple[float, ...]] = field(default_factory=list)  # its features after each step
    arrived: list[int] = field(default_factory=list)  # when it took each step, in the order of events
    history: list[int] = field(default_factory=list)  # number of what it has done and seen up to each step; equal for equal histories
    has_ended: bool = False
    ended_at: int = 0  # in the order of events
    reward: Any = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Look:
    """What is known of a group after step t."""

    step: int
    members: tuple[Hashable, ...]  # that were looked at
    running: tuple[Hashable, ...]  # those of them that still run
    of_members: Floats  # [R, F] of the running ones: `member_features`
    of_group: Floats  # [F] `group_features`
    rewards: tuple[Any, ...]  # of those that have ended
    is_open: bool  # somebody still runs, and those that have ended agree
    are_identical: bool  # all of them still run, and have done and seen exactly the same


class GroupTrace:
    """What one running group has shown. See the top of this file. Members are named by any hashable.

    `horizon`: most environment steps of a trajectory. `inputs`: what every step brings. Raises `ConfigError` for settings that cannot be.
    """

    def __init__(self, horizon: int, inputs: Iterable[str] = INPUTS) -> None:
        check_horizon(horizon)
        self.horizon: Final = horizon
        self.inputs: Final = check_inputs(inputs)
        self._members: dict[Hashable, _Member] = {}
        self._actions: dict[Hashable, str] = {}
        self._kind: Any = None  # the type of the actions
        self._histories: dict[tuple[Any, Hashable, Hashable], int] = {}  # (history before, action, reply) -> number
        self._events = count()

    # ------------------------------------------------------------ what happens

    def add(self, member: Hashable, step: Step, first_observation: Hashable = None) -> None:
        """The next environment step of a member. `first_observation`: what the reset answered, with its first step."""
        one = self._members.get(member)
        if one is not None and one.has_ended:
            raise GateError(f"member {member!r}: expected no step after its end, got {step.action!r} - forget it before it is replaced")
        try:
            if one is None:
                check_value(first_observation, "an observation")
                trace = MemberTrace(self.horizon, self.inputs, first_observation)
                one = self._members[member] = _Member(trace=trace, first=first_observation)
            if self._kind not in (None, type(step.action)):
                raise mixed_types({self._kind, type(step.action)})
            row = one.trace.add(step)
        except GateError as error:
            raise GateError(f"member {member!r}: {error}") from None
        self._kind = type(step.action)
        code = self._actions.get(step.action)
        if code is None:
            code = self._actions[step.action] = chr(len(self._actions) + 1)
        reply = step.reply if "reply" in self.inputs else None
        before = one.history[-1] if one.history else ("first", one.first)
        one.rows.append(row)
        one.prefix.append(code)
        one.replies.append(reply)
        one.arrived.append(next(self._events))
        one.history.append(self._histories.setdefault((before, step.action, reply), len(self._histories)))

    def end(self, member: Hashable, reward: Any = None) -> None:
        """A member ended by itself. `reward`: None while it is not known; tell it again when it is."""
        one = self._members.get(member)
        if one is None:
            one = self._members[member] = _Member(trace=MemberTrace(self.horizon, self.inputs), first=None)
        if not one.has_ended:
            one.has_ended, one.ended_at = True, next(self._events)
        one.reward = read_reward(reward, member)

    def forget(self, member: Hashable) -> None:
        """A member failed, was lost or cancelled: it is as if it had never been. Its name may be used again."""
        self._members.pop(member, None)

    # ------------------------------------------------------------ what it knows

    @property
    def members(self) -> tuple[Hashable, ...]:
        """All that took a step or ended."""
        return tuple(self._members)

    @property
    def rewards(self) -> list[Any]:
        """Of all members that ended; None: not known."""
        return [one.reward for one in self._members.values() if one.has_ended]

    def steps_of(self, member: Hashable) -> int:
        """How many steps a member has taken."""
        one = self._members.get(member)
        return 0 if one is None else len(one.prefix)

    def has_ended(self, member: Hashable) -> bool:
        """Whether the end of a member was told."""
        one = self._members.get(member)
        return one is not None and one.has_ended

    def comparable(self, step: int) -> list[Hashable]:
        """The members that have taken `step` steps, or have ended; the first one to get there first."""
        there = [
            (one.arrived[step - 1] if len(one.prefix) >= step else one.ended_at, name)
            for name, one in self._members.items()
            if len(one.prefix) >= step or one.has_ended
        ]
        return [name for _, name in sorted(there, key=lambda entry: entry[0])]

    def look(self, step: int, members: Sequence[Hashable] | None = None) -> Look:
        """What is known after `step` steps of the given members, or of all comparable ones. Raises `GateError` for one that is not."""
        chosen = self.comparable(step) if members is None else [*members]
        if len(chosen) < 2:
            raise GateError(f"expected at least two members to look at, got {len(chosen)} - one alone has no pair to compare")
        there = []
        for name in chosen:
            one = self._members.get(name)
            if one is None or (len(one.prefix) < step and not one.has_ended):
                raise GateError(f"expected members with {step} steps or ended ones, got {name!r} with {self.steps_of(name)} - wait for it")
            there.append(one)
        runs = [len(one.prefix) > step or not one.has_ended for one in there]
        running = [one for one, is_running in zip(there, runs, strict=True) if is_running]
        rewards = [one.reward for one, is_running in zip(there, runs, strict=True) if not is_running]
        rows = [one.rows[step - 1] for one in running]
        return Look(
            step=step,
            members=tuple(chosen),
            running=tuple(name for name, is_running in zip(chosen, runs, strict=True) if is_running),
            of_members=np.array(rows, dtype=np.float64).reshape(len(rows), len(member_features(self.inputs))),
            of_group=np.array(self._of_group(step, there, running, rewards, rows), dtype=np.float64),
            rewards=tuple(rewards),
            is_open=bool(running) and not differ(rewards),
            are_identical=len(running) == len(there) and len({one.history[step - 1] for one in there}) == 1,
        )

    def _of_group(
        self, step: int, there: list[_Member], running: list[_Member], rewards: list[Any], rows: list[tuple[float, ...]]
    ) -> list[float]:
        """In the order of `group_features`."""
        texts = ["".join(one.prefix[:step]).ljust(step, "\0") for one in there]
        signals = encoded_signals(texts, len(self._actions) + 1, len(rewards), None, step)
        earned = [float(reward) for reward in rewards if reward is not None]
        told = [float(step), (self.horizon - step) / self.horizon, len(rewards) / len(there), _mean(earned)]
        told += [signals[name] for name in _SIGNALS]
        if "reply" in self.inputs:  # END is a reply like any other
            told.append((len({one.replies[step - 1] for one in running}) + bool(rewards)) / len(there))
        if not rows:
            return told + [0.0] * (len(group_features(self.inputs)) - len(told))
        for column in [*zip(*rows, strict=True)][: -len(_TIME)]:
            told += [_mean(column), min(column), max(column)]
        return told


def check_horizon(horizon: object) -> None:
    """Refuse what is no horizon. Raises `ConfigError`."""
    if isinstance(horizon, bool) or not isinstance(horizon, int) or horizon < 1:
        raise ConfigError(f"horizon: expected a whole number >= 1, got {horizon!r} - it is the most environment steps of a trajectory")


def _mean(values: Sequence[float]) -> float:
    """Rounded once, so that the order does not matter. 0 for none."""
    return math.fsum(values) / len(values) if values else 0.0


def _finite(name: str, value: Any) -> float:
    if not is_finite_number(value):
        raise _missing(name, value)
    return float(value)


def _missing(name: str, value: Any) -> GateError:
    return GateError(f"expected {name} with every step, got {value!r} - give it, or leave it out of inputs")
