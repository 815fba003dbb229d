"""The train-infer correction in training: what leaves the loss, how the rest is weighted, and what a rejected row does to its group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sluice.config.models import AdvantageConfig
from sluice.errors import TrainerError
from sluice.trainer import advantages_for, samples_from_batch
from sluice.types import Batch, Group, Turn
from tests.correction import naive
from tests.trainer.test_trl import LOSS_TYPES, Behind, always, with_turns
from tests.trainer.tiny import FakeEngine, Run, load, logprobs_of

BAND = {"filters": [{"enabled": True, "ratio_low": 0.8, "ratio_high": 1.25}]}
SEGMENTS = {"filters": [{"enabled": True, "agg_type": "segment", "ratio_low": 0.9, "ratio_high": 1.1}]}
WEIGHTED = {"is_weight": {"enabled": True, "weight_type": "token", "upper_bound": 1.5}}


def noisy(batch: Batch, size: float = 0.4) -> Batch:
    """The batch as an engine of low precision would give it: every inference log-prob is off, by an amount that its token decides."""

    def spoil(turn: Turn) -> Turn:
        off = size * np.sin(np.arange(len(turn.token_ids)) * 2.0 + turn.token_ids.astype(float))
        return replace(turn, inference_logprobs=(turn.inference_logprobs + off).astype(np.float32))

    return with_turns(batch, spoil)


def noisily(engine: FakeEngine, call: int) -> Batch:
    return noisy(engine.batch())


def shifted(group: Group, member: int, by: float) -> Group:
    """One member's inference log-probs are all off by the same amount."""
    rollout = group.rollouts[member]
    turns = tuple(replace(turn, inference_logprobs=turn.inference_logprobs + np.float32(by)) for turn in rollout.turns)
    return replace(group, rollouts=tuple(replace(r, turns=turns) if i == member else r for i, r in enumerate(group.rollouts)))


def corrected_run(folder: Path, output: Path, make: Any, correction: dict[str, Any] | None, **changes: Any) -> Run:
    return Run(folder, output, make, correction=correction, **({"logprob_tolerance": None, "max_grad_norm": 1e9} | changes))


def reference(model: Any, batch: Batch, cfg: dict[str, Any], loss_type: str, longest: int = 6) -> torch.Tensor:
    """The loss of a whole corrected batch by its formulas, row by row, without TRL and without the library."""
    samples = samples_from_batch(batch)
    whole = [[*sample.prompt_ids.tolist(), *sample.completion_ids.tolist()] for sample in samples]
    now = [row[len(sample.prompt_ids) - 1 :] for row, sample in zip(logprobs_of(model, whole), samples, strict=True)]
    found, weights = [], []
    for sample, row in zip(samples, now, strict=True):
        old, inference = row.detach().numpy().astype(float)[None], sample.inference_logprobs.astype(float)[None]
        result = naive.correct(cfg, sample.loss_mask[None], old, inference)
        is_rejected = sample.loss_mask.any() and not (sample.loss_mask & result["filter_mask"][0]).any()
        counted = sample.is_counted and not (is_rejected and cfg.get("baseline", "survivors") == "survivors")
        found.append(replace(sample, loss_mask=sample.loss_mask & result["filter_mask"][0], is_counted=counted))
        weights.append(torch.from_numpy(result["is_weight"][0]).float())
    advantages = advantages_for(found, AdvantageConfig())
    rows = []
    for sample, row, weight, advantage in zip(found, now, weights, advantages, strict=True):
        keep = torch.from_numpy(sample.loss_mask)
        if keep.any():
            rows.append((-torch.exp(row - row.detach()) * float(advantage) * weight)[keep])
    if loss_type == "grpo":
        return torch.stack([row.mean() for row in rows]).mean()
    if loss_type == "dr_grpo":
        return torch.cat(rows).sum() / (len(rows) * longest)
    return torch.cat(rows).sum() / sum(len(row) for row in rows)


