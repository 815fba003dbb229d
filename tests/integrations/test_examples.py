"""The examples run as they are, and the pages show them as they are."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing(_[a-z]+)?` is deprecated:FutureWarning")  # as TRL asks for it


def source(name: str) -> str:
    return (EXAMPLES / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["trl_plain.py", "trl_dynamic.py", "trl_rollout_func.py", "trl_agent.py"])
def test_a_script_for_trl_trains(
    name: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    torch.manual_seed(0)
    short = (
        source(name)
        .replace("max_steps=30", "max_steps=2")
        .replace("max_steps=20", "max_steps=2")
        .replace("logging_steps=", "disable_tqdm=True, logging_steps=")
    )
    assert short != source(name)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(short, name, "exec"), names)
    trainer = names["trainer"]
    assert trainer.state.global_step == 2
    if name != "trl_plain.py":
        assert trainer.state.log_history[-1]["train_loss"] is not None
        sampler = getattr(trainer, "batch_sampler", None) or names["dynamic"].batch_sampler
        assert sampler.machine.ledger.groups["trained"] == 8


@pytest.mark.parametrize("name", ["slime_filter.py", "verl_groups.py"])
def test_a_script_for_another_framework_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert "no_spread" in capsys.readouterr().out


def test_three_lines_make_the_plain_script_the_dynamic_one() -> None:
    plain = source("trl_plain.py").splitlines()[1:]
    added = [line for line in source("trl_dynamic.py").splitlines()[1:] if line and line not in plain]
    assert added == [
        "from trl import GRPOConfig",  # GRPOTrainer is not needed any more
        "from sluice.integrations.trl import DynamicSampling, DynamicSamplingGRPOTrainer",
        "trainer = DynamicSamplingGRPOTrainer(",
        "    dynamic_sampling=DynamicSampling(max_resample_rounds=20),",
    ]


def test_the_page_shows_the_plain_script_as_it_is() -> None:
    script = source("trl_plain.py").split('"""\n\n', 1)[1]
    page = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")
    assert f"```python\n{script}```" in page
    for line in source("trl_dynamic.py").splitlines():
        if "Dynamic" in line and "import" in line:
            assert line in page


def test_every_setting_is_on_the_page() -> None:
    from dataclasses import fields

    from sluice.integrations.trl import DynamicSampling

    page = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")
    for field in fields(DynamicSampling):
        if field.name not in ("requeue", "quarantine_after"):
            assert f"`{field.name}`" in page, field.name


def test_doors_to_frameworks_that_are_not_installed_load_nothing_heavy() -> None:
    code = "import sluice.integrations.slime, sluice.integrations.verl, sluice.integrations.trl, sys; print(*sys.modules)"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.split())
    assert not loaded & {"torch", "trl", "transformers", "datasets", "verl", "slime", "ray", "tensordict"}
