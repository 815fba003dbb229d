"""Rows made by reasoning-gym: procedural data sets by name, size, seed and parameters.

reasoning-gym makes row k from seed + k. Two data sets of one kind whose seeds are closer than their sizes therefore share rows; default
seeds (sources.py) are far apart, and `shared_rows` finds chosen ones that are not. The entry for the verifier is the package's own
(question, answer, metadata); its `metadata.source_dataset` names the data set. Source: https://github.com/open-thought/reasoning-gym
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from sluice.config.models import TaskSourceConfig
from sluice.config.problems import KeyPath, Problem, dotted, suggestion
from sluice.errors import ConfigError, TaskError
from sluice.tasks.base import Row, import_package, number_or_none


class ReasoningGymSource:
    """One procedural data set. Its rows name no domain, and a difficulty only where the package gives a number."""

    def __init__(self, settings: TaskSourceConfig, path: KeyPath, *, default_seed: int) -> None:
        self._path = path
        self._name = settings.name or ""
        self._size = settings.size or 0
        self._seed = default_seed if settings.seed is None else settings.seed
        self._params = settings.params

    def problems(self) -> Iterator[Problem]:
        """An unknown name, or parameters that the data set refuses. Imports the package."""
        known: dict[str, Any] = import_package("reasoning_gym.factory", "reasoning-gym", dotted(self._path)).DATASETS
        if self._name not in known:
            near = suggestion(self._name, known, what="there are")
            message = f"expected the name of a reasoning-gym data set, got '{self._name}'{near}"
            yield Problem(path=(*self._path, "name"), message=message)
            return
        config_class = known[self._name][1]
        parameters = {field.name for field in dataclasses.fields(config_class)} - {"seed", "size"}
        unknown = [name for name in self._params if name not in parameters]
        for name in unknown:
            near = suggestion(name, parameters, what="it has")
            yield Problem(path=(*self._path, "params", name), message=f"{self._name} has no such parameter{near}")
        if not unknown:
            try:
                config = config_class(seed=self._seed, size=self._size, **self._params)
                if hasattr(config, "validate"):
                    config.validate()
            except Exception as err:  # noqa: BLE001 - whatever the package raises is its way to refuse
                message = f"expected parameters of {self._name}, got {self._params}: {_said(err)}"
                yield Problem(path=(*self._path, "params"), message=message)

    def rows(self) -> Iterator[Row]:
        """Row k is the package's entry k. Raises `ConfigError` when the data set cannot be made, `TaskError` when an entry cannot."""
        key = dotted(self._path)
        package = import_package("reasoning_gym", "reasoning-gym", key)
        try:
            data = package.create_dataset(self._name, seed=self._seed, size=self._size, **self._params)
        except Exception as err:
            raise ConfigError(f"{key}: reasoning-gym cannot make {self._name} with {self._params}: {_said(err)}") from err
        for index in range(self._size):
            where = f"row {index} of reasoning-gym {self._name} (seed {self._seed})"
            try:
                entry = data[index]
            except Exception as err:
                raise TaskError(f"{where} cannot be made with {key}.params {self._params}: {_said(err)} - choose easier ones") from err
            yield Row(
                index=index,
                where=where,
                prompt=entry["question"],
                answer=entry["answer"],
                domain=None,
                tag=None,
                difficulty=number_or_none((entry.get("metadata") or {}).get("difficulty")),
                entry=entry,
            )


def shared_rows(first: TaskSourceConfig, first_seed: int, second: TaskSourceConfig, second_seed: int) -> int:
    """How many rows two reasoning-gym sources make alike: the overlap of [seed, seed + size) of one data set with the same parameters."""
    if first.type != "reasoning_gym" or (first.type, first.name, first.params) != (second.type, second.name, second.params):
        return 0
    end = min(first_seed + (first.size or 0), second_seed + (second.size or 0))
    return max(0, end - max(first_seed, second_seed))


def _said(err: Exception) -> str:
    """What the package said; the kind alone when it said nothing."""
    return f"{type(err).__name__}: {err}" if str(err) else type(err).__name__
