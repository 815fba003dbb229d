"""The table of live sequences: who sits in which slot, what is stored, what comes next. Plain numpy, no model.

Rows 0 .. ready - 1 wait for their next token only; rows ready .. count - 1, in order of arrival, still have tokens to prefill. Removing
rows moves others so that both blocks stay dense: a decoding pass then reads a plain slice of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from sluice.types import Logprobs, TokenIds

Index = npt.NDArray[np.int64]
Owner = TypeVar("Owner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """A stretch of the waiting block to prefill in one pass. Rows with the same tokens are computed once."""

    rows: Index  # [R] consecutive slots from `ready` on
    leaders: Index  # [U] the slots whose tokens are computed
    leader_of: Index  # [R] index into `leaders`
    counts: Index  # [U] tokens to compute for each leader
    is_complete: bool  # whether the rows then wait for their next token only; False: a piece of one long sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Slots whose cache entries must follow their rows, as if all at once."""

    sources: Index
    targets: Index
    length: int  # entries to copy


class RowTable(Generic[Owner]):
    """Live sequences of at most `max_slots` owners, each at most `max_length` tokens long."""

    def __init__(self, max_slots: int, max_length: int) -> None:
        # Zero pages are mapped on first touch: a large table costs memory only where it is used.
        self.tokens = np.zeros((max_slots, max_length), dtype=np.int64)  # prompt and sampled tokens
        self.logprobs = np.zeros((max_slots, max_length), dtype=np.float32)  # of the sampled ones, at the same index
        self.length = np.zeros(max_slots, dtype=np.int64)  # tokens known
        self.cached = np.zeros(max_slots, dtype=np.int64)  # tokens whose keys and values are stored
        self.prompt_length = np.zeros(max_slots, dtype=np.int64)
        self.limit = np.zeros(max_slots, dtype=np.int64)  # tokens at which the row ends as "length"
        self.temperature = np.zeros(max_slots, dtype=np.float32)
        self.noise_key = np.zeros(max_slots, dtype=np.uint64)
        self.version = np.zeros(max_slots, dtype=np.int64)  # of the weights that sampled the first token; -1: none yet
        self.ticket = np.zeros(max_slots, dtype=np.int64)  # where the engine counts the row's tokens
        self.account = np.zeros(max_slots, dtype=np.int64)  # which of the engine's totals they go to
        self.owners: list[Owner] = []  # [count]
        self.ready = 0
        self._per_row = (
            self.length, self.cached, self.prompt_length, self.limit, self.temperature, self.noise_key, self.version, self.ticket,
            self.account,
        )  # fmt: skip

    @property
    def count(self) -> int:
        """Live rows."""
        return len(self.owners)

    def add(
        self, owner: Owner, prompt: TokenIds, *, max_new: int, temperature: float, noise_key: int, ticket: int = 0, account: int = 0
    ) -> int:
        """Seat a sequence in the next free slot, at the end of the waiting block. Returns the slot."""
        row = len(self.owners)
        n = len(prompt)
        self.tokens[row, :n] = prompt
        self.length[row] = self.prompt_length[row] = n
        self.cached[row] = 0
        self.limit[row] = n + max_new
        self.temperature[row] = temperature
        self.noise_key[row] = noise_key
        self.version[row] = -1
        self.ticket[row] = ticket
        self.account[row] = account
        self.owners.append(owner)
        return row

    def sampled(self, row: int) -> tuple[TokenIds, Logprobs]:
        """Copies of what a row has sampled, with its log-probs. [N], [N]"""
        span = slice(int(self.prompt_length[row]), int(self.length[row]))
        return self.tokens[row, span].copy(), self.logprobs[row, span].copy()

    def append(self, first: int, tokens: TokenIds, logprobs: Logprobs, version: int) -> None:
        """Add one sampled token to each of the rows `first`, `first + 1`, ... tokens, logprobs [R]"""
        rows = np.arange(first, first + len(tokens))
        span = slice(first, first + len(tokens))
        at = self.length[span]
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = logprobs
        self.version[span] = np.where(self.version[span] < 0, version, self.version[span])
        self.length[span] += 1

    def plan_prefill(self, max_tokens: int) -> Prefill:
        """Choose what to prefill next: as many waiting rows as fit into `max_tokens` computed tokens (padding included), at least one.

        A first sequence longer than that is prefilled in pieces, together with the siblings right behind it.
        """
        leaders: list[int] = []
        leader_of: list[int] = []
        seen: dict[tuple[int, bytes], int] = {}
        widest = 0
        is_complete = True
        for row in range(self.ready, self.count):
            cached, length = int(self.cached[row]), int(self.length[row])
            key = (cached, self.tokens[row, :length].tobytes())
            index = seen.get(key)
            if index is None:
                width = max(widest, length - cached)
                if leaders and (not is_complete or (len(leaders) + 1) * width > max_tokens):
                    break
                is_complete = width <= max_tokens
                widest = width
                index = seen[key] = len(leaders)
                leaders.append(row)
            leader_of.append(index)
        leading = np.array(leaders, dtype=np.int64)
        return Prefill(
            rows=np.arange(self.ready, self.ready + len(leader_of)),
            leaders=leading,
            leader_of=np.array(leader_of, dtype=np.int64),
            counts=np.minimum(self.length[leading] - self.cached[leading], max_tokens),
            is_complete=is_complete,
        )

    def forget_cache(self) -> None:
        """Treat nothing as stored: every row waits for a prefill of all its tokens."""
        self.cached[: self.count] = 0
        self.ready = 0

    def remove(self, rows: Sequence[int] | Index) -> tuple[Moves | None, list[tuple[int, Owner]]]:
        """Free slots and close the gaps. Returns the cache entries to move, and (slot, owner) of every row that moved."""
        keep = np.ones(self.count, dtype=np.bool_)
        keep[rows] = False
        ready = int(np.count_nonzero(keep[: self.ready]))
        late = np.flatnonzero(keep[ready : self.ready]) + ready  # ready rows that now stand beyond the ready block
        waiting = np.flatnonzero(keep[self.ready :]) + self.ready
        sources = np.concatenate([late, waiting])
        targets = np.concatenate([np.flatnonzero(~keep[:ready]), np.arange(ready, ready + len(waiting))])
        is_move = sources != targets
        sources, targets = sources[is_move], targets[is_move]
        self.ready = ready
        moved: list[tuple[int, Owner]] = []
        moves: Moves | None = None
        if len(sources):
            longest = int(self.length[sources].max())
            self.tokens[targets, :longest] = self.tokens[sources, :longest]
            self.logprobs[targets, :longest] = self.logprobs[sources, :longest]
            stored = self.cached[sources]
            for column in self._per_row:
                column[targets] = column[sources]
            moved = [(target, self.owners[source]) for source, target in zip(sources.tolist(), targets.tolist(), strict=True)]
            for target, owner in moved:
                self.owners[target] = owner
            if stored.any():
                moves = Moves(sources=sources[stored > 0], targets=targets[stored > 0], length=int(stored.max()))
        del self.owners[ready + len(waiting) :]
        return moves, moved
