"""What a finished member is made of: one generation, its text and its score become a rollout.

Filters of the user see a member before the trainer does: what it is made of cannot be written to.
"""

from __future__ import annotations

from types import MappingProxyType

from sluice.generation.base import Generation
from sluice.rewards.base import Score
from sluice.types import EMPTY, Rollout, Task, Turn


def single_turn_rollout(
    *, attempt_id: int, group_id: int, member_index: int, task: Task, generation: Generation, text: str, score: Score, seconds: float = 0.0
) -> Rollout:
    """The rollout of a prompt and one response."""
    turn = Turn(
        prompt_ids=task.prompt_ids,
        token_ids=generation.token_ids,
        inference_logprobs=generation.inference_logprobs,
        text=text,
        finish_reason=generation.finish_reason,
        policy_version=generation.policy_version,
        token_versions=generation.token_versions,
    )
    return Rollout(
        attempt_id=attempt_id,
        group_id=group_id,
        member_index=member_index,
        task_id=task.task_id,
        turns=(fixed(turn),),
        finish_reason=generation.finish_reason,
        reward=score.reward,
        metrics=MappingProxyType(dict(score.metrics)) if score.metrics else EMPTY,
        failure=score.failure,
        seconds=seconds,
    )


def fixed(turn: Turn) -> Turn:
    """The same turn, its arrays closed to writing."""
    for array in (turn.prompt_ids, turn.token_ids, turn.inference_logprobs, turn.token_versions):
        if array is not None:
            array.setflags(write=False)
    return turn
