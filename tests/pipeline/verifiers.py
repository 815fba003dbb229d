"""Verifiers that the tests name by import path."""

from __future__ import annotations

import time

from sluice.types import Task


def begins_with_a(task: Task, response: str) -> float:
    return float(response.startswith("a"))


def always_right(task: Task, response: str) -> float:
    return 1.0


def never_returns(task: Task, response: str) -> float:
    while True:
        time.sleep(1)


def hangs_on_the_first_prompt(task: Task, response: str) -> float:
    while task.prompt == "aaa":
        time.sleep(1)
    return begins_with_a(task, response)


def begins_with_a_and_is_short(task: Task, response: str) -> dict[str, float]:
    """Right when it begins with a; of a bad format when it ends with one of the last letters."""
    return {"reward": begins_with_a(task, response), "invalid_format": float(response[-1:] in ("h", "i", "j"))}
