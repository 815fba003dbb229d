"""What to prefill next, and whether yet. Plain numpy, no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sluice.generation.rows import Index, RowTable

_DUE_SHARE = 4  # one in so many of the open requests waits: a pass for them is worth its fixed cost
_MOST_DECODES = 4  # decoding passes for which a dialogue's new tokens wait for company at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Rows to prefill in one pass, by one edition. Rows with the same tokens are computed once."""

    rows: Index  # [R]
    leaders: Index  # [U] the rows whose tokens are computed, in order
    leader_of: Index  # [R] index into `leaders`
    counts: Index  # [U] tokens to compute for each leader
    is_complete: bool  # whether the rows then wait for their next token only; False: a piece of one long sequence


def plan_prefill(rows: RowTable[Any], max_tokens: int) -> Prefill:
    """Choose what to prefill next, in order of arrival: as much as fits into `max_tokens` computed tokens (padding included).

    All are of the edition of the first. A first row with more tokens than that is prefilled in pieces, together with its siblings. A row
    that would make the pass more padding than tokens waits for another one.
    """
    waiting = rows.waiting()
    edition = rows.edition[waiting[0]]
    leaders: list[int] = []
    followers: list[tuple[int, int]] = []  # row, index of its leader
    seen: dict[tuple[int, int, bytes], int] = {}
    widest = real = 0
    is_complete = True
    for row in waiting[rows.edition[waiting] == edition].tolist():
        cached, length = int(rows.cached[row]), int(rows.length[row])
        key = (cached, int(rows.lineage[row]), rows.tokens[row, :length].tobytes())
        index = seen.get(key)
        if index is None:
            new = length - cached
            padded = (len(leaders) + 1) * max(widest, new)
            if leaders and (not is_complete or padded > max_tokens or padded > 2 * (real + new)):
                continue
            is_complete = new <= max_tokens
            widest = max(widest, new)
            real += new
            index = seen[key] = len(leaders)
            leaders.append(row)
        followers.append((row, index))
    order = np.argsort(leaders)  # rows that stand side by side can be read without a copy
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    leading = np.array(leaders, dtype=np.int64)[order]
    return Prefill(
        rows=np.array([row for row, _ in followers], dtype=np.int64),
        leaders=leading,
        leader_of=place[[index for _, index in followers]],
        counts=np.minimum(rows.length[leading] - rows.cached[leading], max_tokens),
        is_complete=is_complete,
    )


class Pace:
    """Whether what waits is worth a pass yet.

    A pass costs about the same for one dialogue's few new tokens as for several dialogues'. So they wait for company: until one in four
    open requests waits, or nothing decodes, and for a few decoding passes at most. Whoever begins anew, or is in the middle of its tokens,
    never waits, and takes the others along.
    """

    def __init__(self) -> None:
        self._decodes = 0  # since somebody began to wait

    def is_due(self, rows: RowTable[Any]) -> bool:
        """Whether to prefill before the next decoding pass. Counts that pass when not."""
        live = slice(0, rows.count)
        is_waiting = rows.is_open[live] & ~rows.is_ready[live]
        waiting = int(np.count_nonzero(is_waiting))
        is_due = waiting > 0 and (
            _DUE_SHARE * waiting >= rows.open_count
            or self._decodes >= _MOST_DECODES
            or bool(np.any(is_waiting & ((rows.cached[live] == 0) | rows.has_begun[live])))
        )
        self._decodes = 0 if is_due or not waiting else self._decodes + 1
        return is_due
