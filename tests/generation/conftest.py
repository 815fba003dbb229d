"""Models on disk, made once."""

from __future__ import annotations

import pytest

from sluice.generation.slot import SlotEngine
from tests.generation import tiny


@pytest.fixture(scope="session")
def qwen2():
    """The model that `qwen2_path` holds."""
    return tiny.qwen2()


@pytest.fixture(scope="session")
def qwen2_path(qwen2, tmp_path_factory):
    return tiny.saved(qwen2, tmp_path_factory.mktemp("models") / "qwen2")


@pytest.fixture
def engine(qwen2_path):
    """Four slots."""
    with SlotEngine.load(qwen2_path, max_slots=4, max_length=64, threads=1) as engine:
        yield engine
