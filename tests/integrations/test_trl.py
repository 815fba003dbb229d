"""TRL's GRPOTrainer with dynamic sampling: batches are full and teach something, every bound ends, and nothing else changes."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from trl import GRPOTrainer

from sluice.errors import ConfigError, RecordError, ResampleError, TrainerError
from sluice.filters import build_query_filter
from sluice.integrations.trl import DynamicSampling, DynamicSamplingMixin
from sluice.integrations.trl.trainer import STATE_FILE
from tests.integrations.tiny import LETTERS, has_an_a, letters, make, rewards_by_prompt, steps, text

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # TRL asks for it

KEEP_ALL = DynamicSampling(query_filter={"type": "no_filter"})
SAME_FOR_HALF = {letter: [1, 1, 1, 1] for letter in LETTERS[::2]}  # prompts that begin with a, c, e, g, i teach nothing


# ---------------------------------------------------------------- the same as plain TRL, but for the groups that teach nothing


def test_a_run_that_drops_nothing_is_a_plain_run_to_the_last_bit(model_folder: Path, tmp_path: Path) -> None:
    plain = make(model_folder, tmp_path / "plain", GRPOTrainer)
    plain.train()
    ours = make(model_folder, tmp_path / "ours", settings=KEEP_ALL)  # building a trainer sets the seed
    ours.train()
    assert plain.seen.prompts == ours.seen.prompts
    for theirs, mine in zip(steps(plain), steps(ours), strict=True):
        assert {name: mine[name] for name in theirs if name != "step_time"} == {
            name: theirs[name] for name in theirs if name != "step_time"
        }
    for name, weights in plain.model.state_dict().items():
        assert torch.equal(weights, ours.model.state_dict()[name]), name


def test_plain_batches_hold_groups_without_advantage_and_ours_are_full_of_those_with(model_folder: Path, tmp_path: Path) -> None:
    reward = rewards_by_prompt(SAME_FOR_HALF)
    plain = make(model_folder, tmp_path / "plain", GRPOTrainer, reward_funcs=reward, args={"max_steps": 5})
    ours = make(model_folder, tmp_path / "ours", reward_funcs=reward, args={"max_steps": 5})
    plain.train()
    ours.train()
    zero = [float((output["advantages"] == 0).float().mean()) for output in plain.seen.outputs]
    assert sum(zero) / len(zero) > 0.2
    assert len(ours.seen.outputs) == 5
    for output, prompts in zip(ours.seen.outputs, ours.seen.prompts, strict=True):
        assert output["advantages"].shape == (8,)  # exactly what was asked for
        assert (output["advantages"] != 0).all()
        assert prompts[:4] == prompts[:1] * 4  # whole groups
        assert prompts[4:] == prompts[4:5] * 4
        assert not set("".join(prompt[0] for prompt in prompts)) & set(SAME_FOR_HALF)
    logged = steps(ours)
    assert all(step["batch/zero_advantage_share"] == 0 for step in logged)
    assert all(step["frac_reward_zero_std"] == 0 for step in logged)
    assert logged[-1]["scheduler/rejected/low_information/no_spread"] > 0
    assert logged[-1]["ledger/tokens/total"] == logged[-1]["ledger/tokens/trained"] + logged[-1]["ledger/tokens/dropped"]


def test_each_prompt_is_drawn_once_per_epoch_kept_or_dropped(model_folder: Path, tmp_path: Path) -> None:
    drawn: list[str] = []

    def reward(prompts: list[str], **_: Any) -> list[float]:
        drawn.extend(prompts[::4])
        return rewards_by_prompt(SAME_FOR_HALF)(prompts)

    data = letters(11)
    trainer = make(model_folder, tmp_path, dataset=data, reward_funcs=reward, args={"max_steps": 8})
    trainer.train()
    assert len(drawn) > 2 * len(data)
    for epoch in range(len(drawn) // len(data)):
        assert sorted(drawn[epoch * len(data) : (epoch + 1) * len(data)]) == sorted(data["prompt"])
    last = steps(trainer)[-1]
    assert last["scheduler/prompts_drawn"] == len(drawn)
    assert last["scheduler/data_epochs"] == pytest.approx(len(drawn) / len(data), abs=1)


def test_every_sampled_token_is_in_the_ledger(model_folder: Path, tmp_path: Path) -> None:
    sampled: list[int] = []

    def reward(completion_ids: list[list[int]], completions: list[str], **_: Any) -> list[float]:
        sampled.extend(len(ids) for ids in completion_ids)
        return has_an_a(completions)

    trainer = make(model_folder, tmp_path, reward_funcs=reward)
    trainer.train()
    assert steps(trainer)[-1]["ledger/tokens/total"] == sum(sampled)
    assert trainer.batch_sampler.machine.ledger.total_tokens == sum(sampled)


# ---------------------------------------------------------------- bounds


def nothing_to_learn(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def test_a_batch_that_cannot_be_filled_is_an_error_with_the_numbers(model_folder: Path, tmp_path: Path) -> None:
    trainer = make(model_folder, tmp_path, reward_funcs=nothing_to_learn, settings=DynamicSampling(max_resample_rounds=3))
    with pytest.raises(
        ResampleError, match=r"batch of 2 groups, kept 0 of 6 judged.*DynamicSampling.max_resample_rounds \(3\).*no_spread 6"
    ):
        trainer.train()


@pytest.mark.parametrize("policy", ["shrink", "keep_low_information"])
def test_with_nothing_to_learn_at_all_no_policy_goes_on_for_ever(model_folder: Path, tmp_path: Path, policy: Any) -> None:
    def unscored(completions: list[str], **_: Any) -> list[float | None]:
        return [None] * len(completions)

    settings = DynamicSampling(max_resample_rounds=1, max_response_rounds=1, on_exhausted=policy)
    with pytest.raises(ResampleError, match="in a row kept nothing"):
        make(model_folder, tmp_path, reward_funcs=unscored, settings=settings).train()


def test_keep_low_information_tops_the_batch_up_with_dropped_groups(model_folder: Path, tmp_path: Path) -> None:
    settings = DynamicSampling(max_resample_rounds=2, on_exhausted="keep_low_information")
    trainer = make(model_folder, tmp_path, reward_funcs=nothing_to_learn, settings=settings, args={"max_steps": 1})
    trainer.train()
    assert (trainer.seen.outputs[0]["advantages"] == 0).all()
    assert steps(trainer)[0]["scheduler/topped_up_count"] == 2


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_a_short_batch_is_divided_by_what_it_holds(model_folder: Path, tmp_path: Path, loss_type: str) -> None:
    data = letters().filter(lambda row: row["prompt"][0] in "ab")  # an a-group is dropped, so that of two groups one is left
    gradients = []
    for name, settings, size in (
        ("short", DynamicSampling(max_resample_rounds=1, on_exhausted="shrink"), 8),
        ("whole", KEEP_ALL, 4),
    ):
        trainer = make(
            model_folder,
            tmp_path / name,
            dataset=data if size == 8 else data.filter(lambda row: row["prompt"][0] == "b"),
            reward_funcs=rewards_by_prompt({"a": [1, 1, 1, 1], "b": [1, 0, 0, 0]}),
            settings=settings,
            args={"max_steps": 1, "per_device_train_batch_size": size, "loss_type": loss_type, "shuffle_dataset": False, "beta": 0.1},
        )
        fixed = [[5, 6, 7], [5, 6], [7, 8, 9, 2], [3]]
        trainer._generate_single_turn = lambda ids, *_, fixed=fixed: ([fixed[i % 4] for i in range(len(ids))], None)
        trainer._clip_grad_norm = lambda model, kept=gradients: (
            kept.append({key: weights.grad.clone() for key, weights in model.named_parameters() if weights.grad is not None})
            or torch.zeros(())
        )
        trainer.train()
        if name == "short":
            assert steps(trainer)[0]["batch/neutral_rows"] == 4
            assert steps(trainer)[0]["batch/groups"] == 1
            assert int((trainer.seen.outputs[0]["tool_mask"].sum(1) > 0).sum()) == 4
    short, whole = gradients
    assert short.keys() == whole.keys()
    for key, gradient in whole.items():
        torch.testing.assert_close(short[key], gradient, rtol=1e-4, atol=1e-6, msg=key)


def test_a_loss_that_cannot_be_divided_is_refused_before_anything_is_sampled(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"loss_type 'bnpo'.*on_exhausted='raise'"):
        make(model_folder, tmp_path, settings=DynamicSampling(on_exhausted="shrink"), args={"loss_type": "bnpo"})


def test_the_guard_bounds_what_filters_drop(model_folder: Path, tmp_path: Path) -> None:
    settings = DynamicSampling(guard={"max_filter_ratio": 0.5})
    trainer = make(model_folder, tmp_path, reward_funcs=nothing_to_learn, settings=settings)
    trainer.train()
    last = steps(trainer)[-1]
    assert last["guard/filter_ratio"] <= 0.5
    assert last["guard/kept_by_guard"] > 0


# ---------------------------------------------------------------- filters


def test_single_completions_are_replaced_within_their_group(model_folder: Path, tmp_path: Path) -> None:
    settings = DynamicSampling(query_filter={"type": "no_filter"}, response_filter={"type": "length", "filter_args": {"min_tokens": 3}})
    trainer = make(model_folder, tmp_path, settings=settings)
    trainer.train()
    for output, prompts in zip(trainer.seen.outputs, trainer.seen.prompts, strict=True):
        assert (output["completion_mask"].sum(1) >= 3).all()
        assert prompts[:4] == prompts[:1] * 4
    assert sum(step["scheduler/response_filter_count"] for step in steps(trainer)) > 0


def test_filters_read_the_weighted_sum_or_one_function_by_name(model_folder: Path, tmp_path: Path) -> None:
    def accuracy(prompts: list[str], **_: Any) -> list[float]:
        return rewards_by_prompt({letter: [0, 0, 0, 0] for letter in LETTERS[::2]})(prompts)

    def brevity(completion_ids: list[list[int]], prompts: list[str], **_: Any) -> list[float]:
        return [-0.1 * (place % 4) for place in range(len(prompts))]  # hides a hopeless group

    functions = {"reward_funcs": [accuracy, brevity], "args": {"reward_weights": [1.0, 0.5]}}
    summed = make(model_folder, tmp_path / "sum", **functions)
    named = make(
        model_folder, tmp_path / "named", settings=DynamicSampling(query_filter={"type": "std_filter", "metric": "accuracy"}), **functions
    )
    summed.train()
    named.train()
    assert steps(summed)[-1].get("scheduler/rejected/low_information/no_spread", 0) == 0
    assert steps(named)[-1]["scheduler/rejected/low_information/no_spread"] > 0
    assert not {prompt[0] for prompts in named.seen.prompts for prompt in prompts} & set(LETTERS[::2])
    rewards = torch.tensor([[1.0, -0.0], [0.0, -0.1], [1.0, -0.2], [0.0, -0.3]])
    total = (rewards * torch.tensor([1.0, 0.5])).sum(1)
    expected = (total - total.mean()) / (total.std() + 1e-4)
    torch.testing.assert_close(named.seen.outputs[0]["advantages"][:4], expected, rtol=1e-5, atol=1e-6)


def test_normalised_function_by_function_any_spread_keeps_a_group(model_folder: Path, tmp_path: Path) -> None:
    def one(prompts: list[str], **_: Any) -> list[float]:
        return [float(place % 2) for place in range(len(prompts))]

    def other(prompts: list[str], **_: Any) -> list[float]:
        return [1.0 - place % 2 for place in range(len(prompts))]

    weighted = {"multi_objective_aggregation": "normalize_then_sum", "max_steps": 1}
    trainer = make(model_folder, tmp_path, reward_funcs=[one, other], args=weighted)
    trainer.train()
    assert steps(trainer)[0]["scheduler/acceptance_rate"] == 1  # the sums are equal, the functions are not


def test_a_filter_object_is_as_good_as_a_configuration(model_folder: Path, tmp_path: Path) -> None:
    band = build_query_filter({"type": "mean_filter", "filter_args": {"threshold_down": 0.6}})
    trainer = make(
        model_folder,
        tmp_path,
        reward_funcs=rewards_by_prompt({letter: [1, 1, 1, 0] for letter in LETTERS[::2]}),
        settings=DynamicSampling(query_filter=band),
    )
    trainer.train()
    assert {prompt[0] for prompts in trainer.seen.prompts for prompt in prompts} <= set(LETTERS[::2])


def test_a_completion_without_any_reward_is_sampled_again_or_judged(model_folder: Path, tmp_path: Path) -> None:
    calls = {"n": 0}

    def sometimes(completions: list[str], **_: Any) -> list[float | None]:
        calls["n"] += 1
        return [None if calls["n"] == 1 and place == 1 else float(place % 2) for place in range(len(completions))]

    trainer = make(model_folder, tmp_path / "replace", reward_funcs=sometimes, args={"max_steps": 1})
    trainer.train()
    assert steps(trainer)[0]["batch/rejected_members/reward_missing"] == 1
    assert (trainer.seen.outputs[0]["advantages"] != 0).all()

    calls["n"] = 0
    judged = DynamicSampling(on_member_failure="judge", min_members=3)
    trainer = make(model_folder, tmp_path / "judge", reward_funcs=sometimes, settings=judged, args={"max_steps": 1})
    trainer.train()
    assert (trainer.seen.outputs[0]["advantages"] == 0).tolist() == [False, True, *[False] * 6]


def test_truncated_completions_that_trl_masks_are_outside_of_their_groups_statistics(model_folder: Path, tmp_path: Path) -> None:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [[LETTERS.index(letter) + 2 for letter in prompt] for prompt in prompts]
        cut = [row % 4 == 3 for row in range(len(prompts))]
        return {"prompt_ids": ids, "completion_ids": [[2, 3] if c else [2, 1] for c in cut], "logprobs": [[-1.0] * 2] * len(ids)}

    def reward(prompts: list[str], **_: Any) -> list[float]:  # half of the groups differ only by the truncated member
        return rewards_by_prompt({letter: [1, 1, 1, 0] for letter in LETTERS[::2]})(prompts)

    masked = {"mask_truncated_completions": True, "max_steps": 1}
    trainer = make(model_folder, tmp_path, reward_funcs=reward, rollout_func=rollout, args=masked)
    trainer.train()
    assert not {prompt[0] for prompt in trainer.seen.prompts[0]} & set(SAME_FOR_HALF)
    counted = torch.tensor([1.0, 0.0, 1.0])
    expected = [*((counted - counted.mean()) / (counted.std() + 1e-4)).tolist(), 0.0]
    torch.testing.assert_close(trainer.seen.outputs[0]["advantages"], torch.tensor(expected * 2))
    invalid = DynamicSampling(truncated="invalid", max_response_rounds=1, max_resample_rounds=1)
    refused = make(model_folder, tmp_path, reward_funcs=reward, rollout_func=rollout, settings=invalid)
    with pytest.raises(ResampleError, match="truncated"):
        refused.train()


def test_a_mistake_in_the_settings_is_found_before_anything_is_sampled(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"DynamicSampling.query_filter.type.*std_filter"):
        make(model_folder, tmp_path, settings=DynamicSampling(query_filter={"type": "std_filtr"}))
    with pytest.raises(ConfigError, match="max_resample_rounds must be at least 1, got 0"):
        make(model_folder, tmp_path, settings=DynamicSampling(max_resample_rounds=0))
    with pytest.raises(ConfigError, match="guard"):
        make(model_folder, tmp_path, settings=DynamicSampling(guard={"max_filter_ratio": 2.0}))
    with pytest.raises(ConfigError, match=r"DynamicSampling.query_filter: expected a configuration.*got 5"):
        make(model_folder, tmp_path, settings=DynamicSampling(query_filter=5))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"dynamic_sampling: expected a DynamicSampling, got {'max_resample_rounds': 3}"):
        make(model_folder, tmp_path, settings={"max_resample_rounds": 3})  # type: ignore[arg-type]


# ---------------------------------------------------------------- whatever else TRL does


def test_it_works_with_lora(model_folder: Path, tmp_path: Path) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = make(model_folder, tmp_path, peft_config=lora, args={"beta": 0.1})
    trainer.train()
    assert all(step["batch/zero_advantage_share"] == 0 for step in steps(trainer))
    assert all(math.isfinite(step["kl"]) for step in steps(trainer))


def test_it_works_with_chat_prompts(model_folder: Path, tmp_path: Path) -> None:
    chats = Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in letters()["prompt"]]})
    trainer = make(model_folder, tmp_path, dataset=chats, chat=True, reward_funcs=rewards_by_prompt(SAME_FOR_HALF))
    trainer.train()
    assert not {prompt[0] for prompts in trainer.seen.prompts for prompt in prompts} & set(SAME_FOR_HALF)


@pytest.mark.parametrize(
    "args",
    [
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 4, "steps_per_generation": 4},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_iterations": 2},
    ],
    ids=["gradient_accumulation", "steps_per_generation", "num_iterations"],
)
def test_a_generation_batch_may_serve_several_steps(model_folder: Path, tmp_path: Path, args: dict[str, int]) -> None:
    reward = rewards_by_prompt(SAME_FOR_HALF)
    plain = make(model_folder, tmp_path / "plain", GRPOTrainer, reward_funcs=reward, args={"max_steps": 4, **args})
    ours = make(model_folder, tmp_path / "ours", reward_funcs=reward, args={"max_steps": 4, **args})
    plain.train()
    ours.train()
    assert [o["advantages"].shape for o in ours.seen.outputs] == [o["advantages"].shape for o in plain.seen.outputs]
    assert all((output["advantages"] != 0).all() for output in ours.seen.outputs)


def test_evaluation_sees_every_item_and_no_filter(model_folder: Path, tmp_path: Path) -> None:
    asked: list[str] = []

    def reward(prompts: list[str], trainer_state: Any, **_: Any) -> list[float]:
        asked.extend(prompts)
        return rewards_by_prompt(SAME_FOR_HALF)(prompts)

    held_out = letters(6)
    trainer = make(
        model_folder,
        tmp_path,
        reward_funcs=reward,
        eval_dataset=held_out,
        args={"eval_strategy": "no", "per_device_eval_batch_size": 8, "num_generations_eval": 2},
    )
    trainer.train()
    asked.clear()
    before = trainer.batch_sampler.machine.ledger.total_tokens
    metrics = trainer.evaluate()
    assert sorted(asked) == sorted([*held_out["prompt"]] * 2)
    assert metrics["eval_frac_reward_zero_std"] > 0
    assert trainer.batch_sampler.machine.ledger.total_tokens == before


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(model_folder: Path, tmp_path: Path) -> None:
    reward = rewards_by_prompt(SAME_FOR_HALF)
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "lr_scheduler_type": "constant"}
    settings = DynamicSampling(guard={"max_filter_ratio": 0.9})
    whole = make(model_folder, tmp_path / "whole", reward_funcs=reward, settings=settings, args=saving)
    whole.train()
    resumed = make(model_folder, tmp_path / "resumed", reward_funcs=reward, settings=settings, args=saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert resumed.seen.prompts == whole.seen.prompts[2:]
    for name, weights in whole.model.state_dict().items():
        assert torch.equal(weights, resumed.model.state_dict()[name]), name
    assert resumed.batch_sampler.state_dict() == whole.batch_sampler.state_dict()


def test_the_checkpoint_of_a_plain_run_can_be_gone_on_from_and_a_torn_one_cannot(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    make(model_folder, tmp_path / "plain", GRPOTrainer, args=saving).train()
    checkpoint = tmp_path / "plain" / "checkpoint-1"
    on = make(model_folder, tmp_path / "on", args={"max_steps": 2})
    on.train(resume_from_checkpoint=str(checkpoint))
    assert "has no sluice_state.json" in caplog.text
    assert steps(on)[-1]["step"] == 2
    state = on.batch_sampler.state_dict()
    state["prompts"]["size"] = 99
    (checkpoint / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
    with pytest.raises(RecordError, match="99"):
        make(model_folder, tmp_path / "torn", args={"max_steps": 2}).train(resume_from_checkpoint=str(checkpoint))


def test_streams_are_read_again_and_again(model_folder: Path, tmp_path: Path) -> None:
    rows = letters(5)

    def stream() -> Any:
        yield from rows

    trainer = make(
        model_folder,
        tmp_path,
        dataset=IterableDataset.from_generator(stream),
        reward_funcs=rewards_by_prompt(SAME_FOR_HALF),
        args={"shuffle_dataset": False, "accelerator_config": {"dispatch_batches": False}, "max_steps": 2},
    )
    trainer.train()
    assert [prompts[::4] for prompts in trainer.seen.prompts] == [[rows["prompt"][1], rows["prompt"][3]]] * 2


def test_a_custom_rollout_function_and_its_mask_go_with_the_rows(model_folder: Path, tmp_path: Path) -> None:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [[LETTERS.index(letter) + 2 for letter in prompt] for prompt in prompts]
        return {
            "prompt_ids": ids,
            "completion_ids": [[2, *row, 1] for row in ids],
            "logprobs": [[-1.0] * (len(row) + 2) for row in ids],
            "env_mask": [[1] * (len(row) + 1) + [0] for row in ids],
            "won": [float(place % 2) if prompt[0] not in SAME_FOR_HALF else 1.0 for place, prompt in enumerate(prompts)],
        }

    def won(won: list[float], **_: Any) -> list[float]:
        return won

    trainer = make(model_folder, tmp_path, reward_funcs=won, rollout_func=rollout)
    trainer.train()
    for output, prompts in zip(trainer.seen.outputs, trainer.seen.prompts, strict=True):
        assert not {prompt[0] for prompt in prompts} & set(SAME_FOR_HALF)
        for row, prompt in enumerate(prompts):
            assert output["completion_ids"][row].tolist() == [2, *(LETTERS.index(letter) + 2 for letter in prompt), 1]
        assert output["tool_mask"].tolist() == [[1, 1, 1, 0]] * 8
        assert output["sampling_per_token_logps"].tolist() == [[-1.0] * 4] * 8
    assert steps(trainer)[-1]["ledger/tokens/trained"] == 3 * 8 * 3  # what the environment said is not sampled


def test_a_rollout_function_that_forgets_rows_is_named(model_folder: Path, tmp_path: Path) -> None:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {"prompt_ids": [[2]] * 7, "completion_ids": [[2]] * 7, "logprobs": [[0.0]] * 7}

    with pytest.raises(TrainerError, match="expected 8 rows of prompt_ids"):
        make(model_folder, tmp_path, rollout_func=rollout).train()


def test_what_reward_functions_log_stays_with_its_row(model_folder: Path, tmp_path: Path) -> None:
    def reward(prompts: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log_extra("first", [prompt[0] for prompt in prompts])
        log_metric("asked", len(prompts))
        return rewards_by_prompt(SAME_FOR_HALF)(prompts)

    trainer = make(model_folder, tmp_path, reward_funcs=reward, args={"max_steps": 1})
    trainer.train()
    assert list(trainer._logs["extra"]["first"]) == [prompt[0] for prompt in trainer._logs["prompt"]]
    assert not set(trainer._logs["extra"]["first"]) & set(SAME_FOR_HALF)
    assert steps(trainer)[0]["asked"] > 0


class Environment:
    """Counts how often it was begun; its reward depends on the prompt it was told."""

    begun: ClassVar[list[str]] = []

    def reset(self, prompt: Any, **_: Any) -> str:
        self.place = len(self.begun) % 4
        self.prompt = text(prompt)
        self.begun.append(self.prompt)
        return "j"

    def get_reward(self) -> float:
        return 1.0 if self.prompt[0] in SAME_FOR_HALF else float(self.place % 2)


def test_environments_are_played_once_for_each_completion(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("supports_tool_calling", "is_chat_template_prefix_preserving"):
        monkeypatch.setattr(f"trl.trainer.grpo_trainer.{name}", lambda *_: True)
    monkeypatch.setattr(Environment, "begun", [])
    chats = Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in letters()["prompt"]]})
    trainer = make(model_folder, tmp_path, dataset=chats, chat=True, reward_funcs=None, environment_factory=Environment)
    trainer.train()
    assert len(Environment.begun) == 4 * steps(trainer)[-1]["scheduler/prompts_drawn"]
    for prompts in trainer.seen.prompts:
        assert all(prompt.endswith("j") and prompt[0] not in SAME_FOR_HALF for prompt in prompts)


def test_the_mixin_works_on_a_subclass_of_somebody_else(model_folder: Path, tmp_path: Path) -> None:
    calls = []

    class Theirs(GRPOTrainer):
        def _calculate_rewards(self, *args: Any) -> Any:
            calls.append(len(args[1]))
            return super()._calculate_rewards(*args)

    class Mine(DynamicSamplingMixin, Theirs):
        pass

    trainer = make(model_folder, tmp_path, Mine)
    trainer.train()
    assert len(calls) >= 3
    assert all(step["batch/zero_advantage_share"] == 0 for step in steps(trainer))


def test_a_trainer_that_generates_elsewhere_is_told_so(model_folder: Path, tmp_path: Path) -> None:
    class Base(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return {}

    class Mine(DynamicSamplingMixin, Base):
        pass

    with pytest.raises(TrainerError, match="dynamic sampling cannot be put into"):
        make(model_folder, tmp_path, Mine).train()


# ---------------------------------------------------------------- several processes


@pytest.mark.timeout(600)  # each process imports torch and TRL anew
def test_two_processes_decide_alike_and_share_a_batch_of_whole_groups(model_folder: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {
        "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    script = root / "tests" / "integrations" / "two_processes.py"
    command = [sys.executable, "-W", "ignore", str(script), str(model_folder), str(tmp_path)]
    running = [
        subprocess.Popen(
            command, cwd=tmp_path, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for process in running:
        _, said = process.communicate(timeout=580)
        assert process.returncode == 0, said[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["processes"] == 2
    assert first["ledger"] == second["ledger"]
    assert first["weights"] == second["weights"]
    assert len(first["prompts"]) == 3
    for step in range(3):
        members = first["prompts"][step] + second["prompts"][step]  # a group lies across both
        assert members == members[:1] * 4
        assert members[0][0] not in SAME_FOR_HALF
        advantages = first["advantages"][step] + second["advantages"][step]
        assert 0.0 not in advantages
        assert sum(advantages) == pytest.approx(0, abs=1e-5)
        assert min(first["lengths"][step] + second["lengths"][step]) >= 2
    tokens = first["log"][-1]
    assert tokens["ledger/tokens/total"] + tokens["ledger/padding_tokens"] > 0
    assert first["scored"] == second["scored"]
