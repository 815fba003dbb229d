"""Weights reach the engine by publish only, whole, between two passes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from sluice.config.models import LoraConfig
from sluice.errors import ConfigError, GenerationError
from sluice.generation.slot import SlotEngine
from tests.generation import tiny
from tests.generation.tiny import Turnstile, adapted, perturbed

ASKED = tiny.request(0, [5, 6, 7], new=8, seed=11)


def assert_sampled_by(model, generation, asked=ASKED) -> None:
    np.testing.assert_allclose(generation.inference_logprobs, tiny.full_logprobs(model, asked, generation.token_ids), atol=1e-5)


def test_the_engines_logits_do_not_move_until_publish(engine):
    trainers = tiny.qwen2()  # what the trainer holds: the same weights, another instance
    before = tiny.generate(engine, [ASKED])[0]
    assert (engine.policy_version, before.policy_version) == (0, 0)
    perturbed(trainers)
    again = tiny.generate(engine, [ASKED])[0]
    np.testing.assert_array_equal(again.inference_logprobs, before.inference_logprobs)
    engine.publish(trainers.state_dict(), 7)
    after = tiny.generate(engine, [ASKED])[0]
    assert (engine.policy_version, after.policy_version) == (7, 7)
    assert_sampled_by(trainers, after)
    perturbed(trainers)  # and the published tensors are copies
    np.testing.assert_array_equal(tiny.generate(engine, [ASKED])[0].inference_logprobs, after.inference_logprobs)


def published_in_the_middle(engine, model):
    """Three tokens under the old weights, the rest under the new ones."""

    async def play():
        turnstile = Turnstile(engine)
        handle = engine.submit(ASKED)
        waiting = [engine.submit(tiny.request(i, [5], new=3)) for i in range(1, 9)]
        await turnstile.arrival()
        await turnstile.let_through()
        publishing = asyncio.create_task(asyncio.to_thread(engine.publish, model.state_dict(), 1))
        while not engine._publishes:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.001)
        turnstile.open()
        await publishing
        return await asyncio.gather(handle.future, *[h.future for h in waiting])

    return asyncio.run(play())


@pytest.mark.parametrize("way", ["continue", "restart"])
def test_live_sequences_are_computed_again_under_new_weights(qwen2, qwen2_path, way):
    new = perturbed(tiny.qwen2())
    with SlotEngine.load(qwen2_path, max_slots=4, max_length=64, threads=1, on_weight_update=way) as engine:
        engine._stops[:] = False
        generation, *others = published_in_the_middle(engine, new)
    assert generation.policy_version == 0
    assert generation.token_versions.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert [g.policy_version for g in others] == [0, 0, 0, 1, 1, 1, 1, 1]  # those that waited began under the new weights
    expected = tiny.full_logprobs(new, ASKED, generation.token_ids)
    expected[:3] = tiny.full_logprobs(qwen2, ASKED, generation.token_ids)[:3]
    np.testing.assert_allclose(generation.inference_logprobs, expected, atol=1e-5)


@torch.no_grad()
def test_live_sequences_keep_their_cache_when_told_so(qwen2, qwen2_path):
    new = perturbed(tiny.qwen2())
    with SlotEngine.load(qwen2_path, max_slots=4, max_length=64, threads=1, on_weight_update="continue", on_publish="keep") as engine:
        engine._stops[:] = False
        generation, *_ = published_in_the_middle(engine, new)
    expected = tiny.full_logprobs(qwen2, ASKED, generation.token_ids)
    sequence = torch.tensor([[*ASKED.prompt_ids, *generation.token_ids]])
    cache = DynamicCache(config=qwen2.config)
    qwen2(input_ids=sequence[:, :5], cache=cache, use_cache=True)  # the prompt and two tokens were stored under the old weights
    logits = new(input_ids=sequence[:, 5:-1], cache=cache, use_cache=True).logits[0]
    expected[3:] = torch.log_softmax(logits, -1).gather(1, sequence[0, 6:, None])[:, 0]
    np.testing.assert_allclose(generation.inference_logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("way", ["finish", "continue"])
def test_publishing_from_another_thread_never_mixes_weights_within_a_pass(qwen2_path, way):
    """Many publishes under load: every token is explained by the version it is said to be of."""
    with SlotEngine.load(qwen2_path, max_slots=4, max_length=64, threads=1, on_weight_update=way) as engine:
        publish_under_load(engine)


def publish_under_load(engine):
    engine._stops[:] = False
    models = [tiny.qwen2(), *[perturbed(tiny.qwen2(), 0.03 * k) for k in range(1, 4)]]

    async def play():
        asked = [tiny.request(i, [5 + i % 9], new=12) for i in range(40)]
        handles = [engine.submit(one) for one in asked]
        for version, model in enumerate(models[1:], start=1):
            await handles[8 * version].future
            await asyncio.to_thread(engine.publish, model.state_dict(), version)
        return asked, await asyncio.gather(*[handle.future for handle in handles])

    asked, generations = asyncio.run(play())
    assert {g.policy_version for g in generations} == {0, 1, 2, 3}
    for one, generation in zip(asked, generations, strict=True):
        tiny.assert_explained(models, one, generation)


# ---------------------------------------------------------------- what is refused


def refused(engine, state, message):
    before = tiny.generate(engine, [ASKED])[0]
    with pytest.raises(GenerationError, match=message):
        engine.publish(state, 5)
    assert engine.policy_version == 0
    np.testing.assert_array_equal(tiny.generate(engine, [ASKED])[0].inference_logprobs, before.inference_logprobs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_and_the_old_ones_stay(engine, bad):
    state = {name: tensor.clone() + 1 for name, tensor in tiny.qwen2().state_dict().items()}
    state["model.norm.weight"][3] = bad
    refused(engine, state, r"model\.norm\.weight holds NaN or infinity")


def test_missing_unknown_and_misshapen_weights_are_refused_and_named(engine):
    state = dict(tiny.qwen2().state_dict())
    refused(engine, {name: tensor for name, tensor in state.items() if "norm" not in name}, "missing model.layers.0.input_layernorm.weight")
    refused(engine, state | {"value_head.weight": torch.zeros(1)}, "unknown value_head.weight")
    refused(engine, state | {"model.norm.weight": torch.zeros(5)}, r"model\.norm\.weight must have shape \[32\], got \[5\]")
    refused(engine, state | {"model.norm.weight": [1.0]}, "got list")
    refused(engine, {f"module.{name}": tensor for name, tensor in state.items()}, "missing model.embed_tokens.weight")


def test_tied_weights_need_one_name_and_must_not_differ(engine):
    model = perturbed(tiny.qwen2())
    state = dict(model.state_dict())
    assert "lm_head.weight" in state
    without = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    engine.publish(without, 1)
    assert_sampled_by(model, tiny.generate(engine, [ASKED])[0])
    engine.publish(without | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}, 2)
    with pytest.raises(GenerationError, match="because the engine's model ties them, but they differ"):
        engine.publish(without | {"lm_head.weight": state["model.embed_tokens.weight"] + 1}, 3)
    assert engine.policy_version == 2


# ---------------------------------------------------------------- LoRA


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft's
def test_with_lora_only_the_adapter_is_published(qwen2, qwen2_path):
    from peft import get_peft_model_state_dict

    lora = LoraConfig(r=4, alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    trainers = adapted(lora)
    state = get_peft_model_state_dict(trainers)
    assert all("lora_" in name for name in state)
    with SlotEngine.load(qwen2_path, max_slots=4, max_length=64, threads=1, lora=lora) as engine:
        assert_sampled_by(qwen2, tiny.generate(engine, [ASKED])[0])
        engine.publish(state, 1)
        generation = tiny.generate(engine, [ASKED])[0]
        assert_sampled_by(trainers, generation)
        assert np.abs(generation.inference_logprobs - tiny.full_logprobs(qwen2, ASKED, generation.token_ids)).max() > 1e-3
        with pytest.raises(GenerationError, match="get_peft_model_state_dict"):
            engine.publish(qwen2.state_dict(), 2)


def test_lora_on_layers_that_do_not_exist_is_refused(qwen2_path):
    with pytest.raises(ConfigError, match=r"model\.lora\.target_modules must name layers of Qwen2ForCausalLM, got \['c_attn'\]"):
        SlotEngine.load(qwen2_path, max_slots=1, max_length=8, lora=LoraConfig(target_modules=["c_attn"]))


def test_a_publish_that_breaks_halfway_is_an_error_for_whoever_waits(engine):
    class Breaks:
        """A tensor that cannot be copied."""

    sources = engine._weights.check(tiny.qwen2().state_dict())
    engine._weights.check = lambda state: [*sources[:-1], Breaks()]
    for _ in range(2):
        with pytest.raises(GenerationError, match="the engine stopped after TypeError"):
            engine.publish({}, 1)
    with pytest.raises(GenerationError, match="the engine stopped after TypeError"):
        tiny.generate(engine, [ASKED])
