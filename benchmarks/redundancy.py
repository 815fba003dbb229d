"""How long a batch takes to fill when some environments are slow, with redundant members and without.

    python benchmarks/redundancy.py [KEY=VALUE ...] [--rounds 3] [--batches 2] [--redundancy 0 1 2 4] [--slow-share 0.05] [--slow-s 4.0]

The household twin with injected latency: every step of an environment takes 2 milliseconds, and a share of the episodes is slow: each of
its first five steps takes --slow-s seconds, as a stuck machine would. Which ones are slow is drawn per environment and episode, so that
siblings differ. The shipped policy plays, nothing is trained, every group is kept. The redundancies take turns: in each of --rounds rounds
every one of them fills --batches batches. Wall-clock of filling a batch, and the tokens that redundancy costs.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from sluice.config import AgenticConfig, load_config
from sluice.environments.household.environment import HouseholdEnvironment, HouseholdSettings
from sluice.pipeline.agentic import AgenticJob
from sluice.pipeline.loop_thread import LoopThread
from sluice.scheduler.events import GroupRecord

RECIPE = Path("recipes/agentic_household.yaml")
USUAL_S = 0.002  # of a step
SLOW_STEPS = 5  # of a slow episode, its first ones

_numbers = itertools.count()


class SlowHousehold(HouseholdEnvironment):
    """Household games of which some answer slowly."""

    def __init__(self, slow_share: float, slow_s: float, max_steps: int = 30) -> None:
        super().__init__(HouseholdSettings(split="train", size="small", max_steps=max_steps))
        self._luck = random.Random(next(_numbers))
        self._slow_share, self._slow_s = slow_share, slow_s
        self._slow_left = 0

    def reset(self, seed: int) -> tuple[str, Mapping[str, Any]]:
        """Begin a game; some are slow."""
        self._slow_left = SLOW_STEPS if self._luck.random() < self._slow_share else 0
        return super().reset(seed)

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Answer late."""
        time.sleep(self._slow_s if self._slow_left > 0 else USUAL_S)
        self._slow_left -= 1
        return super().step(action)


class _Silent:
    """A journal that keeps nothing."""

    def group(self, record: GroupRecord) -> None:
        pass

    def event(self, level: str, message: str) -> None:
        print(f"{level}: {message}")


def fill_times(config: AgenticConfig, batches: int) -> tuple[list[float], int]:
    """Seconds of filling each batch, and the tokens sampled for all of them."""
    job = AgenticJob.build(config, lambda text: None)
    weights = AutoModelForCausalLM.from_pretrained(config.model.path).state_dict()  # the same ones for every step
    seconds = []
    with LoopThread(threading.Event()) as loop:
        shell = loop.run(job.open(job.build_scheduler(), _Silent(), lambda: None, print), 60.0)
        for step in range(1, batches + 1):
            started = time.perf_counter()
            loop.run(shell.next_batch(config.groups_per_batch, batches - step), 600.0)
            seconds.append(time.perf_counter() - started)
            job.engine.publish(weights, step)
            loop.do(lambda step=step: (shell.step_advanced(step), shell.weights_updated(step)))  # type: ignore[misc]
        loop.run(shell.close(), 15.0)
        loop.run(job.close(), 30.0)
    tokens = job.engine.sampled_tokens("train")
    job.engine.close()
    return seconds, tokens


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--redundancy", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--slow-share", type=float, default=0.05)
    parser.add_argument("--slow-s", type=float, default=4.0)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_args(arguments)
    seconds: dict[int, list[float]] = {redundancy: [] for redundancy in asked.redundancy}
    tokens = dict.fromkeys(asked.redundancy, 0)
    for number in range(asked.rounds):
        for redundancy in asked.redundancy:
            config = load_config(
                RECIPE,
                [
                    f"environment={{type: {__spec__.name if __spec__ else 'redundancy'}.SlowHousehold, run_in: thread, "
                    f"args: {{slow_share: {asked.slow_share}, slow_s: {asked.slow_s}}}}}",
                    "val_env_manager=null", "val_environment=null", "validation={}",
                    "train_env_manager.group_filter_config={type: no_filter}",
                    f"train_env_manager.group_size_redundancy={redundancy}", f"seed={number}", *asked.overrides,
                ],
            )  # fmt: skip
            assert isinstance(config, AgenticConfig)
            took, sampled = fill_times(config, asked.batches)
            seconds[redundancy] += took
            tokens[redundancy] += sampled
    batches = asked.rounds * asked.batches
    print("| redundancy | fill time, s: mean (least to most) | tokens sampled a batch |\n|---|---|---|")
    for redundancy, took in seconds.items():
        print(f"| {redundancy} | {statistics.mean(took):.1f} ({min(took):.1f} to {max(took):.1f}) | {tokens[redundancy] / batches:,.0f} |")


if __name__ == "__main__":
    main()
