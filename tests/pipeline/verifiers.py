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
