"""How fast the slot engine samples, beside transformers' own `generate` on the same prompts.

    python benchmarks/engine_speed.py --threads 1
    python benchmarks/engine_speed.py --threads 2

A random Qwen2-architecture model (hidden size 128, 3 layers, vocabulary 100), groups of 8 siblings, every response at its full length.
`generate` samples with log-probs too (output_logits). Best of several rounds: the machine may be shared. Time is wall-clock, and processor
time beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from sluice.generation import GenerationRequest, SlotEngine

GROUP_SIZE = 8
VOCABULARY = 100


def best(rounds: int, play: Callable[[], int]) -> tuple[float, float]:
    """Most tokens per second of wall-clock, and of processor time."""
    play()
    walls, processors = [], []
    for _ in range(rounds):
        wall, processor = time.perf_counter(), time.process_time()
        tokens = play()
        walls.append(tokens / (time.perf_counter() - wall))
        processors.append(tokens / (time.process_time() - processor))
    return max(walls), max(processors)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=30, help="longest prompt, in tokens; the shortest is half of it")
    parser.add_argument("--new", type=int, default=16, help="tokens of each response")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=384,
        max_position_embeddings=512, eos_token_id=1, bos_token_id=None, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    rng = np.random.default_rng(0)
    groups = asked.rows // GROUP_SIZE
    prompts = [rng.integers(2, VOCABULARY, rng.integers(asked.prompt // 2, asked.prompt + 1)) for _ in range(groups)]

    def with_generate() -> int:
        width = max(map(len, prompts))
        ids = torch.zeros(asked.rows, width, dtype=torch.long)
        mask = torch.zeros(asked.rows, width, dtype=torch.long)
        for row in range(asked.rows):
            prompt = prompts[row // GROUP_SIZE]
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids, attention_mask=mask, do_sample=True, max_new_tokens=asked.new, min_new_tokens=asked.new, top_k=0,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            for step, logits in enumerate(out.logits):
                torch.log_softmax(logits.float(), -1).gather(1, out.sequences[:, width + step, None])
        return asked.rows * asked.new

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = SlotEngine.load(folder, max_slots=asked.rows, max_length=asked.prompt + asked.new, threads=asked.threads)
    engine._stops[:] = False  # every response at its full length

    async def through_the_engine() -> int:
        handles = [
            engine.submit(
                GenerationRequest(request_id=i, prompt_ids=prompts[i // GROUP_SIZE], max_new_tokens=asked.new, temperature=1.0, seed=i)
            )
            for i in range(groups * GROUP_SIZE)
        ]
        return sum(len(generation.token_ids) for generation in await asyncio.gather(*[handle.future for handle in handles]))

    with engine:
        for name, play in (("slot engine", lambda: asyncio.run(through_the_engine())), ("transformers generate", with_generate)):
            wall, processor = best(asked.rounds, play)
            print(f"{name:22s} {asked.threads} threads: {wall:8,.0f} tokens/s, {processor:8,.0f} tokens per second of processor time")


if __name__ == "__main__":
    main()
