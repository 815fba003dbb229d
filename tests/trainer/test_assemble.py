from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config.models import AdvantageConfig
from sluice.errors import TrainerError
from sluice.trainer import advantages_for, batch_metrics, collate, samples_from_batch
from sluice.types import Batch, Failure, Group, Rollout, Sample, Task, Turn

PAD = 99


def turn(
    prompt: list[int], tokens: list[int], logprobs: list[float] | None = None, version: int = 0, versions: list[int] | None = None
) -> Turn:
    return Turn(
        prompt_ids=np.array(prompt, dtype=np.int64),
        token_ids=np.array(tokens, dtype=np.int64),
        inference_logprobs=np.array([-0.5 - i for i in range(len(tokens))] if logprobs is None else logprobs, dtype=np.float32),
        text="",
        finish_reason="stop",
        policy_version=version,
        token_versions=None if versions is None else np.array(versions, dtype=np.int64),
    )


def group(group_id: int, members: list[tuple[Turn, ...]], rewards: list[float | None], counted: list[bool] | None = None) -> Group:
    rollouts = tuple(
        Rollout(
            attempt_id=100 * group_id + index,
            group_id=group_id,
            member_index=index,
            task_id=f"t{group_id}",
            turns=turns,
            finish_reason="stop",
            reward=reward,
            failure=Failure(cause="infrastructure", reason="engine_error") if reward is None else None,
        )
        for index, (turns, reward) in enumerate(zip(members, rewards, strict=True))
    )
    return Group(
        group_id=group_id,
        task=Task(task_id=f"t{group_id}", domain="d", prompt="", prompt_ids=np.array([7, 8], dtype=np.int64)),
        rollouts=rollouts,
        start_step=0,
        round=1,
        epoch=0,
        counted=tuple(counted) if counted is not None else tuple(reward is not None for reward in rewards),
    )


def batch(*groups: Group) -> Batch:
    return Batch(groups=groups, requested=len(groups), step=0)


def one_turn(group_id: int, rewards: list[float | None], counted: list[bool] | None = None) -> Group:
    return group(group_id, [(turn([7, 8], [3, 4, 5][: 1 + i % 3]),) for i in range(len(rewards))], rewards, counted)


tokens = st.lists(st.integers(0, 50), max_size=6)


@st.composite
def turns_of(draw: st.DrawFn, prompts: st.SearchStrategy[list[int]]) -> Turn:
    """A turn of one version, or one that updates cut through."""
    sampled, oldest = draw(tokens), draw(st.integers(0, 3))
    if draw(st.booleans()):
        return turn(draw(prompts), sampled, version=oldest)
    later = sorted(draw(st.lists(st.integers(oldest, 5), min_size=len(sampled), max_size=len(sampled))))
    versions = [oldest, *later[1:]] if later else []
    return turn(draw(prompts), sampled, version=oldest, versions=versions)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    groups = []
    for group_id in range(draw(st.integers(1, 4))):
        members, rewards, counted = [], [], []
        for _ in range(draw(st.integers(1, 4))):
            turns = [draw(turns_of(tokens.filter(bool)))] if draw(st.booleans()) else []
            if turns:
                turns += [draw(turns_of(tokens)) for _ in range(draw(st.integers(0, 3)))]
            reward = draw(st.none() | st.floats(-5, 5))
            members.append(tuple(turns))
            rewards.append(reward)
            counted.append(reward is not None and draw(st.booleans()))
        groups.append(group(group_id, members, rewards, counted))
    return batch(*groups)


stale_tokens = st.sampled_from(["train", "mask"])


@given(batches(), stale_tokens)
def test_case_64_ids_mask_log_probs_and_versions_of_a_row_always_have_one_length(given_batch: Batch, stale: Any) -> None:
    samples = samples_from_batch(given_batch, stale_tokens=stale)
    assert len(samples) == sum(len(g.rollouts) for g in given_batch.groups)
    for sample in samples:
        assert len(sample.completion_ids) == len(sample.loss_mask) == len(sample.inference_logprobs)
        assert sample.token_versions is None or len(sample.token_versions) == len(sample.completion_ids)


