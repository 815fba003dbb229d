"""`sluice simulate`: many simulated runs, what they came to, and the story of each that broke what must hold."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from sluice.cli.reporting import FAILED, reported, unless_nobody_reads

if TYPE_CHECKING:
    from sluice.sim import PlayerName, Simulated

SHOWN_FAILURES: Final = 3  # in full; of the others the command that repeats them


def simulate(
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many seeds to play.")] = 200,
    first: Annotated[int, typer.Option("--first", min=0, help="The first of them.")] = 0,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Play this one alone.", show_default=False)] = None,
    player: Annotated[
        Literal["machine", "shell", "both"],
        typer.Option("--player", help="The bare scheduler (fast), the asynchronous shell around it, or one after the other."),
    ] = "machine",
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes to share the work.")] = 1,
) -> None:
    """Play simulated runs with random settings, data and faults, and check after every event that nothing is lost, doubled or stuck.

    A seed is one run, the same one every time. What breaks is shown with its story and with the command that repeats it.

    Example: `sluice simulate --seeds 1000 --player both --workers 2`

    Exit codes: 0 everything held, 1 something did not.
    """
    with reported():
        chosen = range(first, first + seeds) if seed is None else range(seed, seed + 1)
        players: tuple[PlayerName, ...] = ("machine", "shell") if player == "both" else (player,)
        is_well = True
        with unless_nobody_reads(), _only_errors():
            is_well = _play(chosen, players, workers)
        if not is_well:
            raise typer.Exit(FAILED)


@contextmanager
def _only_errors() -> Iterator[None]:
    """Without what filters tell the user of a real run. What is logged afterwards is as it was."""
    logger = logging.getLogger("sluice")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _play(seeds: Sequence[int], players: Sequence[PlayerName], workers: int) -> bool:
    """Whether everything held."""
    from sluice.sim import Simulated, simulate_many

    started = time.perf_counter()
    total = Simulated()
    shown = 0
    for player in players:
        of_player = Simulated()
        for done in simulate_many(seeds, player, workers=workers):
            of_player += done
            for failure in done.failures[: SHOWN_FAILURES - shown]:
                shown += 1
                typer.echo(f"{failure}\n")
        _tell(player, of_player)
        total += of_player
    _tell_all(total, time.perf_counter() - started)
    return not total.failures


def _tell(player: PlayerName, total: Simulated) -> None:
    rate = total.lifecycles / total.seconds if total.seconds else 0.0
    typer.echo(
        f"{player}: {total.runs:,} runs, {total.batches:,} batches, {total.lifecycles:,} group lifecycles, {total.members:,} attempts, "
        f"{total.events:,} events; {rate:,.0f} lifecycles per second of processor time"
    )


def _tell_all(total: Simulated, seconds: float) -> None:
    faults = [f"{kind} {count:,}" for kind, count in sorted(total.faults.items())]
    typer.echo(f"faults: {', '.join(faults) or 'none'}")
    typer.echo(f"violations: {len(total.failures)} ({seconds:.1f} s)")
    for failure in total.failures:
        what, command, *_ = failure.splitlines()
        typer.echo(f"  {what}\n    {command}")
