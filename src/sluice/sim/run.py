"""Runs scenarios by seed, one or many, and makes of a violation the story that repeats it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import process_time
from typing import Any, Final

from sluice.errors import SluiceError
from sluice.records.checkpoints import decode, encode
from sluice.sim.invariants import Violation
from sluice.sim.player import Player
from sluice.sim.scenario import PlayerName, Scenario, draw_scenario

LAST_EVENTS: Final = 30  # lines of the end of the run that a failure shows
LINES_OF_A_GROUP: Final = 60  # at most, of each group that it is about
PLAYERS: Final[tuple[PlayerName, ...]] = ("machine", "shell")


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
    seconds: float = 0.0  # of this process, simulated time apart
    digest: int = 0  # of every record and batch in order: the same for the same run only

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
        )


def simulate(seed: int, player: PlayerName = "machine", *, scenario: Scenario | None = None) -> Simulated:
    """Play one seed to its end. scenario: instead of the one drawn from the seed. Raises `SimulationFailure`."""
    scenario = draw_scenario(seed, player) if scenario is None else scenario
    started = process_time()
    try:
        played = _play(scenario, player, None)
    except Exception as error:  # noqa: BLE001 - whatever breaks in a simulated run is the finding
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


def _through_file(state: Any) -> Any:
    return decode(encode(state))


def _play(scenario: Scenario, player: PlayerName, trace: list[str] | None) -> Any:
    played = Player(scenario, codec=_through_file, trace=trace)
    played.run()
    return played


def _failure(scenario: Scenario, player: PlayerName, error: Exception) -> SimulationFailure:
    """The same run once more, with a trace; then the story."""
    trace: list[str] = []
    try:
        _play(scenario, player, trace)
        repeated = "\nthe same seed ran through when it was repeated: something in it does not depend on the seed alone"
    except Exception as second:  # noqa: BLE001 - it is the same one, unless the run cannot be repeated
        is_same = type(second) is type(error) and str(second) == str(error)
        repeated = "" if is_same else f"\nrepeated, it failed otherwise: {type(second).__name__}: {second}"
    what = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
    groups = error.groups if isinstance(error, Violation) else ()
    stories = []
    for group_id in groups[:3]:
        lines = [line for line in trace if f"group {group_id})" in line or f"group {group_id}," in line]
        stories.append(f"\nstory of group {group_id}:\n" + "\n".join(lines[-LINES_OF_A_GROUP:]))
    return SimulationFailure(
        f"seed {scenario.seed}, player {player}: {what}{repeated}\n"
        f"repeat it with: {replay_command(scenario.seed, player)}\n"
        f"scenario: {scenario}" + "".join(stories) + "\nthe last events:\n" + "\n".join(trace[-LAST_EVENTS:])
    )


def replay_command(seed: int, player: PlayerName) -> str:
    """What to type to see a seed again."""
    return f"sluice simulate --seed {seed} --player {player}"
