"""Watches running groups with a rule that looks at them again and again, and cuts a group at the first look that is sure enough.

`SequentialKeeper` is asked and told like `GateKeeper`, so that whoever runs groups can take either; it needs more of every step (the inputs
of its rule). A group is looked at after step t as soon as `group_size` of its members have taken t steps or ended by themselves: the first
ones to get there. Members that run ahead do not wait, and are looked at as they were after step t, so that a running group gives the
numbers that the rule was fitted on.

Audits are those of `self_audit.py`; the margin of a group is the lowest of its looks. An audited group is looked at to its end.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sluice.errors import ConfigError, GateError
from sluice.gate.decision import SOURCE, differ, read_rewards
from sluice.gate.exact import IDENTICAL, ExactStop
from sluice.gate.learned import LearnedRule, threshold
from sluice.gate.self_audit import AuditedKeeper, SelfAudit
from sluice.gate.traces import GroupTrace, Look, Step, check_horizon
from sluice.types import Verdict

PREDICTED: Final = "predicted_equal"
"""Reason of a cut by the learned rule."""


@dataclass(slots=True, kw_only=True)
class _Group:
    trace: GroupTrace
    is_audited: bool  # its lot
    expected: int  # members that run, ended, or will be launched in place of lost ones
    next_look: int = 0  # place in the steps of the keeper
    tells: bool = True
    margin: float = math.inf  # the lowest so far
    evidence: dict[str, float] | None = None  # of the newest look
    is_decided: bool = False  # its verdict was given
    would_cut: bool = False
    steps_after: int = 0  # environment steps of all its members since it would have been cut


class SequentialKeeper(AuditedKeeper):
    """Decides on running groups with a `LearnedRule`, with the exact stop, or with both. See the top of this file.

    `floor`: a group is cut when the rule's lower bound of its own precision is at least this. `exact`: what is declared of environment and
    policy; None: no exact stop. `group_size` members make a group, and up to `redundancy` more of them run. The other settings are those of
    `GateKeeper`. Raises `ConfigError` for settings that cannot work, a rule of other groups, and a floor that no look can clear.
    """

    def __init__(
        self,
        rule: LearnedRule | None,
        *,
        group_size: int,
        horizon: int,
        floor: float = 0.95,
        exact: ExactStop | None = None,
        redundancy: int = 0,
        seed: int = 0,
        audit_rate: float = 0.1,
        shadow: bool = False,
        hold_precision: float | None = None,
        most_scale: float = 2.0,
        window: int = 200,
        confidence: float = 0.95,
    ) -> None:
        if rule is None and exact is None:
            raise ConfigError("gate: expected a fitted rule, the exact stop or both, got neither - fit a rule on recorded groups")
        self.rule: Final = rule
        self.exact: Final = exact
        self.group_size: Final = group_size
        self.horizon: Final = horizon
        try:
            check_horizon(horizon)
        except ConfigError as error:
            raise ConfigError(f"gate.{error}") from None
        if rule is not None:
            rule.check(group_size, horizon)
        self.threshold: Final = math.inf if rule is None else threshold(rule.group_calibration, floor)
        self.inputs: Final = ("reply",) if rule is None else rule.inputs
        if exact is not None and "reply" not in self.inputs:
            raise ConfigError("gate.exact: expected a rule that was fitted with replies, got one without - fit it again with input reply")
        every = range(1, horizon) if exact is not None else ()
        self.steps: Final = tuple(sorted({*every, *(() if rule is None else rule.steps)}))
        self._looks_of_rule: Final = frozenset(() if rule is None else rule.steps)
        self._audit = SelfAudit(
            f"sequential {'' if rule is None else rule.fingerprint} floor={floor} exact={exact}",
            group_size=group_size,
            redundancy=redundancy,
            seed=seed,
            audit_rate=audit_rate,
            shadow=shadow,
            hold_precision=hold_precision,
            most_scale=most_scale,
            window=window,
            confidence=confidence,
            horizon=horizon,
        )
        self._groups: dict[Hashable, _Group] = {}

    # ------------------------------------------------------------ what happens

    def group_launched(self, group_key: Hashable, *, task_type: str | None = None) -> None:
        """A group begins. It is watched until it is cut or nothing can be said of it any more and, if it tells, until it has ended."""
        if group_key in self._groups:
            raise GateError(f"gate: expected a group that is not watched yet, got {group_key!r} again - tell group_ended first")
        self._groups[group_key] = _Group(
            trace=GroupTrace(self.horizon, self.inputs),
            is_audited=self._audit.is_audited(group_key),
            expected=self.group_size + self._audit.redundancy,
        )

    def task_type_known(self, group_key: Hashable, task_type: str | None) -> None:
        """The environment said what kind of problem a group has: nothing here depends on it."""

    def observe(
        self,
        group_key: Hashable,
        member: Hashable,
        env_step: int,
        action: Hashable,
        observation: Any = None,
        *,
        reply: Any = None,
        is_admissible: bool | None = None,
        progress: float | None = None,
        logprob: float | None = None,
    ) -> None:
        """A member took an environment step: 1 for its first. `observation`: what it saw before it; the rest: `Step`."""
        group = self._groups.get(group_key)
        if group is None:
            return
        trace = group.trace
        if env_step != trace.steps_of(member) + 1 or trace.has_ended(member):
            expected = "no further step" if trace.has_ended(member) else f"step {trace.steps_of(member) + 1}"
            raise GateError(
                f"gate: expected {expected} of member {member!r} of group {group_key!r}, got step {env_step!r} - tell every step once and "
                "in order, and the end of a lost member before its replacement begins"
            )
        step = Step(action, reply, is_admissible, progress, logprob)
        try:
            trace.add(member, step, observation if env_step == 1 else None)
        except GateError as error:
            raise GateError(f"gate: group {group_key!r}, step {env_step}, {error}") from None
        group.steps_after += group.would_cut

    def member_ended(
        self, group_key: Hashable, member: Hashable, reward: Any = None, comparable: bool = True, *, is_replaced: bool = True
    ) -> None:
        """A member ended, as for `GateKeeper`."""
        group = self._groups.get(group_key)
        if group is None:
            return
        if comparable:
            group.trace.end(member, reward)
        else:
            group.trace.forget(member)
            group.expected -= not is_replaced

    def decision(self, group_key: Hashable) -> Verdict | None:
        """The verdict on a group, once: a drop cuts it; a keep says in its reason why it runs on though it would have been cut (`audited`,
        `shadow`, `switched_off`), or that nothing more will be looked at (`kept`). None: there is none to make now.
        """
        group = self._groups.get(group_key)
        while group is not None:
            if group.next_look >= len(self.steps) or differ(group.trace.rewards) or group.expected < 2:
                return self._close(group_key, group)
            at = self.steps[group.next_look]
            needed = min(self.group_size, group.expected)
            there = group.trace.comparable(at)
            if len(there) < needed:
                return None
            look = group.trace.look(at, there[:needed])
            if any(reward is None for reward in look.rewards):
                return None  # told later
            if not look.is_open:
                return self._close(group_key, group)
            group.next_look += 1
            if (verdict := self._look(group_key, group, look)) is not None:
                return verdict
        return None

    def holds(self, group_key: Hashable, member: Hashable) -> bool:
        """Whether a member has come to the next look at its group: with a barrier it waits for it."""
        group = self._groups.get(group_key)
        if group is None or group.is_decided or group.next_look >= len(self.steps) or group.trace.has_ended(member):
            return False
        at: int = self.steps[group.next_look]
        return group.trace.steps_of(member) >= at

    def group_ended(self, group_key: Hashable, rewards: Sequence[Any] | None = None) -> str | None:
        """A group left, as for `GateKeeper`."""
        group = self._groups.pop(group_key, None)
        if group is None or group.evidence is None:
            return None
        if not group.is_decided:  # it ended before the next look
            self._audit.counts["judged"] += 1
        if not group.tells:
            return None
        known = [] if rewards is None else [reward for reward in read_rewards(rewards) if reward is not None]
        if len(known) < 2:
            self._audit.counts["untold"] += 1
            return None
        return self._audit.told(group.margin, not differ(known), group.steps_after if group.would_cut else None)

    # ------------------------------------------------------------ what it knows

    def state_dict(self) -> dict[str, Any]:
        """As that of `GateKeeper`."""
        seen = [group for group in self._groups.values() if group.evidence is not None]
        return self._audit.state_dict(judged=sum(not group.is_decided for group in seen), untold=sum(group.tells for group in seen))

    # ------------------------------------------------------------ how it decides

    def _look(self, group_key: Hashable, group: _Group, look: Look) -> Verdict | None:
        """What one look comes to."""
        audit = self._audit
        evidence: dict[str, float] = {"k": look.step, "n": len(look.members), "running": len(look.running), "scale": audit.scale}
        margin, reason = math.inf, PREDICTED
        if self.exact is not None and look.are_identical:
            margin, reason = 0.0, IDENTICAL
        elif self.rule is not None and look.step in self._looks_of_rule:
            score = self.rule.of_group(look)
            margin = _margin(score.score, self.threshold)
            evidence |= {"score": score.score, "chance": score.chance, "bound": score.bound, "threshold": self.threshold}
        group.evidence = evidence | {"margin": margin}
        group.margin = min(group.margin, margin)
        group.tells = group.tells and (group.is_audited or not audit.is_cutting)
        ruling = audit.rule_on(margin, group.is_audited)
        if ruling == "kept" or group.is_decided:
            return None
        audit.counts["judged"] += 1
        audit.counts["would_cut"] += 1
        group.is_decided = group.would_cut = True
        if ruling != "cut":
            return Verdict.kept(SOURCE, ruling, group.evidence)
        audit.counts["cut"] += 1
        trace = group.trace
        left = [max(0, self.horizon - trace.steps_of(member)) for member in trace.members if not trace.has_ended(member)]
        audit.saved_at_most(sum(left) + max(0, group.expected - len(trace.members)) * self.horizon)
        del self._groups[group_key]
        return Verdict.dropped(reason, "low_information", SOURCE, group.evidence)

    def _close(self, group_key: Hashable, group: _Group) -> Verdict | None:
        """Nothing more will be looked at."""
        is_told, group.is_decided = group.is_decided, True
        if group.evidence is None:
            self._audit.counts["undecided"] += 1
            del self._groups[group_key]
            return None
        if not is_told:
            self._audit.counts["judged"] += 1
        group.next_look = len(self.steps)
        if not group.tells:
            del self._groups[group_key]
        return None if is_told else Verdict.kept(SOURCE, evidence=group.evidence)


def _margin(score: float, threshold: float) -> float:
    """Below 1 exactly where the score is at least the threshold: how far it is from certainty, in units of the threshold's distance."""
    if score >= threshold:
        return min((1 - score) / (1 - threshold), 1 - 1e-12)
    return max((1 - score) / (1 - threshold), 1.0)
