"""What the gate of a run did, in lines for a person: what was cut and stopped, how often rightly, what it saved and what it cost."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LABEL = 30  # columns of the first column, as in the other tables of the printout
NUMBER = 11  # columns of a count


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTypeTotal:
    """Groups of one kind of problem: cutting is bias where it hits some kinds more than others."""

    task_type: str | None  # None: no member of the group came to say it
    launched: int
    cut: int
    trained: int


def read_gate(db: sqlite3.Connection) -> tuple[Mapping[str, float], tuple[TaskTypeTotal, ...]]:
    """The newest `gate/...` metrics of a run, without that prefix, and its groups by kind of problem. Both are empty without a gate."""
    if not (metrics := newest_gate(db)):
        return {}, ()
    types = db.execute(
        "SELECT task_type, count(*), total(outcome = 'cut'), total(outcome = 'trained') FROM groups GROUP BY 1 ORDER BY 2 DESC, 1"
    )
    return metrics, tuple(
        TaskTypeTotal(task_type=name, launched=launched, cut=int(cut), trained=int(trained)) for name, launched, cut, trained in types
    )


def newest_gate(db: sqlite3.Connection) -> Mapping[str, float]:
    """The newest `gate/...` metrics of a run, without that prefix; empty without a gate."""
    rows = db.execute("SELECT name, value, max(rowid) FROM metrics WHERE name LIKE 'gate/%' AND value IS NOT NULL GROUP BY name")
    return {name.removeprefix("gate/"): value for name, value, _ in rows}


def gate_of(told: Any) -> Mapping[str, float] | None:
    """The same metrics as a snapshot of the scheduler holds them. None: there is no gate, or it is no such snapshot."""
    if not isinstance(told, dict):
        return None
    return {
        name.removeprefix("gate/"): float(value)
        for name, value in told.items()
        if isinstance(name, str) and isinstance(value, int | float) and math.isfinite(value)
    }


def gate_line(gate: Mapping[str, float]) -> str:
    """One line: how many, and how rightly."""
    parts = []
    if "judged" in gate:
        decided = gate["judged"] + gate.get("undecided", 0.0)
        verb = "cut" if gate.get("is_cutting") else "would be cut"
        count = gate.get("cut", 0.0) if gate.get("is_cutting") else gate.get("would_cut", 0.0)
        parts.append(f"{count:,.0f} of {decided:,.0f} groups {verb}{_precision(gate, '')}")
    if "futile_would_stop" in gate:
        parts.append(f"{gate.get('futile_stopped', 0.0):,.0f} members stopped as futile{_precision(gate, 'futile_')}")
    return "; ".join(parts) or "it has decided nothing yet"


def _precision(gate: Mapping[str, float], prefix: str) -> str:
    value, low, high = (gate.get(f"{prefix}precision{end}") for end in ("", "_low", "_high"))
    if value is None or low is None or high is None:
        return ""
    return f", precision {value:.2f} ({low:.2f} to {high:.2f})"


def gate_lines(gate: Mapping[str, float], task_types: tuple[TaskTypeTotal, ...]) -> list[str]:
    """The part of the final printout about the gate; nothing where there was none."""
    if not gate:
        return []
    decided = gate.get("judged", 0.0) + gate.get("undecided", 0.0)
    lines = [_row("Gate", f"{decided:,.0f}", "groups decided on")] if "judged" in gate else ["Gate"]
    if "judged" in gate:
        lines.append(_row("  cut", f"{gate.get('cut', 0.0):,.0f}", _share(gate.get("cut", 0.0), decided)))
        if gate.get("would_cut", 0.0) != gate.get("cut", 0.0):
            lines.append(_row("  would have been cut", f"{gate.get('would_cut', 0.0):,.0f}", _share(gate.get("would_cut", 0.0), decided)))
        lines += _rightness(gate, "", gate.get("precision_n", 0.0))
        lines += _savings(gate, "") if gate.get("cut") else []
    if "futile_would_stop" in gate:
        lines.append(_row("  members stopped as futile", f"{gate.get('futile_stopped', 0.0):,.0f}"))
        if gate["futile_would_stop"] != gate.get("futile_stopped", 0.0):
            lines.append(_row("  would have been stopped", f"{gate['futile_would_stop']:,.0f}"))
        lines += _rightness(gate, "futile_", gate.get("futile_audited", 0.0))
        lines += _savings(gate, "futile_") if gate.get("futile_stopped") else []
    if "seconds" in gate:
        lines.append(_row("  seconds spent deciding", f"{gate['seconds']:,.2f}"))
    return lines + _type_lines(task_types)


def _rightness(gate: Mapping[str, float], prefix: str, audited: float) -> list[str]:
    value, low, high = (gate.get(f"{prefix}precision{end}") for end in ("", "_low", "_high"))
    if value is None or low is None or high is None:
        return []
    return [_row("    precision", f"{value:.3f}", f"({low:.3f} to {high:.3f}, {audited:,.0f} audited)")]


def _savings(gate: Mapping[str, float], prefix: str) -> list[str]:
    lines = []
    for what, label in (("env_steps", "environment steps saved"), ("tokens", "tokens saved")):
        about, low, high, bound = (
            gate.get(f"{prefix}{what}_saved_{end}") for end in ("estimate", "estimate_low", "estimate_high", "bound")
        )
        notes = [] if low is None or high is None else [f"{low:,.0f} to {high:,.0f}"]
        notes += [] if bound is None else [f"at most {bound:,.0f}"]
        if about is not None or bound:
            lines.append(_row(f"    {label}", "-" if about is None else f"{about:,.0f}", f"({', '.join(notes)})" if notes else ""))
    return lines


def _type_lines(task_types: tuple[TaskTypeTotal, ...]) -> list[str]:
    """Shares of the kinds of problems among the groups launched, cut and trained; each column sums to 1."""
    if not any(total.task_type is not None for total in task_types) or not any(total.cut for total in task_types):
        return []
    launched, cut, trained = (sum(getattr(total, name) for total in task_types) for name in ("launched", "cut", "trained"))
    lines = [f"{'Kinds of problems':<{LABEL}} {'launched':>{NUMBER}} {'cut':>8} {'trained':>8}"]
    for total in task_types:
        shares = [f"{count / whole:.1%}" if whole else "-" for count, whole in zip(_counts(total), (launched, cut, trained), strict=True)]
        label = f"  {total.task_type or 'not known'}"
        lines.append(f"{in_columns(label, shares[0])} {shares[1]:>8} {shares[2]:>8}")
    return lines


def _counts(total: TaskTypeTotal) -> tuple[int, int, int]:
    return total.launched, total.cut, total.trained


def _share(count: float, whole: float) -> str:
    return f"{count / whole:7.1%}" if whole else ""


def _row(label: str, number: str, note: str = "") -> str:
    return f"{in_columns(label, number)}  {note}".rstrip()


def in_columns(label: str, number: str) -> str:
    """The first two columns of a table of the printout. A long label takes room from the number: the columns stay where they are."""
    return f"{label:<{LABEL}} {number:>{max(0, NUMBER - max(0, len(label) - LABEL))}}"
