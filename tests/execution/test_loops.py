"""User-defined loops on a virtual clock: whatever a loop does, every token is accounted for, every group leaves, nobody waits for it."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import re
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice import Verdict
from sluice.config.models import FilterConfig
from sluice.errors import GenerationError, LoopError, RequestRefused, ResampleError, RewardError, SluiceError
from sluice.execution import (
    Attempt,
    AttemptFailed,
    GroupClosed,
    Judged,
    LocalShell,
    LoopContext,
    RolloutLoop,
    RoundsUsedUp,
    TokensUsedUp,
    load_loop,
)
from sluice.execution.clock import run
from sluice.execution.shell import CLOSE_GRACE_S
from sluice.generation import Answer, GenerationRequest, NullEngine, answers
from sluice.generation.null import NullHandle
from sluice.rewards.base import Score
from sluice.scheduler import Scheduler, SchedulerConfig
from sluice.types import Rollout, Task, TokenIds
from tests.execution.test_shell import FunctionScorer, ListJournal, advance, alternating, everything_left, reward
from tests.fakes import NO_FILTER, STD_FILTER, ListSource, make_filters, make_rollout, make_task

DOCS = (Path(__file__).parents[2] / "docs" / "rollout_loops.md").read_text(encoding="utf-8")
SHORT = FilterConfig(type="length", filter_args={"min_tokens": 3})
Run = Callable[[LoopContext], Awaitable[Sequence[Rollout] | Judged | None]]


class ListTasks(ListSource):
    """A source with a state, as `LocalShell.state_dict` wants it."""

    def state_dict(self, outstanding: list[tuple[str, int]]) -> dict[str, Any]:
        return {"outstanding": outstanding}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._back = [make_task(task_id) for task_id, _ in state["outstanding"]]


class FunctionLoop(RolloutLoop):
    """A loop that is a function; knows its contexts."""

    def __init__(self, function: Run) -> None:
        self.function = function
        self.contexts: list[LoopContext] = []

    async def run(self, context: LoopContext) -> Sequence[Rollout] | Judged | None:
        self.contexts.append(context)
        return await self.function(context)


class NarrowEngine(NullEngine):
    """Refuses, as an engine does, what would not fit into `max_length`."""

    def __init__(self, *given: Any, max_length: int, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.max_length = max_length

    def submit(self, request: GenerationRequest) -> NullHandle:
        if len(request.prompt_ids) + request.max_new_tokens > self.max_length:
            raise RequestRefused(f"{len(request.prompt_ids)} + {request.max_new_tokens} tokens do not fit into {self.max_length}")
        return super().submit(request)


def encode(text: str) -> TokenIds:
    return np.array([100 + len(word) for word in text.split()], dtype=np.int64)


def make_shell(
    loop: RolloutLoop | Run | None,
    *,
    engine: NullEngine | None = None,
    scorer: Any = None,
    query: FilterConfig = STD_FILTER,
    response: FilterConfig | None = None,
    source: ListSource | None = None,
    response_length: int = 8,
    **machine: Any,
) -> LocalShell:
    """loop: None for a shell without one."""
    config = SchedulerConfig(**{"group_size": 4, "has_user_loop": loop is not None, **machine})
    return LocalShell(
        scheduler=Scheduler(config, make_filters(query, response, group_size=config.group_size)),
        source=source or ListTasks(make=lambda i: make_task(f"t{i}")),
        engine=engine or NullEngine(answers(lengths=(1, 8), latency_s=(0.1, 2.0))),
        scorer=scorer or FunctionScorer(alternating),
        journal=ListJournal(),
        decode=lambda token_ids: " ".join(map(str, token_ids.tolist())),
        response_length=response_length,
        temperature=1.0,
        user_loop=FunctionLoop(loop) if callable(loop) else loop,
        encode=encode,
    )


def same(tokens: int = 2, **fields: Any) -> Callable[[GenerationRequest], Answer]:
    """Answers of one length, after a second. fields: others of the answer, or functions from the request to them."""

    def answer(request: GenerationRequest) -> Answer:
        given = {"latency_s": 1.0} | {name: value(request) if callable(value) else value for name, value in fields.items()}
        return Answer(token_ids=np.arange(tokens), inference_logprobs=np.zeros(tokens, dtype=np.float32), **given)

    return answer


def records(shell: LocalShell) -> list[Any]:
    return shell.journal.records  # type: ignore[attr-defined, no-any-return]


def warnings(shell: LocalShell) -> list[str]:
    return [message for _, message in shell.journal.events]  # type: ignore[attr-defined]


async def close(shell: LocalShell) -> None:
    """Close, and check that nothing is left: of the machine, of the engine, of the loops."""
    started = asyncio.get_running_loop().time()
    await shell.close()
    assert asyncio.get_running_loop().time() - started <= CLOSE_GRACE_S
    everything_left(shell)
    assert shell.engine.open_requests == 0  # type: ignore[attr-defined]
    assert not shell.in_flight()
    assert not shell.late.pending()


async def fill(shell: LocalShell, batches: int = 1, groups: int = 2) -> list[Any]:
    """Train so many batches, then close."""
    out = []
    for _ in range(batches):
        batch, _ = await shell.next_batch(groups)
        out.append(batch)
        advance(shell, shell.scheduler.step + 1)
    await close(shell)
    return out


# ---------------------------------------------------------------- as without a loop


class ContentScorer:
    """Scores by what was sampled, after a while that depends on it as well."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    async def score(self, task: Task, response: str) -> Score:
        number = zlib.crc32(f"{self.seed} {task.task_id} {response}".encode())
        await asyncio.sleep(number % 1009 / 1009)
        if number % 17 == 0:
            return reward(None)
        return reward(float(number // 17 % 3 == 0))

    async def close(self) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}


def faulty_answers(seed: int, one_in: int) -> Callable[[GenerationRequest], Answer]:
    """Answers with times that no two requests share, of which one in so many fails; 0: none does."""
    base = answers(seed=seed, lengths=(1, 9), latency_s=(0.1, 5.0), variants=101)

    def answer(request: GenerationRequest) -> Answer:
        number = zlib.crc32(f"{seed} {request.request_id}".encode())
        error = "it fell over" if one_in and number % one_in == 0 else None
        return replace(base(request), latency_s=base(request).latency_s + number % 10007 / 10007, error=error)

    return answer


async def whole_story(loop: RolloutLoop | None, seed: int, one_in: int, **settings: Any) -> dict[str, Any]:
    """Everything that there is to know about a run of three batches."""
    engine = NullEngine(faulty_answers(seed, one_in), cancel_latency_s=0.3)
    shell = make_shell(loop, engine=engine, scorer=ContentScorer(seed), group_size=3, max_resample_rounds=200, **settings)
    batches: list[Any] = []
    for step in range(3):
        batch, _ = await shell.next_batch(2)
        for group in batch.groups:
            batches.append((step, group.group_id, group.task.task_id, group.round, group.start_step, group.counted))
            batches += [(r.attempt_id, r.member_index, r.reward, r.policy_version, r.seconds, r.turns[0].text) for r in group.rollouts]
        await asyncio.sleep(2.5)
        advance(shell, step + 1)
    await asyncio.sleep(0.01)
    await close(shell)
    ledger = shell.scheduler.ledger.state_dict()
    left = sorted(
        (r.group_id, r.task_id, r.outcome, r.reason, r.category, r.attempts, r.sampled_tokens, r.rewards, r.seconds) for r in records(shell)
    )
    return {"batches": batches, "ledger": ledger, "groups": left}


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1_000_000),
    one_in=st.sampled_from([0, 3, 8]),
    async_generation_ratio=st.sampled_from([0.0, 0.5, 1.0]),
    redundancy=st.integers(0, 2),
    min_members=st.sampled_from([None, 2, 1]),
    max_additional_running_prompts=st.sampled_from([0, 0, 3]),
    max_response_rounds=st.sampled_from([1, 2, 5]),
    truncated=st.sampled_from(["mask", "invalid", "drop_group", "keep"]),
    on_member_failure=st.sampled_from(["replace", "judge"]),
    group_timeout_s=st.sampled_from([None, 8.0]),
    response=st.sampled_from([None, SHORT]),
)
def test_a_loop_that_only_asks_for_members_gives_the_same_batches_tokens_and_ledger_as_no_loop(
    seed: int, one_in: int, **settings: Any
) -> None:
    without = run(whole_story(None, seed, one_in, **settings))
    with_loop = run(whole_story(RolloutLoop(), seed, one_in, **settings))
    for what, value in without.items():
        assert with_loop[what] == value, what


