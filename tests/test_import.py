"""`import sluice` costs next to nothing, and what decides never loads what acts."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sluice

HEAVY = ("torch", "ray", "transformers", "trl", "datasets", "peft", "tensordict", "reasoning_gym", "math_verify")
LIGHT_ROOMS = (
    "types",
    "errors",
    "config",
    "workers",
    "tasks",
    "rewards",
    "gate",
    "filters",
    "advantage",
    "ledger",
    "scheduler",
    "environments",
    "analysis",
)


def modules_after(code: str) -> set[str]:
    """What a fresh interpreter has loaded after running the code."""
    shown = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"], capture_output=True, text=True, check=True, timeout=60
    )
    return set(shown.stdout.split())


def test_import_sluice_loads_nothing_heavy() -> None:
    loaded = modules_after("import sluice")
    assert not loaded & {*HEAVY, "numpy", "pydantic", "yaml", "rich", "typer"}
    assert not {name for name in loaded if name.startswith("sluice.")}


def test_rooms_that_decide_load_no_torch() -> None:
    loaded = modules_after("\n".join(f"import sluice.{room}" for room in LIGHT_ROOMS))
    assert not loaded & set(HEAVY)
    assert {f"sluice.{room}" for room in LIGHT_ROOMS} <= loaded


def test_help_loads_nothing_heavy() -> None:
    loaded = modules_after("import sluice.cli.app")
    assert not loaded & {*HEAVY, "numpy", "pydantic"}


def test_public_names_come_from_their_rooms_on_first_use() -> None:
    from sluice.config import load_config
    from sluice.types import Verdict

    assert sluice.Verdict is Verdict
    assert sluice.load_config is load_config
    assert sluice.filters.build_query_filter is not None
    assert set(sluice.__all__) <= set(dir(sluice))
    for name in sluice.__all__:
        assert getattr(sluice, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'sluice' has no attribute 'nothing'"):
        _ = sluice.nothing
