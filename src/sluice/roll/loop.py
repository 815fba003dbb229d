"""UserDefinedRolloutLoop: the default loop of ROLL on top of a run of ours, and what runs any class of that form.

`process_new_prompt(context)` makes one group: it takes the prompt, samples and scores inside `context.do_generate_and_reward`, filters, and
returns the responses, or None to give the prompt up. `_generate_and_reward_impl(context, req, domain)` is the part for one request, which
subclasses override.

A loop of this form judges its groups itself: what it returns is kept, and what `query_filter` said on the way is recorded with its own
reason. So it is never judged twice. What remains for the run: a group must be whole, and its responses must have rewards.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from sluice.config import RlvrConfig
from sluice.errors import LoopError
from sluice.execution.loops import Judged, LoopContext, RolloutLoop
from sluice.filters import build_query_filter
from sluice.filters.no_filter import NoFilter
from sluice.roll.context import RolloutContext, gather_all
from sluice.roll.data import DataProto
from sluice.roll.filters import query_filter, response_filter
from sluice.roll.remote import holding
from sluice.roll.requests import expand_requests, expand_responses, is_report_data_finished, postprocess_output_data
from sluice.roll.scope import current
from sluice.types import Rollout, Verdict


class UserDefinedRolloutLoop:
    """Generates, scores and filters the responses to one prompt. One object for the run, many prompts at the same time."""

    async def process_new_prompt(self, context: RolloutContext) -> DataProto | Sequence[Any] | None:
        """Make one group: its responses, one row each, in lists or not; None gives the prompt up."""
        count = context.meta_info["generation_config"]["num_return_sequences"]
        request, domain = context.get_request_data(meta_info=context.meta_info)
        requests = expand_requests(request, count, context.is_num_return_sequences_expand)
        async with context.do_generate_and_reward(max_concurrency=count):
            answers = await _until_none(self._generate_and_reward(context=context, req=one, domain=domain) for one in requests)
        if answers is None:
            return None
        responses = expand_responses(answers)
        if not responses:
            return None
        if not context.is_val and not query_filter(responses, context.pipeline_config):
            return None
        return responses

    async def _generate_and_reward(self, context: RolloutContext, req: DataProto, domain: str) -> Sequence[DataProto] | None:
        return await self._generate_and_reward_impl(context=context, req=req, domain=domain)

    async def _generate_and_reward_impl(self, context: RolloutContext, req: DataProto, domain: str) -> list[DataProto] | None:
        """The responses to one request, one row each with a meta_info of its own; rejected ones are sampled again within the rounds.

        Fewer than were asked for where the rounds of some members are used up, and the others may still be a group. None: they may not, or
        a response was aborted.
        """
        kept: list[DataProto] = []
        request = req
        while (data := await context.generate(req=request, domain=domain)) is not None:
            if not is_report_data_finished(data):
                return None
            rows = postprocess_output_data(request, data, context.sequence_length)
            rows.union(await context.compute_rewards(req=rows, domain=domain))
            rejected = 0
            for index in range(len(rows)):
                row = rows[index]
                row.meta_info.update(context.notes_of_row(row))
                if context.is_val or response_filter(row, context.pipeline_config):
                    kept.append(row)
                else:
                    rejected += 1
            if not rejected:
                break
            request = copy.deepcopy(request)
            request.meta_info["generation_config"]["num_return_sequences"] = rejected
        return kept if context.may_become_whole else None


class _Aborted(Exception):
    """One of several requests was answered with None."""


async def _until_none(requests: Iterable[Coroutine[Any, Any, Any]]) -> list[Any] | None:
    """The answers of all, in order. None as soon as one of them is None: the others are cancelled."""

    async def answered(request: Coroutine[Any, Any, Any]) -> Any:
        answer = await request
        if answer is None:
            raise _Aborted
        return answer

    try:
        return await gather_all(answered(request) for request in requests)
    except _Aborted:
        return None


class AdaptedLoop(RolloutLoop):
    """A loop with `process_new_prompt` as one with `run`. Whatever it makes remote is freed when it ends, however it ends."""

    def __init__(self, theirs: Any, config: RlvrConfig, *, pad_token_id: int | None = None, eos_token_id: int | None = None) -> None:
        """Raises `LoopError` when `process_new_prompt` cannot be called as it will be."""
        process = getattr(theirs, "process_new_prompt", None)
        told = f"{type(theirs).__qualname__}.process_new_prompt"
        if not inspect.iscoroutinefunction(process):
            raise LoopError(f"expected `async def process_new_prompt(self, context)`, got {told} that is not async - make it async")
        try:
            inspect.signature(process).bind(context=None)
        except TypeError as error:
            raise LoopError(f"{told} is called with context=..., which it does not take: {error} - take the context") from error
        self.theirs = theirs
        self._config = config
        self._tokens = {"pad_token_id": pad_token_id, "eos_token_id": eos_token_id}
        self._whole = build_query_filter(
            {"type": NoFilter.name},
            where="user_defined_rollout_loop_cls",
            min_members=config.resampling.min_members,
            group_size=config.num_return_sequences_in_group,
        )

    async def run(self, context: LoopContext) -> Sequence[Rollout] | Judged | None:
        """One group."""
        roll = RolloutContext(context, self._config, **self._tokens)
        token = current.set(roll)
        try:
            with holding() as held:
                try:
                    answer = await self.theirs.process_new_prompt(context=roll)
                    return self._returned(answer, context, roll)
                finally:
                    held.free()
        finally:
            current.reset(token)

    def _returned(self, answer: Any, context: LoopContext, roll: RolloutContext) -> Sequence[Rollout] | Judged | None:
        judged = roll.judged
        if answer is None:
            return Judged(rollouts=judged[1], verdict=judged[0]) if judged is not None and not judged[0].keep else None
        rollouts = roll.rollouts_of(expand_responses(answer))
        if len(rollouts) < context.min_members and context.why_nothing()[0] == "response_retries":
            return None
        verdict = judged[0] if judged is not None and judged[0].keep else Verdict.kept("loop")
        if rollouts:
            whole = self._whole.judge(context.as_group(rollouts))
            verdict = verdict if whole.keep else whole
        return Judged(rollouts=rollouts, verdict=verdict)


def adapt_loop(theirs: object, config: RlvrConfig, *, pad_token_id: int | None = None, eos_token_id: int | None = None) -> AdaptedLoop:
    """Make an object with `process_new_prompt` a loop of a run. Raises `LoopError` when it cannot be called as it will be."""
    return AdaptedLoop(theirs, config, pad_token_id=pad_token_id, eos_token_id=eos_token_id)
