"""Tasks and settings as the tests of this room need them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sluice.config.models import RewardConfig, VerifierConfig
from sluice.types import EMPTY, Task

HERE = "tests.rewards.verifiers_for_tests"


def task(answer: str | None = "42", *, domain: str = "math", entry: Mapping[str, Any] = EMPTY) -> Task:
    return Task(task_id="t1", domain=domain, prompt="6*7=", prompt_ids=np.array([6, 42, 7, 61]), answer=answer, entry=entry)


def verifier(name: str, **args: Any) -> VerifierConfig:
    """A built-in verifier, or one of verifiers_for_tests when the name starts with a dot."""
    return VerifierConfig(type=f"{HERE}{name}" if name.startswith(".") else name, args=args)


def rewards(name: str, args: Mapping[str, Any] | None = None, **settings: Any) -> dict[str, RewardConfig]:
    """The settings of one domain, `math`."""
    return {"math": RewardConfig(verifier=verifier(name, **(args or {})), **settings)}