# ---------------------------------------------------------------- the loss is the corrected loss


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize(
    "cfg", [BAND, BAND | WEIGHTED, SEGMENTS | {"is_weight": {"enabled": True, "weight_type": "segment"}} | {"baseline": "all"}, WEIGHTED]
)
def test_the_loss_is_that_of_the_tokens_that_are_left_with_their_weights(
    model_folder: Path, tmp_path: Path, cfg: dict[str, Any], loss_type: str
) -> None:
    run = corrected_run(model_folder, tmp_path, noisily, cfg, loss_type=loss_type, max_steps=2).train()
    batch = run.source.given[-1]
    assert batch is not None
    policy = load(model_folder)
    policy.load_state_dict(run.engine.published[-2][1])
    loss = reference(policy, batch, cfg, loss_type)
    loss.backward()
    metrics = run.steps[-1][1]
    assert metrics["actor/loss"] == pytest.approx(loss.item(), abs=2e-6)
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(run.gradients[-1][name], parameter.grad, atol=2e-5, rtol=1e-3)
    if cfg is not WEIGHTED:
        assert 0 < metrics["actor/train_infer_final_mask_mean"] < 1
        assert metrics["batch/loss_tokens"] < sum(group.sampled_tokens for group in batch.groups)
    assert metrics["actor/correction_seconds"] > 0
    assert metrics["actor/old_logprobs_seconds"] > 0


# ---------------------------------------------------------------- on and off, on every path


def sync_batch(engine: FakeEngine, call: int) -> Batch:
    return engine.batch()


def multi_turn(engine: FakeEngine, call: int) -> Batch:
    groups = tuple(engine.group(g, [2 + g, 3], [1, 3, 2], [1.0, 0.0, 0.5], reply=[9, 4]) for g in range(2))
    return Batch(groups=groups, requested=2, step=call)


PATHS: dict[str, tuple[Any, dict[str, Any]]] = {
    "full weights": (sync_batch, {}),
    "lora": (sync_batch, {"lora": {"r": 2, "alpha": 4.0, "target_modules": ["q_proj", "v_proj"]}}),
    "lora with dropout": (sync_batch, {"lora": {"r": 2, "alpha": 4.0, "dropout": 0.3, "target_modules": ["q_proj", "v_proj"]}}),
    "asynchronous": (Behind(2), {"async_generation_ratio": 1.0}),
    "several turns": (multi_turn, {}),
    "with a reference policy": (sync_batch, {"beta": 0.1}),
}


@pytest.mark.parametrize("path", PATHS)
def test_case_121_on_and_off_change_the_training_mask_in_every_path(model_folder: Path, tmp_path: Path, path: str) -> None:
    make, changes = PATHS[path]
    masks: dict[str, list[tuple[int, int]]] = {}
    for name, cfg in {"on": BAND | WEIGHTED, "off": None, "measured": {"presets": ["diagnostics"]}}.items():
        if isinstance(make, Behind):
            make = Behind(2)
        run = corrected_run(model_folder, tmp_path, lambda engine, call, make=make: noisy(make(engine, call)), cfg, **changes)
        seen: list[tuple[int, int]] = []

        def compute_loss(
            model: Any, inputs: Any, *given: Any, loss: Any = run.trainer.compute_loss, seen: Any = seen, **more: Any
        ) -> torch.Tensor:
            seen.append((int(inputs["tool_mask"].sum()), inputs["advantages"].dim()))
            return loss(model, inputs, *given, **more)  # type: ignore[no-any-return]

        run.trainer.compute_loss = compute_loss  # type: ignore[method-assign]
        run.train()
        masks[name] = seen
        told = [metrics["batch/loss_tokens"] for _, metrics in run.steps]
        assert sum(told) == sum(tokens for tokens, _ in seen)
        assert all(("actor/train_infer_final_mask_mean" in metrics) == (cfg is not None) for _, metrics in run.steps)
    assert sum(tokens for tokens, _ in masks["on"]) < sum(tokens for tokens, _ in masks["off"])
    assert [tokens for tokens, _ in masks["measured"]] == [tokens for tokens, _ in masks["off"]]
    assert {dimensions for _, dimensions in masks["on"]} == {2}
    assert {dimensions for _, dimensions in masks["off"]} == {1}


