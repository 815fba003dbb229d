"""How a `GateReport` looks in a terminal; the same tables as plain text for the page."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sluice.analysis.curves import Point
from sluice.analysis.fit import Fit
from sluice.analysis.intervals import Interval
from sluice.analysis.report_files import recipe_lines
from sluice.analysis.sweep import GateReport

WIDTH: Final = 170
"""Columns where there is no terminal to ask."""

FEW_KS: Final = 3
"""K of which all signals are shown; there are files for the others."""


def print_report(report: GateReport, written: Sequence[Path]) -> None:
    """Print everything to the terminal."""
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    recorded = report.recorded
    zero = int(recorded.zero_variance.sum())
    size = f" of {recorded.group_size}" if recorded.group_size else ""
    outcomes = ", ".join(f"{number} {outcome}" for outcome, number in report.outcomes.items())
    console.print(f"[bold]{len(recorded)} groups{size}[/], horizon {recorded.horizon}: {zero} with equal rewards ({outcomes})")
    for note in report.notes:
        console.print(f"  {escape(note)}", style="dim")
    for title, table in _tables(report):
        console.print(f"\n[bold]{escape(title)}[/]")
        console.print(table)
    if report.fit is not None:
        _print_choice(console, report.fit)
    for warning in report.warnings:
        console.print(f"[bold yellow]warning:[/] {escape(warning)}")
    console.print("\nWritten")
    for path in written:
        console.print(f"  {escape(str(path))}", soft_wrap=True)
    if report.fit is not None and report.point is not None:
        console.print("\nFor the recipe:\n")
        console.print(escape(recipe_lines(report.point)), end="", soft_wrap=True)


def as_text(report: GateReport) -> list[tuple[str, str]]:
    """Titles and tables as plain text."""
    found = []
    for title, table in _tables(report):
        console = Console(file=io.StringIO(), width=WIDTH, color_system=None, highlight=False)
        console.print(table)
        assert isinstance(console.file, io.StringIO)
        found.append((title, console.file.getvalue()))
    return found


# ---------------------------------------------------------------- tables


def _tables(report: GateReport) -> Iterator[tuple[str, Table]]:
    point = report.point
    yield from _knowledge(report)
    floor = _percent(report.settings.precision_floor)
    best = _best_of_signals(report)
    if best:
        yield f"Best of every signal with a precision of at least {floor}, on all groups", _points(best)
    if report.asked:
        yield "The given thresholds", _points(report.asked)
    if report.fit is not None:
        yield "Floors that were tried: the rule chosen with each, and how such rules do on held-out groups", _ladder(report.fit)
        yield "Held out once more: what the whole procedure chose without each fold", _folds(report.fit)
    if point is None:
        return
    yield f"The rule: {point.rule}", _intervals(report, point)
    yield f"Other thresholds of {point.signal} at K = {point.k}", _points(report.thresholds, chosen=point)
    yield f"References at K = {point.k}", _arms(report)
    if report.task_types:
        yield "The rule by task type", _task_types(report)
    if report.transfers:
        yield "The rule on smaller groups (members left away by lot)", _transfers(report)


def _knowledge(report: GateReport) -> Iterator[tuple[str, Table]]:
    ks = report.recorded.ks
    shown = {*ks} if len(ks) <= FEW_KS else {ks[(i + 1) * len(ks) // (FEW_KS + 1)] for i in range(FEW_KS)}
    shown |= {report.point.k} if report.point is not None else set()
    table = _table("signal", "K", "Spearman", f"{report.settings.confidence:.0%} interval", "AUROC", "interval")
    for one in report.correlations:
        if one.k in shown:
            table.add_row(
                one.signal,
                str(one.k),
                _number(one.spearman),
                _interval(one.spearman_interval, _number),
                _number(one.auroc),
                _interval(one.auroc_interval, _number),
            )
    yield "What every signal knows of the outcome" + ("" if len(ks) == len(shown) else f" ({len(shown)} of {len(ks)} K)"), table


def _best_of_signals(report: GateReport) -> list[Point]:
    best: dict[str, Point] = {}
    for point in report.best:
        if point is not None and (point.signal not in best or point.saving > best[point.signal].saving):
            best[point.signal] = point
    return [*best.values()]


def _points(points: Sequence[Point], chosen: Point | None = None) -> Table:
    has_steps = any(point.safe_step_saving is not None for point in points)
    steps = ("safe, steps", "raw, steps") if has_steps else ()
    table = _table(
        "signal", "K", "threshold", "cut", "right", "wrong", "left alone", "precision", "recall", "safe", "raw", *steps, "L2 kept"
    )
    for point in points:
        savings = [point.safe_saving, point.raw_saving, *((point.safe_step_saving, point.raw_step_saving) if has_steps else ())]
        table.add_row(
            point.signal,
            str(point.k),
            f"{point.threshold:g}",
            *(str(count) for count in (point.cut, point.true_cuts, point.false_cuts, point.left_alone)),
            _number(point.precision),
            _number(point.recall),
            *map(_percent, savings),
            _percent(point.advantage_kept),
            style="bold" if point == chosen else None,
        )
    return table


def _intervals(report: GateReport, point: Point) -> Table:
    table = _table("", "on these groups", f"{report.settings.confidence:.0%} interval")
    table.add_row("cut", f"{point.cut} of {point.groups} ({point.decided} decided on)", "")
    table.add_row("right", f"{point.true_cuts} of {point.zero_variance} with equal rewards", "")
    table.add_row("precision", _number(point.precision), _interval(report.precision_exact, _number) + " exact")
    rows = (
        ("recall", point.recall, _number),
        ("safe_saving", point.safe_saving, _percent),
        ("raw_saving", point.raw_saving, _percent),
        ("safe_step_saving", point.safe_step_saving, _percent),
        ("raw_step_saving", point.raw_step_saving, _percent),
        ("advantage_kept", point.advantage_kept, _percent),
    )
    for name, value, shown in rows:
        if value is not None:
            table.add_row(_WORDS[name], shown(value), _interval(report.point_intervals.get(name), shown))
    return table


_WORDS: Final = {
    "recall": "recall",
    "safe_saving": "safe saving, by the horizon",
    "raw_saving": "raw saving, by the horizon",
    "safe_step_saving": "safe saving, real steps",
    "raw_step_saving": "raw saving, real steps",
    "advantage_kept": "L2 norm of advantages kept",
}


def _arms(report: GateReport) -> Table:
    has_steps = any(arm.safe_step_saving is not None for arm in report.arms)
    steps = ("safe, steps", "raw, steps") if has_steps else ()
    table = _table("", "cut", "right", "wrong", "precision", "recall", "safe", "raw", *steps, "not trained", "L2 kept")
    for arm in report.arms:
        savings = [arm.safe_saving, arm.raw_saving, *((arm.safe_step_saving, arm.raw_step_saving) if has_steps else ())]
        table.add_row(
            arm.name,
            *(f"{count:.1f}".removesuffix(".0") for count in (arm.cut, arm.true_cuts, arm.false_cuts)),
            _number(arm.precision),
            _number(arm.recall),
            *map(_percent, savings),
            _percent(arm.dropped_share),
            _percent(arm.advantage_kept),
        )
    return table


def _task_types(report: GateReport) -> Table:
    table = _table(
        "task type", "groups", "equal rewards", "cut", "right", "precision", "exact interval", "safe saving", "Spearman", "AUROC"
    )
    for one in report.task_types:
        point = one.point
        table.add_row(
            one.task_type,
            str(point.groups),
            str(point.zero_variance),
            str(point.cut),
            str(point.true_cuts),
            _number(point.precision),
            _interval(one.precision_interval if point.cut else None, _number),
            _percent(point.saving),
            _number(one.spearman),
            _number(one.auroc),
        )
    return table


def _transfers(report: GateReport) -> Table:
    table = _table(
        *("members", "equal rewards", "Spearman", "AUROC", "cut", "precision", "of draws", "safe saving"),
        *("refitted threshold", "then saves", "draws with one"),
    )
    for one in report.transfers:
        table.add_row(
            str(one.group_size),
            _percent(one.zero_variance_share),
            _number(one.spearman),
            _number(one.auroc),
            _percent(one.cut_rate),
            _number(one.precision),
            _interval(one.precision_interval, _number),
            _percent(one.saving),
            "-" if one.refitted_threshold is None else f"{one.refitted_threshold:.3g}",
            _percent(one.refitted_saving),
            f"{one.refitted_share:.0%}",
        )
    return table


def _ladder(fit: Fit) -> Table:
    table = _table("floor", "rule on all groups", "cut", "precision", "saves", "held out: cut", "precision", "saves")
    for rung in fit.choice.ladder:
        held, point = rung.held_out, rung.point
        table.add_row(
            _number(rung.floor),
            "none" if point is None else point.rule,
            "-" if point is None else str(point.cut),
            _number(None if point is None else point.precision),
            _percent(None if point is None else point.saving),
            str(held.cut),
            _number(held.precision),
            _percent(held.saving),
            style="bold" if rung.floor == fit.choice.floor and fit.choice.holds else None,
        )
    return table


def _folds(fit: Fit) -> Table:
    table = _table("without fold", "rule", "cut there", "precision there")
    for number, rule in enumerate(fit.held_out.rules, 1):
        shown = ("none", "-", "-") if rule is None else (rule.rule, str(rule.cut), _number(rule.precision))
        table.add_row(str(number), *shown)
    return table


def _print_choice(console: Console, fit: Fit) -> None:
    held = fit.held_out
    console.print(
        f"\n[bold]Held out[/]: {held.true_cuts} of {held.cut} cuts right, precision {_number(held.precision)} "
        f"({_number(held.low)} to {_number(held.high)}), recall {_number(held.recall)}, safe saving {_percent(held.saving)}"
    )


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number == 0 or name == "rule" or name.startswith("rule on") else "right")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _interval(interval: Interval | None, shown: Callable[[float | None], str]) -> str:
    return "-" if interval is None else f"{shown(interval[0])} to {shown(interval[1])}"
