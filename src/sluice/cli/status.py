"""What `sluice status` prints: how a run is doing, for a person or for a program."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

import typer

from sluice.records import RunFolder, RunStatusReport, read_status, status_lines


def show_status(run: Path, *, as_json: bool) -> None:
    """Print how the run in this folder is doing.

    Raises:
        RecordError: it is no run folder.
    """
    report = read_status(RunFolder.open(run).run_db, time.time())
    for line in [_json(report)] if as_json else status_lines(report):
        typer.echo(_writable(line))


def _json(report: RunStatusReport) -> str:
    entries = {**dataclasses.asdict(report), "can_be_resumed": report.can_be_resumed}
    return json.dumps(entries, default=str, allow_nan=False, indent=2)


def _writable(line: str) -> str:
    """The line without characters that the terminal has no code for: messages and task ids come from anywhere."""
    encoding = sys.stdout.encoding or "utf-8"
    return line.encode(encoding, "backslashreplace").decode(encoding)
