"""Recorded rollouts as finished groups, step by step: what a learned rule is fitted on (`sluice.gate.fit_learned`).

Only groups that ran to their end tell how groups end: those that the gate cut, or in which a member failed, was truncated or was stopped,
are left out. An environment's progress is recorded where it tells one; of older recordings, `progress` can tell it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from sluice.errors import AnalysisError
from sluice.gate.played import PlayedGroup, PlayedMember
from sluice.gate.traces import Step
from sluice.records.rollout_reader import RecordedGroup
from sluice.types import Rollout, Turn

ENDS: Final = frozenset({"completed", "max_turns"})
"""How a trajectory ends by itself."""

Progress = Callable[[Rollout], Sequence[float]]
"""The environment's progress after the reset and after each step: one number more than there were steps."""


def played_groups(groups: Iterable[RecordedGroup], *, group_size: int, progress: Progress | None = None) -> Iterator[PlayedGroup]:
    """The groups of a recording that ran to their end with `group_size` members.

    progress: in the place of what is recorded. Raises `AnalysisError` for one of another length.
    """
    for group in groups:
        whole = [member for member in group.members if member.reward is not None and member.finish_reason in ENDS and member.env_steps]
        if len(group.members) == group_size == len(whole) and group.outcome != "cut":
            yield PlayedGroup(
                key=(group.task_id, group.group_id),
                members=tuple(_member(member, progress) for member in whole),
                task_type=whole[0].task_type,
            )


def _member(member: Rollout, progress: Progress | None) -> PlayedMember:
    turns = [turn for turn in member.turns if turn.reward is not None]
    told = _recorded(member, turns) if progress is None else [float(value) for value in progress(member)]
    if told is not None and len(told) != len(turns) + 1:
        raise AnalysisError(
            f"progress of attempt {member.attempt_id}: expected {len(turns) + 1} numbers, one after the reset and one after each step, got "
            f"{len(told)} - correct the function"
        )
    replies = [*(turn.observation for turn in turns[1:]), None]  # the last one is not recorded, and not needed
    steps = tuple(
        Step(
            action=turn.action,
            reply=reply,
            is_admissible=turn.is_admissible,
            progress=None if told is None else told[number],
            logprob=float(np.mean(turn.inference_logprobs)) if len(turn.inference_logprobs) else 0.0,
        )
        for number, (turn, reply) in enumerate(zip(turns, replies, strict=True), 1)
    )
    assert member.reward is not None
    return PlayedMember(
        steps=steps,
        reward=member.reward,
        first_observation=turns[0].observation,
        first_progress=None if told is None else told[0],
        earned=tuple(np.cumsum([turn.reward for turn in turns]).tolist()),
        tokens=tuple(len(turn.token_ids) for turn in turns),
    )


def _recorded(member: Rollout, turns: Sequence[Turn]) -> list[float] | None:
    """The progress after the reset and after each step; None: it was not recorded, or the environment does not say it all along."""
    before = [turn.progress for turn in turns]
    told = [value for value in (*before, member.metrics.get("progress", before[-1])) if value is not None]
    return told if len(told) == len(turns) + 1 else None
