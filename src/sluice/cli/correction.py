"""`sluice correction report`: the divergence of saved log-probs, so that a person can choose thresholds.

The numbers are made by `sluice.correction.report`; here they become text, and `correction_page.py` makes plots of them. To show one more
thing, add a function to `_PARTS`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from sluice.cli.reporting import reported, unless_nobody_reads
from sluice.errors import ConfigError, CorrectionError

if TYPE_CHECKING:
    from sluice.config import TrainInferCorrectionConfig
    from sluice.correction.report import DivergenceReport

PAGE: Final = "correction_report.html"
BAR: Final = 40  # characters of the longest bar
LINES: Final = 15  # bars of one plot

correction_app = typer.Typer(
    name="correction",
    help="On saved log-probs of trainer and engine: how far they lie apart, and what each rule would take out of the loss.",
    no_args_is_help=True,
)


@correction_app.callback()
def _common() -> None:
    pass


@correction_app.command()
def report(
    saved: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A .npz or .safetensors file of log-probs, a folder of them, or the folder of a run that saved some.",
            show_default=False,
        ),
    ],
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe", metavar="RECIPE", help="Show what its train_infer_correction rejects. Default: that of the run.", show_default=False
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help=f"Where the plots are written. Default: `{PAGE}` beside FILE.", show_default=False),
    ] = None,
    output: Annotated[Literal["text", "json"], typer.Option("--format", help="What is printed.")] = "text",
) -> None:
    """Show the divergence of saved log-probs: ratios at every level, where in a response they grow, what each preset and filter rejects.

    A run saves batches with `train_infer_correction.save_every_steps`. Of your own trainer: `numpy.savez(FILE, old_log_probs=...,
    infer_logprobs=..., response_mask=...)`, [B, T] each.

    Example: `sluice correction report runs/RUN`

    Exit codes: 0 shown, 1 the file cannot be read, 2 the recipe is wrong.
    """
    with reported():
        from sluice.correction import load_batches, report_on

        found = report_on(load_batches(saved), _configured(saved, recipe))
        written = _write_page(found, page or _beside(saved), is_wanted=page is not None)
        with unless_nobody_reads():
            if output == "json":
                typer.echo(json.dumps(_without_nan(asdict(found)), indent=1, allow_nan=False))
            else:
                for line in lines_of(found):
                    typer.echo(line)
                if written is not None:
                    typer.echo(f"\nPlots: {written}")


def _configured(saved: Path, recipe: Path | None) -> TrainInferCorrectionConfig | None:
    """The rules of the recipe that is named, else of the run that saved the batches."""
    from sluice.config import load_config

    if recipe is not None:
        section = load_config(recipe).train_infer_correction
        if section is None:
            raise ConfigError(f"{recipe}: expected a section train_infer_correction, got none - add one, or leave --recipe away")
        return section
    for folder in (saved, saved.parent, saved.parent.parent):
        if (folder / "run.db").is_file() and (folder / "config.yaml").is_file():
            return load_config(folder / "config.yaml").train_infer_correction
    return None


def _beside(saved: Path) -> Path:
    folder = saved if saved.is_dir() else saved.parent
    return folder / PAGE if os.access(folder, os.W_OK) else Path(PAGE)


def _write_page(found: DivergenceReport, path: Path, *, is_wanted: bool) -> Path | None:
    """The page, where plotly is installed; without it, what to install."""
    from sluice.cli.correction_page import write_page

    if not found.tokens:
        return None
    try:
        return write_page(found, path, "\n".join(lines_of(found)))
    except ImportError as error:
        if is_wanted:
            raise CorrectionError(f"--html needs the package plotly, got: {error} - pip install 'sluice-rl[report]'") from error
        typer.echo("Plots need the package plotly: pip install 'sluice-rl[report]'. The same as text:\n", err=True)
        return None


# ---------------------------------------------------------------- text


def lines_of(found: DivergenceReport) -> Iterator[str]:
    """The whole report, line by line."""
    files = found.files[0] if len(found.files) == 1 else f"{len(found.files)} files, {found.files[0]} to {found.files[-1]}"
    yield f"{files}: {found.rows:,} rows, {found.tokens:,} sampled tokens"
    if not found.tokens:
        yield "no sampled token is in them: nothing to compare"
        return
    for part in _PARTS:
        yield ""
        yield from part(found)


def _estimates(found: DivergenceReport) -> Iterator[str]:
    metrics = found.metrics
    yield "Divergence of tokens"
    yield f"  |log p_train - log p_inference|     mean {found.mean_gap:.5f}  largest {found.largest_gap:.4g}"
    estimates = ", ".join(f"{name} {metrics[f'actor/train_infer_{name}']:.5g}" for name in ("k1", "k2", "k3"))
    yield f"  KL(inference || train) a token      {estimates}"
    yield f"  p_train - p_inference               mean {metrics['actor/train_infer_diff_token_mean@sum']:+.5f}"
    for name, text in (
        ("nan_tokens", "tokens without an inference log-prob"),
        ("non_finite", "rows with a log-prob that is no number"),
        ("clamped", "tokens beyond e^20"),
    ):
        if metrics[f"actor/train_infer_{name}"]:
            yield f"  {text:35s} {metrics[f'actor/train_infer_{name}']:,.0f}"


def _ratios(found: DivergenceReport) -> Iterator[str]:
    from sluice.correction.report import QUANTILES

    yield "Ratio p_train / p_inference: quantiles"
    yield "  level            n" + "".join(f"{'min' if q == 0 else 'max' if q == 1 else f'{100 * q:g} %':>10s}" for q in QUANTILES)
    for level in found.levels:
        yield f"  {level.level:10s}{level.count:8,d}" + "".join(f"{_number(value):>10s}" for value in level.quantiles)


def _bounds(found: DivergenceReport) -> Iterator[str]:
    from sluice.correction.report import SHARES

    yield "Bounds that leave a share of tokens, segments or rows outside, half of it on either side"
    yield "  level     " + "".join(f"{f'{100 * share:g} %':>24s}" for share in SHARES)
    for level in found.levels:
        yield f"  {level.level:10s}" + "".join(f"{f'{_number(low)} .. {_number(high)}':>24s}" for low, high in level.bounds)


def _histogram(found: DivergenceReport) -> Iterator[str]:
    (tokens,) = (level for level in found.levels if level.level == "token")
    yield "Tokens by ratio (log scale of counts)"
    step = len(tokens.counts) // LINES
    for start in range(0, len(tokens.counts), step):
        count = sum(tokens.counts[start : start + step])
        low, high = (math.exp(tokens.edges[index]) for index in (start, start + step))
        yield f"  {_number(low):>8s} .. {_number(high):8s}{count:10,d} {_bar(math.log1p(count), math.log1p(max(tokens.counts) * step))}"


def _places(found: DivergenceReport) -> Iterator[str]:
    yield "By position in the response: mean |log ratio|, and its 99th percentile"
    step = -(-len(found.positions) // LINES)
    parts = [found.positions[start : start + step] for start in range(0, len(found.positions), step)]
    means = [sum(place.mean * place.tokens for place in part) / sum(place.tokens for place in part) for part in parts]
    for part, mean in zip(parts, means, strict=True):
        highest = max(place.highest for place in part)
        where = f"{part[0].first + 1}-{part[-1].last + 1}" if part[-1].last > part[0].first else f"{part[0].first + 1}"
        yield f"  {where:>11s}{sum(place.tokens for place in part):10,d} {mean:9.5f} {highest:9.4f} {_bar(mean, max(means))}"


def _rejections(found: DivergenceReport) -> Iterator[str]:
    yield "What a rule takes out of the loss"
    width = max(len(one.name) for one in found.rejections)
    yield f"  {'rule':{width}s}    tokens  whole rows  weights cut off"
    for one in found.rejections:
        clipped = "" if one.clipped_share is None else f"{one.clipped_share:15.3%}"
        yield f"  {one.name:{width}s}{one.token_share:10.3%}{one.row_share:12.3%}  {clipped}".rstrip()


_PARTS: Final[Sequence[Callable[[DivergenceReport], Iterator[str]]]] = (
    _estimates,
    _ratios,
    _bounds,
    _histogram,
    _places,
    _rejections,
)


def _number(value: float) -> str:
    return f"{value:.4f}" if 0.001 <= abs(value) < 1000 else f"{value:.2e}"


def _bar(value: float, largest: float) -> str:
    return "#" * round(BAR * value / largest) if largest > 0 else ""


def _without_nan(value: object) -> object:
    """JSON has no word for NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _without_nan(one) for name, one in value.items()}
    return [_without_nan(one) for one in value] if isinstance(value, (list, tuple)) else value
