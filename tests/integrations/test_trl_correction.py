"""The correction inside TRL: its mask and weights reach the loss, its rejected rows leave the baseline, and off means off."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl import GRPOTrainer

from sluice.errors import ConfigError, TrainerError
from sluice.integrations.trl import DynamicSampling
from sluice.integrations.trl.correction import advantages, check_correction
from tests.integrations.tiny import LETTERS, make, steps

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

FIXED = [[5, 6, 7], [5, 6, 2], [7, 8, 9], [3, 3, 4]]  # completions of a group
REWARDS = [1.0, 0.0, 0.0, 0.5]
TOKENS = {"filters": [{"enabled": True}]}
ROWS = {"filters": [{"enabled": True, "agg_type": "geometric"}]}

Shift = Callable[[torch.Tensor], torch.Tensor]


def sampled_by_another(shift: Shift) -> Callable[[list[str], Any], dict[str, Any]]:
    """A rollout function whose sampler gives each token the trainer's log-prob minus a shift [rows, 3]: log ratios are the shift."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = [[LETTERS.index(letter) + 2 for letter in prompt] for prompt in prompts]
        completions = [FIXED[row % 4] for row in range(len(prompts))]
        ids = torch.tensor([[*p, *c] for p, c in zip(prompt_ids, completions, strict=True)])
        with torch.no_grad():
            own = trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), 3)[0]
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": (own - shift(own)).tolist()}

    return rollout


def scored(prompts: Sequence[str], **_: Any) -> list[float]:
    return [REWARDS[row % 4] for row in range(len(prompts))]


def at(*places: tuple[int, int], by: float = 1.0) -> Shift:
    """Log ratios of `by` at the places (row of a group, token), 0 elsewhere."""

    def shift(own: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(own)
        for row, token in places:
            out[row::4, token] = by
        return out

    return shift


def run(folder: Path, output: Path, shift: Shift, correction: Any, **args: Any) -> Any:
    trainer = make(
        folder,
        output,
        reward_funcs=scored,
        rollout_func=sampled_by_another(shift),
        train_infer_correction=correction,
        args={"max_steps": 1, "per_device_train_batch_size": 4, "loss_type": "grpo", **args},
    )
    trainer.train()
    return trainer


def test_a_token_outside_the_band_leaves_the_loss_and_no_rollout_is_dropped(model_folder: Path, tmp_path: Path) -> None:
    trainer = run(model_folder, tmp_path, at((1, 2)), TOKENS)
    assert trainer.seen.outputs[0]["tool_mask"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1]]
    assert trainer.seen.outputs[0]["num_items_in_batch"] == 11
    logged = steps(trainer)[0]
    assert logged["actor/train_infer_final_mask_mean"] == pytest.approx(11 / 12)
    assert logged["actor/train_infer_rejected_rows"] == 0
    assert logged["scheduler/prompts_drawn"] == 1


def test_without_a_correction_nothing_is_masked_and_nothing_is_measured(model_folder: Path, tmp_path: Path) -> None:
    off = run(model_folder, tmp_path / "off", at((1, 2)), None)
    measured = run(model_folder, tmp_path / "measured", at((1, 2)), {"presets": ["diagnostics"]})
    assert "tool_mask" not in off.seen.outputs[0]
    assert not any(name.startswith("actor/") for name in steps(off)[0])
    assert measured.seen.outputs[0]["tool_mask"].all()
    assert steps(measured)[0]["actor/train_infer_k1"] != 0
    assert steps(measured)[0]["grad_norm"] == pytest.approx(steps(off)[0]["grad_norm"], rel=1e-6)


def test_weights_enter_as_advantages_of_each_token(model_folder: Path, tmp_path: Path) -> None:
    plain = run(model_folder, tmp_path / "plain", at((0, 1), by=0.5), None)
    weighted = run(model_folder, tmp_path / "weighted", at((0, 1), by=0.5), {"presets": ["token_tis"]})
    expected = plain.seen.outputs[0]["advantages"].unsqueeze(1) * torch.ones(4, 3)
    expected[0, 1] *= math.exp(0.5)
    torch.testing.assert_close(weighted.seen.outputs[0]["advantages"], expected, rtol=1e-4, atol=1e-6)
    assert steps(weighted)[0]["grad_norm"] != pytest.approx(steps(plain)[0]["grad_norm"], rel=1e-3)


def test_a_row_that_is_rejected_whole_leaves_the_baseline_unless_that_is_not_wanted(model_folder: Path, tmp_path: Path) -> None:
    shift = at((0, 0), (0, 1), (0, 2))  # the only success
    survivors = run(model_folder, tmp_path / "survivors", shift, ROWS)
    everyone = run(model_folder, tmp_path / "all", shift, ROWS | {"baseline": "all"})
    for trainer in (survivors, everyone):
        assert trainer.seen.outputs[0]["tool_mask"].tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]]
        assert steps(trainer)[0]["actor/train_infer_rejected_rows"] == 1
    left = torch.tensor([0.0, 0.0, 0.5])
    assert survivors.seen.outputs[0]["advantages"][0] == 0
    torch.testing.assert_close(survivors.seen.outputs[0]["advantages"][1:], (left - left.mean()) / (left.std() + 1e-4))
    whole = torch.tensor(REWARDS)
    torch.testing.assert_close(everyone.seen.outputs[0]["advantages"], (whole - whole.mean()) / (whole.std() + 1e-4))
    assert survivors.seen.outputs[0]["loss_scale"] == pytest.approx(4 / 3)  # a mean over the rows that train


