from __future__ import annotations

import logging as python_logging
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import sluice.trainer.trl as room
from sluice.config.models import AdvantageConfig
from sluice.errors import ConfigError, TrainerError
from sluice.generation.tokenizer import load_tokenizer
from sluice.trainer import advantages_for, collate, samples_from_batch
from sluice.trainer.trl import build_trainer, grpo_config
from sluice.types import Batch, Sample
from tests.trainer.tiny import END, PAD, VOCABULARY, FakeEngine, Run, Source, load, logprobs_of, tiny_config

LOSS_TYPES = ["grpo", "dapo", "dr_grpo", "bnpo"]


def always(engine: FakeEngine, call: int) -> Batch:
    return engine.batch()


def with_turns(batch: Batch, change: Any) -> Batch:
    """The batch with every turn changed."""
    groups = tuple(
        replace(group, rollouts=tuple(replace(r, turns=tuple(change(t) for t in r.turns)) for r in group.rollouts))
        for group in batch.groups
    )
    return replace(batch, groups=groups)


def reference_loss(
    model: Any, start: Any, samples: list[Sample], loss_type: str, *, beta: float = 0.0, temperature: float = 1.0, longest: int = 6
) -> torch.Tensor:
    """The loss of a whole batch by its formula: row by row, without micro batches, without TRL."""
    advantages = advantages_for(samples, AdvantageConfig())
    chosen = [(sample, float(advantage)) for sample, advantage in zip(samples, advantages, strict=True) if sample.loss_mask.any()]
    whole = [[*sample.prompt_ids.tolist(), *sample.completion_ids.tolist()] for sample, _ in chosen]
    with torch.no_grad():
        started = logprobs_of(start, whole, temperature)
    rows = []
    for (sample, advantage), now, then in zip(chosen, logprobs_of(model, whole, temperature), started, strict=True):
        keep = torch.from_numpy(sample.loss_mask)
        now, then = now[len(sample.prompt_ids) - 1 :][keep], then[len(sample.prompt_ids) - 1 :][keep]
        ratio = torch.exp(now - now.detach())
        divergence = torch.exp(then - now) - (then - now) - 1
        rows.append(-ratio * advantage + beta * divergence * ratio)
    if loss_type == "grpo":
        return torch.stack([row.mean() for row in rows]).mean()
    if loss_type == "dr_grpo":
        return sum(row.sum() for row in rows) / (len(rows) * longest)
    return sum(row.sum() for row in rows) / sum(len(row) for row in rows)


def assert_last_step_is_the_reference(run: Run, model_folder: Path, loss_type: str, **reference: Any) -> None:
    """Loss and gradients of the last step equal those of the reference at the weights that sampled its batch."""
    run.train()
    last = [batch for batch in run.source.given if batch is not None][-1]
    policy, start = load(model_folder), load(model_folder)
    policy.load_state_dict(run.engine.published[-2][1])
    samples = samples_from_batch(last, stale_tokens=run.config.trainer.stale_tokens)
    loss = reference_loss(policy, start, samples, loss_type, **reference)
    loss.backward()
    assert run.steps[-1][1]["actor/loss"] == pytest.approx(loss.item(), abs=2e-6)
    gradients = run.gradients[-1]
    expected = {name: p.grad for name, p in policy.named_parameters()}
    assert gradients.keys() == expected.keys()
    largest = max(g.abs().max().item() for g in expected.values())
    assert largest > 1e-3
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).abs().max().item() < 2e-5 * max(1.0, largest), name


