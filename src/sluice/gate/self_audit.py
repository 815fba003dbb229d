"""What a keeper of groups knows of itself: which groups tell, how often it would have been right, what it saves, and whether it may cut.

Every group has a lot, drawn by seed before anything is known of it: with probability `audit_rate` it is an audited one, which runs to its
end and tells. Where nothing is cut (`shadow`, or switched off) every group tells. What is told is a margin, below which the group would
have been cut, and whether its rewards were equal at the end. With `hold_precision` the keeper begins switched off, opens at the largest
factor on its threshold whose audited precision has a lower bound above that floor, moves it with every group that tells, and switches off
again, with a warning, when no factor has one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final, Literal, NoReturn

from sluice.errors import ConfigError, GateError
from sluice.gate.audit import AuditLog, Moments, Precision, audits_needed, drawn, lower_bound_clears, saved_steps
from sluice.gate.rules import check_share
from sluice.gate.values import is_finite_number

Ruling = Literal["cut", "kept", "audited", "shadow", "switched_off"]
"""What becomes of a group: it is cut, or it runs on because nothing speaks against it, or though the rule would have cut it."""


class SelfAudit:
    """See the top of this file. Raises `ConfigError` for settings that cannot work; `name`: what its records depend on."""

    def __init__(
        self,
        name: str,
        *,
        group_size: int,
        redundancy: int,
        seed: int,
        audit_rate: float,
        shadow: bool,
        hold_precision: float | None,
        most_scale: float,
        window: int,
        confidence: float,
        horizon: int | None,
    ) -> None:
        self.group_size: Final = group_size
        self.redundancy: Final = redundancy
        self.seed: Final = seed
        self.audit_rate: Final = audit_rate
        self.shadow: Final = shadow
        self.hold_precision: Final = hold_precision
        self.most_scale: Final = most_scale if hold_precision is not None else 1.0
        self.confidence: Final = confidence
        self.horizon: Final = horizon
        self._check(window)
        self._name: Final = f"{name} hold_precision={hold_precision} most_scale={self.most_scale}"
        self._log: Final = AuditLog(window, confidence)
        self._is_open = hold_precision is None
        self._scale = 1.0
        self._has_warned = False  # that it never opened
        self.counts = dict.fromkeys(("judged", "undecided", "would_cut", "cut", "told", "untold", "bound"), 0)
        self._remaining = Moments()  # steps that would-be cuts took after the decision

    # ------------------------------------------------------------ deciding

    @property
    def is_cutting(self) -> bool:
        """Whether a group may be cut now."""
        return self._is_open and not self.shadow

    @property
    def scale(self) -> float:
        """The factor on the threshold."""
        return self._scale

    def is_audited(self, group_key: Hashable) -> bool:
        """The lot of a group: the same for the same seed and key, in any process."""
        return drawn(f"{self.seed}/{group_key!r}", self.audit_rate)

    def rule_on(self, margin: float, is_audited: bool) -> Ruling:
        """What becomes of a group with such a margin."""
        if margin >= self._scale:
            return "kept"
        if self.is_cutting:
            return "audited" if is_audited else "cut"
        return "shadow" if self.shadow else "switched_off"

    def saved_at_most(self, steps: int) -> None:
        """A group was cut, whose members could have taken so many steps more."""
        self.counts["bound"] += steps

    # ------------------------------------------------------------ learning

    def told(self, margin: float, is_right: bool, steps_after: int | None) -> str | None:
        """A group that tells has ended. `steps_after`: that it took since it would have been cut; None: it would not have been.

        Answers with a warning, or None.
        """
        self.counts["told"] += 1
        if steps_after is not None:
            self._remaining.add(steps_after)
        return self.learn(margin, is_right)

    def learn(self, margin: float, is_right: bool) -> str | None:
        """One more group that ran to its end; moves the threshold. Answers with a warning, or None."""
        if margin >= self.most_scale:
            return None
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

    # ------------------------------------------------------------ what it knows

    @property
    def precision(self) -> Precision:
        """That of cuts at the threshold in force, from the audited groups that count."""
        return self._log.precision(self._scale)

    def metrics(self, tokens_per_env_step: float | None = None) -> dict[str, float]:
        """`gate/...` over the whole run; names without a value yet are left out.

        `tokens_per_env_step`, measured by whoever counts tokens, makes tokens of the saved steps.
        """
        counts, asked = self.counts, self.counts["judged"] + self.counts["undecided"]
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
        saved = saved_steps(self._remaining, counts["cut"], None if self.horizon is None else counts["bound"], self.confidence)
        shown |= {f"gate/env_steps_saved_{name}": value for name, value in saved.items()}
        if tokens_per_env_step is not None:
            shown |= {f"gate/tokens_saved_{name}": value * tokens_per_env_step for name, value in saved.items()}
        return shown

    def state_dict(self, *, judged: int = 0, untold: int = 0) -> dict[str, Any]:
        """What it learnt and counted, as plain data. judged, untold: groups that run, counted as if they had left without telling."""
        counts = {**self.counts, "judged": self.counts["judged"] + judged, "untold": self.counts["untold"] + untold}
        return {
            "gate": self._name,
            "records": [[margin, is_right] for margin, is_right in self._log.records],
            "is_open": self._is_open,
            "scale": self._scale,
            "has_warned": self._has_warned,
            "counts": counts,
            "remaining": [self._remaining.n, self._remaining.mean, self._remaining.squares],
        }

    def load_state_dict(self, state: Any) -> None:
        """Go on from a state. Raises `GateError`, and changes nothing, when it is torn or of another gate."""
        own = self.state_dict()
        if not isinstance(state, Mapping) or set(state) != set(own):
            _refuse(f"expected a mapping with {sorted(own)}, got {sorted(map(str, state)) if isinstance(state, Mapping) else state!r}")
        if state["gate"] != own["gate"]:
            _refuse(f"expected that of {own['gate']}, got that of {state['gate']}")
        counts, remaining = state["counts"], state["remaining"]
        if not isinstance(counts, Mapping) or set(counts) != set(own["counts"]) or not all(map(is_count, counts.values())):
            _refuse(f"expected counts of {sorted(own['counts'])}, got {counts!r}")
        is_scale = is_number(state["scale"]) and 0 < state["scale"] <= max(1.0, self.most_scale)
        if not all(isinstance(state[name], bool) for name in ("is_open", "has_warned")) or not is_scale:
            _refuse(f"expected is_open, has_warned and scale, got {state['is_open']!r}, {state['has_warned']!r}, {state['scale']!r}")
        if not are_moments(remaining):
            _refuse(f"expected number, mean and squares of remaining steps, got {remaining!r}")
        records: list[tuple[float, bool]] = []
        for entry in state["records"] if isinstance(state["records"], list) else [state["records"]]:
            match entry:
                case [margin, bool(is_right)] if is_number(margin) and margin >= 0:
                    records.append((margin, is_right))
                case _:
                    _refuse(f"expected records as [margin, is_right], got {entry!r}")
        self._log.replace(records)
        self._is_open, self._scale, self._has_warned = state["is_open"], float(state["scale"]), state["has_warned"]
        self.counts = {name: counts[name] for name in own["counts"]}
        self._remaining = Moments(n=remaining[0], mean=float(remaining[1]), squares=float(remaining[2]))

    def _check(self, window: int) -> None:
        for name, number, least, why in (
            ("group_size", self.group_size, 2, "a group of one has no pairs to compare"),
            ("redundancy", self.redundancy, 0, "it is a number of members"),
            ("window", window, 1, "it is a number of groups"),
        ):
            if not is_count(number) or number < least:
                raise ConfigError(f"gate.{name}: expected a whole number >= {least}, got {number!r} - {why}")
        if not isinstance(self.shadow, bool):
            raise ConfigError(f"gate.shadow: expected True or False, got {self.shadow!r} - True cuts nothing and records everything")
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
        if not is_number(self.most_scale) or self.most_scale < 0.05:
            raise ConfigError(f"gate.most_scale: expected a number >= 0.05, got {self.most_scale!r} - 1 never raises the threshold")
        if not lower_bound_clears(window, window, self.hold_precision, self.confidence):
            enough = audits_needed(self.hold_precision, self.confidence)
            raise ConfigError(
                f"gate.window: expected at least {enough} audited groups for hold_precision {self.hold_precision}, got {window} - even if "
                "all of them are right the lower bound stays below: raise the window or lower the floor"
            )


class AuditedKeeper:
    """What keepers of groups have in common: what they know of themselves. `self._audit` and `self._groups` are theirs to make."""

    _audit: SelfAudit
    _groups: dict[Hashable, Any]  # those that something is stored of

    @property
    def is_cutting(self) -> bool:
        """Whether a group may be cut now."""
        return self._audit.is_cutting

    @property
    def scale(self) -> float:
        """The factor on the threshold; of a learned rule, on the distance of its threshold from certainty."""
        return self._audit.scale

    @property
    def watched(self) -> int:
        """Groups that something is stored of."""
        return len(self._groups)

    @property
    def precision(self) -> Precision:
        """That of cuts at the threshold in force, from the audited groups that count."""
        return self._audit.precision

    def metrics(self, tokens_per_env_step: float | None = None) -> dict[str, float]:
        """`gate/...` over the whole run; names without a value yet are left out.

        `tokens_per_env_step`, measured by whoever counts tokens, makes tokens of the saved steps.
        """
        return self._audit.metrics(tokens_per_env_step)

    def load_state_dict(self, state: Any) -> None:
        """Go on from a state, without any running group. Raises `GateError`, and changes nothing, when it is torn or of another gate."""
        self._audit.load_state_dict(state)
        self._groups.clear()


def is_count(value: object) -> bool:
    """Whether it is a whole number from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_number(value: object) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and is_finite_number(value)


def are_moments(value: object) -> bool:
    """Whether it is what a state says of remaining steps: number, mean and squares."""
    return isinstance(value, list) and len(value) == 3 and is_count(value[0]) and all(is_number(one) and one >= 0 for one in value)


def _refuse(reason: str) -> NoReturn:
    raise GateError(f"gate: the state is torn, or of another gate: {reason} - go on from a checkpoint of this run")
