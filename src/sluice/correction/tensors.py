"""Whether log-probs and masks fit together, told by the name of the argument that does not."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from sluice.errors import CorrectionError


def check_tensors(response_mask: Any, old_logprobs: Any, inference_logprobs: Any) -> Tensor:
    """The mask of the tokens that the log-probs are of. [B, T - 1]

    Raises:
        CorrectionError: what is given does not fit together; it names the argument.
    """
    for name, value in (("old_logprobs", old_logprobs), ("inference_logprobs", inference_logprobs), ("response_mask", response_mask)):
        if value is None:
            raise CorrectionError(
                f"{name}: expected a tensor, got None - {_ADVICE[name]}, or leave the correction off: without both log-probs of every "
                "token nothing can be compared"
            )
        check_is_tensor(name, value)
        if value.ndim != 2:
            raise CorrectionError(f"{name}: expected two dimensions, rows and tokens, got shape {_shape(value)} - add or flatten one")
    for name, value in (("old_logprobs", old_logprobs), ("inference_logprobs", inference_logprobs)):
        if value.dtype not in _FLOATING:
            raise CorrectionError(
                f"{name}: expected a floating type of at least 16 bits, got {_type(value)} - give logarithms of probabilities"
            )
    if old_logprobs.shape != inference_logprobs.shape:
        raise CorrectionError(
            f"inference_logprobs: expected the shape of old_logprobs, {_shape(old_logprobs)}, got {_shape(inference_logprobs)} - cut or "
            "pad both together: of T tokens there are T - 1 log-probs, entry t being that of token t + 1"
        )
    if old_logprobs.dtype != inference_logprobs.dtype:
        raise CorrectionError(
            f"inference_logprobs: expected the type of old_logprobs, {_type(old_logprobs)}, got {_type(inference_logprobs)} - convert one: "
            "what was rounded before cannot be told from a divergence"
        )
    for name, value in (("inference_logprobs", inference_logprobs), ("response_mask", response_mask)):
        if value.device != old_logprobs.device:
            raise CorrectionError(f"{name}: expected it on {old_logprobs.device}, as old_logprobs, got {value.device} - move it there")
    if response_mask.is_complex():
        raise CorrectionError(f"response_mask: expected a mask of true and false, got {_type(response_mask)} - compare it with something")
    if response_mask.is_floating_point() and answers_at_once(response_mask) and response_mask.sum().isnan():
        raise CorrectionError("response_mask: expected numbers, 0 outside, got nan among them - find out whether those tokens were sampled")
    return fit_mask("response_mask", response_mask, old_logprobs.shape)


def check_is_tensor(name: str, value: Any) -> None:
    """Raises `CorrectionError` for what is no dense tensor."""
    if not isinstance(value, Tensor):
        raise CorrectionError(f"{name}: expected a torch tensor, got {type(value).__name__} - torch.as_tensor makes one")
    if value.layout != torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        raise CorrectionError(f"{name}: expected a dense tensor, got the layout {layout} - value.to_dense() makes one")


def check_divisor(name: str, value: Any) -> None:
    """Raises `CorrectionError` for what means cannot be divided by; one on a device is not looked at."""
    if value is None or (isinstance(value, Tensor) and not answers_at_once(value)):
        return
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise CorrectionError(f"{name}: expected a finite number that is not negative, or None, got {value!r} - give what means divide by")


def answers_at_once(tensor: Tensor) -> bool:
    """Whether its numbers can be read without waiting for a device."""
    return tensor.device.type == "cpu"


def fit_mask(name: str, mask: Tensor, shape: torch.Size) -> Tensor:
    """The part of a mask that belongs to log-probs of this shape, as a view. [B, T - 1]

    Raises:
        CorrectionError: it fits neither as it is nor without its first column.
    """
    check_is_tensor(name, mask)
    rows, width = shape
    if mask.shape == shape:
        return mask
    if mask.shape == (rows, width + 1):
        return mask[:, 1:]
    raise CorrectionError(
        f"{name}: expected shape ({rows}, {width}), that of the log-probs, or ({rows}, {width + 1}), of the tokens, got {_shape(mask)} - "
        "give the mask of the same rows and tokens"
    )


_FLOATING: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

_ADVICE: Final = {
    "old_logprobs": "compute the trainer's log-probs at the start of the step",
    "inference_logprobs": "let the engine report the log-prob of every token that it samples",
    "response_mask": "give True where the policy sampled",
}


def _shape(value: Tensor) -> str:
    return str(tuple(value.shape))


def _type(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
