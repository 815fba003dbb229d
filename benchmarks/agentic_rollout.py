"""How fast trajectories are rolled out, beside the plainest batched rollout: the shipped policy on the same household games.

    python benchmarks/agentic_rollout.py [--groups 10] [--threads 2] [--rounds 5] [KEY=VALUE ...]

`lockstep` is a loop without any scheduler: all trajectories wait for each other in every turn, one forward pass appends all observations to
a growing cache (transformers' DynamicCache), then all sample token by token until the last action has ended; trajectories that are done
keep their row. `sluice` is the whole stack of a run: machine, shell, players, environments, slot engine. Both sample at the recipe's
temperature and play the first episode of each environment group, group_size times. They take turns; the table shows the median of the
rounds, also per environment step, since what is sampled differs.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from sluice.config import AgenticConfig, load_config
from sluice.environments import build_environment, episode_seed
from sluice.pipeline.agentic import AgenticJob
from sluice.pipeline.loop_thread import LoopThread
from sluice.scheduler.events import GroupRecord

RECIPE = Path("recipes/agentic_household.yaml")


@dataclass(frozen=True)
class Played:
    """One batch of trajectories."""

    seconds: float
    env_steps: int
    tokens: int
    succeeded: int


class _Silent:
    """A journal that keeps nothing."""

    def group(self, record: GroupRecord) -> None:
        pass

    def event(self, level: str, message: str) -> None:
        print(f"{level}: {message}")


@torch.inference_mode()
def lockstep(config: AgenticConfig, job: AgenticJob, model: torch.nn.Module, groups: int, round_seed: int) -> Played:
    """Roll out all trajectories together, each turn as long as its longest action."""
    size, limit, temperature = config.train_env_manager.group_size, config.dialogue.max_tokens_per_turn, config.engine.temperature
    generator = torch.Generator().manual_seed(round_seed)
    started = time.perf_counter()
    environments = [build_environment(config.environment) for _ in range(groups * size)]
    starts = [env.reset(episode_seed(config.seed, row // size, 0)) for row, env in enumerate(environments)]
    count = len(environments)
    texts = [config.dialogue.turn_template.format(observation=observation) for observation, _ in starts]
    encode = lambda text: job.tokenizer._tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731 - as directly as it goes
    chunks: list[list[int]] = [encode(text) for text in texts]
    stop = job.dialogue.stop_token_ids[0]
    cache, mask = DynamicCache(), torch.zeros(count, 0, dtype=torch.long)
    position = torch.zeros(count, dtype=torch.long)
    is_done, rewards = [False] * count, [0.0] * count
    steps = tokens = 0
    while not all(is_done):
        width = max(map(len, chunks))
        ids, shown = torch.zeros(count, width, dtype=torch.long), torch.zeros(count, width, dtype=torch.long)
        for row, chunk in enumerate(chunks):
            ids[row, : len(chunk)] = torch.tensor(chunk, dtype=torch.long)
            shown[row, : len(chunk)] = 1
        mask = torch.cat([mask, shown], 1)
        places = (position[:, None] + shown.cumsum(1) - 1).clamp(min=0)
        lengths = shown.sum(1)
        position += lengths
        hidden = model.model(ids, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True).last_hidden_state
        logits = model.lm_head(hidden[torch.arange(count), (lengths - 1).clamp(min=0)])
        written: list[list[int]] = [[] for _ in range(count)]
        is_live = torch.tensor([not done for done in is_done])
        for _ in range(limit):
            token = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)[:, 0]
            for row in torch.nonzero(is_live)[:, 0].tolist():
                written[row].append(int(token[row]))
            tokens += int(is_live.sum())
            was_live = is_live.clone()
            is_live &= token != stop
            mask = torch.cat([mask, was_live.long()[:, None]], 1)
            hidden = model.model(
                token[:, None], attention_mask=mask, position_ids=position[:, None], past_key_values=cache, use_cache=True
            ).last_hidden_state
            position += was_live.long()
            logits = model.lm_head(hidden[:, 0])
            if not bool(is_live.any()):
                break
        chunks = [[] for _ in range(count)]
        for row, env in enumerate(environments):
            if is_done[row]:
                continue
            action = job.decode(np.array([one for one in written[row] if one != stop])).strip()
            observation, reward, terminated, truncated, _ = env.step(action)
            steps += 1
            rewards[row] += reward
            is_done[row] = terminated or truncated
            if not is_done[row]:
                chunks[row] = encode(config.dialogue.turn_template.format(observation=observation))
    seconds = time.perf_counter() - started
    return Played(seconds, steps, tokens, sum(reward > 0 for reward in rewards))


def through_sluice(config: AgenticConfig, job: AgenticJob, groups: int) -> tuple[Played, dict[str, float]]:
    """One batch of the run's own stack."""
    before = job.engine.sampled_tokens("train")
    with LoopThread(threading.Event()) as loop:
        shell = loop.run(job.open(job.build_scheduler(), _Silent(), lambda: None, print), 60.0)
        started = time.perf_counter()
        batch, _ = loop.run(shell.next_batch(groups, 0), 600.0)
        seconds = time.perf_counter() - started
        metrics = job.metrics()
        loop.run(shell.close(), 15.0)
        loop.run(job.close(), 15.0)
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    steps, won = sum(rollout.env_steps for rollout in rollouts), sum((rollout.reward or 0.0) > 0 for rollout in rollouts)
    return Played(seconds, steps, job.engine.sampled_tokens("train") - before, won), metrics


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    overrides = [
        f"rollout_batch_size={8 * asked.groups}", f"train_env_manager.num_env_groups={asked.groups}",
        "train_env_manager.group_filter_config={type: no_filter}", f"engine.torch_threads={asked.threads}", *asked.overrides,
    ]  # fmt: skip
    played: dict[str, list[Played]] = {"lockstep": [], "sluice": []}
    metrics: dict[str, float] = {}
    for number in range(asked.rounds + 1):
        config = load_config(RECIPE, overrides)
        assert isinstance(config, AgenticConfig)
        job = AgenticJob.build(config, lambda text: None)
        model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
        results = {"lockstep": lockstep(config, job, model, asked.groups, number)}
        results["sluice"], metrics = through_sluice(config, job, asked.groups)
        job.engine.close()
        if number:  # the first round warms up
            for name, result in results.items():
                played[name].append(result)
    print(f"{asked.groups} groups of 8, {asked.threads} threads, {asked.rounds} rounds (median)\n")
    print("| | seconds | env steps | sampled tokens | successes | ms / env step |\n|---|---|---|---|---|---|")
    for name, rounds in played.items():
        median = {field: statistics.median(getattr(one, field) for one in rounds) for field in Played.__dataclass_fields__}
        per_step = statistics.median(1000 * one.seconds / one.env_steps for one in rounds)
        print(
            f"| {name} | {median['seconds']:.2f} | {median['env_steps']:.0f} | {median['tokens']:.0f} | {median['succeeded']:.0f} | "
            f"{per_step:.2f} |"
        )
    ratios = [ours.seconds / theirs.seconds for ours, theirs in zip(played["sluice"], played["lockstep"], strict=True)]
    print(f"\ntime, sluice / lockstep: {statistics.median(ratios):.2f} (rounds {', '.join(f'{ratio:.2f}' for ratio in ratios)})")
    for name, value in sorted(metrics.items()):
        if name.startswith("rollout/"):
            print(f"{name} {value:.4g}")


if __name__ == "__main__":
    main()
