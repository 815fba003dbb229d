"""The plots of `sluice correction report` as one HTML file that needs no network: plotly's script stands in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sluice.errors import CorrectionError

if TYPE_CHECKING:
    from sluice.correction.report import DivergenceReport


def write_page(report: DivergenceReport, path: Path, text: str) -> Path:
    """Write the page. text: the same report for readers of text, which stands under the plots.

    Raises:
        ImportError: plotly is missing.
        CorrectionError: the file cannot be written.
    """
    import plotly.offline as offline

    parts = [f"<h2>{escape(title)}</h2>{_shown(figure)}" for title, figure in _figures(report)]
    page = _PAGE.format(script=offline.get_plotlyjs(), parts="\n".join(parts), text=escape(text))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise CorrectionError(
            f"{path}: expected a file that can be written, got: {error.strerror or error} - give another --html"
        ) from error
    return path


def _figures(report: DivergenceReport) -> Iterator[tuple[str, Any]]:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=2, cols=2, subplot_titles=[f"{level.level} ({level.count:,})" for level in report.levels])
    for index, level in enumerate(report.levels):
        middles = [math.exp((low + high) / 2) for low, high in zip(level.edges, level.edges[1:], strict=False)]
        figure.add_bar(
            x=middles,
            y=level.counts,
            width=[math.exp(high) - math.exp(low) for low, high in zip(level.edges, level.edges[1:], strict=False)],
            row=index // 2 + 1,
            col=index % 2 + 1,
            showlegend=False,
            hovertemplate="ratio %{x:.4g}: %{y}<extra></extra>",
            marker_color="#4477aa",
        )
    figure.update_yaxes(type="log")
    figure.update_xaxes(title_text="p_train / p_inference", type="log")
    figure.update_layout(height=640, bargap=0)
    yield "Ratios at every level", figure

    places = [place.first + 1 for place in report.positions]
    figure = go.Figure()
    for name, values, colour in (
        ("mean", [place.mean for place in report.positions], "#4477aa"),
        ("99th percentile", [place.highest for place in report.positions], "#cc6677"),
    ):
        figure.add_scatter(
            x=places,
            y=values,
            customdata=[[place.last + 1, place.tokens] for place in report.positions],
            name=name,
            mode="lines+markers",
            line={"color": colour},
            hovertemplate="tokens %{x} to %{customdata[0]} (%{customdata[1]}): %{y:.5f}<extra></extra>",
        )
    figure.update_xaxes(title_text="sampled token of the response")
    figure.update_yaxes(title_text="|log p_train - log p_inference|", rangemode="tozero")
    yield "Where in a response", figure

    figure = go.Figure()
    names = [one.name for one in report.rejections]
    for name, values, colour in (
        ("tokens", [one.token_share for one in report.rejections], "#4477aa"),
        ("whole rows", [one.row_share for one in report.rejections], "#cc6677"),
    ):
        figure.add_bar(y=names, x=values, name=name, orientation="h", marker_color=colour, hovertemplate="%{x:.4%}<extra>%{y}</extra>")
    figure.update_xaxes(title_text="share taken out of the loss", tickformat=".1%", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_layout(height=140 + 44 * len(names), barmode="group")
    yield "What a rule takes out of the loss", figure


def _shown(figure: Any) -> str:
    figure.update_layout(template="plotly_white", margin_t=50, margin_b=50, font_size=13)
    text: str = figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False, "responsive": True})
    return text


_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Train-infer divergence</title>
<style>
body {{ font-family: system-ui, sans-serif; margin: 2em auto; max-width: 1250px; padding: 0 1em; color: #222; }}
h1 {{ font-size: 1.5em; }} h2 {{ font-size: 1.15em; margin-top: 2em; }}
pre {{ overflow-x: auto; font-size: 0.85em; line-height: 1.25; }}
</style>
<script>{script}</script>
</head>
<body>
<h1>Train-infer divergence</h1>
{parts}
<h2>As text</h2>
<pre>{text}</pre>
</body>
</html>
"""
