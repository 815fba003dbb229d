"""Watches running groups: is told of every environment step, and answers once per group whether it is cut.

A group is looked at when as many of its members as it needs are comparable: have K actions, or ended by themselves. Those are the
first `group_size` to get there, of whatever runs; fewer when members were lost and will not be replaced. Members that run ahead do not
wait. Failed and cancelled members are as if they had never been, and a replacement is waited for.

It audits itself (`self_audit.py`): by lot, drawn before anything is known of a group, some would-be cuts run to their end, and tell whether
the cut would have been right and how many steps it would have saved; `hold_precision` moves the threshold by them.

A step costs the same however many groups run. What is stored of a group is freed when it is decided on, or, for one that tells, when it
ends; late events of groups that are not watched (decided on, or gone) are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from sluice.errors import GateError
from sluice.gate.decision import SOURCE, Gate, check_task_type, differ, read_reward, read_rewards
from sluice.gate.divergence import PrefixSignals
from sluice.gate.self_audit import AuditedKeeper, SelfAudit
from sluice.types import Verdict


@dataclass(slots=True, kw_only=True)
class _Member:
    steps: int = 0
    has_ended: bool = False
    reward: Any = None  # None: not known


@dataclass(slots=True, kw_only=True)
class _Group:
    task_type: str | None
    is_audited: bool  # its lot
    expected: int  # members that run, ended, or will be launched in place of lost ones
    prefixes: PrefixSignals | None  # None: decided
    members: dict[Hashable, _Member] = field(default_factory=dict)
    comparable: dict[Hashable, None] = field(default_factory=dict)  # those that got there, first one first
    margin: float = math.inf  # once decided
    would_cut: bool = False  # by the threshold at the time
    steps_after: int = 0  # environment steps of all its members since it was decided on


class GateKeeper(AuditedKeeper):
    """Decides on running groups with a `Gate`, audits its decisions and holds their precision. See the top of this file.

    `group_size` members make a group, and up to `redundancy` more of them run. `hold_precision`: the floor; None leaves the threshold
    alone. `most_scale`: how far above the gate's threshold that may move, as a factor. `window`: audited groups that count, the newest
    ones. `confidence`: of all intervals. Raises `ConfigError` for settings that cannot work.
    """

    def __init__(
        self,
        gate: Gate,
        *,
        group_size: int,
        redundancy: int = 0,
        seed: int = 0,
        audit_rate: float = 0.1,
        shadow: bool = False,
        hold_precision: float | None = None,
        most_scale: float = 2.0,
        window: int = 200,
        confidence: float = 0.95,
        has_observations: bool = True,
    ) -> None:
        self.gate: Final = gate
        self.group_size: Final = group_size
        self.redundancy: Final = redundancy
        self.shadow: Final = shadow
        self.has_observations: Final = has_observations
        rule = gate.rule_in_force
        kind = repr(rule) if hasattr(rule, "__dataclass_fields__") else f"{type(rule).__module__}.{type(rule).__qualname__}"
        self._audit = SelfAudit(
            f"k={gate.k} {kind}",
            group_size=group_size,
            redundancy=redundancy,
            seed=seed,
            audit_rate=audit_rate,
            shadow=shadow,
            hold_precision=hold_precision,
            most_scale=most_scale,
            window=window,
            confidence=confidence,
            horizon=gate.horizon,
        )
        self._groups: dict[Hashable, _Group] = {}

    # ------------------------------------------------------------ what happens

    def group_launched(self, group_key: Hashable, *, task_type: str | None = None) -> None:
        """A group begins. It is watched until it is decided on and, if it tells, until it has ended."""
        if group_key in self._groups:
            raise GateError(f"gate: expected a group that is not watched yet, got {group_key!r} again - tell group_ended first")
        check_task_type(task_type)
        self._groups[group_key] = _Group(
            task_type=task_type,
            is_audited=self._audit.is_audited(group_key),
            expected=self.group_size + self.redundancy,
            prefixes=PrefixSignals(self.gate.k, has_observations=self.has_observations),
        )

    def task_type_known(self, group_key: Hashable, task_type: str | None) -> None:
        """The environment said what kind of problem a group has."""
        check_task_type(task_type)
        if (group := self._groups.get(group_key)) is not None:
            group.task_type = task_type

    def observe(self, group_key: Hashable, member: Hashable, env_step: int, action: Hashable, observation: Any = None, **more: Any) -> None:
        """A member took an environment step: 1 for its first; `observation` is what it saw before it. `more` is what other keepers read."""
        group = self._groups.get(group_key)
        if group is None:
            return
        one = group.members.get(member) or _Member()
        if env_step != one.steps + 1 or one.has_ended:
            raise GateError(
                f"gate: expected {'no further step' if one.has_ended else f'step {one.steps + 1}'} of member {member!r} of group "
                f"{group_key!r}, got step {env_step!r} - tell every step once and in order, and the end of a lost member before its "
                "replacement begins"
            )
        if group.prefixes is None:
            group.steps_after += 1
        elif env_step <= self.gate.k:
            try:
                group.prefixes.add(member, action, *((observation,) if self.has_observations else ()))
            except GateError as error:
                raise GateError(f"gate: group {group_key!r}, step {env_step}: {error}") from None
            if env_step == self.gate.k:
                group.comparable[member] = None
        one.steps = env_step
        group.members[member] = one

    def member_ended(
        self, group_key: Hashable, member: Hashable, reward: Any = None, comparable: bool = True, *, is_replaced: bool = True
    ) -> None:
        """A member ended.

        `comparable`: by itself; else it failed, was lost, cancelled or rejected, and `is_replaced` says whether another comes in its place.
        `reward`: None while it is not known; tell it again when it is.
        """
        group = self._groups.get(group_key)
        if group is None:
            return
        if not comparable:
            group.members.pop(member, None)
            group.comparable.pop(member, None)
            if group.prefixes is not None:
                group.prefixes.forget(member)
            group.expected -= not is_replaced
            return
        earned = read_reward(reward, member)
        one = group.members.setdefault(member, _Member())
        one.has_ended, one.reward = True, earned
        if group.prefixes is not None:
            group.prefixes.end(member)
            group.comparable.setdefault(member)

    def decision(self, group_key: Hashable) -> Verdict | None:
        """The verdict on a group, once, as soon as it can be looked at; None before and after, and when there is none to make.

        A drop is a cut. A keep says in its reason why the group runs on: `kept`, or `audited`, `shadow` or `switched_off` where the rule
        would have cut it.
        """
        group = self._groups.get(group_key)
        if group is None or group.prefixes is None:
            return None
        needed = min(self.group_size, group.expected)
        if len(group.comparable) < needed:
            return None
        chosen = [*islice(group.comparable, max(needed, 0))]
        members = group.members
        if len(chosen) < 2 or all(members[one].has_ended for one in chosen) or differ([one.reward for one in members.values()]):
            self._audit.counts["undecided"] += 1
            del self._groups[group_key]
            return None
        measured = group.prefixes.signals(chosen)
        verdict, tells = self._decide(group, measured, len(chosen))
        if tells:
            group.prefixes = None
            group.comparable.clear()
        else:
            del self._groups[group_key]
        return verdict

    def holds(self, group_key: Hashable, member: Hashable) -> bool:
        """Whether a member has K actions and its group is still to be decided on: with a barrier it waits."""
        group = self._groups.get(group_key)
        one = None if group is None or group.prefixes is None else group.members.get(member)
        return one is not None and one.steps >= self.gate.k and not one.has_ended

    def group_ended(self, group_key: Hashable, rewards: Sequence[Any] | None = None) -> str | None:
        """A group left. `rewards`: those that count, when it ran to its end; None when it did not. Answers with a warning, or None.

        Tell it of every group, whatever became of it: its memory is freed.
        """
        group = self._groups.pop(group_key, None)
        if group is None or group.prefixes is not None:
            return None
        known = [] if rewards is None else [reward for reward in read_rewards(rewards) if reward is not None]
        if len(known) < 2:
            self._audit.counts["untold"] += 1
            return None
        return self._audit.told(group.margin, not differ(known), group.steps_after if group.would_cut else None)

    def learn(self, signals: Mapping[str, float], rewards: Sequence[Any], task_type: str | None = None) -> str | None:
        """A group of a recorded run, finished: as evidence to begin with. Give all of them, cut or not. Answers as `group_ended`."""
        margin = self.gate.margin(signals, task_type)
        return self._audit.learn(margin, not differ(read_rewards(rewards)))

    # ------------------------------------------------------------ what it knows

    def state_dict(self) -> dict[str, Any]:
        """What it learnt and counted, as plain data. Running groups are not in it: they restart whole, and audited ones count as lost."""
        return self._audit.state_dict(untold=sum(group.prefixes is None for group in self._groups.values()))

    # ------------------------------------------------------------ how it decides

    def _decide(self, group: _Group, measured: Mapping[str, float], n: int) -> tuple[Verdict, bool]:
        """The verdict on a group, and whether it tells how it ended."""
        audit = self._audit
        margin = self.gate.margin(measured, group.task_type)
        ruling = audit.rule_on(margin, group.is_audited)
        group.margin, group.would_cut = margin, ruling != "kept"
        audit.counts["judged"] += 1
        audit.counts["would_cut"] += group.would_cut
        if ruling == "cut":
            audit.counts["cut"] += 1
            if self.gate.horizon is not None:
                left = [max(0, self.gate.horizon - one.steps) for one in group.members.values() if not one.has_ended]
                not_begun = max(0, group.expected - len(group.members))
                audit.saved_at_most(sum(left) + not_begun * self.gate.horizon)
            return self.gate.judge(measured, n, group.task_type, audit.scale), False
        tells = (group.is_audited or not audit.is_cutting) and margin < audit.most_scale
        evidence = self.gate.evidence(measured, n, group.task_type, margin, audit.scale)
        return Verdict.kept(SOURCE, ruling, evidence), tells
