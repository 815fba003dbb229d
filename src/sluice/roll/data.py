"""DataProto: rows of tensors, objects and notes, as ROLL and verl pass them around, so that code written for them runs here.

    batch             TensorDict with one batch dimension: one row per response; None when there are no tensors
    non_tensor_batch  dict of numpy arrays of objects, one entry per row
    meta_info         dict of anything, about all rows together

Facts about the interface are from the sources of ROLL (roll/distributed/scheduler/protocol.py) and verl (verl/protocol.py). On purpose
different: a slice has a `meta_info` of its own (a copy, one level deep), so that a note on one response is not one on its siblings; a
negative index counts from the end; what does not fit is a `DataError` that says why, and never an assertion.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, TypeAlias, cast, overload

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from sluice.errors import DataError
from sluice.roll.remote import RemoteRows, put_rows

Column: TypeAlias = npt.NDArray[np.object_]
Index: TypeAlias = int | slice | Sequence[int] | Sequence[bool] | npt.NDArray[Any] | torch.Tensor

METRICS: Final = "metrics"  # the key of meta_info that concat gathers from all parts


def column(values: Iterable[Any]) -> Column:
    """A numpy array of objects, one per value, whatever the values are. [B]"""
    items = list(values)
    out = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        out[index] = item
    return out


@dataclass(slots=True)
class DataProtoItem:
    """One row without its batch dimension."""

    batch: TensorDict | None  # batch_size []
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


class DataProto:
    """Rows, see the top of this file. Reading `batch` or `non_tensor_batch` of remote data fetches it once; `drop` frees it."""

    def __init__(
        self,
        batch: TensorDict | None = None,
        non_tensor_batch: dict[str, Column] | None = None,
        meta_info: dict[str, Any] | None = None,
        remote_batch: RemoteRows | None = None,
    ) -> None:
        """The parts themselves, not copies. Raises `DataError` when they do not fit together."""
        self._batch = batch
        self._non_tensor_batch = {} if non_tensor_batch is None else non_tensor_batch
        self.meta_info = {} if meta_info is None else meta_info
        self._remote = remote_batch
        self._is_fetched = remote_batch is None  # whether batch and non_tensor_batch have all columns
        self.check_consistency()

    # ------------------------------------------------------------ making one

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor],
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> DataProto:
        """Tensors with the same first dimension, and sequences of that length, which become arrays of objects."""
        if num_batch_dims != 1:
            raise DataError(f"expected one batch dimension, got num_batch_dims {num_batch_dims} - rows are the first dimension")
        if not tensors:
            raise DataError("expected at least one tensor, got none - objects alone: DataProto(non_tensor_batch=...)")
        sizes = {name: tensor.shape[:1] for name, tensor in tensors.items()}
        size = next(iter(sizes.values()))
        odd = {name: tuple(tensors[name].shape) for name, own in sizes.items() if own != size or not own}
        if odd:
            raise DataError(f"expected tensors of {tuple(size)} rows, as the first one has, got {odd} - rows are the first dimension")
        objects = {name: column(values) for name, values in (non_tensors or {}).items()}
        return cls(batch=TensorDict(dict(tensors), batch_size=size), non_tensor_batch=objects, meta_info=meta_info)

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None) -> DataProto:
        """The same from one mapping of tensors and numpy arrays."""
        tensors = {name: value for name, value in data.items() if isinstance(value, torch.Tensor)}
        objects = {name: value for name, value in data.items() if isinstance(value, np.ndarray)}
        for name, value in data.items():
            if name not in tensors and name not in objects:
                raise DataError(f"expected tensors and numpy arrays, got {name!r} of type {type(value).__name__} - wrap it in an array")
        return cls.from_dict(tensors, objects, meta_info)

    def clone(self) -> DataProto:
        """A deep copy; of remote data it names the same rows."""
        return copy.deepcopy(self)

    # ------------------------------------------------------------ reading

    @property
    def batch(self) -> TensorDict | None:
        """The tensors."""
        self._fetch()
        return self._batch

    @batch.setter
    def batch(self, value: TensorDict | None) -> None:
        self._fetch()
        self._batch = value
        self.check_consistency()

    @property
    def non_tensor_batch(self) -> dict[str, Column]:
        """The objects."""
        self._fetch()
        return self._non_tensor_batch

    @non_tensor_batch.setter
    def non_tensor_batch(self, value: dict[str, Column]) -> None:
        self._fetch()
        self._non_tensor_batch = value
        self.check_consistency()

    @property
    def is_remote(self) -> bool:
        """Whether rows of a store stand behind it, freed ones included."""
        return self._remote is not None

    def __len__(self) -> int:
        if self._batch is not None:
            return int(self._batch.batch_size[0])
        if self._non_tensor_batch:
            return len(next(iter(self._non_tensor_batch.values())))
        return 0 if self._remote is None else len(self._remote)

    def __repr__(self) -> str:
        names = [*_tensors(self._batch), *self._non_tensor_batch]
        where = "" if self._is_fetched else ", remote"
        return f"DataProto({len(self)} rows, columns {names}, meta_info {sorted(map(str, self.meta_info))}{where})"

    @overload
    def __getitem__(self, item: str) -> Any: ...

    @overload
    def __getitem__(self, item: Index) -> DataProto: ...

    def __getitem__(self, item: Index | str) -> Any:
        """A column by its name; else rows: an index gives one row, a slice, a list or an array any number of them."""
        if isinstance(item, str):
            return self._column(item)
        return self._rows(self._indices(item))

    def __setitem__(self, name: str, value: torch.Tensor | Column) -> None:
        self._fetch()
        if isinstance(value, torch.Tensor):
            self._non_tensor_batch.pop(name, None)
            if self._batch is None:
                self._batch = TensorDict({}, batch_size=[len(self) or len(value)])
            self._batch[name] = value
        else:
            if self._batch is not None and name in _tensors(self._batch):
                del self._batch[name]
            self._non_tensor_batch[name] = value
        self.check_consistency()

    def item(self, index: int) -> DataProtoItem:
        """One row without its batch dimension."""
        (place,) = self._indices(index)
        self._fetch()
        return DataProtoItem(
            batch=None if self._batch is None else self._batch[place],
            non_tensor_batch={name: values[place] for name, values in self._non_tensor_batch.items()},
            meta_info=dict(self.meta_info),
        )

    def select_idxs(self, idxs: Index) -> DataProto:
        """Some rows, by a list or array of indices, or of truth values."""
        return self._rows(self._indices(idxs))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """The rows of `[start:end:step]`."""
        return self._rows(range(len(self))[slice(start, end, step)])

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Some columns and notes of all rows; None: all of that kind."""
        self._fetch()
        batch = self._batch
        if batch is not None and batch_keys is not None:
            self._require(batch_keys, _tensors(batch), "batch")
            batch = batch.select(*batch_keys)
        objects = self._non_tensor_batch
        if non_tensor_batch_keys is not None:
            self._require(non_tensor_batch_keys, objects, "non_tensor_batch")
            objects = {name: objects[name] for name in non_tensor_batch_keys}
        notes = self.meta_info
        if meta_info_keys is not None:
            notes = {name: value for name, value in notes.items() if name in set(meta_info_keys)}
        chosen = DataProto(batch=batch, non_tensor_batch=dict(objects), meta_info=dict(notes))
        if deepcopy:
            chosen = copy.deepcopy(chosen)
        return chosen._backed_by(self._remote)

    def group_by(self, keys: str | Sequence[str]) -> dict[str, DataProto]:
        """The rows by the values of one or more columns, written as text and joined by "|"."""
        names = [keys] if isinstance(keys, str) else list(keys)
        if not names:
            raise DataError("expected at least one column to group by, got none")
        columns = [self._column(name) for name in names]
        places: dict[str, list[int]] = {}
        for place in range(len(self)):
            values = [values[place] for values in columns]
            told = "|".join(str(value.numpy()) if isinstance(value, torch.Tensor) else str(value) for value in values)
            places.setdefault(told, []).append(place)
        return {told: self._rows(chosen) for told, chosen in places.items()}

    # ------------------------------------------------------------ splitting and joining

    def chunk(self, chunks: int) -> list[DataProto]:
        """So many parts, the first of them one row longer where it does not come out even. Raises `DataError` for more parts than rows."""
        size = len(self)
        if not 1 <= chunks <= max(size, 1):
            raise DataError(f"expected 1 to {max(size, 1)} chunks of {size} rows, got {chunks}")
        least, longer = divmod(size, chunks)
        starts = [index * least + min(index, longer) for index in range(chunks + 1)]
        return [self._rows(range(start, end)) for start, end in pairwise(starts)]

    def split(self, split_size: int) -> list[DataProto]:
        """Parts of so many rows; the last one has what is left."""
        if split_size < 1:
            raise DataError(f"expected a split_size of at least 1, got {split_size}")
        return [self._rows(range(start, min(start + split_size, len(self)))) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProto], *, global_keys: Iterable[str] = (METRICS,)) -> DataProto:
        """The rows of all parts, which must have the same columns, in order. Of one part: that part itself.

        meta_info is that of the first part, except the entries in `global_keys`, which are gathered from all parts: of mappings one list
        per entry, else one list.
        """
        parts = list(data)
        if not parts:
            raise DataError("expected at least one DataProto to concatenate, got none")
        if len(parts) == 1:
            return parts[0]
        for part in parts:
            part._fetch()
        first = parts[0]
        for part in parts[1:]:
            if part._names() != first._names():
                raise DataError(
                    f"expected the same columns in all parts, got {sorted(first._names())} and {sorted(part._names())} - select them first"
                )
        batch = None
        if first._batch is not None:
            try:
                batch = cast("TensorDict", torch.cat([part._batch for part in parts], dim=0))  # type: ignore[misc]
            except RuntimeError as error:
                raise DataError(f"expected tensors of the same width in all parts: {error} - pad them first") from error
        objects = {name: np.concatenate([part._non_tensor_batch[name] for part in parts]) for name in first._non_tensor_batch}
        notes = dict(first.meta_info)
        for key in global_keys:
            gathered = _gathered([part.meta_info.get(key) for part in parts])
            if gathered is not None:
                notes[key] = gathered
        out = DataProto(batch=batch, non_tensor_batch=objects, meta_info=notes)
        if any(part._remote is not None for part in parts):
            out._backed_by(RemoteRows(refs for part in parts for refs in part._refs()))
        return out

    def union(self, other: DataProto) -> DataProto:
        """Take over the columns and notes of the same rows; this one, changed. Raises `DataError` when both have one that differs."""
        self._fetch()
        other._fetch()
        if self._names() and other._names() and len(self) != len(other):
            raise DataError(f"expected as many rows on both sides, got {len(self)} and {len(other)}")
        own, theirs = _tensors(self._batch), _tensors(other._batch)
        for name, tensor in theirs.items():
            if name in own:
                _require_same(name, _same_tensors(own[name], tensor))
        for name, values in other._non_tensor_batch.items():
            if name in self._non_tensor_batch:
                _require_same(name, _same_objects(self._non_tensor_batch[name], values))
        for name, note in other.meta_info.items():
            if name in self.meta_info:
                _require_same(f"meta_info[{name!r}]", _same_notes(self.meta_info[name], note))
        for name, tensor in theirs.items():
            self[name] = tensor
        self._non_tensor_batch.update(other._non_tensor_batch)
        self.meta_info.update(other.meta_info)
        self.check_consistency()
        if other._remote is not None:
            self._remote = other._remote if self._remote is None else self._remote.beside(other._remote)
        return self

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row so many times: each beside its copies, or the whole batch again and again."""
        places = range(len(self))
        return self._rows([p for p in places for _ in range(repeat_times)] if interleave else [*places] * repeat_times)

    def pop(
        self,
        batch_keys: str | Sequence[str] | None = None,
        non_tensor_batch_keys: str | Sequence[str] | None = None,
        meta_info_keys: str | Sequence[str] | None = None,
    ) -> DataProto:
        """Take columns and notes out of this one; they, as another one."""
        self._fetch()
        names, objects, notes = (_listed(keys) for keys in (batch_keys, non_tensor_batch_keys, meta_info_keys))
        self._require(names, _tensors(self._batch), "batch")
        self._require(objects, self._non_tensor_batch, "non_tensor_batch")
        self._require(notes, self.meta_info, "meta_info")
        size = len(self)
        batch = self._batch
        return DataProto(
            batch=None if batch is None else TensorDict({name: batch.pop(name) for name in names}, batch_size=[size]),
            non_tensor_batch={name: self._non_tensor_batch.pop(name) for name in objects},
            meta_info={name: self.meta_info.pop(name) for name in notes},
        )

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Give tensors other names; this one, changed."""
        self._fetch()
        old, new = _listed(old_keys), _listed(new_keys)
        if len(old) != len(new):
            raise DataError(f"expected as many new names as old ones, got {old} and {new}")
        self._require(old, _tensors(self._batch), "batch")
        if self._batch is not None:
            for before, after in zip(old, new, strict=True):
                self._batch.rename_key_(before, after)
        self.check_consistency()
        return self

    def reorder(self, indices: Index) -> None:
        """Put the rows into another order, in place."""
        other = self._rows(self._indices(indices))
        self._batch, self._non_tensor_batch, self._remote = other._batch, other._non_tensor_batch, other._remote
        self._is_fetched = other._is_fetched

    def to(self, device: torch.device | str) -> DataProto:
        """Move the tensors, those in meta_info included; this one, changed."""
        self._fetch()
        if self._batch is not None:
            self._batch = self._batch.to(device)
        self.meta_info = _moved(self.meta_info, device)
        return self

    # ------------------------------------------------------------ remote data

    def to_remote(self, partition: str = "train_eval") -> DataProto:
        """The same rows in the store (`sluice.roll.use_remote_store`), with the same meta_info here; this one stays as it is.

        `DataProto.to_remote(data)`, as ROLL calls it, is the same. partition: a name under which the store keeps them together.
        """
        if not self._is_fetched or not self._names():
            return self
        rows = [
            {name: tensor[place].clone() for name, tensor in _tensors(self._batch).items()}
            | {name: values[place] for name, values in self._non_tensor_batch.items()}
            for place in range(len(self))
        ]
        stored = put_rows(partition, rows)
        return DataProto(
            meta_info=self.meta_info,
            remote_batch=stored if self._remote is None else self._remote.beside(stored),
        )

    def drop(self) -> None:
        """Free the stored rows of this data, if it has any; a second time does nothing. What was read before stays readable here."""
        if self._remote is not None:
            self._remote.drop()

    # ------------------------------------------------------------ inside

    def check_consistency(self) -> None:
        """Raise `DataError` unless all columns have as many rows, and each a name of its own."""
        if self._batch is not None and len(self._batch.batch_size) != 1:
            raise DataError(f"expected a batch with one batch dimension, got batch_size {list(self._batch.batch_size)} - give [rows]")
        size = len(self)
        columns: Mapping[str, Any] = self._non_tensor_batch
        for name, values in columns.items():
            if not isinstance(values, np.ndarray) or values.dtype != object or values.ndim < 1:
                got = f"{type(values).__name__}" + (f" of {values.dtype}" if isinstance(values, np.ndarray) else "")
                raise DataError(
                    f"expected numpy arrays of objects in non_tensor_batch, got {name!r} as {got} - use np.array(..., dtype=object)"
                )
            if len(values) != size:
                raise DataError(f"expected {size} rows in every column, got {len(values)} in {name!r}")
            if name in _tensors(self._batch):
                raise DataError(f"expected every name once, got {name!r} in batch and in non_tensor_batch - rename one")
        if self._remote is not None and self._names() and len(self._remote) != size:
            raise DataError(f"expected {len(self._remote)} rows, as are stored, got {size}")

    def _fetch(self) -> None:
        if self._is_fetched:
            return
        assert self._remote is not None
        rows = self._remote.fetch()
        for name in rows[0] if rows else ():
            values = [row[name] for row in rows]
            if not all(isinstance(value, torch.Tensor) for value in values):
                self._non_tensor_batch.setdefault(name, column(values))
                continue
            if self._batch is None:
                self._batch = TensorDict({}, batch_size=[len(rows)])
            self._batch.set(name, torch.stack(values))
        self._is_fetched = True

    def _backed_by(self, remote: RemoteRows | None) -> DataProto:
        """All columns are here, and these stored rows stand behind them."""
        self._remote = remote
        return self

    def _refs(self) -> tuple[Any, ...]:
        return ((),) * len(self) if self._remote is None else self._remote.refs

    def _names(self) -> set[str]:
        return {*_tensors(self._batch), *self._non_tensor_batch}

    def _column(self, name: str) -> Any:
        self._fetch()
        tensors = _tensors(self._batch)
        if name in tensors:
            return tensors[name]
        if name in self._non_tensor_batch:
            return self._non_tensor_batch[name]
        raise KeyError(f"no column {name!r}, there are {sorted(self._names())}")

    def _rows(self, places: Sequence[int]) -> DataProto:
        batch = None
        if self._batch is not None:
            chosen = torch.tensor(list(places), dtype=torch.long)
            batch = TensorDict({name: tensor[chosen] for name, tensor in _tensors(self._batch).items()}, batch_size=[len(places)])
        objects = {name: values[list(places)] for name, values in self._non_tensor_batch.items()}
        remote = None if self._remote is None else self._remote.take(places)
        if not self._is_fetched:
            return DataProto(batch=batch, non_tensor_batch=objects, meta_info=dict(self.meta_info), remote_batch=remote)
        return DataProto(batch=batch, non_tensor_batch=objects, meta_info=dict(self.meta_info))._backed_by(remote)

    def _indices(self, item: Index) -> Sequence[int]:
        size = len(self)
        if isinstance(item, slice):
            return range(size)[item]
        if isinstance(item, int | np.integer) and not isinstance(item, bool):
            given = [int(item)]
        elif isinstance(item, list | tuple | range | np.ndarray | torch.Tensor):
            values = np.asarray(item.detach().cpu() if isinstance(item, torch.Tensor) else item).reshape(-1)
            if values.dtype == np.bool_:
                if len(values) != size:
                    raise IndexError(f"expected one truth value per row ({size}), got {len(values)}")
                return [int(place) for place in np.flatnonzero(values)]
            if len(values) and not np.issubdtype(values.dtype, np.integer):
                raise TypeError(f"expected whole numbers or truth values as indices, got {values.dtype}")
            given = [int(value) for value in values]
        else:
            raise TypeError(f"expected an index, a slice, a list or array of indices, or the name of a column, got {type(item).__name__}")
        for place in given:
            if not -size <= place < size:
                raise IndexError(f"expected an index below {size}, the number of rows, got {place}")
        return [place % size for place in given]

    @staticmethod
    def _require(wanted: Iterable[str], known: Iterable[str], what: str) -> None:
        names = set(known)
        missing = [name for name in wanted if name not in names]
        if missing:
            raise DataError(f"expected keys of {what}, which are {sorted(names)}, got {missing}")


