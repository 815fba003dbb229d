"""Configurations that the tests start from, and how they are written to files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from sluice.errors import ConfigError

SMALLEST: dict[str, Any] = {
    "exp_name": "arithmetic",
    "model": {"path": "checkpoint"},
    "tasks": {"train": [{"type": "reasoning_gym", "name": "basic_arithmetic", "size": 100, "domain": "math"}]},
    "rewards": {"math": {"verifier": {"type": "exact"}}},
    "rollout_batch_size": 4,
    "num_return_sequences_in_group": 8,
    "prompt_length": 32,
    "response_length": 16,
    "trainer": {"max_steps": 10, "learning_rate": 0.001},
}

TEXT = """\
exp_name: arithmetic
model:
  path: checkpoint
tasks:
  train:
    - {type: reasoning_gym, name: basic_arithmetic, size: 100, domain: math}
rewards:
  math:
    verifier: {type: exact}
rollout_batch_size: 4
num_return_sequences_in_group: 8
prompt_length: 32
response_length: 16
trainer:
  max_steps: 10
  learning_rate: 1e-3
"""


def smallest(**changes: Any) -> dict[str, Any]:
    """The smallest configuration, changed at dotted paths written with double underscores: `trainer__max_steps=3`."""
    data = copy.deepcopy(SMALLEST)
    for name, value in changes.items():
        *path, last = [int(part) if part.isdecimal() else part for part in name.split("__")]
        owner: Any = data
        for part in path:
            owner = owner[part] if isinstance(owner, list) else owner.setdefault(part, {})
        owner[last] = copy.deepcopy(value)
    return data


def write(folder: Path, text: str = TEXT) -> Path:
    """A recipe file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(err: ConfigError) -> list[str]:
    """The problems that an error tells, one each."""
    first, *more = str(err).split("\n  ")
    return more or [first]
