"""RolloutContext: what a loop written for ROLL knows and can do for one prompt, on top of the context of our own loops.

Every response is an attempt at one member of the group: started by `generate`, handed in by `compute_rewards`, which is when the run's
response filter and its policy on truncation have their word. So tokens, rounds and reasons are accounted for as without a loop.

| call | consumes | waits for | unblocked by |
|---|---|---|---|
| `generate` | a request | its place among `max_concurrency`, its generations | the engine, `abort_running_requests`, a cancel of the loop |
| `compute_rewards` | rows | the verifier | its time limit, a cancel of the loop |
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
import torch

from sluice.config import RlvrConfig
from sluice.errors import LoopError
from sluice.execution.loops import Attempt, AttemptFailed, GroupClosed, LoopContext, RoundsUsedUp
from sluice.rewards.base import Score
from sluice.roll.data import DataProto, column
from sluice.roll.filters import RESPONSE_VERDICT, judge_rows, reward_of
from sluice.roll.requests import ABORTED, ROLLOUT_ID, prompt_of, report_of, request_of
from sluice.types import Rollout, Verdict

T = TypeVar("T")

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "num_beams": (None, 1),
    "do_sample": (None, True),
    "logprobs": (None, 0, 1),
    "num_return_sequences": (),
    "max_new_tokens": (),
    "temperature": (),
}
"""What a generation_config may say beside the three that count here: values that leave the distribution as it is."""


class RolloutContext:
    """One prompt on its way, as ROLL's loops see it."""

    def __init__(
        self, context: LoopContext, config: RlvrConfig, *, pad_token_id: int | None = None, eos_token_id: int | None = None
    ) -> None:
        self.prompt_id = context.group_id
        self.pipeline_config = config
        self.is_val = context.is_val
        self.prompt_length = config.prompt_length
        self.sequence_length = config.sequence_length
        self.is_num_return_sequences_expand = config.is_num_return_sequences_expand
        self.domain = context.domain
        self.sampling_start_step: int | None = None  # global_step at launch; None before do_generate_and_reward
        self.meta_info: dict[str, Any] = {
            "generation_config": {
                "num_return_sequences": context.group_size,
                "max_new_tokens": context.response_length,
                "temperature": context.temperature,
            },
            "global_step": context.start_step,
            "collect_unfinished": False,
        }
        self.inflight_requests: set[str] = set()  # rollout_ids that are being generated
        self._context = context
        self._pad_token_id = 0 if pad_token_id is None else pad_token_id
        self._eos_token_id = eos_token_id
        self._is_sampling = False
        self._got_data = False
        self._places: asyncio.Semaphore | None = None  # of max_concurrency; None: no bound
        self._attempts: dict[str, Attempt] = {}  # by rollout_id
        self._scores: dict[str, Score] = {}  # by rollout_id, of those that were handed in
        self._running: dict[str, asyncio.Task[Any]] = {}  # by rollout_id, generations under way
        self._lost: set[int] = set()  # members whose rounds are used up
        self._judged: tuple[Verdict, tuple[Rollout, ...]] | None = None  # what the query filter said, of which responses

    # ------------------------------------------------------------ what a loop calls

    def get_request_data(self, meta_info: dict[str, Any] | None = None) -> tuple[DataProto, str]:
        """The prompt as a request of one row, with this meta_info, and its domain. Once: for another prompt return None."""
        if self._got_data or self._is_sampling or self.sampling_start_step is not None:
            raise LoopError("expected get_request_data once, before anything is sampled - return None, and another prompt will come")
        self._got_data = True
        notes = self.meta_info if meta_info is None else meta_info
        task = self._context.task
        return request_of(task, prompt_length=self.prompt_length, pad_token_id=self._pad_token_id, meta_info=notes), self.domain

    @asynccontextmanager
    async def do_generate_and_reward(self, max_concurrency: int | None = None) -> AsyncIterator[None]:
        """Inside, and only inside, is sampled and scored; once. max_concurrency: requests that are generated at the same time."""
        if self._is_sampling or self.sampling_start_step is not None:
            raise LoopError("expected do_generate_and_reward once - sample everything for this prompt inside the one block")
        if max_concurrency is not None and max_concurrency < 1:
            raise LoopError(f"expected a max_concurrency of at least 1, got {max_concurrency}")
        self._places = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._is_sampling = True
        self.sampling_start_step = self._context.start_step
        try:
            yield
            if self.inflight_requests:
                raise LoopError(
                    f"expected no request under way at the end of do_generate_and_reward, got {len(self.inflight_requests)} - gather them "
                    "inside, or abort_running_requests"
                )
        finally:
            self._is_sampling = False

    async def generate(self, req: DataProto, domain: str) -> DataProto | None:
        """Sample the responses that `req.meta_info["generation_config"]["num_return_sequences"]` asks for, at the same time.

        The report has one row per response, see `report_of`; one that was aborted has no tokens and the finish reason "abort". A member
        that the engine loses is tried again. Fewer rows come when the rounds of some members are used up; None when there is nothing to
        sample with any more: rounds are used up, or the group has left.
        """
        self._require_sampling("generate")
        self._require_domain(domain)
        count, limit = self._asked_for(req)
        prompt = prompt_of(req)
        is_the_task = np.array_equal(prompt, self._context.task.prompt_ids)
        prompt_ids = None if is_the_task else prompt
        if self._places is None:
            return await self._sample(count, prompt_ids, limit)
        async with self._places:
            return await self._sample(count, prompt_ids, limit)

    async def compute_rewards(self, req: DataProto, domain: str) -> DataProto:
        """Score responses with the verifier of a domain, and hand them in.

        Returns:
            The same rows, for `req.union`. batch: response_level_rewards [n] float32, NaN where there is none; scores [n, T] float32, the
            reward at the last token of the response. non_tensor_batch: response_verdict, whether the run keeps the response, and tags,
            env_ids, group_ids, step_scores, episode_scores as members of agentic groups have them. meta_info: the notes of
            `notes_of_row` for a single row; metrics, one value per row, for several.
        """
        self._require_sampling("compute_rewards")
        self._require_domain(domain)
        ids = self._ids_of(req)
        scores = await gather_all(self._score(rollout_id, domain) for rollout_id in ids)
        rewards = [math.nan if score.reward is None else score.reward for score in scores]
        ends = [int(mask.nonzero().max()) if mask.any() else 0 for mask in req["response_mask"]]
        placed = torch.zeros(req["input_ids"].shape, dtype=torch.float32)
        for row, (end, reward) in enumerate(zip(ends, rewards, strict=True)):
            placed[row, end] = reward
        task, members = self._context.task, [self._attempts[rollout_id].member_index for rollout_id in ids]
        verdicts = [self._attempts[rollout_id].verdict for rollout_id in ids]
        columns = {
            RESPONSE_VERDICT: verdicts,
            "tags": [task.tag or task.domain] * len(ids),
            "env_ids": members,
            "group_ids": [self.prompt_id] * len(ids),
            "step_scores": column([[reward] for reward in rewards]),
            "episode_scores": rewards,
        }
        notes = self._notes(ids[0]) if len(ids) == 1 else {"metrics": _gathered(scores)}
        return DataProto.from_dict({"response_level_rewards": torch.tensor(rewards, dtype=torch.float32), "scores": placed}, columns, notes)

    async def abort_running_requests(self) -> None:
        """Stop what is being generated for this prompt. Its `generate` answers with the finish reason "abort" at once."""
        self._require_sampling("abort_running_requests")
        for rollout_id, task in list(self._running.items()):
            if not task.done():
                self._attempts[rollout_id].cancel()
                task.cancel()

    def give_up(self, reason: str, detail: str = "") -> None:
        """Say why None is about to be returned: one short, countable word, and a detail for a person. ROLL has no such thing."""
        self._context.give_up(reason, detail)

    # ------------------------------------------------------------ what the loop of this room calls

    def notes_of_row(self, row: DataProto) -> dict[str, Any]:
        """The meta_info of one response: env_timeout, env_failed, drop_flag (False), stop_reason, metrics (the named scores of the
        verifier), and each named score under its own name as well, where that is free: what a reward worker of ROLL would have noted."""
        (rollout_id,) = self._ids_of(row)
        return self._notes(rollout_id)

    def judge(self, rows: Sequence[DataProto], config: Any) -> Verdict:
        """What the run's query filter says to these rows; of rows that are not its own, or another configuration: the plain filter."""
        rollouts = self.rollouts_of(rows)
        own = config is self.pipeline_config and len(rollouts) == len(rows)
        verdict = self._context.judge(rollouts) if own else judge_rows(rows, config)
        self._judged = verdict, tuple(rollouts)
        return verdict

    @property
    def may_become_whole(self) -> bool:
        """Whether the members whose rounds are not used up are still enough for a group."""
        size = self._context.group_size
        return size - sum(member_index < size for member_index in self._lost) >= self._context.min_members

    @property
    def judged(self) -> tuple[Verdict, tuple[Rollout, ...]] | None:
        """The last verdict of a query filter in this loop, and the responses that it saw."""
        return self._judged

    def rollouts_of(self, rows: Sequence[DataProto]) -> list[Rollout]:
        """What the run holds of these rows, with the reward that stands in them now; rows that the run has not kept are left out.

        A row that was never scored by `compute_rewards` is handed in with the reward that stands in it.
        """
        out = []
        for row in rows:
            (rollout_id,) = self._ids_of(row)
            attempt = self._attempts[rollout_id]
            reward = reward_of(row)
            if attempt.is_open:
                attempt.finish(reward)
            rollout = attempt.rollout
            if rollout is None:
                continue
            known = math.nan if rollout.reward is None else rollout.reward
            if np.float32(known) != np.float32(reward) and not (math.isnan(known) and math.isnan(reward)):
                rollout = replace(rollout, reward=reward if math.isfinite(reward) else None)
            out.append(rollout)
        return out

    # ------------------------------------------------------------ inside

    def _require_sampling(self, what: str) -> None:
        if not self._is_sampling:
            raise LoopError(f"expected {what} inside `async with context.do_generate_and_reward(...)`, got it outside")

    def _require_domain(self, domain: str) -> None:
        known = self.pipeline_config.rewards
        if domain not in known:
            raise LoopError(f"expected a domain out of {sorted(known)}, got {domain!r} - use the one that get_request_data gave")

    def _asked_for(self, req: DataProto) -> tuple[int, int | None]:
        """How many responses, of how many tokens at most. Raises `LoopError` for what the engine does not do."""
        settings: Mapping[str, Any] = req.meta_info.get("generation_config", {})
        for name, value in settings.items():
            if name in NEUTRAL and (not NEUTRAL[name] or value in NEUTRAL[name]):
                continue
            raise LoopError(
                f"expected generation_config to leave the distribution as it is, got {name} = {value!r} - the trainer's log-probs are "
                "those of the full vocabulary at engine.temperature: delete the entry"
            )
        temperature = settings.get("temperature", self._context.temperature)
        if temperature != self._context.temperature:
            raise LoopError(
                f"expected the temperature of the run ({self._context.temperature:g}) in generation_config, got {temperature!r} - one key, "
                "engine.temperature, feeds engine and trainer"
            )
        count = settings.get("num_return_sequences", 1)
        if not isinstance(count, int) or count < 1:
            raise LoopError(f"expected num_return_sequences of at least 1, got {count!r}")
        limit = settings.get("max_new_tokens")
        return count, None if limit is None else int(limit)

    async def _sample(self, count: int, prompt_ids: Any, limit: int | None) -> DataProto | None:
        try:
            attempts = self._start(count)
            ended = await gather_all(self._sample_one(attempt, prompt_ids, limit) for attempt in attempts)
        except GroupClosed:
            return None
        done = [attempt for attempt in ended if attempt is not None]
        if not done:
            return None
        turns = [attempt.turns[-1] if attempt.turns else None for attempt in done]
        return report_of(
            rollout_ids=[str(attempt.attempt_id) for attempt in done],
            texts=[attempt.text for attempt in done],
            token_ids=[np.zeros(0, dtype=np.int64) if turn is None else turn.token_ids for turn in turns],
            logprobs=[np.zeros(0, dtype=np.float32) if turn is None else turn.inference_logprobs for turn in turns],
            finish_reasons=[ABORTED if turn is None else turn.finish_reason for turn in turns],
            eos_token_id=self._eos_token_id,
            pad_token_id=self._pad_token_id,
        )

    def _start(self, count: int) -> list[Attempt]:
        """Attempts at members that have not delivered; where a loop wants more than there are, at further ones."""
        attempts: list[Attempt] = []
        missing = self._context.missing_members
        for member_index in missing:
            if len(attempts) == count:
                break
            if (attempt := self._try(member_index)) is not None:
                attempts.append(attempt)
        for _ in range(count - len(missing)):
            try:
                attempts.append(self._noted(self._context.start_another()))
            except RoundsUsedUp:
                break
        return attempts

    def _try(self, member_index: int) -> Attempt | None:
        """One more try at a member; None: its rounds are used up."""
        try:
            return self._noted(self._context.start(member_index))
        except RoundsUsedUp:
            self._lost.add(member_index)
            return None

    def _noted(self, attempt: Attempt) -> Attempt:
        self._attempts[str(attempt.attempt_id)] = attempt
        return attempt

    async def _sample_one(self, attempt: Attempt, prompt_ids: Any, limit: int | None) -> Attempt | None:
        """The attempt that has delivered, or was aborted; None: the rounds of its member are used up."""
        while True:
            rollout_id = str(attempt.attempt_id)
            task = asyncio.create_task(attempt.generate(prompt_ids, max_new_tokens=limit), name=f"attempt {rollout_id}")
            self._running[rollout_id] = task
            self.inflight_requests.add(rollout_id)
            try:
                await asyncio.wait([task])
            finally:  # the cancel of a loop reaches what it waits for
                task.cancel()
                del self._running[rollout_id]
                self.inflight_requests.discard(rollout_id)
            if task.cancelled():
                return attempt
            error = task.exception()
            if error is None:
                return attempt
            if not isinstance(error, AttemptFailed):
                raise error
            again = self._try(attempt.member_index)
            if again is None:
                return None
            attempt = again

    async def _score(self, rollout_id: str, domain: str) -> Score:
        attempt = self._attempts[rollout_id]
        if not attempt.turns:
            raise LoopError(f"expected responses that were generated to the end, got the aborted one {rollout_id} - leave it out")
        score = await self._context.score(attempt.text, domain=domain)
        if attempt.is_open:
            self._scores[rollout_id] = score
            attempt.finish(score)
        return score

    def _ids_of(self, rows: DataProto) -> list[str]:
        """Which attempts these rows are. Raises `LoopError` for rows that are none of this prompt."""
        columns = rows.non_tensor_batch
        if ROLLOUT_ID not in columns:
            raise LoopError(
                f"expected non_tensor_batch[{ROLLOUT_ID!r}], by which a response is known, got {sorted(columns)} - make rows with "
                "postprocess_output_data, and keep the column"
            )
        ids = [str(value) for value in columns[ROLLOUT_ID]]
        for rollout_id in ids:
            if rollout_id not in self._attempts:
                raise LoopError(f"expected responses of prompt {self.prompt_id}, got {ROLLOUT_ID} {rollout_id!r}, which is none of them")
        return ids

    def _notes(self, rollout_id: str) -> dict[str, Any]:
        attempt, score = self._attempts[rollout_id], self._scores.get(rollout_id)
        metrics = {} if score is None else dict(score.metrics)
        own = {
            "env_timeout": False,
            "env_failed": False,
            "drop_flag": False,
            "stop_reason": attempt.turns[-1].finish_reason,
            "metrics": metrics,
        }
        return copy.deepcopy(metrics | own)


def _gathered(scores: Sequence[Score]) -> dict[str, list[float]]:
    """Every named score that all responses have, one value per response."""
    names = set.intersection(*(set(score.metrics) for score in scores)) if scores else set()
    return {name: [score.metrics[name] for score in scores] for name in sorted(names)}


async def gather_all(awaited: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their answers, in order. Raises the first of what they raise, and cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one, name="a response of a loop") for one in awaited]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]
