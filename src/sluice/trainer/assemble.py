"""From whole groups to rows of arrays: samples, advantages, padding. Pure numpy: nothing here trains.

What was sampled is what trains: token ids are never decoded and encoded again, and every row keeps ids, loss mask, log-probs and versions
at one length. A row without a single loss token (a placeholder, a masked truncation, padding) has no part in any statistic, count or loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from sluice.advantage import group_relative, leave_one_out
from sluice.config.models import AdvantageConfig
from sluice.errors import TrainerError
from sluice.types import Batch, Group, Logprobs, Mask, Rollout, Sample, TokenIds

NOT_SAMPLED: Final = -1  # version of a token that the policy did not sample

_PLACEHOLDER: Final[TokenIds] = np.zeros(1, dtype=np.int64)  # any token: no token of its row trains

Advantages = npt.NDArray[np.float64]

StaleTokens = Literal["train", "mask"]
"""What becomes of tokens that older weights sampled in a response that an update cut through: they train, or they leave the loss."""


def samples_from_batch(batch: Batch, *, stale_tokens: StaleTokens = "train") -> list[Sample]:
    """One sample per rollout, group by group and member by member.

    The first turn's prompt is the prompt; whatever was put before a later turn is completion that the policy did not sample (loss mask
    False, log-prob 0, version -1). A member that is not counted has a loss mask of False throughout; one that never sampled has an empty
    completion, and is not counted: a reward for nothing says nothing about its siblings.

    Args:
        batch: what to train on.
        stale_tokens: "mask" takes out of the loss what was sampled by weights older than the newest that took part in the same sample: the
            beginning of a response that an update cut through. It compares tokens within a sample only: one that older weights sampled
            from its first to its last token trains whole, under either setting.

    Raises:
        TrainerError: a turn's token ids, log-probs and versions differ in length, or a prompt is empty.
    """
    return [
        _sample(group, rollout, is_counted, stale_tokens)
        for group in batch.groups
        for rollout, is_counted in zip(group.rollouts, group.counted, strict=True)
    ]


def _sample(group: Group, rollout: Rollout, is_counted: bool, stale_tokens: StaleTokens) -> Sample:
    where = f"group {group.group_id}, member {rollout.member_index} (attempt {rollout.attempt_id}, task {rollout.task_id!r})"
    ids: list[npt.NDArray[Any]] = []
    sampled: list[npt.NDArray[Any]] = []
    logprobs: list[npt.NDArray[Any]] = []
    for index, turn in enumerate(rollout.turns):
        given: Logprobs | None = turn.inference_logprobs
        count = "none" if given is None else len(given)
        if count != len(turn.token_ids):
            raise TrainerError(
                f"{where}, turn {index}: expected one inference log-prob per sampled token, got {count} for "
                f"{len(turn.token_ids)} - let the engine trim or extend both together; tokens that it did not sample belong into the "
                "prompt_ids of the next turn"
            )
        if turn.token_versions is not None and len(turn.token_versions) != len(turn.token_ids):
            raise TrainerError(
                f"{where}, turn {index}: expected one version per sampled token, got {len(turn.token_versions)} for "
                f"{len(turn.token_ids)} - let the engine extend both together, or leave token_versions out where one version sampled all"
            )
        if index:
            ids.append(turn.prompt_ids)
            sampled.append(np.zeros(len(turn.prompt_ids), dtype=np.bool_))
            logprobs.append(np.zeros(len(turn.prompt_ids), dtype=np.float32))
        ids.append(turn.token_ids)
        sampled.append(np.ones(len(turn.token_ids), dtype=np.bool_))
        logprobs.append(turn.inference_logprobs)
    prompt_ids = rollout.turns[0].prompt_ids if rollout.turns else group.task.prompt_ids
    if not rollout.turns and not is_counted and not len(prompt_ids):  # its environment failed before it said anything
        prompt_ids = _PLACEHOLDER
    if not len(prompt_ids):
        raise TrainerError(f"{where}: expected a prompt of at least one token, got none - the first completion token would have no context")
    if is_counted and rollout.reward is None:
        raise TrainerError(f"{where}: expected a reward, since it counts, got none - a member without a reward must not be counted")
    mask = np.concatenate(sampled) if sampled else np.zeros(0, dtype=np.bool_)
    versions = _token_versions(rollout, mask)
    if versions is not None and stale_tokens == "mask":
        mask = mask & (versions == versions.max())
    is_counted = is_counted and bool(mask.any())
    return Sample(
        group_id=group.group_id,
        attempt_id=rollout.attempt_id,
        prompt_ids=np.asarray(prompt_ids, dtype=np.int64),
        completion_ids=np.concatenate(ids).astype(np.int64) if ids else np.zeros(0, dtype=np.int64),
        loss_mask=mask if is_counted else np.zeros_like(mask),
        inference_logprobs=np.concatenate(logprobs).astype(np.float32) if logprobs else np.zeros(0, dtype=np.float32),
        reward=rollout.reward,
        is_counted=is_counted,
        policy_version=rollout.policy_version,
        token_versions=versions,
    )


def _token_versions(rollout: Rollout, sampled: Mask) -> TokenIds | None:
    """Which version sampled each token of the completion, -1 where none did. None: `rollout.policy_version` sampled them all. [T]"""
    oldest = rollout.policy_version
    if all(turn.token_versions is None and turn.policy_version == oldest for turn in rollout.turns):
        return None
    versions = np.full(len(sampled), NOT_SAMPLED, dtype=np.int64)
    versions[sampled] = np.concatenate(
        [np.full(len(t.token_ids), t.policy_version) if t.token_versions is None else t.token_versions for t in rollout.turns]
    )
    return None if (versions[sampled] == oldest).all() else versions


def advantages_for(samples: Sequence[Sample], config: AdvantageConfig) -> Advantages:
    """One advantage per sample, relative to its own group. [B]

    Members that are not counted are outside the statistics and get 0; so does the only counted member of a group.

    Raises:
        TrainerError: a counted reward is not finite.
    """
    rewards = [sample.reward if sample.is_counted else None for sample in samples]
    group_ids = [sample.group_id for sample in samples]
    try:
        if config.type == "leave_one_out":
            return leave_one_out(rewards, group_ids)
        return group_relative(rewards, group_ids, scale=config.scale, eps=config.eps)
    except ValueError as error:
        raise TrainerError(f"expected finite rewards in a batch: {error} - a verifier's reward must be a finite number") from error


def batch_metrics(batch: Batch, samples: Sequence[Sample], advantages: Advantages) -> dict[str, float]:
    """What a batch is worth, as flat metrics.

    Loss and useful tokens are those that the policy sampled and trains on. Useful is what has an advantage other than 0 and a token to
    train on: rollouts, and groups with such a rollout. Reward means are over all rollouts that have a reward, and over the counted ones.
    The completion length is in tokens that the policy sampled, trained on or not, over the rollouts that sampled at all.
    """
    lengths = [rollout.sampled_tokens for group in batch.groups for rollout in group.rollouts if rollout.turns]
    scored = [s.reward for s in samples if s.reward is not None]
    counted = [s.reward for s in samples if s.is_counted and s.reward is not None]
    tokens = np.array([np.count_nonzero(s.loss_mask) for s in samples], dtype=np.int64)
    metrics = {
        "batch/groups": float(len({s.group_id for s in samples})),
        "batch/rollouts": float(len(samples)),
        "batch/counted_rollouts": float(sum(s.is_counted for s in samples)),
        "batch/zero_advantage_share": float(np.mean(advantages == 0.0)),
        "batch/loss_tokens": float(tokens.sum()),
        "batch/useful_groups": float(
            len({s.group_id for s, advantage, trained in zip(samples, advantages, tokens, strict=True) if advantage != 0.0 and trained})
        ),
        "batch/useful_tokens": float(tokens[advantages != 0.0].sum()),
    }
    if lengths:
        metrics["batch/completion_length_mean"] = float(np.mean(lengths))
    if scored:
        metrics["batch/reward_mean"] = float(np.mean(scored))
    if counted:
        metrics["batch/counted_reward_mean"] = float(np.mean(counted))
    return metrics


def collate(samples: Sequence[Sample], advantages: Advantages, *, pad_id: int, rows_multiple: int = 1) -> dict[str, npt.NDArray[Any]]:
    """Rows of equal length under the names that TRL's loss reads. Prompts are padded on the left, completions on the right.

    `rows_multiple` > 1 adds neutral rows until the number of rows is a multiple of it, for whoever must split them evenly: one visible
    pad token as prompt and one as completion, loss mask 0, advantage 0. Real rows are never dropped and keep their order.

    Returns:
        prompt_ids, prompt_mask [B, P] int64; completion_ids, completion_mask (what attention sees), tool_mask (what the loss sees) [B, C]
        int64; token_versions [B, C] int64, to be read where tool_mask is 1; sampling_per_token_logps [B, C] float32; advantages [B]
        float32. C is at least 1.
    """
    rows = math.ceil(len(samples) / rows_multiple) * rows_multiple
    prompt_width = max((len(s.prompt_ids) for s in samples), default=1)
    width = max(1, max((len(s.completion_ids) for s in samples), default=1))
    prompt_ids = np.full((rows, prompt_width), pad_id, dtype=np.int64)
    prompt_mask = np.zeros((rows, prompt_width), dtype=np.int64)
    completion_ids = np.full((rows, width), pad_id, dtype=np.int64)
    completion_mask = np.zeros((rows, width), dtype=np.int64)
    loss_mask = np.zeros((rows, width), dtype=np.int64)
    versions = np.full((rows, width), NOT_SAMPLED, dtype=np.int64)
    logprobs = np.zeros((rows, width), dtype=np.float32)
    for row, sample in enumerate(samples):
        start, length = prompt_width - len(sample.prompt_ids), len(sample.completion_ids)
        prompt_ids[row, start:] = sample.prompt_ids
        prompt_mask[row, start:] = 1
        completion_ids[row, :length] = sample.completion_ids
        completion_mask[row, :length] = 1
        loss_mask[row, :length] = sample.loss_mask
        versions[row, :length] = sample.policy_version if sample.token_versions is None else sample.token_versions
        logprobs[row, :length] = sample.inference_logprobs
    prompt_mask[len(samples) :, -1] = 1
    completion_mask[len(samples) :, 0] = 1
    padded = np.zeros(rows, dtype=np.float32)
    padded[: len(samples)] = advantages
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "tool_mask": loss_mask,
        "token_versions": versions,
        "sampling_per_token_logps": logprobs,
        "advantages": padded,
    }
