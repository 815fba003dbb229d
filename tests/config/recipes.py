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

AGENTIC: dict[str, Any] = {
    "pipeline": "agentic",
    "exp_name": "lake",
    "model": {"path": "checkpoint"},
    "environment": {"type": "frozen_lake"},
    "train_env_manager": {"num_env_groups": 4, "group_size": 8},
    "rollout_batch_size": 64,
    "sequence_length": 512,
    "trainer": {"max_steps": 10, "learning_rate": 0.001},
}

AGENTIC_TEXT = """\
pipeline: agentic
exp_name: lake
model:
  path: checkpoint
environment:
  type: frozen_lake
train_env_manager:
  num_env_groups: 4
  group_size: 8
rollout_batch_size: 64
sequence_length: 512
trainer:
  max_steps: 10
  learning_rate: 1e-3
"""

AGENTIC_FULL: dict[str, Any] = {  # every key that only an agentic run has, with a value other than its default
    **AGENTIC,
    "environment": {
        "type": "household",
        "args": {"size": "small", "task_types": ["look_at_obj_in_light"]},
        "max_steps": 30,
        "workers": 3,
        "episodes_per_worker": 50,
        "reset_timeout_s": 20.0,
        "step_timeout_s": None,
    },
    "val_environment": {"type": "household", "args": {"split": "unseen"}, "run_in": "thread", "max_steps": 25},
    "env_monitor": {"interval_s": 5.0, "hung_after_s": 120.0, "on_hung": "replace"},
    "dialogue": {
        "style": "chat",
        "system_prompt": "Answer with <action>...</action>.",
        "first_template": "{observation}\nCommands: {admissible_commands}",
        "turn_template": "{observation} ({turn}, {turns_left} left)",
        "stop": ["</action>", "\n"],
        "action_pattern": "<action>(.*?)</action>",
        "max_tokens_per_turn": 32,
        "max_turns": 25,
        "timeout_s": 90.0,
    },
    "train_env_manager": {
        "num_env_groups": 4,
        "group_size": 8,
        "group_size_redundancy": 2,
        "group_filter_config": {"type": "std_filter", "filter_args": {"std_threshold": 0.1}},
        "max_traj_per_env": 3,
    },
    "val_env_manager": {"num_env_groups": 32, "group_size": 2, "group_filter_cls": "my_package.MyFilter"},
    "validation": {"every_steps": 5, "temperature": 0.5, "filtering": "apply"},
    "gate": {
        "k": 8,
        "threshold": 0.2,
        "signal": "unique_prefix_ratio",
        "on_cut": "drop",
        "audit_rate": 0.2,
        "hold_precision": 0.9,
        "most_scale": 1.5,
        "window": 150,
        "confidence": 0.9,
        "futility": {
            "steps": 6,
            "loops": 3,
            "invalid_actions": 4,
            "progress_steps": 9,
            "audit_rate": 0.2,
            "window": 300,
            "hold_precision": 0.9,
        },
    },
    "async_generation_ratio": 1.5,
    "on_weight_update": "continue",
    "resampling": {"surplus": "carry", "max_staleness": 3, "on_member_failure": "judge", "group_timeout_s": 60.0, "min_members": 6},
    "guard": {"scope": "window", "window": 50, "policy": "wait"},
    "trainer": {"max_steps": 10, "learning_rate": 0.001, "stale_tokens": "mask"},
}


def smallest(**changes: Any) -> dict[str, Any]:
    """The smallest configuration, changed at dotted paths written with double underscores: `trainer__max_steps=3`."""
    return _changed(SMALLEST, changes)


def agentic(**changes: Any) -> dict[str, Any]:
    """The smallest agentic configuration, changed in the same way."""
    return _changed(AGENTIC, changes)


def _changed(start: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    data = copy.deepcopy(start)
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
