"""Rules: from the signals of a group to the question whether it is cut.

A rule answers with a margin, and a group is cut when its margin is below 1: for a threshold the margin is signal / threshold. So one number
says how near any group was to the edge, and whoever moves thresholds (`audit.py`) moves the 1.

- `single_axis`: signal < threshold, strictly (the published rule: `prefix_edit_distance_mean` < 0.12)
- `or_termination`: the same, or at least `termination_threshold` of the members ended before step K
- `by_task_type`: another rule for each task type
- your own, by import path

To add one: a frozen dataclass with `reads` and `margin`, and its class in the table `RULES`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import MISSING, dataclass, fields
from importlib import import_module
from numbers import Real
from types import MappingProxyType
from typing import Any, ClassVar, Final, Protocol

from sluice.errors import ConfigError, GateError
from sluice.gate.divergence import SIGNALS
from sluice.gate.values import is_finite_number, short
from sluice.types import EMPTY

PUBLISHED_THRESHOLD: Final = 0.12
"""d_L of arXiv 2605.05802, fitted there for groups of 8 of one model in one environment at K = 10: calibrate your own."""

PUBLISHED_TERMINATION: Final = 0.90
"""t_H of the same source."""


class Rule(Protocol):
    """Whether a group is cut, by its signals. Subclass it, or write a class with the same three members."""

    @property
    def reads(self) -> frozenset[str]:
        """The signals it needs. What is missing is an error that names it."""
        ...

    def margin(self, signals: Mapping[str, float], task_type: str | None, /) -> float:
        """Where the group stands, at least 0: below 1 it is cut. Infinite: never."""
        ...

    def limits(self, task_type: str | None, /) -> Mapping[str, float]:
        """The numbers that signals are compared with, for the record of a decision."""
        return EMPTY


@dataclass(frozen=True, kw_only=True)
class SingleAxis(Rule):
    """Cuts when one signal is below a threshold, strictly."""

    name: ClassVar[str] = "single_axis"

    signal: str = "prefix_edit_distance_mean"
    threshold: float = PUBLISHED_THRESHOLD  # d_L; 0: never

    def __post_init__(self) -> None:
        check_signal(self.signal)
        check_share("threshold", self.threshold, "every signal lies between 0 and 1")

    @property
    def reads(self) -> frozenset[str]:
        """Its signal."""
        return frozenset({self.signal})

    def margin(self, signals: Mapping[str, float], task_type: str | None = None, /) -> float:
        """signal / threshold."""
        return signals[self.signal] / self.threshold if self.threshold else math.inf

    def limits(self, task_type: str | None = None, /) -> Mapping[str, float]:
        """Its threshold."""
        return {"threshold": self.threshold}


@dataclass(frozen=True, kw_only=True)
class OrTermination(SingleAxis):
    """Cuts when one signal is below a threshold, or when nearly all members ended before step K.

    The surprising part: a group of which all members ended is never decided on while it runs, so that this differs from `SingleAxis` only
    where `termination_threshold` x n leaves room for a member that still runs; for 8 members that is up to 7 / 8.
    """

    name: ClassVar[str] = "or_termination"

    termination_threshold: float = PUBLISHED_TERMINATION  # t_H, inclusive

    def __post_init__(self) -> None:
        SingleAxis.__post_init__(self)
        check_share("termination_threshold", self.termination_threshold, "it is a share of the members")

    @property
    def reads(self) -> frozenset[str]:
        """Its signal, and the share of ended members."""
        return frozenset({self.signal, "termination_fraction"})

    def margin(self, signals: Mapping[str, float], task_type: str | None = None, /) -> float:
        """0 for a group that has ended, else signal / threshold."""
        return 0.0 if signals["termination_fraction"] >= self.termination_threshold else SingleAxis.margin(self, signals)

    def limits(self, task_type: str | None = None, /) -> Mapping[str, float]:
        """Its two thresholds."""
        return {"threshold": self.threshold, "termination_threshold": self.termination_threshold}


@dataclass(frozen=True, kw_only=True)
class ByTaskType(Rule):
    """Another rule for each task type."""

    name: ClassVar[str] = "by_task_type"

    rules: Mapping[str, Rule]
    default: Rule | None = None  # for the types not named, and where the type is not known; None: those are never cut

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Mapping):
            raise ConfigError(f"rules: expected a mapping from task type to rule, got {self.rules!r} - write {{TYPE: SingleAxis()}}")
        for name, rule in self.rules.items():
            check_rule(rule, f"rules.{name}")
        if self.default is not None:
            check_rule(self.default, "default")
        if not self.rules:
            raise ConfigError("rules: expected a rule for at least one task type, got none - give one, or use single_axis for all types")

    @property
    def reads(self) -> frozenset[str]:
        """What any of them reads."""
        return frozenset().union(*(rule.reads for rule in (*self.rules.values(), *([self.default] if self.default else []))))

    def margin(self, signals: Mapping[str, float], task_type: str | None, /) -> float:
        """That of the rule of the task type."""
        rule = self._rule(task_type)
        return rule.margin(signals, task_type) if rule else math.inf

    def limits(self, task_type: str | None, /) -> Mapping[str, float]:
        """Those of the rule of the task type."""
        rule = self._rule(task_type)
        return rule.limits(task_type) if rule else EMPTY

    def _rule(self, task_type: str | None) -> Rule | None:
        return self.default if task_type is None else self.rules.get(task_type, self.default)


RULES: Final[Mapping[str, Any]] = {cls.name: cls for cls in (SingleAxis, OrTermination, ByTaskType)}
"""Built-in rules by their `type`."""


def margin_of(rule: Rule, signals: Mapping[str, float], task_type: str | None) -> float:
    """The margin of a group, checked. Raises `GateError` for signals that are missing and answers that are no margin."""
    if not rule.reads <= signals.keys():
        missing = sorted(rule.reads - signals.keys())
        advice = "give observations" if missing == ["obs_unique_ratio"] else f"expected some of {', '.join(SIGNALS)}"
        raise GateError(f"gate: the rule reads {', '.join(missing)}, and the signals hold only {', '.join(sorted(signals))} - {advice}")
    try:
        margin: Any = rule.margin(MappingProxyType(signals), task_type)  # of user code, perhaps
    except Exception as error:
        raise GateError(f"gate: the rule {rule!r} raised {type(error).__name__}: {error} for {dict(signals)} - correct the rule") from error
    if isinstance(margin, bool) or not isinstance(margin, Real) or not float(margin) >= 0:  # NaN is caught too
        raise GateError(f"gate: expected a margin >= 0 of the rule {rule!r}, got {margin!r} for {dict(signals)} - correct the rule")
    return float(margin)


def limits_of(rule: Rule, task_type: str | None) -> dict[str, float]:
    """The limits of a rule, checked. Raises `GateError` for what are no named numbers."""
    limits: Any = rule.limits(task_type)
    if not isinstance(limits, Mapping) or not all(is_finite_number(limit) for limit in limits.values()):
        raise GateError(f"gate: limits: expected a mapping from name to number, got {limits!r} of the rule {rule!r} - correct the rule")
    return {str(name): float(limit) for name, limit in limits.items()}


def check_rule(rule: Any, where: str) -> None:
    """Refuse what is no rule, and a rule that no group could be judged by. Raises `ConfigError` with the path of the key."""
    if isinstance(rule, type) or not all(callable(getattr(rule, name, None)) for name in ("margin", "limits")):
        raise ConfigError(
            f"{where}: expected an object with reads, margin and limits, got {short(rule)} - subclass sluice.gate.Rule, or make a rule "
            "of a configuration with build_rule"
        )
    try:
        reads: Any = rule.reads
    except Exception as error:
        raise ConfigError(
            f"{where}.reads: expected a set of signals, got {type(error).__name__}: {error} of {short(rule)} - correct the rule"
        ) from error
    if not isinstance(reads, Set):
        advice = "make it a @property" if callable(reads) else "write frozenset({NAME})"
        raise ConfigError(f"{where}.reads: expected a set of signals, got {short(reads)} of {short(rule)} - {advice}")
    if unknown := sorted(map(str, reads - frozenset(SIGNALS))):
        raise ConfigError(
            f"{where}.reads: expected some of {', '.join(SIGNALS)}, got {', '.join(unknown)} of {short(rule)} - "
            f"{_nearest(unknown[0], SIGNALS)}"
        )


def build_rule(config: Any, where: str = "gate.rule") -> Rule:
    """Build a rule from `{"type": ..., argument: value}`; a plain number is the threshold of `single_axis`.

    `by_task_type` takes `rules`, a mapping from task type to such a configuration or number, and `default`, one of them or nothing. A
    `type` with a dot is the import path of a class, built with the arguments; an object that is a rule stays as it is. Raises
    `ConfigError` with the path of the bad key.
    """
    if isinstance(config, int | float):
        config = {"type": "single_axis", "threshold": config}
    if not isinstance(config, Mapping):
        if hasattr(config, "margin") and not isinstance(config, type):
            check_rule(config, where)
            rule: Rule = config
            return rule
        raise ConfigError(f"{where}: expected a mapping with the key type, got {config!r} - write {{type: single_axis, threshold: 0.12}}")
    kind, arguments = config.get("type"), {str(key): value for key, value in config.items() if key != "type"}
    if not isinstance(kind, str):
        raise ConfigError(f"{where}.type: expected the name of a rule, got {kind!r} - choose from {', '.join(RULES)}")
    if kind not in RULES and "." in kind:
        return _custom(kind, arguments, where)
    if kind not in RULES:
        expected = f"one of {', '.join(RULES)} or an import path package.module.Class"
        raise ConfigError(f"{where}.type: expected {expected}, got {kind!r} - {_nearest(kind, RULES)}")
    cls = RULES[kind]
    known = {one.name: one for one in fields(cls)}
    for key in arguments:
        if key not in known:
            raise ConfigError(f"{where}.{key}: expected only {', '.join(known)} for {kind}, got {key!r} - {_nearest(key, known)}")
    for key, one in known.items():
        if key not in arguments and one.default is MISSING:
            raise ConfigError(f"{where}.{key}: {kind} needs it, got only {sorted(arguments)} - give it")
    if cls is ByTaskType:
        arguments = _by_task_type(arguments, where)
    try:
        built: Rule = cls(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from None
    return built


def _by_task_type(arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
    rules, default = arguments["rules"], arguments.get("default")
    if not isinstance(rules, Mapping):
        raise ConfigError(f"{where}.rules: expected a mapping from task type to a rule or threshold, got {rules!r} - write {{TYPE: 0.12}}")
    return {
        "rules": {str(name): build_rule(rule, f"{where}.rules.{name}") for name, rule in rules.items()},
        "default": None if default is None else build_rule(default, f"{where}.default"),
    }


def _custom(path: str, arguments: Mapping[str, Any], where: str) -> Rule:
    """A rule of the user's: a class, built with the arguments."""
    module_name, _, name = path.rpartition(".")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{where}.type: expected a built-in rule or an import path, got {path!r}, and importing {module_name!r} raised "
            f"{type(error).__name__}: {error} - check the path, and that the package is installed or on PYTHONPATH"
        ) from error
    cls = getattr(module, name, None)
    if not isinstance(cls, type) or not callable(getattr(cls, "margin", None)) or not hasattr(cls, "reads"):
        found = "nothing of that name" if cls is None else repr(cls)
        raise ConfigError(f"{where}.type: expected a class with reads and margin, got {found} at {path} - subclass sluice.gate.Rule")
    try:
        built = cls(**arguments)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{where}: building {path} with {dict(arguments)} raised {type(error).__name__}: {error} - correct its arguments"
        ) from error
    check_rule(built, where)
    own: Rule = built
    return own


def check_signal(signal: object) -> None:
    """Refuse what is no signal. Raises `ConfigError`."""
    if signal not in SIGNALS:
        raise ConfigError(f"signal: expected one of {', '.join(SIGNALS)}, got {signal!r} - {_nearest(signal, SIGNALS)}")


def check_share(name: str, value: object, why: str) -> None:
    """Refuse what is no number in [0, 1]. Raises `ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{name}: expected a number >= 0 and <= 1, got {value!r} - {why}")


def _nearest(name: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(known)}"
