"""How far the members of a group have parted after K environment steps: seven signals, each in [0, 1].

Compared are the first K actions of every member. A member that ended earlier is filled up with END, which is a value like any other. With n
members, pairs are the n (n - 1) / 2 unordered pairs of different members:

- `prefix_edit_distance_mean`: mean over pairs of Levenshtein(a, b) / K (d_K, the published signal)
- `action_bigram_jaccard_mean`: mean over pairs of 1 - Jaccard of their sets of consecutive action pairs; 0 for K = 1
- `unique_prefix_ratio`: different prefixes / n
- `unique_action_ratio`: different actions at step K / n
- `action_entropy`: Shannon entropy of the action at step K, in units of log2 n
- `obs_unique_ratio`: different observations before the action at step K / n (END for a member that had ended); only with observations
- `termination_fraction`: share of members with at most K - 1 actions

Source: arXiv 2605.05802. The order of the members never matters, not even in the last digit, and a mean that equals the decimal of a
threshold is the same float, so that a strict comparison means what it says.

The surprising part: actions are compared by value, and are refused when they are of different types: 1 equals True and differs from "1",
which is rarely meant.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from itertools import accumulate, chain, combinations, count, pairwise
from typing import Any, Final, TypeAlias

import numpy as np
from rapidfuzz.distance import Levenshtein

from sluice.errors import ConfigError, GateError
from sluice.gate.values import PLAIN, check_value, short

SIGNALS: Final = (
    "prefix_edit_distance_mean",
    "action_bigram_jaccard_mean",
    "unique_prefix_ratio",
    "unique_action_ratio",
    "action_entropy",
    "obs_unique_ratio",
    "termination_fraction",
)
"""The names of the signals."""

Actions: TypeAlias = Sequence[Sequence[Hashable]]
"""The actions of each member, first one first; more than K are not read."""

_END: Final = "\0"  # stands for END in an encoded prefix: actions are numbered from 1
_NOT_GIVEN: Final = object()
_LISTS: Final = frozenset({list, tuple})
_ROWS: Final = frozenset({list, tuple, str})
_CODES: Final = "".join(map(chr, range(1, 4097)))  # enough for nearly all groups: longer ones are numbered as they come
_edits: Final = Levenshtein.distance
_SMALL: Final = 1000  # n x n x k up to which plain sets are faster than numpy: its calls cost more than the work in them
_DENSE: Final = 4096  # columns up to which it costs less to leave room for every possible bigram than to look for those that occur


def signals(actions: Actions, k: int, observations: Sequence[Sequence[Hashable]] | None = None) -> dict[str, float]:
    """The signals of one group at environment step `k`.

    `actions`: G >= 2 sequences of hashables of one type; one that is shorter than `k` is of a member that ended by itself.
    `observations[i][t]` is what member i saw before its action t + 1; without them `obs_unique_ratio` is absent. Leave failed and cancelled
    members out. Raises `GateError` for what cannot be compared, `ConfigError` for a bad `k`.
    """
    check_k(k)
    members = read_members(actions)
    _check_size(len(members))
    if _ROWS.issuperset(map(type, members)):
        prefixes = [member[:k] for member in members]
    else:
        prefixes = [read_sequence(member, index)[:k] for index, member in enumerate(members)]
    lengths = [*map(len, prefixes)]
    seen = None if observations is None else _seen(observations, lengths, k)
    flat = [*chain.from_iterable(prefixes)]
    kinds = {*map(type, flat)}
    if len(kinds) > 1:
        raise mixed_types(kinds)
    if not kinds <= PLAIN:
        _check_values(prefixes, "an action")
    # Numbered from 1 in order of appearance: the characters of a text, which is what the C code compares fastest.
    order = dict.fromkeys(flat)
    codes = dict(zip(order, _CODES if len(order) <= len(_CODES) else map(chr, count(1)), strict=False))
    encoded = "".join(map(codes.__getitem__, flat))
    whole = lengths.count(k)
    n = len(lengths)
    if whole == n:
        texts = [encoded[start : start + k] for start in range(0, n * k, k)]
    else:
        ends = [*accumulate(lengths)]
        texts = [encoded[end - length : end].ljust(k, _END) for end, length in zip(ends, lengths, strict=True)]
    return encoded_signals(texts, len(codes) + 1, n - whole, seen, k)


class PrefixSignals:
    """The same for one running group: actions arrive member by member, step by step, in any interleaving.

    A step costs the same however long the group runs, and nothing beyond step K is kept. A member is comparable once it has K actions or
    has ended by itself; the signals are those of `signals` for the same members. Members are named by any hashable.
    """

    __slots__ = ("_codes", "_ended", "_kind", "_prefixes", "_seen", "has_observations", "k")

    def __init__(self, k: int, *, has_observations: bool = False) -> None:
        check_k(k)
        self.k: Final = k
        self.has_observations: Final = has_observations  # then every step brings one
        self._codes: dict[Hashable, str] = {}  # of the actions seen so far
        self._kind: type | None = None  # of the actions
        self._prefixes: dict[Hashable, list[str]] = {}  # encoded, by member
        self._seen: dict[Hashable, Hashable] = {}  # what each member saw before its action at K
        self._ended: set[Hashable] = set()

    def add(self, member: Hashable, action: Hashable, observation: Any = _NOT_GIVEN) -> None:
        """The next action of a member, and what it saw before it. Steps beyond K change nothing."""
        if member in self._ended:
            raise GateError(f"expected no action of member {member!r} after its end, got {action!r} - forget it before it is replaced")
        prefix = self._prefixes.setdefault(member, [])
        if len(prefix) >= self.k:
            return
        if (observation is not _NOT_GIVEN) != self.has_observations:
            expected, advice = ("an", "give it") if self.has_observations else ("no", "build PrefixSignals with has_observations=True")
            raise GateError(f"expected {expected} observation with the action {action!r} of member {member!r} - {advice}")
        kind = type(action)
        if kind is not self._kind and self._kind is not None:
            raise mixed_types({self._kind, kind})
        if kind not in PLAIN:
            check_value(action, "an action", f"member {member!r}")
        if self.has_observations and type(observation) not in PLAIN:
            check_value(observation, "an observation", f"member {member!r}")
        self._kind = kind
        code = self._codes.get(action)
        if code is None:
            code = self._codes[action] = chr(len(self._codes) + 1)
        prefix.append(code)
        if len(prefix) == self.k and self.has_observations:
            self._seen[member] = observation

    def end(self, member: Hashable) -> None:
        """A member ended by itself."""
        self._prefixes.setdefault(member, [])
        self._ended.add(member)

    def forget(self, member: Hashable) -> None:
        """A member failed, was lost or cancelled: it is as if it had never been. Its name may be used again."""
        self._prefixes.pop(member, None)
        self._seen.pop(member, None)
        self._ended.discard(member)

    def is_comparable(self, member: Hashable) -> bool:
        """Whether a member has K actions or ended by itself."""
        return member in self._ended or len(self._prefixes.get(member, ())) == self.k

    @property
    def comparable(self) -> tuple[Hashable, ...]:
        """The comparable members."""
        return tuple(filter(self.is_comparable, self._prefixes))

    def signals(self, members: Iterable[Hashable] | None = None) -> dict[str, float]:
        """The signals of the given members, or of all comparable ones. Raises `GateError` for one that is not, and for less than two."""
        chosen = self.comparable if members is None else tuple(members)
        for member in chosen:
            if not self.is_comparable(member):
                raise GateError(f"expected members with {self.k} actions or ended ones, got {member!r} with less - wait for it")
        _check_size(len(chosen))
        prefixes = [self._prefixes[member] for member in chosen]
        ended = sum([len(prefix) < self.k for prefix in prefixes])
        seen = [self._seen.get(member, _END_SEEN) for member in chosen] if self.has_observations else None
        return encoded_signals(["".join(prefix).ljust(self.k, _END) for prefix in prefixes], len(self._codes) + 1, ended, seen, self.k)


class _EndSeen:
    """What a member that had ended saw before step K: equal to nothing but itself."""

    def __repr__(self) -> str:
        return "END"


_END_SEEN: Final = _EndSeen()


def encoded_signals(texts: list[str], codes: int, ended: int, seen: list[Hashable] | None, k: int) -> dict[str, float]:
    """The signals of n encoded prefixes of length k, of characters 0 to codes - 1."""
    n = len(texts)
    last = [text[-1] for text in texts]
    different = {*last}
    counts = [last.count(code) for code in different]
    measured = {
        # Sums of whole numbers first, one division last: the same float whatever the order, and the one that a decimal is read as.
        "prefix_edit_distance_mean": sum([_edits(a, b) for a, b in combinations(texts, 2)]) / (n * (n - 1) // 2 * k),
        "action_bigram_jaccard_mean": _bigram_distance(texts, codes, k) if k > 1 else 0.0,
        "unique_prefix_ratio": len({*texts}) / n,
        "unique_action_ratio": len(different) / n,
        # 1 - sum(c log2 c) / (n log2 n) with c the counts: exactly 0 and 1 at its ends.
        "action_entropy": 1.0 - math.fsum([c * math.log2(c) for c in counts]) / (n * math.log2(n)),
        "termination_fraction": ended / n,
    }
    if seen is not None:
        measured["obs_unique_ratio"] = len({*seen}) / n
    return measured


def _bigram_distance(texts: list[str], codes: int, k: int) -> float:
    """Mean over pairs of 1 - Jaccard of their sets of bigrams. Sums are rounded once (fsum), so that the order does not matter."""
    n = len(texts)
    if n * n * k > _SMALL:
        return _bigram_distance_of_many(texts, codes, k)
    shares = []
    for a, b in combinations([{*pairwise(text)} for text in texts], 2):
        common = len(a & b)
        shares.append(common / (len(a) + len(b) - common))
    return 1.0 - math.fsum(shares) / len(shares)


def _bigram_distance_of_many(texts: list[str], codes: int, k: int) -> float:
    """The same for many or long prefixes: members as rows of zeros and ones, one column per bigram."""
    n = len(texts)
    actions = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32).reshape(n, k)
    bigrams = actions[:, :-1].astype(np.int64) * codes + actions[:, 1:]  # [n, k - 1]
    columns = codes * codes
    if columns > _DENSE:
        found, positions = np.unique(bigrams, return_inverse=True)
        bigrams, columns = positions.reshape(n, k - 1), len(found)
    has = np.zeros(n * columns, dtype=np.float32)
    has[bigrams + np.arange(0, n * columns, columns)[:, None]] = 1.0
    rows = has.reshape(n, columns)
    common = (rows @ rows.T).astype(np.float64)  # [n, n] counts, and therefore exact
    sizes = common.diagonal()
    shares = common / (sizes[:, None] + sizes - common)  # all ordered pairs, and n ones on the diagonal
    return 1.0 - (math.fsum(shares.ravel().tolist()) - n) / (n * (n - 1))


def check_k(k: object) -> None:
    """Refuse what is no environment step. Raises `ConfigError`."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ConfigError(f"k: expected a whole number >= 1, got {k!r} - it is the environment step at which a group is looked at")


