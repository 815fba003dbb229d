"""Who gets which slot: requests in order of arrival, dialogues that go on where they are, and those at rest that must make room."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from sluice.generation.base import PURPOSES
from sluice.generation.dialogues import Dialogue
from sluice.generation.handle import SlotHandle
from sluice.generation.rows import Index, RowTable
from sluice.generation.sampling import noise_key

# A dialogue at rest keeps its slot for so long though others wait: a fast environment has replied by then even to a crowd, and to compute
# some hundred tokens anew takes about as long.
_KEEP_SLOT_S = 0.05


class Seats:
    """The slots of an engine, and who waits for one. For the engine's thread; `seat` is called under the engine's lock."""

    def __init__(self, rows: RowTable[Dialogue[SlotHandle]], max_slots: int) -> None:
        self.waiting: deque[SlotHandle] = deque()  # for a slot, in order of arrival; may hold settled ones
        self.evicted = 0  # dialogues that had to make room
        self.live = np.zeros(max_slots, dtype=np.int64)  # by ticket: tokens sampled for a seated request
        self._rows = rows
        self._max_slots = max_slots
        self._tickets = list(range(max_slots - 1, -1, -1))

    def seat(self, arrived: Sequence[SlotHandle], *, edition: int, now: float) -> float | None:
        """Seat whom there is a slot for. edition: the newest. now: as in `Dialogue.rested_at`, in seconds.

        A request whose dialogue rests in a slot goes on there. The others get free slots, then those of the dialogues that have rested
        longest. Returns in how many seconds the next one will have rested for long enough; None when nobody waits for that.
        """
        rows = self._rows
        for handle in arrived:
            if handle.settled is None and handle.dialogue.slot >= 0:
                dialogue = handle.dialogue
                rows.go_on(dialogue.slot, dialogue.take_unseated(handle.request.prompt_ids), **self._terms(handle))
            else:
                self.waiting.append(handle)
        resting: list[int] | None = None
        while self.waiting:
            handle = self.waiting[0]
            if handle.settled is None:
                slot = None
                if rows.count == self._max_slots:
                    if resting is None:
                        resting = rows.resting()[::-1].tolist()
                    if not resting:
                        return None
                    patience_s = rows.owners[resting[-1]].rested_at + _KEEP_SLOT_S - now
                    if patience_s > 0:
                        return patience_s
                    slot = resting.pop()
                    self.put_aside([slot])
                    self.evicted += 1
                dialogue = handle.dialogue
                tokens = dialogue.take_unseated(handle.request.prompt_ids)
                dialogue.slot = rows.seat(dialogue, tokens, edition=edition, slot=slot, **self._terms(handle))
            self.waiting.popleft()
        return None

    def _terms(self, handle: SlotHandle) -> dict[str, Any]:
        """What a row has to know of a request that gets its slot now."""
        request = handle.request
        handle.ticket = self._tickets.pop()
        self.live[handle.ticket] = 0
        handle.is_seated = True
        return {
            "max_new": request.max_new_tokens, "temperature": request.temperature, "noise_key": noise_key(request.seed),
            "ticket": handle.ticket, "account": PURPOSES.index(request.purpose),
        }  # fmt: skip

    def settled(self, handle: SlotHandle) -> None:
        """A seated request has its outcome: others may count with its ticket."""
        self._tickets.append(handle.ticket)

    def clear(self, rows: RowTable[Dialogue[SlotHandle]]) -> None:
        """Nobody sits or waits any more; `rows` has no room. Counts stay."""
        self.waiting.clear()
        self._rows = rows

    def put_aside(self, slots: Sequence[int] | Index) -> None:
        """Take the tokens of dialogues at rest out of their slots, which others may have then."""
        rows = self._rows
        for slot in slots:
            dialogue = rows.owners[slot]
            dialogue.slot = -1
            dialogue.unseated.insert(0, rows.tokens[slot, : rows.length[slot]].copy())
