"""The seven signals of many groups at many K in one go: the same numbers as `sluice.gate.signals`, some ten times faster.

A prefix of length K, filled up with END, is the beginning of the sequence that is filled up with END for ever. So one table of edit
distances of two such sequences has the distances of all their prefixes on its diagonal, and the sets of bigrams of a longer prefix hold
those of a shorter one. All pairs of all groups go through the same table cell at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int32]

_GROUPS_AT_ONCE: Final = 256  # their tables stay in the processor's cache


def signals_at(actions: Codes, lengths: Ints, ks: Sequence[int], observations: Codes | None = None) -> dict[int, dict[str, Floats]]:
    """The signals of N groups at each K: [N] per name.

    `actions`: [N, G, T] numbers of actions from 1, equal where the actions of a group are equal, 0 from the end of a member on.
    `observations`: the same of what each member saw before its action. `lengths`: [N, G] environment steps of each member. T may be less
    than K: what lies beyond is END.
    """
    ordered = sorted(set(ks))
    most = max(ordered)
    parts = []
    for start in range(0, len(actions), _GROUPS_AT_ONCE):
        chunk = slice(start, start + _GROUPS_AT_ONCE)
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


def _edit_distances(actions: Codes, left: Ints, right: Ints, ks: Sequence[int]) -> dict[int, npt.NDArray[np.int16]]:
    """[N, P] Levenshtein distances of the prefixes of each pair, for each K."""
    most = max(ks)
    a = np.ascontiguousarray(actions[:, left].transpose(2, 0, 1))  # [T, N, P]
    b = np.ascontiguousarray(actions[:, right].transpose(2, 0, 1))
    wanted, found = {*ks}, {}
    row = [np.full(a.shape[1:], j, dtype=np.int16) for j in range(most + 1)]
    for i in range(1, most + 1):
        above, row[0] = row[0], np.full(a.shape[1:], i, dtype=np.int16)
        for j in range(1, most + 1):
            cell = above + (a[i - 1] != b[j - 1])
            np.minimum(cell, np.minimum(row[j], row[j - 1]) + np.int16(1), out=cell)
            above, row[j] = row[j], cell
        if i in wanted:
            found[i] = row[i]
    return found


def _common_bigrams(actions: Codes, left: Ints, right: Ints, ks: Sequence[int]) -> dict[int, Floats]:
    """[N, P] Jaccard similarity of the sets of bigrams of each pair, for each K > 1."""
    n, g, most = actions.shape
    bigrams = actions[:, :, :-1].astype(np.int64) * (int(actions.max(initial=0)) + 1) + actions[:, :, 1:]  # [N, G, T - 1]
    sizes = np.zeros((n, g), dtype=np.int64)
    common = np.zeros((n, g, g), dtype=np.int64)
    wanted, found = {*ks}, {}
    for k in range(2, most + 1):
        latest = bigrams[:, :, k - 2]  # [N, G] the one that the prefix of length k adds
        # [N, i, j]: whether that of member i is among the earlier ones of member j
        had = (latest[:, :, None, None] == bigrams[:, None, :, : k - 2]).any(axis=3)
        is_new = ~had.diagonal(axis1=1, axis2=2)
        from_i = is_new[:, :, None] & had
        both = is_new[:, :, None] & is_new[:, None, :] & (latest[:, :, None] == latest[:, None, :])
        common += from_i.astype(np.int64) + from_i.transpose(0, 2, 1) + both
        sizes += is_new
        if k in wanted:
            shared = common[:, left, right]
            found[k] = shared / (sizes[:, left] + sizes[:, right] - shared)
    return found


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