@given(batches())
def test_every_sampled_token_keeps_the_version_that_sampled_it(given_batch: Batch) -> None:
    for rollout, sample in zip([r for g in given_batch.groups for r in g.rollouts], samples_from_batch(given_batch), strict=True):
        expected: list[int] = []
        for index, t in enumerate(rollout.turns):
            expected += [-1] * len(t.prompt_ids) if index else []
            expected += [t.policy_version] * len(t.token_ids) if t.token_versions is None else t.token_versions.tolist()
        assert sample.policy_version == rollout.policy_version
        if sample.token_versions is None:
            assert set(expected) <= {-1, rollout.policy_version}, "None says that one version sampled all"
        else:
            assert sample.token_versions.tolist() == expected
            assert set(expected) - {-1} != {rollout.policy_version}


@given(batches())
def test_stale_tokens_that_are_masked_are_those_older_than_the_newest_of_their_sample(given_batch: Batch) -> None:
    for whole, masked in zip(samples_from_batch(given_batch), samples_from_batch(given_batch, stale_tokens="mask"), strict=True):
        if whole.token_versions is None:
            assert (masked.loss_mask == whole.loss_mask).all()
        else:
            assert list(masked.loss_mask) == list(whole.loss_mask & (whole.token_versions == max(whole.token_versions)))
        assert masked.loss_mask.any() == whole.loss_mask.any()
        assert (masked.reward, masked.is_counted) == (whole.reward, whole.is_counted)


@pytest.mark.parametrize(("new", "mask"), [(3, [0, 0, 0, 0, 0, 1, 1, 1]), (0, [1, 1, 1, 1, 1])])
def test_case_64_the_mask_grows_with_the_tokens(new: int, mask: list[int]) -> None:
    resumed = turn([7], [3] * 5 + [4] * new, version=2, versions=[2] * 5 + [3] * new)
    (sample,) = samples_from_batch(batch(group(0, [(resumed,)], [1.0])), stale_tokens="mask")
    assert sample.loss_mask.tolist() == mask
    assert len(sample.inference_logprobs) == len(sample.completion_ids) == 5 + new


@pytest.mark.parametrize(("new", "mask"), [(3, [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]), (0, [1, 1, 1, 1, 1, 0, 0])])
def test_case_64_the_mask_of_a_trajectory_grows_with_every_turn(new: int, mask: list[int]) -> None:
    """Case 64: five old tokens are masked, a reply of two stands between, three new ones train; a turn of no tokens adds none."""
    turns = (turn([7], [3] * 5, version=2), turn([9, 9], [4] * new, version=3))
    (sample,) = samples_from_batch(batch(group(0, [turns], [1.0])), stale_tokens="mask")
    assert sample.loss_mask.tolist() == mask
    assert len(sample.inference_logprobs) == len(sample.completion_ids) == 7 + new
    whole = samples_from_batch(batch(group(0, [turns], [1.0])))[0]
    assert whole.loss_mask.tolist() == [1] * 5 + [0, 0] + [1] * new


def loss_weights(given_batch: Batch, stale: Any = "train") -> list[list[float]]:
    """What the loss of every token is multiplied with: the advantage of its row where the loss looks."""
    samples = samples_from_batch(given_batch, stale_tokens=stale)
    rows = collate(samples, advantages_for(samples, AdvantageConfig(scale="none")), pad_id=PAD)
    return (rows["advantages"][:, None] * rows["tool_mask"]).tolist()


def test_case_59_the_advantage_of_a_trajectory_meets_the_mask_of_each_of_its_turns() -> None:
    """Case 59: advantage 0.5 over turns of two tokens, an environment's token before the second: [.5, .5, 0, .5, .5]."""
    long = (turn([7], [2, 3]), turn([9], [4, 5]))
    short = (turn([7], [2]),)
    assert loss_weights(batch(group(0, [long, short], [1.0, 0.0]))) == [[0.5, 0.5, 0, 0.5, 0.5], [-0.5, 0, 0, 0, 0]]


