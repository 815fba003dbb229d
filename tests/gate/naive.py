"""The signals once more, slowly and obviously: straight from their definitions, one loop per symbol."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

END = ("the end", "of a member")  # equal to no action of the tests


def padded(actions: Sequence[Sequence[Hashable]], k: int) -> list[list[Hashable]]:
    return [(list(member[:k]) + [END] * k)[:k] for member in actions]


def levenshtein(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Fewest insertions, deletions and substitutions, by dynamic programming."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def pair_mean(values: list[list[Hashable]], distance) -> float:
    pairs = [(i, j) for i in range(len(values)) for j in range(i + 1, len(values))]
    return sum(distance(values[i], values[j]) for i, j in pairs) / len(pairs)


def jaccard_distance(a: Sequence[Hashable], b: Sequence[Hashable]) -> float:
    left = {(a[t], a[t + 1]) for t in range(len(a) - 1)}
    right = {(b[t], b[t + 1]) for t in range(len(b) - 1)}
    return 1 - len(left & right) / len(left | right)


def distinct(values: Sequence[object]) -> int:
    return sum(all(value != other for other in values[:i]) for i, value in enumerate(values))


def naive_signals(actions, k: int, observations=None) -> dict[str, float]:
    prefixes = padded(actions, k)
    n = len(prefixes)
    last = [prefix[k - 1] for prefix in prefixes]
    shares = [last.count(value) / n for i, value in enumerate(last) if value not in last[:i]]
    found = {
        "prefix_edit_distance_mean": pair_mean(prefixes, levenshtein) / k,
        "action_bigram_jaccard_mean": pair_mean(prefixes, jaccard_distance) if k > 1 else 0.0,
        "unique_prefix_ratio": distinct(prefixes) / n,
        "unique_action_ratio": distinct(last) / n,
        "action_entropy": sum(-p * math.log2(p) for p in shares) / math.log2(n),
        "termination_fraction": sum(len(member) <= k - 1 for member in actions) / n,
    }
    if observations is not None:
        seen = [END if len(member) < k else observations[i][k - 1] for i, member in enumerate(actions)]
        found["obs_unique_ratio"] = distinct(seen) / n
    return found
