"""Members per second through the asynchronous shell with machine, filters, ledger and journal, with a null engine and a null scorer.

    python benchmarks/shell.py

512 groups of 8 are in flight; every third group has equal rewards and is dropped and replaced; every group that leaves is written to
run.db. Wall-clock seconds, and processor seconds of the process (the journal's writer thread included). The reference is a plain Python
loop of dictionary updates in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np
from machine import GROUPS, SIZE, plain_updates_per_second, resident_mib

from sluice.config.models import FilterConfig, RewardConfig, VerifierConfig
from sluice.execution import LocalShell
from sluice.filters import build_domain_filters
from sluice.generation import NullEngine, answers
from sluice.pipeline.collector import calm_garbage_collector
from sluice.records import Journal, RunFolder
from sluice.rewards import Score
from sluice.scheduler import Scheduler, SchedulerConfig
from sluice.types import Task

SCORES = (Score(reward=0.0), Score(reward=1.0))


class NullScorer:
    """Rewards by turns, and only ones for every third task."""

    def __init__(self) -> None:
        self.calls = 0

    async def score(self, task: Task, response: str) -> Score:
        """At once."""
        self.calls += 1
        return SCORES[1] if task.difficulty == 0.0 else SCORES[self.calls & 1]

    async def close(self) -> None:
        """Nothing to close."""

    def metrics(self) -> dict[str, float]:
        """None."""
        return {}


class NullSource:
    """Tasks from a ring."""

    def __init__(self) -> None:
        prompt = np.array([5, 6, 7], dtype=np.int64)
        self.tasks = [Task(task_id=f"math/{i}", domain="math", prompt="", prompt_ids=prompt, difficulty=float(i % 3)) for i in range(4098)]
        self.drawn = 0

    def draw(self, domain: str | None = None) -> tuple[Task, int]:
        """The next one."""
        self.drawn += 1
        return self.tasks[self.drawn % 4098], 0

    def put_back(self, task_id: str, epoch: int) -> None:
        """Never asked for here."""


async def play(total_groups: int, journal: Journal) -> tuple[int, float, float, LocalShell]:
    """Fill batches until so many groups have left; members, wall-clock and processor seconds."""
    reward = RewardConfig(verifier=VerifierConfig(type="exact"), query_filter_config=FilterConfig(type="std_filter"))
    shell = LocalShell(
        scheduler=Scheduler(SchedulerConfig(group_size=SIZE, max_resample_rounds=1_000_000), build_domain_filters({"math": reward}, SIZE)),
        source=NullSource(),
        engine=NullEngine(answers(lengths=(8, 8))),
        scorer=NullScorer(),
        journal=journal,
        decode=lambda token_ids: "",
        response_length=8,
        temperature=1.0,
    )
    wall, cpu, step = time.perf_counter(), time.process_time(), 0
    while shell.scheduler.ledger.groups_launched < total_groups:
        await shell.next_batch(GROUPS)
        step += 1
        shell.engine.publish({}, step)
        shell.step_advanced(step)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    await shell.close()
    return shell.scheduler.ledger.attempts_launched, wall, cpu, shell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=40_000, help="groups to play")
    groups = parser.parse_args().groups
    with tempfile.TemporaryDirectory() as root, RunFolder.create(Path(root), "shell", 0, "{}") as folder:
        journal = Journal(folder.run_db)
        with calm_garbage_collector():  # as every run does
            members, wall, cpu, shell = asyncio.run(play(groups, journal))
        journal.close("finished")
    reference = plain_updates_per_second()
    print(f"members {members:,}  wall {wall:.2f} s  processor {cpu:.2f} s  peak memory {resident_mib():.0f} MiB")
    print(f"members/s {members / wall:,.0f} by the clock, {members / cpu:,.0f} by processor time")
    print(f"of this: machine, filters, ledger {shell.machine_seconds:.2f} s, handing over to the journal {shell.journal_seconds:.2f} s")
    print(f"reference: {reference:,.0f} dictionary updates/s; one member costs {reference * cpu / members:,.0f} of them")
    ledger = shell.scheduler.ledger
    assert ledger.total_tokens == shell.engine.sampled_tokens("train"), "ledger and engine disagree"
    print(f"ledger equals the engine's count: {ledger.total_tokens:,} tokens")


if __name__ == "__main__":
    main()
