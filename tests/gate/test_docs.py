"""The examples in the documentation run as they stand, and print what is written under them."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "gate.md"


def test_the_examples_run_and_print_what_they_say(capsys) -> None:
    text = DOCS.read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```\n+(?:prints (`[^`]*`(?: and `[^`]*`)?))?", text, flags=re.DOTALL)
    assert len(examples) == 5
    for code, promised in examples:
        exec(compile(code, str(DOCS), "exec", dont_inherit=True), {"__name__": "example"})
        printed = capsys.readouterr().out.splitlines()
        assert printed == re.findall(r"`([^`]*)`", promised)


def test_every_signal_rule_and_metric_is_named() -> None:
    from sluice.gate import SIGNALS, Gate, GateKeeper
    from sluice.gate.rules import RULES

    text = DOCS.read_text(encoding="utf-8")
    keeper = GateKeeper(Gate(k=1, threshold=1.0, horizon=5), group_size=2, audit_rate=1.0)
    for i in range(2):
        keeper.group_launched(i)
        keeper.observe(i, 0, 1, "a", "x")
        keeper.observe(i, 1, 1, "a", "x")
        keeper.decision(i)
        keeper.group_ended(i, [0.0, 0.0])
    ends = ("_low", "_high", "_n")
    metrics = {name for name in keeper.metrics() if not name.endswith(ends)}
    for name in (*SIGNALS, *RULES, *metrics):
        assert f"`{name}`" in text, name
