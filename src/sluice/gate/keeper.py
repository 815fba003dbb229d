"""Watches running groups: is told of every environment step, and answers once per group whether it is cut.

A group is looked at when as many of its members as it needs are comparable: have K actions, or ended by themselves. Those are the
first `group_size` to get there, of whatever runs; fewer when members were lost and will not be replaced. Members that run ahead do not
wait. Failed and cancelled members are as if they had never been, and a replacement is waited for.

Every group has a lot, drawn by seed before anything is known of it: with probability `audit_rate` it is an audited one, which runs to
its end and tells whether a cut would have been right, and how many steps it would have saved. Where nothing is cut (`shadow`, or the gate
is switched off) every group tells. With `hold_precision` the gate begins switched off, opens at the largest threshold whose audited
precision has a lower bound above that floor, moves it with every audited group, and switches off again, with a warning, when no threshold
has one.

A step costs the same however many groups run. What is stored of a group is freed when it is decided on, or, for one that tells, when it
ends; late events of groups that are not watched (decided on, or gone) are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NoReturn

from sluice.errors import ConfigError, GateError
from sluice.gate.audit import AuditLog, Moments, Precision, drawn, lower_bound_clears
from sluice.gate.decision import SOURCE, Gate, differ, read_reward, read_rewards
from sluice.gate.divergence import PrefixSignals
from sluice.gate.rules import check_share
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


class GateKeeper:
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
        self.seed: Final = seed
        self.audit_rate: Final = audit_rate
        self.shadow: Final = shadow
        self.hold_precision: Final = hold_precision
        self.most_scale: Final = most_scale if hold_precision is not None else 1.0
        self.confidence: Final = confidence
        self.has_observations: Final = has_observations
        self._check(window)
        self._log: Final = AuditLog(window, confidence)
        self._groups: dict[Hashable, _Group] = {}
        self._is_open = hold_precision is None
        self._scale = 1.0
        self._has_warned = False  # that it never opened
        self._counts = dict.fromkeys(("judged", "undecided", "would_cut", "cut", "told", "untold", "bound"), 0)
        self._remaining = Moments()  # steps that would-be cuts took after the decision

    # ------------------------------------------------------------ what happens

    def group_launched(self, group_key: Hashable, *, task_type: str | None = None) -> None:
        """A group begins. It is watched until it is decided on and, if it tells, until it has ended."""
        if group_key in self._groups:
            raise GateError(f"gate: expected a group that is not watched yet, got {group_key!r} again - tell group_ended first")
        self._groups[group_key] = _Group(
            task_type=task_type,
            is_audited=self._draw(group_key),
            expected=self.group_size + self.redundancy,
            prefixes=PrefixSignals(self.gate.k, has_observations=self.has_observations),
        )

    def task_type_known(self, group_key: Hashable, task_type: str | None) -> None:
        """The environment said what kind of problem a group has."""
        if (group := self._groups.get(group_key)) is not None:
            group.task_type = task_type

    def observe(
        self, group_key: Hashable, member: Hashable, env_step: int, action: Hashable, observation: Any = None, **more: Any
    ) -> None:
        """A member took an environment step: 1 for its first; `observation` is what it saw before it. `more` is what other keepers read."""
        group = self._groups.get(group_key)
        if group is None:
            return
        one = group.members.get(member)
        if one is None:
            one = group.members[member] = _Member()
        if env_step != one.steps + 1 or one.has_ended:
            raise GateError(
                f"gate: expected {'no further step' if one.has_ended else f'step {one.steps + 1}'} of member {member!r} of group "
                f"{group_key!r}, got step {env_step!r} - tell every step once and in order, and the end of a lost member before its "
                "replacement begins"
            )
        one.steps = env_step
        if group.prefixes is None:
            group.steps_after += 1
        elif env_step <= self.gate.k:
            if self.has_observations:
                group.prefixes.add(member, action, observation)
            else:
                group.prefixes.add(member, action)
            if env_step == self.gate.k:
                group.comparable[member] = None

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
            self._counts["undecided"] += 1
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
            self._counts["untold"] += 1
            return None
        self._counts["told"] += 1
        if group.would_cut:
            self._remaining.add(group.steps_after)
        return self._learn(group.margin, not differ(known))

    def learn(self, signals: Mapping[str, float], rewards: Sequence[Any], task_type: str | None = None) -> str | None:
        """A group of a recorded run, finished: as evidence to begin with. Give all of them, cut or not. Answers as `group_ended`."""
        margin = self.gate.margin(signals, task_type)
        return self._learn(margin, not differ(read_rewards(rewards))) if margin < self.most_scale else None

    # ------------------------------------------------------------ what it knows

    @property
    def is_cutting(self) -> bool:
        """Whether a group may be cut now."""
        return self._is_open and not self.shadow

    @property
    def scale(self) -> float:
        """The factor on the gate's threshold."""
        return self._scale

    @property
    def watched(self) -> int:
        """Groups that something is stored of."""
        return len(self._groups)

    @property
    def precision(self) -> Precision:
        """That of cuts at the threshold in force, from the audited groups that count."""
        return self._log.precision(self._scale)

    def metrics(self, tokens_per_env_step: float | None = None) -> dict[str, float]:
        """`gate/...` over the whole run; names without a value yet are left out.

        `tokens_per_env_step`, measured by whoever counts tokens, makes tokens of the saved steps.
        """
        counts, asked = self._counts, self._counts["judged"] + self._counts["undecided"]
        shown: dict[str, float] = {
            "gate/judged": counts["judged"],
            "gate/undecided": counts["undecided"],
            "gate/would_cut": counts["would_cut"],
            "gate/cut": counts["cut"],
            "gate/is_cutting": float(self.is_cutting),
            "gate/threshold_scale": self._scale,
            "gate/audited": self._remaining.n,
            "gate/audited_lost": counts["untold"],
        }
        if asked:
            shown["gate/cut_rate"] = counts["cut"] / asked
        precision = self.precision
        shown["gate/precision_n"] = precision.n
        if precision.value is not None:
            shown |= {"gate/precision": precision.value, "gate/precision_low": precision.low, "gate/precision_high": precision.high}
        saved: dict[str, float] = {}
        estimate = self._remaining.total_of_others(counts["cut"], self.confidence)
        if estimate is not None:
            saved = dict(zip(("estimate", "estimate_low", "estimate_high"), estimate, strict=True))
        if self.gate.horizon is not None:
            saved["bound"] = counts["bound"]
        shown |= {f"gate/env_steps_saved_{name}": value for name, value in saved.items()}
        if tokens_per_env_step is not None:
            shown |= {f"gate/tokens_saved_{name}": value * tokens_per_env_step for name, value in saved.items()}
        return shown

    def state_dict(self) -> dict[str, Any]:
        """What it learnt and counted, as plain data. Running groups are not in it: they restart whole."""
        return {
            "gate": self._name(),
            "records": [[margin, is_right] for margin, is_right in self._log.records],
            "is_open": self._is_open,
            "scale": self._scale,
            "has_warned": self._has_warned,
            "counts": dict(self._counts),
            "remaining": [self._remaining.n, self._remaining.mean, self._remaining.squares],
        }

    def load_state_dict(self, state: Any) -> None:
        """Go on from a state, without any running group. Raises `GateError`, and changes nothing, when it is torn or of another gate."""
        own = self.state_dict()
        if not isinstance(state, Mapping) or set(state) != set(own):
            _refuse(f"expected a mapping with {sorted(own)}, got {sorted(map(str, state)) if isinstance(state, Mapping) else state!r}")
        if state["gate"] != own["gate"]:
            _refuse(f"expected that of {own['gate']}, got that of {state['gate']}")
        counts, remaining = state["counts"], state["remaining"]
        if not isinstance(counts, Mapping) or set(counts) != set(own["counts"]) or not all(map(_is_count, counts.values())):
            _refuse(f"expected counts of {sorted(own['counts'])}, got {counts!r}")
        if not all(isinstance(state[name], bool) for name in ("is_open", "has_warned")) or not _is_number(state["scale"]):
            _refuse(f"expected is_open, has_warned and scale, got {state['is_open']!r}, {state['has_warned']!r}, {state['scale']!r}")
        if not isinstance(remaining, list) or len(remaining) != 3 or not _is_count(remaining[0]) or not all(map(_is_number, remaining)):
            _refuse(f"expected number, mean and squares of remaining steps, got {remaining!r}")
        records: list[tuple[float, bool]] = []
        for entry in state["records"] if isinstance(state["records"], list) else [state["records"]]:
            match entry:
                case [margin, bool(is_right)] if _is_number(margin):
                    records.append((margin, is_right))
                case _:
                    _refuse(f"expected records as [margin, is_right], got {entry!r}")
        self._groups.clear()
        self._log.replace(records)
        self._is_open, self._scale, self._has_warned = state["is_open"], float(state["scale"]), state["has_warned"]
        self._counts = {name: counts[name] for name in own["counts"]}
        self._remaining = Moments(n=remaining[0], mean=float(remaining[1]), squares=float(remaining[2]))

    # ------------------------------------------------------------ how it decides

    def _decide(self, group: _Group, measured: Mapping[str, float], n: int) -> tuple[Verdict, bool]:
        """The verdict on a group, and whether it tells how it ended."""
        margin = self.gate.margin(measured, group.task_type)
        would_cut = margin < self._scale
        self._counts["judged"] += 1
        self._counts["would_cut"] += would_cut
        is_cutting = self.is_cutting
        if would_cut and is_cutting and not group.is_audited:
            self._counts["cut"] += 1
            if self.gate.horizon is not None:
                self._counts["bound"] += sum(max(0, self.gate.horizon - one.steps) for one in group.members.values() if not one.has_ended)
            return self.gate.judge(measured, n, group.task_type, self._scale), False
        reason = "kept"
        if would_cut:
            reason = "shadow" if self.shadow else "audited" if is_cutting else "switched_off"
        tells = (group.is_audited or not is_cutting) and margin < self.most_scale
        group.margin, group.would_cut = margin, would_cut
        evidence = self.gate.evidence(measured, n, group.task_type, margin, self._scale)
        return Verdict.kept(SOURCE, reason, evidence), tells

    def _learn(self, margin: float, is_right: bool) -> str | None:
        """One more group that ran to its end; moves the threshold."""
        self._log.add(margin, is_right)
        if self.hold_precision is None:
            return None
        before = self.precision
        scale = self._log.largest_scale(self.hold_precision, self.most_scale)
        if scale is not None:
            self._is_open, self._scale = True, scale
            return None
        was_open, self._is_open, self._scale = self._is_open, False, 1.0
        if not was_open and (self._has_warned or len(self._log) < self._log.window):
            return None
        self._has_warned = True
        seen = f"of {before.n} audited would-be cuts {before.right} were right, which leaves a lower bound of {before.low:.3f}"
        return (
            f"gate: switched off, since no threshold holds gate.hold_precision {self.hold_precision}: {seen}, and no smaller threshold "
            "has a higher one - it goes on watching, and opens again when one has; calibrate k and the rule, or lower the floor"
        )

    def _draw(self, group_key: Hashable) -> bool:
        """The lot of a group: the same for the same seed and key, in any process."""
        return drawn(f"{self.seed}/{group_key!r}", self.audit_rate)

    def _name(self) -> str:
        """What its records depend on."""
        rule = self.gate.rule_in_force
        kind = repr(rule) if hasattr(rule, "__dataclass_fields__") else f"{type(rule).__module__}.{type(rule).__qualname__}"
        return f"k={self.gate.k} {kind} hold_precision={self.hold_precision} most_scale={self.most_scale}"

    def _check(self, window: int) -> None:
        for name, number, least, why in (
            ("group_size", self.group_size, 2, "a group of one has no pairs to compare"),
            ("redundancy", self.redundancy, 0, "it is a number of members"),
            ("window", window, 1, "it is a number of groups"),
        ):
            if not _is_count(number) or number < least:
                raise ConfigError(f"gate.{name}: expected a whole number >= {least}, got {number!r} - {why}")
        try:
            check_share("audit_rate", self.audit_rate, "it is the chance that a group is audited")
            for name, share in (("hold_precision", self.hold_precision), ("confidence", self.confidence)):
                if share is not None:
                    check_share(name, share, "it is a share")
                    if share in (0, 1):
                        raise ConfigError(f"{name}: expected a number > 0 and < 1, got {share!r} - nothing measured can be held to it")
        except ConfigError as error:
            raise ConfigError(f"gate.{error}") from None
        if self.hold_precision is None:
            return
        if not self.audit_rate and not self.shadow:
            raise ConfigError(
                "gate.audit_rate: expected more than 0 beside hold_precision, got 0 - without audits nothing is known: set 0.1"
            )
        if not _is_number(self.most_scale) or self.most_scale < 0.05:
            raise ConfigError(f"gate.most_scale: expected a number >= 0.05, got {self.most_scale!r} - 1 never raises the threshold")
        if not lower_bound_clears(window, window, self.hold_precision, self.confidence):
            enough = math.ceil(math.log((1 - self.confidence) / 2) / math.log(self.hold_precision))
            raise ConfigError(
                f"gate.window: expected at least {enough} audited groups for hold_precision {self.hold_precision}, got {window} - even if "
                "all of them are right the lower bound stays below: raise the window or lower the floor"
            )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refuse(reason: str) -> NoReturn:
    raise GateError(f"gate: the state is torn, or of another gate: {reason} - go on from a checkpoint of this run")
