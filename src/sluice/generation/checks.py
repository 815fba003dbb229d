"""What a request must be like, so that a model can serve it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sluice.errors import RequestRefused
from sluice.generation.base import PURPOSES, GenerationRequest

_MIN_TEMPERATURE = 1e-4  # below it, logits divided by it leave float32, and nothing but the most probable token is drawn anyway


def check_request(request: GenerationRequest, *, vocab_size: int) -> None:
    """Raise `RequestRefused` for a request that makes no sense by itself."""
    prompt: Any = request.prompt_ids
    name = f"request {request.request_id}"
    if not isinstance(prompt, np.ndarray) or prompt.ndim != 1 or len(prompt) == 0 or prompt.dtype.kind not in "iu":
        got = f"{prompt.dtype} {list(prompt.shape)}" if isinstance(prompt, np.ndarray) else type(prompt).__name__
        raise RequestRefused(f"{name}: prompt_ids must be a numpy array of at least one token id, [P] int64, got {got}")
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= vocab_size:
        raise RequestRefused(
            f"{name}: prompt_ids must lie within 0 .. {vocab_size - 1}, got {low if low < 0 else high} - tokenizer and model do not belong "
            f"together"
        )
    if not (request.temperature == 0 or _MIN_TEMPERATURE <= request.temperature < math.inf):
        raise RequestRefused(
            f"{name}: temperature must be 0 (most probable token) or at least {_MIN_TEMPERATURE}, got {request.temperature}"
        )
    if request.purpose not in PURPOSES:
        raise RequestRefused(f"{name}: purpose must be one of {', '.join(PURPOSES)}, got {request.purpose!r}")


def check_length(request: GenerationRequest, *, held: int, max_length: int) -> None:
    """Raise `RequestRefused` for a request that does not fit after what its dialogue holds."""
    prompt, new = len(request.prompt_ids), request.max_new_tokens
    if new < 1 or held + prompt + new > max_length:
        of_dialogue = f" after the {held} tokens that dialogue {request.dialogue_id} holds" if held else ""
        raise RequestRefused(
            f"request {request.request_id}: prompt and max_new_tokens (at least 1) must fit into max_length {max_length}, got {prompt} + "
            f"{new}{of_dialogue} - load the engine with a larger max_length, or ask for less"
        )
