"""Putting published weights into the engine's own model: checked as a whole first, then copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sluice.errors import GenerationError

Copies = list[tuple[torch.Tensor, torch.Tensor]]  # (tensor of the engine's model, tensor to copy into it)

_NAMES_SHOWN = 3


class Weights:
    """The tensors that a publish replaces: all weights, or only the adapter's when the model has one."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """tensors: by the names under which they are published; names of tied weights share their memory."""
        self._tensors = dict(tensors)
        self._tied: dict[int, list[str]] = {}  # by address
        for name, tensor in self._tensors.items():
            self._tied.setdefault(tensor.data_ptr(), []).append(name)

    def check(self, state: Mapping[str, Any]) -> Copies:
        """Compare a state with the model. Changes nothing.

        Keys and shapes must be the model's; of tied weights one name is enough. Values must be finite. Raises `GenerationError`.
        """
        unknown = [name for name in state if name not in self._tensors]
        missing = [names[0] for names in self._tied.values() if not any(name in state for name in names)]
        if unknown or missing:
            raise GenerationError(
                f"published weights must have the {len(self._tensors)} keys of the engine's model, got {len(state)}: "
                f"missing {_some(missing)}, unknown {_some(unknown)} - publish model.state_dict() of the same architecture, or with LoRA "
                f"peft's get_peft_model_state_dict(model)"
            )
        copies: Copies = []
        for names in self._tied.values():
            given = [(name, state[name]) for name in names if name in state]
            name, source = given[0]
            target = self._tensors[name]
            if not isinstance(source, torch.Tensor) or source.shape != target.shape:
                got = list(source.shape) if isinstance(source, torch.Tensor) else type(source).__name__
                raise GenerationError(
                    f"published weight {name} must have shape {list(target.shape)}, got {got} - engine and trainer must load the same model"
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
            copies.append((target, source.detach()))
        return copies


def _some(names: list[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
