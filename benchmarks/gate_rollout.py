"""What the gate saves in rollouts alone: the same policy, games and seeds without it, with it, and with replacement.

    python benchmarks/gate_rollout.py [--groups 96] [--rounds 2] [--gate "{futility: {steps: 6}}"] [KEY=VALUE ...]

The first experiment of arXiv 2605.05802 at the scale of the household recipe. Nothing is trained or filtered. The three take turns; round
after round has games of its own. What is right is judged by the matched arm without a gate, never by a cut group's own rewards: a cut is
right when the same group, played to its end there, has equal rewards; a member's reward is right when the same member has it there.
(What is sampled depends on seeds alone, up to the rounding of float32 in batches of another size.) Seconds are those of this process's
processors, and of the clock.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sluice.config import AgenticConfig, load_config
from sluice.pipeline.agentic import AgenticJob
from sluice.pipeline.loop_thread import LoopThread
from sluice.scheduler.events import GroupRecord

RECIPE = Path("recipes/agentic_household.yaml")
GATE = "{k: 15, threshold: 0.2, signal: obs_unique_ratio, futility: {steps: 6}}"


class Kept:
    """A journal that keeps the records of groups."""

    def __init__(self) -> None:
        self.records: list[GroupRecord] = []

    def group(self, record: GroupRecord) -> None:
        """One that left."""
        self.records.append(record)

    def event(self, level: str, message: str) -> None:
        """What a person should know."""
        print(f"{level}: {message}")


@dataclass(kw_only=True)
class Arm:
    """All rounds of one setting."""

    settings: Sequence[str]
    groups: dict[tuple[int, str], GroupRecord] = field(default_factory=dict)  # (round, task) -> how it left
    tokens: int = 0
    cpu: float = 0.0
    wall: float = 0.0

    def play(self, number: int, groups: int, overrides: Sequence[str]) -> None:
        """One round: one batch, which the machine fills with so many groups."""
        config = load_config(
            RECIPE,
            [
                f"seed={number}", f"rollout_batch_size={8 * groups}", f"train_env_manager.num_env_groups={groups}",
                "train_env_manager.group_filter_config={type: no_filter}", "val_env_manager=null", "val_environment=null", "validation={}",
                *self.settings, *overrides,
            ],
        )  # fmt: skip
        assert isinstance(config, AgenticConfig)
        job, journal = AgenticJob.build(config, lambda text: None), Kept()
        with LoopThread(threading.Event()) as loop:
            shell = loop.run(job.open(job.build_scheduler(), journal, lambda: None, print), 60.0)
            cpu, wall = time.process_time(), time.perf_counter()
            loop.run(shell.next_batch(job.groups_per_batch, 0), 100_000.0)
            self.cpu, self.wall = self.cpu + time.process_time() - cpu, self.wall + time.perf_counter() - wall
            loop.do(lambda: shell.step_advanced(1))
            loop.run(shell.close(), 15.0)
            loop.run(job.close(), 15.0)
        self.groups |= {(number, record.task_id): record for record in journal.records}
        self.tokens += job.engine.sampled_tokens("train")
        job.engine.close()

    def figures(self, matched: Mapping[tuple[int, str], GroupRecord]) -> dict[str, float]:
        """What is shown of it; `matched`: the groups of the arm without a gate."""
        cut = [(matched.get(name), record) for name, record in self.groups.items() if record.outcome == "cut"]
        whole = [(matched.get(name), record) for name, record in self.groups.items() if record.outcome == "trained"]
        judged = [pair[0] for pair in cut if pair[0] is not None]
        pairs = [
            (ours, theirs)
            for there, record in whole if there is not None
            for ours, theirs in zip(record.rewards, there.rewards, strict=True)
        ]  # fmt: skip
        useful = sum(len({*record.rewards}) > 1 for _, record in whole)
        env_steps = sum(record.env_steps for record in self.groups.values())
        return {
            "groups launched": len(self.groups),
            "whole groups": len(whole),
            "of them with different rewards": useful,
            "cut": len(cut),
            "cuts with a matched group": len(judged),
            "of them right by it": sum(len({*one.rewards}) == 1 for one in judged),
            "members of whole groups with a match": len(pairs),
            "of them with the reward of the match, %": 100 * sum(a == b for a, b in pairs) / max(1, len(pairs)),
            "environment steps": env_steps,
            "tokens": self.tokens,
            "environment steps per group with different rewards": env_steps / max(1, useful),
            "tokens per group with different rewards": self.tokens / max(1, useful),
            "processor seconds": self.cpu,
            "seconds": self.wall,
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Play, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--gate", default=GATE)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_intermixed_args(arguments)
    gate = f"gate={asked.gate}"
    arms = {
        "no gate": Arm(settings=[]),
        "gate, not replaced": Arm(settings=[gate, "gate.on_cut=drop"]),
        "gate, replaced": Arm(settings=[gate, "gate.on_cut=replace"]),
    }
    for number in range(asked.rounds):
        for arm in arms.values():
            arm.play(number, asked.groups, asked.overrides)
    matched = arms["no gate"].groups
    found = {name: arm.figures(matched) for name, arm in arms.items()}
    print("| | " + " | ".join(found) + " |\n|---|" + "---|" * len(found))
    first = found["no gate"]
    relative = {key for key in first if key.startswith(("environment steps", "tokens", "processor", "seconds"))}
    for key in first:
        cells = [
            f"{row[key]:,.{1 if '%' in key or 'per' in key else 0}f}"
            + (f" ({100 * (row[key] / first[key] - 1):+.1f} %)" if row is not first and key in relative else "")
            for row in found.values()
        ]
        print(f"| {key} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
