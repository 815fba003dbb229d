"""The page about the offline tools names what there is, and its example prints what it says."""

from __future__ import annotations

import re

import typer

from sluice.analysis.from_tables import GROUP
from sluice.analysis.page import PAGE
from sluice.analysis.report_files import CORRELATIONS, RECIPE, REPORT, THRESHOLDS
from sluice.cli.app import app
from sluice.gate import SIGNALS
from tests.analysis.recordings import ROOT

TEXT = (ROOT / "docs" / "gate_offline.md").read_text(encoding="utf-8")


def test_the_example_prints_what_stands_under_it(capsys) -> None:
    ((code, promised),) = re.findall(r"```python\n(.*?)```\n\nprints `([^`]*)`", TEXT, flags=re.DOTALL)
    exec(compile(code, "gate_offline.md", "exec", dont_inherit=True), {"__name__": "example"})
    assert capsys.readouterr().out.strip() == promised


def test_every_signal_column_and_file_is_named() -> None:
    for name in (*SIGNALS, *GROUP, "actions", "reward", "member_index", "observations", "lengths", "reward_var", "zero_variance"):
        assert f"`{name}`" in TEXT, name
    for name in (PAGE, CORRELATIONS, THRESHOLDS, REPORT, RECIPE):
        assert f"`{name}`" in TEXT, name


def test_every_option_is_named_and_every_named_option_exists() -> None:
    commands = typer.main.get_command(app).commands["gate"].commands
    here = [command for name, command in commands.items() if name != "learn"]  # which has a page of its own
    options = {name for command in here for one in command.params for name in one.opts if name.startswith("--")}
    for option in options - {"--help"}:
        assert option in TEXT, option
    named = {*re.findall(r"(?<![\w-])--[a-z][a-z-]*", TEXT)}
    assert named <= options | {"--record"}