def test_case_59_a_last_turn_without_tokens_takes_nothing_from_the_turns_before_it() -> None:
    """Case 59: what the last turn's mask is must not decide about earlier turns, nor the other way round."""
    ends_empty = (turn([7], [2, 3]), turn([9], []))
    begins_empty = (turn([7], []), turn([9], [4, 5]))
    assert loss_weights(batch(group(0, [ends_empty, begins_empty], [1.0, 0.0]))) == [[0.5, 0.5, 0], [0, -0.5, -0.5]]
    older_first = (turn([7], [2, 3], version=0), turn([9], [4], version=1))
    older_last = (turn([7], [2], version=1), turn([9], [4], version=1))
    assert loss_weights(batch(group(0, [older_first, older_last], [1.0, 0.0])), "mask") == [[0, 0, 0, 0.5], [-0.5, 0, -0.5, 0]]


@given(batches(), stale_tokens)
def test_case_59_every_token_that_trains_has_the_whole_advantage_of_its_trajectory(given_batch: Batch, stale: Any) -> None:
    samples = samples_from_batch(given_batch, stale_tokens=stale)
    advantages = np.float32(advantages_for(samples, AdvantageConfig(scale="none")))
    for sample, advantage, weights in zip(samples, advantages, loss_weights(given_batch, stale), strict=True):
        expected = np.where(sample.loss_mask, advantage, np.float32(0))
        assert weights[: len(expected)] == expected.tolist()
        assert not any(weights[len(expected) :])


def test_turns_of_different_versions_carry_the_versions_of_their_tokens() -> None:
    turns = (turn([7], [3, 4], version=5), turn([9], [5, 6], version=6, versions=[6, 7]), turn([9], [2], version=7))
    (sample,) = samples_from_batch(batch(group(0, [turns], [1.0])))
    assert sample.token_versions is not None
    assert sample.token_versions.tolist() == [5, 5, -1, 6, 7, -1, 7]
    assert sample.policy_version == 5
    (masked,) = samples_from_batch(batch(group(0, [turns], [1.0])), stale_tokens="mask")
    assert masked.loss_mask.tolist() == [0, 0, 0, 0, 1, 0, 1]


def test_versions_that_are_not_one_per_token_are_refused() -> None:
    with pytest.raises(TrainerError, match=r"group 3, member 0 .*, turn 0: expected one version per sampled token, got 2 for 3"):
        samples_from_batch(batch(group(3, [(turn([7], [2, 3, 4], versions=[0, 1]),)], [1.0])))


@given(batches())
def test_a_row_holds_exactly_the_tokens_that_were_sampled_and_trains_on_them_if_it_counts(given_batch: Batch) -> None:
    rollouts = [(g, r) for g in given_batch.groups for r in g.rollouts]
    for (owner, rollout), sample in zip(rollouts, samples_from_batch(given_batch), strict=True):
        whole = [int(i) for t in rollout.turns for part in (t.prompt_ids, t.token_ids) for i in part]
        if rollout.turns:
            assert [*sample.prompt_ids, *sample.completion_ids] == whole
        counted = owner.counted[rollout.member_index]
        assert int(sample.loss_mask.sum()) == (rollout.sampled_tokens if counted else 0)
        if counted:
            assert list(sample.completion_ids[sample.loss_mask]) == [int(i) for t in rollout.turns for i in t.token_ids]
            assert list(sample.inference_logprobs[sample.loss_mask]) == [float(x) for t in rollout.turns for x in t.inference_logprobs]
            assert not sample.inference_logprobs[~sample.loss_mask].any()