# ---------------------------------------------------------------- the loss is the loss


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_loss_of_uneven_micro_batches_is_that_of_the_whole_batch(model_folder: Path, tmp_path: Path, loss_type: str) -> None:
    run = Run(model_folder, tmp_path, always, loss_type=loss_type, beta=0.3, micro_batch_size=7, max_grad_norm=1e9)
    assert_last_step_is_the_reference(run, model_folder, loss_type, beta=0.3)
    assert run.steps[-1][1]["actor/micro_batches"] == 2
    assert run.steps[-1][1]["actor/kl"] > 0


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_members_that_do_not_count_change_no_loss(model_folder: Path, tmp_path: Path, loss_type: str) -> None:
    def make(engine: FakeEngine, call: int) -> Batch:
        truncated = engine.group(7, [4, 4], [2, 6, 1], [1.0, 0.0, 0.0], counted=[True, False, True])
        placeholder = engine.group(8, [5], [3, 0, 2], [0.0, None, 1.0])
        return Batch(groups=(*engine.batch().groups, truncated, placeholder), requested=5, step=call)

    run = Run(model_folder, tmp_path, make, loss_type=loss_type, max_grad_norm=1e9)
    assert_last_step_is_the_reference(run, model_folder, loss_type)
    assert run.steps[-1][1]["actor/rows"] == 16
    assert run.steps[-1][1]["batch/rollouts"] == 18


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_case_128_neutral_rows_change_no_loss(model_folder: Path, tmp_path: Path, loss_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def collate_to_eights(samples: Any, advantages: Any, *, pad_id: int) -> Any:
        return collate(samples, advantages, pad_id=pad_id, rows_multiple=8)

    monkeypatch.setattr(room, "collate", collate_to_eights)
    run = Run(model_folder, tmp_path, always, loss_type=loss_type, beta=0.3, max_grad_norm=1e9)
    assert_last_step_is_the_reference(run, model_folder, loss_type, beta=0.3)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_case_31_a_short_batch_is_averaged_over_what_it_holds(model_folder: Path, tmp_path: Path, loss_type: str) -> None:
    def make(engine: FakeEngine, call: int) -> Batch:
        return Batch(groups=engine.batch().groups[: 3 - 2 * call], requested=3, step=call)

    run = Run(model_folder, tmp_path, make, loss_type=loss_type, max_grad_norm=1e9)
    assert_last_step_is_the_reference(run, model_folder, loss_type)
    assert [metrics["actor/rows"] for _, metrics in run.steps] == [12, 4]


def test_environment_replies_are_seen_but_not_trained_on(model_folder: Path, tmp_path: Path) -> None:
    def make(engine: FakeEngine, call: int) -> Batch:
        groups = tuple(engine.group(g, [2 + g, 3], [1, 3, 2], [1.0, 0.0, 0.5], reply=[9, 4]) for g in range(2))
        return Batch(groups=groups, requested=2, step=call)

    assert_last_step_is_the_reference(Run(model_folder, tmp_path, make, max_grad_norm=1e9), model_folder, "dapo")


def test_the_temperature_of_the_engine_is_that_of_the_loss(model_folder: Path, tmp_path: Path) -> None:
    run = Run(model_folder, tmp_path, always, temperature=0.7, max_grad_norm=1e9)
    assert_last_step_is_the_reference(run, model_folder, "dapo", temperature=0.7)


@pytest.mark.parametrize(
    "option", [{"micro_batch_size": 1}, {"micro_batch_size": 12}, {"own_old_logprobs": True}, {"shares_prompts": False}]
)
def test_what_only_costs_time_or_memory_changes_no_number(model_folder: Path, tmp_path: Path, option: dict[str, Any]) -> None:
    runs = []
    for chosen in ({}, option):
        size = chosen.get("micro_batch_size", 5)
        run = Run(model_folder, tmp_path, always, max_steps=1, micro_batch_size=size, loss_type="bnpo", lora=option.get("lora"))
        run.trainer._own_old_logprobs = "own_old_logprobs" in chosen
        run.trainer._shares_prompts = chosen.get("shares_prompts", True)
        runs.append(run.train())
    for ours, theirs in zip(runs[0].gradients, runs[1].gradients, strict=True):
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], atol=2e-5, rtol=1e-3)
    assert (runs[1].steps[0][1]["actor/old_logprobs_seconds"] > 0) == ("own_old_logprobs" in option)


def test_prompts_of_siblings_are_computed_once_with_the_same_log_probs(model_folder: Path, tmp_path: Path) -> None:
    run = Run(model_folder, tmp_path, always, micro_batch_size=12)
    (tensors,) = run.trainer._micro_batches(run.engine.batch())
    ids = torch.cat([tensors["prompt_ids"], tensors["completion_ids"]], 1)
    mask = torch.cat([tensors["prompt_mask"], tensors["completion_mask"]], 1)
    width = tensors["completion_ids"].size(1)
    both = []
    for shares in (True, False):
        run.trainer._shares_prompts = shares
        with torch.no_grad():
            both.append(run.trainer._get_per_token_logps_and_entropies(run.trainer.model, ids, mask, width, compute_entropy=True))
    seen = tensors["completion_mask"].bool()
    for ours, theirs in zip(both[0][:2], both[1][:2], strict=True):
        torch.testing.assert_close(ours[seen], theirs[seen], atol=1e-5, rtol=0)


