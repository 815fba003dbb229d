"""A trajectory of a run as the DataProto that a group filter written for ROLL expects: one row, one `meta_info` of its own.

Facts about columns and shapes are from ROLL's environment managers (`formulate_rollouts`). Rows are all of one width, so that the members
of a group can be concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sluice.roll.data import DataProto, column
from sluice.types import Group, Rollout


def members_of(group: Group, *, sequence_length: int | None = None, pad_token_id: int = 0) -> list[DataProto]:
    """The members of a group that have ended, in order of member_index.

    sequence_length: how wide their rows are; None: as wide as the longest of them. pad_token_id: what stands behind shorter ones.
    """
    width = max([_length(rollout) for rollout in group.rollouts], default=1) if sequence_length is None else sequence_length
    env_group = group.task.entry.get("env_group", group.group_id)
    return [
        member_of(rollout, domain=group.task.domain, env_group=env_group, sequence_length=width, pad_token_id=pad_token_id)
        for rollout in group.rollouts
    ]


def member_of(rollout: Rollout, *, domain: str, env_group: Any, sequence_length: int, pad_token_id: int = 0) -> DataProto:
    """One trajectory.

    Returns:
        batch: input_ids, attention_mask, position_ids [1, T] int64; prompt_mask (the first prompt), response_mask (what the policy sampled)
        [1, T] bool; scores [1, T] float32, the reward at the last token; response_level_rewards [1] float32; infer_logprobs [1, T-1]
        float32, where [:, t-1] belongs to token t and is 0 where the policy did not sample. T is `sequence_length`, or more where the
        trajectory is longer. A reward that is missing is NaN.
        non_tensor_batch: domain; tags, the kind of problem (or the domain); env_ids, the member's place in its group; group_ids, the
        environment group; step_scores, a list with the reward of every environment step; episode_scores, their sum. [1] each
        meta_info: env_timeout, env_failed, drop_flag (bool); stop_reason, why it ended; metrics, its named scores.
    """
    ids, sampled, logprobs = _sequence(rollout)
    length, prompt = len(ids), len(rollout.turns[0].prompt_ids) if rollout.turns else 0
    width = max(sequence_length, length, 1)
    reward = np.nan if rollout.reward is None else rollout.reward
    real = np.arange(width) < length
    scores = np.zeros(width, dtype=np.float32)
    scores[max(length - 1, 0)] = reward
    tensors = {
        "input_ids": _row(np.concatenate([ids, np.full(width - length, pad_token_id)]), torch.int64),
        "attention_mask": _row(real, torch.int64),
        "position_ids": _row(np.where(real, np.arange(width), 0), torch.int64),
        "prompt_mask": _row(np.arange(width) < prompt, torch.bool),
        "response_mask": _row(np.concatenate([sampled, np.zeros(width - length, dtype=np.bool_)]), torch.bool),
        "scores": _row(scores, torch.float32),
        "response_level_rewards": torch.tensor([reward], dtype=torch.float32),
        "infer_logprobs": _row(np.concatenate([logprobs, np.zeros(width - length)])[1:], torch.float32),
    }
    steps = [turn.reward for turn in rollout.turns if turn.reward is not None]
    columns = {
        "domain": [domain],
        "tags": [rollout.task_type or domain],
        "env_ids": [rollout.member_index],
        "group_ids": [env_group],
        "step_scores": column([steps]),
        "episode_scores": [reward],
    }
    return DataProto.from_dict(tensors, columns, meta_info=notes_of(rollout))


def notes_of(rollout: Rollout) -> dict[str, Any]:
    """The `meta_info` of a member."""
    return {
        "env_timeout": "env_timeout" in rollout.flags,
        "env_failed": "env_failed" in rollout.flags,
        "drop_flag": "drop_flag" in rollout.flags,
        "stop_reason": rollout.finish_reason,
        "metrics": dict(rollout.metrics),
    }


def _length(rollout: Rollout) -> int:
    return sum(len(turn.prompt_ids) + len(turn.token_ids) for turn in rollout.turns)


def _sequence(rollout: Rollout) -> tuple[Any, Any, Any]:
    """All tokens of a trajectory, which of them the policy sampled, and their log-probs (0 elsewhere). [L] each"""
    ids: list[Any] = [np.zeros(0, dtype=np.int64)]
    sampled: list[Any] = [np.zeros(0, dtype=np.bool_)]
    logprobs: list[Any] = [np.zeros(0, dtype=np.float32)]
    for turn in rollout.turns:
        ids += [turn.prompt_ids, turn.token_ids]
        sampled += [np.zeros(len(turn.prompt_ids), dtype=np.bool_), np.ones(len(turn.token_ids), dtype=np.bool_)]
        logprobs += [np.zeros(len(turn.prompt_ids), dtype=np.float32), turn.inference_logprobs]
    return np.concatenate(ids), np.concatenate(sampled), np.concatenate(logprobs)


def _row(values: Sequence[Any] | Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.as_tensor(np.ascontiguousarray(values)).to(dtype)[None]
