"""How fast the slot engine plays dialogues, beside a batched rollout in lockstep on transformers' own cache.

    python benchmarks/dialogue_speed.py
    python benchmarks/dialogue_speed.py --rounds 5 --slots 64

A random Qwen2-architecture model (hidden size 128, 3 layers, 2 heads of 64, vocabulary 430) plays dialogues of many short turns: some new
prompt tokens, then some sampled ones. The lockstep rollout appends and decodes all dialogues together, and those that are done with a turn
decode on until the last one is. The engine is driven by one coroutine a dialogue, whose replies cost nothing, or --reply-ms of waiting, by
which the lockstep rollout is spared. Turns are of a fixed length, or mixed around it. All take turns within a round, and the ratios are of
neighbours: the machine may be shared. Processor time is less sensitive to that than wall-clock time (with OMP_WAIT_POLICY=passive, without
which idle torch threads burn it).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

from sluice.generation import GenerationRequest, SlotEngine

VOCABULARY = 430


@dataclass(frozen=True, kw_only=True)
class Script:
    """What is said in all dialogues, and how long each answer is."""

    prompts: list[list[list[int]]]  # by dialogue and turn
    new: list[list[int]]  # tokens to sample

    @property
    def sampled(self) -> int:
        """Tokens sampled in all."""
        return sum(map(sum, self.new))

    @property
    def longest(self) -> int:
        """Tokens of the longest dialogue."""
        return max(sum(map(len, said)) + sum(new) for said, new in zip(self.prompts, self.new, strict=True))


def script(asked: argparse.Namespace, *, spread: int) -> Script:
    """spread: answers are by so many tokens shorter or longer than --new."""
    rng = np.random.default_rng(0)
    lengths = [asked.opening] + [asked.reply] * (asked.turns - 1)
    dialogues = range(asked.dialogues)
    return Script(
        prompts=[[rng.integers(2, VOCABULARY, length).tolist() for length in lengths] for _ in dialogues],
        new=[rng.integers(asked.new - spread, asked.new + spread + 1, asked.turns).tolist() for _ in dialogues],
    )


@torch.inference_mode()
def in_lockstep(model: Qwen2ForCausalLM, said: Script) -> None:
    """All dialogues in one batch. The token sampled last is computed with the next reply, as the engine does."""
    generator = torch.Generator().manual_seed(0)
    rows = len(said.prompts)
    cache = DynamicCache(config=model.config)
    mask = torch.zeros(rows, 0, dtype=torch.long)
    known = torch.zeros(rows, dtype=torch.long)  # tokens of each row in the cache
    texts: list[list[int]] = [[] for _ in range(rows)]
    logprobs: list[list[float]] = [[] for _ in range(rows)]
    carried: list[list[int]] = [[] for _ in range(rows)]
    for turn in range(len(said.prompts[0])):
        chunks = [carried[row] + said.prompts[row][turn] for row in range(rows)]
        width = max(map(len, chunks))
        ids = torch.zeros(rows, width, dtype=torch.long)
        new_mask = torch.zeros(rows, width, dtype=torch.long)
        for row, chunk in enumerate(chunks):
            ids[row, : len(chunk)] = torch.tensor(chunk)
            new_mask[row, : len(chunk)] = 1
        counts = new_mask.sum(1)
        left = torch.tensor([new[turn] for new in said.new])
        places = (known[:, None] + new_mask.cumsum(1) - 1).clamp(min=0)
        last = counts - 1
        while True:
            mask = torch.cat([mask, new_mask], 1)
            hidden = model.model(ids, attention_mask=mask, position_ids=places, cache=cache, use_cache=True).last_hidden_state
            known += counts
            logits = model.lm_head(hidden[torch.arange(rows), last])
            all_logprobs = torch.log_softmax(logits.float(), -1)
            tokens = torch.multinomial(all_logprobs.exp(), 1, generator=generator)
            chosen = all_logprobs.gather(1, tokens)[:, 0].tolist()
            is_live = left > 0
            for row, (token, live) in enumerate(zip(tokens[:, 0].tolist(), is_live.tolist(), strict=True)):
                if live:
                    texts[row].append(token)
                    logprobs[row].append(chosen[row])
                    carried[row] = [token]
            left -= 1
            is_live = left > 0
            if not is_live.any():
                break
            ids, places, last = tokens, known[:, None], torch.zeros(rows, dtype=torch.long)
            counts = is_live.long()
            new_mask = counts[:, None]
    assert sum(map(len, texts)) == said.sampled


async def through_the_engine(engine: SlotEngine, said: Script, reply_ms: float = 0) -> None:
    """One coroutine a dialogue. reply_ms: mean time until a reply, between nothing and twice as much."""
    rng = np.random.default_rng(0)

    async def dialogue(number: int) -> int:
        sampled = 0
        for turn, prompt in enumerate(said.prompts[number]):
            if turn and reply_ms:
                await asyncio.sleep(rng.uniform(0, 2e-3 * reply_ms))
            request = GenerationRequest(
                request_id=number, prompt_ids=np.array(prompt), max_new_tokens=said.new[number][turn], temperature=1.0,
                seed=1000 * number + turn, dialogue_id=number,
            )  # fmt: skip
            sampled += len((await engine.submit(request).future).token_ids)
        engine.end_dialogue(number)
        return sampled

    assert sum(await asyncio.gather(*[dialogue(number) for number in range(len(said.prompts))])) == said.sampled


def seconds(play: Callable[[], None]) -> tuple[float, float]:
    """Wall-clock and processor time of one playing."""
    wall, processor = time.perf_counter(), time.process_time()
    play()
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dialogues", type=int, default=80)
    parser.add_argument("--slots", type=int, help="default: as many as dialogues")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--opening", type=int, default=90, help="tokens of the first prompt")
    parser.add_argument("--reply", type=int, default=20, help="tokens of every later prompt")
    parser.add_argument("--new", type=int, default=5, help="tokens sampled in a turn")
    parser.add_argument("--spread", type=int, default=3, help="by how many tokens turns of mixed length differ from that at most")
    parser.add_argument("--reply-ms", type=float, default=0, help="mean time that the engine waits for a reply")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, intermediate_size=384,
        max_position_embeddings=2048, eos_token_id=1, bos_token_id=None, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    fixed, mixed = script(asked, spread=0), script(asked, spread=asked.spread)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = SlotEngine.load(
            folder, max_slots=asked.slots or asked.dialogues, max_length=max(fixed.longest, mixed.longest), threads=asked.threads
        )
    engine._stops[:] = False  # every answer at its full length
    ways: dict[str, tuple[Script, Callable[[], None]]] = {
        "lockstep, fixed length": (fixed, lambda: in_lockstep(model, fixed)),
        "engine, fixed length": (fixed, lambda: asyncio.run(through_the_engine(engine, fixed, asked.reply_ms))),
        "engine, mixed length": (mixed, lambda: asyncio.run(through_the_engine(engine, mixed, asked.reply_ms))),
        "lockstep, mixed length": (mixed, lambda: in_lockstep(model, mixed)),
    }
    print(
        f"{asked.dialogues} dialogues x {asked.turns} turns, {asked.opening} and then {asked.reply} prompt tokens, {asked.new} sampled "
        f"({asked.new - asked.spread} to {asked.new + asked.spread} mixed), {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{asked.threads} threads"
    )
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    with engine:
        for _ in range(asked.rounds):
            for name, (_, play) in ways.items():
                before = engine.metrics()
                times[name].append(seconds(play))
                after = engine.metrics()
                used = {key.removeprefix("engine/"): after[key] - before[key] for key in after}
                if name.startswith("engine"):
                    print(
                        f"  {name}: {times[name][-1][0]:.2f} s, busy {used['busy_s']:.2f} s, {used['prefill_passes']:.0f} prefill passes "
                        f"of {used['prefill_tokens']:.0f} tokens, {used['decode_passes']:.0f} decoding passes, "
                        f"{used['dialogues_evicted']:.0f} dialogues put aside"
                    )
    base = times["lockstep, fixed length"]
    print(f"time per token, over lockstep of fixed length{'best s':>18s} {'tokens/s':>9s}   {'wall-clock':20s} {'processor time':20s}")
    for name, (said, _) in ways.items():
        scale = fixed.sampled / said.sampled
        best = min(wall for wall, _ in times[name])
        print(f"  {name:52s} {best:8.2f} {said.sampled / best:9,.0f}", end="   ")
        for kind in (0, 1):
            ratios = [scale * one[kind] / other[kind] for one, other in zip(times[name], base, strict=True)]
            print(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})", end="   ")
        print()


if __name__ == "__main__":
    main()
