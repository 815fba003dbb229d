"""Group lifecycles per second through the simulator, on one core: the real machine, filters, guard and ledger, invariants on.

    python benchmarks/simulation.py

The scenarios are those of `sluice simulate`: all settings, with faults, mostly small groups. All times are processor time of this one
thread. How much of it is the machine's (with filters and ledger) is measured in a second pass, in which a clock is read around every call.
The reference is a plain Python loop of dictionary updates, timed in the same run, so that two machines can be compared.
"""

from __future__ import annotations

import argparse
import logging
import time

from sluice.scheduler import Scheduler
from sluice.scheduler import events as ev
from sluice.sim import PlayerName, Simulated, simulate


def plain_updates_per_second(number: int = 1_000_000) -> float:
    """The reference: increments in a dictionary, a second."""
    counts: dict[int, int] = {}
    started = time.process_time()
    for i in range(number):
        key = i & 1023
        counts[key] = counts.get(key, 0) + 1
    return number / (time.process_time() - started)


class Timed:
    """Processor time inside `Scheduler.handle`, while it is entered."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._handle = Scheduler.handle

    def __enter__(self) -> Timed:
        handle, clock = self._handle, time.thread_time

        def timed(scheduler: Scheduler, event: ev.Event, now: float) -> list[ev.Instruction]:
            started = clock()
            out = handle(scheduler, event, now)
            self.seconds += clock() - started
            return out

        Scheduler.handle = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Scheduler.handle = self._handle  # type: ignore[method-assign]


def played(first: int, seeds: int, player: PlayerName) -> Simulated:
    """All runs together."""
    total = Simulated()
    for seed in range(first, first + seeds):
        total += simulate(seed, player)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=400, help="scenarios to play")
    parser.add_argument("--first", type=int, default=20_000, help="the first seed")
    parser.add_argument("--player", choices=["machine", "shell"], default="machine")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # what filters tell their user
    played(arguments.first, 20, arguments.player)  # imports and caches
    total = played(arguments.first, arguments.seeds, arguments.player)
    with Timed() as timed:
        again = played(arguments.first, arguments.seeds, arguments.player)
    assert again.digest == total.digest, "the same seeds gave other runs"
    seconds, reference = total.seconds, plain_updates_per_second()
    print(f"runs {total.runs:,}  lifecycles {total.lifecycles:,}  members {total.members:,}  events {total.events:,}")
    rate = total.lifecycles / seconds
    print(f"lifecycles/s {rate:,.0f}  members/s {total.members / seconds:,.0f}  events/s {total.events / seconds:,.0f}")
    print(f"machine {timed.seconds / again.seconds:.0%} of the time (the clock's own calls included)")
    print(f"reference: {reference:,.0f} dictionary updates/s; one lifecycle costs {reference / rate:,.0f} of them")


if __name__ == "__main__":
    main()