@pytest.mark.parametrize("siblings", [1, 2])
def test_positions_count_from_the_first_visible_token(model_folder: Path, tmp_path: Path, siblings: int) -> None:
    """Of a model with absolute positions, in rows whose prompts are padded on the left."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        attn_pdrop=0.5,
        embd_pdrop=0.5,
        resid_pdrop=0.5,
        eos_token_id=END,
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    load_tokenizer(model_folder).save_pretrained(tmp_path)

    def make(engine: FakeEngine, call: int) -> Batch:
        prompts = [[2, 3, 4, 5], [6], [7, 8]]
        groups = tuple(engine.group(g, p, [3, 2][:siblings], [1.0, 0.0][:siblings]) for g, p in enumerate(prompts))
        return Batch(groups=groups, requested=3, step=call)

    run = Run(tmp_path, tmp_path / "output", make, micro_batch_size=6).train()
    assert all(metrics["actor/logprob_gap_max"] < 1e-5 for _, metrics in run.steps)


# ---------------------------------------------------------------- what trains is what was sampled


def test_rows_hold_the_sampled_ids_log_probs_and_advantages(model_folder: Path, tmp_path: Path) -> None:
    run = Run(model_folder, tmp_path, always)
    batch = run.engine.batch()
    sampled = sorted(
        (r.turns[0].prompt_ids.tolist(), r.turns[0].token_ids.tolist(), r.turns[0].inference_logprobs.tolist())
        for g in batch.groups
        for r in g.rollouts
    )
    trained, advantages = [], []
    for tensors in run.trainer._micro_batches(batch):
        assert len(tensors["advantages"]) <= 5
        for row in range(len(tensors["advantages"])):
            prompt, completion, loss = (tensors[name][row].bool() for name in ("prompt_mask", "completion_mask", "tool_mask"))
            assert torch.equal(completion, loss)
            trained.append(
                (
                    tensors["prompt_ids"][row][prompt].tolist(),
                    tensors["completion_ids"][row][completion].tolist(),
                    tensors["sampling_per_token_logps"][row][completion].tolist(),
                )
            )
            advantages.append(round(tensors["advantages"][row].item(), 5))
    assert sorted(trained) == sampled
    expected = advantages_for(samples_from_batch(batch), AdvantageConfig())
    assert sorted(advantages) == sorted(round(float(np.float32(a)), 5) for a in expected)


def test_a_step_makes_rewarded_completions_more_probable_and_the_others_less(model_folder: Path, tmp_path: Path) -> None:
    def make(engine: FakeEngine, call: int) -> Batch:
        return Batch(groups=(engine.group(0, [2, 3, 4], [4, 4, 4, 4], [1.0, 1.0, 0.0, 0.0]),), requested=1, step=call)

    run = Run(model_folder, tmp_path, make, max_steps=1, learning_rate=1e-3).train()
    assert run.source.given[0] is not None
    rollouts = run.source.given[0].groups[0].rollouts
    after = logprobs_of(run.engine.model, [[2, 3, 4, *r.turns[0].token_ids.tolist()] for r in rollouts])
    change = [new[2:].sum().item() - float(r.turns[0].inference_logprobs.sum()) for new, r in zip(after, rollouts, strict=True)]
    assert change[0] + change[1] > 0.01
    assert change[2] + change[3] < -0.01


def test_the_same_seed_trains_to_the_same_weights(model_folder: Path, tmp_path: Path) -> None:
    first, second = (Run(model_folder, tmp_path, always).train().engine.published[-1][1] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


# ---------------------------------------------------------------- log-probs must match


def test_in_float32_the_log_probs_of_every_trained_batch_match(model_folder: Path, tmp_path: Path) -> None:
    run = Run(model_folder, tmp_path, always, max_steps=4).train()
    assert all(metrics["actor/logprob_gap_max"] < 1e-5 for _, metrics in run.steps)
    assert all(0 < metrics["actor/logprob_gap_mean"] <= metrics["actor/logprob_gap_max"] for _, metrics in run.steps)
    assert all(metrics["actor/on_policy_token_share"] == 1 for _, metrics in run.steps)
    assert not any("off_policy" in name for _, metrics in run.steps for name in metrics)


@pytest.mark.parametrize("own", [False, True])
def test_another_temperature_is_noticed_at_once(model_folder: Path, tmp_path: Path, own: bool) -> None:
    engine = FakeEngine(model_folder, temperature=0.9)
    run = Run(model_folder, tmp_path, always, engine=engine)
    run.trainer._own_old_logprobs = own
    with pytest.raises(
        TrainerError, match=r"within 0\.0001 .* at step 0, group \d, attempt \d+, completion token \d of \d: .* engine\.temperature"
    ):
        run.train()
    assert not run.gradients, "nothing was updated"


@pytest.mark.parametrize("shift", [1, -1])
def test_case_119_a_shift_by_one_token_is_noticed_and_named(model_folder: Path, tmp_path: Path, shift: int) -> None:
    def make(engine: FakeEngine, call: int) -> Batch:
        return with_turns(engine.batch(), lambda turn: replace(turn, inference_logprobs=np.roll(turn.inference_logprobs, shift)))

    with pytest.raises(TrainerError, match="shifted by one token"):
        Run(model_folder, tmp_path, make).train()


def test_weights_that_never_arrive_are_noticed_and_named(model_folder: Path, tmp_path: Path) -> None:
    def make(engine: FakeEngine, call: int) -> Batch:
        engine.takes_weights = False
        return with_turns(engine.batch(), lambda turn: replace(turn, policy_version=0))

    run = Run(model_folder, tmp_path, make)
    with pytest.raises(TrainerError, match="at step 1, .* sampled by version 0 - the engine sampled with other weights"):
        run.train()
    assert len(run.steps) == 1


def test_a_log_prob_that_is_no_number_is_noticed(model_folder: Path, tmp_path: Path) -> None:
    def spoil(turn: Any) -> Any:
        return replace(turn, inference_logprobs=np.where(np.arange(len(turn.token_ids)) == 1, np.nan, turn.inference_logprobs))

    with pytest.raises(TrainerError, match=r"got nan .* completion token 1 of"):
        Run(model_folder, tmp_path, lambda engine, call: with_turns(engine.batch(), spoil)).train()


def test_log_probs_of_masked_tokens_never_matter(model_folder: Path, tmp_path: Path) -> None:
    def make(engine: FakeEngine, call: int) -> Batch:
        group = engine.group(0, [2, 3], [2, 3, 4], [1.0, 0.0, 0.0], counted=[True, True, False])
        bad = replace(group.rollouts[2], turns=(replace(group.rollouts[2].turns[0], inference_logprobs=np.full(4, np.nan, np.float32)),))
        return Batch(groups=(replace(group, rollouts=(*group.rollouts[:2], bad)),), requested=1, step=call)

    assert len(Run(model_folder, tmp_path, make).train().steps) == 2


def test_under_bf16_the_distance_is_only_recorded(model_folder: Path, tmp_path: Path) -> None:
    run = Run(model_folder, tmp_path, always, engine=FakeEngine(model_folder, temperature=0.9), bf16=True).train()
    assert all(metrics["actor/logprob_gap_max"] > 1e-2 for _, metrics in run.steps)


# ---------------------------------------------------------------- batches of older weights


class Behind:
    """Gives the last `groups` of the three groups of a batch one step after they were sampled."""

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self.before: Batch | None = None

    def __call__(self, engine: FakeEngine, call: int) -> Batch:
        now = engine.batch()
        before, self.before = self.before or now, now
        return replace(now, groups=(*now.groups[: 3 - self.groups], *before.groups[3 - self.groups :]))


def cut_through(engine: FakeEngine, call: int) -> Batch:
    """From the second batch on: as if the weights before had sampled the first half of each response."""
    if call == 0:
        return engine.batch()
    older, version = load(engine.folder), engine.version
    older.load_state_dict(engine.published[-2][1])

    def change(turn: Any) -> Any:
        half, row = len(turn.token_ids) // 2, [*turn.prompt_ids.tolist(), *turn.token_ids.tolist()]
        with torch.no_grad():
            before = logprobs_of(older, [row])[0][len(turn.prompt_ids) - 1 :].numpy()
        return replace(
            turn,
            inference_logprobs=np.concatenate([before[:half], turn.inference_logprobs[half:]]),
            policy_version=version - (half > 0),
            token_versions=np.array([version - 1] * half + [version] * (len(row) - len(turn.prompt_ids) - half)),
        )

    return with_turns(engine.batch(), change)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("own", [False, True])
def test_what_older_weights_sampled_is_recorded_apart_and_held_to_no_tolerance(
    model_folder: Path, tmp_path: Path, groups: int, own: bool
) -> None:
    run = Run(model_folder, tmp_path, Behind(groups), async_generation_ratio=1)
    run.trainer._own_old_logprobs = own
    run.train()
    first, second = (metrics for _, metrics in run.steps)
    assert first["actor/on_policy_token_share"] == 1
    assert "actor/off_policy_logprob_gap_max" not in first
    model = load(model_folder)
    model.load_state_dict(run.engine.published[1][1])
    gaps: dict[bool, list[float]] = {True: [], False: []}
    assert run.source.given[1] is not None
    for sample in samples_from_batch(run.source.given[1]):
        with torch.no_grad():
            ours = logprobs_of(model, [[*sample.prompt_ids.tolist(), *sample.completion_ids.tolist()]])[0][len(sample.prompt_ids) - 1 :]
        gaps[sample.policy_version == 1] += np.abs(ours.numpy() - sample.inference_logprobs).tolist()
    assert second["actor/on_policy_token_share"] == pytest.approx(len(gaps[True]) / len(gaps[True] + gaps[False]))
    assert second["actor/off_policy_logprob_gap_max"] == pytest.approx(max(gaps[False]), abs=1e-5)
    assert second["actor/off_policy_logprob_gap_mean"] == pytest.approx(np.mean(gaps[False]), abs=1e-5)
    assert second["actor/off_policy_logprob_gap_mean"] > 1e-3
    if groups == 3:
        assert not any(name.startswith("actor/logprob_gap") for name in second)
    else:
        assert 0 < second["actor/logprob_gap_max"] < 1e-5


def test_in_a_synchronous_run_whatever_older_weights_sampled_is_a_fault(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="at step 1, .* sampled by version 0 - the engine sampled with other weights"):
        Run(model_folder, tmp_path, Behind(1)).train()


@pytest.mark.parametrize("stale", ["train", "mask"])
def test_tokens_of_a_response_that_an_update_cut_through_train_or_not_as_set(model_folder: Path, tmp_path: Path, stale: str) -> None:
    run = Run(model_folder, tmp_path, cut_through, async_generation_ratio=1, stale_tokens=stale, max_grad_norm=1e9)
    assert_last_step_is_the_reference(run, model_folder, "dapo")
    metrics = run.steps[-1][1]
    assert metrics["actor/logprob_gap_max"] < 1e-5
    if stale == "mask":
        assert metrics["actor/on_policy_token_share"] == 1
        assert "actor/off_policy_logprob_gap_max" not in metrics
        assert metrics["batch/loss_tokens"] == 21
    else:
        assert metrics["actor/on_policy_token_share"] == pytest.approx(21 / 36)
        assert metrics["actor/off_policy_logprob_gap_max"] > 1e-3
        assert metrics["batch/loss_tokens"] == 36


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x, new: np.where(new, np.roll(x, 1), x), "at step 1, .* sampled by version 1 - the two rows are shifted by one token"),
        (lambda x, new: np.where(new, x - 0.5, x), "at step 1, .* sampled by version 1 - other weights sampled the tokens before it"),
        (lambda x, new: np.where(new, x, np.nan), "got nan at step 1, .* sampled by version 0 - the engine must report a finite log-prob"),
        (lambda x, new: np.where(new, x, -np.inf), "got inf at step 1, .* sampled by version 0 - the engine must report a finite log-prob"),
    ],
)
def test_log_probs_of_a_cut_through_response_that_do_not_match_are_named_by_their_cause(
    model_folder: Path, tmp_path: Path, spoil: Any, message: str
) -> None:
    def make(engine: FakeEngine, call: int) -> Batch:
        def change(turn: Any) -> Any:
            if turn.token_versions is None or len(turn.token_ids) < 5:
                return turn
            logprobs = spoil(turn.inference_logprobs, turn.token_versions == 1)
            return replace(turn, inference_logprobs=logprobs.astype(np.float32))

        return with_turns(cut_through(engine, call), change)

    with pytest.raises(TrainerError, match=rf"within 0\.0001 .*{message}"):
        Run(model_folder, tmp_path, make, async_generation_ratio=1).train()


def test_a_shift_within_the_turns_of_a_rollout_is_named(model_folder: Path, tmp_path: Path) -> None:
    def make(engine: FakeEngine, call: int) -> Batch:
        group = engine.group(0, [2, 3], [4, 4], [1.0, 0.0], reply=[9, 4])
        batch = Batch(groups=(group,), requested=1, step=call)
        return with_turns(batch, lambda turn: replace(turn, inference_logprobs=np.roll(turn.inference_logprobs, 1)))

    with pytest.raises(TrainerError, match="shifted by one token"):
        Run(model_folder, tmp_path, make).train()


@pytest.mark.parametrize(
    ("ratio", "usual", "domain", "expected"),
    [(0, None, None, True), (0.5, None, None, False), (0, 1, None, False), (2, 0, None, True), (2, None, 0, True), (0, None, 1, False)],
)
def test_a_run_is_synchronous_when_no_trained_group_may_be_older_than_its_step(
    model_folder: Path, ratio: float, usual: int | None, domain: int | None, expected: bool
) -> None:
    config = tiny_config(model_folder, async_generation_ratio=ratio)
    rewards = {name: reward.model_copy(update={"max_staleness": domain}) for name, reward in config.rewards.items()}
    resampling = config.resampling.model_copy(update={"max_staleness": usual})
    assert room._is_synchronous(config.model_copy(update={"rewards": rewards, "resampling": resampling})) == expected


# ---------------------------------------------------------------- weights are published


def test_weights_are_published_at_the_start_and_after_every_step(model_folder: Path, tmp_path: Path) -> None:
    run = Run(model_folder, tmp_path, always, max_steps=3).train()
    assert [version for version, _ in run.engine.published] == [0, 1, 2, 3]
    states = [state for _, state in run.engine.published]
    start = load(model_folder).state_dict()
    assert states[0].keys() == start.keys()
    assert all(torch.equal(states[0][name], start[name]) for name in start)
    for earlier, later in pairwise(states):
        assert not torch.equal(earlier["model.norm.weight"], later["model.norm.weight"])


def test_weights_are_published_before_the_step_is_reported(model_folder: Path, tmp_path: Path) -> None:
    run = Run(model_folder, tmp_path, always)
    seen = []
    run.trainer._on_step = lambda step, metrics: seen.append((step, run.engine.version))
    run.train()
    assert seen == [(1, 1), (2, 2)]


def test_the_engine_does_not_move_until_it_is_published_to(model_folder: Path, tmp_path: Path) -> None:
    run = Run(model_folder, tmp_path, always)
    ids = [[2, 3, 4, 5]]
    before = logprobs_of(run.engine.model, ids)[0]
    with torch.no_grad():
        for parameter in run.trainer.model.parameters():
            parameter.add_(0.01)
    assert torch.equal(logprobs_of(run.engine.model, ids)[0], before)
    run.trainer.publish()
    assert not torch.equal(logprobs_of(run.engine.model, ids)[0], before)


# ---------------------------------------------------------------- LoRA


LORA = {"r": 2, "alpha": 4.0, "target_modules": ["q_proj", "v_proj"]}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # loading an adapter by peft itself
def test_with_lora_only_the_adapter_trains_and_is_published(model_folder: Path, tmp_path: Path) -> None:
    run = Run(model_folder, tmp_path, lambda engine, call: engine.batch(), max_steps=1, lora=LORA).train()
    assert run.steps[0][1]["actor/logprob_gap_max"] < 1e-5
    first, last = run.engine.published[0][1], run.engine.published[-1][1]
    assert len(first) == 8
    assert all("lora_" in name for name in first)
    assert any(not torch.equal(first[name], last[name]) for name in first)
    assert all("lora_" in name for name in run.gradients[0])
    run.trainer.save_policy(tmp_path / "policy")
    loaded = PeftModel.from_pretrained(load(model_folder), tmp_path / "policy").eval()
    with torch.no_grad():
        ours = run.trainer.model.eval()(torch.tensor([[2, 3, 4]])).logits
        assert torch.allclose(loaded(torch.tensor([[2, 3, 4]])).logits, ours, atol=1e-6)
    assert not torch.allclose(run.engine.model(torch.tensor([[2, 3, 4]])).logits, ours, atol=1e-4)


def test_with_lora_the_divergence_is_measured_from_the_model_without_adapter(model_folder: Path, tmp_path: Path) -> None:
    run = Run(model_folder, tmp_path, lambda engine, call: engine.batch(), lora=LORA, beta=0.1, logprob_tolerance=100.0).train()
    assert run.steps[0][1]["actor/kl"] == pytest.approx(0.0, abs=1e-9)
    assert run.steps[1][1]["actor/kl"] > 1e-6


def test_with_dropout_in_the_adapter_old_log_probs_have_a_pass_of_their_own(model_folder: Path, tmp_path: Path) -> None:
    run = Run(model_folder, tmp_path, lambda engine, call: engine.batch(), max_steps=1, lora=LORA | {"dropout": 0.5})
    with torch.no_grad():
        for name, parameter in run.trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.ones_like(parameter) * 1e-6)
    run.train()
    assert run.steps[0][1]["actor/old_logprobs_seconds"] > 0
    assert run.steps[0][1]["actor/logprob_gap_max"] < 1e-4


def test_lora_modules_that_the_model_lacks_are_refused(model_folder: Path, tmp_path: Path) -> None:
    for wrong in ("q_pro", "lm_head"):
        with pytest.raises(ConfigError, match=rf"target_modules: .* Qwen2ForCausalLM, got '{wrong}' - choose from down_proj, .* v_proj$"):
            Run(model_folder, tmp_path, always, lora={"target_modules": ["q_proj", wrong]})


# ---------------------------------------------------------------- how it ends


def test_training_ends_when_the_source_has_nothing_more(model_folder: Path, tmp_path: Path) -> None:
    run = Run(model_folder, tmp_path, lambda engine, call: engine.batch() if call < 2 else None, max_steps=5).train()
    assert [step for step, _ in run.steps] == [1, 2]
    assert run.source.given[-1] is None
    assert len(run.source.given) == 3


def test_nothing_is_asked_for_after_the_last_batch(model_folder: Path, tmp_path: Path) -> None:
    run = Run(model_folder, tmp_path, lambda engine, call: engine.batch(is_last=True), max_steps=5).train()
    assert len(run.steps) == len(run.source.given) == 1


def test_a_run_without_a_single_batch_is_an_error(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="expected at least one batch"):
        Run(model_folder, tmp_path, lambda engine, call: None).train()


def test_a_batch_without_groups_is_an_error(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="expected a batch of at least one group"):
        Run(model_folder, tmp_path, lambda engine, call: Batch(groups=(), requested=3, step=0)).train()


def test_an_error_of_the_source_reaches_the_caller(model_folder: Path, tmp_path: Path) -> None:
    def make(engine: FakeEngine, call: int) -> Batch:
        raise LookupError("the source broke")

    with pytest.raises(LookupError, match="the source broke"):
        Run(model_folder, tmp_path, make).train()


def test_the_stop_event_ends_training_after_the_current_step(model_folder: Path, tmp_path: Path) -> None:
    def make(engine: FakeEngine, call: int) -> Batch:
        if call == 1:
            run.trainer._stop.set()
        return engine.batch()

    run = Run(model_folder, tmp_path, make, max_steps=9)
    run.train()
    assert [step for step, _ in run.steps] == [1, 2]
    assert run.engine.version == 2


def test_a_stop_before_the_first_step_asks_for_nothing(model_folder: Path, tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    source = Source(lambda call: None)
    engine = FakeEngine(model_folder)
    trainer = build_trainer(
        tiny_config(model_folder),
        longest_completion=8,
        model_path=model_folder,
        output_dir=tmp_path,
        source=source,
        publisher=engine,
        on_step=lambda step, metrics: None,
        stop=stop,
    )
    trainer.train()
    assert source.given == []


def test_a_batch_without_a_loss_token_moves_no_weight(model_folder: Path, tmp_path: Path) -> None:
    def make(engine: FakeEngine, call: int) -> Batch:
        if call != 1:
            return engine.batch()
        return Batch(groups=(engine.group(0, [2], [6, 6], [0.0, 0.0], counted=[False, False]),), requested=1, step=1)

    run = Run(model_folder, tmp_path, make, max_steps=3, weight_decay=0.1).train()
    states = [state for _, state in run.engine.published]
    assert all(torch.equal(states[1][name], states[2][name]) for name in states[1])
    assert not torch.equal(states[2]["model.norm.weight"], states[3]["model.norm.weight"])
    assert run.steps[1][1]["actor/loss"] == run.steps[1][1]["actor/rows"] == 0
    assert run.steps[1][1]["batch/zero_advantage_share"] == 1


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_batch_without_a_single_advantage_moves_no_weight(model_folder: Path, tmp_path: Path, beta: float) -> None:
    """thinking-machines-lab/tinker-cookbook#915: seen: an optimiser step though nothing was left to learn from. A penalty is something."""

    def make(engine: FakeEngine, call: int) -> Batch:
        if call != 1:
            return engine.batch()
        return Batch(groups=(engine.group(0, [2], [6, 6], [1.0, 1.0]), engine.group(1, [3], [2, 4], [0.0, 0.0])), requested=2, step=1)

    run = Run(model_folder, tmp_path, make, max_steps=3, weight_decay=0.1, beta=beta).train()
    states = [state for _, state in run.engine.published]
    is_still = all(torch.equal(states[1][name], states[2][name]) for name in states[1])
    assert is_still is (beta == 0.0)
    assert not torch.equal(states[2]["model.norm.weight"], states[3]["model.norm.weight"])
    assert [metrics["actor/step_skipped"] for _, metrics in run.steps] == [0, float(is_still), 0]
    assert run.steps[1][1]["batch/zero_advantage_share"] == 1


