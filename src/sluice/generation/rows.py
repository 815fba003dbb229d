"""The table of live sequences: who sits in which slot, what is stored, what comes next. Plain numpy, no model.

Rows 0 .. ready - 1 wait for their next token only; rows ready .. count - 1, in order of arrival, still have tokens to prefill. Removing
rows moves others so that both blocks stay dense, and the ready block in order of edition (the set of weights that computes a row): a
decoding pass then reads a plain slice of the cache.

Invariant: editions never fall from one row to the next. New rows have the newest one, and only the front of the waiting block has begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from sluice.types import Logprobs, TokenIds

Index = npt.NDArray[np.int64]
Owner = TypeVar("Owner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """A stretch of the waiting block to prefill in one pass, by one edition. Rows with the same tokens are computed once."""

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
        self.edition = np.zeros(max_slots, dtype=np.int64)  # which set of weights computes it
        self.ticket = np.zeros(max_slots, dtype=np.int64)  # where the engine counts the row's tokens
        self.account = np.zeros(max_slots, dtype=np.int64)  # which of the engine's totals they go to
        self.owners: list[Owner] = []  # [count]
        self.ready = 0
        self._per_row = (
            self.length, self.cached, self.prompt_length, self.limit, self.temperature, self.noise_key, self.edition, self.ticket,
            self.account,
        )  # fmt: skip

    @property
    def count(self) -> int:
        """Live rows."""
        return len(self.owners)

    def add(
        self,
        owner: Owner,
        prompt: TokenIds,
        *,
        max_new: int,
        temperature: float,
        noise_key: int,
        edition: int = 0,
        ticket: int = 0,
        account: int = 0,
    ) -> int:
        """Seat a sequence in the next free slot, at the end of the waiting block. edition: the newest. Returns the slot."""
        row = len(self.owners)
        n = len(prompt)
        self.tokens[row, :n] = prompt
        self.length[row] = self.prompt_length[row] = n
        self.cached[row] = 0
        self.limit[row] = n + max_new
        self.temperature[row] = temperature
        self.noise_key[row] = noise_key
        self.edition[row] = edition
        self.ticket[row] = ticket
        self.account[row] = account
        self.owners.append(owner)
        return row

    def sampled(self, row: int) -> tuple[TokenIds, Logprobs]:
        """Copies of what a row has sampled, with its log-probs. [N], [N]"""
        span = slice(int(self.prompt_length[row]), int(self.length[row]))
        return self.tokens[row, span].copy(), self.logprobs[row, span].copy()

    def append(self, rows: Index, tokens: TokenIds, logprobs: Logprobs) -> None:
        """Add one sampled token to each of the rows. rows, tokens, logprobs [R]"""
        at = self.length[rows]
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = logprobs
        self.length[rows] += 1

    def stretches(self) -> list[tuple[int, int, int]]:
        """What one decoding pass each can compute of the ready block: edition, first slot, slot after the last."""
        editions = self.edition[: self.ready]
        if not self.ready or editions[0] == editions[-1]:
            return [(int(editions[0]), 0, self.ready)] if self.ready else []
        bounds = [0, *(np.flatnonzero(editions[1:] != editions[:-1]) + 1).tolist(), self.ready]
        return [(int(editions[first]), first, end) for first, end in pairwise(bounds)]

    def has_begun(self, edition: int) -> bool:
        """Whether any row has been computed by this edition."""
        live = slice(0, self.count)
        return bool(np.any((self.edition[live] == edition) & (self.cached[live] > 0)))

    def renew(self, edition: int) -> None:
        """Give the newest edition to the rows that have not begun."""
        live = slice(0, self.count)
        self.edition[live][self.cached[live] == 0] = edition

    def plan_prefill(self, max_tokens: int) -> Prefill:
        """Choose what to prefill next: as many waiting rows as fit into `max_tokens` computed tokens (padding included), at least one.

        All are of one edition.
        A first sequence longer than that is prefilled in pieces, together with the siblings right behind it.
        """
        leaders: list[int] = []
        leader_of: list[int] = []
        seen: dict[tuple[int, bytes], int] = {}
        widest = 0
        is_complete = True
        edition = self.edition[self.ready]
        same = self.ready + int(np.count_nonzero(self.edition[self.ready : self.count] == edition))
        for row in range(self.ready, same):
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
        come: list[Index] = []
        go: list[Index] = []
        ready = 0  # rows of the ready block so far
        for _, first, end in self.stretches():
            kept = np.flatnonzero(keep[first:end]) + first
            start, ready = ready, ready + len(kept)
            is_hole = np.ones(len(kept), dtype=np.bool_)
            is_hole[kept[kept < ready] - start] = False
            come.append(kept[kept >= ready])  # rows that now stand beyond the stretch's new end fill its holes
            go.append(np.flatnonzero(is_hole) + start)
        waiting = np.flatnonzero(keep[self.ready :]) + self.ready
        sources = np.concatenate([*come, waiting])
        targets = np.concatenate([*go, np.arange(ready, ready + len(waiting))])
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
