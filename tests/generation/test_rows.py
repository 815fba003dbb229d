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
        st.tuples(st.just("publish"), st.just(0)),
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
        self.newest = 0
        self.begun: dict[int, int] = {}  # edition of a sequence's first pass

    def add(self, prompt) -> None:
        if self.table.count < SLOTS:
            owner, self.next_owner = self.next_owner, self.next_owner + 1
            slot = self.table.add(
                owner, np.array(prompt), max_new=15, temperature=owner, noise_key=owner, ticket=owner, edition=self.newest
            )
            self.expected[owner] = list(prompt)
            self.slot_of[owner] = slot

    def sampled(self, first: int, count: int) -> None:
        tokens = np.arange(self.next_token, self.next_token + count)
        self.next_token += count
        for owner, token in zip(self.table.owners[first : first + count], tokens.tolist(), strict=True):
            self.expected[owner].append(token)
        self.table.append(np.arange(first, first + count), tokens, -tokens.astype(np.float32))
        full = [slot for slot in range(first, first + count) if self.table.length[slot] == LENGTH]
        if full:
            self.remove(full)

    def prefill(self, max_tokens: int) -> None:
        if self.table.count == self.table.ready:
            return
        plan = self.table.plan_prefill(max_tokens)
        assert plan.rows.tolist() == list(range(self.table.ready, self.table.ready + len(plan.rows)))
        (edition,) = set(self.table.edition[plan.rows].tolist())
        for row in plan.rows:
            self.begun.setdefault(self.table.owners[row], edition)
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
        for edition, first, end in reversed(self.table.stretches()):
            for row in range(first, end):
                assert self.begun[self.table.owners[row]] == edition
                self.cache[row, self.table.cached[row]] = self.table.tokens[row, self.table.cached[row]]
            self.table.cached[first:end] += 1
            self.sampled(first, end - first)

    def forget(self) -> None:
        """As where sequences go on under new weights: there is one edition then."""
        if not self.newest:
            self.table.forget_cache()

    def publish(self) -> None:
        if self.table.has_begun(self.newest):
            self.newest += 1
        self.table.renew(self.newest)

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
            assert table.edition[slot] == self.begun.get(owner, self.newest)
        assert np.all(np.diff(table.edition[: table.count]) >= 0)
        ends = [0, *[end for _, _, end in table.stretches()]]
        assert [first for _, first, _ in table.stretches()] == ends[:-1]
        assert ends[-1] == table.ready
        assert len({edition for edition, _, _ in table.stretches()}) == len(ends) - 1
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
                game.forget()
            case "publish":
                game.publish()
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


def test_each_edition_closes_its_own_gaps():
    game = Played()
    for prompts in ([(1,), (2, 3)], [(1,), (2, 3, 4)], [(1,), (2, 3)]):
        game.publish()
        for prompt in prompts:
            game.add(prompt)
        game.prefill(25)
    assert game.table.stretches() == [(0, 0, 2), (1, 2, 4), (2, 4, 6)]
    moves, moved = game.table.remove([0])
    assert moved == [(0, 1), (1, 3), (3, 5)]  # the last of each takes the place that became free before it
    assert game.table.stretches() == [(0, 0, 1), (1, 1, 3), (2, 3, 5)]


def test_waiting_rows_of_another_edition_are_prefilled_in_a_pass_of_their_own():
    game = Played()
    game.add(tuple(range(20)))
    game.add((1,))
    game.prefill(15)
    game.publish()
    game.add((1,))
    assert game.table.edition[:3].tolist() == [0, 1, 1]  # the second had not begun
    assert game.table.plan_prefill(15).rows.tolist() == [0]
    game.prefill(15)
    assert game.table.plan_prefill(15).rows.tolist() == [1, 2]


def test_the_table_has_no_room_beyond_its_slots():
    game = Played()
    for _ in range(SLOTS):
        game.add((1,))
    with pytest.raises(IndexError):
        game.table.add(99, np.array([1]), max_new=1, temperature=1.0, noise_key=0)