# ---------------------------------------------------------------- any loop at all


class Wild(RolloutLoop):
    """Does at random whatever a loop can do, also what it should not."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.left: set[asyncio.Task[Any]] = set()

    async def run(self, context: LoopContext) -> Sequence[Rollout] | Judged | None:
        rng = random.Random(self.seed * 1000 + context.group_id)
        plan = rng.choice(["members", "by_hand", "by_hand", "by_hand", "early"])
        if rng.random() < 0.05:
            raise ValueError("in a bad mood")
        if plan == "members":
            return await context.members(lambda attempt: self.play(attempt, rng))
        done: dict[int, Rollout] = {}
        while len(done) < context.group_size and not (plan == "early" and rng.random() < 0.2):
            missing = [index for index in range(context.group_size) if index not in done]
            chosen = rng.sample(missing, rng.randint(1, len(missing)))
            tries = [asyncio.create_task(self.one(context, index, rng)) for index in chosen]
            if rng.random() < 0.1:  # forgotten
                self.left.update(tries)
                return list(done.values()) or None
            done |= {rollout.member_index: rollout for rollout in await asyncio.gather(*tries) if rollout is not None}
            if rng.random() < 0.1:
                done.pop(next(iter(done), -1), None)
        rollouts = [replace(rollout, reward=rng.choice([rollout.reward, 0.5])) for rollout in done.values()]
        match rng.randint(0, 5):
            case 0:
                context.give_up("no_mood", "today")
                return None
            case 1:
                return Judged(rollouts=rollouts, verdict=Verdict.kept())
            case 2:
                return Judged(rollouts=rollouts[1:], verdict=Verdict.dropped("dull", "low_information"))
            case _:
                return rollouts

    async def one(self, context: LoopContext, index: int, rng: random.Random) -> Rollout | None:
        if index not in context.missing_members:
            return None  # an attempt that was forgotten
        try:
            attempt = context.start(index)
            if rng.random() < 0.2:
                async with asyncio.timeout(rng.uniform(0, 3)):
                    answer = await self.play(attempt, rng)
            else:
                answer = await self.play(attempt, rng)
        except (AttemptFailed, TimeoutError, RoundsUsedUp, GroupClosed):
            return None
        except TokensUsedUp:
            answer = 0.0
        if not attempt.is_open:
            return attempt.rollout
        match rng.randint(0, 12):
            case 0:
                attempt.cancel()
            case 1:
                attempt.fail("tool_broke")
            case 2:
                attempt.reject("ugly")
            case 3:
                return None  # forgotten
            case _:
                return attempt.finish(answer, metrics={"extra": 1.0}) if attempt.turns else None
        return None

    async def play(self, attempt: Attempt, rng: random.Random) -> Any:
        for turn in range(rng.randint(1, 3)):
            added = np.arange(rng.randint(0, 3)) if turn else None
            await attempt.generate(added, max_new_tokens=rng.choice([None, 1, 3]))
            if rng.random() < 0.1:
                attempt.context.cancel_running()
        return await attempt.score() if rng.random() < 0.8 else rng.choice([0.0, 1.0, None, math.nan, "good"])


@settings(max_examples=80)
@given(
    seed=st.integers(0, 1_000_000),
    ratio=st.sampled_from([0.0, 1.0]),
    redundancy=st.integers(0, 1),
    additional=st.sampled_from([0, 2]),
    cancel_latency_s=st.sampled_from([0.0, 0.3]),
    max_slots=st.sampled_from([None, 3]),
    timeout=st.sampled_from([None, 12.0]),
    waits=st.lists(st.floats(0.0, 8.0), min_size=1, max_size=5),
)
def test_whatever_loops_do_and_whenever_they_are_cancelled_the_ledger_equals_the_engine_and_nothing_stays_open(
    seed: int,
    ratio: float,
    redundancy: int,
    additional: int,
    cancel_latency_s: float,
    max_slots: int | None,
    timeout: float | None,
    waits: list[float],
) -> None:
    async def main() -> None:
        engine = NullEngine(faulty_answers(seed, 9), cancel_latency_s=cancel_latency_s, max_slots=max_slots)
        shell = make_shell(
            Wild(seed),
            engine=engine,
            scorer=ContentScorer(seed),
            response=SHORT,
            group_size=3,
            min_members=2,
            redundancy=redundancy,
            max_resample_rounds=30,
            max_additional_running_prompts=additional,
            async_generation_ratio=ratio,
            group_timeout_s=timeout,
            quarantine_after=None,
        )
        for wait in waits:
            try:
                batch, _ = await asyncio.wait_for(shell.next_batch(2), wait)
            except TimeoutError:
                state = shell.state_dict()["scheduler"]["ledger"]
                assert sum(state["tokens"].values()) == engine.sampled_tokens("train")
                continue
            except ResampleError:
                break
            for group in batch.groups:
                assert 2 <= len({rollout.member_index for rollout in group.rollouts}) == len(group.rollouts)
            advance(shell, shell.scheduler.step + 1)
        await close(shell)

    run(main())


# ---------------------------------------------------------------- turns


def test_several_generations_are_turns_of_one_rollout_each_behind_all_that_was_there_before() -> None:
    async def main() -> None:
        asked: list[GenerationRequest] = []

        def answer(request: GenerationRequest) -> Answer:
            asked.append(request)
            return same(2)(request)

        async def play(attempt: Attempt) -> float:
            await attempt.generate(max_new_tokens=4)
            await attempt.generate(np.array([50, 51]))
            await attempt.generate([52], max_new_tokens=100)  # type: ignore[arg-type]
            assert (attempt.sampled_tokens, attempt.tokens_left) == (6, 20 - 6 - 3)
            assert attempt.text == "0 1"
            return float(attempt.member_index)

        shell = make_shell(
            lambda context: context.members(play), engine=NullEngine(answer), group_size=2, response_length=20, async_generation_ratio=0.0
        )
        (batch,) = await fill(shell, groups=1)
        for rollout in batch.groups[0].rollouts:
            assert [turn.prompt_ids.tolist() for turn in rollout.turns] == [[5, 6, 7], [50, 51], [52]]
            assert [turn.token_ids.tolist() for turn in rollout.turns] == [[0, 1]] * 3
            assert rollout.sampled_tokens == 6
            assert rollout.seconds == 3.0
        mine = [request for request in asked if request.seed in {asked[0].seed, asked[2].seed, asked[4].seed}]
        assert [request.prompt_ids.tolist() for request in mine] == [
            [5, 6, 7],
            [5, 6, 7, 0, 1, 50, 51],
            [5, 6, 7, 0, 1, 50, 51, 0, 1, 52],
        ]
        assert [request.max_new_tokens for request in mine] == [4, 20 - 4, 20 - 7]
        assert len({request.seed for request in asked}) == len({request.request_id for request in asked}) == 6
        assert shell.scheduler.ledger.tokens["trained"] == 12

    run(main())


def test_each_turn_has_the_version_of_the_weights_that_sampled_it_and_the_rollout_has_the_oldest() -> None:
    async def main() -> None:
        async def play(attempt: Attempt) -> float:
            await attempt.generate(max_new_tokens=4)
            await attempt.generate()
            return float(attempt.member_index)

        engine = NullEngine(same(2, latency_s=2.0))
        shell = make_shell(lambda context: context.members(play), engine=engine, group_size=2, async_generation_ratio=1.0)
        waiting = asyncio.ensure_future(shell.next_batch(1))
        await asyncio.sleep(1.0)
        engine.publish({}, 1)
        shell.weights_updated(1)
        batch, _ = await waiting
        (group,) = batch.groups
        assert [[turn.policy_version for turn in rollout.turns] for rollout in group.rollouts] == [[0, 1], [0, 1]]
        assert group.policy_version == 0
        advance(shell, 2)
        await close(shell)

    run(main())


def test_a_turn_for_which_no_token_is_left_is_told_and_the_attempt_can_still_be_finished() -> None:
    async def main() -> None:
        async def loop(context: LoopContext) -> list[Rollout]:
            rollouts = []
            for index in range(2):
                attempt = context.start(index)
                await attempt.generate()
                with pytest.raises(TokensUsedUp, match="response_length 8 leaves no token to sample after 7 sampled and 1 put between"):
                    await attempt.generate([9])  # type: ignore[arg-type]
                rollouts.append(attempt.finish(float(index)))
            return rollouts  # type: ignore[return-value]

        shell = make_shell(loop, engine=NullEngine(same(7)), group_size=2)
        (batch,) = await fill(shell, groups=1)
        assert [len(rollout.turns) for rollout in batch.groups[0].rollouts] == [1, 1]

    run(main())


def test_members_whose_play_runs_out_of_tokens_are_played_again_with_another_seed() -> None:
    async def main() -> None:
        seeds: list[int] = []

        async def play(attempt: Attempt) -> Score:
            seeds.append(attempt._launch.seed)
            await attempt.generate()
            await attempt.generate()
            return await attempt.score()

        shell = make_shell(lambda context: context.members(play), engine=NullEngine(same(8)), group_size=2, max_response_rounds=3)
        shell.scheduler.config = replace(shell.scheduler.config, max_resample_rounds=1)
        with pytest.raises(ResampleError, match="first tokens_used_up in domain 'math': response_length 8 leaves no token"):
            await shell.next_batch(1)
        await close(shell)
        assert len(set(seeds)) == len(seeds) == 6
        assert shell.scheduler.ledger.rejected_members == {"tokens_used_up": 5}
        assert shell.scheduler.ledger.attempts["cancelled"] == 1  # of the sibling, when the last round of the other was over

    run(main())


# ---------------------------------------------------------------- rounds, failures, refusals


def test_a_response_that_the_filter_rejects_costs_a_round_and_another_one_is_sampled() -> None:
    async def main() -> None:
        seen: list[tuple[int, int, str]] = []

        async def loop(context: LoopContext) -> list[Rollout]:
            rollouts = []
            for index in range(2):
                rollout = None
                while rollout is None:
                    attempt = context.start(index)
                    await attempt.generate()
                    rollout = attempt.finish(float(index))
                    assert attempt.verdict is not None
                    assert attempt.rollout is rollout
                    seen.append((index, attempt.sampled_tokens, attempt.verdict.reason))
                rollouts.append(rollout)
            return rollouts

        lengths = [1, 2, 5, 4]
        engine = NullEngine(lambda request: same(lengths[request.request_id])(request))
        shell = make_shell(loop, engine=engine, response=SHORT, group_size=2)
        (batch,) = await fill(shell, groups=1)
        assert seen == [(0, 1, "too_short"), (0, 2, "too_short"), (0, 5, "kept"), (1, 4, "kept")]
        assert shell.scheduler.ledger.rejected_members == {"too_short": 2}
        assert records(shell)[0].attempts == 4
        assert [rollout.sampled_tokens for rollout in batch.groups[0].rollouts] == [5, 4]

    run(main())


@pytest.mark.parametrize("is_caught", [True, False])
def test_after_max_response_rounds_tries_a_member_can_be_started_no_more(is_caught: bool) -> None:
    async def main() -> None:
        tries = 0

        async def loop(context: LoopContext) -> None:
            nonlocal tries
            try:
                while True:
                    attempt = context.start(0)
                    tries += 1
                    await attempt.generate()
                    assert attempt.finish(1.0) is None
            except RoundsUsedUp:
                if not is_caught:
                    raise
            assert 0 in context.missing_members

        shell = make_shell(loop, engine=NullEngine(same(1)), response=SHORT, max_response_rounds=3, max_resample_rounds=2)
        with pytest.raises(ResampleError, match="invalid/response_retries 2; responses rejected: too_short 6"):
            await shell.next_batch(1)
        await close(shell)
        assert tries == 6

    run(main())


@pytest.mark.parametrize("is_caught", [True, False])
def test_a_generation_that_the_engine_loses_is_told_and_another_attempt_may_follow(is_caught: bool) -> None:
    async def main() -> None:
        engine = NullEngine(same(2, error=lambda request: "out of memory" if request.request_id == 0 else None))
        told: list[tuple[str, str, bool]] = []

        async def loop(context: LoopContext) -> Sequence[Rollout] | None:
            if context.group_id:
                return await context.members()
            attempt = context.start(0)
            try:
                await attempt.generate()
            except AttemptFailed as error:
                told.append((error.failure.reason, str(error), attempt.is_open))
                if not is_caught:
                    raise
            return await context.members()

        shell = make_shell(loop, engine=engine)
        (batch,) = await fill(shell, groups=1)
        reasons = [record.reason for record in records(shell)]
        if is_caught:
            assert reasons == ["kept"]
            assert 0 not in [rollout.attempt_id for rollout in batch.groups[0].rollouts]
        else:
            assert sorted(reasons) == ["engine_error", "kept"]
            assert shell.source.returned == ["t0"]  # type: ignore[attr-defined]
        assert shell.scheduler.ledger.attempts["failed"] == 1
        assert told[0] == ("engine_error", "engine_error: GenerationError: out of memory", False)

    run(main())


def test_an_engine_that_cancels_a_request_of_its_own_accord_has_failed_on_it() -> None:
    async def main() -> None:
        engine = NullEngine(same(2))
        reasons: list[str] = []

        async def loop(context: LoopContext) -> Sequence[Rollout] | None:
            attempt = context.start(0)
            under_way = asyncio.ensure_future(attempt.generate())
            await asyncio.sleep(0.5)
            attempt._handle.future.cancel()  # type: ignore[union-attr]
            with pytest.raises(AttemptFailed, match="the engine cancelled it"):
                await under_way
            reasons.append(context.why_nothing()[0])
            return await context.members()

        shell = make_shell(loop, engine=engine)
        await shell.next_batch(1)
        await shell.close()
        assert reasons == ["engine_error"]
        assert shell.scheduler.ledger.attempts["failed"] == 1

    run(main())


def test_case_86_a_request_that_can_never_be_served_is_a_counted_failure_told_once_in_words() -> None:
    async def main() -> None:
        engine = NarrowEngine(same(2), max_length=11)
        caught: list[str] = []

        async def loop(context: LoopContext) -> Sequence[Rollout] | None:
            attempt = context.start(0)
            with pytest.raises(AttemptFailed) as refused:
                await attempt.generate(np.arange(20))
            caught.append(refused.value.failure.reason)
            return await context.members()

        shell = make_shell(loop, engine=engine)
        await fill(shell, groups=2)
        assert set(caught) == {"request_refused"}
        assert shell.scheduler.ledger.rejected_members == {"request_refused": len(caught)}
        assert [message for message in warnings(shell) if "20 + 8 tokens do not fit into 11" in message] == warnings(shell)
        assert len(warnings(shell)) == 1

    run(main())


def one_long_prompt(i: int) -> Task:
    """Every third prompt is the same one, and too long."""
    return replace(make_task("long"), prompt_ids=np.arange(50)) if i % 3 == 1 else make_task(f"t{i}")


@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize("redundancy", [0, 1])
@pytest.mark.parametrize("has_loop", [True, False])
def test_case_86_an_over_long_prompt_loses_its_group_and_other_prompts_fill_the_batch(
    has_loop: bool, redundancy: int, ratio: float
) -> None:
    async def main() -> None:
        source = ListTasks(make=one_long_prompt)
        shell = make_shell(
            RolloutLoop() if has_loop else None,
            engine=NarrowEngine(same(2), max_length=20),
            source=source,
            scorer=FunctionScorer(lambda call: reward(float(call % 3 == 0))),
            group_size=3,
            redundancy=redundancy,
            async_generation_ratio=ratio,
            quarantine_after=2,
        )
        batches = await fill(shell, batches=4)
        assert all(len(batch.groups) == 2 for batch in batches)
        assert "long" not in {group.task.task_id for batch in batches for group in batch.groups}
        lost = [record for record in records(shell) if record.task_id == "long"]
        assert [(record.outcome, record.category, record.reason) for record in lost] == [("dropped", "invalid", "response_retries")] * 2
        assert sum(record.sampled_tokens for record in lost) == 0
        assert shell.scheduler.prompts.quarantined == {"long": "response_retries"}
        assert "long" not in source.returned
        told = [message for message in warnings(shell) if "quarantine" not in message]
        assert told == ["domain 'math': request_refused for an attempt at task 'long': RequestRefused: 50 + 8 tokens do not fit into 20 "
                        "(told once, counted from here on)"]  # fmt: skip
        assert set(shell.scheduler.ledger.rejected_members) == {"request_refused"}
        if not has_loop:
            assert [record.attempts for record in lost] == [3 + redundancy] * 2  # nothing is tried again
            assert shell.scheduler.ledger.late_results == 0

    run(main())


@pytest.mark.parametrize("has_loop", [True, False])
def test_when_no_prompt_can_be_served_a_bound_ends_the_run_with_the_reason_in_words(has_loop: bool) -> None:
    async def main() -> None:
        shell = make_shell(RolloutLoop() if has_loop else None, engine=NarrowEngine(max_length=9), max_resample_rounds=2)
        with pytest.raises(ResampleError, match=r"first request_refused in domain 'math': RequestRefused: 3 \+ 8 tokens do not fit into 9"):
            await shell.next_batch(2)
        await close(shell)

    run(main())


@pytest.mark.parametrize("has_loop", [True, False])
def test_an_engine_that_is_broken_as_a_whole_ends_the_run_with_its_error(has_loop: bool) -> None:
    async def main() -> None:
        engine = NullEngine(same(2, latency_s=5.0))
        shell = make_shell(RolloutLoop() if has_loop else None, engine=engine)
        waiting = asyncio.ensure_future(shell.next_batch(2))
        await asyncio.sleep(1.0)
        engine.break_down(MemoryError("no slot left"))
        with pytest.raises(GenerationError, match="no slot left"):
            await waiting
        await close(shell)

    run(main())


def test_a_scorer_that_is_broken_as_a_whole_ends_the_run_with_its_error() -> None:
    async def main() -> None:
        def answer(call: int) -> Score:
            raise RewardError("no worker can be started")

        shell = make_shell(RolloutLoop(), scorer=FunctionScorer(answer))
        with pytest.raises(RewardError, match="no worker can be started"):
            await shell.next_batch(2)
        await close(shell)

    run(main())


def test_a_response_that_is_rejected_is_sampled_anew_and_one_that_machinery_lost_with_the_same_seed() -> None:
    async def main() -> None:
        seeds: list[int] = []

        async def loop(context: LoopContext) -> None:
            for end in ("fail", "fail", "reject", "cancel", "none"):
                attempt = context.start(0)
                seeds.append(attempt._launch.seed)
                await attempt.generate()
                if end == "none":
                    attempt.finish(None)
                elif end == "cancel":
                    attempt.cancel()
                else:
                    getattr(attempt, end)(f"{end}ed")
            context.give_up("enough")

        shell = make_shell(loop, max_resample_rounds=1, max_response_rounds=9)
        with pytest.raises(ResampleError, match="invalid/enough 1"):
            await shell.next_batch(1)
        await close(shell)
        assert seeds[0] == seeds[1] == seeds[2]
        assert len(set(seeds)) == 3
        attempts = shell.scheduler.ledger.attempts
        assert (attempts["failed"], attempts["cancelled"], attempts["rejected"]) == (3, 1, 1)
        assert shell.scheduler.ledger.rejected_members == {"failed": 2, "rejected": 1, "reward_missing": 1}
        assert [message.split(" for ")[0] for message in warnings(shell)] == ["domain 'math': failed", "domain 'math': reward_missing"]

    run(main())


# ---------------------------------------------------------------- what a loop answers


async def dropped_by(loop: Run, **settings: Any) -> tuple[LocalShell, Any]:
    """A run of one group; its record."""
    shell = make_shell(loop, max_resample_rounds=1, **{"engine": NullEngine(same(2)), "group_size": 2, **settings})
    with pytest.raises(ResampleError):
        await shell.next_batch(1)
    await close(shell)
    (record,) = records(shell)
    return shell, record


async def nothing(context: LoopContext) -> None:
    pass


async def rejected_once(context: LoopContext) -> None:
    attempt = context.start(1)
    await attempt.generate()
    attempt.finish(1.0)


async def failed_and_repaired(context: LoopContext) -> None:
    context.start(0).fail("tool_broke")
    assert await context.members() is not None


async def says_why(context: LoopContext) -> None:
    context.start(0).fail("tool_broke")
    context.give_up("too_old", "the page is from 1994")


@pytest.mark.parametrize(
    ("loop", "reason"),
    [(nothing, "loop_returned_none"), (rejected_once, "too_short"), (failed_and_repaired, "loop_returned_none"), (says_why, "too_old")],
)
def test_none_gives_the_group_up_by_the_best_reason_that_there_is(loop: Run, reason: str) -> None:
    async def main() -> None:
        shell, record = await dropped_by(loop, response=SHORT if loop is rejected_once else None)
        assert (record.outcome, record.category, record.reason, record.source) == ("dropped", "invalid", reason, "loop")
        if loop is says_why:
            assert any("too_old: the page is from 1994" in message for message in warnings(shell))

    run(main())


class ForbiddenFilter:
    is_opaque = False

    def judge(self, given: object) -> Verdict:
        raise AssertionError("judged twice")


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("is_kept", [True, False])
def test_a_group_that_its_loop_has_judged_is_never_judged_again(is_kept: bool, count: int) -> None:
    async def main() -> None:
        async def loop(context: LoopContext) -> Judged:
            rollouts = await context.members()
            assert rollouts is not None
            verdict = Verdict.kept() if is_kept else Verdict.dropped("dull", "low_information", evidence={"n": float(count)})
            return Judged(rollouts=rollouts[:count], verdict=verdict)

        shell = make_shell(loop, group_size=2, max_resample_rounds=1)
        object.__setattr__(shell.scheduler.filters["math"], "query", ForbiddenFilter())
        if is_kept and count == 2:
            batch, _ = await shell.next_batch(1)
            assert len(batch.groups[0].rollouts) == 2
            advance(shell, 1)
        else:
            with pytest.raises(ResampleError):
                await shell.next_batch(1)
        await close(shell)
        (record,) = records(shell)
        if is_kept:
            assert record.reason == ("kept" if count == 2 else "response_count")
        else:
            assert (record.category, record.reason, record.source, record.evidence) == (
                "low_information",
                "dull",
                "loop",
                {"n": float(count)},
            )
            assert shell.scheduler.acceptance_rate == 0.0
        assert shell.scheduler.ledger.rejected_members.get("loop_left_out", 0) == 2 - count

    run(main())


def test_another_number_of_rollouts_than_the_group_size_is_told_once_and_counted() -> None:
    async def main() -> None:
        async def loop(context: LoopContext) -> Sequence[Rollout] | None:
            rollouts = await context.members()
            return None if rollouts is None else rollouts[1:]

        shell = make_shell(loop, max_resample_rounds=3, quarantine_after=None)
        with pytest.raises(ResampleError, match="invalid/response_count 6; .*first response_count .*got 3 rollouts where 4 were expected"):
            await shell.next_batch(2)
        await close(shell)
        assert len([message for message in warnings(shell) if "response_count" in message and "told once" in message]) == 1
        assert shell.scheduler.ledger.rejected_members == {"loop_left_out": 6}

    run(main())


@pytest.mark.parametrize("additional", [0, 2])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_with_additional_prompts_any_number_from_min_members_on_is_a_whole_group(count: int, additional: int) -> None:
    async def main() -> None:
        shell = make_shell(
            lambda context: context.members(count=count),
            query=NO_FILTER,
            min_members=2,
            max_additional_running_prompts=additional,
            max_resample_rounds=1,
        )
        if count == 4 or (count >= 2 and additional):
            (batch,) = await fill(shell, groups=1)
            assert len(batch.groups[0].rollouts) == count
        else:
            with pytest.raises(ResampleError, match="response_count"):
                await shell.next_batch(1)
            await close(shell)

    run(main())


def mutated(rollouts: list[Rollout], how: str) -> Any:
    first = rollouts[0]
    shorter = replace(first.turns[0], token_ids=first.turns[0].token_ids[:1])
    match how:
        case "foreign":
            return [make_rollout(attempt_id=first.attempt_id, member_index=0, group_id=99), *rollouts[1:]]
        case "other attempt":
            return [replace(first, attempt_id=999), *rollouts[1:]]
        case "no such member":
            return [replace(first, member_index=7), *rollouts[1:]]
        case "other task":
            return [replace(first, task_id="t999"), *rollouts[1:]]
        case "twice":
            return [first, first]
        case "tokens":
            return [replace(first, turns=(shorter,)), *rollouts[1:]]
        case "same number of other tokens":
            return [replace(first, turns=(replace(first.turns[0]),)), *rollouts[1:]]
        case "finish reason":
            return [replace(first, finish_reason="length"), *rollouts[1:]]
        case "not finite":
            return [replace(first, reward=math.nan), *rollouts[1:]]
        case "text":
            return "nonsense"
        case "one":
            return first
        case "verdict":
            return Judged(rollouts=rollouts, verdict=True)  # type: ignore[arg-type]
        case _:
            return Judged(rollouts=[1, 2], verdict=Verdict.kept())  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("foreign", "must return rollouts of its own group 0"),
        ("other attempt", "must return rollouts of its own group 0"),
        ("no such member", "must return rollouts of its own group 0"),
        ("other task", "must return rollouts of its own group 0"),
        ("twice", "each member once"),
        ("tokens", "not what was sampled"),
        ("same number of other tokens", "not what was sampled"),
        ("finish reason", "not what was sampled"),
        ("not finite", "expected a finite reward"),
        ("text", "expected the rollouts of group 0"),
        ("one", "expected the rollouts of group 0"),
        ("verdict", "to be a Verdict"),
        ("numbers", "expected the rollouts of group 0"),
    ],
)
def test_an_answer_that_is_none_ends_the_run_with_the_story_of_the_group(how: str, message: str) -> None:
    async def main() -> None:
        async def loop(context: LoopContext) -> Any:
            rollouts = await context.members()
            assert rollouts is not None
            return mutated(rollouts, how)

        shell = make_shell(loop)
        with pytest.raises(LoopError, match=rf"{message}[\s\S]*group 0, task 't0'"):
            await shell.next_batch(1)
        await close(shell)

    run(main())


def test_a_loop_may_change_rewards_and_metrics() -> None:
    async def main() -> None:
        async def loop(context: LoopContext) -> list[Rollout]:
            rollouts = await context.members()
            assert rollouts is not None
            return [replace(one, reward=10.0 * one.member_index, metrics={"mine": 1.0}) for one in reversed(rollouts)]

        shell = make_shell(loop, scorer=FunctionScorer(lambda call: reward(1.0)))
        (batch,) = await fill(shell, groups=1)
        assert batch.groups[0].rewards.tolist() == [0.0, 10.0, 20.0, 30.0]
        assert batch.groups[0].rollouts[0].metrics == {"mine": 1.0}

    run(main())


def test_a_member_that_is_started_again_is_taken_out_of_the_group_and_sampled_anew() -> None:
    async def main() -> None:
        async def loop(context: LoopContext) -> Sequence[Rollout] | None:
            first = await context.member(0)
            assert context.missing_members == [1, 2, 3]
            second = await context.member(0)
            assert first is not None
            assert second is not None
            assert first.attempt_id != second.attempt_id
            rest = [await context.member(index) for index in (1, 2, 3)]
            return [second, *[one for one in rest if one is not None]]

        shell = make_shell(loop)
        await fill(shell, groups=1)
        assert shell.scheduler.ledger.rejected_members == {"loop_rejected": 1}

    run(main())


# ---------------------------------------------------------------- user code that breaks


async def raises(context: LoopContext) -> None:
    await asyncio.sleep(0.1)
    raise ZeroDivisionError("the judge fell over")


async def raises_in_a_group(context: LoopContext) -> None:
    async def tool() -> None:
        await asyncio.sleep(0.2)
        raise ZeroDivisionError("the judge fell over")

    async with asyncio.TaskGroup() as group:
        group.create_task(context.members())
        group.create_task(tool())


async def raises_in_play(context: LoopContext) -> Sequence[Rollout] | None:
    async def play(attempt: Attempt) -> float:
        await attempt.generate()
        raise ZeroDivisionError("the judge fell over")

    return await context.members(play)


async def exits(context: LoopContext) -> None:
    raise SystemExit("the judge fell over")


@pytest.mark.parametrize("loop", [raises, raises_in_a_group, raises_in_play, exits])
def test_an_exception_in_a_loop_is_told_once_with_the_story_and_counted_and_the_run_goes_on_until_a_bound_acts(loop: Run) -> None:
    async def main() -> None:
        broken = itertools.count()

        async def sometimes(context: LoopContext) -> Any:
            return await loop(context) if next(broken) < 3 else await context.members()

        shell = make_shell(sometimes)
        await fill(shell)
        assert shell.scheduler.ledger.rejected_groups == {("invalid", "loop_error"): 3}
        (message,) = warnings(shell)
        assert re.search(r"loop_error: \w+: the judge fell over \(.*test_loops.py:\d+ in \w+\)[\s\S]*group \d, task 't\d'", message)

        shell = make_shell(loop, max_resample_rounds=2)
        with pytest.raises(ResampleError, match="invalid/loop_error 4.*the judge fell over.*put the rollout loop right"):
            await shell.next_batch(2)
        await close(shell)

    run(main())


def test_misuse_of_a_context_raises_in_the_loop_and_costs_one_group() -> None:
    async def main() -> None:
        told: list[str] = []

        async def loop(context: LoopContext) -> None:
            async def expect(action: Callable[[], Any]) -> None:
                try:
                    result = action()
                    if asyncio.iscoroutine(result):
                        await result
                except LoopError as error:
                    told.append(str(error))

            attempt = context.start(0)
            await expect(lambda: context.start(0))
            await expect(lambda: context.start(4))
            await expect(lambda: context.members(count=5))
            await expect(lambda: attempt.finish(1.0))
            await expect(lambda: attempt.generate(np.zeros((2, 2))))
            await expect(lambda: attempt.generate(max_new_tokens=0))
            under_way = asyncio.ensure_future(attempt.generate())
            await asyncio.sleep(0)
            await expect(attempt.generate)
            await expect(lambda: attempt.finish(1.0))
            await under_way
            assert attempt.finish(1.0) is not None
            await expect(lambda: attempt.finish(1.0))
            await expect(attempt.score)
            await expect(attempt.cancel)
            context.start(9)

        shell, record = await dropped_by(loop, group_size=4)
        expected = [
            "member 0 of group 0 is being tried",
            "a member_index from 0 to 3, got 4",
            "a count from 1 to 4, got 5",
            "expected a generation before attempt 0",
            "one row of token ids, got float64 of shape (2, 2)",
            "max_new_tokens of at least 1, got 0",
            "attempt 0 of group 0 is being generated - await that before you generate",
            "await that before you finish",
            *["attempt 0 of group 0 has ended"] * 3,
        ]
        assert len(told) == len(expected)
        for message, part in zip(told, expected, strict=True):
            assert part in message
        assert record.reason == "loop_error"
        assert "LoopError: expected a member_index from 0 to 3, got 9" in warnings(shell)[0]

    run(main())


def test_a_loop_that_catches_what_its_play_raised_may_begin_its_members_anew() -> None:
    async def main() -> None:
        async def loop(context: LoopContext) -> Sequence[Rollout] | None:
            with pytest.raises(ZeroDivisionError):
                await raises_in_play(context)
            assert context.missing_members == [0, 1, 2, 3]
            return await context.members()

        shell = make_shell(loop)
        await fill(shell, groups=1)
        assert set(shell.scheduler.ledger.rejected_groups) <= {("low_information", "no_spread")}

    run(main())


@pytest.mark.parametrize("has_loop", [True, False])
@pytest.mark.parametrize("min_members", [1, 2, 3])
def test_members_whose_rounds_are_used_up_leave_a_group_of_survivors(min_members: int, has_loop: bool) -> None:
    async def main() -> None:
        engine = NullEngine(same(2, error=lambda request: "lost" if request.request_id % 4 > 1 else None))
        shell = make_shell(
            RolloutLoop() if has_loop else None,
            engine=engine,
            query=NO_FILTER,
            min_members=min_members,
            max_response_rounds=1,
            max_resample_rounds=1,
        )
        if min_members == 3:
            with pytest.raises(ResampleError, match="invalid/response_retries 1"):
                await shell.next_batch(1)
            await close(shell)
        else:
            (batch,) = await fill(shell, groups=1)
            assert [rollout.member_index for rollout in batch.groups[0].rollouts] == [0, 1]

    run(main())


def test_what_is_no_reward_is_a_missing_reward_and_another_response_is_sampled() -> None:
    async def main() -> None:
        answers_given: list[Any] = [None, math.nan, "good", 1, True, np.float32(0.5), 0.0]

        async def loop(context: LoopContext) -> Sequence[Rollout] | None:
            async def play(attempt: Attempt) -> Any:
                await attempt.generate()
                return answers_given.pop(0)

            return [one for index in range(4) if (one := await context.member(index, play)) is not None]

        shell = make_shell(loop)
        (batch,) = await fill(shell, groups=1)
        assert batch.groups[0].rewards.tolist() == [1.0, 1.0, 0.5, 0.0]
        assert shell.scheduler.ledger.rejected_members == {"reward_missing": 1, "reward_not_finite": 1, "reward_type": 1}

    run(main())


# ---------------------------------------------------------------- cancels, time, the end


async def stubborn(context: LoopContext) -> Sequence[Rollout] | None:
    for _ in range(100):
        try:
            await asyncio.sleep(1.0)
        except asyncio.CancelledError:
            pass
    return await context.members()


async def endless(context: LoopContext) -> None:
    await asyncio.get_running_loop().create_future()


async def hangs_in_cleanup(context: LoopContext) -> None:
    try:
        await endless(context)
    finally:
        await asyncio.sleep(50.0)


async def hangs_in_the_engine(context: LoopContext) -> Sequence[Rollout] | None:
    return await context.members()


@pytest.mark.parametrize("loop", [stubborn, endless, hangs_in_cleanup, hangs_in_the_engine])
def test_a_loop_that_does_not_end_costs_its_group_and_nobody_waits_for_it(loop: Run) -> None:
    async def main() -> None:
        first = itertools.count()

        async def one_of_them(context: LoopContext) -> Any:
            return await loop(context) if next(first) == 0 else await context.members()

        endless_requests = {0, 1, 2, 3} if loop is hangs_in_the_engine else set()
        engine = NullEngine(same(2, latency_s=lambda request: math.inf if request.request_id in endless_requests else 1.0))
        shell = make_shell(one_of_them, engine=engine, group_timeout_s=10.0)
        batch, _ = await shell.next_batch(2)
        assert asyncio.get_running_loop().time() == 11.0
        assert records(shell)[0].reason == "group_timeout"
        assert 0 not in [group.group_id for group in batch.groups]
        advance(shell, 1)
        await close(shell)
        told = [message for message in warnings(shell) if "did not end within 2 s of their cancel (groups 0)" in message]
        assert bool(told) == (loop in (stubborn, hangs_in_cleanup))

    run(main())


def test_a_loop_that_goes_on_after_its_cancel_is_told_that_its_group_has_left() -> None:
    async def main() -> None:
        told: list[BaseException] = []

        async def loop(context: LoopContext) -> Sequence[Rollout] | None:
            attempt, other = context.start(0), context.start(1)
            try:
                await attempt.generate()
            except asyncio.CancelledError:
                assert context.is_closed
                for action in (
                    lambda: context.start(2),
                    lambda: attempt.finish(1.0),
                    lambda: other.fail("late"),
                    lambda: context.start(0),
                ):
                    try:
                        action()
                    except GroupClosed as error:
                        told.append(error)
            return []  # nobody looks at it

        shell = make_shell(loop, engine=NullEngine(same(2, latency_s=math.inf), cancel_latency_s=0.5), group_timeout_s=3.0)
        shell.scheduler.config = replace(shell.scheduler.config, max_resample_rounds=1)
        with pytest.raises(ResampleError, match="group_timeout"):
            await shell.next_batch(1)
        await close(shell)
        assert len(told) == 4
        assert shell.scheduler.ledger.attempts["cancelled"] == 2

    run(main())


def test_a_full_batch_cancels_the_loops_that_still_run_at_once() -> None:
    async def main() -> None:
        def latency(request: GenerationRequest) -> float:
            return 0.5 if request.request_id < 4 else 1.0 + request.request_id / 1000 if request.request_id < 12 else 100.0

        # the first group is judged slowly, the next two make the batch, the others are being generated
        scorer = FunctionScorer(lambda call: alternating(call) if call >= 4 else asyncio.sleep(60.0, reward(1.0)))
        engine = NullEngine(same(4, latency_s=latency), cancel_latency_s=0.3)
        shell = make_shell(RolloutLoop(), engine=engine, scorer=scorer, max_additional_running_prompts=4)
        shell.scheduler._judged, shell.scheduler._kept = 30, 5  # a poor acceptance rate so far: groups are launched ahead
        batch, _ = await shell.next_batch(2)
        assert [group.group_id for group in batch.groups] == [1, 2]
        assert asyncio.get_running_loop().time() < 1.1
        await asyncio.sleep(0.4)
        assert engine.open_requests == 0
        assert scorer.cancelled == 4
        assert not shell._loop_tasks
        advance(shell, 1)
        await close(shell)
        ledger = shell.scheduler.ledger
        assert (ledger.groups["cancelled"], ledger.attempts["cancelled"], ledger.attempts["trained"]) == (4, 16, 8)

    run(main())


def test_an_attempt_that_a_loop_forgets_is_cancelled_when_its_group_is_judged() -> None:
    async def main() -> None:
        forgotten: list[asyncio.Future[Any]] = []

        async def loop(context: LoopContext) -> list[Rollout]:
            rollouts = [await context.member(index) for index in range(4)]
            forgotten.append(asyncio.ensure_future(context.start(4).generate()))
            context.start(5)
            await asyncio.sleep(0.5)
            return [one for one in rollouts if one is not None]

        engine = NullEngine(same(2, latency_s=lambda request: 2.0), cancel_latency_s=1.0)
        shell = make_shell(loop, engine=engine, redundancy=2)
        await fill(shell, groups=1)
        assert shell.scheduler.ledger.attempts["cancelled"] == 2
        assert shell.scheduler.ledger.tokens["late"] == 1
        assert isinstance((await asyncio.gather(*forgotten, return_exceptions=True))[0], GroupClosed)

    run(main())


def test_a_generation_that_a_loop_times_out_is_a_cancelled_attempt_and_another_may_follow() -> None:
    async def main() -> None:
        async def loop(context: LoopContext) -> Sequence[Rollout] | None:
            attempt = context.start(0)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(attempt.generate(), 1.0)
            assert not attempt.is_open
            return await context.members()

        engine = NullEngine(same(4, latency_s=lambda request: 40.0 if request.request_id == 0 else 1.0), cancel_latency_s=15.0)
        shell = make_shell(loop, engine=engine)
        await shell.next_batch(1)
        advance(shell, 1)
        await asyncio.sleep(20.0)
        await close(shell)
        ledger = shell.scheduler.ledger
        assert (ledger.attempts["cancelled"], ledger.tokens["late"], ledger.rejected_members) == (1, 1, {})

    run(main())


def test_a_loop_that_awaits_something_cancelled_has_failed_and_its_group_is_replaced() -> None:
    async def main() -> None:
        first = itertools.count()

        async def loop(context: LoopContext) -> Sequence[Rollout] | None:
            if next(first) == 0:
                other = asyncio.ensure_future(asyncio.sleep(5.0))
                other.cancel()
                await other
            return await context.members()

        shell = make_shell(loop)
        await fill(shell)
        assert shell.scheduler.ledger.rejected_groups == {("invalid", "loop_error"): 1}
        assert "awaited something that was" in warnings(shell)[0]

    run(main())


def test_members_that_swallow_their_cancel_are_not_played_again_when_the_group_is_lost() -> None:
    async def main() -> None:
        async def play(attempt: Attempt) -> float:
            try:
                await attempt.generate()
            except asyncio.CancelledError:
                pass
            return 0.0

        engine = NullEngine(
            same(
                2,
                latency_s=lambda request: 9.0 if request.request_id in (1, 2) else 1.0,
                error=lambda request: None if request.request_id in (1, 2) else "lost",
            )
        )
        shell = make_shell(lambda context: context.members(play), engine=engine, group_size=3, max_response_rounds=2, max_resample_rounds=1)
        with pytest.raises(ResampleError, match="response_retries"):
            await shell.next_batch(1)
        assert asyncio.get_running_loop().time() == 2.0
        await close(shell)
        assert records(shell)[0].attempts == 4

    run(main())


class RestlessHandle(NullHandle):
    """While somebody reads how far it is, it goes on: as with an engine that samples in a thread of its own."""

    __slots__ = ()

    @property
    def sampled_tokens(self) -> int:
        self.future.get_loop()._now += 0.3  # type: ignore[attr-defined]
        return NullHandle.sampled_tokens.__get__(self)  # type: ignore[no-any-return]


def test_tokens_that_an_engine_samples_while_an_attempt_is_let_go_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.generation.null.NullHandle", RestlessHandle)

    async def main() -> None:
        async def loop(context: LoopContext) -> None:
            for index, end in enumerate(("cancel", "fail", "time_out", "forget", "return")):
                attempt = context.start(index)
                under_way = asyncio.ensure_future(attempt.generate())
                await asyncio.sleep(3.0)
                if end == "time_out":
                    under_way.cancel()
                elif end not in ("forget", "return"):
                    getattr(attempt, end)(*["broken"] * (end == "fail"))
                await asyncio.wait([under_way], timeout=0.1)

        engine = NullEngine(same(64, latency_s=20.0), cancel_latency_s=1.0)
        shell = make_shell(loop, engine=engine, group_size=5, response_length=64, max_resample_rounds=1)
        with pytest.raises(ResampleError, match="broken"):
            await shell.next_batch(1)
        await shell.close()
        everything_left(shell)
        assert shell.scheduler.ledger.tokens["late"] > 0

    run(main())


def test_closing_with_loops_under_way_is_bounded_and_returns_their_tasks() -> None:
    async def main() -> None:
        source = ListTasks(make=lambda i: make_task(f"t{i}"))
        shell = make_shell(RolloutLoop(), engine=NullEngine(same(4, latency_s=10.0), cancel_latency_s=1.0), source=source)
        waiting = asyncio.ensure_future(shell.next_batch(3))
        await asyncio.sleep(4.0)
        await close(shell)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert sorted(source.returned) == sorted(source.drawn)
        assert not shell._loop_tasks
        assert shell.scheduler.ledger.tokens["cancelled"] == 12

    run(main())


def test_a_state_taken_with_loops_under_way_accounts_for_them_and_the_next_process_begins_with_their_prompts() -> None:
    async def main() -> None:
        def make() -> LocalShell:
            source = ListTasks(make=lambda i: make_task(f"t{i}"))
            engine = NullEngine(same(4, latency_s=10.0), cancel_latency_s=1.0)
            return make_shell(RolloutLoop(), engine=engine, source=source)

        shell = make()
        waiting = asyncio.ensure_future(shell.next_batch(2))
        await asyncio.sleep(5.0)
        state = shell.state_dict()
        assert state["scheduler"]["outstanding"] == [["t0", 0], ["t1", 0]]
        assert state["scheduler"]["ledger"]["tokens"]["cancelled"] == 8 * 2 == shell.engine.sampled_tokens("train")
        await close(shell)
        waiting.cancel()

        later = make()
        later.load_state_dict(state, {})
        batch, _ = await later.next_batch(2)
        assert [group.task.task_id for group in batch.groups] == ["t0", "t1"]
        advance(later, 1)
        await later.close()
        assert later.scheduler.ledger.total_tokens == 16 + later.engine.sampled_tokens("train")
        assert len(records(later)) == later.scheduler.ledger.groups_launched == 4

    run(main())


def test_a_shell_without_the_loop_that_its_machine_wants_says_so() -> None:
    async def main() -> None:
        shell = make_shell(None, has_user_loop=True)
        with pytest.raises(SluiceError, match="give it user_loop"):
            await shell.next_batch(1)
        await shell.close()

    run(main())


def test_what_loops_have_done_is_measured_however_they_score() -> None:
    async def main() -> None:
        async def loop(context: LoopContext) -> Sequence[Rollout] | None:
            async def play(attempt: Attempt) -> float:
                await attempt.generate(max_new_tokens=4)
                await asyncio.sleep(1.0)
                await attempt.generate()
                await asyncio.sleep(3.0)
                return float(attempt.member_index)

            context.meta["seen"] = True
            return await context.members(play)

        shell = make_shell(loop, engine=NullEngine(same(2, latency_s=2.0)))
        assert shell.loop_metrics() == {"loops/groups": 0, "loops/running": 0, "loops/attempts": 0}
        await fill(shell, groups=2)
        assert shell.loop_metrics() == {
            "loops/groups": 2,
            "loops/running": 0,
            "loops/attempts": 8,
            "loops/generating_seconds/mean": 4.0,
            "loops/scoring_seconds/mean": 3.0,
        }
        assert make_shell(None).loop_metrics() == {}

    run(main())


# ---------------------------------------------------------------- loading


class NoArguments(RolloutLoop):
    pass


class WithConfig:
    def __init__(self, config: Any) -> None:
        self.config = config

    async def run(self, context: LoopContext) -> None:
        return None


class NotAsync:
    def run(self, context: LoopContext) -> None:
        return None


class NoRun:
    pass


class NoContext:
    async def run(self) -> None:
        return None


class Raising(RolloutLoop):
    def __init__(self) -> None:
        raise ZeroDivisionError("no judge to talk to")


class TwoArguments(RolloutLoop):
    def __init__(self, config: Any, other: Any) -> None:
        pass


def test_a_loop_is_made_with_the_configuration_or_with_nothing() -> None:
    assert isinstance(load_loop(f"{__name__}.NoArguments", "config"), NoArguments)
    loop: Any = load_loop(f"{__name__}.WithConfig", "config")
    assert loop.config == "config"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("Loop", "expected an import path package.module.Class, got 'Loop'"),
        ("no_such_package.Loop", "cannot be imported (ModuleNotFoundError: No module named 'no_such_package'"),
        (f"{__name__}.Missing", "cannot be imported (AttributeError"),
        ("tests.filters.exits_on_import.Loop", "cannot be imported (SystemExit"),
        (f"{__name__}.make_shell", "expected a class, but"),
        (f"{__name__}.NoRun", "needs `async def run(self, context)`, got none"),
        (f"{__name__}.NotAsync", "needs `async def run(self, context)`, got a run that is not async"),
        (f"{__name__}.NoContext", "needs `async def run(self, context)`, got run()"),
        (f"{__name__}.Raising", "cannot be made (ZeroDivisionError: no judge to talk to"),
        (f"{__name__}.TwoArguments", "cannot be made (TypeError"),
    ],
)
def test_a_loop_that_cannot_be_loaded_is_told_before_anything_is_sampled(path: str, message: str) -> None:
    with pytest.raises(LoopError, match=re.escape(message)) as error:
        load_loop(path, "config")
    assert str(error.value).startswith("user_defined_rollout_loop_cls: ")


# ---------------------------------------------------------------- the guide


def documented() -> dict[str, Any]:
    """The names that the code blocks of the guide define."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL):
        exec(block, names)
    return names


