"""What a sampler or a reward function of TRL answers, and what becomes of it where it is not what a batch is made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trl import GRPOTrainer

from sluice.errors import TrainerError
from sluice.integrations.trl import DynamicRollout, DynamicSampling
from tests.integrations.test_trl_correction import FIXED, TOKENS, scored
from tests.integrations.tiny import make, steps

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ROW = [-1.0, -2.0, -0.5]


def answering(**columns: Callable[[int], Any]) -> Callable[[list[str], Any], Any]:
    """A rollout function whose answer is as it should be, but for these columns, made for a number of rows."""

    def rollout(prompts: list[str], trainer: Any) -> Any:
        rows = len(prompts)
        answer = {"prompt_ids": [[2, 3]] * rows, "completion_ids": [FIXED[row % 4] for row in range(rows)], "logprobs": [ROW] * rows}
        return answer | {name: column(rows) for name, column in columns.items()}

    return rollout


def run(folder: Path, output: Path, **trainer: Any) -> Any:
    args = {"max_steps": 1, "per_device_train_batch_size": 4, "loss_type": "grpo", **trainer.pop("args", {})}
    made = make(folder, output, args=args, **trainer)
    made.train()
    return made


# ---------------------------------------------------------------- rollout functions


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"logprobs": lambda rows: [ROW] + [ROW[:2]] * (rows - 1)}, "row 1: expected one log-prob for each of its 3 tokens, got 2"),
        ({"logprobs": lambda rows: [[*ROW, -1.0]] * rows}, "row 0: expected one log-prob for each of its 3 tokens, got 4"),
        ({"logprobs": lambda rows: [ROW] * (rows - 1)}, "expected 4 rows of logprobs.*got 3"),
        ({"logprobs": lambda rows: [ROW] * (rows - 1) + [None]}, "row 3: expected one log-prob for each of its 3 tokens, got None"),
        (
            {"env_mask": lambda rows: [[1, 1, 1]] + [[1, 0]] * (rows - 1)},
            "row 1: expected one entry of env_mask for each of its 3 tokens, got 2",
        ),
        ({"env_mask": lambda rows: [[1, 1, 1]] * (rows - 1)}, "expected 4 rows of env_mask.*got 3"),
        ({"completion_ids": lambda rows: [*FIXED[: rows - 1], []]}, "row 3: expected at least one token, got none"),
    ],
    ids=["short", "long", "rows of log-probs", "none", "short mask", "rows of masks", "empty"],
)
@pytest.mark.parametrize("inside", [False, True], ids=["trainer", "rollout"])
def test_case_119_columns_of_a_rollout_that_differ_in_length_are_refused_by_row(
    model_folder: Path, tmp_path: Path, columns: Any, says: str, inside: bool
) -> None:
    """TRL fills short rows up: log-probs with 0, so that all after the gap belong to the wrong token, masks with 1."""
    trainer = {"reward_funcs": scored, "rollout_func": answering(**columns)}
    if inside:
        dynamic = DynamicRollout(scored, rollout_func=answering(**columns))
        trainer = {"reward_funcs": dynamic.reward_funcs, "rollout_func": dynamic, "cls": GRPOTrainer}
    with pytest.raises(TrainerError, match=says):
        run(model_folder, tmp_path, **trainer)


def test_an_answer_that_is_none_is_said(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="expected a mapping with prompt_ids, completion_ids and logprobs .*, got NoneType"):
        run(model_folder, tmp_path, reward_funcs=scored, rollout_func=lambda prompts, trainer: None)


@pytest.mark.parametrize(
    "make_row", [np.array, torch.tensor, lambda row: [np.float64(value) for value in row]], ids=["array", "tensor", "float64"]
)
def test_log_probs_of_any_library_are_corrected_alike(model_folder: Path, tmp_path: Path, make_row: Any) -> None:
    plain = run(model_folder, tmp_path / "1", reward_funcs=scored, rollout_func=answering(), train_infer_correction=TOKENS)
    columns = {"logprobs": lambda rows: [make_row(ROW)] * rows}
    other = run(model_folder, tmp_path / "2", reward_funcs=scored, rollout_func=answering(**columns), train_infer_correction=TOKENS)
    assert torch.equal(plain.seen.outputs[0]["tool_mask"], other.seen.outputs[0]["tool_mask"])


@pytest.mark.parametrize("inside", [False, True], ids=["trainer", "rollout"])
def test_case_53_a_group_of_different_problems_is_told_once(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, inside: bool
) -> None:
    """An environment that counts instead of taking the prompt gives every member another problem."""

    def trained(output: str, **columns: Callable[[int], Any]) -> int:
        caplog.clear()
        rollout: Any = answering(**columns)
        trainer: dict[str, Any] = {"reward_funcs": scored, "rollout_func": rollout}
        if inside:
            dynamic = DynamicRollout(scored, rollout_func=rollout)
            trainer = {"reward_funcs": dynamic.reward_funcs, "rollout_func": dynamic, "cls": GRPOTrainer}
        run(model_folder, tmp_path / output, args={"max_steps": 2}, **trainer)
        return caplog.text.count("different prompts in one group")

    assert trained("same") == 0
    assert trained("other", prompt_ids=lambda rows: [[2, 3 + row % 2] for row in range(rows)]) == 1


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_case_113_a_batch_without_a_single_log_prob_is_no_batch_to_correct(model_folder: Path, tmp_path: Path, nothing: Any) -> None:
    columns = {"logprobs": lambda rows: [[nothing] * 3] * rows}
    with pytest.raises(TrainerError, match="expected the sampler's log-prob of every sampled token, got none"):
        run(model_folder, tmp_path, reward_funcs=scored, rollout_func=answering(**columns), train_infer_correction=TOKENS)


# ---------------------------------------------------------------- rewards


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e39])
def test_a_reward_that_is_no_number_is_outside_of_its_group(model_folder: Path, tmp_path: Path, bad: float) -> None:
    settings = DynamicSampling(on_member_failure="judge", min_members=2)
    trainer = run(model_folder, tmp_path, reward_funcs=lambda prompts, **_: [1.0, 0.0, bad, 0.5][: len(prompts)], settings=settings)
    left = torch.tensor([1.0, 0.0, 0.5])
    advantages = trainer.seen.outputs[0]["advantages"]
    torch.testing.assert_close(advantages[[0, 1, 3]], (left - left.mean()) / (left.std() + 1e-4))
    assert advantages[2] == 0


def test_a_completion_of_which_no_token_trains_is_outside_of_its_group(model_folder: Path, tmp_path: Path) -> None:
    """huggingface/trl#6420: seen: a conversation without a single trained token had its reward in its siblings' baseline."""
    calls: list[int] = []

    def masks(rows: int) -> list[list[int]]:
        calls.append(rows)
        return [[int(row != 2)] * 3 for row in range(rows)]

    def rewards(prompts: list[str], **_: Any) -> list[float]:
        return [1.0, 0.0, 100.0, 0.5][: len(prompts)]

    trainer = {"reward_funcs": rewards, "rollout_func": answering(env_mask=masks)}
    judged = run(model_folder, tmp_path / "1", settings=DynamicSampling(on_member_failure="judge", min_members=2), **trainer)
    left = torch.tensor([1.0, 0.0, 0.5])
    advantages = judged.seen.outputs[0]["advantages"]
    torch.testing.assert_close(advantages[[0, 1, 3]], (left - left.mean()) / (left.std() + 1e-4))
    assert advantages[2] == 0
    assert calls == [4]
    replaced = run(model_folder, tmp_path / "2", **trainer)
    assert calls == [4, 4, 1]
    assert replaced.seen.outputs[0]["tool_mask"].tolist() == [[1, 1, 1]] * 4


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("functions", [1, 2])
def test_case_1_a_group_without_spread_has_no_advantage_whatever_its_reward(
    model_folder: Path, tmp_path: Path, scale: str, functions: int
) -> None:
    """In float32 the mean of seven times 1000000.1 is another number, which TRL takes for a spread."""
    constant = torch.full((1, 7), 1e6 + 0.1)
    assert torch.nanmean(constant) != constant[0, 0]
    trainer = run(
        model_folder,
        tmp_path,
        reward_funcs=[lambda prompts, **_: [1e6 + 0.1] * len(prompts)] * functions,
        settings=DynamicSampling(query_filter={"type": "no_filter"}),
        args={
            "per_device_train_batch_size": 7,
            "num_generations": 7,
            "scale_rewards": scale,
            "multi_objective_aggregation": "normalize_then_sum" if functions == 2 else "sum_then_normalize",
        },
    )
    assert (trainer.seen.outputs[0]["advantages"] == 0).all()
    assert steps(trainer)[0]["batch/zero_advantage_share"] == 1
