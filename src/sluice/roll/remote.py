"""Rows kept in a store outside the batch: `DataProto.to_remote()` puts them there, `drop()` frees them.

A store holds single rows under keys of its own making. Whatever is made of remote data (slices, repeats, concatenations) names the same
rows, and each row is deleted once, however many of them are dropped. Reading fetches; nothing else does.

    with holding() as held:      # to_remote() in here, and in tasks started in here, tells `held`
        ...
    held.free()                  # whatever of it nobody has dropped goes

The machinery of this room opens such a holding around every loop and every group filter, and frees it when their group has left them,
however that came about: nothing that user code puts into a store outlives its group.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain, count
from typing import Any, Protocol, TypeAlias

from sluice.errors import DataError

Row: TypeAlias = Mapping[str, Any]
"""One row: a tensor without its batch dimension, or any object, per column."""


class RemoteStore(Protocol):
    """Where rows are kept. Calls come from any thread."""

    def put(self, partition: str, rows: Sequence[Row]) -> Sequence[str]:
        """Keep rows; one key for each, unique in this store. partition: a name for rows that belong together."""

    def get(self, keys: Sequence[str]) -> Sequence[Row]:
        """The rows of these keys, in their order."""

    def delete(self, keys: Sequence[str]) -> None:
        """Forget the rows of these keys."""


class InProcessStore:
    """Rows in a dictionary of this process: the store that is used when no other one is set. It saves no memory, and shows leaks."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}  # by key, what is held now
        self.put_rows = 0  # since the start
        self.deleted_rows = 0
        self._numbers = count()
        self._lock = threading.Lock()

    def put(self, partition: str, rows: Sequence[Row]) -> list[str]:
        """Keep rows under keys that begin with the partition."""
        with self._lock:
            keys = [f"{partition}/{next(self._numbers)}" for _ in rows]
            self.rows.update(zip(keys, rows, strict=True))
            self.put_rows += len(keys)
        return keys

    def get(self, keys: Sequence[str]) -> list[Row]:
        """The rows themselves."""
        with self._lock:
            return [self.rows[key] for key in keys]

    def delete(self, keys: Sequence[str]) -> None:
        """Forget them. Raises `KeyError` for one that is not held."""
        with self._lock:
            for key in keys:
                del self.rows[key]
            self.deleted_rows += len(keys)


_store: RemoteStore = InProcessStore()


def remote_store() -> RemoteStore:
    """The store that `to_remote` puts rows into."""
    return _store


def use_remote_store(store: RemoteStore) -> RemoteStore:
    """Put rows into this store from now on; the one before. What lies in that one is still read and freed there."""
    global _store
    before, _store = _store, store
    return before


class Block:
    """The rows of one `put`: which of them are still held."""

    def __init__(self, store: RemoteStore, keys: Sequence[str]) -> None:
        self.store = store
        self._live = dict.fromkeys(keys)
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> Block:
        """A copy of what names rows names the same rows."""
        return self

    def is_live(self, key: str) -> bool:
        """Whether a row has not been freed."""
        return key in self._live

    def free(self, keys: Iterable[str] | None = None) -> None:
        """Delete these rows (None: all) that are still held. When the store raises they stay named, so that it can be tried again."""
        with self._lock:
            going = list(self._live) if keys is None else [key for key in dict.fromkeys(keys) if key in self._live]
            if going:
                self.store.delete(going)
                for key in going:
                    del self._live[key]


Ref: TypeAlias = tuple[Block, str]
"""A stored row. The columns of one row of a batch may be spread over several of them; the later ones count."""


class RemoteRows:
    """Which stored rows stand behind each row of a batch; () where a row has none."""

    def __init__(self, refs: Iterable[tuple[Ref, ...]]) -> None:
        self.refs = tuple(refs)

    def __len__(self) -> int:
        return len(self.refs)

    def take(self, indices: Iterable[int]) -> RemoteRows:
        """Those of some rows, in the order given."""
        return RemoteRows(self.refs[index] for index in indices)

    def beside(self, later: RemoteRows) -> RemoteRows:
        """Further columns of the same rows."""
        return RemoteRows(own + more for own, more in zip(self.refs, later.refs, strict=True))

    def fetch(self) -> list[dict[str, Any]]:
        """The stored columns of every row. Raises `DataError` when they have been freed."""
        wanted: dict[int, tuple[Block, dict[str, None]]] = {}  # by id of the block: which keys
        for block, key in self._each():
            if not block.is_live(key):
                raise DataError(
                    "expected remote data that is still held, got rows that drop() has freed - read what you need first, or drop later"
                )
            wanted.setdefault(id(block), (block, {}))[1][key] = None
        found: dict[tuple[int, str], Row] = {}
        for number, (block, keys) in wanted.items():
            found.update(((number, key), row) for key, row in zip(keys, block.store.get(list(keys)), strict=True))
        return [{name: value for block, key in refs for name, value in found[id(block), key].items()} for refs in self.refs]

    def drop(self) -> None:
        """Free them, each once."""
        by_block: dict[int, tuple[Block, list[str]]] = {}
        for block, key in self._each():
            by_block.setdefault(id(block), (block, []))[1].append(key)
        _free_all([(block, keys) for block, keys in by_block.values()])

    def _each(self) -> Iterator[Ref]:
        return chain.from_iterable(self.refs)


class Holding:
    """What was made remote while it was open."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._is_over = False

    def add(self, block: Block) -> None:
        """Rows that go when this is freed; at once, with `DataError`, when that has been done already."""
        if self._is_over:
            block.free()
            raise DataError("expected to_remote() while the group is open, got it afterwards - whoever is left behind of a loop must stop")
        self._blocks.append(block)

    def free(self) -> None:
        """Free all that nobody has dropped."""
        self._is_over = True
        blocks, self._blocks = self._blocks, []
        _free_all([(block, None) for block in blocks])


def _free_all(parts: Sequence[tuple[Block, Iterable[str] | None]]) -> None:
    """Free every part, also behind one that raises; then raise the first error."""
    first: Exception | None = None
    for block, keys in parts:
        try:
            block.free(keys)
        except Exception as error:  # noqa: BLE001 - raised below, when the others are free
            first = first or error
    if first is not None:
        raise first


_holding: ContextVar[Holding | None] = ContextVar("sluice_roll_holding", default=None)


@contextmanager
def holding() -> Iterator[Holding]:
    """What is made remote inside, also by tasks started inside, is told to this holding."""
    held = Holding()
    token = _holding.set(held)
    try:
        yield held
    finally:
        _holding.reset(token)


def put_rows(partition: str, rows: Sequence[Row]) -> RemoteRows:
    """Store rows, and tell whoever holds them."""
    store = _store
    keys = store.put(partition, rows)
    if len(keys) != len(rows):
        raise DataError(f"expected a store to answer with one key per row ({len(rows)}), got {len(keys)} - see sluice.roll.RemoteStore.put")
    block = Block(store, keys)
    held = _holding.get()
    if held is not None:
        held.add(block)
    return RemoteRows(((block, key),) for key in keys)
