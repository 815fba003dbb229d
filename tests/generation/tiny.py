"""Tiny random models, and the slow, obvious way to get their log-probs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from sluice.generation.base import Generation, GenerationRequest
from sluice.generation.slot import SlotEngine

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


def saved(model: PreTrainedModel, path: Path) -> Path:
    model.save_pretrained(path)
    return path


def request(request_id: int, prompt: Iterable[int], *, new: int = 8, temperature: float = 1.0, seed: int | None = None, purpose="train"):
    return GenerationRequest(
        request_id=request_id, prompt_ids=np.array(list(prompt), dtype=np.int64), max_new_tokens=new, temperature=temperature,
        seed=request_id if seed is None else seed, purpose=purpose,
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

    def _stop_and_go(self, tokens, positions):
        self._arrived.release()
        if not self._is_open:
            assert self._tickets.acquire(timeout=30), "nobody let the engine through"
        self.rows.append(len(tokens))
        return self._decode(tokens, positions)

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
