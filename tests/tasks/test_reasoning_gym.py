from __future__ import annotations

import pickle
from typing import Any

import pytest

from sluice.config.models import TaskSourceConfig
from sluice.errors import ConfigError, TaskError
from sluice.tasks.reasoning_gym import ReasoningGymSource, shared_rows
from sluice.tasks.sources import data_seed


def settings(name: str = "chain_sum", **more: Any) -> TaskSourceConfig:
    return TaskSourceConfig(type="reasoning_gym", name=name, domain="math", **more)


def source(name: str = "chain_sum", default_seed: int = 0, **more: Any) -> ReasoningGymSource:
    return ReasoningGymSource(settings(name, **more), ("tasks", "train", 0), default_seed=default_seed)


def problem(name: str = "chain_sum", **more: Any) -> str:
    (found,) = source(name, **more).problems()
    return f"{'.'.join(map(str, found.path))}: {found.message}"


def test_rows_are_the_entries_of_the_package():
    import reasoning_gym

    rows = list(source(size=5, seed=3, params={"min_terms": 2, "max_terms": 2}).rows())
    data = reasoning_gym.create_dataset("chain_sum", size=5, seed=3, min_terms=2, max_terms=2)
    assert [row.entry for row in rows] == [data[k] for k in range(5)]
    assert [(row.prompt, row.answer) for row in rows] == [(data[k]["question"], data[k]["answer"]) for k in range(5)]
    assert [row.index for row in rows] == [0, 1, 2, 3, 4]
    assert pickle.loads(pickle.dumps(rows[0].entry)) == rows[0].entry
    assert rows[0].difficulty is None  # the package gives ranges of parameters, no number


def test_a_difficulty_that_is_a_number_is_kept():
    (row,) = source("gsm_symbolic", size=1, seed=1).rows()
    assert row.difficulty == 1.0


def test_an_unknown_data_set_names_the_nearest_one():
    assert problem("chain_sums").startswith("tasks.train.0.name: expected the name of a reasoning-gym data set, got 'chain_sums'")
    assert "did you mean chain_sum?" in problem("chain_sums")


def test_an_unknown_parameter_names_the_nearest_one():
    assert problem(params={"min_term": 2}) == "tasks.train.0.params.min_term: chain_sum has no such parameter - did you mean min_terms?"


@pytest.mark.parametrize("params", [{"min_terms": 0}, {"min_terms": 5, "max_terms": 2}, {"min_terms": "two"}])
def test_parameters_that_the_package_refuses_come_with_its_own_words(params: dict[str, Any]):
    found = problem(params=params)
    assert found.startswith(f"tasks.train.0.params: expected parameters of chain_sum, got {params}: ")
    assert any(kind in found for kind in ("AssertionError", "TypeError"))
    with pytest.raises(ConfigError, match=r"tasks\.train\.0: reasoning-gym cannot make chain_sum"):
        list(source(size=1, params=params).rows())


def test_sound_settings_have_no_problem():
    assert list(source(size=5, params={"min_terms": 2}).problems()) == []


def test_an_entry_that_cannot_be_made_is_refused_with_its_row(monkeypatch: pytest.MonkeyPatch):
    import reasoning_gym

    def fail(self: Any, index: int) -> dict[str, Any]:
        raise RuntimeError("no puzzle found")

    monkeypatch.setattr(reasoning_gym.arithmetic.ChainSumDataset, "__getitem__", fail)
    with pytest.raises(TaskError, match=r"row 0 of reasoning-gym chain_sum \(seed 7\) cannot be made .*RuntimeError: no puzzle found"):
        list(source(size=2, seed=7).rows())


def test_row_k_is_made_from_seed_plus_k_so_that_near_seeds_share_rows():
    first, second = settings(size=10), settings(size=10)
    alike = {row.prompt for row in source(size=10, seed=100).rows()} & {row.prompt for row in source(size=10, seed=104).rows()}
    assert len(alike) == shared_rows(first, 100, second, 104) == 6
    assert shared_rows(first, 100, second, 110) == 0
    assert shared_rows(first, 100, settings(size=10, params={"min_terms": 3}), 100) == 0
    assert shared_rows(first, 100, settings("basic_arithmetic", size=10), 100) == 0


def test_default_seeds_are_far_apart_and_do_not_depend_on_the_run():
    seeds = [data_seed(settings(), part, index) for part in ("train", "validation") for index in range(100)]
    assert min(b - a for a, b in zip(sorted(seeds), sorted(seeds)[1:], strict=False)) >= 10_000_000
    assert max(seeds) + 10_000_000 < 2**32
    assert data_seed(settings(seed=5), "train", 3) == 5


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"tasks\.train\.0: needs the package reasoning-gym.* install sluice-rl\[train\]"):
        list(source().rows())