def test_weights_that_become_no_numbers_are_never_published(model_folder: Path, tmp_path: Path) -> None:
    run = Run(model_folder, tmp_path, always)
    run.trainer._logprob_tolerance = None

    def make(call: int) -> Batch:
        batch = run.engine.batch()
        with torch.no_grad():
            run.trainer.model.model.norm.weight[0] = torch.nan
        return batch

    run.source.make = make
    with pytest.raises(TrainerError, match="expected a finite loss"):
        run.train()
    assert [version for version, _ in run.engine.published] == [0]


def test_a_gradient_that_is_no_number_updates_nothing(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.GRPOTrainer, "_clip_grad_norm", lambda trainer, model: torch.tensor(torch.inf))
    run = Run(model_folder, tmp_path, always)
    with pytest.raises(TrainerError, match="expected a finite gradient norm, got inf at step 0"):
        run.train()
    assert [version for version, _ in run.engine.published] == [0]


# ---------------------------------------------------------------- what is written and told


def test_the_saved_policy_loads_as_a_model_and_a_tokenizer(model_folder: Path, tmp_path: Path) -> None:
    run = Run(model_folder, tmp_path, always).train()
    run.trainer.save_policy(tmp_path / "policy")
    ours, theirs = (logprobs_of(model, [[2, 3, 4]])[0] for model in (load(tmp_path / "policy"), run.engine.model))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert load_tokenizer(tmp_path / "policy")("ab")["input_ids"] == [2, 3]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("IoError: disk full"), RuntimeError("writer")])
