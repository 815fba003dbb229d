"""Plays groups of household games with one policy, without training it, and records every group as `sluice train --record` does.

    python benchmarks/record_household.py OUT --policy recipes/agentic_household/policy --groups 400 --temperature 1.0

The games are those of `--seed`: two policies with one seed play the same games. By default they are of the task types that take several
stages, and last 40 steps, so that most successes come after step 10. Further settings of the recipe may be given as KEY=VALUE. What is
printed says what the groups are like: how they end, where the steps go, and when successes come.
"""

from __future__ import annotations

import argparse
import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from sluice.config import AgenticConfig, load_config
from sluice.pipeline.agentic import AgenticJob
from sluice.pipeline.loop_thread import LoopThread
from sluice.records import RecordedGroup, RolloutRecorder, read_rollouts
from sluice.scheduler.events import GroupRecord

RECIPE = Path("recipes/agentic_household.yaml")
SHIPPED = Path("recipes/agentic_household/policy")
STAGED = [
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
]


class _Silent:
    """A journal that keeps nothing."""

    def group(self, record: GroupRecord) -> None:
        pass

    def event(self, level: str, message: str) -> None:
        print(f"{level}: {message}")


def record(config: AgenticConfig, out: Path, facts: dict[str, object]) -> None:
    """Play one batch and write the part files."""
    job = AgenticJob.build(config, lambda text: None)
    recorder = RolloutRecorder(out, facts)
    try:
        with LoopThread(threading.Event()) as loop:
            shell = loop.run(job.open(job.build_scheduler(), _Silent(), lambda: None, print, recorder), 60.0)
            loop.run(shell.next_batch(job.groups_per_batch, 0), 100_000.0)
            loop.do(lambda: shell.step_advanced(1))  # they leave, and are written down
            loop.run(shell.close(), 15.0)
            loop.run(job.close(), 15.0)
    finally:
        recorder.close()
        job.engine.close()


def describe(groups: Iterable[RecordedGroup], k: int = 10) -> str:
    """How groups end, where the steps go, and when successes come."""
    kinds: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    successes, ends = [], []
    for group in groups:
        lengths = [member.env_steps for member in group.members]
        is_mixed = len({*group.rewards.tolist()}) > 1
        kind = "mixed" if is_mixed else "all succeed" if group.rewards[0] > 0 else "all fail"
        kinds[kind] += 1
        steps[kind] += sum(lengths)
        successes += [length for length, reward in zip(lengths, group.rewards, strict=True) if reward > 0]
        if kind == "all succeed":
            ends.append(max(lengths))

    def of(counts: Counter[str]) -> str:
        return ", ".join(f"{kind} {100 * n / counts.total():.1f} %" for kind, n in sorted(counts.items()))

    lines = [f"{kinds.total()} groups: {of(kinds)}", f"{steps.total()} environment steps: {of(steps)}"]
    if successes:
        late = 100 * np.mean(np.array(successes) > k)
        quarters = ", ".join(f"{step:.0f}" for step in np.quantile(successes, [0.25, 0.5, 0.75]))
        lines.append(f"{len(successes)} successes, {late:.0f} % of them after step {k}; quartiles at steps {quarters}")
    if ends:
        late = 100 * np.mean(np.array(ends) > k)
        lines.append(f"groups that all succeed end at step {np.median(ends):.0f} (median), {late:.0f} % of them after step {k}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record and describe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the part files; it must not hold any")
    parser.add_argument("--policy", type=Path, default=SHIPPED, help="folder of a model with its tokenizer")
    parser.add_argument("--groups", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--size", default="small")
    parser.add_argument("--split", default="train")
    parser.add_argument("--task-types", nargs="+", default=STAGED)
    parser.add_argument("--horizon", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_intermixed_args(arguments)
    if any(asked.out.glob("part-*")):
        parser.error(f"{asked.out} must hold no recording yet - delete it or name another folder")
    torch.set_num_threads(asked.threads)
    overrides = [
        f"model.path={asked.policy.resolve()}", f"seed={asked.seed}", f"rollout_batch_size={8 * asked.groups}",
        f"train_env_manager.num_env_groups={asked.groups}", "train_env_manager.group_filter_config={type: no_filter}",
        f"environment.args={{split: {asked.split}, size: {asked.size}, max_steps: {asked.horizon}}}",
        f"environment.args.task_types=[{', '.join(asked.task_types)}]",
        f"engine.temperature={asked.temperature}", f"engine.torch_threads={asked.threads}", "sequence_length=2048", *asked.overrides,
    ]  # fmt: skip
    config = load_config(RECIPE, overrides)
    assert isinstance(config, AgenticConfig)
    facts = {"identity": os.urandom(8).hex(), "exp_name": "record_household", "seed": asked.seed, "group_size": 8}
    facts |= {"policy": str(asked.policy), "temperature": asked.temperature, "size": asked.size, "split": asked.split}
    record(config, asked.out, facts | {"horizon": asked.horizon})
    print(describe(read_rollouts(asked.out)))


if __name__ == "__main__":
    main()