def test_a_batch_that_is_rejected_whole_moves_no_weight(model_folder: Path, tmp_path: Path) -> None:
    everything = at(*[(row, token) for row in range(4) for token in range(3)])
    trainer = run(
        model_folder, tmp_path, everything, TOKENS, weight_decay=0.5, per_device_train_batch_size=2, gradient_accumulation_steps=2
    )
    untouched = make(model_folder, tmp_path, GRPOTrainer).model.state_dict()
    for name, weights in trainer.model.state_dict().items():
        assert torch.equal(weights, untouched[name]), name
    assert steps(trainer)[0]["actor/train_infer_final_mask_mean"] == 0


def test_neutral_rows_are_no_part_of_it(model_folder: Path, tmp_path: Path) -> None:
    trainer = make(
        model_folder,
        tmp_path,
        reward_funcs=lambda prompts, **_: [REWARDS[row % 4] if prompt[0] == "b" else 0.0 for row, prompt in enumerate(prompts)],
        rollout_func=sampled_by_another(at((0, 0), (0, 1), (0, 2))),
        train_infer_correction=ROWS,
        settings=DynamicSampling(max_resample_rounds=1, on_exhausted="shrink"),
        dataset=make(model_folder, tmp_path, GRPOTrainer).train_dataset.filter(lambda row: row["prompt"][0] in "ab"),
        args={"max_steps": 1, "loss_type": "grpo", "shuffle_dataset": False},
    )
    trainer.train()
    output = trainer.seen.outputs[0]
    trained = output["tool_mask"].sum(1) > 0
    assert int(trained.sum()) == 3
    assert output["loss_scale"] == pytest.approx(8 / 3)
    assert output["num_items_in_batch"] == 9


def test_a_sampler_without_log_probs_is_refused_at_the_start_or_at_its_first_batch(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="transformers' generate, which reports none"):
        make(model_folder, tmp_path, train_infer_correction=TOKENS)

    def silent(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {"prompt_ids": [[2]] * len(prompts), "completion_ids": [[2, 3]] * len(prompts), "logprobs": None}

    with pytest.raises(TrainerError, match="return them as logprobs"):
        make(model_folder, tmp_path, reward_funcs=scored, rollout_func=silent, train_infer_correction=TOKENS).train()


@pytest.mark.parametrize(
    ("correction", "args", "message"),
    [
        ({"filters": [{"enabled": True, "ratio_low": 2.0}]}, {}, "ratio_low"),
        ({"is_weight": {"enabled": True, "detach": False}}, {}, "is_weight.detach: expected true"),
        (TOKENS, {"multi_objective_aggregation": "normalize_then_sum"}, "baseline: expected 'all'"),
        (TOKENS, {"loss_type": "bnpo"}, "a correction with filters can leave rows out"),
    ],
)
def test_settings_that_cannot_be_are_refused_at_the_start(
    model_folder: Path, tmp_path: Path, correction: Any, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(model_folder, tmp_path, rollout_func=sampled_by_another(at()), train_infer_correction=correction, args=args)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("repetition_penalty", 1.2),
        ("generation_kwargs", {"top_p": 0.9}),
        ("generation_kwargs", {"presence_penalty": 0.5}),
        ("generation_kwargs", {"logit_bias": {3: -100.0}}),
        ("generation_kwargs", {"temperature": 0.5}),
        ("vllm_structured_outputs_regex", "[a-c]+"),
    ],
    ids=str,
)
def test_whatever_cuts_or_bends_the_distribution_is_refused_beside_it(model_folder: Path, tmp_path: Path, setting: str, value: Any) -> None:
    """The sampler reports log-probs of what it drew from, the trainer those of the whole vocabulary: their ratio would be no mismatch."""
    name = next(iter(value)) if isinstance(value, dict) else setting
    for rollout_func in (sampled_by_another(at()), None):
        trainer = make(model_folder, tmp_path, GRPOTrainer, rollout_func=rollout_func, args={setting: value})
        if rollout_func is None:  # vLLM cannot be started here
            trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, False
        with pytest.raises(ConfigError, match=f"expected log-probs of the whole vocabulary at the temperature.*{name} is"):
            check_correction(trainer, TOKENS)


def test_settings_that_change_nothing_are_no_cut(model_folder: Path, tmp_path: Path) -> None:
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "generation_kwargs": {"top_k": -1, "stop": ["x"]}}
    trainer = make(model_folder, tmp_path, GRPOTrainer, rollout_func=sampled_by_another(at()), args=neutral | {"temperature": 0.7})
    assert check_correction(trainer, TOKENS) is not None


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=8, max_size=8), st.sampled_from(["group", "batch", "none"]))
def test_advantages_are_those_of_trl(rewards: list[float], scale: str) -> None:
    table = torch.tensor(rewards)
    groups = table.view(2, 4)
    expected = groups - groups.mean(1, keepdim=True)
    if scale != "none":
        expected = expected / ((groups.std(1, keepdim=True) if scale == "group" else table.std()) + 1e-4)
    torch.testing.assert_close(advantages(table, 4, scale), expected.reshape(-1), rtol=1e-5, atol=1e-6)


def test_a_lone_survivor_has_no_advantage() -> None:
    assert (
        advantages(torch.tensor([100.0, 1.0, math.nan, math.nan, 5.0, math.nan, math.nan, math.nan]), 4, "group").tolist()[4:] == [0.0] * 4
    )
    assert advantages(torch.tensor([math.nan, 1.0]), 2, "group").tolist() == [0.0, 0.0]
