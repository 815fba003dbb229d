"""DataProto against a list of rows: whatever is done to it is what the same would do to the list."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from sluice.errors import DataError
from sluice.roll import DataProto, DataProtoItem


def rows_of(numbers: list[int], **meta_info: Any) -> DataProto:
    """One row per number, which every column tells."""
    tensors = {"ids": torch.tensor([[n, n + 1] for n in numbers]).reshape(-1, 2), "reward": torch.tensor(numbers, dtype=torch.float32)}
    return DataProto.from_dict(tensors, {"name": [f"row {n}" for n in numbers]}, meta_info=meta_info)


def numbers_in(data: DataProto) -> list[int]:
    """The number of every row; checks that all columns tell the same."""
    assert data.batch is not None
    numbers = [int(n) for n in data.batch["reward"]]
    assert data.batch["ids"].tolist() == [[n, n + 1] for n in numbers]
    assert list(data.non_tensor_batch["name"]) == [f"row {n}" for n in numbers]
    assert len(data) == len(numbers) == data.batch.batch_size[0]
    return numbers


NUMBERS = st.lists(st.integers(0, 99), min_size=1, max_size=7)


@given(numbers=NUMBERS, data=st.data())
def test_choosing_rows_chooses_them_in_every_column(numbers: list[int], data: st.DataObject) -> None:
    rows = rows_of(numbers)
    chosen = data.draw(st.slices(len(numbers)))
    assert numbers_in(rows[chosen]) == numbers[chosen] if numbers[chosen] else len(rows[chosen]) == 0
    assert numbers_in(rows.slice(chosen.start, chosen.stop, chosen.step)) == numbers[chosen]
    places = data.draw(st.lists(st.integers(-len(numbers), len(numbers) - 1), max_size=9))
    for index in (places, np.array(places, dtype=np.int64), torch.tensor(places, dtype=torch.long)):
        assert numbers_in(rows[index]) == [numbers[place] for place in places]
        assert numbers_in(rows.select_idxs(index)) == [numbers[place] for place in places]
    mask = data.draw(st.lists(st.booleans(), min_size=len(numbers), max_size=len(numbers)))
    for truth in (mask, np.array(mask), torch.tensor(mask)):
        assert numbers_in(rows[truth]) == [n for n, is_chosen in zip(numbers, mask, strict=True) if is_chosen]
    place = data.draw(st.integers(-len(numbers), len(numbers) - 1))
    assert numbers_in(rows[place]) == numbers_in(rows[np.int64(place)]) == [numbers[place]]


@given(numbers=NUMBERS, times=st.integers(1, 3), chunks=st.integers(1, 7), size=st.integers(1, 8))
def test_splitting_and_joining_lose_nothing_and_keep_the_order(numbers: list[int], times: int, chunks: int, size: int) -> None:
    rows = rows_of(numbers)
    assert numbers_in(rows.repeat(times)) == [n for n in numbers for _ in range(times)]
    assert numbers_in(rows.repeat(times, interleave=False)) == numbers * times
    parts = rows.split(size)
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert numbers_in(DataProto.concat(parts)) == numbers
    if chunks <= len(numbers):
        parts = rows.chunk(chunks)
        assert [numbers_in(part) for part in parts] == [list(part) for part in np.array_split(numbers, chunks)]
        assert numbers_in(DataProto.concat(parts)) == numbers
    groups = rows.group_by("name")
    assert sorted(groups) == sorted({f"row {n}" for n in numbers})
    assert sum(len(group) for group in groups.values()) == len(numbers)
    order = torch.arange(len(numbers)).flip(0)
    rows.reorder(order)
    assert numbers_in(rows) == numbers[::-1]


def test_a_note_on_one_response_is_no_note_on_its_siblings() -> None:
    rows = rows_of([1, 2], metrics={"a": 1})
    first, second = rows[0], rows[[1]]
    first.meta_info["invalid_format"] = True
    assert "invalid_format" not in rows.meta_info
    assert "invalid_format" not in second.meta_info
    assert second.meta_info == {"metrics": {"a": 1}}


def test_one_row_without_its_batch_dimension() -> None:
    item = rows_of([1, 2], step=3).item(-1)
    assert isinstance(item, DataProtoItem)
    assert item.batch is not None
    assert item.batch.batch_size == torch.Size([])
    assert item.batch["ids"].tolist() == [2, 3]
    assert item.non_tensor_batch == {"name": "row 2"}
    assert item.meta_info == {"step": 3}


def test_columns_by_name() -> None:
    rows = rows_of([1, 2])
    assert rows["ids"].shape == (2, 2)
    assert list(rows["name"]) == ["row 1", "row 2"]
    with pytest.raises(KeyError, match=r"no column 'names', there are \['ids', 'name', 'reward'\]"):
        rows["names"]
    rows["score"] = torch.zeros(2)
    rows["tag"] = np.array(["a", "b"], dtype=object)
    assert rows.batch is not None
    assert set(rows.batch.keys()) == {"ids", "reward", "score"}
    assert set(rows.non_tensor_batch) == {"name", "tag"}
    rows["score"] = np.array([1, 2], dtype=object)
    assert "score" not in set(rows.batch.keys())


def test_union_takes_over_columns_and_notes_and_answers_with_itself() -> None:
    rows = rows_of([1, 2], step=3)
    more = DataProto.from_dict({"score": torch.tensor([0.5, float("nan")])}, {"name": ["row 1", "row 2"]}, meta_info={"step": 3, "more": 1})
    assert rows.union(more) is rows
    assert rows.union(more) is rows  # the same again, NaN and all
    assert rows.meta_info == {"step": 3, "more": 1}
    assert rows["score"][0] == 0.5
    empty = DataProto()
    assert len(empty.union(rows_of([4]))) == 1


@pytest.mark.parametrize(
    "other",
    [
        DataProto.from_dict({"reward": torch.tensor([1.0, 3.0])}),
        DataProto.from_dict({"reward": torch.tensor([1.0, 2.0], dtype=torch.float64)}),
        DataProto.from_dict({"score": torch.tensor([1.0])}),
        DataProto.from_dict({"score": torch.tensor([1.0, 2.0])}, {"name": ["row 1", "another"]}),
        DataProto.from_dict({"score": torch.tensor([1.0, 2.0])}, meta_info={"step": 4}),
    ],
)
def test_union_of_what_differs_is_refused_and_changes_nothing(other: DataProto) -> None:
    rows = rows_of([1, 2], step=3)
    with pytest.raises(DataError, match=r"expected (the same values|as many rows) on both sides"):
        rows.union(other)
    assert numbers_in(rows) == [1, 2]
    assert rows.meta_info == {"step": 3}
    assert set(rows.non_tensor_batch) == {"name"}


def test_select_and_pop() -> None:
    rows = rows_of([1, 2], step=3, metrics={})
    chosen = rows.select(batch_keys=["ids"], non_tensor_batch_keys=[], meta_info_keys=["step"])
    assert chosen.batch is not None
    assert (list(chosen.batch.keys()), chosen.non_tensor_batch, chosen.meta_info) == (["ids"], {}, {"step": 3})
    assert numbers_in(rows.select(deepcopy=True)) == [1, 2]
    taken = rows.pop(batch_keys="reward", non_tensor_batch_keys=["name"], meta_info_keys=["step"])
    assert numbers_in(taken.union(chosen)) == [1, 2]
    assert rows.batch is not None
    assert (list(rows.batch.keys()), rows.non_tensor_batch, rows.meta_info) == (["ids"], {}, {"metrics": {}})
    with pytest.raises(DataError, match=r"expected keys of batch, which are \['ids'\], got \['reward'\]"):
        rows.pop(batch_keys=["reward"])
    assert rows.rename("ids", "input_ids") is rows
    assert list(rows.batch.keys()) == ["input_ids"]


def test_concat_gathers_metrics_and_takes_the_other_notes_from_the_first() -> None:
    first, second = rows_of([1], metrics={"a": 1, "b": [1, 2]}, step=3), rows_of([2], metrics={"a": 2}, step=4)
    joined = DataProto.concat([first, second])
    assert numbers_in(joined) == [1, 2]
    assert joined.meta_info == {"metrics": {"a": [1, 2], "b": [1, 2]}, "step": 3}
    assert DataProto.concat([first]) is first
    with pytest.raises(DataError, match="expected at least one DataProto"):
        DataProto.concat([])
    with pytest.raises(DataError, match="expected the same columns in all parts"):
        DataProto.concat([first, DataProto.from_dict({"ids": torch.zeros(1, 2)})])
    with pytest.raises(DataError, match="expected tensors of the same width in all parts"):
        DataProto.concat([DataProto.from_dict({"ids": torch.zeros(1, width)}) for width in (2, 3)])


def test_from_single_dict_tells_tensors_from_objects() -> None:
    rows = DataProto.from_single_dict({"ids": torch.zeros(2, 3), "name": np.array(["a", "b"], dtype=object)})
    assert rows.batch is not None
    assert (list(rows.batch.keys()), list(rows.non_tensor_batch)) == (["ids"], ["name"])
    nested = DataProto.from_dict({"ids": torch.zeros(2, 3)}, {"steps": [[1, 2], [3, 4]]})  # numpy would make a matrix of them
    assert nested.non_tensor_batch["steps"].shape == (2,)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: DataProto.from_dict({}), "at least one tensor"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)}), "expected tensors of .* rows"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2)}, {"b": [1]}), "expected 2 rows in every column, got 1 in 'b'"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2)}, num_batch_dims=2), "one batch dimension"),
        (lambda: DataProto.from_single_dict({"a": [1, 2]}), "got 'a' of type list"),
        (lambda: DataProto(non_tensor_batch={"a": np.array([1.0])}), r"expected numpy arrays of objects .* 'a' as ndarray of float64"),
        (lambda: DataProto(batch=TensorDict({}, batch_size=[2, 3])), "one batch dimension"),
        (
            lambda: DataProto(batch=TensorDict({"a": torch.zeros(1)}, batch_size=[1]), non_tensor_batch={"a": np.array([1], dtype=object)}),
            "expected every name once",
        ),
        (lambda: rows_of([1]).chunk(2), "expected 1 to 1 chunks of 1 rows, got 2"),
        (lambda: rows_of([1]).split(0), "split_size of at least 1"),
    ],
)
def test_what_does_not_fit_is_said(make: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        make()


@pytest.mark.parametrize(
    ("index", "error", "says"),
    [
        (2, IndexError, "expected an index below 2"),
        (-3, IndexError, "expected an index below 2"),
        ([0, 5], IndexError, "expected an index below 2"),
        ([True], IndexError, "expected one truth value per row"),
        ([0.5], TypeError, "whole numbers or truth values"),
        (True, TypeError, "got bool"),
        (None, TypeError, "got NoneType"),
    ],
)
def test_an_index_that_is_none_is_an_error(index: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        rows_of([1, 2])[index]


def test_copies_share_nothing_and_pickles_come_back() -> None:
    rows = rows_of([1, 2], notes={"a": [1]})
    for other in (copy.deepcopy(rows), rows.clone(), pickle.loads(pickle.dumps(rows))):
        assert other.batch is not None
        other.batch["ids"][0, 0] = 9
        other.meta_info["notes"]["a"].append(2)
    assert numbers_in(rows) == [1, 2]
    assert rows.meta_info == {"notes": {"a": [1]}}


def test_tensors_move_and_the_notes_with_them() -> None:
    rows = rows_of([1], scale=torch.ones(1), inner={"values": [torch.ones(1)]})
    assert rows.to("meta") is rows
    assert rows.batch is not None
    assert (
        rows.batch["ids"].device.type == rows.meta_info["scale"].device.type == rows.meta_info["inner"]["values"][0].device.type == "meta"
    )


def test_a_batch_may_be_set_later() -> None:
    rows = DataProto()
    assert (len(rows), rows.batch, rows.non_tensor_batch) == (0, None, {})
    rows.batch = TensorDict({"ids": torch.zeros(2, 3)}, batch_size=[2])
    rows.non_tensor_batch = {"name": np.array(["a", "b"], dtype=object)}
    assert len(rows) == 2
    with pytest.raises(DataError, match="expected 2 rows"):
        rows.non_tensor_batch = {"name": np.array(["a"], dtype=object)}
    assert "2 rows, columns ['ids', 'name']" in repr(rows_of([1, 2]).select(batch_keys=["ids"]))