@given(batches(), st.integers(1, 9))
def test_padding_takes_nothing_away_and_adds_nothing_that_counts(given_batch: Batch, rows_multiple: int) -> None:
    samples = samples_from_batch(given_batch)
    advantages = advantages_for(samples, AdvantageConfig())
    arrays = collate(samples, advantages, pad_id=PAD, rows_multiple=rows_multiple)
    rows = len(arrays["advantages"])
    assert rows % rows_multiple == 0
    assert len(samples) <= rows < len(samples) + rows_multiple
    assert all(len(array) == rows for array in arrays.values())
    for row, sample in enumerate(samples):
        assert list(arrays["prompt_ids"][row][arrays["prompt_mask"][row] == 1]) == list(sample.prompt_ids)
        assert list(arrays["completion_ids"][row][arrays["completion_mask"][row] == 1]) == list(sample.completion_ids)
        assert arrays["tool_mask"][row].sum() == sample.loss_mask.sum()
        versions = arrays["token_versions"][row][arrays["tool_mask"][row] == 1]
        assert (versions == (sample.policy_version if sample.token_versions is None else sample.token_versions[sample.loss_mask])).all()
        assert arrays["prompt_mask"][row, -1] == 1, "the last prompt token stands next to the completion"
    assert arrays["tool_mask"].sum() == sum(s.loss_mask.sum() for s in samples)
    assert not arrays["tool_mask"][len(samples) :].any()
    assert not arrays["advantages"][len(samples) :].any()
    assert (arrays["prompt_mask"][len(samples) :].sum(1) == 1).all(), "attention of a neutral row must see something"
    assert not (arrays["tool_mask"] & ~arrays["completion_mask"]).any()