def read_members(actions: object) -> Sequence[Any]:
    """The members of a group as a list. Raises `GateError` for what has no order."""
    if type(actions) in _LISTS:  # nearly always: the other checks cost more than they look
        members: Sequence[Any] = actions  # type: ignore[assignment]
        return members
    if not has_order(actions):
        raise GateError(
            f"actions: expected one sequence of actions per member, got {short(actions)} ({type(actions).__name__}) - give a list of lists"
        )
    return list(actions)  # type: ignore[call-overload, no-any-return]


def has_order(values: object) -> bool:
    """Whether these are entries one after another, in an order that means something; a text is none."""
    is_none = isinstance(values, str | bytes | Mapping | Set)
    return not is_none and hasattr(values, "__len__") and hasattr(values, "__iter__")


def _check_size(n: int) -> None:
    if n < 2:
        raise GateError(f"actions: expected at least two members, got {n} - one alone has no pair to compare: set group_size to 2 or more")


def read_sequence(values: Any, index: int, what: str = "actions") -> Sequence[Any]:
    """A list of anything that has an order; arrays and tensors give Python's own numbers."""
    if hasattr(values, "tolist") and getattr(values, "ndim", 1) == 1:
        listed: list[Any] = values.tolist()
        return listed
    if isinstance(values, Sequence):
        return values if type(values) in _ROWS else list(values)
    raise GateError(f"{what} of member {index}: expected a sequence, got {short(values)} ({type(values).__name__}) - give a list")


