"""Dynamic sampling as a rollout function: the same choice as the trainer's, for a GRPOTrainer that is not ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from sluice.errors import ConfigError
from sluice.integrations.trl import DynamicRollout, DynamicSampling
from tests.integrations.tiny import LETTERS, letters, make, rewards_by_prompt, steps

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SAME_FOR_HALF = {letter: [1, 1, 1, 1] for letter in LETTERS[::2]}


def accuracy(prompts: list[str], **_: Any) -> list[float]:
    return rewards_by_prompt(SAME_FOR_HALF)(prompts)


async def fits(prompts: list[str], answer: list[str], **_: Any) -> list[float | None]:
    """None for every other row; and the columns belong to the prompts, also where those were replaced."""
    assert answer == [prompt[0] for prompt in prompts]
    return [None if row % 2 else 0.0 for row in range(len(prompts))]


def plain(folder: Path, output: Path, dynamic: DynamicRollout, **keywords: Any) -> Any:
    return make(folder, output, GRPOTrainer, reward_funcs=dynamic.reward_funcs, rollout_func=dynamic, **keywords)


def test_it_trains_on_what_the_trainer_of_ours_trains_on(model_folder: Path, tmp_path: Path) -> None:
    ours = make(model_folder, tmp_path / "ours", reward_funcs=[accuracy, fits])
    ours.train()
    theirs = plain(model_folder, tmp_path / "theirs", DynamicRollout([accuracy, fits]))
    theirs.train()
    assert theirs.seen.prompts == ours.seen.prompts
    for mine, other in zip(ours.seen.outputs, theirs.seen.outputs, strict=True):
        assert torch.equal(mine["completion_ids"], other["completion_ids"])
        assert torch.equal(mine["advantages"], other["advantages"])
        assert (other["advantages"] != 0).all()
    for first, second in zip(steps(ours), steps(theirs), strict=True):
        for name in ("loss", "reward", "rewards/accuracy/mean", "rewards/fits/mean", "scheduler/acceptance_rate", "ledger/tokens/total"):
            assert first[name] == second[name], name
    assert steps(theirs)[-1]["completions/mean_length"] <= 4


def test_evaluation_answers_and_scores_exactly_what_was_asked(model_folder: Path, tmp_path: Path) -> None:
    asked: list[str] = []

    def watched(prompts: list[str], **_: Any) -> list[float]:
        asked.extend(prompts)
        return accuracy(prompts)

    held_out = letters(6)
    arguments = {"num_generations_eval": 2, "max_steps": 1}
    trainer = plain(model_folder, tmp_path, DynamicRollout(watched), eval_dataset=held_out, args=arguments)
    trainer.train()
    asked.clear()
    metrics = trainer.evaluate()
    assert sorted(asked) == sorted([*held_out["prompt"]] * 2)
    assert metrics["eval_rewards/watched/mean"] > 0


def test_a_rollout_function_of_ones_own_generates_inside(model_folder: Path, tmp_path: Path) -> None:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [[LETTERS.index(letter) + 2 for letter in prompt] for prompt in prompts]
        mask = [[1, 0]] * len(prompts)
        return {"prompt_ids": ids, "completion_ids": [[2, 1]] * len(ids), "logprobs": [[-1.0, 0.0]] * len(ids), "env_mask": mask}

    trainer = plain(model_folder, tmp_path, DynamicRollout(accuracy, rollout_func=rollout))
    trainer.train()
    for output in trainer.seen.outputs:
        assert output["tool_mask"].tolist() == [[1, 0]] * 8
        assert output["sampling_per_token_logps"].tolist() == [[-1.0, 0.0]] * 8
    assert steps(trainer)[-1]["ledger/tokens/trained"] == 3 * 8


def test_a_short_batch_is_divided_by_its_tokens(model_folder: Path, tmp_path: Path) -> None:
    settings = DynamicSampling(max_resample_rounds=1, on_exhausted="shrink")
    data = letters().filter(lambda row: row["prompt"][0] in "ab")
    dynamic = DynamicRollout(accuracy, dynamic_sampling=settings)
    trainer = plain(model_folder, tmp_path, dynamic, dataset=data, args={"max_steps": 1, "loss_type": "dapo", "shuffle_dataset": False})
    trainer.train()
    output = trainer.seen.outputs[0]
    assert int((output["tool_mask"] * output["completion_mask"]).sum()) == output["num_items_in_batch"]
    assert (output["tool_mask"].sum(1) > 0).sum() == 4
    refused = DynamicRollout(accuracy, dynamic_sampling=settings)
    with pytest.raises(ConfigError, match="loss_type 'grpo' cannot be told"):
        plain(model_folder, tmp_path, refused, args={"loss_type": "grpo"}).train()


def test_a_resumed_run_draws_the_prompts_that_come_next(model_folder: Path, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "lr_scheduler_type": "constant"}
    whole = plain(model_folder, tmp_path / "run", DynamicRollout(accuracy), args=saving)
    whole.train()
    resumed = plain(model_folder, tmp_path / "run", DynamicRollout(accuracy), args=saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert resumed.seen.prompts == whole.seen.prompts[2:]


def test_what_it_cannot_do_is_refused(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward_funcs\[0\]: expected a function, got str"):
        DynamicRollout(["some/reward-model"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="dynamic_sampling: expected a DynamicSampling, got {}"):
        DynamicRollout(accuracy, dynamic_sampling={})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pass dynamic.reward_funcs"):
        make(model_folder, tmp_path, GRPOTrainer, reward_funcs=accuracy, rollout_func=DynamicRollout(accuracy)).train()
