"""How a token is drawn: noise that belongs to the request, inverse-CDF sampling, full-vocabulary log-probs.

Every request carries its own noise: one uniform number per (seed, position), made by splitmix64. No generator state exists, so that the
same seed, prompt and weights give the same tokens whatever else is in the batch (up to ties: batches of different sizes round the logits
differently in the last bit).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sluice.types import Logprobs, TokenIds

_MASK = 0xFFFFFFFFFFFFFFFF
_INCREMENT = 0x9E3779B97F4A7C15  # splitmix64: the odd number nearest to 2**64 / golden ratio
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MAX_CHUNK_ELEMENTS = 1 << 22  # float64 numbers of one cumulative sum: 32 MB, however large batch and vocabulary are

NoiseKeys = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]


def noise_key(seed: int) -> int:
    """The starting state of a request's noise, mixed so that neighbouring seeds have nothing in common."""
    state = seed & _MASK
    state = (state ^ (state >> 30)) * _MIX_1 & _MASK
    state = (state ^ (state >> 27)) * _MIX_2 & _MASK
    return state ^ (state >> 31)


def uniforms(keys: NoiseKeys, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, with 53 random bits. keys [B], positions [B] (tokens sampled before this one) -> [B]."""
    state: NoiseKeys = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_INCREMENT)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX_1)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_MIX_2)
    state ^= state >> np.uint64(31)
    state >>= np.uint64(11)
    return state.astype(np.float64) * 2.0**-53


def sample(logits: torch.Tensor, temperature: npt.NDArray[np.float32], noise: npt.NDArray[np.float64]) -> tuple[TokenIds, Logprobs, Bools]:
    """Draw one token per row, report its log-prob, and whether the row's logits give probabilities at all.

    logits [B, V]; temperature [B], 0 takes the most probable token; noise [B] in [0, 1). Returns token ids [B] and log-probs [B]: of the
    sampled token, under the full vocabulary at the sampling temperature (at temperature 1 when greedy), in float32; and [B] False
    where logits are NaN or infinite: token and log-prob of such a row mean nothing. A token whose probability is zero is never drawn.
    """
    rows, vocabulary = logits.shape
    chunk = max(1, _MAX_CHUNK_ELEMENTS // vocabulary)
    if rows <= chunk:
        return _sample(logits, temperature, noise)
    parts = [_sample(logits[i : i + chunk], temperature[i : i + chunk], noise[i : i + chunk]) for i in range(0, rows, chunk)]
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]), np.concatenate([p[2] for p in parts])


def has_probabilities(logits: torch.Tensor) -> Bools:
    """Whether each row's logits give probabilities: False with NaN or infinity among them. logits [B, V] -> [B]"""
    probable: Bools = torch.isfinite(logits.float().logsumexp(dim=-1)).numpy()
    return probable


def _sample(logits: torch.Tensor, temperature: npt.NDArray[np.float32], noise: npt.NDArray[np.float64]) -> tuple[TokenIds, Logprobs, Bools]:
    greedy = temperature == 0
    scale = torch.from_numpy(np.where(greedy, np.float32(1), temperature))
    logits = logits.float()
    logprobs = torch.log_softmax(logits / scale[:, None], dim=-1)
    # The sum runs in float64: in float32 the tail of a large vocabulary would vanish beside the sum so far.
    cumulative = torch.cumsum(logprobs.exp(), dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    is_finite = torch.isfinite(total)
    # The first token whose cumulative sum exceeds a target below the total has a probability above zero, also for noise close to 1.
    target = torch.minimum(torch.from_numpy(noise) * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target[:, None], right=True)
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy)[:, None], logits.argmax(dim=-1, keepdim=True), tokens)
    if not bool(is_finite.all()):
        tokens = tokens.clamp(max=logits.shape[1] - 1)  # beyond the vocabulary where no sum exceeds the target
    chosen = logprobs.gather(1, tokens)
    return tokens[:, 0].numpy(), chosen[:, 0].numpy(), is_finite.numpy()
