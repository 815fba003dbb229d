"""One filter object, ten groups, every door: the same verdicts everywhere."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from sluice.filters import build_query_filter
from sluice.integrations.judging import Member, group_of
from sluice.integrations.slime import DynamicFilter
from sluice.integrations.trl import DynamicSampling
from sluice.integrations.verl import GroupFilter
from sluice.types import Verdict
from tests.fakes import make_group
from tests.integrations.frameworks import Args, DataProto, Sample, rows_of
from tests.integrations.tiny import LETTERS, make, rewards_by_prompt, steps

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

GROUPS = [
    [1.0, 1.0, 1.0, 1.0],
    [0.0, 0.0, 0.0, 1.0],
    [0.125, 0.125, 0.125, 0.125],  # fractions that are equal, whose spread is no 0 in every type
    [1.0, 1.0, 1.0, 0.875],
    [-1.0, 1.0, -1.0, 1.0],
    [0.0, 0.0, 0.0, 0.0],
    [2.0, 0.0, 1.0, 1.0],
    [8.0, 8.0, 8.0, 7.75],
    [0.5, 0.5, 0.5, 0.625],
    [0.0, 1.0, 0.0, 1.0],  # the last one is kept, so that a batch of all kept groups needs all ten
]
FILTER = build_query_filter(
    {"type": "all", "filter_args": {"filters": [{"type": "std_filter"}, {"type": "mean_filter", "filter_args": {"threshold_up": 4.0}}]}}
)
KEPT, SAME, EASY = (True, "kept"), (False, "no_spread"), (False, "too_easy")
EXPECTED = [SAME, KEPT, SAME, KEPT, KEPT, SAME, KEPT, EASY, KEPT, KEPT]


def told(verdict: Verdict) -> tuple[bool, str]:
    return verdict.keep, verdict.reason


def test_our_own_groups_and_plain_rewards() -> None:
    assert [told(FILTER.judge(make_group(rewards))) for rewards in GROUPS] == EXPECTED
    assert [told(FILTER.judge(rewards)) for rewards in GROUPS] == EXPECTED
    assert [told(FILTER.judge(group_of([Member(reward=reward) for reward in rewards]))) for rewards in GROUPS] == EXPECTED


def test_verl() -> None:
    uids, rewards = rows_of(GROUPS, interleaved=True)
    data = DataProto({"token_level_scores": np.array(rewards, dtype=np.float32)[:, None]}, {"uid": np.array(uids, dtype=object)})
    verdicts = GroupFilter(query_filter=FILTER).judge(data).verdicts
    assert [told(verdicts[f"prompt{index}"]) for index in range(10)] == EXPECTED


def test_slime() -> None:
    keep = DynamicFilter(FILTER)
    for rewards, (is_kept, reason) in zip(GROUPS, EXPECTED, strict=True):
        answer = keep(Args(), [Sample(reward) for reward in rewards])
        assert (answer.keep, answer.reason) == (is_kept, None if is_kept else f"low_information/{reason}")


def test_roll(monkeypatch: pytest.MonkeyPatch) -> None:
    from sluice.roll import DataProto as RollProto
    from sluice.roll import query_filter
    from sluice.roll.filters import judge_rows

    module = ModuleType("filters_of_this_test")
    module.keep = FILTER.judge  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "filters_of_this_test", module)
    config = {"rewards": {"math": {"query_filter_config": {"type": "filters_of_this_test.keep"}}}}
    for rewards, expected in zip(GROUPS, EXPECTED, strict=True):
        responses = [
            RollProto.from_dict(
                tensors={"response_level_rewards": torch.tensor([reward])}, non_tensors={"domain": np.array(["math"], dtype=object)}
            )
            for reward in rewards
        ]
        assert query_filter(responses, config) is expected[0]
        assert told(judge_rows(responses, config)) == expected


def test_trl(model_folder: Path, tmp_path: Path) -> None:
    kept = [LETTERS[index] for index, (is_kept, _) in enumerate(EXPECTED) if is_kept]
    trainer: Any = make(
        model_folder,
        tmp_path,
        dataset=Dataset.from_dict({"prompt": [letter * 2 for letter in LETTERS]}),
        reward_funcs=rewards_by_prompt(dict(zip(LETTERS, GROUPS, strict=True))),
        settings=DynamicSampling(query_filter=FILTER),
        args={"max_steps": 1, "per_device_train_batch_size": 4 * len(kept), "shuffle_dataset": False},
    )
    trainer.train()
    assert [prompt[0] for prompt in trainer.seen.prompts[0][::4]] == kept
    logged = steps(trainer)[0]
    reasons = Counter(reason for is_kept, reason in EXPECTED if not is_kept)
    assert {name: logged[f"batch/rejected/low_information/{name}"] for name in reasons} == reasons
