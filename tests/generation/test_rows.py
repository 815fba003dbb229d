"""The table of live sequences keeps every sequence whole, whatever comes and goes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.generation.rows import RowTable

SLOTS = 6
LENGTH = 40

steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from([(1,), (2, 3), (2, 3, 4), tuple(range(20))])),
        st.tuples(st.just("prefill"), st.integers(1, 25)),
        st.tuples(st.just("decode"), st.just(0)),
        st.tuples(st.just("remove"), st.sets(st.integers(0, SLOTS - 1), min_size=1)),
        st.tuples(st.just("forget"), st.just(0)),
    ),
    max_size=40,
)


class Played:
    """A table, the sequences it should hold, and a cache that remembers which tokens were stored in which slot."""

    def __init__(self) -> None:
        self.table: RowTable[int] = RowTable(SLOTS, LENGTH)
        self.expected: dict[int, list[int]] = {}
        self.slot_of: dict[int, int] = {}
        self.cache = np.full((SLOTS, LENGTH), -1)
        self.next_owner = 0
        self.next_token = 1000

    def add(self, prompt) -> None:
        if self.table.count < SLOTS:
            owner, self.next_owner = self.next_owner, self.next_owner + 1
            slot = self.table.add(owner, np.array(prompt), max_new=15, temperature=owner, noise_key=owner, ticket=owner)
            self.expected[owner] = list(prompt)
            self.slot_of[owner] = slot

    def sampled(self, first: int, count: int) -> None:
        tokens = np.arange(self.next_token, self.next_token + count)
        self.next_token += count
        for owner, token in zip(self.table.owners[first : first + count], tokens.tolist(), strict=True):
            self.expected[owner].append(token)
        self.table.append(first, tokens, -tokens.astype(np.float32), version=3)
        full = [slot for slot in range(first, first + count) if self.table.length[slot] == LENGTH]
        if full:
            self.remove(full)

    def prefill(self, max_tokens: int) -> None:
        if self.table.count == self.table.ready:
            return
        plan = self.table.plan_prefill(max_tokens)
        assert plan.rows.tolist() == list(range(self.table.ready, self.table.ready + len(plan.rows)))
        width = int(plan.counts.max())
        assert width * len(plan.leaders) <= max_tokens
        assert len(plan.leaders) == len({self.table.tokens[row, : self.table.length[row]].tobytes() for row in plan.rows})
        for row, leader in zip(plan.rows, plan.leaders[plan.leader_of], strict=True):
            start, stop = self.table.cached[leader], self.table.cached[leader] + plan.counts[plan.leader_of[row - plan.rows[0]]]
            self.cache[row, start:stop] = self.table.tokens[leader, start:stop]
        self.table.cached[plan.rows] += plan.counts[plan.leader_of]
        if plan.is_complete:
            first = self.table.ready
            self.table.ready += len(plan.rows)
            self.sampled(first, len(plan.rows))

    def decode(self) -> None:
        for row in range(self.table.ready):
            self.cache[row, self.table.cached[row]] = self.table.tokens[row, self.table.cached[row]]
        self.table.cached[: self.table.ready] += 1
        if self.table.ready:
            self.sampled(0, self.table.ready)

    def remove(self, slots) -> None:
        gone = sorted(slot for slot in slots if slot < self.table.count)
        if gone:
            for slot in gone:
                del self.expected[self.table.owners[slot]]
            moves, moved = self.table.remove(gone)
            for slot, owner in moved:
                self.slot_of[owner] = slot
            if moves is not None:
                self.cache[moves.targets, : moves.length] = self.cache[moves.sources, : moves.length]

    def check(self) -> None:
        table = self.table
        assert sorted(table.owners) == sorted(self.expected)
        for slot, owner in enumerate(table.owners):
            assert self.slot_of[owner] == slot
            assert table.tokens[slot, : table.length[slot]].tolist() == self.expected[owner]
            assert table.ticket[slot] == table.noise_key[slot] == table.temperature[slot] == owner
            cached = table.cached[slot]
            assert self.cache[slot, :cached].tolist() == self.expected[owner][:cached]
            assert (table.length[slot] - cached == 1) if slot < table.ready else (table.length[slot] > cached)
            tokens, logprobs = table.sampled(slot)
            assert (-logprobs).tolist() == tokens.tolist() == [token for token in self.expected[owner] if token >= 1000]
            assert table.version[slot] == (3 if len(tokens) else -1)
        waiting = table.owners[table.ready :]
        assert len(set(waiting)) == len(waiting)


@given(steps)
def test_sequences_and_their_cache_entries_stay_together(played):
    game = Played()
    for name, argument in played:
        match name:
            case "add":
                game.add(argument)
            case "prefill":
                game.prefill(argument)
            case "decode":
                game.decode()
            case "remove":
                game.remove(argument)
            case "forget":
                game.table.forget_cache()
        game.check()


def test_waiting_rows_are_prefilled_in_order_of_arrival_as_many_as_fit():
    game = Played()
    for prompt in [(1, 2, 3), (4, 5, 6), (1, 2, 3), (7, 8, 9)]:
        game.add(prompt)
    plan = game.table.plan_prefill(max_tokens=6)
    assert plan.rows.tolist() == [0, 1, 2]  # the third is the first's sibling and costs nothing
    assert plan.leaders.tolist() == [0, 1]
    assert plan.leader_of.tolist() == [0, 1, 0]
    assert plan.is_complete


def test_a_long_prompt_is_prefilled_in_pieces_with_its_siblings_right_behind_it():
    game = Played()
    for prompt in [tuple(range(20)), tuple(range(20)), (1,)]:
        game.add(prompt)
    plan = game.table.plan_prefill(max_tokens=8)
    assert plan.rows.tolist() == [0, 1]
    assert plan.counts.tolist() == [8]
    assert not plan.is_complete


def test_removing_moves_only_what_must_move():
    game = Played()
    for prompt in [(2, 3), (2, 3, 4), (1,), (2, 3)]:
        game.add(prompt)
    game.prefill(25)
    moves, moved = game.table.remove([1])
    assert moved == [(1, 3)]  # the last row fills the gap
    assert moves is not None
    assert (moves.sources.tolist(), moves.targets.tolist()) == ([3], [1])


def test_the_table_has_no_room_beyond_its_slots():
    game = Played()
    for _ in range(SLOTS):
        game.add((1,))
    with pytest.raises(IndexError):
        game.table.add(99, np.array([1]), max_new=1, temperature=1.0, noise_key=0)
