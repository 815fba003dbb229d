"""What the slot engine samples is what an ordinary forward pass says, whoever shares the batch."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.generation.slot import SlotEngine
from tests.generation import tiny

PROMPTS = [[5], [7, 8], [9, 10, 11], [3, 4, 5, 6, 7, 8, 9, 10], list(range(2, 40)), [5, 5, 5, 5, 5], [63, 2]]

requests = st.lists(
    st.tuples(
        st.sampled_from(PROMPTS),
        st.integers(1, 20),
        st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.5]),
        st.integers(0, 2**63),
        st.sampled_from(["train", "validation"]),
        st.integers(0, 3),  # turns of the loop to wait before the next is submitted
    ),
    min_size=1,
    max_size=14,
)


@pytest.fixture(scope="module")
def small_engine(qwen2_path):
    """Three slots and tiny prefill passes: queues, pieces of prompts, rows that move."""
    with SlotEngine.load(qwen2_path, max_slots=3, max_length=64, threads=1, prefill_tokens=7) as engine:
        yield engine


@pytest.fixture(scope="module")
def roomy_engine(qwen2_path):
    with SlotEngine.load(qwen2_path, max_slots=32, max_length=64, threads=1) as engine:
        yield engine


async def submitted_in_turns(engine, asked, pauses):
    handles = []
    for one, pause in zip(asked, pauses, strict=True):
        handles.append(engine.submit(one))
        for _ in range(pause):
            await asyncio.sleep(0)
        if pause == 3:
            await handles[-1].future
    return await asyncio.gather(*[handle.future for handle in handles])


@pytest.mark.parametrize("size", ["small", "roomy"])
@settings(max_examples=25)
@given(wanted=requests)
def test_logprobs_are_those_of_a_full_forward_pass_and_every_token_is_counted(qwen2, small_engine, roomy_engine, size, wanted):
    engine = small_engine if size == "small" else roomy_engine
    asked = [
        tiny.request(i, prompt, new=new, temperature=temperature, seed=seed, purpose=purpose)
        for i, (prompt, new, temperature, seed, purpose, _) in enumerate(wanted)
    ]
    before = {purpose: engine.sampled_tokens(purpose) for purpose in ("train", "validation")}
    generations = asyncio.run(submitted_in_turns(engine, asked, [w[-1] for w in wanted]))
    for one, generation in zip(asked, generations, strict=True):
        assert generation.request_id == one.request_id
        expected = tiny.full_logprobs(qwen2, one, generation.token_ids)
        tolerance = 1e-5 / (min(one.temperature, 1.0) or 1.0)  # dividing by the temperature also enlarges the logits' rounding
        np.testing.assert_allclose(generation.inference_logprobs, expected, atol=tolerance, rtol=0)
        assert tiny.END not in generation.token_ids[:-1]
        if generation.finish_reason == "stop":
            assert generation.token_ids[-1] == tiny.END
        else:
            assert generation.finish_reason == "length"
            assert len(generation.token_ids) == one.max_new_tokens
    for purpose, count in before.items():
        sampled = sum(len(g.token_ids) for g, one in zip(generations, asked, strict=True) if one.purpose == purpose)
        assert engine.sampled_tokens(purpose) - count == sampled


def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_crowd(small_engine, roomy_engine):
    wanted = [tiny.request(i, PROMPTS[i % len(PROMPTS)], new=16, seed=1000 + i) for i in range(28)]
    alone = [tiny.generate(small_engine, [one])[0] for one in wanted]
    for engine in (small_engine, roomy_engine):
        for one, other in zip(alone, tiny.generate(engine, wanted), strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_allclose(one.inference_logprobs, other.inference_logprobs, atol=1e-5)


def test_siblings_with_different_seeds_differ_and_with_equal_seeds_agree(roomy_engine):
    generations = tiny.generate(roomy_engine, [tiny.request(i, [5, 6], new=20, seed=i // 2) for i in range(8)])
    texts = [tuple(g.token_ids) for g in generations]
    assert texts[0::2] == texts[1::2]
    assert len(set(texts)) == 4


def test_siblings_submitted_together_share_their_prefill(qwen2_path):
    with SlotEngine.load(qwen2_path, max_slots=8, max_length=64, threads=1) as engine:
        tiny.generate(engine, [tiny.request(i, range(2, 22)) for i in range(8)])
        assert engine.metrics()["engine/prefill_tokens"] == 20
        assert engine.metrics()["engine/prefill_tokens_shared"] == 7 * 20


def test_greedy_takes_the_most_probable_token_and_reports_temperature_one(qwen2, roomy_engine):
    one = tiny.request(0, [9, 10, 11], new=12, temperature=0.0)
    generation = tiny.generate(roomy_engine, [one])[0]
    sequence = torch.tensor([[9, 10, 11, *generation.token_ids]])
    logits = qwen2(input_ids=sequence, use_cache=False).logits[0, 2:-1]
    np.testing.assert_array_equal(generation.token_ids, logits.argmax(-1).numpy())
    np.testing.assert_allclose(generation.inference_logprobs, torch.log_softmax(logits, -1).max(-1).values.detach().numpy(), atol=1e-5)


def test_torchs_random_state_is_neither_used_nor_changed(qwen2_path):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with SlotEngine.load(qwen2_path, max_slots=2, max_length=32, threads=1) as engine:
        first = tiny.generate(engine, [tiny.request(0, [5])])[0]
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(4)
    with SlotEngine.load(qwen2_path, max_slots=2, max_length=32, threads=1) as engine:
        np.testing.assert_array_equal(tiny.generate(engine, [tiny.request(0, [5])])[0].token_ids, first.token_ids)


@pytest.mark.parametrize(
    "make",
    [
        tiny.llama,
        tiny.gpt2,
        lambda: tiny.qwen2(tie_word_embeddings=False, num_key_value_heads=1),
        lambda: tiny.qwen2(attn_implementation="eager"),
    ],
    ids=["llama", "gpt2 with learned positions", "qwen2 with one key head", "qwen2 with eager attention"],
)
def test_other_architectures_are_exact_too(make, tmp_path):
    model = make()
    path = tiny.saved(model, tmp_path)
    # The longest request reaches the model's last position, and its prompt is prefilled in pieces beside shorter ones.
    wanted = [tiny.request(0, np.arange(100) % 60 + 2, new=28), *[tiny.request(i, range(2, 4 + i), new=12) for i in range(1, 7)]]
    with SlotEngine.load(path, max_slots=4, max_length=tiny.POSITIONS, threads=1, prefill_tokens=40) as engine:
        for one, generation in zip(wanted, tiny.generate(engine, wanted), strict=True):
            np.testing.assert_allclose(generation.inference_logprobs, tiny.full_logprobs(model, one, generation.token_ids), atol=1e-5)


def test_half_precision_keeps_its_logprobs_in_float32(qwen2_path):
    with SlotEngine.load(qwen2_path, max_slots=2, max_length=32, threads=1, precision="bfloat16") as engine:
        generation = tiny.generate(engine, [tiny.request(0, [5, 6, 7])])[0]
    assert generation.inference_logprobs.dtype == np.float32
    assert np.all(generation.inference_logprobs <= 0)
