"""`sluice gate`: does the gate pay on recorded groups, and with which rule. `sweep` shows all of them, `fit` chooses one.
`learn` (gate_learn.py) fits one that looks again and again.

To add a command, or another kind of rule to `fit`: the options are declared once below, a report is made by `sluice.analysis.sweep`, and
`_finish` prints and writes it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from sluice.cli.gate_learn import learn
from sluice.cli.reporting import FAILED, reported, unless_nobody_reads
from sluice.errors import AnalysisError

if TYPE_CHECKING:
    from sluice.analysis.reading import Recording
    from sluice.analysis.sweep import GateReport

FOLDER: Final = "gate_report"

gate_app = typer.Typer(
    name="gate",
    help="On recorded groups: what the selective-rollout gate would have cut and saved, how often rightly, and which threshold to set.",
    no_args_is_help=True,
)
gate_app.command()(learn)

Recorded = Annotated[
    list[Path],
    typer.Argument(
        metavar="RECORDED...",
        help="Run folders (`sluice train --record`), or CSV, JSONL or Parquet files of action sequences or of group features.",
        show_default=False,
    ),
]
Ks = Annotated[
    list[str] | None,
    typer.Option(
        "--k", metavar="K", help="Environment steps to look at: `10`, `10,15,20`, `5-20` or `5-30:5`. Default: all.", show_default=False
    ),
]
Signals = Annotated[
    list[str] | None,
    typer.Option("--signal", metavar="NAME", help="A signal to look at; may be given again. Default: all.", show_default=False),
]
Horizon = Annotated[
    int | None,
    typer.Option(
        "--horizon", min=2, help="Most environment steps of a trajectory. Default: the longest that was recorded.", show_default=False
    ),
]
GroupSizes = Annotated[
    list[int] | None,
    typer.Option(
        "--group-size", min=2, help="Try the rule on groups of this size, of members left away by lot. Default: half.", show_default=False
    ),
]
Floor = Annotated[float, typer.Option("--precision-floor", min=0.0, max=1.0, help="Least share of cuts that must be right.")]
Folds = Annotated[int, typer.Option("--cv", min=2, help="Folds of the cross-validation.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of folds, bootstrap and random references.")]
Confidence = Annotated[float, typer.Option("--confidence", min=0.0, max=1.0, help="Of all intervals.")]
DecideOn = Annotated[
    Literal["running", "all"],
    typer.Option("--decide", help="Groups that are decided on: as a running gate does, or all of them, as in the published figures."),
]
IdsPerFile = Annotated[bool, typer.Option("--ids-per-file", help="Groups of one id in different files are different groups.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help=f"Where tables and plots are written. Default: `{FOLDER}` beside the recording; of several: here.",
        show_default=False,
    ),
]
Format = Annotated[Literal["table", "json"], typer.Option("--format", help="What is printed.")]


@gate_app.command()
def sweep(
    recorded: Recorded,
    k: Ks = None,
    signal: Signals = None,
    threshold: Annotated[
        list[float] | None,
        typer.Option("--threshold", min=0.0, max=1.0, help="Tell of this threshold too; may be given again.", show_default=False),
    ] = None,
    precision_floor: Floor = 0.8,
    horizon: Horizon = None,
    group_size: GroupSizes = None,
    decide: DecideOn = "running",
    seed: Seed = 0,
    confidence: Confidence = 0.95,
    ids_per_file: IdsPerFile = False,
    out: Out = None,
    output: Format = "table",
) -> None:
    """Show what every signal knows at every K, and what its thresholds would have cut and saved.

    With `--threshold` the tables are about that rule (the first signal and K), else about the best one above the precision floor.

    Example: `sluice gate sweep runs/RUN --k 5-20`

    Example: `sluice gate sweep groups.csv --horizon 30 --k 10 --signal prefix_edit_distance_mean --threshold 0.12`

    Exit codes: 0 shown, 2 the recording or an option is wrong.
    """
    with reported():
        from sluice.analysis.sweep import Settings, analyse

        settings = Settings(
            signals=tuple(signal) if signal else None,
            thresholds=tuple(threshold or ()),
            precision_floor=precision_floor,
            decide=decide,
            group_sizes=tuple(group_size) if group_size else None,
            seed=seed,
            confidence=confidence,
        )
        _finish(analyse(_read(recorded, k, horizon, ids_per_file), settings, choose=False), recorded, out, output)


@gate_app.command()
def fit(
    recorded: Recorded,
    precision_floor: Floor = 0.8,
    k: Ks = None,
    signal: Signals = None,
    horizon: Horizon = None,
    group_size: GroupSizes = None,
    cv: Folds = 5,
    decide: DecideOn = "running",
    seed: Seed = 0,
    confidence: Confidence = 0.95,
    ids_per_file: IdsPerFile = False,
    out: Out = None,
    output: Format = "table",
) -> None:
    """Choose signal, K and threshold that save most above a precision floor, and tell how they do on groups they were not chosen on.

    Ends with the lines for the recipe, which are also written to `gate.yaml`.

    Example: `sluice gate fit runs/RUN --precision-floor 0.8`

    Exit codes: 0 a rule was chosen, 1 none reaches the floor, 2 the recording or an option is wrong.
    """
    with reported():
        from sluice.analysis.sweep import Settings, analyse

        settings = Settings(
            signals=tuple(signal) if signal else None,
            precision_floor=precision_floor,
            decide=decide,
            group_sizes=tuple(group_size) if group_size else None,
            folds=cv,
            seed=seed,
            confidence=confidence,
        )
        report = analyse(_read(recorded, k, horizon, ids_per_file), settings, choose=True)
        _finish(report, recorded, out, output)
        if report.point is None:
            raise typer.Exit(FAILED)


def _read(paths: Sequence[Path], ks: Sequence[str] | None, horizon: int | None, ids_per_file: bool) -> Recording:
    from sluice.analysis.reading import read_recording

    return read_recording(paths, ks=read_ks(ks), horizon=horizon, ids_per_file=ids_per_file)


def _finish(report: GateReport, paths: Sequence[Path], out: Path | None, output: str) -> None:
    """Write everything, then print."""
    import json

    from sluice.analysis.page import write_page
    from sluice.analysis.report_files import as_data, write_files
    from sluice.cli.gate_tables import as_text, print_report

    folder = out if out is not None else default_folder(paths)
    written = write_files(report, folder)
    try:
        written.insert(0, write_page(report, folder, as_text(report)))
    except AnalysisError as error:
        if "plotly" not in str(error):
            raise
        typer.echo(f"{typer.style('warning:', fg=typer.colors.YELLOW, bold=True)} {error}", err=True)
    with unless_nobody_reads():
        if output == "json":
            typer.echo(json.dumps(as_data(report), indent=1))
        else:
            print_report(report, written)


def read_ks(texts: Sequence[str] | None) -> list[int] | None:
    """`10`, `10,15`, `5-20` and `5-30:5` as numbers, ascending. Raises `AnalysisError` for anything else."""
    from sluice.analysis.trajectories import LARGEST_K

    if not texts:
        return None
    found: set[int] = set()
    for part in ",".join(texts).split(","):
        span, _, stride = part.strip().partition(":")
        first, dash, last = span.partition("-")
        numbers = [first, *([last] if dash else []), *([stride] if ":" in part else [])]
        are_steps = all(number.strip().isdecimal() and len(number.strip()) < 10 and 0 < int(number) <= LARGEST_K for number in numbers)
        if not are_steps or (":" in part and not dash):
            got = repr(part.strip()[:40])
            raise AnalysisError(
                f"--k: expected environment steps such as 10, 10,15,20, 5-20 or 5-30:5, got {got} - correct it; the largest is {LARGEST_K}"
            )
        found |= {*range(int(first), int(last if dash else first) + 1, int(stride) if stride else 1)}
    if not found:
        raise AnalysisError(f"--k: expected at least one environment step, got none in {','.join(texts)!r} - give the smaller one first")
    return sorted(found)


def default_folder(paths: Sequence[Path]) -> Path:
    """Beside the one recording (in a run folder), where that can be written; else in the current folder."""
    if len(paths) == 1:
        parent = paths[0] if paths[0].is_dir() else paths[0].parent
        if os.access(parent, os.W_OK):
            return parent / FOLDER
    return Path(FOLDER)
