"""Runs scenarios by seed, one or many, and makes of a violation the story that repeats it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from time import process_time
from typing import Any, Final

from sluice.errors import SluiceError
from sluice.records.checkpoints import decode, encode
from sluice.sim.player import Player
from sluice.sim.scenario import PlayerName, Scenario, draw_scenario
from sluice.sim.shell_player import ShellPlayer
from sluice.sim.violation import Violation

LAST_EVENTS: Final = 30  # lines of the end of the run that a failure shows
MOST_GROUPS: Final = 3  # whose stories it shows
MOST_LETTERS: Final = 2000  # of what broke
LINES_OF_A_GROUP: Final = 60  # at most, of each of them
SEEDS_AT_ONCE: Final = 20  # that one process is given: few enough to show how it goes, and to keep both of two processes busy


class SimulationFailure(SluiceError, AssertionError):
    """An invariant broke. The message holds the command that repeats it, the scenario and the story; please report it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What one run, or many together, came to."""

    runs: int = 0
    lifecycles: int = 0  # groups that were launched and left
    members: int = 0  # attempts
    events: int = 0  # told to the machine
    batches: int = 0
    faults: Counter[str] = field(default_factory=Counter)  # by kind
    seconds: float = 0.0  # processor time; simulated time is another matter
    digest: int = 0  # of every record and batch in order: the same for the same runs only
    failures: tuple[str, ...] = ()  # messages of runs that failed

    def __add__(self, other: Simulated) -> Simulated:
        return Simulated(
            runs=self.runs + other.runs,
            lifecycles=self.lifecycles + other.lifecycles,
            members=self.members + other.members,
            events=self.events + other.events,
            batches=self.batches + other.batches,
            faults=self.faults + other.faults,
            seconds=self.seconds + other.seconds,
            digest=hash((self.digest, other.digest)),
            failures=(*self.failures, *other.failures),
        )


def simulate(seed: int, player: PlayerName = "machine", *, scenario: Scenario | None = None) -> Simulated:
    """Play one seed to its end. scenario: instead of the one drawn from the seed. Raises `SimulationFailure`."""
    scenario = draw_scenario(seed, player) if scenario is None else scenario
    started = process_time()
    try:
        played = _play(scenario, player, None)
    except Exception as error:  # whatever breaks in a simulated run is the finding
        raise _failure(scenario, player, error) from error
    check = played.check
    return Simulated(
        runs=1,
        lifecycles=len(check.recorded),
        members=check.attempts,
        events=played.events,
        batches=check.batches,
        faults=played.faults.counts,
        seconds=process_time() - started,
        digest=check.digest,
    )


def simulate_many(seeds: Sequence[int], player: PlayerName = "machine", *, workers: int = 1) -> Iterator[Simulated]:
    """Play many seeds, and tell of each bunch of them as it is done, in order. Failures are in what is told, and end nothing.

    workers: processes; 1: this one.
    """
    bunches = [(seeds[start : start + SEEDS_AT_ONCE], player) for start in range(0, len(seeds), SEEDS_AT_ONCE)]
    workers = min(workers, len(bunches))
    if workers == 1:
        yield from map(_simulate_bunch, bunches)
        return
    level = logging.getLogger("sluice").level
    with ProcessPoolExecutor(workers, get_context("forkserver"), initializer=_log_from, initargs=(level,)) as pool:
        yield from pool.map(_simulate_bunch, bunches)


def _log_from(level: int) -> None:
    """In a worker: as quiet as the process that started it."""
    logging.getLogger("sluice").setLevel(level)


def _simulate_bunch(bunch: tuple[Sequence[int], PlayerName]) -> Simulated:
    seeds, player = bunch
    total = Simulated()
    for seed in seeds:
        try:
            total += simulate(seed, player)
        except SimulationFailure as failure:
            total += Simulated(runs=1, failures=(str(failure),))
    return total


def replay_command(seed: int, player: PlayerName) -> str:
    """What to type to see a seed again."""
    return f"sluice simulate --seed {seed} --player {player}"


def _play(scenario: Scenario, player: PlayerName, trace: list[str] | None) -> Player | ShellPlayer:
    kinds: dict[PlayerName, Callable[..., Player | ShellPlayer]] = {"machine": Player, "shell": ShellPlayer}
    played = kinds[player](scenario, codec=_through_file, trace=trace)
    played.run()
    return played


def _through_file(state: Any) -> Any:
    return decode(encode(state))


def _failure(scenario: Scenario, player: PlayerName, error: Exception) -> SimulationFailure:
    """The same run once more, with a trace; then the story."""
    trace: list[str] = []
    repeated = "it ran through when it was repeated: something in it does not depend on the seed alone\n"
    try:
        _play(scenario, player, trace)
    except Exception as second:  # noqa: BLE001 - it is the same one, unless the run cannot be repeated
        is_same = type(second) is type(error) and str(second) == str(error)
        repeated = "" if is_same else f"repeated, it failed otherwise: {type(second).__name__}: {second}\n"
    what = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
    groups = error.groups if isinstance(error, Violation) else ()
    stories = [f"\nstory of group {group_id}:\n" + "\n".join(_lines_of(group_id, trace)) for group_id in groups[:MOST_GROUPS]]
    return SimulationFailure(
        f"seed {scenario.seed}, player {player}: {' '.join(what.split())[:MOST_LETTERS]}\n"
        f"repeat it with: {replay_command(scenario.seed, player)}\n{repeated}"
        f"scenario: {scenario}{''.join(stories)}\nthe last events:\n" + "\n".join(trace[-LAST_EVENTS:])
    )


def _lines_of(group_id: int, trace: list[str]) -> list[str]:
    """The lines about one group; attempts that are told of by their number alone are among them."""
    names = [f"group {group_id})", f"group {group_id},"]
    lines: list[str] = []
    for line in trace:
        if any(name in line for name in names):
            lines.append(line)
            if "< LaunchMember attempt " in line:
                attempt_id = line.split("LaunchMember attempt ")[1].split(" ")[0]
                names += [f"attempt {attempt_id}:", f"attempt_id={attempt_id},", f"attempt_id={attempt_id})"]
    return lines[-LINES_OF_A_GROUP:]
