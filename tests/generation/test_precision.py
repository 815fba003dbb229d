"""An engine in other numbers than the trainer's: its log-probs are those of its own numbers, and differ from the trainer's."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice.config.models import LoraConfig
from sluice.errors import ConfigError
from sluice.generation.precision import rounded
from sluice.generation.slot import SlotEngine
from tests.generation import tiny


def naive_int8(values: np.ndarray) -> np.ndarray:
    """Row by row: 255 steps between minus and plus the largest number."""
    out = np.zeros_like(values)
    for row, numbers in enumerate(values):
        largest = np.abs(numbers).max()
        if largest > 0:
            out[row] = np.round(numbers / (largest / 127)) * (largest / 127)
    return out


def int8_twin(model):
    """The model with the weights and inputs of its inner linear layers rounded, each by the slow function."""
    twin = copy.deepcopy(model)
    for layer in twin.modules():
        if isinstance(layer, torch.nn.Linear) and layer is not twin.get_output_embeddings():
            layer.weight.data = torch.from_numpy(naive_int8(layer.weight.data.numpy()))

            def spoil(module, given):
                flat = given[0].reshape(-1, given[0].shape[-1])
                return (torch.from_numpy(naive_int8(flat.numpy())).reshape(given[0].shape),)

            layer.register_forward_pre_hook(spoil)
    return twin


def bfloat16_twin(model):
    return copy.deepcopy(model).to(torch.bfloat16)


TWINS = {"int8": (int8_twin, 2e-3), "bfloat16": (bfloat16_twin, 0.05)}  # a step of their rounding decides in some places

WANTED = [tiny.request(i, range(2, 5 + i), new=10) for i in range(4)]


@given(st.lists(st.lists(st.floats(-50, 50, width=32), min_size=3, max_size=3), min_size=1, max_size=4))
def test_rounding_to_int8_takes_the_nearest_of_255_steps_of_each_row(rows):
    values = torch.tensor(rows)
    found = rounded(values)
    largest = values.abs().amax(1, keepdim=True)
    assert ((found - values).abs() <= largest / 254 * (1 + 1e-5)).all()
    np.testing.assert_allclose(found.numpy(), naive_int8(values.numpy()), atol=1e-4 * (1 + float(largest.max())), rtol=0.01)
    torch.testing.assert_close(rounded(found), found, rtol=1e-5, atol=1e-30)
    assert (found[largest[:, 0] == 0] == 0).all()


@pytest.mark.parametrize("precision", TWINS)
def test_log_probs_are_those_of_the_numbers_that_it_computes_with_before_and_after_a_publish(qwen2, qwen2_path, precision):
    make, tolerance = TWINS[precision]
    later = tiny.perturbed(tiny.qwen2())
    with SlotEngine.load(qwen2_path, max_slots=4, max_length=64, threads=1, precision=precision) as engine:
        for model, version in ((qwen2, 0), (later, 1)):
            if version:
                engine.publish(model.state_dict(), version)
            gaps = []
            for one, generation in zip(WANTED, tiny.generate(engine, WANTED), strict=True):
                own = tiny.full_logprobs(make(model), one, generation.token_ids)
                np.testing.assert_allclose(generation.inference_logprobs, own, atol=tolerance)
                gaps.append(np.abs(generation.inference_logprobs - tiny.full_logprobs(model, one, generation.token_ids)).max())
                assert generation.policy_version == version
            assert max(gaps) > 1e-3, "a mismatch that can be seen"


def test_with_int8_a_response_does_not_depend_on_its_company(qwen2_path):
    with SlotEngine.load(qwen2_path, max_slots=4, max_length=64, threads=1, precision="int8") as engine:
        together = tiny.generate(engine, WANTED)
        for one, generation in zip(WANTED, together, strict=True):
            (alone,) = tiny.generate(engine, [one])
            np.testing.assert_allclose(alone.inference_logprobs[:4], generation.inference_logprobs[:4], atol=2e-3)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("precision", TWINS)
def test_adapters_are_published_into_a_rounded_model_as_they_are(qwen2_path, precision):
    lora = LoraConfig(r=2, alpha=4.0, target_modules=["q_proj", "v_proj"])
    from peft import get_peft_model_state_dict

    trained = tiny.adapted(lora)
    with SlotEngine.load(qwen2_path, max_slots=4, max_length=64, threads=1, precision=precision, lora=lora) as engine:
        (before,) = tiny.generate(engine, WANTED[:1])
        state = get_peft_model_state_dict(trained, save_embedding_layers=False)
        engine.publish(state, 1)
        (after,) = tiny.generate(engine, WANTED[:1])
        held = [tensor for tensors in engine._weights._editions.values() for tensor in tensors]
        for name, tensor in zip(state, held, strict=True):
            torch.testing.assert_close(tensor.float(), state[name], atol=1e-6, rtol=0.01 if precision == "bfloat16" else 0)
    full = tiny.full_logprobs(trained, WANTED[0], after.token_ids)
    np.testing.assert_allclose(after.inference_logprobs, full, atol=0.3)
    assert before.policy_version == 0


def test_responses_under_way_end_with_the_rounded_weights_that_began_them(qwen2, qwen2_path):
    later = tiny.perturbed(tiny.qwen2())
    with SlotEngine.load(qwen2_path, max_slots=4, max_length=64, threads=1, precision="int8", on_weight_update="finish") as engine:
        passes = tiny.Passes(engine, {3: lambda: passes.publish(later.state_dict(), 1)})
        generations = tiny.generate(engine, WANTED)
        twin = int8_twin(qwen2)
        for one, generation in zip(WANTED, generations, strict=True):
            assert generation.policy_version == 0
            np.testing.assert_allclose(generation.inference_logprobs, tiny.full_logprobs(twin, one, generation.token_ids), atol=2e-3)
        (new,) = tiny.generate(engine, WANTED[:1])
    np.testing.assert_allclose(new.inference_logprobs, tiny.full_logprobs(int8_twin(later), WANTED[0], new.token_ids), atol=2e-3)


def test_a_model_without_linear_layers_and_a_precision_that_is_none_are_refused(tmp_path, qwen2_path):
    path = tiny.saved(tiny.gpt2(), tmp_path)
    with pytest.raises(ConfigError, match="engine.precision int8 rounds linear layers .* GPT2LMHeadModel has none"):
        SlotEngine.load(path, max_slots=2, max_length=16, precision="int8")
    with pytest.raises(ConfigError, match="precision must be one of float32, bfloat16, int8, got 'int4'"):
        SlotEngine.load(qwen2_path, max_slots=2, max_length=16, precision="int4")  # type: ignore[arg-type]