def _tensors(batch: TensorDict | None) -> dict[str, torch.Tensor]:
    """The tensors by name, in plain Python."""
    return {} if batch is None else {str(name): cast("torch.Tensor", tensor) for name, tensor in batch.items()}


def _listed(keys: str | Sequence[str] | None) -> list[str]:
    return [] if keys is None else [keys] if isinstance(keys, str) else list(keys)


def _gathered(values: Sequence[Any]) -> Any:
    """One entry of meta_info from all parts; None where no part has it."""
    given = [value for value in values if value is not None]
    if not given:
        return None
    if not all(isinstance(value, Mapping) for value in given):
        return list(values)
    out: dict[str, list[Any]] = {}
    for entries in given:
        for name, value in entries.items():
            several = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)
            out.setdefault(name, []).extend(value if several else [value])
    return out


def _require_same(name: str, is_same: bool) -> None:
    if not is_same:
        raise DataError(f"expected the same values on both sides of a union, got others in {name} - rename one, or pop it")


def _same_tensors(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first, second) or (first.is_floating_point() and bool(torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)))


def _same_objects(first: Column, second: Column) -> bool:
    return first.shape == second.shape and all(_same_notes(one, other) for one, other in zip(first.flat, second.flat, strict=True))


def _same_notes(first: Any, second: Any) -> bool:
    """Whether two objects are equal, also where they hold arrays, or are NaN."""
    if first is second:
        return True
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return _same_tensors(first, second)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_same_notes(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_same_notes, first, second))
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        if object in (first.dtype, second.dtype):
            return first.dtype == second.dtype and _same_objects(first, second)
        return np.array_equal(first, second, equal_nan=first.dtype.kind in "fc")
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first):
        return math.isnan(second)
    try:
        return bool(first == second)
    except (TypeError, ValueError, RuntimeError):
        return False


def _moved(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(entry, device) for key, entry in value.items()}
    if isinstance(value, list):
        return [_moved(entry, device) for entry in value]
    return value
