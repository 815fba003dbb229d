"""Putting published weights into the engine's own model: checked as a whole first, then copied.

An edition is one set of these weights in memory. There is one, unless sequences that older weights began are still to be ended by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch

from sluice.errors import GenerationError
from sluice.generation.precision import rounded

Tensors = list[torch.Tensor]  # what a publish replaces, tied weights once

_NAMES_SHOWN = 3


class Weights:
    """The tensors that a publish replaces: all weights, or only the adapter's when the model has one.

    The model computes with one edition at a time. A change of edition moves no numbers: the model's parameters point elsewhere. `check` may
    be called from any thread, everything else is for the one that runs the model.
    """

    def __init__(self, net: torch.nn.Module, tensors: Mapping[str, torch.Tensor], rounded_names: Set[str] = frozenset()) -> None:
        """tensors: of `net`, by the names under which they are published; names of tied weights share their memory.

        rounded_names: those that are held as numbers of int8.
        """
        self._names: dict[int, list[str]] = {}  # by address
        for name, tensor in tensors.items():
            self._names.setdefault(tensor.data_ptr(), []).append(name)
        self._is_rounded = [not rounded_names.isdisjoint(names) for names in self._names.values()]
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        holders: dict[int, Tensors] = {}  # by address
        for holder in (*net.parameters(), *net.buffers()):
            holders.setdefault(holder.data_ptr(), []).append(holder)
        self._holders = [holders[address] for address in self._names]  # what in the model points to each tensor
        self._editions = {0: [tensors[names[0]] for names in self._names.values()]}
        self._in_use = 0
        self.newest = 0  # edition; numbers only rise
        self.versions = {0: 0}  # policy_version of every edition in memory

    def put(self, sources: Tensors, version: int, *, beside: bool) -> None:
        """Copy checked weights over the newest edition or, to keep that too, into one of their own beside it, then the newest."""
        if beside:
            with torch.inference_mode(False):  # a parameter cannot point to a tensor made in inference mode
                own = [torch.empty_like(tensor) for tensor in self._editions[self.newest]]
            self.newest += 1
            self._editions[self.newest] = own
        for target, source, is_rounded in zip(self._editions[self.newest], sources, self._is_rounded, strict=True):
            target.copy_(rounded(source) if is_rounded else source)
        self.versions[self.newest] = version

    def use(self, edition: int) -> None:
        """Let the model compute with this edition from now on."""
        if edition != self._in_use:
            for holders, tensor in zip(self._holders, self._editions[edition], strict=True):
                for holder in holders:
                    holder.data = tensor
            self._in_use = edition

    def keep(self, editions: Set[int]) -> None:
        """Free all editions but these and the newest."""
        for edition in self.versions.keys() - editions - {self.newest}:
            if edition == self._in_use:
                self.use(self.newest)
            del self.versions[edition], self._editions[edition]

    def check(self, state: Mapping[str, Any]) -> Tensors:
        """The tensors of a state in the order of `put`, when all of it fits the model. Changes nothing.

        Keys and shapes must be the model's; of tied weights one name is enough. Values must be finite. Raises `GenerationError`.
        """
        unknown = [name for name in state if name not in self._shapes]
        missing = [names[0] for names in self._names.values() if not any(name in state for name in names)]
        if unknown or missing:
            raise GenerationError(
                f"published weights must have the {len(self._shapes)} keys of the engine's model, got {len(state)}: "
                f"missing {_some(missing)}, unknown {_some(unknown)} - publish model.state_dict() of the same architecture, or with LoRA "
                f"peft's get_peft_model_state_dict(model)"
            )
        sources: Tensors = []
        for names in self._names.values():
            given = [(name, state[name]) for name in names if name in state]
            name, source = given[0]
            shape = self._shapes[name]
            if not isinstance(source, torch.Tensor) or source.shape != shape:
                got = list(source.shape) if isinstance(source, torch.Tensor) else type(source).__name__
                raise GenerationError(
                    f"published weight {name} must have shape {list(shape)}, got {got} - engine and trainer must load the same model"
                )
            for other, tensor in given[1:]:
                if tensor.data_ptr() != source.data_ptr() and not torch.equal(tensor, source):
                    raise GenerationError(
                        f"published weights {name} and {other} must be equal, because the engine's model ties them, but they differ - "
                        f"set tie_word_embeddings the same way for engine and trainer"
                    )
            if source.is_floating_point() and not bool(torch.isfinite(source).all()):
                raise GenerationError(
                    f"published weights must be finite, but {name} holds NaN or infinity - training has diverged: lower the learning rate "
                    f"or max_grad_norm; the engine keeps its old weights"
                )
            sources.append(source.detach())
        return sources


def _some(names: list[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