def _seen(observations: Any, lengths: list[int], k: int) -> list[Hashable]:
    """What each member saw before its action at step k."""
    check_observations(observations, len(lengths))
    if not _ROWS.issuperset(map(type, observations)):
        observations = [read_sequence(row, index, "observations") for index, row in enumerate(observations)]
    try:
        seen = [row[k - 1] if length == k else _END_SEEN for row, length in zip(observations, lengths, strict=True)]
    except IndexError:
        index, got = next((i, len(row)) for i, (row, n) in enumerate(zip(observations, lengths, strict=True)) if n == k and len(row) < k)
        raise GateError(
            f"observations of member {index}: expected at least {k}, one before each of its first {k} actions, got {got} - "
            "give what it saw before each action, the first observation included"
        ) from None
    if not PLAIN.issuperset(map(type, seen)):
        _check_values([[value] for value in seen], "an observation")
    return seen


def check_observations(observations: Any, n: int) -> None:
    """Refuse what is not one entry per member. Raises `GateError`."""
    if type(observations) not in _LISTS and not has_order(observations):
        got = f"{short(observations)} ({type(observations).__name__})"
    elif len(observations) != n:
        got = f"{len(observations)}"
    else:
        return
    raise GateError(f"observations: expected one sequence per member, that is {n}, got {got} - give them for all members or for none")


def _check_values(rows: Iterable[Iterable[Any]], what: str) -> None:
    for index, row in enumerate(rows):
        for value in row:
            check_value(value, what, f"member {index}")


def mixed_types(kinds: Iterable[type]) -> GateError:
    """That actions are of several types."""
    names = ", ".join(sorted({kind.__name__ for kind in kinds}))
    return GateError(
        f"expected actions of one type, got {names} - convert them all to text, for example; an action that was not read "
        "counts as a step: give it a text of its own"
    )
