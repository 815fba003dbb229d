"""Writes a `GateReport` down: tables as CSV, everything as JSON, and the lines for a recipe."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import yaml

from sluice.analysis.curves import Point, evenly
from sluice.analysis.sweep import GateReport
from sluice.errors import AnalysisError

CORRELATIONS: Final = "correlations.csv"
THRESHOLDS: Final = "thresholds.csv"
REPORT: Final = "report.json"
RECIPE: Final = "gate.yaml"

MOST_ROWS: Final = 100
"""Thresholds of one signal at one K that are written: all, or so many evenly over what they cut."""


def as_data(report: GateReport) -> dict[str, Any]:
    """All figures as plain data, without the arrays: what `--format json` prints."""
    return {
        "sources": list(report.sources),
        "settings": asdict(report.settings),
        "groups": len(report.recorded),
        "group_size": report.recorded.group_size,
        "horizon": report.recorded.horizon,
        "k": list(report.recorded.ks),
        "zero_variance": int(report.recorded.zero_variance.sum()),
        "outcomes": dict(report.outcomes),
        "notes": list(report.notes),
        "warnings": list(report.warnings),
        "correlations": [asdict(one) for one in report.correlations],
        "best_under_floor": [asdict(one) for one in report.best if one is not None],
        "asked": [asdict(one) for one in report.asked],
        "point": None if report.point is None else asdict(report.point),
        "point_intervals": dict(report.point_intervals),
        "precision_exact": report.precision_exact,
        "thresholds": [asdict(one) for one in report.thresholds],
        "arms": [asdict(one) for one in report.arms],
        "task_types": [asdict(one) for one in report.task_types],
        "transfer": [asdict(one) for one in report.transfers],
        "fit": None if report.fit is None else asdict(report.fit),
    }


def recipe_lines(point: Point) -> str:
    """The section of a recipe that sets this rule."""
    gate = {"k": point.k, "threshold": point.threshold, "signal": point.signal}
    return yaml.safe_dump({"gate": gate}, sort_keys=False)


def write_files(report: GateReport, folder: Path) -> list[Path]:
    """Write tables, JSON and, for a fit, the lines of a recipe into a folder, which is made. Raises `AnalysisError` when it cannot be."""
    written = [folder / CORRELATIONS, folder / THRESHOLDS, folder / REPORT]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_csv(written[0], (_flat(asdict(one)) for one in report.correlations))
        _write_csv(written[1], _thresholds(report))
        written[2].write_text(json.dumps(as_data(report), indent=1) + "\n", encoding="utf-8")
        recipe = folder / RECIPE
        if report.fit is not None and report.point is not None:
            recipe.write_text(recipe_lines(report.point), encoding="utf-8")
            written.append(recipe)
        elif report.fit is not None:
            recipe.unlink(missing_ok=True)  # of a fit before this one
    except OSError as error:
        raise AnalysisError(
            f"{folder}: expected a folder that can be written, got: {error.strerror or error} - give another --out"
        ) from error
    return written


def _thresholds(report: GateReport) -> Iterable[Mapping[str, Any]]:
    for curve in report.curves:
        columns = curve.columns()
        for index in evenly(len(curve), MOST_ROWS).tolist():
            yield {"signal": curve.signal, "k": curve.figures.k, **{name: column[index] for name, column in columns.items()}}


def _write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = None
        for row in rows:
            if writer is None:
                writer = csv.DictWriter(file, [*row])
                writer.writeheader()
            writer.writerow(row)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Intervals as two columns."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name.endswith("_interval"):
            low, high = value or (None, None)
            flat |= {name.replace("_interval", "_low"): low, name.replace("_interval", "_high"): high}
        else:
            flat[name] = value
    return flat