def test_equal_engines_train_as_without_a_correction(model_folder: Path, tmp_path: Path) -> None:
    plain = Run(model_folder, tmp_path, always).train()
    corrected = Run(model_folder, tmp_path, always, correction=BAND | WEIGHTED).train()  # with the tolerance of float32
    for (_, ours), (_, theirs) in zip(corrected.steps, plain.steps, strict=True):
        assert ours["actor/loss"] == pytest.approx(theirs["actor/loss"], abs=1e-5)
        assert ours["actor/train_infer_final_mask_mean"] == 1.0
        assert ours["batch/loss_tokens"] == theirs["batch/loss_tokens"]


def test_the_tolerance_holds_with_a_correction_unless_it_is_switched_off(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=r"within 0\.0001 of each other"):
        Run(model_folder, tmp_path, noisily, correction=BAND).train()


# ---------------------------------------------------------------- rows that are rejected whole


def rejected_first(engine: FakeEngine, call: int) -> Batch:
    """Two rewards that differ by 99, and the first row is off by e^-1 at every token."""
    group = engine.group(0, [2, 3], [3, 3], [100.0, 1.0])
    return Batch(groups=(shifted(group, 0, 1.0),), requested=1, step=call)


ROWS = {"filters": [{"enabled": True, "agg_type": "geometric", "ratio_low": 0.5, "ratio_high": 2.0}]}


def test_case_57_a_rejected_sibling_leaves_the_baseline(model_folder: Path, tmp_path: Path) -> None:
    survivors = corrected_run(model_folder, tmp_path, rejected_first, ROWS, max_steps=1)
    (tensors,) = survivors.trainer._micro_batches(rejected_first(survivors.engine, 0))
    assert tensors["advantages"].unique().tolist() == [0.0]  # the group has one member left
    assert survivors.trainer._step_metrics["batch/counted_rollouts"] == 1
    assert survivors.trainer._step_metrics["actor/train_infer_rejected_rows"] == 1
    assert survivors.trainer._step_metrics["batch/useful_tokens"] == 0
    everyone = corrected_run(model_folder, tmp_path, rejected_first, ROWS | {"baseline": "all"}, max_steps=1)
    (tensors,) = everyone.trainer._micro_batches(rejected_first(everyone.engine, 0))
    assert len(tensors["tool_mask"]) == 1
    assert tensors["advantages"].unique().tolist() == [pytest.approx(-0.70710678)]
    assert everyone.trainer._step_metrics["batch/counted_rollouts"] == 2
    assert everyone.trainer._step_metrics["batch/useful_groups"] == 1


def test_survivors_are_compared_with_survivors(model_folder: Path, tmp_path: Path) -> None:
    def make(engine: FakeEngine, call: int) -> Batch:
        group = engine.group(0, [2, 3], [3, 2, 4, 3], [9.0, 1.0, 0.0, 0.0])
        return Batch(groups=(shifted(group, 0, -1.0),), requested=1, step=call)

    run = corrected_run(model_folder, tmp_path, make, ROWS, max_steps=1)
    (tensors,) = run.trainer._micro_batches(make(run.engine, 0))
    found = sorted(row[0].item() for row in tensors["advantages"])
    assert found == pytest.approx([-0.57735, -0.57735, 1.15470], abs=1e-4)


def test_case_101_a_batch_of_which_nothing_is_left_skips_the_step(model_folder: Path, tmp_path: Path) -> None:
    """No backward pass and no gradients, so that neither momentum nor weight decay moves anything."""

    def make(engine: FakeEngine, call: int) -> Batch:
        off = np.float32(call == 1)
        return with_turns(engine.batch(), lambda turn: replace(turn, inference_logprobs=turn.inference_logprobs + off))

    nothing = {"filters": [{"enabled": True, "agg_type": "geometric", "ratio_low": 0.999, "ratio_high": 1.001}]}
    run = corrected_run(model_folder, tmp_path, make, nothing, max_steps=3, weight_decay=0.1)
    backward = []
    accelerate = run.trainer.accelerator.backward

    def noted(*given: Any, **more: Any) -> None:
        backward.append(run.trainer.state.global_step)
        accelerate(*given, **more)

    run.trainer.accelerator.backward = noted  # type: ignore[method-assign]
    run.train()
    assert [metrics["actor/step_skipped"] for _, metrics in run.steps] == [0.0, 1.0, 0.0]
    assert set(backward) == {0, 2}
    assert run.gradients[1] == {}
    weights = [state for _, state in run.engine.published]
    assert all(torch.equal(weights[1][name], weights[2][name]) for name in weights[1])
    assert not all(torch.equal(weights[2][name], weights[3][name]) for name in weights[2])
    skipped = run.steps[1][1]
    assert skipped["actor/train_infer_final_mask_mean"] == 0.0
    assert skipped["actor/train_infer_rejected_rows"] == 12
    assert skipped["batch/loss_tokens"] == skipped["actor/rows"] == 0.0