@given(batches(), st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_no_advantage(given_batch: Batch, random: Any) -> None:
    samples = samples_from_batch(given_batch)
    order = list(range(len(samples)))
    random.shuffle(order)
    shuffled = advantages_for([samples[i] for i in order], AdvantageConfig())
    np.testing.assert_allclose(shuffled, advantages_for(samples, AdvantageConfig())[order], atol=1e-12)


def test_later_prompts_are_completion_that_does_not_train() -> None:
    turns = (turn([7, 8], [3, 4], [-0.1, -0.2], version=5), turn([9, 9, 9], [5], [-0.3], version=4))
    (sample,) = samples_from_batch(batch(group(0, [turns], [1.0])))
    assert list(sample.prompt_ids) == [7, 8]
    assert list(sample.completion_ids) == [3, 4, 9, 9, 9, 5]
    assert list(sample.loss_mask) == [True, True, False, False, False, True]
    np.testing.assert_allclose(sample.inference_logprobs, [-0.1, -0.2, 0, 0, 0, -0.3], atol=1e-7)
    assert sample.policy_version == 4


def test_case_111_an_appended_end_token_does_not_train() -> None:
    turns = (turn([7], [2, 3, 4, 5]), turn([1], []))
    (sample,) = samples_from_batch(batch(group(0, [turns], [1.0])))
    assert list(sample.completion_ids) == [2, 3, 4, 5, 1]
    assert list(sample.loss_mask) == [True, True, True, True, False]


def test_case_111_log_probs_of_trimmed_tokens_are_refused() -> None:
    with pytest.raises(TrainerError, match=r"group 3, member 0 \(attempt 300, task 't3'\), turn 0: .* got 4 for 3"):
        samples_from_batch(batch(group(3, [(turn([7], [2, 3, 4], [-1.0] * 4),)], [1.0])))


def test_an_engine_without_log_probs_is_told_so() -> None:
    silent = dataclasses.replace(turn([7], [2, 3, 4]), inference_logprobs=None)  # type: ignore[arg-type]
    with pytest.raises(TrainerError, match="expected one inference log-prob per sampled token, got none for 3"):
        samples_from_batch(batch(group(0, [(silent,)], [1.0])))


def test_case_119_rows_of_unequal_length_are_refused() -> None:
    with pytest.raises(TrainerError, match="got 3 for 4"):
        samples_from_batch(batch(group(0, [(turn([7], [2, 3, 4, 5], [math.log(p) for p in (0.1, 0.5, 0.8)]),)], [1.0])))


def test_a_missing_prompt_is_refused() -> None:
    with pytest.raises(TrainerError, match="at least one token"):
        samples_from_batch(batch(group(0, [(turn([], [2]),)], [1.0])))


def test_a_member_without_reward_must_not_count() -> None:
    with pytest.raises(TrainerError, match="expected a reward, since it counts"):
        samples_from_batch(batch(one_turn(0, [None, 1.0], counted=[True, True])))


def test_a_member_that_sampled_nothing_is_outside_every_statistic_whatever_it_earned() -> None:
    """NVIDIA-NeMo/RL#4160: seen: a row without a trained token set the baseline of its siblings."""
    some, nothing = (turn([7], [2, 3]),), (turn([7], []),)
    assert loss_weights(batch(group(0, [some, some, some, nothing], [1.0, 0.0, 0.5, 100.0]))) == [[0.5, 0.5], [-0.5, -0.5], [0, 0], [0, 0]]
    for members in ([some, some, nothing], [some, nothing, nothing], [nothing] * 3):
        whole = batch(group(0, members, [1.0, 1.0, 0.0]))
        samples = samples_from_batch(whole)
        advantages = advantages_for(samples, AdvantageConfig())
        assert not advantages.any()
        metrics = batch_metrics(whole, samples, advantages)
        assert metrics["batch/counted_rollouts"] == members.count(some)
        assert metrics["batch/useful_groups"] == 0


def test_case_25_a_placeholder_is_outside_every_statistic_and_count() -> None:
    members: list[tuple[Turn, ...]] = [(turn([7, 8], [3, 4]),), (turn([7, 8], [3]),), (turn([7, 8], [5, 6]),), ()]
    given = batch(group(0, members, [1.0, 0.0, 1.0, None]))
    samples = samples_from_batch(given)
    advantages = advantages_for(samples, AdvantageConfig(scale="none"))
    np.testing.assert_allclose(advantages, [1 / 3, -2 / 3, 1 / 3, 0], atol=1e-12)
    metrics = batch_metrics(given, samples, advantages)
    assert metrics["batch/counted_reward_mean"] == pytest.approx(2 / 3)
    assert metrics["batch/loss_tokens"] == metrics["batch/useful_tokens"] == 5
    assert metrics["batch/counted_rollouts"] == 3
    assert metrics["batch/completion_length_mean"] == pytest.approx(5 / 3)
    assert metrics["batch/zero_advantage_share"] == 0.25
    assert not collate(samples, advantages, pad_id=PAD)["tool_mask"][3].any()


def test_case_45_a_truncated_member_has_advantage_zero_and_trains_nothing() -> None:
    samples = samples_from_batch(batch(one_turn(0, [1.0, 0.0, 1.0, 0.0], counted=[True, True, True, False])))
    assert advantages_for(samples, AdvantageConfig(scale="none")) == pytest.approx([1 / 3, -2 / 3, 1 / 3, 0])
    assert not samples[3].loss_mask.any()


def test_case_47_advantages_are_relative_to_the_own_group_and_a_singleton_gets_zero() -> None:
    samples = samples_from_batch(batch(one_turn(0, [1.0, 3.0]), one_turn(1, [5.0])))
    assert advantages_for(samples, AdvantageConfig(scale="none")) == pytest.approx([-1, 1, 0])


def test_each_advantage_type_is_the_one_that_was_asked_for() -> None:
    samples = samples_from_batch(batch(one_turn(0, [1.0, 0.0, 0.0, 0.0])))
    assert advantages_for(samples, AdvantageConfig(type="leave_one_out")) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert advantages_for(samples, AdvantageConfig(eps=0.0)) == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert advantages_for(samples, AdvantageConfig(eps=0.5)) == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_an_infinite_reward_is_refused() -> None:
    with pytest.raises(TrainerError, match="finite"):
        advantages_for(samples_from_batch(batch(one_turn(0, [math.inf, 1.0]))), AdvantageConfig())


def test_the_reward_of_a_member_that_does_not_count_is_never_read() -> None:
    samples = samples_from_batch(batch(one_turn(0, [math.inf, 1.0, 0.0], counted=[False, True, True])))
    assert advantages_for(samples, AdvantageConfig(scale="none")) == pytest.approx([0, 0.5, -0.5])


def padded(samples: list[Sample], rows_multiple: int) -> dict[str, Any]:
    return collate(samples, np.ones(len(samples)), pad_id=PAD, rows_multiple=rows_multiple)


def test_case_128_sixty_rows_for_eight_workers_are_padded_to_sixty_four() -> None:
    samples = samples_from_batch(batch(*[one_turn(g, [1.0, 0.0, 1.0, 0.0]) for g in range(15)]))
    arrays = padded(samples, 8)
    assert len(arrays["advantages"]) == 64
    assert (arrays["tool_mask"].sum(1) > 0).sum() == 60
    assert np.count_nonzero(arrays["advantages"]) == 60


def test_case_130_padding_leaves_every_group_whole() -> None:
    samples = samples_from_batch(batch(*[one_turn(g, [1.0, 0.0, 1.0, 0.0]) for g in range(3)]))
    arrays = padded(samples, 8)
    assert len(arrays["advantages"]) == 16
    assert [s.group_id for s in samples] == [0] * 4 + [1] * 4 + [2] * 4
    assert list(arrays["tool_mask"].sum(1)[:12]) == [int(s.loss_mask.sum()) for s in samples]


def test_prompts_are_padded_on_the_left_and_completions_on_the_right() -> None:
    samples = samples_from_batch(batch(group(0, [(turn([1, 2, 3], [4]),), (turn([5], [6, 7]),)], [1.0, 0.0])))
    arrays = collate(samples, advantages_for(samples, AdvantageConfig(scale="none")), pad_id=PAD, rows_multiple=3)
    assert arrays["prompt_ids"].tolist() == [[1, 2, 3], [PAD, PAD, 5], [PAD, PAD, PAD]]
    assert arrays["prompt_mask"].tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 1]]
    assert arrays["completion_ids"].tolist() == [[4, PAD], [6, 7], [PAD, PAD]]
    assert arrays["completion_mask"].tolist() == [[1, 0], [1, 1], [1, 0]]
    assert arrays["tool_mask"].tolist() == [[1, 0], [1, 1], [0, 0]]
    assert arrays["advantages"].tolist() == [0.5, -0.5, 0.0]