def test_a_policy_that_cannot_be_written_is_an_error_that_names_folder_and_cause(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    run = Run(model_folder, tmp_path, always)

    def full(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(run.trainer._tokenizer, "save_pretrained", full)
    with pytest.raises(TrainerError, match=rf"write the policy to {tmp_path / 'policy'}, got {type(error).__name__}: .* - .* free space"):
        run.trainer.save_policy(tmp_path / "policy")
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "policy"):
        with pytest.raises(TrainerError, match=rf"write the policy to {folder}, got "):
            run.trainer.save_policy(folder)


def test_a_checkpoint_that_cannot_be_written_is_an_error_that_names_its_folder(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("IoError: disk full")

    monkeypatch.setattr(room.GRPOTrainer, "_save_checkpoint", full)
    with pytest.raises(TrainerError, match=rf"write the policy to {tmp_path / 'checkpoint-1'}, got SafetensorError"):
        Run(model_folder, tmp_path, always, save_every_steps=1).train()


@pytest.mark.parametrize("end", ["no batch", "stop"])
def test_an_end_before_the_first_step_logs_no_advice_on_iterators(model_folder: Path, tmp_path: Path, end: str) -> None:
    heard: list[str] = []
    handler = python_logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = python_logging.getLogger("transformers.trainer")
    logger.addHandler(handler)
    try:
        run = Run(model_folder, tmp_path, lambda engine, call: None)
        if end == "stop":
            run.trainer._stop.set()
            run.train()
        else:
            with pytest.raises(TrainerError, match="got none"):
                run.train()
        assert heard == []
        logger.warning("There seems not to be a single sample in your epoch_iterator, outside of training")
        assert len(heard) == 1
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("end", ["last batch", "no batch", "stop"])
def test_checkpoints_are_written_every_so_many_steps_and_at_the_end(model_folder: Path, tmp_path: Path, end: str) -> None:
    def make(engine: FakeEngine, call: int) -> Batch | None:
        return None if end == "no batch" and call == 3 else engine.batch(is_last=end == "last batch" and call == 2)

    run = Run(model_folder, tmp_path, make, max_steps=9, save_every_steps=2)
    run.trainer._on_step = lambda step, metrics: run.trainer._stop.set() if end == "stop" and step == 3 else None
    run.train()
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]
    ours, theirs = (logprobs_of(model, [[2, 3, 4]])[0] for model in (load(tmp_path / "checkpoint-3"), run.engine.model))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_without_checkpoints_nothing_is_written(model_folder: Path, tmp_path: Path) -> None:
    Run(model_folder, tmp_path / "output", always).train()
    assert not (tmp_path / "output").exists() or not list((tmp_path / "output").iterdir())


@pytest.mark.parametrize("option", [{"beta": 0.1, "save_every_steps": 1}, {"lora": {"r": 2}, "max_steps": 1}])
def test_nothing_is_printed(model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], option: dict[str, Any]) -> None:
    engine = FakeEngine(model_folder)
    logging.enable_progress_bar()
    try:
        Run(model_folder, tmp_path, always, engine=engine, **option).train().trainer.save_policy(tmp_path / "policy")
    finally:
        logging.disable_progress_bar()
    assert capfd.readouterr() == ("", "")