# ---------------------------------------------------------------- numbers that are none


def spoilt(value: float) -> Any:
    """The second token of every first turn has this as its inference log-prob."""

    def make(engine: FakeEngine, call: int) -> Batch:
        def spoil(turn: Turn) -> Turn:
            return replace(
                turn, inference_logprobs=np.where(np.arange(len(turn.token_ids)) == 1, np.float32(value), turn.inference_logprobs)
            )

        return with_turns(engine.batch(), spoil)

    return make


@pytest.mark.parametrize("correction", [None, {"presets": ["icepop"]}])
def test_case_113_tokens_without_a_number_are_counted_in_every_mode_and_train_as_equal_ones(
    model_folder: Path, tmp_path: Path, correction: Any
) -> None:
    plain = Run(model_folder, tmp_path, always).train()
    run = corrected_run(model_folder, tmp_path, spoilt(float("nan")), correction, max_grad_norm=1.0).train()
    for (_, ours), (_, theirs) in zip(run.steps, plain.steps, strict=True):
        assert ours["actor/loss"] == pytest.approx(theirs["actor/loss"], abs=1e-5)
        assert ours["actor/nan_logprobs"] == sum(length > 1 for length in (1, 2, 3, 6, 4, 4, 2, 1, 2, 5, 3, 3))
        assert np.isfinite(ours["actor/logprob_gap_mean"])
        if correction is not None:
            assert ours["actor/train_infer_nan_tokens"] == ours["actor/nan_logprobs"]


def test_case_113_a_batch_without_a_single_inference_log_prob_is_no_batch_to_correct(model_folder: Path, tmp_path: Path) -> None:
    """Every ratio would be 1: a correction that is switched on and does nothing."""

    def make(engine: FakeEngine, call: int) -> Batch:
        return with_turns(engine.batch(), lambda turn: replace(turn, inference_logprobs=np.full(len(turn.token_ids), np.nan, np.float32)))

    with pytest.raises(TrainerError, match="expected the engine's log-prob of every sampled token, got none"):
        corrected_run(model_folder, tmp_path, make, {"presets": ["icepop"]}).train()


def test_rows_with_an_infinite_log_prob_leave_the_loss_and_nothing_leaks(model_folder: Path, tmp_path: Path) -> None:
    run = corrected_run(model_folder, tmp_path, spoilt(float("-inf")), {"presets": ["token_tis"]}).train()
    for _, metrics in run.steps:
        assert metrics["actor/train_infer_non_finite"] == 10
        assert metrics["actor/rows"] == 2
        assert np.isfinite([metrics["actor/loss"], metrics["actor/grad_norm"]]).all()


def test_case_119_a_shift_shows_as_a_warning_in_the_first_step_where_no_tolerance_is_held(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(engine: FakeEngine, call: int) -> Batch:
        return with_turns(engine.batch(), lambda turn: replace(turn, inference_logprobs=np.roll(turn.inference_logprobs, 1)))

    for batches, warnings in ((make, 1), (noisily, 0)):
        caplog.clear()
        corrected_run(model_folder, tmp_path, batches, BAND).train()
        told = [record.getMessage() for record in caplog.records if record.name == "sluice.trainer"]
        assert len(told) == warnings
        assert all("one may be shifted" in text for text in told)