def test_batch_metrics_by_hand() -> None:
    given = batch(one_turn(0, [1.0, 1.0]), one_turn(1, [1.0, 0.0, None]))
    samples = samples_from_batch(given)
    metrics = batch_metrics(given, samples, advantages_for(samples, AdvantageConfig()))
    assert metrics == {
        "batch/groups": 2,
        "batch/rollouts": 5,
        "batch/counted_rollouts": 4,
        "batch/zero_advantage_share": pytest.approx(3 / 5),
        "batch/loss_tokens": 1 + 2 + 1 + 2,
        "batch/useful_groups": 1,
        "batch/useful_tokens": 1 + 2,
        "batch/completion_length_mean": pytest.approx((1 + 2 + 1 + 2 + 3) / 5),
        "batch/reward_mean": 0.75,
        "batch/counted_reward_mean": 0.75,
    }


def test_the_completion_length_is_that_of_what_was_sampled_trained_on_or_not() -> None:
    turns = (turn([7], [3, 4]), turn([9, 9], [5], version=1))
    given = batch(group(0, [turns, (turn([7], [3, 4, 5, 6]),), ()], [1.0, 0.0, None], [True, False, False]))
    samples = samples_from_batch(given, stale_tokens="mask")
    metrics = batch_metrics(given, samples, advantages_for(samples, AdvantageConfig()))
    assert metrics["batch/completion_length_mean"] == (3 + 4) / 2
    assert metrics["batch/loss_tokens"] == 1
    nothing = batch(group(0, [()], [None]))
    assert "batch/completion_length_mean" not in batch_metrics(nothing, samples_from_batch(nothing), np.zeros(1))


def test_importing_the_room_does_not_import_torch() -> None:
    code = "import sys, sluice.trainer; assert not {'torch', 'transformers', 'trl'} & set(sys.modules), 'heavy'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_member_whose_environment_failed_before_it_read_anything_is_a_row_without_a_loss_token() -> None:
    of_episode = group(0, [(turn([7], [2, 3], [-1.0] * 2),), ()], [1.0, None])
    task = dataclasses.replace(of_episode.task, prompt_ids=np.zeros(0, dtype=np.int64))
    samples = samples_from_batch(batch(dataclasses.replace(of_episode, task=task)))
    assert [len(sample.prompt_ids) for sample in samples] == [1, 1]
    assert [len(sample.completion_ids) for sample in samples] == [2, 0]
    assert not samples[1].is_counted
