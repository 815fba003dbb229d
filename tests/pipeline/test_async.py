"""Tiny runs in which groups are sampled while the trainer steps, and what a scheduler can do beside it, each as a whole."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.config import load_config
from sluice.execution.loops import LoopContext
from sluice.pipeline.feed import Feed
from sluice.pipeline.train import train
from sluice.records import open_for_reading, read_summary
from sluice.types import Batch, Rollout
from tests.pipeline.test_rlvr import Recorder, write_recipe

STEPS, GROUPS, MEMBERS = 5, 3, 4
SETTINGS: dict[str, Any] = {
    "rollout_batch_size": GROUPS,
    "num_return_sequences_in_group": MEMBERS,
    "response_length": 24,
    "engine__max_slots": 8,
    "reward_pool": {"workers": 0},
    "rewards": {
        "letters": {
            "verifier": {"type": "tests.pipeline.verifiers.begins_with_a"},
            "query_filter_config": {"type": "std_filter"},
        }
    },
    "tasks__validation": [],
    "trainer": {"max_steps": STEPS, "learning_rate": 2e-3, "lr_scheduler_type": "constant", "torch_threads": 1},
    "resampling": {"truncated": "keep", "max_resample_rounds": 50},
}
PATIENCE_S = 20.0  # for what is under way already


class Watch:
    """What passed between trainer and shell."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.tokens_in_step: list[int] = []  # sampled between a batch's delivery and the publish of what it made, by step
        self.tokens_at_delivery = 0


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Notes batches and tokens, and holds each publish up until some response is under way, where there are any."""
    seen = Watch()
    next_batch, publish = Feed.next_batch, Feed.publish

    def watched_next_batch(feed: Feed) -> Batch | None:
        batch = next_batch(feed)
        if batch is not None:
            seen.batches.append(batch)
            seen.tokens_at_delivery = feed._shell.engine.sampled_tokens("train")
        return batch

    def watched_publish(feed: Feed, state: Mapping[str, Any], version: int) -> None:
        shell = feed._shell
        if version:
            deadline = time.monotonic() + PATIENCE_S
            while time.monotonic() < deadline:
                sampled = shell.in_flight().values()
                if not sampled or any(0 < tokens < shell.response_length // 2 for tokens in sampled):
                    break
                time.sleep(0.001)
            seen.tokens_in_step.append(shell.engine.sampled_tokens("train") - seen.tokens_at_delivery)
        publish(feed, state, version)

    monkeypatch.setattr(Feed, "next_batch", watched_next_batch)
    monkeypatch.setattr(Feed, "publish", watched_publish)
    return seen


Ask = Callable[[str], list[tuple[Any, ...]]]


def play(folder: Path, model: Path, **changes: Any) -> tuple[Recorder, Ask]:
    """A whole run, and what is true of every one."""
    file = write_recipe(folder, model, **deepcopy(SETTINGS | changes))
    display = Recorder()
    result = train(load_config(file), config_path=file, display=display)
    summary = read_summary(result.folder / "run.db")
    assert (result.steps, summary.status, summary.errors) == (STEPS, "finished", 0)
    assert summary.tokens == summary.engine_tokens > 0
    assert summary.requested == summary.kept == STEPS * GROUPS

    def ask(sql: str) -> list[tuple[Any, ...]]:
        with open_for_reading(result.folder / "run.db") as db:
            return db.execute(sql).fetchall()

    ((attempts,),) = ask("SELECT sum(attempts) FROM groups")
    assert attempts == sum(total.attempts for total in summary.ledger)
    for metrics in display.steps:
        assert metrics.get("actor/logprob_gap_max", 0.0) <= 1e-4
        assert sum(value for name, value in metrics.items() if name.startswith("ledger/token_share/")) == pytest.approx(1.0)
    return display, ask


def rollouts(batches: Sequence[Batch]) -> list[Rollout]:
    return [rollout for batch in batches for group in batch.groups for rollout in group.rollouts]


# ---------------------------------------------------------------- while the trainer steps


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0, 2.0])
def test_groups_are_sampled_while_the_trainer_steps_and_none_is_too_old(tmp_path: Path, model: Path, watch: Watch, ratio: float) -> None:
    display, ask = play(tmp_path, model, async_generation_ratio=ratio)
    assert len(watch.tokens_in_step) == len(watch.batches) == STEPS
    assert (sum(watch.tokens_in_step) > 0) == (ratio > 0)
    for step, (batch, metrics) in enumerate(zip(watch.batches, display.steps, strict=True)):
        ages = [step - group.start_step for group in batch.groups]
        assert batch.step == step
        assert min(ages) >= 0
        assert max(ages) <= math.ceil(ratio)
        assert all(step - rollout.policy_version <= math.ceil(ratio) for rollout in rollouts([batch]))
        if ratio == 0.5:  # at most half of a batch of three is of the step before
            assert ages.count(1) <= 1
        versions = [step - min(rollout.policy_version for rollout in group.rollouts) for group in batch.groups]
        assert metrics["scheduler/off_policy_ratio"] == pytest.approx(np.mean(versions))
        share = metrics["actor/on_policy_token_share"]
        assert (share == 1.0) == all(version == 0 for version in versions)
    assert all(rollout.turns[0].token_versions is None for rollout in rollouts(watch.batches)), "finish: each by the weights that began it"
    oldest = max(metrics["scheduler/off_policy_max"] for metrics in display.steps)
    assert (oldest > 0) == (ratio > 0)
    outcomes = {outcome for (outcome,) in ask("SELECT outcome FROM groups")}
    assert outcomes <= {"trained", "dropped"} | ({"expired", "cancelled", "discarded"} if ratio else set())


def test_with_restart_no_response_is_of_two_weights_and_what_was_begun_is_counted_as_cancelled(
    tmp_path: Path, model: Path, watch: Watch
) -> None:
    display, _ = play(tmp_path, model, async_generation_ratio=1.0, on_weight_update="restart")
    assert all(rollout.turns[0].token_versions is None for rollout in rollouts(watch.batches))
    assert display.steps[-1]["ledger/attempts/cancelled"] > 0
    assert display.steps[-1]["ledger/tokens/cancelled"] > 0


@pytest.mark.parametrize("stale_tokens", ["train", "mask"])
def test_with_continue_a_response_goes_on_and_each_token_says_whose_it_is(
    tmp_path: Path, model: Path, watch: Watch, stale_tokens: str
) -> None:
    changes = {"async_generation_ratio": 1.0, "on_weight_update": "continue", "trainer__stale_tokens": stale_tokens}
    display, _ = play(tmp_path, model, **changes)
    turns = [rollout.turns[0] for rollout in rollouts(watch.batches)]
    cut = [turn for turn in turns if turn.token_versions is not None]
    assert cut, "no update came in the middle of a response that was trained"
    for turn in cut:
        assert turn.token_versions is not None
        assert turn.token_versions[0] == turn.policy_version
        assert all(before <= after for before, after in pairwise(turn.token_versions.tolist()))
    for batch, metrics in zip(watch.batches, display.steps, strict=True):
        sampled = sum(rollout.sampled_tokens for rollout in rollouts([batch]))
        versions = [turn.token_versions for turn in (rollout.turns[0] for rollout in rollouts([batch])) if turn.token_versions is not None]
        stale = sum(int((of_token < of_token.max()).sum()) for of_token in versions)
        assert metrics["batch/loss_tokens"] == sampled - (stale if stale_tokens == "mask" else 0)


# ---------------------------------------------------------------- what else a scheduler does


class Twice:
    """A rollout loop that asks each member again when its first response earned nothing, and takes the second one."""

    def __init__(self, config: Any) -> None:
        self.group_size = config.num_return_sequences_in_group

    async def run(self, context: LoopContext) -> Sequence[Rollout] | None:
        assert context.group_size == self.group_size
        members = await context.members()
        if members is None:
            return None
        return [
            member if member.reward else (await context.member(member.member_index)) or member  # of the old one nothing is left
            for member in members
        ]


def test_a_rollout_loop_of_ones_own_makes_every_group(tmp_path: Path, model: Path) -> None:
    _, ask = play(tmp_path, model, async_generation_ratio=1.0, user_defined_rollout_loop_cls="tests.pipeline.test_async.Twice")
    trained = ask("SELECT rewards, attempts FROM groups WHERE outcome = 'trained'")
    assert len(trained) == STEPS * GROUPS
    assert all(MEMBERS <= attempts <= 2 * MEMBERS for _, attempts in trained)
    assert any(attempts > MEMBERS for _, attempts in trained)
    assert all(len(set(json.loads(rewards))) == 2 for rewards, _ in trained)


def test_a_guard_keeps_groups_that_the_filter_would_drop_once_too_many_have_been(tmp_path: Path, model: Path) -> None:
    display, ask = play(tmp_path, model, async_generation_ratio=1.0, guard={"max_filter_ratio": 0.2})
    ((kept_by_guard,),) = ask("SELECT count(*) FROM groups WHERE source = 'ratio_guard' AND outcome IN ('trained', 'expired', 'discarded')")
    ((dropped,), (judged,)) = (ask(f"SELECT count(*) FROM groups WHERE outcome IN ({of})") for of in ("'dropped'", "'dropped', 'trained'"))
    assert kept_by_guard > 0
    assert dropped[0] <= 0.2 * judged[0] + 1
    assert display.steps[-1]["guard/filter_ratio"] <= 0.2


def test_with_redundancy_the_first_members_to_finish_make_the_group(tmp_path: Path, model: Path, watch: Watch) -> None:
    display, ask = play(tmp_path, model, async_generation_ratio=1.0, group_size_redundancy=2)
    assert all(len(group.rollouts) == MEMBERS for batch in watch.batches for group in batch.groups)
    for (rewards,) in ask("SELECT rewards FROM groups WHERE outcome = 'trained'"):
        assert len(json.loads(rewards)) == MEMBERS + 2
        assert sum(reward is not None for reward in json.loads(rewards)) == MEMBERS
    assert display.steps[-1]["ledger/attempts/cancelled"] > 0


def test_a_verifier_that_hangs_costs_its_group_when_its_time_is_up_and_the_batch_is_filled(tmp_path: Path, model: Path) -> None:
    changes: dict[str, Any] = {
        "rewards__letters__verifier": {"type": "tests.pipeline.verifiers.hangs_on_the_first_prompt"},
        "rewards__letters__reward_timeout_s": 600.0,
        "reward_pool": {"workers": MEMBERS + 1},
        "tasks__shuffle": False,
        "tasks__validation": [{"type": "jsonl", "path": "held_out.jsonl", "domain": "letters"}],  # the workers are there when it begins
        "validation": {"max_items": 2},
        "resampling__collect": "in_order",  # the batch waits for this group
        "resampling__group_timeout_s": 3.0,
        "resampling__quarantine_after": 1,
    }
    display, ask = play(tmp_path, model, **changes)
    assert ask("SELECT outcome, reason, category FROM groups WHERE task_id = 'train/0'") == [("dropped", "group_timeout", "invalid")]
    assert display.steps[-1]["scheduler/quarantined_prompts"] >= 1
    assert [text for level, text in display.messages if level == "warning" and "task 'train/0'" in text and "quarantine" in text]
