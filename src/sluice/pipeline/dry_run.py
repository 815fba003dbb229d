"""One group of one task, generated and scored as a run would, without a machine: what `sluice doctor` looks at."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from sluice.config import RlvrConfig
from sluice.execution.member import single_turn_rollout
from sluice.generation import Engine, GenerationRequest
from sluice.rewards import Scorer
from sluice.types import Group, Rollout, Task, TokenIds


async def one_group(
    config: RlvrConfig, task: Task, *, engine: Engine, scorer: Scorer, decode: Callable[[TokenIds], str], seconds: dict[str, float]
) -> tuple[tuple[Rollout, ...], Group]:
    """The rollouts of one group and the group they make; adds the seconds of both parts to `seconds`."""
    started = time.monotonic()
    handles = [
        engine.submit(
            GenerationRequest(
                request_id=index,
                prompt_ids=task.prompt_ids,
                max_new_tokens=config.response_length,
                temperature=config.engine.temperature,
                seed=config.seed + index,
            )
        )
        for index in range(config.num_return_sequences_in_group)
    ]
    generations = await asyncio.gather(*(handle.future for handle in handles))
    seconds["generate"] = time.monotonic() - started
    started = time.monotonic()
    texts = [decode(generation.token_ids) for generation in generations]
    scores = await asyncio.gather(*(scorer.score(task, text) for text in texts))
    seconds["score"] = time.monotonic() - started
    rollouts = tuple(
        single_turn_rollout(attempt_id=index, group_id=0, member_index=index, task=task, generation=generation, text=text, score=score)
        for index, (generation, text, score) in enumerate(zip(generations, texts, scores, strict=True))
    )
    masks_truncated = config.resampling.truncated == "mask"
    counted = tuple(rollout.reward is not None and not (rollout.is_truncated and masks_truncated) for rollout in rollouts)
    return rollouts, Group(group_id=0, task=task, rollouts=rollouts, start_step=0, round=1, epoch=0, counted=counted)
