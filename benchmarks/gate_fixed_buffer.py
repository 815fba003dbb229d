"""What the gate changes in training on a fixed buffer of groups: time of a step, trained rows, gradient norm.

    python benchmarks/record_household.py runs/buffer --groups 80
    python benchmarks/gate_fixed_buffer.py runs/buffer [--k 10] [--threshold 0.12] [--signal NAME] [--per-step 4] [--steps 20]

The second experiment of arXiv 2605.05802 at the scale of the household recipe. The same recorded groups, in the same order, train the
policy that sampled them, 4 groups a step, three times: all of them; without those that the gate would have cut, which are not replaced,
so that batches are smaller; and with replacement, where later groups of the buffer fill up every batch (and the buffer ends earlier). The
decision is taken once from the recorded actions, never from the rewards of a cut group. No filter: groups with equal rewards train with
advantage 0 where the gate left them in, which is what dilutes the gradient.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from sluice.config import load_config
from sluice.gate import Gate
from sluice.records import RecordedGroup, read_rollouts
from sluice.trainer.trl import build_trainer
from sluice.types import Batch

RECIPE = Path("recipes/agentic_household.yaml")


class Buffer:
    """A `BatchSource`: so many groups of an iterator at a time; a batch may lack those that are None. And a `Publisher` for nobody."""

    def __init__(self, groups: Iterator[RecordedGroup | None], per_step: int) -> None:
        self._groups, self._per_step, self._step = groups, per_step, 0

    def next_batch(self) -> Batch | None:
        """The next of them; a batch without any group is passed over, as a step would be."""
        while taken := [*islice(self._groups, self._per_step)]:
            if len(taken) < self._per_step:
                return None  # the rest of the buffer is no whole batch
            if kept := [group.as_group() for group in taken if group is not None]:
                self._step += 1
                return Batch(step=self._step, groups=tuple(kept), requested=self._per_step)
        return None

    def publish(self, state: Mapping[str, Any], version: int) -> None:
        """Nobody samples."""


def cuts(gate: Gate, group: RecordedGroup) -> bool:
    """Whether the gate would have cut it in mid-trajectory."""
    actions = [[turn.action for turn in member.turns if turn.action is not None] for member in group.members]
    if all(len(taken) < gate.k for taken in actions):
        return False
    ended = [float(reward) if len(taken) < gate.k else None for taken, reward in zip(actions, group.rewards.tolist(), strict=True)]
    verdict = gate.decide(actions, rewards=ended)
    return verdict is not None and not verdict.keep


def train(source: Buffer, policy: str, steps: int, overrides: Sequence[str]) -> list[Mapping[str, float]]:
    """Metrics of every step."""
    config = load_config(
        RECIPE,
        [
            f"model.path={policy}",
            f"trainer.max_steps={steps}",
            "trainer.save_every_steps=null",
            "trainer.logprob_tolerance=1000",
            *overrides,
        ],
    )
    told: list[Mapping[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(
            config, longest_completion=config.sequence_length, model_path=policy, output_dir=Path(folder), source=source, publisher=source,
            on_step=lambda step, metrics: told.append(metrics),
        )  # fmt: skip
        trainer.train()
    return told


def main(arguments: Sequence[str] | None = None) -> None:
    """Train three times, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--policy", type=Path, default=Path("recipes/agentic_household/policy"), help="the one that sampled it")
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--threshold", type=float, default=0.12)
    parser.add_argument("--signal", default="prefix_edit_distance_mean")
    parser.add_argument("--per-step", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_intermixed_args(arguments)
    gate = Gate(k=asked.k, threshold=asked.threshold, signal=asked.signal)
    groups = [*islice(iter(read_rollouts(asked.recording)), asked.per_step * asked.steps)]
    cut = {group.group_id for group in groups if cuts(gate, group)}
    right = sum(group.group_id in cut and len({*group.rewards.tolist()}) == 1 for group in groups)
    flat = sum(len({*group.rewards.tolist()}) == 1 for group in groups)
    print(f"{len(groups)} groups, {flat} with equal rewards; {len(cut)} cut, {right} of them rightly\n")
    arms: dict[str, Iterator[RecordedGroup | None]] = {
        "no gate": iter(groups),
        "cut, not replaced": (None if group.group_id in cut else group for group in groups),
        "cut and replaced": (group for group in groups if group.group_id not in cut),
    }
    found = {}
    for name, arm in arms.items():
        told = train(Buffer(arm, asked.per_step), str(asked.policy.resolve()), asked.steps, asked.overrides)
        mean = lambda key, told=told: statistics.mean(one[key] for one in told)  # type: ignore[misc]  # noqa: E731
        found[name] = {
            "steps": float(len(told)),
            "rows a step": mean("batch/rollouts"),
            "zero-advantage rows, %": 100 * mean("batch/zero_advantage_share"),
            "gradient norm": mean("actor/grad_norm"),
            "seconds a step": mean("actor/step_seconds"),
            "seconds, all steps": sum(one["actor/step_seconds"] for one in told),
        }
    print("| | " + " | ".join(found) + " |\n|---|" + "---|" * len(found))
    first = next(iter(found.values()))
    for key in first:
        cells = [
            f"{row[key]:.4g}" + (f" ({100 * (row[key] / first[key] - 1):+.1f} %)" if row is not first and first[key] else "")
            for row in found.values()
        ]
        print(f"| {key} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
