"""In which numbers the engine computes: float32, bfloat16, or float32 with weights and inputs of its linear layers rounded to int8.

int8 is dynamic quantisation: each output channel of a weight, and each token's input, is rounded to 255 steps of a scale of its own. The
products are taken in float32 of the rounded numbers, which shows what int8 does to probabilities, not how fast it is: torch's own quantised
layers are to be removed from torch, and scale inputs over the whole batch, so that a token would depend on its neighbours. As usual
the output layer is left alone; so are adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

import torch

from sluice.errors import ConfigError

Precision = Literal["float32", "bfloat16", "int8"]

DTYPES: Final[dict[str, torch.dtype]] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.float32}
"""Name -> the type in which weights are held."""

_STEPS: Final = 127  # of int8 on either side of 0


def rounded(values: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of int8 with one scale for each row, the largest number being its last step. [..., N]"""
    scale = values.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny) / _STEPS
    return (values / scale).round_().mul_(scale)


def round_to_int8(net: Any) -> set[str]:
    """Let the linear layers of a model compute with rounded weights and inputs from now on. Returns the names of those weights.

    Whoever writes into them must round again. Raises `ConfigError` for a model without such layers.
    """
    names = set()
    for name, layer in _linear_layers(net):
        layer.weight.data.copy_(rounded(layer.weight.data))
        layer.register_forward_pre_hook(_round_input)
        names.add(f"{name}.weight")
    if not names:
        raise ConfigError(
            f"engine.precision int8 rounds linear layers (torch.nn.Linear), but {type(net).__name__} has none beside its output layer - "
            "choose float32 or bfloat16"
        )
    return names


def _linear_layers(net: Any) -> Iterator[tuple[str, torch.nn.Linear]]:
    head = net.get_output_embeddings()
    for name, layer in net.named_modules():
        if isinstance(layer, torch.nn.Linear) and layer is not head and "lora_" not in name:
            yield name, layer


def _round_input(layer: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (rounded(given[0]), *given[1:])
