"""What the tests of this room share: a tiny model, real processes, a garbage collector that searches the imports once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.pipeline.collector import calm_garbage_collector
from tests.pipeline.processes import Zygote
from tests.trainer.tiny import save_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that nobody writes to."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def runs() -> Iterator[Zygote]:
    """Runs of the command as processes of their own, at the price of one import of torch. None is left at the end."""
    started = Zygote()
    yield started
    started.close()
    assert started.left_over() == [], "processes are left over"


@pytest.fixture(autouse=True)
def imports_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run begins with a collection, which takes as long as a few of its steps when it has to look at every module once more."""
    monkeypatch.setattr("sluice.pipeline.train.calm_garbage_collector", functools.partial(calm_garbage_collector, thaw=False))
