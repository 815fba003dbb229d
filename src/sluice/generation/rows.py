"""The table of sequences in slots: what each consists of, how much of it is stored, who comes next. Plain numpy, no model.

A row is in one of three states. At rest: no request of it is open; it holds its place in case its dialogue goes on. Waiting: it has tokens
to prefill. Ready: it waits for its next token only. Rows of any state stand side by side, so that none moves because its state changes.

Invariants: slots 0 .. count - 1 are taken. Editions (sets of weights) never fall from one row to the next, so that each has a slice of its
own; new rows and rows at rest have the newest one. `cached` < `length` always: the last token of a row is never stored yet. A ready row has
exactly that one token to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from sluice.types import Logprobs, TokenIds

Index = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Owner = TypeVar("Owner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Slots whose cache entries must follow their rows, as if all at once."""

    sources: Index
    targets: Index
    length: int  # entries to copy


class RowTable(Generic[Owner]):
    """At most `max_slots` sequences, each at most `max_length` tokens long."""

    def __init__(self, max_slots: int, max_length: int) -> None:
        # Zero pages are mapped on first touch: a large table costs memory only where it is used.
        self.tokens = np.zeros((max_slots, max_length), dtype=np.int64)  # prompts and sampled tokens
        self.logprobs = np.zeros((max_slots, max_length), dtype=np.float32)  # of the tokens sampled for the last request, at the same index
        self.length = np.zeros(max_slots, dtype=np.int64)  # tokens known
        self.cached = np.zeros(max_slots, dtype=np.int64)  # tokens whose keys and values are stored
        self.edition = np.zeros(max_slots, dtype=np.int64)  # which set of weights computes it
        self.lineage = np.zeros(max_slots, dtype=np.int64)  # not 0: what is stored is of several sets of weights; a number of its own
        self.since = np.zeros(max_slots, dtype=np.int64)  # when it began to wait, or to rest; only the order counts
        self.is_open = np.zeros(max_slots, dtype=np.bool_)  # a request of it is open: waiting or ready
        self.is_ready = np.zeros(max_slots, dtype=np.bool_)
        self.has_begun = np.zeros(max_slots, dtype=np.bool_)  # something has been computed for the open request
        # Of the open request, or the last one:
        self.prompt_length = np.zeros(max_slots, dtype=np.int64)  # tokens before the first one it samples
        self.limit = np.zeros(max_slots, dtype=np.int64)  # tokens at which it ends as "length"
        self.temperature = np.zeros(max_slots, dtype=np.float32)
        self.noise_key = np.zeros(max_slots, dtype=np.uint64)
        self.ticket = np.zeros(max_slots, dtype=np.int64)  # where the engine counts the request's tokens
        self.account = np.zeros(max_slots, dtype=np.int64)  # which of the engine's totals they go to
        self.owners: list[Owner] = []  # [count]
        self._now = 0
        self._per_row: tuple[npt.NDArray[np.generic], ...] = (
            self.length, self.cached, self.edition, self.lineage, self.since, self.is_open, self.is_ready, self.has_begun,
            self.prompt_length, self.limit, self.temperature, self.noise_key, self.ticket, self.account,
        )  # fmt: skip

    @property
    def count(self) -> int:
        """Rows in all."""
        return len(self.owners)

    @property
    def open_count(self) -> int:
        """Rows that are not at rest."""
        return int(np.count_nonzero(self.is_open[: self.count]))

    @property
    def ready_count(self) -> int:
        """Rows that wait for their next token only."""
        return int(np.count_nonzero(self.is_ready[: self.count]))

    def waiting(self) -> Index:
        """Rows with tokens to prefill, in order of arrival."""
        rows = np.flatnonzero(self.is_open[: self.count] & ~self.is_ready[: self.count])
        return rows[np.argsort(self.since[rows], kind="stable")]

    def resting(self) -> Index:
        """Rows at rest, the longest first."""
        rows = np.flatnonzero(~self.is_open[: self.count])
        return rows[np.argsort(self.since[rows], kind="stable")]

    def seat(
        self,
        owner: Owner,
        tokens: TokenIds,
        *,
        max_new: int,
        temperature: float,
        noise_key: int,
        edition: int = 0,
        ticket: int = 0,
        account: int = 0,
        slot: int | None = None,
    ) -> int:
        """Begin a sequence in the next free slot, or in that of a row at rest, which goes. edition: the newest. Returns the slot."""
        row = len(self.owners) if slot is None else slot
        self.length[row] = self.cached[row] = self.lineage[row] = 0
        self.edition[row] = edition
        self.tokens[row, : len(tokens)] = tokens
        if slot is None:
            self.owners.append(owner)
        else:
            self.owners[row] = owner
        self._open(row, len(tokens), max_new, temperature, noise_key, ticket, account)
        return row

    def go_on(
        self, row: int, tokens: TokenIds, *, max_new: int, temperature: float, noise_key: int, ticket: int = 0, account: int = 0
    ) -> None:
        """Continue the sequence of a row at rest where it stands."""
        length = int(self.length[row])
        self.tokens[row, length : length + len(tokens)] = tokens
        self._open(row, len(tokens), max_new, temperature, noise_key, ticket, account)

    def _open(self, row: int, new: int, max_new: int, temperature: float, noise_key: int, ticket: int, account: int) -> None:
        length = int(self.length[row]) + new
        self.length[row] = self.prompt_length[row] = length
        self.limit[row] = length + max_new
        self.temperature[row] = temperature
        self.noise_key[row] = noise_key
        self.ticket[row] = ticket
        self.account[row] = account
        self.is_open[row] = True
        self.is_ready[row] = self.has_begun[row] = False
        self.since[row] = self._now = self._now + 1

    def stored(self, rows: Index, counts: Index, *, is_complete: bool) -> None:
        """Note that the next `counts` tokens of waiting rows are stored; if that is all they have, they are ready."""
        self.cached[rows] += counts
        self.has_begun[rows] = True
        self.is_ready[rows] = is_complete

    def append(self, rows: Index, tokens: TokenIds, logprobs: Logprobs) -> None:
        """Add one sampled token to each of the rows. rows, tokens, logprobs [R]"""
        at = self.length[rows]
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = logprobs
        self.length[rows] += 1

    def sampled(self, row: int) -> tuple[TokenIds, Logprobs]:
        """Copies of what was sampled for a row's open request, with its log-probs. [N], [N]"""
        span = slice(int(self.prompt_length[row]), int(self.length[row]))
        return self.tokens[row, span].copy(), self.logprobs[row, span].copy()

    def ready(self) -> list[Index]:
        """Rows that wait for their next token only, by edition, in order."""
        rows = np.flatnonzero(self.is_ready[: self.count])
        if not len(rows):
            return []
        editions = self.edition[rows]
        return [rows] if editions[0] == editions[-1] else np.split(rows, np.flatnonzero(editions[1:] != editions[:-1]) + 1)

    # ---------------------------------------------------------------- weights that change

    def needs(self, edition: int) -> bool:
        """Whether any open request has been computed by this edition, and is to be ended by it."""
        live = slice(0, self.count)
        return bool(np.any((self.edition[live] == edition) & self.has_begun[live] & self.is_open[live]))

    def change_weights(self, *, edition: int, under_way: bool, keep: bool) -> None:
        """Take note of new weights, for the rows that the new ones compute from now on. `tidy` must follow.

        edition: the newest. under_way: whether the rows whose requests have begun go over to it too. keep: what is stored stays, though
        other weights computed it; otherwise it counts for nothing.
        """
        live = slice(0, self.count)
        rows = np.arange(self.count) if under_way else np.flatnonzero(~(self.is_open[live] & self.has_begun[live]))
        self._change(rows, edition, keep=keep)

    def _change(self, rows: Index, edition: int, *, keep: bool) -> None:
        self.edition[rows] = edition
        if keep:
            mixed = rows[self.cached[rows] > 0]
            self.lineage[mixed] = self._now + 1 + np.arange(len(mixed))
            self._now += len(mixed)
        else:
            self.cached[rows] = self.lineage[rows] = 0
            self.is_ready[rows] = False

    # ---------------------------------------------------------------- coming to rest, leaving, moving

    def rest(self, rows: Index, *, edition: int) -> None:
        """Close the requests of rows and keep their sequences. edition: the newest; what another one computed stays. `tidy` must follow."""
        older = rows[self.edition[rows] != edition]
        if len(older):
            self._change(older, edition, keep=True)
        self.is_open[rows] = self.is_ready[rows] = self.has_begun[rows] = False
        self.since[rows] = self._now = self._now + 1

    def _sections(self, *, apart: bool) -> Index:
        """Where rows belong: those of a lower number first. [count]"""
        live = slice(0, self.count)
        return 2 * self.edition[live] + self.is_open[live] if apart else self.edition[live]

    def misplaced(self) -> int:
        """Rows that `tidy` would move to put those at rest apart."""
        sections = self._sections(apart=True)
        return int(np.count_nonzero(sections != np.sort(sections)))

    def tidy(self, leaving: Sequence[int] | Index = (), *, apart: bool = False) -> tuple[Moves | None, list[tuple[int, Owner]]]:
        """Let rows go and put the others in order, of which only those move that must.

        apart: also put the rows at rest of each edition before its others. Returns the cache entries to move, and (slot, owner) of every
        row that moved.
        """
        stays = np.ones(self.count, dtype=np.bool_)
        stays[np.asarray(leaving, dtype=np.int64)] = False
        kept = np.flatnonzero(stays)
        section = self._sections(apart=apart)[kept]
        come: list[Index] = []
        go: list[Index] = []
        start = 0
        is_uniform = not len(kept) or bool(np.all(section == section[0]))
        for members in [kept] if is_uniform else [kept[section == number] for number in np.unique(section)]:
            end = start + len(members)
            is_placed = (members >= start) & (members < end)
            is_hole = np.ones(len(members), dtype=np.bool_)
            is_hole[members[is_placed] - start] = False
            come.append(members[~is_placed])
            go.append(np.flatnonzero(is_hole) + start)
            start = end
        moves: Moves | None = None
        moved: list[tuple[int, Owner]] = []
        sources = np.concatenate(come) if come else np.empty(0, dtype=np.int64)
        if len(sources):
            targets = np.concatenate(go)
            longest = int(self.length[sources].max())
            self.tokens[targets, :longest] = self.tokens[sources, :longest]
            self.logprobs[targets, :longest] = self.logprobs[sources, :longest]
            stored = self.cached[sources]
            for column in self._per_row:
                column[targets] = column[sources]
            movers = [self.owners[source] for source in sources.tolist()]
            moved = list(zip(targets.tolist(), movers, strict=True))
            for target, owner in moved:
                self.owners[target] = owner
            if stored.any():
                moves = Moves(sources=sources[stored > 0], targets=targets[stored > 0], length=int(stored.max()))
        del self.owners[len(kept) :]
        return moves, moved
