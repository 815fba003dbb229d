"""The plots of a `GateReport` as one HTML file that needs no network: plotly's script stands in it.

- what every signal knows: heat maps of Spearman's rho and of AUROC over signal and K
- how the distance d_K, and the signal of the rule, are distributed among groups that ended differently, at any K
- what a threshold saves against its precision, for any signal, one line per K
- the best threshold under the precision floor, against K

To add a plot: a function from the report to a figure (None: there is nothing to show), and its line in `_PLOTS`. plotly is
imported when a page is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np

from sluice.analysis.curves import Curve, evenly
from sluice.analysis.sweep import GateReport
from sluice.errors import AnalysisError
from sluice.gate.divergence import SIGNALS

PAGE: Final = "report.html"

MOST_POINTS: Final = 80
"""Of one line: more are not seen, and make the page heavy."""

MOST_LINES: Final = 10
"""K that are drawn as lines of one plot."""

MOST_MARKS: Final = 400
"""Groups of one outcome that are drawn as marks; their box is that of all."""

_COLOURS: Final = {"mixed": "#4477aa", "all fail": "#cc6677", "all succeed": "#228833", "all equal": "#aa3377"}


def write_page(report: GateReport, folder: Path, tables: Sequence[tuple[str, str]]) -> Path:
    """Write the page into a folder. `tables`: titles and tables as plain text, to stand under the plots.

    Raises `AnalysisError` when plotly is missing, or the file cannot be written.
    """
    try:
        import plotly.offline as offline
    except ImportError as error:
        raise AnalysisError(f"the plots need the package plotly, got: {error} - pip install 'sluice-rl[report]'") from error
    plots = [(title, told, plot(report)) for title, told, plot in _PLOTS]
    parts = [f"<h2>{escape(title)}</h2><p>{escape(told)}</p>{_shown(figure)}" for title, told, figure in plots if figure is not None]
    parts += [f"<h2>{escape(title)}</h2><pre>{escape(text)}</pre>" for title, text in tables]
    title = f"Gate: {', '.join(Path(source).name for source in report.sources)}"
    page = _PAGE.format(title=escape(title), script=offline.get_plotlyjs(), summary=_summary(report), parts="\n".join(parts))
    path = folder / PAGE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise AnalysisError(f"{path}: expected a file that can be written, got: {error.strerror or error} - give another --out") from error
    return path


# ---------------------------------------------------------------- plots


def _knowledge(report: GateReport) -> Any:
    from plotly.subplots import make_subplots

    names, ks = _axes(report)
    figure = make_subplots(
        rows=1, cols=2, subplot_titles=("Spearman's rho with the variance of the rewards", "AUROC for different rewards")
    )
    for column, (field, middle, reach) in enumerate((("spearman", 0.0, 0.6), ("auroc", 0.5, 0.35)), 1):
        values = {(one.signal, one.k): getattr(one, field) for one in report.correlations}
        figure.add_heatmap(
            row=1,
            col=column,
            x=[str(k) for k in ks],
            y=names,
            z=[[values[name, k] for k in ks] for name in names],
            texttemplate="%{z:.2f}" if len(ks) <= 12 else None,
            hovertemplate="%{y}<br>K = %{x}<br>%{z:.3f}<extra></extra>",
            colorscale="RdBu",
            zmid=middle,
            zmin=middle - reach,
            zmax=middle + reach,
            colorbar={"x": 0.44 if column == 1 else 1.0, "len": 0.9, "thickness": 12},
        )
    figure.update_xaxes(title_text="K", type="category")
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_yaxes(showticklabels=False, col=2)
    figure.update_layout(height=120 + 42 * len(names), xaxis_domain=[0.0, 0.43], xaxis2_domain=[0.57, 0.99])
    return figure


def _distance(report: GateReport) -> Any:
    return _distribution(report, SIGNALS[0]) if SIGNALS[0] in _axes(report)[0] else None


def _signal_of_rule(report: GateReport) -> Any:
    return _distribution(report, report.point.signal) if report.point is not None and report.point.signal != SIGNALS[0] else None


def _distribution(report: GateReport, name: str) -> Any:
    import plotly.graph_objects as go

    _, ks = _axes(report)
    k = report.point.k if report.point is not None else ks[len(ks) // 2]
    outcomes = list(report.outcomes)
    figure = go.Figure()
    choices = []
    for one in ks:
        values = report.recorded.at(one).signals[name]
        for outcome in outcomes:
            chosen = values[np.array([ended == outcome for ended in report.recorded.outcomes])]
            figure.add_box(
                y=np.sort(chosen)[evenly(len(chosen), MOST_MARKS)].tolist(),
                name=f"{outcome} ({len(chosen)})",
                boxpoints="all",
                jitter=0.6,
                pointpos=0,
                marker={"size": 4, "opacity": 0.45, "color": _COLOURS[outcome]},
                visible=one == k,
                showlegend=False,
            )
        choices.append({"label": f"K = {one}", "method": "update", "args": [{"visible": [other == one for other in ks for _ in outcomes]}]})
    if report.point is not None and report.point.signal == name:
        figure.add_hline(y=report.point.threshold, line_dash="dash", annotation_text=f"threshold {report.point.threshold:g} (K = {k})")
    figure.update_yaxes(title_text=name, range=[-0.03, 1.03])
    _menu(figure, choices, ks.index(k))
    return figure


def _savings(report: GateReport) -> Any:
    import plotly.graph_objects as go

    names, ks = _axes(report)
    name = report.point.signal if report.point is not None else names[0]
    shown = [ks[place] for place in evenly(len(ks), MOST_LINES).tolist()]
    if report.point is not None and report.point.k not in shown:
        shown = sorted([*shown, report.point.k])
    figure = go.Figure()
    signals_of_lines = []
    for curve in report.curves:
        if curve.figures.k not in shown:
            continue
        precision, saving, told = _line(curve)
        figure.add_scatter(
            x=precision,
            y=saving,
            text=told,
            mode="lines+markers",
            marker={"size": 4},
            line={"width": 1.5, "color": _colour_of(curve.figures.k, ks)},
            name=f"K = {curve.figures.k}",
            hovertemplate="%{text}<br>precision %{x:.3f}<br>saves %{y:.2%}<extra></extra>",
            visible=curve.signal == name,
        )
        signals_of_lines.append(curve.signal)
    extra = 0
    for arm in report.arms:
        if arm.name == "oracle" or arm.name.startswith("random"):
            figure.add_scatter(
                x=[arm.precision],
                y=[arm.safe_saving if arm.safe_step_saving is None else arm.safe_step_saving],
                mode="markers+text",
                text=[arm.name],
                textposition="top left" if arm.name == "oracle" else "top right",
                marker={"size": 11, "symbol": "star", "color": "black"},
                showlegend=False,
            )
            extra += 1
    if report.point is not None:
        figure.add_scatter(
            x=[report.point.precision],
            y=[report.point.saving],
            mode="markers",
            marker={"size": 13, "symbol": "circle-open", "color": "black", "line": {"width": 2}},
            name=report.point.rule,
        )
        extra += 1
    figure.add_vline(x=report.settings.precision_floor, line_dash="dash", annotation_text="floor")
    figure.update_xaxes(title_text="precision: share of cuts with equal rewards", range=[0, 1.04])
    figure.update_yaxes(title_text="safe saving: share of all environment steps", tickformat=".0%", rangemode="tozero")
    choices = [
        {"label": one, "method": "update", "args": [{"visible": [*(of == one for of in signals_of_lines), *[True] * extra]}]}
        for one in names
    ]
    _menu(figure, choices, names.index(name))
    figure.update_layout(height=520)
    return figure


def _threshold_against_k(report: GateReport) -> Any:
    from plotly.subplots import make_subplots

    names, ks = _axes(report)
    figure = make_subplots(rows=1, cols=2, subplot_titles=("threshold", "what it saves: share of all environment steps"))
    found = {(point.signal, point.k): point for point in report.best if point is not None}
    palette = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")
    for number, name in enumerate(names):
        points = [found.get((name, k)) for k in ks]
        told = ["" if point is None else f"{point.rule}<br>{point.true_cuts} of {point.cut} cuts right" for point in points]
        for column, values in ((1, [point and point.threshold for point in points]), (2, [point and point.saving for point in points])):
            figure.add_scatter(
                row=1,
                col=column,
                x=ks,
                y=values,
                text=told,
                name=name,
                legendgroup=name,
                showlegend=column == 1,
                mode="lines+markers",
                line={"color": palette[number % len(palette)], "width": 1.5},
                hovertemplate="%{text}<br>%{y:.4g}<extra></extra>",
            )
    figure.update_xaxes(title_text="K")
    figure.update_yaxes(tickformat=".0%", rangemode="tozero", col=2)
    return figure


_PLOTS: Final[Sequence[tuple[str, str, Callable[[GateReport], Any]]]] = (
    (
        "What every signal knows",
        "Over all groups. rho above 0 and AUROC above 0.5: groups with a low signal tend to end with equal rewards, as the gate supposes. "
        "Below, the relation is the other way round.",
        _knowledge,
    ),
    (
        "The distance of prefixes by outcome",
        "Groups by how they ended. What lies under a threshold is cut: of mixed groups wrongly. Choose K on the left.",
        _distance,
    ),
    ("The signal of the rule by outcome", "The same of the signal that the rule reads.", _signal_of_rule),
    (
        "Savings against precision",
        "Every mark is a threshold. Right of the dashed line is what the floor allows; the circle is the rule that the tables are about. "
        "The stars are the references at its K. Choose the signal on the left.",
        _savings,
    ),
    (
        "Threshold against K",
        "The threshold that saves most among those above the precision floor, on all groups; a gap where none reaches it.",
        _threshold_against_k,
    ),
)


# ---------------------------------------------------------------- parts of plots


def _axes(report: GateReport) -> tuple[list[str], list[int]]:
    return list(dict.fromkeys(one.signal for one in report.correlations)), list(report.recorded.ks)


def _line(curve: Curve) -> tuple[list[Any], list[Any], list[str]]:
    """Precision, saving and a word on some thresholds of a curve."""
    index = evenly(len(curve), MOST_POINTS)
    cut, true = curve.cut[index], curve.true[index]
    told = [
        f"< {curve.threshold(i):g}: {right} of {n} right" for i, n, right in zip(index.tolist(), cut.tolist(), true.tolist(), strict=True)
    ]
    seen = cut > 0
    precision = np.where(seen, true / np.maximum(cut, 1), np.nan)
    return (
        [value if there else None for value, there in zip(precision.tolist(), seen.tolist(), strict=True)],
        curve.saving[index].tolist(),
        told,
    )


def _colour_of(k: int, ks: Sequence[int]) -> str:
    """From blue (early) to orange (late)."""
    share = (k - ks[0]) / max(1, ks[-1] - ks[0])
    red, green, blue = (round(low + share * (high - low)) for low, high in ((30, 240), (100, 130), (200, 20)))
    return f"rgb({red},{green},{blue})"


def _menu(figure: Any, choices: Sequence[Any], active: int) -> None:
    figure.update_layout(
        updatemenus=[{"buttons": list(choices), "active": active, "x": -0.02, "xanchor": "right", "y": 1.0, "yanchor": "top"}],
        margin={"l": 260},
    )


def _shown(figure: Any) -> str:
    figure.update_layout(template="plotly_white", margin_t=50, margin_b=50, font_size=13)
    text: str = figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False, "responsive": True})
    return text


def _summary(report: GateReport) -> str:
    recorded = report.recorded
    zero = int(recorded.zero_variance.sum())
    size = f" of {recorded.group_size}" if recorded.group_size else ""
    outcomes = ", ".join(f"{number} {outcome}" for outcome, number in report.outcomes.items())
    lines = [f"{len(recorded)} groups{size}, horizon {recorded.horizon}: {zero} with equal rewards ({outcomes})"]
    if report.point is not None:
        lines.append(f"Rule: {report.point.rule}")
    items = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    doubts = "".join(f"<li>{escape(warning)}</li>" for warning in report.warnings)
    told = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return f'{told}<ul class="notes">{items}</ul>' + (f'<ul class="warnings">{doubts}</ul>' if doubts else "")


_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font-family: system-ui, sans-serif; margin: 2em auto; max-width: 1250px; padding: 0 1em; color: #222; }}
h1 {{ font-size: 1.5em; }} h2 {{ font-size: 1.15em; margin-top: 2em; }}
pre {{ overflow-x: auto; font-size: 0.85em; line-height: 1.25; }}
.notes {{ color: #555; }} .warnings {{ color: #a33; }}
</style>
<script>{script}</script>
</head>
<body>
<h1>{title}</h1>
{summary}
{parts}
</body>
</html>
"""
