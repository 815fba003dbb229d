"""The table of sequences keeps every sequence whole, whatever comes, rests, goes on and goes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.generation.planning import Pace, Spread, plan_decode, plan_prefill
from sluice.generation.rows import RowTable

SLOTS = 6
LENGTH = 60
MAX_NEW = 15

some_slots = st.sets(st.integers(0, SLOTS - 1), min_size=1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("seat"), st.sampled_from([(1,), (2, 3), (2, 3, 4), tuple(range(20))])),
        st.tuples(st.just("go_on"), st.tuples(st.integers(0, SLOTS - 1), st.sampled_from([(1,), (2, 3), tuple(range(9))]))),
        st.tuples(st.just("take_over"), st.sampled_from([(1,), (2, 3)])),
        st.tuples(st.just("prefill"), st.integers(1, 25)),
        st.tuples(st.just("decode"), st.just(0)),
        st.tuples(st.just("rest"), some_slots),
        st.tuples(st.just("remove"), some_slots),
        st.tuples(st.just("put_apart"), st.just(0)),
        st.tuples(st.just("publish"), st.tuples(st.booleans(), st.booleans())),
    ),
    max_size=40,
)


class Played:
    """A table, the sequences it should hold, and a cache that remembers which token was stored in which slot, by which edition."""

    def __init__(self, *, finish: bool = True) -> None:
        self.table: RowTable[int] = RowTable(SLOTS, LENGTH)
        self.finish = finish  # open requests that have begun are ended by their edition
        self.expected: dict[int, list[int]] = {}
        self.prompt_length: dict[int, int] = {}
        self.slot_of: dict[int, int] = {}
        self.cache = np.full((SLOTS, LENGTH), -1)
        self.computed_by = np.full((SLOTS, LENGTH), -1)
        self.next_owner = 0
        self.next_token = 1000
        self.newest = 0
        self.weights = 0  # publishes so far: what computes the newest edition
        self.weights_of = {0: 0}
        self.begun: dict[int, int] = {}  # edition of an open request's first pass
        self.at_rest: list[int] = []  # owners, the longest first
        self.waiting: list[int] = []  # owners, in order of arrival
        self.mixed: set[int] = set()  # owners whose entries may be of several weights

    def seat(self, prompt, slot=None) -> None:
        if slot is None and self.table.count == SLOTS:
            return
        owner, self.next_owner = self.next_owner, self.next_owner + 1
        if slot is not None:
            self.forget(self.table.owners[slot])
        slot = self.table.seat(
            owner, np.array(prompt), max_new=MAX_NEW, temperature=owner, noise_key=owner, ticket=owner, edition=self.newest, slot=slot
        )
        self.expected[owner] = list(prompt)
        self.prompt_length[owner] = len(prompt)
        self.slot_of[owner] = slot
        self.waiting.append(owner)

    def go_on(self, slot, prompt) -> None:
        if slot >= self.table.count or self.table.is_open[slot] or self.table.length[slot] + len(prompt) + MAX_NEW > LENGTH:
            return
        owner = self.table.owners[slot]
        self.table.go_on(slot, np.array(prompt), max_new=MAX_NEW, temperature=owner, noise_key=owner, ticket=owner)
        self.expected[owner] += prompt
        self.prompt_length[owner] = len(self.expected[owner])
        self.at_rest.remove(owner)
        self.waiting.append(owner)

    def take_over(self, prompt) -> None:
        if len(self.table.resting()):
            slot = int(self.table.resting()[0])
            assert self.table.owners[slot] == self.at_rest[0]
            self.seat(prompt, slot)

    def forget(self, owner) -> None:
        del self.expected[owner]
        self.begun.pop(owner, None)
        self.mixed.discard(owner)
        for group in (self.at_rest, self.waiting):
            if owner in group:
                group.remove(owner)

    def sampled(self, rows) -> None:
        tokens = np.arange(self.next_token, self.next_token + len(rows))
        self.next_token += len(rows)
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            self.expected[self.table.owners[row]].append(token)
        self.table.append(rows, tokens, -tokens.astype(np.float32))
        self.rest([row for row in rows.tolist() if self.table.length[row] == self.table.limit[row]])

    def store(self, row, start, stop, of) -> None:
        self.cache[row, start:stop] = self.table.tokens[of, start:stop]
        self.computed_by[row, start:stop] = self.weights_of[int(self.table.edition[row])]

    def prefill(self, max_tokens: int) -> None:
        table = self.table
        if not len(table.waiting()):
            return
        plan = plan_prefill(table, max_tokens)
        assert table.owners[plan.rows[0]] == self.waiting[0]
        assert plan.leaders.tolist() == sorted(set(plan.leaders.tolist()))
        assert set(plan.leaders.tolist()) <= set(plan.rows.tolist()) <= set(table.waiting().tolist())
        (edition,) = set(table.edition[plan.rows].tolist())
        assert int(plan.counts.max()) * len(plan.leaders) <= max(max_tokens, 2 * int(plan.counts.sum()))
        assert int(plan.counts.max()) <= max_tokens
        assert plan.is_complete or len(plan.leaders) == 1
        for row, index in zip(plan.rows.tolist(), plan.leader_of.tolist(), strict=True):
            leader, count = plan.leaders[index], plan.counts[index]
            self.begun.setdefault(table.owners[row], edition)
            start = table.cached[leader]
            assert table.cached[row] == start
            assert table.tokens[row, : table.length[row]].tolist() == table.tokens[leader, : table.length[leader]].tolist()
            assert self.computed_by[row, :start].tolist() == self.computed_by[leader, :start].tolist()
            self.store(row, start, start + count, leader)
        table.stored(plan.rows, plan.counts[plan.leader_of], is_complete=plan.is_complete)
        if plan.is_complete:
            for row in plan.rows:
                self.waiting.remove(table.owners[row])
            self.sampled(plan.rows)

    def decode(self) -> None:
        for plan in reversed(plan_decode(self.table)):
            for row in plan.rows.tolist():
                assert self.begun[self.table.owners[row]] == plan.edition
                self.store(row, self.table.cached[row], self.table.cached[row] + 1, row)
            self.table.cached[plan.rows] += 1
            self.sampled(plan.rows)

    def rest(self, slots) -> None:
        table = self.table
        rows = np.array(sorted(slot for slot in slots if slot < table.count and table.is_open[slot]), dtype=np.int64)
        for row in rows.tolist():
            owner = table.owners[row]
            if self.begun.pop(owner, self.newest) != self.newest:
                self.mixed.add(owner)
            if owner in self.waiting:
                self.waiting.remove(owner)
            self.at_rest.append(owner)
        table.rest(rows, edition=self.newest)
        self.tidy([])

    def publish(self, keep: bool, under_way: bool) -> None:
        table = self.table
        self.weights += 1
        if under_way and self.newest:
            return  # there is one edition then
        if not under_way and table.needs(self.newest):
            self.newest += 1
        self.weights_of[self.newest] = self.weights
        before = table.cached[: table.count].copy()
        table.change_weights(edition=self.newest, under_way=under_way, keep=keep)
        for slot, owner in enumerate(table.owners):
            goes_over = under_way or owner not in self.begun
            assert table.cached[slot] == (0 if goes_over and not keep else before[slot])
            if not goes_over:
                continue
            if keep:
                self.mixed.add(owner)
            else:
                self.mixed.discard(owner)
                if owner not in self.at_rest and owner not in self.waiting:
                    self.waiting.append(owner)
            if owner in self.begun:
                self.begun[owner] = self.newest
        self.waiting.sort(key=lambda owner: table.since[table.owners.index(owner)])
        self.tidy([])

    def remove(self, slots) -> None:
        gone = sorted(slot for slot in slots if slot < self.table.count)
        for slot in gone:
            self.forget(self.table.owners[slot])
        self.tidy(gone)

    def put_apart(self) -> None:
        self.tidy([], apart=True)
        table = self.table
        for edition in set(table.edition[: table.count].tolist()):
            assert np.all(np.diff(table.is_open[: table.count][table.edition[: table.count] == edition].astype(int)) >= 0)
        assert table.misplaced() == 0
        assert all(plan.excess == 0 for plan in plan_decode(table)) or len(table.waiting())

    def tidy(self, leaving, *, apart: bool = False) -> None:
        moves, moved = self.table.tidy(leaving, apart=apart)
        for slot, owner in moved:
            self.slot_of[owner] = slot
        if moves is not None:
            for kept in (self.cache, self.computed_by):
                kept[moves.targets, : moves.length] = kept[moves.sources, : moves.length]

    def check(self) -> None:
        table = self.table
        assert sorted(table.owners) == sorted(self.expected)
        assert [table.owners[row] for row in table.waiting()] == self.waiting
        assert {table.owners[row] for row in table.resting()} == set(self.at_rest)
        assert table.open_count == table.count - len(self.at_rest)
        assert table.ready_count == table.open_count - len(self.waiting)
        for slot, owner in enumerate(table.owners):
            assert self.slot_of[owner] == slot
            length, cached = table.length[slot], table.cached[slot]
            assert table.tokens[slot, :length].tolist() == self.expected[owner]
            assert table.ticket[slot] == table.noise_key[slot] == table.temperature[slot] == owner
            assert self.cache[slot, :cached].tolist() == self.expected[owner][:cached]
            assert cached < length
            assert not table.is_ready[slot] or length - cached == 1
            if table.is_open[slot]:
                tokens, logprobs = table.sampled(slot)
                assert (-logprobs).tolist() == tokens.tolist() == self.expected[owner][self.prompt_length[owner] :]
            assert table.edition[slot] == self.begun.get(owner, self.newest)
            if owner not in self.mixed:
                assert set(self.computed_by[slot, :cached].tolist()) <= {self.weights_of[int(table.edition[slot])]}
        assert np.all(np.diff(table.edition[: table.count]) >= 0)
        plans = plan_decode(table)
        assert sorted(row for plan in plans for row in plan.rows.tolist()) == np.flatnonzero(table.is_ready[: table.count]).tolist()
        for plan in plans:
            assert set(table.edition[plan.slots].tolist()) == {plan.edition}
            assert plan.slots.tolist() in (plan.rows.tolist(), list(range(plan.rows[0], plan.rows[-1] + 1)))


def play(played) -> None:
    game = Played()
    for name, argument in played:
        match name:
            case "decode" | "put_apart":
                getattr(game, name)()
            case "go_on" | "publish":
                getattr(game, name)(*argument)
            case _:
                getattr(game, name)(argument)
        game.check()


@given(steps)
def test_sequences_and_their_cache_entries_stay_together(played):
    play(played)


def test_waiting_rows_are_prefilled_in_order_of_arrival_as_many_as_fit():
    game = Played()
    for prompt in [(1, 2, 3), (4, 5, 6), (1, 2, 3), (7, 8, 9)]:
        game.seat(prompt)
    plan = plan_prefill(game.table, max_tokens=6)
    assert plan.rows.tolist() == [0, 1, 2]  # the third is the first's sibling and costs nothing
    assert plan.leaders.tolist() == [0, 1]
    assert plan.leader_of.tolist() == [0, 1, 0]
    assert plan.is_complete


def test_a_long_prompt_is_prefilled_in_pieces_with_its_siblings():
    game = Played()
    for prompt in [tuple(range(20)), tuple(range(20)), (1,)]:
        game.seat(prompt)
    plan = plan_prefill(game.table, max_tokens=8)
    assert plan.rows.tolist() == [0, 1]
    assert plan.counts.tolist() == [8]
    assert not plan.is_complete


def test_a_pass_is_never_more_padding_than_tokens():
    game = Played()
    for prompt in [(1,), (2,), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2)]:
        game.seat(prompt)
    assert plan_prefill(game.table, max_tokens=100).rows.tolist() == [0, 1, 3]  # not thrice eight for ten
    game.prefill(100)
    assert plan_prefill(game.table, max_tokens=100).rows.tolist() == [2]


def test_removing_moves_only_what_must_move():
    game = Played()
    for prompt in [(2, 3), (2, 3, 4), (1,), (2, 3)]:
        game.seat(prompt)
    game.prefill(25)
    moves, moved = game.table.tidy([1])
    assert moved == [(1, 3)]  # the last row fills the gap
    assert moves is not None
    assert (moves.sources.tolist(), moves.targets.tolist()) == ([3], [1])


def test_each_edition_closes_its_own_gaps():
    game = Played()
    for prompts in ([(1,), (2, 3)], [(1,), (2, 3, 4)], [(1,), (2, 3)]):
        game.publish(False, False)
        for prompt in prompts:
            game.seat(prompt)
        game.prefill(25)
    assert [(plan.edition, plan.slots.tolist()) for plan in plan_decode(game.table)] == [(0, [0, 1]), (1, [2, 3]), (2, [4, 5])]
    moves, moved = game.table.tidy([0])
    assert moved == [(0, 1), (1, 3), (3, 5)]  # the last of each takes the place that became free before it
    assert [(plan.edition, plan.slots.tolist()) for plan in plan_decode(game.table)] == [(0, [0]), (1, [1, 2]), (2, [3, 4])]


def test_waiting_rows_of_another_edition_are_prefilled_in_a_pass_of_their_own():
    game = Played()
    game.seat(tuple(range(20)))
    game.seat((1,))
    game.prefill(15)
    game.publish(False, False)
    game.seat((1,))
    assert game.table.edition[:3].tolist() == [0, 1, 1]  # the second had not begun
    assert plan_prefill(game.table, 15).rows.tolist() == [0]
    game.prefill(15)
    assert plan_prefill(game.table, 15).rows.tolist() == [1, 2]


def test_rows_at_rest_stay_where_they_are_and_ready_ones_around_them_are_one_slice():
    game = Played()
    for prompt in [(2, 3), (2, 4), (2, 5), (2, 6)]:
        game.seat(prompt)
    game.prefill(25)
    game.rest([1, 3])
    (plan,) = plan_decode(game.table)
    assert (plan.slots.tolist(), plan.rows.tolist(), plan.excess) == ([0, 1, 2], [0, 2], 1)
    assert game.slot_of == {0: 0, 1: 1, 2: 2, 3: 3}
    game.go_on(1, (7, 8))
    assert game.table.waiting().tolist() == [1]
    assert (game.table.length[1] - game.table.cached[1], game.table.prompt_length[1]) == (3, 5)  # the token sampled last, and the new ones
    game.put_apart()
    assert game.slot_of == {3: 0, 0: 3, 1: 1, 2: 2}


def test_rows_that_several_weights_have_computed_share_with_nobody():
    game = Played()
    for _ in range(2):
        game.seat((2, 3))
    game.prefill(25)
    game.rest([0, 1])
    tokens = game.table.tokens
    tokens[1, :3] = tokens[0, :3]  # as if both had sampled the same
    for row in (0, 1):
        game.table.go_on(row, np.array([9]), max_new=5, temperature=1.0, noise_key=0)
    assert len(plan_prefill(game.table, 25).leaders) == 1
    game.table.change_weights(edition=0, under_way=False, keep=True)
    assert len(plan_prefill(game.table, 25).leaders) == 2
    game.table.change_weights(edition=0, under_way=False, keep=False)
    assert len(plan_prefill(game.table, 25).leaders) == 1


def test_the_table_has_no_room_beyond_its_slots():
    game = Played()
    for _ in range(SLOTS):
        game.seat((1,))
    with pytest.raises(IndexError):
        game.table.seat(99, np.array([1]), max_new=1, temperature=1.0, noise_key=0)


# ---------------------------------------------------------------- how to decode


def scattered(which, *, new=50) -> RowTable[int]:
    """Thirty rows of which only these are ready."""
    table: RowTable[int] = RowTable(30, 200)
    for owner in range(30):
        table.seat(owner, np.array([owner]), max_new=new, temperature=1.0, noise_key=0)
    rows = np.arange(30)
    table.stored(rows, np.ones(30, dtype=np.int64), is_complete=True)
    table.append(rows, rows, np.zeros(30, dtype=np.float32))
    table.rest(np.array([row for row in range(30) if row not in which]), edition=0)
    return table


@pytest.mark.parametrize(
    ("which", "slots", "excess"),
    [([4, 5, 6], [4, 5, 6], 0), ([4, 6, 8], [4, 5, 6, 7, 8], 2), ([4, 20], [4, 20], 2), ([7], [7], 0), ([0, 1, 2, 7], list(range(8)), 4)],
)
def test_ready_rows_are_read_as_a_slice_or_copied_when_they_are_few_and_far_apart(which, slots, excess):
    (plan,) = plan_decode(scattered(which))
    assert (plan.rows.tolist(), plan.slots.tolist(), plan.excess) == (which, slots, excess)


def passes_until_moved(which, *, new, lengths) -> int | None:
    table, spread = scattered(which, new=new), Spread()
    for length in lengths:
        spread.note_end(length)
    return next((i for i in range(100) if spread.is_too_wide(table, plan_decode(table))), None)


def test_rows_are_moved_together_once_the_distance_has_cost_what_the_moves_do():
    which = list(range(0, 30, 2))  # 14 rows too many are computed, 16 would move: 96 rows' worth, with the margin
    assert passes_until_moved(which, new=50, lengths=[]) == 6
    assert passes_until_moved(which, new=50, lengths=[40] * 9) == 6
    assert passes_until_moved(which, new=50, lengths=[5] * 9) is None  # turns are short: the rows will be others by then
    assert passes_until_moved(which, new=5, lengths=[]) is None
    assert passes_until_moved(range(5, 25), new=50, lengths=[]) is None


# ---------------------------------------------------------------- when to prefill


def a_crowd(ready: int, going_on: int, new: int = 0) -> RowTable[int]:
    table: RowTable[int] = RowTable(32, LENGTH)
    for owner in range(ready + going_on):
        table.seat(owner, np.array([owner]), max_new=MAX_NEW, temperature=1.0, noise_key=0)
    rows = np.arange(ready + going_on)
    table.stored(rows, np.ones(len(rows), dtype=np.int64), is_complete=True)
    table.append(rows, rows, np.zeros(len(rows), dtype=np.float32))
    table.rest(rows[ready:], edition=0)
    for row in rows[ready:].tolist():
        table.go_on(row, np.array([1, 2]), max_new=MAX_NEW, temperature=1.0, noise_key=0)
    for owner in range(new):
        table.seat(100 + owner, np.array([1, 2]), max_new=MAX_NEW, temperature=1.0, noise_key=0)
    return table


@pytest.mark.parametrize(
    ("ready", "going_on", "new", "is_due"),
    [(8, 0, 0, False), (8, 2, 0, False), (8, 3, 0, True), (0, 1, 0, True), (8, 0, 1, True), (8, 1, 1, True)],
)
def test_dialogues_wait_for_company_and_who_begins_does_not(ready, going_on, new, is_due):
    assert Pace().is_due(a_crowd(ready, going_on, new)) == is_due


def test_nobody_waits_for_company_for_more_than_a_few_passes():
    pace, table = Pace(), a_crowd(20, 1)
    assert [pace.is_due(table) for _ in range(10)] == [False, False, False, False, True] * 2
