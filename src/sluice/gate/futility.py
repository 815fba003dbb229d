"""Futility stop: a single trajectory that gets nowhere is stopped, and ends with the reward that it has earned so far.

The gate cuts groups and drops them; a futility stop ends one member, which stays in its group, and whose tokens still train. What is
watched is the trajectory alone: observations that it has had before, commands that it has tried in the same place, commands that are
refused, and the environment's own progress. A policy that has got stuck rarely frees itself.

Every member has a lot, drawn by seed before anything is known of it: with probability `audit_rate` it is an audited one, which is not
stopped and tells how it would have gone on. A stop is right when the trajectory would have ended with the reward that it already had.

With `hold_precision` it stops nobody any more, and says so, once the audited share of right stops is below that floor for certain (the
upper end of its interval is); then every member tells, and it goes on when the lower end clears the floor again. A policy that learns is
the case: a rule that was careful with an early policy may be far too hasty with a later one.

A step costs the same however long the trajectory runs. What is stored of a member is one entry for each of its observations, freed with its
end; events of members that are not watched (ended, or of groups that are gone) are ignored.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, NoReturn, Protocol

from sluice.errors import ConfigError, GateError
from sluice.gate.audit import Moments, Precision, audits_needed, clopper_pearson, drawn, lower_bound_clears, saved_steps
from sluice.gate.decision import SOURCE, differ, read_reward
from sluice.gate.rules import check_share
from sluice.gate.self_audit import are_moments, is_count
from sluice.gate.traces import Step
from sluice.gate.values import check_value, is_finite_number, read_truth, short
from sluice.types import Verdict

REASONS: Final = ("no_new_observation", "loop", "invalid_actions", "no_progress")
"""Why a member is stopped by a `FutilityRule`."""

ALL_FUTILE: Final = "all_futile"
"""Reason of the verdict on a group that nobody of will earn anything else."""


class MemberWatch(Protocol):
    """What a rule sees of one trajectory."""

    def step(self, step: Step, /) -> str | None:
        """It took a step and goes on: why it is stopped, a short countable word, or None. Raises `GateError` for what it lacks."""
        ...


class MemberRule(Protocol):
    """When a trajectory is stopped: `FutilityRule`, `LearnedFutility`, or your own."""

    @property
    def name(self) -> str:
        """What the records of its audits depend on."""
        ...

    def watch(self, first_observation: Hashable = None, first_progress: float | None = None, /) -> MemberWatch:
        """For one trajectory. What the reset answered; None: not known."""
        ...

    def stop_of(self, steps: Sequence[Step], first_observation: Hashable = None, first_progress: float | None = None, /) -> int | None:
        """The same on a recorded trajectory: the first step, from 1, at which `watch` has a reason; None: never."""
        ...


@dataclass(frozen=True, kw_only=True)
class FutilityRule:
    """When a trajectory gets nowhere. Each sign is off (None) unless it is given; the first one that shows stops it.

    Raises `ConfigError` for numbers that are none, and when every sign is off.
    """

    steps: int | None = None  # environment steps in a row that answered with an observation it had had before
    loops: int | None = None  # times that it took one action after one observation
    invalid_actions: int | None = None  # actions in a row that are not admissible
    progress_steps: int | None = None  # environment steps in a row in which the environment's progress was no higher than ever before

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            least = 2 if one.name == "loops" else 1
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                why = "everything is done a first time" if one.name == "loops" else "it is a number of environment steps"
                raise ConfigError(
                    f"futility.{one.name}: expected a whole number >= {least}, got {value!r} - {why}; leave it out to switch it off"
                )
        if all(getattr(self, one.name) is None for one in fields(self)):
            raise ConfigError(
                "futility: expected at least one sign, got none - set steps (no new observation for so many steps; 6 to 8 is careful)"
            )

    @property
    def name(self) -> str:
        """What the records of its audits depend on."""
        return repr(self)

    def watch(self, first_observation: Hashable = None, first_progress: float | None = None, /) -> _Signs:
        """For one trajectory."""
        return _Signs(self, first_observation, first_progress)

    def stop_of(self, steps: Sequence[Step], first_observation: Hashable = None, first_progress: float | None = None, /) -> int | None:
        """The first step, from 1, at which a recorded trajectory is stopped; None: never."""
        watch = self.watch(first_observation, first_progress)
        return next((t for t, step in enumerate(steps, 1) if watch.step(step) is not None), None)


class _Signs:
    """The signs of one trajectory."""

    __slots__ = ("_invalid", "_last", "_progress", "_rule", "_seen", "_since_new", "_since_progress", "_tried")

    def __init__(self, rule: FutilityRule, first_observation: Hashable, first_progress: float | None) -> None:
        self._rule = rule
        self._seen: set[Hashable] = set()  # observations that it has had
        self._last: Hashable = None  # the newest one
        self._since_new = 0  # steps since the last that was new
        self._tried: dict[tuple[Hashable, Hashable], int] = {}  # (observation, action after it) -> how often
        self._invalid = 0  # actions in a row that were refused
        self._progress = -math.inf  # the most so far
        self._since_progress = 0
        if first_observation is not None:
            check_value(first_observation, "an observation")
            self._seen.add(first_observation)
            self._last = first_observation
        if first_progress is not None and rule.progress_steps is not None:
            self._progress = _finite(first_progress)

    def step(self, step: Step, /) -> str | None:
        """Take note of a step; the first sign that shows."""
        rule = self._rule
        check_value(step.reply, "an observation")
        is_admissible = read_truth(step.is_admissible, "is_admissible")
        tries = 0
        if rule.loops is not None:
            if step.action is None:
                raise GateError("expected the action of every step, which loops needs, got none - give it, or leave loops out")
            check_value(step.action, "an action")
            place = (self._last, step.action)
            tries = self._tried[place] = self._tried.get(place, 0) + 1
        is_new = step.reply not in self._seen
        self._seen.add(step.reply)
        self._last = step.reply
        self._since_new = 0 if is_new else self._since_new + 1
        self._invalid = self._invalid + 1 if is_admissible is False else 0
        if rule.progress_steps is not None:
            progress = _finite(step.progress)
            self._since_progress = 0 if progress > self._progress else self._since_progress + 1
            self._progress = max(self._progress, progress)
        shows = {
            "no_new_observation": rule.steps is not None and self._since_new >= rule.steps,
            "loop": rule.loops is not None and tries >= rule.loops,
            "invalid_actions": rule.invalid_actions is not None and self._invalid >= rule.invalid_actions,
            "no_progress": rule.progress_steps is not None and self._since_progress >= rule.progress_steps,
        }
        return next((reason for reason in REASONS if shows[reason]), None)


@dataclass(slots=True, kw_only=True)
class _Member:
    is_audited: bool  # its lot
    watch: MemberWatch
    steps: int = 0
    reason: str | None = None  # why it is stopped, or would have been
    runs_on: bool = False  # it would have been stopped, and tells how it ends
    would_earn: Any = None  # the reward that it had then
    stopped_at: int = 0  # env_step of that


@dataclass(slots=True, kw_only=True)
class _Group:
    members: dict[Hashable, _Member] = field(default_factory=dict)  # that run, or were stopped and whose end was not told yet
    earned: dict[Hashable, Any] = field(default_factory=dict)  # member -> reward of those that ended or were stopped
    stopped: int = 0


class FutilityKeeper:
    """Watches the members of running groups with a rule, and audits itself. See the top of this file.

    `audit_rate` 1 stops nobody and tells of all. `window`: audited members that count, the newest ones. `confidence`: of all intervals.
    `horizon`: most environment steps of a trajectory, for the bound on what is saved. `hold_precision`: the floor; None: it stops whatever
    the audits say. Raises `ConfigError` for settings that cannot work.
    """

    def __init__(
        self,
        rule: MemberRule,
        *,
        seed: int = 0,
        audit_rate: float = 0.1,
        window: int = 500,
        confidence: float = 0.95,
        horizon: int | None = None,
        hold_precision: float | None = None,
    ) -> None:
        if isinstance(rule, type) or not callable(getattr(rule, "watch", None)) or not hasattr(rule, "name"):
            raise ConfigError(f"futility: expected a rule with name and watch, got {short(rule)} - make a FutilityRule")
        self.rule: Final = rule
        self.seed: Final = seed
        self.audit_rate: Final = audit_rate
        self.confidence: Final = confidence
        self.horizon: Final = horizon
        self.hold_precision: Final = hold_precision
        try:
            check_share("audit_rate", audit_rate, "it is the chance that a member is audited")
            check_share("confidence", confidence, "it is a share")
            if hold_precision is not None:
                check_share("hold_precision", hold_precision, "it is a share")
        except ConfigError as error:
            raise ConfigError(f"futility.{error}") from None
        if confidence in (0, 1):
            raise ConfigError(f"futility.confidence: expected a number > 0 and < 1, got {confidence!r} - no interval has it: set 0.95")
        if hold_precision in (0, 1) or (hold_precision is not None and not audit_rate):
            raise ConfigError(
                f"futility.hold_precision: expected a number > 0 and < 1, with an audit_rate above 0, got {hold_precision!r} with "
                f"{audit_rate!r} - what is not measured cannot be held"
            )
        for name, value in (("window", window), ("horizon", horizon)):
            if value is not None and (not is_count(value) or value < 1):
                raise ConfigError(f"futility.{name}: expected a whole number >= 1, got {value!r} - it is a number of members or of steps")
        if hold_precision is not None and not lower_bound_clears(window, window, hold_precision, confidence):
            raise ConfigError(
                f"futility.window: expected at least {audits_needed(hold_precision, confidence)} audited members for hold_precision "
                f"{hold_precision}, got {window} - even if all of them are right the lower bound stays below: raise the window or lower "
                "the floor"
            )
        self._groups: dict[Hashable, _Group] = {}
        self._outcomes: deque[bool] = deque(maxlen=window)  # of audited members that would have been stopped: whether rightly
        self._counts = dict.fromkeys(("members", "would_stop", "stopped", "audited", "lost", "bound"), 0)
        self._reasons: dict[str, int] = {}  # of those that were stopped or would have been
        self._is_stopping = True
        self._remaining = Moments()  # steps that audited members took after they would have been stopped

    # ------------------------------------------------------------ what happens

    def observe(
        self,
        group_key: Hashable,
        member: Hashable,
        env_step: int,
        observation: Any,
        is_admissible: bool | None = None,
        progress: float | None = None,
        action: Any = None,
        *,
        reward: Any = 0.0,
        logprob: float | None = None,
    ) -> bool:
        """A member took an environment step and goes on: 1 for its first. True: stop it now.

        The step with which a trajectory ends is not told here: there is nothing to decide after it. Its end is told to `member_ended`.

        `observation` is what the environment answered (any hashable: the text, or a digest of the state). Step 0, with what the reset
        answered, may be told before; without it the first answer counts as new. `action`: what led there. `is_admissible`: whether it was
        among the commands that do something; None: nobody says, which is never held against it. `progress`: as the environment says, any
        number that grows. `logprob`: mean log-prob of its sampled tokens. `reward`: the sum of its step rewards so far, with which it would
        end. Steps after a stop are answered with True again. Raises `GateError` for steps out of order and for what the rule needs and was
        not given.
        """
        group = self._groups.get(group_key)
        one = None if group is None else group.members.get(member)
        if one is None:
            if env_step > 1 or (group is not None and member in group.earned):
                return False  # it ended before, or its group is gone
            if group is None:
                group = self._groups[group_key] = _Group()
            try:
                watch = self.rule.watch(*((observation, progress) if env_step == 0 else ()))
            except GateError as error:
                raise GateError(f"futility: member {member!r} of group {group_key!r}: {error}") from None
            is_audited = drawn(f"{self.seed}/futility/{group_key!r}/{member!r}", self.audit_rate)
            one = group.members[member] = _Member(is_audited=is_audited, watch=watch)
            self._counts["members"] += 1
            if env_step == 0:
                return False
        assert group is not None
        if one.reason is not None:
            one.steps = max(one.steps, env_step)
            return not one.runs_on
        if env_step != one.steps + 1:
            raise GateError(
                f"futility: expected step {one.steps + 1} of member {member!r} of group {group_key!r}, got step {env_step!r} - tell every "
                "step once and in order, and the end of a lost member before its replacement begins"
            )
        one.steps = env_step
        try:
            reason = one.watch.step(Step(action, observation, is_admissible, progress, logprob))
        except GateError as error:
            raise GateError(f"futility: member {member!r} of group {group_key!r}, step {env_step}: {error}") from None
        if reason is None:
            return False
        one.reason, one.would_earn, one.stopped_at = reason, read_reward(reward, member), env_step
        self._counts["would_stop"] += 1
        self._reasons[reason] = self._reasons.get(reason, 0) + 1
        one.runs_on = one.is_audited or not self._is_stopping
        if one.runs_on:
            return False
        self._counts["stopped"] += 1
        if self.horizon is not None:
            self._counts["bound"] += max(0, self.horizon - env_step)
        group.stopped += 1
        group.earned[member] = one.would_earn
        return True

    def member_ended(
        self, group_key: Hashable, member: Hashable, reward: Any = None, comparable: bool = True, *, env_steps: int | None = None
    ) -> str | None:
        """A member ended, stopped or not. Answers with a warning to be shown, or None.

        `comparable`: by itself or by a stop; else it failed, was lost or cancelled, and is as if it had never been: its name may be used
        again. `reward`: the final one; None: it has none. `env_steps`: all that it took; None: one more than were told.
        """
        if env_steps is not None and not is_count(env_steps):
            raise GateError(f"futility: env_steps: expected a whole number >= 0, or None, got {env_steps!r} - count all its steps")
        group = self._groups.get(group_key)
        one = None if group is None else group.members.pop(member, None)
        if group is None:
            return None
        warning = None
        if one is not None and one.runs_on:
            if env_steps is None:
                env_steps = one.steps + 1
            warning = self._tell(one, read_reward(reward, member) if comparable else None, env_steps)
        if not comparable:
            if group.earned.pop(member, None) is not None and one is not None and one.reason is not None:
                group.stopped -= 1
        elif member not in group.earned or reward is not None:
            group.earned[member] = read_reward(reward, member)
        return warning

    def verdict(self, group_key: Hashable, members: int) -> Verdict | None:
        """The verdict on a group of which at least one member was stopped, as soon as it is known: a drop once `members` of it have ended
        or were stopped and all have the same reward. None: it may still teach something, or the filters judge it as any other.

        An audited member runs on, and so does its group.
        """
        group = self._groups.get(group_key)
        if group is None or not group.stopped or len(group.earned) < members:
            return None
        rewards = [*group.earned.values()]
        if any(reward is None for reward in rewards) or differ(rewards):
            return None
        evidence = {"n": len(rewards), "stopped": group.stopped, "reward": float(rewards[0])}
        return Verdict.dropped(ALL_FUTILE, "low_information", SOURCE, evidence)

    def reason(self, group_key: Hashable, member: Hashable) -> str | None:
        """Why a member is stopped, or, audited, would have been; until its end is told. None: it is not."""
        group = self._groups.get(group_key)
        one = None if group is None else group.members.get(member)
        return None if one is None else one.reason

    def group_ended(self, group_key: Hashable) -> None:
        """A group left, whatever became of it: its memory is freed. Audited members of it that still run are counted as lost."""
        group = self._groups.pop(group_key, None)
        for one in [] if group is None else group.members.values():
            if one.runs_on:
                self._tell(one, None, 0)

    # ------------------------------------------------------------ what it knows

    @property
    def is_stopping(self) -> bool:
        """Whether a member may be stopped now."""
        return self._is_stopping and self.audit_rate < 1

    @property
    def watched(self) -> int:
        """Groups that something is stored of."""
        return len(self._groups)

    @property
    def precision(self) -> Precision:
        """Of the audited members that count and would have been stopped: how many ended with the reward that they had then.

        The interval is the exact one. It takes members for independent of each other, which those of one group are not quite.
        """
        right, n = sum(self._outcomes), len(self._outcomes)
        low, high = clopper_pearson(right, n, self.confidence)
        return Precision(right=right, n=n, value=right / n if n else None, low=low, high=high)

    def metrics(self, tokens_per_env_step: float | None = None) -> dict[str, float]:
        """`gate/futile_...` over the whole run (the precision: of the newest ones); names without a value yet are left out.

        `tokens_per_env_step`, measured by whoever counts tokens, makes tokens of the saved steps.
        """
        counts = self._counts
        shown: dict[str, float] = {
            "gate/futile_would_stop": counts["would_stop"],
            "gate/futile_stopped": counts["stopped"],
            "gate/futile_is_stopping": float(self.is_stopping),
            "gate/futile_audited": counts["audited"],
            "gate/futile_audited_lost": counts["lost"],
            **{f"gate/futile_reason/{reason}": n for reason, n in sorted(self._reasons.items())},
        }
        if counts["members"]:
            shown["gate/futile_rate"] = counts["would_stop"] / counts["members"]
        precision = self.precision
        if precision.value is not None:
            shown |= {
                "gate/futile_precision": precision.value,
                "gate/futile_precision_low": precision.low,
                "gate/futile_precision_high": precision.high,
            }
        saved = saved_steps(self._remaining, counts["stopped"], None if self.horizon is None else counts["bound"], self.confidence)
        shown |= {f"gate/futile_env_steps_saved_{name}": value for name, value in saved.items()}
        if tokens_per_env_step is not None:
            shown |= {f"gate/futile_tokens_saved_{name}": value * tokens_per_env_step for name, value in saved.items()}
        return shown

    def state_dict(self) -> dict[str, Any]:
        """What it learnt and counted, as plain data. Running groups are not in it: they restart whole, and audited ones count as lost."""
        running = sum(one.runs_on for group in self._groups.values() for one in group.members.values())
        return {
            "rule": self.rule.name,
            "is_stopping": self._is_stopping,
            "outcomes": [*self._outcomes],
            "counts": {**self._counts, "lost": self._counts["lost"] + running},
            "reasons": dict(self._reasons),
            "remaining": [self._remaining.n, self._remaining.mean, self._remaining.squares],
        }

    def load_state_dict(self, state: Any) -> None:
        """Go on from a state, without any running group. Raises `GateError`, and changes nothing, when it is torn or of another rule."""
        own = self.state_dict()
        if not isinstance(state, Mapping) or set(state) != set(own):
            _refuse(f"expected a mapping with {sorted(own)}, got {sorted(map(str, state)) if isinstance(state, Mapping) else state!r}")
        if state["rule"] != own["rule"]:
            _refuse(f"expected that of {own['rule']}, got that of {state['rule']}")
        counts, remaining, outcomes = state["counts"], state["remaining"], state["outcomes"]
        if not isinstance(counts, Mapping) or set(counts) != set(own["counts"]) or not all(map(is_count, counts.values())):
            _refuse(f"expected counts of {sorted(own['counts'])}, got {counts!r}")
        if not isinstance(state["reasons"], Mapping) or not all(map(is_count, state["reasons"].values())):
            _refuse(f"expected counts of reasons, got {state['reasons']!r}")
        if not isinstance(state["is_stopping"], bool):
            _refuse(f"expected is_stopping as true or false, got {state['is_stopping']!r}")
        if not isinstance(outcomes, list) or not all(isinstance(outcome, bool) for outcome in outcomes):
            _refuse(f"expected outcomes as true and false, got {outcomes!r}")
        if not are_moments(remaining):
            _refuse(f"expected number, mean and squares of remaining steps, got {remaining!r}")
        self._groups.clear()
        self._is_stopping = state["is_stopping"]
        self._outcomes = deque(outcomes, maxlen=self._outcomes.maxlen)
        self._counts = {name: counts[name] for name in own["counts"]}
        self._reasons = {str(reason): n for reason, n in state["reasons"].items()}
        self._remaining = Moments(n=remaining[0], mean=float(remaining[1]), squares=float(remaining[2]))

    # ------------------------------------------------------------ how it decides

    def _tell(self, one: _Member, reward: Any, env_steps: int) -> str | None:
        """A member that would have been stopped has ended; None: nobody knows how. Answers with a warning, or None."""
        if reward is None:
            self._counts["lost"] += 1
            return None
        self._counts["audited"] += 1
        self._outcomes.append(not differ([reward, one.would_earn]))
        self._remaining.add(max(0, env_steps - one.stopped_at))
        if self.hold_precision is None:
            return None
        seen = self.precision
        if not self._is_stopping:
            self._is_stopping = seen.low >= self.hold_precision
            return None
        if seen.high >= self.hold_precision:
            return None
        self._is_stopping = False
        self._outcomes.clear()  # what comes now is of the policy that it was wrong about
        return (
            f"futility: switched off, since it does not hold gate.futility.hold_precision {self.hold_precision}: of {seen.n} audited stops "
            f"{seen.right} were right, which leaves an upper bound of {seen.high:.3f} - it goes on watching, and stops again when a lower "
            "bound clears it; make its rule more careful, or learn it again from newer recordings"
        )


def _finite(progress: Any) -> float:
    if not is_finite_number(progress):
        raise GateError(
            f"expected the environment's progress with every step, which progress_steps needs, got {progress!r} - choose an environment "
            "that says it, or leave progress_steps out"
        )
    return float(progress)


def _refuse(reason: str) -> NoReturn:
    raise GateError(f"futility: the state is torn, or of another rule: {reason} - go on from a checkpoint of this run")
