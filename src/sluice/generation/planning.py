"""Who is computed next, whether yet, and how. Plain numpy, no model.

The numbers are of a model of 0.7M parameters on one core, small enough that the fixed cost of a pass counts. A decoding pass took 4 ms and
0.3 ms for each row of 500 tokens, twice that for one that had to be copied. A prefill pass took 4.5 ms and 1.3 ms for each row of 21 tokens
after 500. To move such a row to another slot took 0.4 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sluice.generation.rows import Index, RowTable

# One in so many open requests waits. To wait for more saves passes and leaves rows idle.
_DUE_SHARE = 4
# Decoding passes for which a dialogue's new tokens wait for company at most: a prefill pass after every four adds at most a fourth.
_MOST_DECODES = 4
# In rows of a decoding pass that reads a slice:
_COPIED = 2.0  # a row that is copied to be read
_MOVED = 1.5  # a row that is moved to another slot
_MARGIN = 4.0  # moves are worth so much more than they cost, because other rows join and leave meanwhile
_MEMORY = 0.05  # share of the last ended request in the mean length of responses


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Rows that decode in one pass, by one edition, and the slots that are computed for it."""

    edition: int
    rows: Index  # [R]
    slots: Index  # [S] the slice from the first of them to the last, or only them

    @property
    def excess(self) -> float:
        """What it costs more than if the rows stood side by side, in rows."""
        ready, computed = len(self.rows), len(self.slots)
        if computed > ready:
            return computed - ready
        return 0.0 if self.rows[-1] - self.rows[0] + 1 == ready else (_COPIED - 1) * ready


def plan_decode(rows: RowTable[Any]) -> list[Decode]:
    """One pass for each edition that has ready rows, in order. Few rows far apart are copied, not computed with all that is between."""
    passes = []
    for ready in rows.ready():
        first, end = int(ready[0]), int(ready[-1]) + 1
        slots = ready if _COPIED * len(ready) < end - first else np.arange(first, end)
        passes.append(Decode(edition=int(rows.edition[first]), rows=ready, slots=slots))
    return passes


class Spread:
    """Whether the rows that decode stand so far apart, for so long, that they are better moved together.

    They are when the distance has cost what the moves do, and will cost it again if those rows sample as many tokens as responses do in the
    mean. So they are never for the sake of short turns, whose rows are others a few passes later.
    """

    def __init__(self) -> None:
        self._excess = 0.0  # of the passes since the rows last stood together
        self._mean_length: float | None = None  # of responses

    def note_end(self, sampled: int) -> None:
        """A request has ended with so many tokens."""
        mean = float(sampled) if self._mean_length is None else self._mean_length
        self._mean_length = mean + _MEMORY * (sampled - mean)

    def is_too_wide(self, rows: RowTable[Any], passes: list[Decode]) -> bool:
        """Whether to move rows together before these passes, which are then planned anew."""
        excess = sum(each.excess for each in passes)
        self._excess = self._excess + excess if excess else 0.0
        if not self._excess:
            return False
        ready = np.concatenate([each.rows for each in passes])
        ahead = float(np.mean(rows.limit[ready] - rows.length[ready]))  # tokens at most
        if self._mean_length is not None:
            ahead = min(ahead, self._mean_length)
        moves = rows.misplaced()
        if not moves or min(self._excess, ahead * excess) < _MARGIN * _MOVED * moves:
            return False
        self._excess = 0.0
        return True


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
