"""A loop in which something does not return: whoever waits for it is told in bounded time what it is."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sluice.config import load_config
from sluice.pipeline import run as run_module
from sluice.pipeline.loop_thread import LoopStuck, LoopThread
from sluice.pipeline.train import train
from sluice.records import read_facts, read_summary
from tests.pipeline.environments import SayA
from tests.pipeline.test_agentic import write_recipe
from tests.pipeline.test_rlvr import Recorder
from tests.trainer.tiny import save_tiny_model


def test_a_call_of_a_stuck_loop_is_given_up_in_time() -> None:
    gate = threading.Event()
    with LoopThread(threading.Event()) as loop:
        holding = threading.Thread(target=loop.do, args=(gate.wait,))
        holding.start()
        with pytest.raises(LoopStuck, match=r"did not answer within 0.05 s .* does not return"):
            loop.do(lambda: 1, 0.05)
        gate.set()
        holding.join()
        assert loop.do(lambda: 2, 60.0) == 2


def test_a_time_out_of_what_is_called_is_passed_on() -> None:
    async def late() -> None:
        raise TimeoutError("mine")

    with LoopThread(threading.Event()) as loop, pytest.raises(TimeoutError, match="mine"):
        loop.run(late(), 60.0)


class Stuck(SayA):
    """The last of many steps does not return, and whoever watches presses Ctrl-C."""

    steps: ClassVar[int] = 0
    last: ClassVar[int] = 0
    gate: ClassVar[threading.Event] = threading.Event()

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        Stuck.steps += 1
        if Stuck.steps == Stuck.last:
            os.kill(os.getpid(), signal.SIGINT)
            Stuck.gate.wait()
        return super().step(action)


@pytest.mark.parametrize("last", [9, 149])  # before the first optimiser step, and after it
def test_ctrl_c_ends_a_run_whose_inline_environment_hangs(last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "CLOSE_S", 0.2)
    monkeypatch.setattr(run_module, "STUCK_S", 0.05)
    monkeypatch.setattr(LoopThread.do, "__defaults__", (0.2,))
    monkeypatch.setattr("sluice.pipeline.loop_thread.JOIN_S", 0.05)
    monkeypatch.setattr(Stuck, "last", last)
    monkeypatch.setattr(Stuck, "steps", 0)
    monkeypatch.setattr(Stuck, "gate", threading.Event())
    (tmp_path / "model").mkdir()
    file = write_recipe(
        tmp_path,
        save_tiny_model(tmp_path / "model"),
        environment={"type": "tests.pipeline.test_stuck.Stuck", "run_in": "inline"},
        train_env_manager__group_filter_config={"type": "no_filter"},
        val_env_manager=None,
        validation={},
        trainer__max_steps=50,
    )
    try:
        with pytest.raises(
            LoopStuck, match=r"environment tests.pipeline.test_stuck.Stuck \(say-\d+\) is in one step for .*environment.run_in"
        ):
            train(load_config(file), config_path=file, display=Recorder())
    finally:
        Stuck.gate.set()
    (folder,) = (tmp_path / "runs").iterdir()
    assert read_facts(folder / "run.db")["status"] == "failed"
    summary = read_summary(folder / "run.db")
    assert summary.tokens == summary.engine_tokens > 0
