"""Tiny random models, and the slow, obvious way to get their log-probs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from sluice.config.models import LoraConfig
from sluice.generation.base import Generation, GenerationRequest
from sluice.generation.sampling import noise_key, uniforms
from sluice.generation.slot import SlotEngine, _Publish

VOCABULARY = 64
END = 1
POSITIONS = 128


def qwen2(seed: int = 0, **settings) -> Qwen2ForCausalLM:
    values = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 64, "max_position_embeddings": POSITIONS, "eos_token_id": END, "bos_token_id": None, "pad_token_id": 0,
        "tie_word_embeddings": True, "initializer_range": 0.1,
    }  # fmt: skip
    return made(Qwen2ForCausalLM, Qwen2Config(**(values | settings)), seed)


def llama(seed: int = 0, **settings) -> LlamaForCausalLM:
    values = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "intermediate_size": 64, "max_position_embeddings": POSITIONS, "eos_token_id": END, "bos_token_id": None,
        "tie_word_embeddings": False, "initializer_range": 0.1,
    }  # fmt: skip
    return made(LlamaForCausalLM, LlamaConfig(**(values | settings)), seed)


def gpt2(seed: int = 0) -> GPT2LMHeadModel:
    """Learned positions instead of rotary ones."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS, eos_token_id=END, bos_token_id=None,
        initializer_range=0.1,
    )  # fmt: skip
    return made(GPT2LMHeadModel, config, seed)


def made(kind, config, seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(config).eval()


def perturbed(model: PreTrainedModel, scale: float = 0.05) -> PreTrainedModel:
    """Change a model in place, as an optimiser step does."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return model


def adapted(lora: LoraConfig, scale: float = 0.3):
    """A trainer's model with an adapter that does something."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = get_peft_model(
            qwen2(), PeftLoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=lora.target_modules, task_type="CAUSAL_LM")
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += scale * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
    return model.eval()


def saved(model: PreTrainedModel, path: Path) -> Path:
    model.save_pretrained(path)
    return path


def request(request_id: int, prompt: Iterable[int], *, new: int = 8, temperature: float = 1.0, seed: int | None = None, purpose="train",
            dialogue: int | None = None):  # fmt: skip
    return GenerationRequest(
        request_id=request_id, prompt_ids=np.array(list(prompt), dtype=np.int64), max_new_tokens=new, temperature=temperature,
        seed=request_id if seed is None else seed, purpose=purpose, dialogue_id=dialogue,
    )  # fmt: skip


def generate(engine, requests: Iterable[GenerationRequest]) -> list[Generation]:
    """Submit everything at once and wait."""

    async def all_of_them():
        return await asyncio.gather(*[engine.submit(r).future for r in requests])

    return asyncio.run(all_of_them())


@torch.no_grad()
def full_logprobs(model: PreTrainedModel, asked: GenerationRequest, tokens: np.ndarray) -> np.ndarray:
    """Log-probs of `tokens` after the prompt, from one ordinary forward pass over the whole sequence. [N]"""
    sequence = torch.from_numpy(np.concatenate([asked.prompt_ids, tokens]))[None]
    logits = model(input_ids=sequence, use_cache=False).logits[0, len(asked.prompt_ids) - 1 : -1]
    temperature = asked.temperature or 1.0
    return torch.log_softmax(logits.double() / temperature, -1).gather(1, torch.from_numpy(tokens)[:, None])[:, 0].numpy()


@torch.no_grad()
def assert_explained(models: Sequence[PreTrainedModel], asked: GenerationRequest, generation: Generation) -> None:
    """Every token and its log-prob are what a plain forward pass of the version said to have sampled it gives, and the request's noise."""
    tokens, n = generation.token_ids, len(generation.token_ids)
    assert len(generation.inference_logprobs) == n
    versions = generation.token_versions
    if versions is None:
        versions = np.full(n, generation.policy_version)
    else:
        assert len(versions) == n
        assert len(set(versions.tolist())) > 1
        assert np.all(np.diff(versions) >= 0)
        assert versions[0] == generation.policy_version
    if not n:
        return
    noise = uniforms(np.full(n, noise_key(asked.seed), dtype=np.uint64), np.arange(n))
    tolerance = 1e-5 / (min(asked.temperature, 1.0) or 1.0)  # dividing by the temperature also enlarges the logits' rounding
    sequence = torch.from_numpy(np.concatenate([asked.prompt_ids, tokens]))[None]
    for version in set(versions.tolist()):
        at = np.flatnonzero(versions == version)
        logits = models[version](input_ids=sequence, use_cache=False).logits[0, len(asked.prompt_ids) - 1 : -1][at]
        logprobs = torch.log_softmax(logits.double() / (asked.temperature or 1.0), -1).numpy()
        chosen = logprobs[np.arange(len(at)), tokens[at]]
        np.testing.assert_allclose(generation.inference_logprobs[at], chosen, atol=tolerance, rtol=0)
        if asked.temperature:
            ends = np.cumsum(np.exp(logprobs), axis=-1)[np.arange(len(at)), tokens[at]]
            assert np.all(ends >= noise[at] - tolerance)
            assert np.all(ends - np.exp(chosen) <= noise[at] + tolerance)
        else:
            assert np.all(logprobs.max(axis=-1) <= chosen + tolerance)


class Passes:
    """Does things just before chosen forward passes of the engine, in its own thread: the same at every run.

    What is published or cancelled there takes effect before the pass after it.
    """

    def __init__(self, engine: SlotEngine, actions: Mapping[int, Callable[[], None]] | None = None) -> None:
        assert engine._model is not None
        self._engine = engine
        self._model = engine._model
        self._actions = dict(actions or {})
        self.versions_live: list[int] = []  # sets of weights in memory during each pass
        for name in ("prefill", "decode"):
            setattr(engine._model, name, self._watched(getattr(engine._model, name)))

    def stop(self) -> None:
        """Watch no longer."""
        del self._model.prefill, self._model.decode

    def _watched(self, compute):
        def watched(*args):
            rows, weights = self._engine._rows, self._engine._weights
            assert set(weights.versions) == {*rows.edition[: rows.count].tolist(), weights.newest}
            action = self._actions.get(len(self.versions_live))
            self.versions_live.append(int(self._engine.metrics()["engine/versions_live"]))
            if action is not None:
                action()
            return compute(*args)

        return watched

    def publish(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        """Leave new weights for the engine, as `SlotEngine.publish` does, without waiting for it."""
        with self._engine._lock:
            self._engine._publishes.append(_Publish(self._engine._weights.check(state), version))
        self._engine._wake.set()


class Turnstile:
    """Stops the engine's thread before every decoding pass until it is let through."""

    def __init__(self, engine: SlotEngine) -> None:
        assert engine._model is not None
        self._tickets = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)
        self._is_open = False
        self.rows: list[int] = []  # rows of each pass
        self._decode = engine._model.decode
        engine._model.decode = self._stop_and_go

    def _stop_and_go(self, tokens, positions, slots, rows):
        self._arrived.release()
        if not self._is_open:
            assert self._tickets.acquire(timeout=30), "nobody let the engine through"
        self.rows.append(len(rows))
        return self._decode(tokens, positions, slots, rows)

    async def arrival(self) -> None:
        """Wait until the engine stands before a decoding pass."""
        assert await asyncio.to_thread(self._arrived.acquire, timeout=30), "the engine never came to a decoding pass"

    async def let_through(self) -> None:
        """One decoding pass, up to standing before the next."""
        self._tickets.release()
        await self.arrival()

    def open(self) -> None:
        """Stop nobody any more."""
        self._is_open = True
        self._tickets.release()
