"""What `sluice doctor` asks, and how an answer looks: one line each, ok, warning or problem, with what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import typer

from sluice.errors import SluiceError

Status = Literal["ok", "warning", "problem"]

_COLOURS: dict[Status, str] = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "problem": typer.colors.RED}
_NAME_WIDTH = 12
_SHOWN_CHARACTERS = 200  # of a prompt, a response or an observation; enough to see a wrong template


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One answer."""

    name: str  # what was looked at, in a word or two
    status: Status
    detail: str  # what was found; further lines are shown below it
    remedy: str = ""  # what to do; empty when all is well

    def lines(self) -> list[str]:
        """The answer for a person."""
        first, *more = f"{self.detail} - {self.remedy}".splitlines() if self.remedy else self.detail.splitlines() or [""]
        lead = f"{self.status:<8} {self.name:<{_NAME_WIDTH}} "
        return [lead + first, *(" " * len(lead) + line for line in more)]


Question: TypeAlias = Callable[[], Iterator[Check]]
"""What is looked at, when it is called."""


def ok(name: str, detail: str) -> Check:
    """All is well."""
    return Check(name=name, status="ok", detail=detail)


def warning(name: str, detail: str, remedy: str) -> Check:
    """Runs may suffer."""
    return Check(name=name, status="warning", detail=detail, remedy=remedy)


def problem(name: str, detail: str, remedy: str = "") -> Check:
    """A run cannot work. The messages of our own errors hold their remedy."""
    return Check(name=name, status="problem", detail=detail, remedy=remedy)


def ask(name: str, question: Question) -> Iterator[Check]:
    """The answers to a question; whatever goes wrong while asking is an answer too, so that the next question is still asked."""
    try:
        yield from question()
    except SluiceError as err:
        yield problem(name, str(err))
    except Exception as err:  # noqa: BLE001 - a doctor that dies of the illness it looks for is no use
        yield problem(name, f"{type(err).__name__}: {err}")


def short(text: str) -> str:
    """A text on one line, as much of it as shows what it is."""
    shown = repr(text)
    return shown if len(shown) <= _SHOWN_CHARACTERS else shown[: _SHOWN_CHARACTERS - 3] + "..."


def show(check: Check) -> None:
    """Print one answer."""
    first, *more = check.lines()
    coloured = typer.style(first[: len(check.status)], fg=_COLOURS[check.status], bold=check.status != "ok")
    typer.echo(coloured + first[len(check.status) :])
    for line in more:
        typer.echo(line)


def show_all(checks: Iterator[Check]) -> bool:
    """Print answers as they come, then how many there were of each kind. True when there is no problem."""
    counts: dict[Status, int] = {"ok": 0, "warning": 0, "problem": 0}
    for check in checks:
        show(check)
        counts[check.status] += 1
    typer.echo(f"{counts['ok']} ok, {counts['warning']} warnings, {counts['problem']} problems")
    return counts["problem"] == 0
