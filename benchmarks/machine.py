"""Members per second through the scheduler machine with its filters and ledger, on one core, with a null player.

    python benchmarks/machine.py

512 groups of 8 are in flight; every third group has equal rewards and is dropped and replaced. The player answers every launch at once with
a finished rollout (its making is part of the loop and timed apart, as `player`). All times are processor time of this one thread. The
reference is a plain Python loop of dictionary updates, timed in the same run, so that two machines can be compared. Memory is read after a
tenth of the groups and at the end.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections import deque

import numpy as np

from sluice.config.models import FilterConfig, RewardConfig, VerifierConfig
from sluice.filters import build_domain_filters
from sluice.scheduler import Scheduler, SchedulerConfig
from sluice.scheduler import events as ev
from sluice.types import Rollout, Task, Turn

GROUPS = 512
SIZE = 8


def plain_updates_per_second(number: int = 1_000_000) -> float:
    """The reference: increments in a dictionary, a second."""
    counts: dict[int, int] = {}
    started = time.process_time()
    for i in range(number):
        key = i & 1023
        counts[key] = counts.get(key, 0) + 1
    return number / (time.process_time() - started)


def resident_mib() -> float:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=200_000, help="groups to play")
    total_groups = parser.parse_args().groups
    reward = RewardConfig(verifier=VerifierConfig(type="exact"), query_filter_config=FilterConfig(type="std_filter"))
    filters = build_domain_filters({"math": reward}, SIZE)
    scheduler = Scheduler(SchedulerConfig(group_size=SIZE, max_resample_rounds=1_000_000), filters)
    prompt = np.array([5, 6, 7], dtype=np.int64)
    tasks = [Task(task_id=f"math/{i}", domain="math", prompt="", prompt_ids=prompt) for i in range(4096)]
    token_ids, logprobs = np.arange(8), np.zeros(8, dtype=np.float32)

    def turn_of(version: int) -> tuple[Turn, ...]:
        return (
            Turn(
                prompt_ids=prompt, token_ids=token_ids, inference_logprobs=logprobs, text="", finish_reason="stop", policy_version=version
            ),
        )

    turns = turn_of(0)
    pending: deque[ev.LaunchMember] = deque()
    drawn = members = batches = groups = 0
    checkpoints: list[tuple[int, float]] = []
    player_seconds = 0.0

    def play(event: ev.Event) -> None:
        nonlocal drawn, batches, groups
        todo = deque(scheduler.handle(event, 0.0))
        while todo:
            instruction = todo.popleft()
            kind = type(instruction)
            if kind is ev.LaunchMember:
                pending.append(instruction)
            elif kind is ev.DrawTask:
                todo.extendleft(reversed(scheduler.handle(ev.TaskDrawn(task=tasks[drawn & 4095], epoch=0), 0.0)))
                drawn += 1
            elif kind is ev.RecordGroup:
                groups += 1
            elif kind is ev.DeliverBatch:
                batches += 1

    started = time.process_time()
    while groups < total_groups:
        play(ev.BatchWanted(groups=GROUPS))
        wanted = batches + 1
        while batches < wanted:
            launch = pending.popleft()
            group_id = launch.group_id
            before = time.process_time()
            event = ev.MemberFinished(
                rollout=Rollout(
                    attempt_id=launch.attempt_id,
                    group_id=group_id,
                    member_index=launch.member_index,
                    task_id=launch.task.task_id,
                    turns=turns,
                    finish_reason="stop",
                    reward=1.0 if group_id % 3 == 0 else float(launch.member_index & 1),
                )
            )
            player_seconds += time.process_time() - before
            members += 1
            play(event)
        play(ev.StepAdvanced(step=scheduler.step + 1))
        turns = turn_of(scheduler.step)
        if not checkpoints and groups >= total_groups // 10:
            checkpoints.append((groups, resident_mib()))
    seconds = time.process_time() - started
    checkpoints.append((groups, resident_mib()))
    reference = plain_updates_per_second()
    rate = members / (seconds - player_seconds)
    print(f"members {members:,}  groups {groups:,}  batches {batches:,}  seconds {seconds:.2f} (player {player_seconds:.2f})")
    print(f"members/s {members / seconds:,.0f} with the player, {rate:,.0f} in machine, filters and ledger")
    print(f"reference: {reference:,.0f} dictionary updates/s; one member costs {reference / rate:,.0f} of them")
    for count, mib in checkpoints:
        print(f"peak memory after {count:,} groups: {mib:.1f} MiB")
    print(f"ledger: {dict(scheduler.ledger.attempts)}, acceptance rate {scheduler.acceptance_rate:.3f}")


if __name__ == "__main__":
    main()