def test_the_second_turn_of_the_guide_is_sampled_behind_the_question() -> None:
    async def main() -> None:
        names = documented()
        scorer = FunctionScorer(lambda call: reward(float(call % 3 == 0)))
        shell = make_shell(names["CheckYourAnswer"](), engine=NullEngine(same(4)), scorer=scorer, response_length=40)
        (batch,) = await fill(shell)
        question = encode(names["QUESTION"]).tolist()
        assert len(question) == 8
        for group in batch.groups:
            for rollout in group.rollouts:
                assert [turn.prompt_ids.tolist() for turn in rollout.turns] == [[5, 6, 7], question]

    run(main())


def test_the_rule_of_the_guide_drops_groups_that_say_the_same_and_leaves_the_others_to_the_query_filter() -> None:
    async def main() -> None:
        engine = NullEngine(
            lambda request: same(2 if request.request_id < 4 else 1 + request.request_id % 3)(request)  # the first group says the same
        )
        shell = make_shell(documented()["NoParrots"](), engine=engine)
        await fill(shell)
        dropped = [(record.group_id, record.reason, record.category) for record in records(shell) if record.outcome == "dropped"]
        assert dropped == [(0, "all_the_same", "low_information")]

    run(main())


def test_the_loop_of_the_guide_that_goes_attempt_by_attempt_stops_hopeless_groups() -> None:
    async def main() -> None:
        class Config:
            response_length = 8

        def answer(request: GenerationRequest) -> Answer:
            tokens = [2, 2] if request.request_id in (0, 1) else [request.request_id % 2]
            error = "lost" if request.request_id == 5 else None
            return Answer(
                token_ids=np.array(tokens), inference_logprobs=np.zeros(len(tokens), dtype=np.float32), latency_s=1.0, error=error
            )

        shell = make_shell(documented()["StopWhenHopeless"](Config()), engine=NullEngine(answer))
        (batch,) = await fill(shell, groups=1)
        first, second = records(shell)
        assert (first.reason, first.category, first.attempts) == ("hopeless", "low_information", 2)
        assert (second.outcome, second.attempts) == ("trained", 5)
        assert batch.groups[0].rollouts[0].metrics == {"length": 1}

    run(main())


def test_the_guide_names_every_public_call_of_context_and_attempt() -> None:
    inner = {"answered", "close", "why_nothing", "let_go"}  # between the shell and its contexts
    for cls in (LoopContext, Attempt):
        names = {name for name in vars(cls) if not name.startswith("_")} - inner
        assert [name for name in sorted(names) if f"`{name}" not in DOCS and f"await {name}" not in DOCS] == []
