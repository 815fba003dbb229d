"""A causal language model with its slots: turns tokens and slots into next-token logits.

It works with any transformers model whose attention goes through the cache interface and an explicit mask. `check_slots` proves that for
the model at hand, by comparing with an ordinary forward pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sluice.errors import ConfigError
from sluice.generation.cache import Pass, SlotCache

Index = npt.NDArray[np.int64]

_KEY_LENGTH_MULTIPLE = 8  # keys attended to are rounded up to this: one vector register of float32
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # largest error of the probe, relative to the largest logit
_PROBE_TOLERANCE_HALF = 0.1  # for 16-bit types and int8: a few of their rounding steps, summed over layers


class SlotModel:
    """A model and the keys and values of its live sequences. All calls happen under `torch.inference_mode`, from one thread."""

    def __init__(self, net: Any, *, max_slots: int, max_length: int, is_rounded: bool = False) -> None:
        """net: a transformers model for causal language modelling, in eval mode, not shared with anyone.

        is_rounded: it rounds to fewer digits than those of its type, so that the last of them decides about whole steps.
        """
        self.net = net
        self.config = net.config.get_text_config()
        head = net.get_output_embeddings()
        if head is None:
            raise ConfigError(
                f"model.path must hold a causal language model with an output layer, but {type(net).__name__} has none - use a model for "
                f"causal language modelling (Llama, Qwen2, ...)"
            )
        self.vocab_size = int(head.weight.shape[0])
        self.dtype: torch.dtype = net.dtype
        self._probe_tolerance = _PROBE_TOLERANCE_HALF if is_rounded else _PROBE_TOLERANCE.get(self.dtype, _PROBE_TOLERANCE_HALF)
        self.cache = self._new_cache(max_slots, max_length)
        self._picked: tuple[torch.Tensor, torch.Tensor] | None = None  # input rows and their tokens that get logits; None: all, T = 1
        # Logits are made of one token per row only. Picking that token just before the output layer keeps whatever the model does
        # after it (scaling, soft caps).
        head.register_forward_pre_hook(self._pick)

    def _new_cache(self, max_slots: int, max_length: int) -> SlotCache:
        return SlotCache(layers=self.config.num_hidden_layers, max_slots=max_slots, max_length=max_length)

    def _pick(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if self._picked is None:
            return None
        return (args[0][self._picked][:, None], *args[1:])

    def _mask(self, visible: torch.Tensor) -> torch.Tensor:
        """An additive mask from a boolean one: what both attention implementations (sdpa, eager) take."""
        return torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(~visible, torch.finfo(self.dtype).min)

    def _forward(
        self,
        plan: Pass,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        visible: torch.Tensor,
        picked: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        self.cache.begin(plan)
        self._picked = picked
        try:
            out = self.net(
                input_ids=tokens, attention_mask=self._mask(visible), position_ids=positions, cache=self.cache.view, use_cache=True
            )
        finally:
            self._picked = None
        logits: torch.Tensor = out.logits
        return logits[:, -1]

    def decode(self, tokens: Index, positions: Index, slots: Index, rows: Index) -> torch.Tensor:
        """One more token for each of the slots `rows` [R]; returns their next-token logits, [R, V].

        tokens, positions, slots [S]: what is computed: those slots, or a slice that holds them, of which the others are computed and
        forgotten: what they hold stays as it is. A slice is read without a copy. All in order.
        """
        at = torch.from_numpy(positions)
        key_length = min(self.cache.max_length, -(-(int(positions.max()) + 1) // _KEY_LENGTH_MULTIPLE) * _KEY_LENGTH_MULTIPLE)
        first, end = int(slots[0]), int(slots[-1]) + 1
        picked = source = source_tokens = None
        write_rows, write_positions = torch.from_numpy(rows), at
        if len(rows) < len(slots):
            source = write_rows - first
            source_tokens = torch.zeros_like(source)
            write_positions = at[source]
            picked = (source, source_tokens)
        plan = Pass(
            write_rows=write_rows, write_positions=write_positions, source_rows=source, source_tokens=source_tokens,
            read_rows=_read(slots), key_length=key_length, capacity=end, length=key_length,
        )  # fmt: skip
        visible = torch.arange(key_length) <= at[:, None]
        return self._forward(plan, torch.from_numpy(tokens)[:, None], at[:, None], visible[:, None, None, :], picked)

    def prefill(self, tokens: Index, counts: Index, starts: Index, rows: Index, leaders: Index, leader_of: Index) -> torch.Tensor:
        """Compute a stretch of tokens of several sequences and store it in their slots.

        tokens [U, T], of which the first counts[u] >= 1 are real, at positions starts[u], starts[u] + 1, ... of slot leaders[u], in order
        of slots. What is computed for leaders[u] is stored in every slot rows[r] with leader_of[r] = u (leaders are among the rows).
        Returns the logits that follow the last real token, [U, V].
        """
        width = tokens.shape[1]
        column = np.arange(width)
        ends = starts + counts
        source_of_row, token = np.nonzero(column < counts[leader_of][:, None])  # [N] each
        source = leader_of[source_of_row]
        position = starts[source] + token
        key_length = int(ends.max())
        query = starts[:, None] + column  # [U, T]
        visible: torch.Tensor
        read: torch.Tensor | slice | None
        if starts.any():
            read = _read(leaders)
            visible = torch.arange(key_length) <= torch.from_numpy(query)[:, None, :, None]
        else:
            # Nothing is stored yet: the pass's own keys are all there is, and padding stands to the right of every real token.
            read = None
            visible = torch.ones(width, width, dtype=torch.bool).tril_()[None, None]
        plan = Pass(
            write_rows=torch.from_numpy(rows[source_of_row]), write_positions=torch.from_numpy(position),
            source_rows=torch.from_numpy(source), source_tokens=torch.from_numpy(token),
            read_rows=read, key_length=width if read is None else key_length, capacity=int(rows.max()) + 1, length=key_length,
        )  # fmt: skip
        # Padding may stand beyond the last position that the model knows.
        places = torch.from_numpy(np.minimum(query, self.cache.max_length - 1))
        last = (torch.arange(len(counts)), torch.from_numpy(counts - 1))
        return self._forward(plan, torch.from_numpy(tokens), places, visible, last)

    def check_slots(self) -> None:
        """Prove that this model works in slots: compare prefill, continued prefill and decoding with an ordinary forward pass.

        Raises `ConfigError` for models that keep other state than keys and values (recurrent, hybrid), ignore the mask, or look at
        their neighbours in the batch.
        """
        ids = (np.arange(16, dtype=np.int64).reshape(2, 8) * 7919 + 1) % self.vocab_size  # two different rows; any ids do
        lengths = np.array([8, 5])
        zero, both = np.zeros(2, dtype=np.int64), np.arange(2)
        own, self.cache = self.cache, self._new_cache(2, 16)
        kind = type(self.net).__name__
        try:
            self.prefill(ids[:, :5], np.array([5, 3]), zero, both, both, both)
            self.prefill(ids[:1, 5:7], np.array([2]), np.array([5]), both[:1], both[:1], zero[:1])
            self.decode(ids[both, [0, 3]], np.array([7, 3]), both, both[1:])  # row 0 is only computed
            found = self.decode(ids[both, lengths - 1], lengths - 1, both, both)
            expected = torch.cat(
                [self.net(input_ids=torch.from_numpy(ids[i : i + 1, :n]), use_cache=False).logits[:, -1] for i, n in enumerate(lengths)]
            )
        except Exception as error:
            raise ConfigError(
                f"model.path must hold a causal language model whose attention uses transformers' cache interface, but a trial pass "
                f"through {kind} failed with {type(error).__name__}: {error} - use a model with plain attention (Llama, Qwen2, ...)"
            ) from error
        finally:
            self.cache = own
        difference = float((found - expected).abs().max())
        tolerance = self._probe_tolerance * (1 + float(expected.abs().max()))
        if not difference <= tolerance:
            raise ConfigError(
                f"model.path must hold a model whose logits depend only on a row's own tokens, but for {kind} a trial pass in slots "
                f"differs from an ordinary forward pass by {difference:.2g} (at most {tolerance:.2g} expected) - its layers keep other "
                f"state than keys and values, or ignore the attention mask: use a model with plain attention (Llama, Qwen2, ...)"
            )


def _read(slots: Index) -> torch.Tensor | slice:
    """Slots in order as an index of the cache: a slice where they stand side by side."""
    first, end = int(slots[0]), int(slots[-1]) + 1
    return slice(first, end) if end - first == len(slots) else torch.from_numpy(slots)
