from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.errors import TrainerError
from sluice.types import Batch
from tests.trainer.tiny import FakeEngine, Run

SETTINGS: dict[str, Any] = {"max_steps": 4, "lr_scheduler_type": "linear", "warmup_steps": 1, "weight_decay": 0.1, "save_every_steps": 1}
LORA = {"r": 2, "alpha": 4.0, "target_modules": ["q_proj", "v_proj"]}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kl": {"beta": 0.1},
    "lora": {"lora": LORA, "logprob_tolerance": 100.0},
    "lora with dropout": {"lora": LORA | {"dropout": 0.5}, "logprob_tolerance": 100.0},
}
FILES = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]


def seeded(engine: FakeEngine, call: int) -> Batch:
    """The batch of the step that the published weights stand at: the same whoever asks for it."""
    engine.random = np.random.default_rng(engine.version)
    engine.next_id = 0
    return engine.batch()


@dataclass(frozen=True, kw_only=True)
class Straight:
    """A run of four steps in one go that wrote a checkpoint at each."""

    run: Run
    output: Path
    settings: dict[str, Any]


Straights = Callable[[str], Straight]


@pytest.fixture(scope="module")
def straight(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Straights:
    @cache
    def train(variant: str) -> Straight:
        settings, output = SETTINGS | VARIANTS[variant], tmp_path_factory.mktemp("straight")
        return Straight(run=Run(model_folder, output, seeded, **settings).train(), output=output, settings=settings)

    return train


@pytest.fixture
def checkpoint(straight: Straights, tmp_path: Path) -> Path:
    """A copy of the checkpoint of step 2, to be damaged."""
    return Path(shutil.copytree(straight("plain").output / "checkpoint-2", tmp_path / "checkpoint-2"))


def timeless(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.endswith("_seconds")}


def assert_same(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


# ---------------------------------------------------------------- what comes back


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("step", [1, 3])
def test_a_resumed_run_goes_on_as_if_it_had_not_been_broken_off(
    straight: Straights, model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], variant: str, step: int
) -> None:
    whole = straight(variant)
    run = Run(model_folder, tmp_path, seeded, **whole.settings)
    torch.manual_seed(123)
    capfd.readouterr()
    run.train(whole.output / f"checkpoint-{step}")
    assert capfd.readouterr() == ("", "")
    assert [version for version, _ in run.engine.published] == list(range(step, 5))
    for (_, ours), (_, theirs) in zip(run.engine.published, whole.run.engine.published[step:], strict=True):
        assert_same(ours, theirs)
    assert [(s, timeless(m)) for s, m in run.steps] == [(s, timeless(m)) for s, m in whole.run.steps[step:]]
    assert len(run.source.given) == 4 - step
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [f"checkpoint-{s}" for s in range(step + 1, 5)]


def test_loaded_weights_are_published_before_the_first_batch_is_asked_for(straight: Straights, model_folder: Path, tmp_path: Path) -> None:
    whole = straight("plain")

    def make(engine: FakeEngine, call: int) -> Batch:
        versions.append(engine.version)
        return seeded(engine, call)

    versions: list[int] = []
    run = Run(model_folder, tmp_path, make, **whole.settings).train(whole.output / "checkpoint-2")
    assert versions == [2, 3]
    assert_same(run.engine.published[0][1], whole.run.engine.published[2][1])


def test_a_finished_run_that_is_resumed_asks_for_nothing(straight: Straights, model_folder: Path, tmp_path: Path) -> None:
    whole = straight("plain")
    run = Run(model_folder, tmp_path, seeded, **whole.settings).train(whole.output / "checkpoint-4")
    assert run.source.given == run.steps == []
    assert [version for version, _ in run.engine.published] == [4]
    assert not list(tmp_path.iterdir())


def test_a_finished_run_goes_on_when_it_is_given_more_steps(model_folder: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"warmup_steps": 0}
    Run(model_folder, tmp_path, seeded, **settings | {"max_steps": 2}).train()
    run = Run(model_folder, tmp_path, seeded, **settings | {"max_steps": 5}).train(tmp_path / "checkpoint-2")
    assert [step for step, _ in run.steps] == [3, 4, 5]
    rates = [metrics["actor/learning_rate"] for _, metrics in run.steps]
    assert rates == pytest.approx([1e-2 * share for share in (3 / 5, 2 / 5, 1 / 5)])
    before, after = (run.engine.published[i][1]["model.norm.weight"] for i in (0, 1))
    assert not torch.equal(before, after), "the old schedule had come down to 0"


def test_how_often_to_save_is_a_setting_of_now(
    straight: Straights, model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = straight("plain")
    run = Run(model_folder, tmp_path, seeded, **whole.settings | {"max_steps": 5, "save_every_steps": 3})
    capfd.readouterr()
    run.train(whole.output / "checkpoint-1")
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-5"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("end", ["no batch", "stop"])
def test_a_resumed_run_that_ends_at_once_is_no_error_and_writes_nothing(
    straight: Straights, model_folder: Path, tmp_path: Path, end: str
) -> None:
    whole = straight("plain")
    run = Run(model_folder, tmp_path, lambda engine, call: None, **whole.settings)
    if end == "stop":
        run.trainer._stop.set()
    run.train(whole.output / "checkpoint-2")
    assert len(run.source.given) == (end == "no batch")
    assert [version for version, _ in run.engine.published] == [2]
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- what is written


@pytest.mark.parametrize("end", ["all steps", "last batch", "no batch", "stop"])
def test_whoever_asked_is_told_of_each_checkpoint_after_its_step(model_folder: Path, tmp_path: Path, end: str) -> None:
    def make(engine: FakeEngine, call: int) -> Batch | None:
        return None if end == "no batch" and call == 3 else engine.batch(is_last=end == "last batch" and call == 2)

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        told.append(("step", step))
        if end == "stop" and step == 3:
            run.trainer._stop.set()

    def on_save(step: int, folder: Path) -> None:
        told.append(("save", step))
        assert folder == tmp_path / f"checkpoint-{step}"
        assert {file.name for file in folder.iterdir()} >= set(FILES)

    told: list[tuple[str, int]] = []
    run = Run(model_folder, tmp_path, make, on_save=on_save, max_steps=3 if end == "all steps" else 9, save_every_steps=2)
    run.trainer._on_step = on_step
    run.train()
    assert told == [("step", 1), ("step", 2), ("save", 2), ("step", 3), ("save", 3)]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]


def test_an_error_of_whoever_is_told_of_checkpoints_ends_the_run(model_folder: Path, tmp_path: Path) -> None:
    def on_save(step: int, folder: Path) -> None:
        raise LookupError("no room for the state")

    run = Run(model_folder, tmp_path, seeded, on_save=on_save, **SETTINGS)
    with pytest.raises(LookupError, match="no room for the state"):
        run.train()
    assert [step for step, _ in run.steps] == [1]


@pytest.mark.parametrize("step", [3, 4])
def test_what_a_broken_run_left_under_the_name_of_a_checkpoint_is_replaced(
    straight: Straights, model_folder: Path, tmp_path: Path, step: int
) -> None:
    whole = straight("plain")
    torn = tmp_path / f"checkpoint-{step}"
    torn.mkdir()
    (torn / "manifest.json").write_text("{}")
    run = Run(model_folder, tmp_path, lambda engine, call: seeded(engine, call) if engine.version < step else None, **whole.settings)
    run.trainer.args.save_steps = 4
    run.train(whole.output / "checkpoint-2")
    assert {file.name for file in torn.iterdir()} >= set(FILES)
    assert not (torn / "manifest.json").exists()


# ---------------------------------------------------------------- what is refused


def refuse(model_folder: Path, folder: Path, found: str, **config: Any) -> None:
    """Resuming from this folder is refused before anything is published or asked for."""
    run = Run(model_folder, folder.parent / "output", seeded, **SETTINGS | config)
    with pytest.raises(TrainerError, match=rf"expected in {folder} a whole checkpoint .*{found}.* - resume from another one"):
        run.train(folder)
    assert run.source.given == run.engine.published == []


@pytest.mark.parametrize("file", FILES)
def test_a_checkpoint_without_one_of_its_files_is_refused(model_folder: Path, checkpoint: Path, file: str) -> None:
    (checkpoint / file).unlink()
    refuse(model_folder, checkpoint, "no weights for" if file == "model.safetensors" else f"got no {file}")


@pytest.mark.parametrize("file", [file for file in FILES if file != "rng_state.pth"])
def test_a_checkpoint_with_half_of_a_file_is_refused(model_folder: Path, checkpoint: Path, file: str) -> None:
    content = (checkpoint / file).read_bytes()
    (checkpoint / file).write_bytes(content[: len(content) // 2])
    refuse(model_folder, checkpoint, r"got \w+: ")


def test_a_checkpoint_with_half_of_a_random_state_is_refused_before_a_batch_is_asked_for(model_folder: Path, checkpoint: Path) -> None:
    (checkpoint / "rng_state.pth").write_bytes((checkpoint / "rng_state.pth").read_bytes()[:500])
    run = Run(model_folder, checkpoint.parent / "output", seeded, **SETTINGS)
    with pytest.raises(TrainerError, match=rf"expected in {checkpoint} a whole checkpoint"):
        run.train(checkpoint)
    assert run.source.given == []


def test_a_folder_that_is_none_is_refused(model_folder: Path, tmp_path: Path) -> None:
    refuse(model_folder, tmp_path / "checkpoint-7", "got no trainer_state.json, no optimizer.pt")


@pytest.mark.parametrize(("step", "found"), [(0, "of step 0"), (3, "of step 3 beside a schedule of step 2"), ("2", "of step '2'")])
def test_a_checkpoint_whose_files_are_of_different_steps_is_refused(
    model_folder: Path, checkpoint: Path, step: int | str, found: str
) -> None:
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    (checkpoint / "trainer_state.json").write_text(json.dumps(state | {"global_step": step}))
    refuse(model_folder, checkpoint, found)


def test_weights_of_another_shape_or_name_are_refused(model_folder: Path, checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    name = "model.norm.weight"
    for changed, found in (
        ({n: w for n, w in weights.items() if n != name}, rf"no weights for {name} \(1 in all\)"),
        (weights | {name: weights[name][:3].clone()}, "weights of another shape for "),
        (weights | {"model.other.weight": torch.zeros(2)}, "weights that the policy lacks: model.other.weight"),
    ):
        save_file(changed, checkpoint / "model.safetensors", metadata={"format": "pt"})
        refuse(model_folder, checkpoint, found)


def test_an_adapter_of_other_layers_or_rank_and_a_whole_model_in_its_place_are_refused(
    straight: Straights, model_folder: Path, checkpoint: Path
) -> None:
    adapter = straight("lora").output / "checkpoint-2"
    for folder, lora, found in (
        (adapter, LORA | {"target_modules": ["q_proj"]}, "weights that the policy lacks: .*v_proj"),
        (adapter, LORA | {"target_modules": ["q_proj", "v_proj", "o_proj"]}, "no weights for .*o_proj"),
        (adapter, LORA | {"r": 3}, "weights of another shape for "),
        (adapter, None, "no weights for "),
        (checkpoint, LORA, "no weights for .*lora_"),
    ):
        refuse(model_folder, folder, found, lora=lora)
