"""Bounds the share of judged groups that filters may drop, so that a filter gone wrong cannot starve the run.

Every judged group is counted first, kept ones too. Then a drop is allowed when, with it, at most `max_filter_ratio` of the counted groups
are dropped: filtered / total < limit and (filtered + 1) / total <= limit, of which the second says both. So with a limit below 1 the
very first group is always kept.

The surprising part: a number is taken for the fraction that it was written for (0.1 is one tenth, 1 / 3 is one third), and compared
without rounding, so that 3 of 10 are allowed by 0.3, and 1 of 3 by 1 / 3.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final, Literal, NoReturn, get_args

from pydantic import ValidationError

from sluice.config.explain import explain
from sluice.config.models import GuardConfig
from sluice.config.problems import Places, error
from sluice.errors import ConfigError, FilterError
from sluice.filters.base import CATEGORIES
from sluice.filters.naming import nearest
from sluice.types import Category, Verdict

Scope = Literal["cumulative", "window"]
Policy = Literal["keep", "wait", "shrink", "raise"]

KEPT_BY_GUARD: Final = "kept_by_guard"
"""Reason: filters would have dropped it, and a guard kept it."""

SIMPLEST: Final = 1_000_000  # largest denominator that a limit is first looked for with: two such fractions are never the same float


class RatioGuard:
    """Allows or refuses drops by the share of groups that have been dropped so far.

    `max_filter_ratio` bounds all drops together, or, as a mapping, those of each category against the common total; a category left out
    is without limit. `scope`: the share among all groups so far, or among the last `window` judged ones, this one included. `policy`
    says what becomes of a group that may not be dropped; the guard stores it for whoever acts on it, and `admit` always keeps.

    For a group that is judged and decided on at once, `admit` is all. Where the decision comes later: `count` when it is judged, `may_drop`
    as often as is asked, then `filter_counted` or `keep_counted`. In a window a drop stands where its group was judged, or, when that has
    left the window, with the newest group: late drops are bounded too.
    """

    def __init__(
        self,
        max_filter_ratio: float | Mapping[Category, float] = 0.5,
        scope: Scope = "cumulative",
        window: int = 100,
        policy: Policy = "keep",
    ) -> None:
        if isinstance(max_filter_ratio, Mapping):
            if not max_filter_ratio:
                raise ConfigError("guard.max_filter_ratio: expected at least one category with its limit, got none - leave the guard out")
            for category in max_filter_ratio:
                _choose(f"max_filter_ratio.{category}", category, CATEGORIES)
            self._limits = {category: _exact(f"max_filter_ratio.{category}", max_filter_ratio.get(category, 1)) for category in CATEGORIES}
        else:
            self._limits = dict.fromkeys(CATEGORIES, _exact("max_filter_ratio", max_filter_ratio))
        _choose("scope", scope, get_args(Scope))
        _choose("policy", policy, get_args(Policy))
        if not _is_count(window) or window < 1:
            raise ConfigError(f"guard.window: expected a whole number >= 1, got {window!r} - it is a number of judged groups")
        self.scope: Final = scope
        self.window: Final = window
        self.policy: Final = policy
        self.is_by_category: Final = isinstance(max_filter_ratio, Mapping)
        self._judged = 0  # groups of the whole run: the next ticket
        self._filtered: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)  # in scope
        self._drops: deque[tuple[int, Category]] = deque()  # of those in the window: the ticket that each stands at, ascending
        self._kept_by_guard = 0

    @property
    def total(self) -> int:
        """Judged groups in scope."""
        return self._judged if self.scope == "cumulative" else min(self._judged, self.window)

    @property
    def filtered(self) -> Mapping[Category, int]:
        """Dropped groups in scope, by category."""
        return dict(self._filtered)

    @property
    def kept_by_guard(self) -> int:
        """Groups of the whole run that filters would have dropped and the guard kept."""
        return self._kept_by_guard

    def admit(self, verdict: Verdict) -> Verdict:
        """Count a judged group and answer with what becomes of it: the verdict itself, or a keep in the name of the guard."""
        if not isinstance(verdict, Verdict):
            raise FilterError(f"guard: expected a Verdict, got {verdict!r} ({type(verdict).__name__}) - give what the filter answered")
        if verdict.category is not None and verdict.category not in CATEGORIES:
            advice = nearest(verdict.category, CATEGORIES)
            raise FilterError(f"guard: expected a category out of {list(CATEGORIES)}, got {verdict.category!r} - {advice}")
        ticket = self.count()
        if verdict.category is None:
            return verdict
        if not self.may_drop(verdict.category):
            return self.keep_counted(verdict.category)
        self.filter_counted(ticket, verdict.category)
        return verdict

    def count(self) -> int:
        """Count a judged group that is not dropped, or not yet. Answers with its ticket."""
        ticket = self._judged
        self._judged += 1
        if self.scope == "window":
            while self._drops and self._drops[0][0] <= ticket - self.window:
                self._filtered[self._drops.popleft()[1]] -= 1
        return ticket

    def may_drop(self, category: Category) -> bool:
        """Whether a group that has been counted could be dropped now. Changes nothing."""
        limit = self._limits[category]
        return limit == 1 or (self._in_question(category) + 1) * limit.denominator <= limit.numerator * self.total

    def filter_counted(self, ticket: int, category: Category) -> None:
        """A counted group is dropped now."""
        if not 0 <= ticket < self._judged:
            raise FilterError(f"guard: expected a ticket below {self._judged}, got {ticket} - a group is counted before it is dropped")
        self._filtered[category] += 1
        if self.scope == "window":
            insort(self._drops, (ticket if ticket >= self._judged - self.window else self._judged - 1, category))

    def keep_counted(self, category: Category) -> Verdict:
        """A counted group that filters would drop is kept now: the verdict that says so."""
        self._kept_by_guard += 1
        return Verdict.kept("ratio_guard", KEPT_BY_GUARD, self.evidence(category))

    def evidence(self, category: Category) -> dict[str, float]:
        """The numbers on which a drop of a counted group is decided."""
        return {"total": self.total, "filtered": self._in_question(category), "limit": float(self._limits[category])}

    def metrics(self) -> dict[str, float]:
        """The share of dropped groups in scope (and, with limits by category, that of each), their total, and what the guard kept."""
        total = self.total
        ratios = {"guard/filter_ratio": sum(self._filtered.values())}
        if self.is_by_category:
            ratios |= {f"guard/filter_ratio/{category}": number for category, number in self._filtered.items()}
        return {
            **{name: number / total if total else 0.0 for name, number in ratios.items()},
            "guard/kept_by_guard": self._kept_by_guard,
            "guard/total": total,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that has been counted, as plain data. The limits are not in it: they may change between two runs."""
        return {
            "scope": self.scope,
            "window": self.window if self.scope == "window" else None,
            "judged": self._judged,
            "filtered": dict(self._filtered),
            "drops": [[ticket, category] for ticket, category in self._drops],
            "kept_by_guard": self._kept_by_guard,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Raises `FilterError`, and changes nothing, when it is torn or of a guard of another scope."""
        own = self.state_dict()
        if not isinstance(state, Mapping):
            _refuse(f"expected a mapping, got {type(state).__name__}")
        if set(state) != set(own):
            _refuse(f"expected {sorted(own)}, got {sorted(map(str, state))}")
        for name in ("scope", "window"):
            if state[name] != own[name]:
                _refuse(f"expected that of a guard with {name} {own[name]}, got {state[name]!r}")
        judged, filtered, kept, drops = state["judged"], state["filtered"], state["kept_by_guard"], state["drops"]
        if not isinstance(filtered, Mapping) or set(filtered) != set(CATEGORIES):
            _refuse(f"expected filtered groups by category, got {filtered!r}")
        if not all(_is_count(number) for number in (judged, kept, *filtered.values())) or kept > judged:
            _refuse(f"expected counts of which none is above judged, got judged {judged!r}, filtered {filtered!r}, kept_by_guard {kept!r}")
        read = self._read_drops(drops, judged)
        if self.scope == "window":
            fits = all(sum(own == category for _, own in read) == number for category, number in filtered.items())
        else:
            fits = not read and sum(filtered.values()) + kept <= judged
        if not fits:
            _refuse(f"expected filtered groups that add up, got judged {judged}, filtered {dict(filtered)}, {len(read)} drops")
        self._judged, self._kept_by_guard, self._drops = judged, kept, deque(read)
        self._filtered = {category: filtered[category] for category in CATEGORIES}

    def _in_question(self, category: Category) -> int:
        """The dropped groups that the limit of a category speaks of."""
        return self._filtered[category] if self.is_by_category else sum(self._filtered.values())

    def _read_drops(self, drops: Any, judged: int) -> list[tuple[int, Category]]:
        read: list[tuple[int, Category]] = []
        last = max(0, judged - self.window)
        for entry in drops if isinstance(drops, list) else [drops]:
            match entry:
                case [ticket, name] if _is_count(ticket) and last <= ticket < judged and name in CATEGORIES:
                    read.append((ticket, name))
                    last = ticket
                case _:
                    _refuse(f"expected drops as [ticket, category], ascending and in the window, got {entry!r}")
        return read


def build_guard(config: GuardConfig | Mapping[str, Any] | None) -> RatioGuard | None:
    """Build the guard from its section of a configuration; None: there is none. Raises `ConfigError` with the path of the bad key."""
    if config is None:
        return None
    section = config if isinstance(config, GuardConfig) else _section(config)
    return RatioGuard(section.max_filter_ratio, section.scope, section.window, section.policy)


def _section(data: object) -> GuardConfig:
    if not isinstance(data, Mapping):
        raise ConfigError(f"guard: expected a section with the keys {', '.join(GuardConfig.model_fields)}, got {data!r}")
    try:
        return GuardConfig.model_validate(dict(data))
    except ValidationError as refused:
        raise error(explain(GuardConfig, refused, data), Places(source="guard")) from None


def _exact(name: str, number: object) -> Fraction:
    """The fraction that a limit was written for: the simplest one that is the same float, else its decimal digits."""
    if isinstance(number, bool) or not isinstance(number, int | float | Fraction) or not 0 <= number <= 1:
        raise ConfigError(f"guard.{name}: expected a number >= 0 and <= 1, got {number!r} - it is a share of the judged groups")
    if isinstance(number, int | Fraction):
        return Fraction(number)
    near = float(number)
    simple = Fraction(near).limit_denominator(SIMPLEST)
    return simple if float(simple) == near else Fraction(repr(near))


def _choose(name: str, value: object, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ConfigError(f"guard.{name}: expected one of {', '.join(valid)}, got {value!r} - {nearest(value, valid)}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _refuse(reason: str) -> NoReturn:
    raise FilterError(f"guard: the state is torn, or of another guard: {reason} - go on from a checkpoint of this run")