def test_the_metrics_of_a_step_are_flat_numbers(model_folder: Path, tmp_path: Path) -> None:
    run = Run(model_folder, tmp_path, always, warmup_steps=2, learning_rate=0.01).train()
    assert [step for step, _ in run.steps] == [1, 2]
    for _, metrics in run.steps:
        assert all(isinstance(value, float) and np.isfinite(value) for value in metrics.values())
        parts = ["wait", "assemble", "old_logprobs", "forward", "backward", "optimizer", "publish"]
        assert metrics["actor/step_seconds"] == pytest.approx(sum(metrics[f"actor/{part}_seconds"] for part in parts))
        assert metrics.keys() >= {
            "actor/loss",
            "actor/grad_norm",
            "actor/entropy",
            "actor/clip_fraction",
            "batch/zero_advantage_share",
        }
        assert "actor/kl" not in metrics
        assert metrics["actor/clip_fraction"] == 0
    assert [metrics["actor/learning_rate"] for _, metrics in run.steps] == pytest.approx([0.0, 0.005])


def test_the_entropy_is_the_mean_over_all_policy_tokens(model_folder: Path, tmp_path: Path) -> None:
    run = Run(model_folder, tmp_path, always, max_steps=1).train()
    start = load(model_folder)
    entropies = []
    assert run.source.given[0] is not None
    for sample in samples_from_batch(run.source.given[0]):
        with torch.no_grad():
            ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.completion_ids.tolist()]])
            logp = torch.log_softmax(start(ids).logits[0, len(sample.prompt_ids) - 1 : -1], -1)
        entropies += (-(logp.exp() * logp).sum(-1)).tolist()
    assert run.steps[0][1]["actor/entropy"] == pytest.approx(np.mean(entropies), abs=1e-5)


