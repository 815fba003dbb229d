"""What is refused when an engine is loaded, and which tokens end a response."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM, MistralConfig, MistralForCausalLM

from sluice.errors import ConfigError
from sluice.generation.slot import SlotEngine
from tests.generation import tiny

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128}


def load(path, *, max_slots=2, max_length=32, **settings):
    with SlotEngine.load(path, max_slots=max_slots, max_length=max_length, threads=1, **settings) as engine:
        return np.flatnonzero(engine._stops).tolist()


@pytest.fixture
def refused():
    """No thread is left behind by a refusal."""
    yield lambda error, message: pytest.raises(error, match=message)
    assert not [thread for thread in threading.enumerate() if thread.name == "sluice-slot-engine"]


def test_a_path_that_is_no_model_folder_is_refused(refused, tmp_path):
    with refused(ConfigError, "nowhere does not exist - correct the path"):
        load(tmp_path / "nowhere")
    with refused(ConfigError, "has no config.json"):
        load(tmp_path)
    (tmp_path / "file").write_text("")
    with refused(ConfigError, "is a file"):
        load(tmp_path / "file")


def test_weights_that_cannot_be_read_are_refused(refused, tmp_path):
    path = tiny.saved(tiny.qwen2(), tmp_path)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with refused(ConfigError, "^model.path must hold a .* but loading .* failed with .* save it again"):
        load(path)
    weights.write_bytes(b"")
    with refused(ConfigError, "^model.path must hold a .* but loading .* failed with"):
        load(path)
    weights.unlink()
    with refused(ConfigError, "^model.path must hold a .* but loading .* failed with"):
        load(path)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "{}", '{"model_type": "no_such_model"}', '{"model_type": "qwen2", "hidden_size": "x"}', '{"model_type": 3}'],
)
def test_a_broken_config_json_is_refused(refused, tmp_path, content):
    path = tiny.saved(tiny.qwen2(), tmp_path)
    (path / "config.json").write_text(content)
    with refused(ConfigError, "^model.path must hold a"):
        load(path)


def test_an_end_token_that_is_no_id_is_refused(refused, tmp_path):
    path = tiny.saved(tiny.qwen2(), tmp_path)
    (path / "generation_config.json").write_text('{"eos_token_id": [1, "x"]}')
    with refused(ConfigError, r"^model.path: end tokens must be ids of the model's 64 tokens, got \['x'\]"):
        load(path)


def test_a_checkpoint_with_missing_weights_is_refused_instead_of_filled_with_noise(refused, tmp_path):
    path = tiny.saved(tiny.qwen2(tie_word_embeddings=True), tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with refused(ConfigError, "^model.path must hold all weights of Qwen2ForCausalLM, but .* 1 are missing, for example lm_head.weight"):
        load(path)


def test_a_length_beyond_the_models_positions_is_refused(refused, qwen2_path):
    assert load(qwen2_path, max_length=128)
    with refused(ConfigError, r"prompt_length \+ response_length must fit into the model's 128 positions .*, got 129"):
        load(qwen2_path, max_length=129)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_slots": 0}, "max_slots must be at least 1, got 0"),
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
        ({"prefill_tokens": 0}, "prefill_tokens must be at least 1, got 0"),
        ({"on_publish": "restart"}, "on_publish must be one of recompute, keep, got 'restart'"),
        ({"on_weight_update": "keep"}, "on_weight_update must be one of finish, restart, continue, got 'keep'"),
        ({"stop_token_ids": [64]}, r"end tokens must be ids of the model's 64 tokens, got \[64\]"),
    ],
)
def test_settings_that_make_no_sense_are_refused(refused, qwen2_path, settings, message):
    with refused(ConfigError, message):
        load(qwen2_path, **settings)


def test_a_sliding_window_is_refused_unless_no_sequence_reaches_its_end(refused, tmp_path):
    model = tiny.made(MistralForCausalLM, MistralConfig(sliding_window=16, **SIZES, **ATTENTION), 0)
    path = tiny.saved(model, tmp_path)
    with refused(ConfigError, r"^model.path .*MistralForCausalLM has sliding_attention \(window 16\)"):
        load(path, max_length=17)
    with SlotEngine.load(path, max_slots=2, max_length=16, threads=1) as engine:
        asked = tiny.request(0, [5, 6], new=14)
        generation = tiny.generate(engine, [asked])[0]
    np.testing.assert_allclose(generation.inference_logprobs, tiny.full_logprobs(model, asked, generation.token_ids), atol=1e-5)


def test_a_recurrent_model_is_refused(refused, tmp_path):
    model = tiny.made(MambaForCausalLM, MambaConfig(state_size=4, **SIZES), 0)
    with refused(ConfigError, "^model.path .*MambaForCausalLM"):
        load(tiny.saved(model, tmp_path))


def test_a_model_that_looks_at_its_neighbours_is_refused(refused, qwen2_path, monkeypatch):
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    own = Qwen2MLP.forward
    monkeypatch.setattr(Qwen2MLP, "forward", lambda self, x: own(self, x) + x.mean(dim=0))
    with refused(ConfigError, "^model.path .*logits depend only on a row's own tokens"):
        load(qwen2_path)


def test_end_tokens_come_from_configuration_and_caller(tmp_path):
    model = tiny.qwen2()
    model.generation_config.eos_token_id = [1, 9]
    path = tiny.saved(model, tmp_path)
    assert load(path) == [1, 9]
    assert load(path, stop_token_ids=[3]) == [1, 3, 9]


def test_end_tokens_come_from_the_tokenizer_too(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    path = tiny.saved(tiny.qwen2(eos_token_id=None), tmp_path)
    with pytest.raises(ConfigError, match="must have an end token"):
        load(path)
    assert load(path, stop_token_ids=[3]) == [3]
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(10)} | {"<end>": 10}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(path)
    assert load(path) == [10]


def test_what_a_model_does_after_its_output_layer_is_kept(tmp_path):
    """Logits that the model scales or caps after the output layer reach the sampler as such."""
    from transformers import CohereConfig, CohereForCausalLM

    model = tiny.made(CohereForCausalLM, CohereConfig(logit_scale=0.3, **SIZES, **ATTENTION), 0)
    asked = tiny.request(0, [5, 6, 7], new=10)
    with SlotEngine.load(tiny.saved(model, tmp_path), max_slots=2, max_length=32, threads=1) as engine:
        generation = tiny.generate(engine, [asked])[0]
    np.testing.assert_allclose(generation.inference_logprobs, tiny.full_logprobs(model, asked, generation.token_ids), atol=1e-5)


def test_loading_prints_nothing(qwen2_path, capfd):
    load(qwen2_path)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_weights_may_be_loaded_in_another_type(qwen2_path):
    with SlotEngine.load(qwen2_path, max_slots=1, max_length=8, precision=torch.float64) as engine:
        assert engine._model.dtype == torch.float64
