"""The page opens without a network, and shows every plot and table."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sluice.analysis import Settings, Trajectories, analyse
from sluice.analysis.page import PAGE, write_page
from sluice.analysis.reading import Recording
from sluice.errors import AnalysisError
from tests.analysis.recordings import some_groups


def report(**changes):
    trajectories = Trajectories.of_groups(some_groups(n=40))
    recording = Recording(recorded=trajectories.recorded([2, 3, 5], 8), trajectories=trajectories, sources=("runs/<b>",))
    return analyse(recording, replace(Settings(precision_floor=0.6, draws=30), **changes), choose=False)


class Seen(HTMLParser):
    """What a browser would fetch and show."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.plots = 0
        self.titles: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.open.append(tag)
        given = dict(attrs)
        self.fetched += [given[name] for name in ("src", "href") if given.get(name)]
        self.plots += "plotly-graph-div" in (given.get("class") or "")

    def handle_data(self, data) -> None:
        if self.open and self.open[-1] in ("h1", "h2"):
            self.titles.append(data)

    def handle_endtag(self, tag) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()


def test_the_page_needs_no_network_and_shows_everything(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    made = report()
    path = write_page(made, tmp_path, [("A table", "1 < 2")])
    text = path.read_text(encoding="utf-8")
    seen = Seen()
    seen.feed(text)
    assert path.name == PAGE
    assert seen.fetched == []
    is_distance = made.point.signal == "prefix_edit_distance_mean"
    assert seen.plots == (4 if is_distance else 5)
    assert "".join(seen.titles).startswith("Gate: <b>What every signal knows")
    assert "<pre>1 &lt; 2</pre>" in text
    assert "<b>" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    for note in (*made.notes, *made.warnings):
        assert note.split("'")[0][:30] in text


def test_the_plots_hold_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from sluice.analysis import page

    made = report()
    heat, savings = (json.loads(plot(made).to_json()) for plot in (page._knowledge, page._savings))
    values = {(one.signal, one.k): one.auroc for one in made.correlations}
    names = heat["data"][1]["y"]
    assert [[values[name, int(k)] for k in heat["data"][1]["x"]] for name in names] == heat["data"][1]["z"]
    lines = [trace for trace in savings["data"] if trace["mode"] == "lines+markers"]
    assert len(lines) == len(made.curves)
    assert sum(trace["visible"] for trace in lines) == 3  # of one signal, one for each K


def test_a_recording_without_a_rule_has_its_page_too(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    made = replace(report(), point=None, arms=(), best=(None,) * 21)
    assert write_page(made, tmp_path, []).stat().st_size > 1_000_000  # plotly's script stands in it


def test_without_plotly_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly", None)
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    with pytest.raises(AnalysisError, match=r"the plots need the package plotly, got: .* - pip install 'sluice-rl\[report\]'"):
        write_page(report(), tmp_path, [])
