"""How long a batch takes to fill, against a list schedule that knows no scheduler: everything simulated, nothing trained.

    python benchmarks/fill_time.py

64 workers, a batch of 64 groups of 8, lognormal generation times (sigma 1), a third of the groups dropped. The yardstick takes the same
times and the same verdicts by order of launch, gives a free worker the member that has waited for longest, and releases the members of a
replacement at the moment of the verdict that makes it due. A prompt takes 10 ms (a hundredth of a median generation) to draw, which the
yardstick does not pay. The ratio has to be at most 1.05.
"""

from __future__ import annotations

import argparse
import heapq
import logging
from collections import deque
from random import Random
from statistics import mean

from sluice.scheduler import SchedulerConfig
from sluice.scheduler import events as ev
from sluice.sim import Player, Scenario

WORKERS = BATCH = 64
SIZE = 8
SIGMA = 1.0
DROPPED = 1 / 3
DRAW_S = 0.01
MOST = 1.05


class Realised:
    """Generation times and verdicts by order of launch."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._seconds: list[list[float]] = []
        self._dropped: list[bool] = []

    def seconds(self, group: int, member: int) -> float:
        """Of one generation, median 1."""
        self._grow(group)
        return self._seconds[group][member]

    def is_dropped(self, group: int) -> bool:
        """Whether the filter drops it."""
        self._grow(group)
        return self._dropped[group]

    def _grow(self, group: int) -> None:
        while len(self._dropped) <= group:
            self._seconds.append([self._random.lognormvariate(0.0, SIGMA) for _ in range(2 * SIZE)])
            self._dropped.append(self._random.random() < DROPPED)


def list_schedule(realised: Realised) -> float:
    """The yardstick: when the batch is full."""
    waiting = deque((group, member) for group in range(BATCH) for member in range(SIZE))
    missing = dict.fromkeys(range(BATCH), SIZE)
    working: list[tuple[float, int, int]] = []  # when it ends, group, member
    now, idle, kept = 0.0, WORKERS, 0
    while kept < BATCH:
        while idle and waiting:
            group, member = waiting.popleft()
            heapq.heappush(working, (now + realised.seconds(group, member), group, member))
            idle -= 1
        now, group, _ = heapq.heappop(working)
        idle += 1
        missing[group] -= 1
        if not missing[group] and realised.is_dropped(group):
            following = len(missing)
            missing[following] = SIZE
            waiting.extend((following, member) for member in range(SIZE))
        elif not missing[group]:
            kept += 1
    return now


class FillPlayer(Player):
    """One batch, with these times and verdicts."""

    def __init__(self, scenario: Scenario, realised: Realised) -> None:
        super().__init__(scenario, codec=lambda state: state)
        self._realised = realised

    def latency_of(self, launch: ev.LaunchMember) -> float:
        return self._realised.seconds(launch.group_id, launch.member_index)

    def reward_of(self, launch: ev.LaunchMember) -> float:
        return 1.0 if self._realised.is_dropped(launch.group_id) else float(launch.member_index & 1)


def fill_time(seed: int, **settings: int) -> float:
    """The same with the machine."""
    config = SchedulerConfig(group_size=SIZE, seed=seed, max_resample_rounds=1000, **settings)  # type: ignore[arg-type]
    scenario = Scenario(seed=seed, config=config, batch=BATCH, batches=1, workers=WORKERS, tasks=100_000, draw_s=DRAW_S, step_s=0.0)
    player = FillPlayer(scenario, Realised(seed))
    player.run()
    return player.fills_s[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="batches to fill")
    seeds = range(parser.parse_args().seeds)
    logging.disable(logging.WARNING)
    yardsticks = [list_schedule(Realised(seed)) for seed in seeds]
    print(f"{len(seeds)} batches of {BATCH} groups of {SIZE}, {WORKERS} workers, lognormal sigma {SIGMA:g}, {DROPPED:.0%} dropped")
    print(f"list schedule: mean {mean(yardsticks):.2f} medians of a generation")
    worst = 0.0
    for name, settings in (
        ("as it is", {}),
        ("group_size_redundancy 2", {"redundancy": 2}),
        ("16 additional prompts", {"max_additional_running_prompts": 16}),
    ):
        ratios = [fill_time(seed, **settings) / yardstick for seed, yardstick in zip(seeds, yardsticks, strict=True)]
        worst = worst or max(ratios)
        print(f"{name:24} fill time / list schedule: mean {mean(ratios):.4f}  worst {max(ratios):.4f}")
    print(f"at most {MOST}: {'yes' if worst <= MOST else 'NO'}")


if __name__ == "__main__":
    main()