def test_the_schedule_and_the_optimiser_are_the_configured_ones(model_folder: Path, tmp_path: Path) -> None:
    config = tiny_config(
        model_folder,
        temperature=0.7,
        max_steps=7,
        learning_rate=0.02,
        warmup_steps=3,
        lr_scheduler_type="linear",
        weight_decay=0.1,
        adam_beta1=0.8,
        adam_beta2=0.95,
        max_grad_norm=0.5,
        loss_type="grpo",
        beta=0.01,
    )
    args = grpo_config(config, tmp_path, config.response_length)
    assert (args.max_steps, args.learning_rate, args.warmup_steps, args.lr_scheduler_type) == (7, 0.02, 3, "linear")
    assert (args.weight_decay, args.adam_beta1, args.adam_beta2, args.max_grad_norm) == (0.1, 0.8, 0.95, 0.5)
    assert (args.loss_type, args.beta, args.temperature, args.max_completion_length) == ("grpo", 0.01, 0.7, 6)
    assert (args.seed, args.bf16, args.report_to, args.ignore_data_skip) == (42, False, [], True)


@pytest.mark.parametrize("content", ["no folder", "nothing", "no tokenizer", "no weights", "torn weights", "torn configuration"])
def test_a_folder_without_a_model_is_refused(model_folder: Path, tmp_path: Path, content: str) -> None:
    folder = tmp_path / "model"
    if content != "no folder":
        folder.mkdir()
    if content == "no tokenizer":
        load(model_folder).save_pretrained(folder)
    if content in ("no weights", "torn weights", "torn configuration"):
        for file in model_folder.glob("*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
    if content == "torn weights":
        (folder / "model.safetensors").write_bytes((model_folder / "model.safetensors").read_bytes()[:500])
    if content == "torn configuration":
        (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model\.path.* with a (causal language model|tokenizer)"):
        Run(folder, tmp_path, always, engine=FakeEngine(model_folder))


def test_padding_of_the_tiny_tokenizer_is_what_rows_are_padded_with(model_folder: Path, tmp_path: Path) -> None:
    run = Run(model_folder, tmp_path, always)
    for tensors in run.trainer._micro_batches(run.engine.batch()):
        assert set(tensors["completion_ids"][tensors["completion_mask"] == 0].tolist()) <= {PAD}


def first_tokens_off(by: float, *, rollouts: int) -> Callable[[FakeEngine, int], Batch]:
    """The first log-prob of so many rollouts is off by so much."""

    def make(engine: FakeEngine, call: int) -> Batch:
        changed = iter(range(rollouts))

        def change(turn: Any) -> Any:
            if next(changed, None) is None:
                return turn
            off = np.where(np.arange(len(turn.token_ids)) == 0, np.float32(by), np.float32(0))
            return replace(turn, inference_logprobs=turn.inference_logprobs + off)

        return with_turns(engine.batch(), change)

    return make


def test_one_token_a_little_beyond_the_tolerance_is_rounding_counted_and_told_once(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(model_folder, tmp_path, first_tokens_off(5e-4, rollouts=1)).train()
    assert [metrics["actor/logprob_gap_outliers"] for _, metrics in run.steps] == [1.0] * len(run.steps)
    assert len(run.steps) > 1
    (told,) = [record.getMessage() for record in caplog.records if "logprob_gap_outliers" in record.getMessage()]
    assert "got 0.0005" in told


@pytest.mark.parametrize(("by", "rollouts"), [(5e-4, 3), (0.02, 1), (math.nan, 1)])
def test_several_tokens_beyond_the_tolerance_and_one_far_beyond_are_a_fault(
    model_folder: Path, tmp_path: Path, by: float, rollouts: int
) -> None:
    with pytest.raises(TrainerError, match=r"within 0\.0001 of each other"):
        Run(model_folder, tmp_path, first_tokens_off(by, rollouts=rollouts)).train()
