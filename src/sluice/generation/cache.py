"""Keys and values of all slots, behind transformers' cache interface.

A slot is one row of the cache and holds one sequence. Rows have different lengths, each is written at its own position, and a forward pass
reads only as many keys as its longest row has. The engine describes a forward pass with a `Pass`; the layers then do the same for
every layer of the model. Entries beyond a row's length hold old, finite numbers: the attention mask hides them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_ROW_CHUNK = 16  # rows of the first allocation; it doubles from there
_LENGTH_CHUNK = 64  # keys by which rows grow at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Where one forward pass writes its keys and values, and which it attends to.

    The pass computes U input rows of T tokens. `N` entries are written; one computed token may be written to several slots (siblings
    that share a prompt). Of a decoding pass, T = 1, some input rows may not be written.
    """

    write_rows: torch.Tensor  # [N] slots written to
    write_positions: torch.Tensor  # [N] positions within them
    source_rows: torch.Tensor | None  # [N] input rows that are written; None: all, T = 1
    source_tokens: torch.Tensor | None  # [N] tokens within the input rows; None with source_rows
    read_rows: torch.Tensor | slice | None  # [U] slots attended to; a slice costs no copy; None: only the pass's own tokens
    key_length: int  # keys attended to
    capacity: int  # slots needed
    length: int  # positions needed


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """One layer's keys and values. [slots, heads, positions, head size]"""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self.keys: torch.Tensor
        self.values: torch.Tensor

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, length = self._cache.size
        # Zeros, not empty memory: a NaN in an entry that the mask hides would still poison the sum (0 x NaN).
        self.keys = key_states.new_zeros(rows, key_states.shape[1], length, key_states.shape[3])
        self.values = value_states.new_zeros(rows, value_states.shape[1], length, value_states.shape[3])
        self.is_initialized = True

    def grow(self, rows: int, length: int) -> None:
        """Make room; what is stored stays."""
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old: torch.Tensor = getattr(self, name)
            new = old.new_zeros(rows, old.shape[1], length, old.shape[3])
            new[: old.shape[0], :, : old.shape[2]] = old
            setattr(self, name, new)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this pass's keys and values, return those to attend to. key_states, value_states [U, heads, T, head size]"""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        now = self._cache.current
        if now.source_rows is None:
            self.keys[now.write_rows, :, now.write_positions] = key_states[:, :, 0]
            self.values[now.write_rows, :, now.write_positions] = value_states[:, :, 0]
        else:
            self.keys[now.write_rows, :, now.write_positions] = key_states[now.source_rows, :, now.source_tokens]
            self.values[now.write_rows, :, now.write_positions] = value_states[now.source_rows, :, now.source_tokens]
        rows = now.read_rows
        if rows is None:
            return key_states, value_states
        keys, values = self.keys[:, :, : now.key_length], self.values[:, :, : now.key_length]
        if isinstance(rows, slice):
            return keys[rows], values[rows]
        return keys.index_select(0, rows), values.index_select(0, rows)  # several times as fast as keys[rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys attended to, and the offset of the first."""
        return self._cache.current.key_length, 0

    def get_seq_length(self) -> int:
        """No single answer exists, and none is needed: masks and positions are explicit."""
        return 0

    def get_max_length(self) -> int:
        """Positions that a row may have."""
        return self._cache.max_length


class SlotCache:
    """The cache of all layers: grows by chunks up to max_slots x max_length, so that a large limit costs nothing by itself."""

    def __init__(self, *, layers: int, max_slots: int, max_length: int) -> None:
        self.max_slots = max_slots
        self.max_length = max_length
        self.size = (0, 0)  # slots and positions allocated
        self.current: Pass
        self._layers = [_SlotLayer(self) for _ in range(layers)]
        self.view = Cache(layers=list(self._layers))  # what the model is given

    def begin(self, plan: Pass) -> None:
        """Make room for the pass that comes next, and remember it."""
        rows, length = self.size
        if plan.capacity > rows or plan.length > length:
            while rows < plan.capacity:
                rows = min(self.max_slots, max(_ROW_CHUNK, 2 * rows))
            if plan.length > length:
                wanted = max(plan.length, length + length // 2)  # by half at least: growing copies everything stored
                length = min(self.max_length, -(-wanted // _LENGTH_CHUNK) * _LENGTH_CHUNK)
            self.size = (rows, length)
            for layer in self._layers:
                layer.grow(rows, length)
        self.current = plan

    def move(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """Copy the first `length` entries of slots `sources` to slots `targets`, as if all at once."""
        for layer in self._layers:
            if layer.is_initialized:
                for stored in (layer.keys[:, :, :length], layer.values[:, :, :length]):
                    # Row by row is several times as fast as by a tensor of rows.
                    for target, row in zip(targets.tolist(), stored.index_select(0, sources), strict=True):
                        stored[target] = row

    def clear(self, slots: npt.NDArray[np.int64]) -> None:
        """Forget what slots hold: what is not finite there would spoil whoever is seated next."""
        rows = torch.from_numpy(slots)
        for layer in self._layers:
            if layer.is_initialized:
                layer.keys[rows] = 0
                layer.values[rows] = 0

    @property
    def bytes(self) -> int:
        """Memory allocated."""
        return sum(t.numel() * t.element_size() for layer in self._layers if layer.is_initialized for t in (layer.keys, layer.values))
