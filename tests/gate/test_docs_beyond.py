"""The page on what goes beyond the published gate: its examples run and print what is written under them, its recipe loads."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from sluice.config.gate import GateConfig
from sluice.gate import FutilityRule
from tests.gate.played_groups import fitted

DOCS = Path(__file__).parents[2] / "docs" / "gate_beyond.md"


def test_the_examples_run_and_print_what_they_say(capsys) -> None:
    examples = re.findall(r"```python\n(.*?)```\n+prints `([^`]*)`", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(examples) == 2
    for code, promised in examples:
        exec(compile(code, str(DOCS), "exec", dont_inherit=True), {"__name__": "example"})
        assert capsys.readouterr().out.splitlines() == [promised]


def test_the_recipe_is_one(tmp_path, monkeypatch) -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    fitted().save("gate_model.json")
    gate = GateConfig(**yaml.safe_load(text)["gate"])
    assert gate.cuts_groups
    assert gate.futility is not None
    assert (gate.futility.floor, gate.futility.hold_precision) == (0.95, 0.9)


def test_every_sign_is_named() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for name in FutilityRule.__dataclass_fields__:
        assert f"`{name}`" in text
