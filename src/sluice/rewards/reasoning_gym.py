"""`reasoning_gym`: the reasoning-gym data set that made a row also scores it.

Source: https://github.com/open-thought/reasoning-gym (`score_answer(answer, entry)`, 0 to 1, most sets with partial credit).
"""

from __future__ import annotations

import importlib
from functools import cached_property
from typing import Any, ClassVar

from pydantic import Field

from sluice.config.problems import KeyPath, suggestion
from sluice.rewards.base import BuiltinVerifier
from sluice.types import Task


class ReasoningGym(BuiltinVerifier):
    """The score that `metadata["source_dataset"]` of the row's entry gives to the response.

    The data set is built without its rows, once per worker and name. Some scorers read its parameters (decimal_arithmetic, puzzle24,
    polynomial_equations, time_intervals): give the same `params` here as to the task source.
    """

    package: ClassVar[str | None] = "reasoning_gym"

    binary: bool = False  # only an exactly right response earns 1.0, everything else 0.0: no partial credit
    strip: bool = True  # leave out white space around the response
    params: dict[str, dict[str, Any]] = Field({})  # parameters by data set name, where they are not the default ones

    def __call__(self, task: Task, response: str) -> float:
        """Score one response."""
        metadata = task.entry.get("metadata")
        name = metadata.get("source_dataset") if isinstance(metadata, dict) else None
        if not isinstance(name, str):
            raise ValueError(
                f"verifier 'reasoning_gym' expects rows with metadata.source_dataset, as reasoning-gym makes them, "
                f"task {task.task_id!r} has the fields {', '.join(map(str, task.entry)) or 'none'} - use another verifier for this domain"
            )
        scorer = self._scorers.get(name)
        if scorer is None:
            scorer = self._scorers[name] = self._dataset(name)
        score = float(scorer.score_answer(response.strip() if self.strip else response, dict(task.entry)))
        return float(score >= 1.0) if self.binary else score

    def preload(self) -> None:
        """Import the package."""
        importlib.import_module("reasoning_gym")

    def check(self) -> tuple[KeyPath, str] | None:
        """Unknown data sets and parameters. Imports the package only when there are any."""
        for name, params in self.params.items():
            known = importlib.import_module("reasoning_gym.factory").DATASETS
            if name not in known:
                near = suggestion(name, known, what="valid")
                return ("params", name), f"expected a data set of reasoning-gym, there is none of that name{near}"
            try:
                self._dataset(name)
            except Exception as err:  # noqa: BLE001 - whatever the package says about these parameters is the message
                return ("params", name), f"expected parameters of that data set, got {params}: {type(err).__name__}: {err}"
        return None

    @cached_property
    def _scorers(self) -> dict[str, Any]:
        return {}

    def _dataset(self, name: str) -> Any:
        return importlib.import_module("reasoning_gym").create_dataset(name, **self.params.get(name, {}))
