"""The gate itself: from the partial trajectories of a group to a verdict, once, at environment step K."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import cached_property
from typing import Any, Final

from sluice.errors import ConfigError, GateError
from sluice.gate.divergence import check_k, check_observations, has_order, read_members, read_sequence, signals
from sluice.gate.rules import PUBLISHED_THRESHOLD, Rule, SingleAxis, check_rule, limits_of, margin_of
from sluice.gate.values import is_finite_number, short
from sluice.types import Verdict

SOURCE: Final = "gate"
"""The source of its verdicts."""

CONVERGED: Final = "converged_prefix"
"""Reason of a cut."""


@dataclass(frozen=True)
class Gate:
    """Looks at a group after `k` environment steps, and cuts it when its members have not parted: then they are on their way to one reward.

    By default it cuts when `signal` < `threshold`, strictly; `rule` stands in place of the two. The published threshold was fitted to one
    model in one environment: calibrate it. A gate remembers nothing; `GateKeeper` watches running groups with one.
    """

    k: int = 10  # the environment step at which a group is looked at
    threshold: float = PUBLISHED_THRESHOLD
    signal: str = "prefix_edit_distance_mean"
    horizon: int | None = None  # most environment steps of a trajectory; None: not known
    rule: Rule | None = None  # None: `signal` < `threshold`

    def __post_init__(self) -> None:
        try:
            check_k(self.k)
            if self.horizon is not None:
                _check_horizon(self.horizon, self.k)
            axis = SingleAxis(signal=self.signal, threshold=self.threshold)
        except ConfigError as error:
            raise ConfigError(f"gate.{error}") from None
        if self.rule is not None:
            check_rule(self.rule, "gate.rule")
        if self.rule is not None and axis != SingleAxis():
            raise ConfigError(
                f"gate.rule: expected a rule alone, got also {_given(self)}, without effect beside it - drop the one or the other"
            )

    @cached_property
    def rule_in_force(self) -> Rule:
        """The rule that decides."""
        return SingleAxis(signal=self.signal, threshold=self.threshold) if self.rule is None else self.rule

    def decide(
        self,
        actions: Sequence[Sequence[Hashable] | None],
        observations: Sequence[Sequence[Hashable] | None] | None = None,
        rewards: Sequence[Any] | None = None,
        *,
        task_type: str | None = None,
    ) -> Verdict | None:
        """The verdict on a group whose members all have `k` actions or have ended. None: no decision, the group runs on.

        `actions`: one sequence per member; one that is shorter than `k` is of a member that ended by itself, None of one that failed, was
        cancelled or lost and is not compared. `observations[i][t]`: what member i saw before its action t + 1. `rewards`: of the members
        that finished, None for one that still runs; a member with a reward has finished.

        There is no decision on less than two comparable members, when all of them ended already (the filters judge the group; in a replay
        of finished groups leave `rewards` out), and when finished members have different rewards. Raises `GateError` for what cannot be
        compared.
        """
        rows = [None if row is None else read_sequence(row, index) for index, row in enumerate(read_members(actions))]
        is_compared = [row is not None for row in rows]
        earned = [None] * len(rows) if rewards is None else read_rewards(rewards)
        if len(earned) != len(rows):
            raise GateError(f"rewards: expected one per member, that is {len(rows)}, got {len(earned)} - name every member, with None")
        if observations is not None:
            check_observations(observations, len(rows))
        members = [row for row in rows if row is not None]
        seen = None if observations is None else [row for row, is_in in zip(observations, is_compared, strict=True) if is_in]
        ended = [reward is not None or len(row) < self.k for row, reward in zip(rows, earned, strict=True) if row is not None]
        if len(members) < 2 or all(ended) or differ(earned):
            return None
        measured = signals(members, self.k, seen)  # type: ignore[arg-type]
        return self.judge(measured, len(members), task_type)

    def judge(self, measured: Mapping[str, float], n: int, task_type: str | None = None, scale: float = 1.0) -> Verdict:
        """The verdict on the signals of `n` members; `scale` moves the threshold, as a factor."""
        margin = self.margin(measured, task_type)
        evidence = self.evidence(measured, n, task_type, margin, scale)
        if margin < scale:
            return Verdict.dropped(CONVERGED, "low_information", SOURCE, evidence)
        return Verdict.kept(SOURCE, evidence=evidence)

    def margin(self, measured: Mapping[str, float], task_type: str | None = None) -> float:
        """Where a group stands: below 1 it is cut."""
        check_task_type(task_type)
        return margin_of(self.rule_in_force, measured, task_type)

    def evidence(self, measured: Mapping[str, float], n: int, task_type: str | None, margin: float, scale: float) -> dict[str, float]:
        """What a decision was made on: the signals, the step, the members compared, the margin and the limits in force."""
        limits = limits_of(self.rule_in_force, task_type)
        if "threshold" in limits:
            limits["threshold"] *= scale
        return {**measured, "k": self.k, "n": n, "margin": margin, "scale": scale, **limits}


def read_rewards(rewards: Sequence[Any]) -> list[Any]:
    """Rewards as numbers of unchanged value, None where there is none. Raises `GateError` for NaN, infinity and what is no number."""
    if not has_order(rewards):
        raise GateError(f"rewards: expected one per member, got {rewards!r} - give a list")
    return [read_reward(reward, index) for index, reward in enumerate(rewards)]


def read_reward(reward: Any, member: Hashable) -> Any:
    """The same for one member."""
    value = reward.item() if getattr(reward, "shape", None) == () and hasattr(reward, "item") else reward
    if value is not None and not isinstance(value, bool) and not is_finite_number(value) and not _is_finite_decimal(value):
        raise GateError(
            f"rewards: expected a finite number for member {member!r}, got {reward!r} - give None for a member that has no reward (yet)"
        )
    return value


def _is_finite_decimal(value: Any) -> bool:
    return isinstance(value, Decimal) and value.is_finite()


def check_task_type(task_type: object) -> None:
    """Refuse what is no name of a task type. Raises `GateError`."""
    if task_type is not None and not isinstance(task_type, str):
        raise GateError(f"task_type: expected a text, or None where it is not known, got {short(task_type)} - give its name")


def differ(rewards: Sequence[Any]) -> bool:
    """Whether known rewards differ: exactly, by value."""
    known = [reward for reward in rewards if reward is not None]
    return any(reward != known[0] for reward in known)


def _check_horizon(horizon: object, k: int) -> None:
    if isinstance(horizon, bool) or not isinstance(horizon, int) or horizon < 1:
        raise ConfigError(f"horizon: expected a whole number >= 1, got {horizon!r} - it is the most environment steps of a trajectory")
    if k >= horizon:
        raise ConfigError(
            f"k: expected a step below the horizon {horizon}, got {k} - nothing is left to save there: lower k or raise the horizon"
        )


def _given(gate: Gate) -> str:
    return ", ".join(
        f"{one.name} {getattr(gate, one.name)!r}"
        for one in fields(Gate)
        if one.name in ("threshold", "signal") and getattr(gate, one.name) != one.default
    )
