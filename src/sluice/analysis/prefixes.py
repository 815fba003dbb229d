"""The seven signals of many groups at many K in one go: the same numbers as `sluice.gate.signals`, several times faster.

A prefix of length K, filled up with END, is the beginning of the sequence that is filled up with END for ever. So a sequence is encoded
once for all K, and what a longer prefix adds to a shorter one (a bigram, a difference) is counted by the K at which it comes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cpdist

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int32]

_GROUPS_AT_ONCE: Final = 256  # their tables stay in the processor's cache
_STEPS_AT_ONCE: Final = 2_000_000  # of all members of so many groups: their tables fit into memory, however large K is


def signals_at(actions: Codes, lengths: Ints, ks: Sequence[int], observations: Codes | None = None) -> dict[int, dict[str, Floats]]:
    """The signals of N groups at each K: [N] per name.

    `actions`: [N, G, T] numbers of actions from 1, equal where the actions of a group are equal, 0 from the end of a member on.
    `observations`: the same of what each member saw before its action. `lengths`: [N, G] environment steps of each member. T may be less
    than K: what lies beyond is END.
    """
    ordered = sorted(set(ks))
    most = max(ordered)
    parts = []
    size = max(1, min(_GROUPS_AT_ONCE, _STEPS_AT_ONCE // (actions.shape[1] * most)))
    for start in range(0, len(actions), size):
        chunk = slice(start, start + size)
        seen = None if observations is None else _filled(observations[chunk], most)
        parts.append(_signals(_filled(actions[chunk], most), lengths[chunk], ordered, seen))
    return {k: {name: np.concatenate([part[k][name] for part in parts]) for name in parts[0][k]} for k in ordered}


def _filled(codes: Codes, most: int) -> Codes:
    """[N, G, most]: cut off, or filled up with END."""
    n, g, t = codes.shape
    if t >= most:
        return codes[:, :, :most]
    return np.concatenate([codes, np.zeros((n, g, most - t), dtype=codes.dtype)], axis=2)


def _signals(actions: Codes, lengths: Ints, ks: Sequence[int], observations: Codes | None) -> dict[int, dict[str, Floats]]:
    g = actions.shape[1]
    left, right = np.array([*combinations(range(g), 2)]).T
    distances = _edit_distances(actions, left, right, ks)
    shares = _common_bigrams(actions, left, right, ks)
    prefixes = _different_prefixes(actions, ks)
    found = {}
    for k in ks:
        last = actions[:, :, k - 1].tolist()
        found[k] = {
            "prefix_edit_distance_mean": distances[k].sum(axis=1) / (len(left) * k),
            # Rounded once, so that the order of the members does not matter.
            "action_bigram_jaccard_mean": np.array([1.0 - math.fsum(row) / len(row) for row in shares[k].tolist()])
            if k > 1
            else np.zeros(len(actions)),
            "unique_prefix_ratio": prefixes[k] / g,
            "unique_action_ratio": np.array([len({*row}) for row in last]) / g,
            "action_entropy": np.array([_entropy(row) for row in last]),
            "termination_fraction": (lengths < k).sum(axis=1) / g,
        }
        if observations is not None:
            found[k]["obs_unique_ratio"] = np.array([len({*row}) for row in observations[:, :, k - 1].tolist()]) / g
    return found


def _edit_distances(actions: Codes, left: Ints, right: Ints, ks: Sequence[int]) -> dict[int, npt.NDArray[np.int32]]:
    """[N, P] Levenshtein distances of the prefixes of each pair, for each K."""
    n, g, most = actions.shape
    # Numbers as the characters of texts, which is what rapidfuzz compares fastest.
    encoded = (actions + 1).astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")
    texts = [encoded[start : start + most] for start in range(0, n * g * most, most)]
    rows = np.arange(0, n * g, g)[:, None]
    ones, others = (rows + left).ravel().tolist(), (rows + right).ravel().tolist()
    found = {}
    for k in ks:
        prefixes = [text[:k] for text in texts]
        distances = cpdist(
            [prefixes[one] for one in ones], [prefixes[other] for other in others], scorer=Levenshtein.distance, dtype=np.int32
        )
        found[k] = distances.reshape(n, len(left))
    return found


def _common_bigrams(actions: Codes, left: Ints, right: Ints, ks: Sequence[int]) -> dict[int, Floats]:
    """[N, P] Jaccard similarity of the sets of bigrams of each pair, for each K > 1.

    A bigram is in the set of a member from the K of its first occurrence on, and common to two from the later one of theirs on: so sets are
    counted by when what is in them came.
    """
    n, g, most = actions.shape
    bigrams = actions[:, :, :-1].astype(np.int64) * (int(actions.max(initial=0)) + 1) + actions[:, :, 1:]  # [N, G, T - 1]
    numbers = _numbered(bigrams.reshape(n, -1)).reshape(bigrams.shape)
    never = most + 1
    first = np.full((n, g, int(numbers.max(initial=0)) + 1), never, dtype=np.int32)  # K from which each bigram is there
    for t in range(most - 2, -1, -1):
        np.put_along_axis(first, numbers[:, :, t : t + 1], t + 2, axis=2)
    sizes = _counted(first, never)  # [N, G, K]
    common = _counted(np.maximum(first[:, left], first[:, right]), never)  # [N, P, K]
    return {k: common[:, :, k] / (sizes[:, left, k] + sizes[:, right, k] - common[:, :, k]) for k in ks if k > 1}


def _numbered(values: Ints) -> Ints:
    """[N, M] numbers from 0 in place of values, equal within a row where those are equal."""
    order = np.argsort(values, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=1)
    rank = np.zeros_like(values)
    np.cumsum(ordered[:, 1:] != ordered[:, :-1], axis=1, out=rank[:, 1:])
    numbers = np.empty_like(values)
    np.put_along_axis(numbers, order, rank, axis=1)
    return numbers


def _counted(times: npt.NDArray[np.int32], never: int) -> Ints:
    """[N, M, T + 2] how many of the times [N, M, B] are at most each K."""
    n, m, _ = times.shape
    rows = np.arange(n * m).reshape(n, m, 1) * (never + 1)
    counts = np.bincount((times + rows).ravel(), minlength=n * m * (never + 1))
    return np.cumsum(counts.reshape(n, m, never + 1), axis=2)


def _different_prefixes(actions: Codes, ks: Sequence[int]) -> dict[int, Ints]:
    """[N] how many different prefixes, for each K."""
    n, g, most = actions.shape
    is_same = np.ones((n, g, g), dtype=np.bool_)
    wanted, found = {*ks}, {}
    for k in range(1, most + 1):
        step = actions[:, :, k - 1]
        is_same &= step[:, :, None] == step[:, None, :]
        if k in wanted:
            has_earlier = np.tril(is_same, -1).any(axis=2)
            found[k] = (~has_earlier).sum(axis=1)
    return found


def _entropy(row: Sequence[int]) -> float:
    """As `sluice.gate` has it: exactly 0 and 1 at its ends."""
    n = len(row)
    return 1.0 - math.fsum([c * math.log2(c) for c in map(row.count, {*row})]) / (n * math.log2(n))
