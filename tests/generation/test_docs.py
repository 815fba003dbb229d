"""The example of the page on engines runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "engines.md"


def test_the_example_runs(capsys) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    exec(compile(example, str(DOCS), "exec"), {"__name__": "example"})
    lengths, total = re.fullmatch(r"\[([\d, ]+)\] (\d+)\n", capsys.readouterr().out).groups()  # type: ignore[union-attr]
    assert sum(map(int, lengths.split(", "))) == int(total) > 2
