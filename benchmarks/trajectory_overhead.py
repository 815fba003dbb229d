"""What a turn of a trajectory costs in code of our own: an engine that answers at once, games that run inline, the real machine and shell.

    python benchmarks/trajectory_overhead.py [--env household|frozen_lake] [--batches 10] [--latency-ms 0] [--tokenizer FOLDER] [--profile]

The policy writes random commands. The environments' own time is part of the whole, and told apart. Processor time is what to look at where
other programs run beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import time
from pathlib import Path
from typing import Any

import numpy as np

from sluice.config.agentic import AgenticConfig
from sluice.environments import EnvironmentHost
from sluice.execution import LocalShell
from sluice.execution.dialogue import build_dialogue_format
from sluice.execution.trajectories import TrajectoryPlayer
from sluice.filters import DomainFilters, build_query_filter
from sluice.generation import Answer, GenerationRequest, NullEngine
from sluice.generation.tokenizer import load_tokenizer
from sluice.scheduler import Scheduler, SchedulerConfig
from sluice.scheduler.events import GroupRecord
from sluice.tasks import EpisodeTasks

COMMANDS = {
    "household": ("look", "inventory", "go to drawer 1", "go to countertop 1", "open drawer 1", "go to shelf 2", "help"),
    "frozen_lake": ("left", "right", "up", "down"),
}
ARGS: dict[str, dict[str, Any]] = {"household": {"split": "train", "size": "small", "max_steps": 30}, "frozen_lake": {}}


class _Silent:
    """A journal that keeps nothing."""

    def group(self, record: GroupRecord) -> None:
        pass

    def event(self, level: str, message: str) -> None:
        print(f"{level}: {message}")


def settings(env: str) -> AgenticConfig:
    """Eight groups of ten."""
    return AgenticConfig(
        pipeline="agentic",
        exp_name="overhead",
        model={"path": "none"},  # type: ignore[arg-type]
        trainer={"max_steps": 1, "learning_rate": 1e-3},  # type: ignore[arg-type]
        environment={"type": env, "args": ARGS[env], "run_in": "inline", "max_steps": 30},  # type: ignore[arg-type]
        train_env_manager={"num_env_groups": 8, "group_size": 10},  # type: ignore[arg-type]
        rollout_batch_size=80,
        sequence_length=100_000,
    )


async def play(env: str, batches: int, latency_s: float, folder: Path) -> None:
    """Fill so many batches, and print what they cost."""
    config = settings(env)
    tokenizer = load_tokenizer(folder)
    dialogue = build_dialogue_format(config.dialogue, tokenizer)
    said = [np.array([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]) for text in COMMANDS[env]]
    logprobs = [np.full(len(ids), -1.0, dtype=np.float32) for ids in said]

    def answer(request: GenerationRequest) -> Answer:
        which = request.seed % len(said)
        return Answer(token_ids=said[which], inference_logprobs=logprobs[which], latency_s=latency_s)

    engine = NullEngine(answer)
    manager = config.train_env_manager
    async with EnvironmentHost(config.environment, config.env_monitor) as host:
        player = TrajectoryPlayer(config, host=host, engine=engine, dialogue=dialogue, seed=1)
        filters = {config.domain: DomainFilters(query=build_query_filter({"type": "no_filter"}), response=None)}
        shell = LocalShell(
            scheduler=Scheduler(SchedulerConfig(group_size=manager.group_size), filters),
            source=EpisodeTasks(config.domain, manager.num_env_groups, seed=1),
            engine=engine,
            journal=_Silent(),
            player=player,
        )
        await shell.next_batch(config.groups_per_batch)  # environments are built
        before, cpu_before, turns = time.perf_counter(), time.process_time(), 0
        env_before = host.metrics()
        for step in range(1, batches + 1):
            engine.publish({}, step)
            shell.step_advanced(step)
            batch, _ = await shell.next_batch(config.groups_per_batch)
            turns += sum(len(rollout.turns) for group in batch.groups for rollout in group.rollouts)
        seconds, cpu_s = time.perf_counter() - before, time.process_time() - cpu_before
        env_after = host.metrics()
        inside = sum(env_after[name] - env_before[name] for name in ("env/reset_seconds", "env/step_seconds"))
        await shell.close()
    print(
        f"{env}: {turns} turns in {seconds:.2f} s, {turns / seconds:.0f} turns/s; of them {cpu_s:.2f} s on the processor, "
        f"{cpu_s / turns * 1e6:.0f} us a turn\n"
        f"by the clock: environment {inside / turns * 1e6:.0f} us a turn, machine {shell.machine_seconds / turns * 1e6:.0f} us a turn"
    )
    shares = {name.rpartition("/")[2]: round(value, 3) for name, value in player.metrics().items() if "time_share" in name}
    print(f"time of trajectories: {shares}; seats idle {player.metrics()['rollout/idle_env_share']:g}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=sorted(COMMANDS), default="household")
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--tokenizer", type=Path, default=Path("recipes/agentic_household/policy"))
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    profile = cProfile.Profile()
    if given.profile:
        profile.enable()
    asyncio.run(play(given.env, given.batches, given.latency_ms / 1000, given.tokenizer))
    if given.profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()
