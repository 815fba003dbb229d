"""What a finished member is made of: one generation, its text and its score become a rollout."""

from __future__ import annotations

from sluice.generation.base import Generation
from sluice.rewards.base import Score
from sluice.types import Rollout, Task, Turn


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
        turns=(turn,),
        finish_reason=generation.finish_reason,
        reward=score.reward,
        metrics=score.metrics,
        failure=score.failure,
        seconds=seconds,
    )
