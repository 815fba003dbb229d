"""Remote data: read like local data, freed once, whatever was made of it; a holding leaves nothing behind."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import DataError
from sluice.roll import DataProto, InProcessStore, remote_store, use_remote_store
from sluice.roll.remote import holding
from tests.roll.test_data import NUMBERS, numbers_in, rows_of


@pytest.fixture
def store() -> Iterator[InProcessStore]:
    with fresh_store() as store:
        yield store


class fresh_store:  # noqa: N801 - used like a function
    """A store of its own for a test, in which nothing may be left."""

    def __enter__(self) -> InProcessStore:
        self.own = InProcessStore()
        self.before = use_remote_store(self.own)
        return self.own

    def __exit__(self, *_: object) -> None:
        assert remote_store() is self.own
        use_remote_store(self.before)


@given(numbers=NUMBERS, data=st.data())
def test_remote_rows_are_those_that_were_put(numbers: list[int], data: st.DataObject) -> None:
    with fresh_store() as store:
        local = rows_of(numbers, step=3)
        remote = local.to_remote()
        assert remote.is_remote
        assert not local.is_remote
        assert len(remote) == len(numbers) == len(store.rows)
        places = data.draw(st.lists(st.integers(0, len(numbers) - 1), min_size=1, max_size=9))
        assert numbers_in(remote[places]) == [numbers[place] for place in places]
        assert numbers_in(remote.repeat(2)) == [n for n in numbers for _ in range(2)]
        assert numbers_in(DataProto.concat([remote[[place]] for place in places])) == [numbers[place] for place in places]
        assert numbers_in(remote) == numbers
        assert remote.meta_info == {"step": 3}
        remote.drop()
        assert not store.rows


@given(numbers=st.lists(st.integers(0, 99), min_size=2, max_size=6), data=st.data())
def test_every_row_is_freed_once_by_whichever_part_names_it(numbers: list[int], data: st.DataObject) -> None:
    with fresh_store() as store:
        remote = rows_of(numbers).to_remote()
        size = len(numbers)
        chosen = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4))
        parts = [
            remote[chosen],
            remote[chosen].repeat(3),
            DataProto.concat([remote[chosen[0]], remote[chosen]]),
            copy.deepcopy(remote[chosen]),
        ]
        for part in data.draw(st.permutations(parts)):
            part.drop()
            part.drop()
            assert len(store.rows) == size - len(set(chosen))
        remote.drop()
        assert not store.rows
        assert store.deleted_rows == store.put_rows == size


def test_what_was_read_before_a_drop_stays_readable_and_what_was_not_says_so(store: InProcessStore) -> None:
    remote = rows_of([1, 2]).to_remote()
    unread = remote[0]
    unread.meta_info["note"] = 1
    assert not remote.meta_info
    assert numbers_in(remote) == [1, 2]
    remote.drop()
    assert numbers_in(remote) == [1, 2]
    with pytest.raises(DataError, match="rows that drop\\(\\) has freed"):
        unread["ids"]
    assert unread.meta_info == {"note": 1}
    assert "remote" in repr(unread)


def test_to_remote_as_roll_calls_it_and_once_more(store: InProcessStore) -> None:
    remote = DataProto.to_remote(rows_of([1, 2]), "validation")
    assert all(key.startswith("validation/") for key in store.rows)
    assert remote.to_remote() is remote
    remote.non_tensor_batch["more"] = remote.non_tensor_batch["name"].copy()
    again = remote.to_remote()
    assert numbers_in(again[1]) == [2]
    assert list(again.non_tensor_batch["more"]) == ["row 1", "row 2"]
    DataProto.drop(again)
    assert not store.rows
    assert DataProto().to_remote().drop() is None


def test_local_data_has_nothing_to_drop() -> None:
    rows = rows_of([1])
    rows.drop()
    assert numbers_in(rows) == [1]


def test_union_with_remote_rows_frees_them_with_its_own(store: InProcessStore) -> None:
    ids, rewards = rows_of([1, 2]).select(["ids"], []), rows_of([1, 2]).select(["reward"], ["name"])
    both = ids.to_remote().union(rewards.to_remote())
    assert numbers_in(both[[1, 0]]) == [2, 1]
    assert len(store.rows) == 4
    both[0].drop()
    assert len(store.rows) == 2
    both.drop()
    assert not store.rows


def test_a_holding_frees_what_was_made_remote_inside_it_also_by_tasks(store: InProcessStore) -> None:
    async def make(numbers: list[int]) -> DataProto:
        await asyncio.sleep(0)
        return rows_of(numbers).to_remote()

    async def main() -> None:
        outside = rows_of([9]).to_remote()
        with holding() as held:
            parts = await asyncio.gather(make([1, 2]), make([3]))
            parts[0][0].drop()
            assert len(store.rows) == 3
        assert len(store.rows) == 3
        held.free()
        assert len(store.rows) == 1
        held.free()
        assert numbers_in(outside) == [9]

    asyncio.run(main())


def test_whoever_is_left_behind_of_a_group_leaves_nothing_in_the_store(store: InProcessStore) -> None:
    with holding() as held:
        held.free()
        with pytest.raises(DataError, match="while the group is open"):
            rows_of([1]).to_remote()
    assert not store.rows


class Stubborn(InProcessStore):
    """Fails its first deletion."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = True

    def delete(self, keys: Sequence[str]) -> None:
        if self.fails:
            self.fails = False
            raise ConnectionError("the store is away")
        super().delete(keys)


def test_a_store_that_fails_once_keeps_no_other_row_alive_and_can_be_asked_again() -> None:
    store = Stubborn()
    before = use_remote_store(store)
    try:
        with holding() as held:
            first = rows_of([1]).to_remote()
            rows_of([2]).to_remote()
        with pytest.raises(ConnectionError):
            held.free()
        assert len(store.rows) == 1
        first.drop()
        assert not store.rows
    finally:
        use_remote_store(before)


def test_a_store_that_answers_with_too_few_keys_is_found_out() -> None:
    class Short(InProcessStore):
        def put(self, partition: str, rows: Sequence[object]) -> list[str]:
            return ["only one"]

    before = use_remote_store(Short())
    try:
        with pytest.raises(DataError, match="one key per row \\(2\\), got 1"):
            rows_of([1, 2]).to_remote()
    finally:
        use_remote_store(before)
