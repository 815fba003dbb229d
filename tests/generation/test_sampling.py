"""Noise that belongs to the request, and drawing by it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice.generation import sampling
from sluice.generation.sampling import has_probabilities, noise_key, sample, uniforms

ALMOST_ONE = float(np.nextafter(1.0, 0.0))


def drawn(logits, temperature, noise):
    tokens, logprobs, is_good = sample(
        torch.tensor(logits, dtype=torch.float32), np.asarray(temperature, dtype=np.float32), np.asarray(noise, dtype=np.float64)
    )
    assert np.all(is_good)
    return tokens.tolist(), logprobs


def slow_uniform(seed: int, position: int) -> float:
    """splitmix64 in plain integers, as published."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    return (mix((mix(seed % 2**64) + (position + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53


@given(st.lists(st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 10**6)), min_size=1, max_size=8))
def test_noise_depends_on_seed_and_position_only(rows):
    keys = np.array([noise_key(seed) for seed, _ in rows], dtype=np.uint64)
    noise = uniforms(keys, np.array([position for _, position in rows]))
    assert noise.tolist() == [slow_uniform(seed, position) for seed, position in rows]
    assert np.all((noise >= 0) & (noise < 1))


def test_noise_is_uniform_over_positions_and_over_neighbouring_seeds():
    over_positions = uniforms(np.full(20_000, noise_key(7), dtype=np.uint64), np.arange(20_000))
    over_seeds = uniforms(np.array([noise_key(seed) for seed in range(20_000)], dtype=np.uint64), np.zeros(20_000, dtype=np.int64))
    for noise in (over_positions, over_seeds):
        counts = np.histogram(noise, bins=20, range=(0, 1))[0]
        assert np.all(np.abs(counts - 1000) < 6 * np.sqrt(1000))
        assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.05


@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=12),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    noise=st.floats(0, ALMOST_ONE) | st.sampled_from([0.0, ALMOST_ONE]),
)
def test_the_token_is_where_the_cumulative_probability_passes_the_noise(logits, temperature, noise):
    (token,), (logprob,) = drawn([logits], [temperature], [noise])
    scaled = np.array(logits, dtype=np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    ends = np.cumsum(probabilities)
    assert ends[token] >= noise - 1e-5
    assert ends[token] - probabilities[token] <= noise + 1e-5
    assert logprob == pytest.approx(np.log(probabilities[token]), abs=1e-3)


@pytest.mark.parametrize("noise", [0.0, 0.5, ALMOST_ONE])
def test_a_token_of_probability_zero_is_never_drawn(noise):
    never = -np.inf
    logits = [[never, 1.0, never, 1.0, never], [never, never, never, never, 3.0], [2.0, never, -1e4, -1e4, -1e4]]
    tokens, logprobs = drawn(logits, [1] * 3, [noise] * 3)
    assert tokens[0] in (1, 3)
    assert tokens[1:] == [4, 0]
    assert np.all(np.isfinite(logprobs))


def test_frequencies_follow_the_probabilities():
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    n = 20_000
    noise = uniforms(np.array([noise_key(seed) for seed in range(n)], dtype=np.uint64), np.zeros(n, dtype=np.int64))
    tokens, _ = drawn(np.tile(logits, (n, 1)), np.ones(n), noise)
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / n, [0.5, 0.3, 0.15, 0.05], atol=0.015)


def test_greedy_and_sampled_rows_share_a_batch():
    logits = [[0.0, 1.0, 0.5]] * 3
    tokens, logprobs = drawn(logits, [0.0, 1.0, 0.5], [0.0, 0.0, ALMOST_ONE])
    assert tokens == [1, 0, 2]
    at_one = torch.log_softmax(torch.tensor(logits[0]), -1)
    assert logprobs[0] == pytest.approx(float(at_one[1]))
    assert logprobs[1] == pytest.approx(float(at_one[0]))
    assert logprobs[2] == pytest.approx(float(torch.log_softmax(torch.tensor(logits[0]) / 0.5, -1)[2]))


def test_the_tail_of_a_large_vocabulary_is_reached():
    # One token holds 0.9, the rest share 0.1: in float32 each of them would vanish beside the sum so far.
    size = 400_000
    logits = np.full((1, size), np.log(0.1 / (size - 1)))
    logits[0, 0] = np.log(0.9)
    (token,), _ = drawn(logits, [1.0], [0.95])
    assert token == pytest.approx(size / 2, rel=0.01)


def test_large_batches_are_drawn_in_pieces_with_the_same_result(monkeypatch):
    logits = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    temperature = np.linspace(0, 2, 50, dtype=np.float32)
    noise = np.linspace(0, ALMOST_ONE, 50)
    whole = sample(logits, temperature, noise)
    monkeypatch.setattr(sampling, "_MAX_CHUNK_ELEMENTS", 100)
    pieces = sample(logits, temperature, noise)
    for one, other in zip(whole, pieces, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_told_and_leave_other_rows_alone(bad, temperature):
    logits = torch.tensor([[0.0, 1.0, 0.5], [0.0, bad, 0.0], [0.5, 0.5, 2.0]])
    temperatures, noise = np.full(3, temperature, dtype=np.float32), np.array([0.2, 0.5, 0.9])
    tokens, logprobs, is_good = sample(logits, temperatures, noise)
    assert is_good.tolist() == has_probabilities(logits).tolist() == [True, False, True]
    good = [0, 2]
    without = sample(logits[good], temperatures[good], noise[good])
    np.testing.assert_array_equal(tokens[good], without[0])
    np.testing.assert_array_equal(logprobs[good], without[1])
