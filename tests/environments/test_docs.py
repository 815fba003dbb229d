"""The example in the documentation runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "environments.md"


def test_the_example_runs(capsys) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    exec(compile(example, str(DOCS), "exec"), {"__name__": "example"})
    assert "'env/episodes': 1.0" in capsys.readouterr().out
