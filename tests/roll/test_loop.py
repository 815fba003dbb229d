"""Loops written for ROLL on a virtual clock: as without a loop where they change nothing, accounted for whatever they do."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.config import RlvrConfig
from sluice.config.models import FilterConfig
from sluice.errors import LoopError, ResampleError
from sluice.execution import LocalShell
from sluice.execution.clock import run
from sluice.execution.loops import load_loop
from sluice.filters import RatioGuard
from sluice.generation import Answer, GenerationRequest, NullEngine, answers
from sluice.rewards.base import Score
from sluice.roll import (
    DataProto,
    InProcessStore,
    RolloutContext,
    UserDefinedRolloutLoop,
    adapt_loop,
    expand_requests,
    is_report_data_finished,
    postprocess_output_data,
    query_filter,
    response_filter,
    use_remote_store,
)
from tests.execution.test_loops import SHORT, close, fill, make_shell, records, same, warnings, whole_story
from tests.execution.test_shell import FunctionScorer, advance, alternating
from tests.execution.test_shell import reward as scored
from tests.fakes import NO_FILTER, STD_FILTER

HERE = "tests.roll.test_loop"
Process = Callable[[RolloutContext], Awaitable[Any]]


def config(*, group_size: int = 4, query: FilterConfig = STD_FILTER, response: FilterConfig | None = None, **changes: Any) -> RlvrConfig:
    resampling = {name: changes.pop(name) for name in ("min_members",) if name in changes}
    return RlvrConfig.model_validate(
        {
            "exp_name": "test",
            "model": {"path": "nowhere"},
            "tasks": {"train": [{"type": "jsonl", "path": "none.jsonl"}]},
            "rewards": {
                name: {"verifier": {"type": "exact"}, "query_filter_config": query, "response_filter_config": response}
                for name in ("math", "code")
            },
            "rollout_batch_size": 2,
            "num_return_sequences_in_group": group_size,
            "prompt_length": 5,
            "response_length": 9,
            "user_defined_rollout_loop_cls": "mine.Loop",
            "trainer": {"max_steps": 1, "learning_rate": 1e-3},
            "resampling": resampling,
            **changes,
        }
    )


class FunctionLoop(UserDefinedRolloutLoop):
    """A loop that is a function of the context."""

    def __init__(self, process: Process) -> None:
        self.process = process

    async def process_new_prompt(self, context: RolloutContext) -> Any:
        return await self.process(context)


def shell_of(
    loop: UserDefinedRolloutLoop | Process,
    *,
    expand: bool = False,
    additional: int = 0,
    min_members: int | None = None,
    query: FilterConfig = STD_FILTER,
    response: FilterConfig | None = None,
    group_size: int = 4,
    **more: Any,
) -> LocalShell:
    """additional: groups that may run beyond the batch; 0: is_use_additional_prompts is off."""
    theirs = loop if isinstance(loop, UserDefinedRolloutLoop) else FunctionLoop(loop)
    settings = config(
        group_size=group_size,
        query=query,
        response=response,
        min_members=min_members,
        is_num_return_sequences_expand=expand,
        is_use_additional_prompts=additional > 0,
    )
    more = {"max_additional_running_prompts": additional, "min_members": min_members, "group_size": group_size, **more}
    return make_shell(adapt_loop(theirs, settings, pad_token_id=3, eos_token_id=1), query=query, response=response, **more)


def left(shell: LocalShell) -> list[tuple[str, str, str | None, str]]:
    return [(record.outcome, record.reason, record.category, record.source) for record in records(shell)]


@pytest.fixture
def store() -> Iterator[InProcessStore]:
    own = InProcessStore()
    before = use_remote_store(own)
    yield own
    use_remote_store(before)
    assert not own.rows
    assert own.deleted_rows == own.put_rows > 0


# ---------------------------------------------------------------- as without a loop


@settings(max_examples=12)
@given(
    seed=st.integers(0, 1_000_000),
    one_in=st.sampled_from([0, 3, 8]),
    async_generation_ratio=st.sampled_from([0.0, 0.5, 1.0]),
    min_members=st.sampled_from([None, 2]),  # a single survivor is kept unseen, as in ROLL
    max_response_rounds=st.sampled_from([1, 2, 5]),
    truncated=st.sampled_from(["mask", "invalid", "drop_group", "keep"]),
    on_member_failure=st.sampled_from(["replace", "judge"]),
    group_timeout_s=st.sampled_from([None, 8.0]),
    response=st.sampled_from([None, SHORT]),
)
def test_the_default_loop_gives_the_same_batches_tokens_and_ledger_as_no_loop(
    seed: int, one_in: int, min_members: int | None, response: FilterConfig | None, **machine: Any
) -> None:
    roll = adapt_loop(
        UserDefinedRolloutLoop(), config(group_size=3, response=response, min_members=min_members, is_num_return_sequences_expand=True)
    )
    settings = {"min_members": min_members, "response": response, **machine}
    without = run(whole_story(None, seed, one_in, **settings))
    with_loop = run(whole_story(roll, seed, one_in, **settings))
    for what, value in without.items():
        assert with_loop[what] == value, what


@pytest.mark.parametrize("expand", [False, True])
def test_one_request_for_all_or_one_for_each_makes_whole_groups(expand: bool) -> None:
    async def main() -> None:
        shell = shell_of(UserDefinedRolloutLoop(), expand=expand, response=SHORT)
        batches = await fill(shell, batches=2)
        for batch in batches:
            for group in batch.groups:
                assert [rollout.member_index for rollout in group.rollouts] == [0, 1, 2, 3]
                assert len(set(group.rewards.tolist())) == 2
                assert all(rollout.sampled_tokens >= 3 for rollout in group.rollouts)

    run(main())


# ---------------------------------------------------------------- code as it is written for ROLL


class DropsBadFormat(UserDefinedRolloutLoop):
    """As in ROLL's guide, after changing its import line."""

    async def _generate_and_reward_impl(self, context, req, domain):  # type: ignore[no-untyped-def]
        responses = await super()._generate_and_reward_impl(context, req, domain)
        if responses is None:
            return None
        return [item for item in responses if not item.meta_info.get("invalid_format", False)]


def every_third_is_bad(call: int) -> Score:
    return Score(reward=float(call % 2), metrics={"invalid_format": float(call % 3 == 2), "length": float(call)}, failure=None)


def test_a_wrong_count_is_one_clear_message_and_a_whole_group_with_additional_prompts() -> None:
    async def main(additional: int, min_members: int | None) -> LocalShell:
        scorer = FunctionScorer(every_third_is_bad)
        shell = shell_of(
            DropsBadFormat(), additional=additional, min_members=min_members, scorer=scorer, query=NO_FILTER, on_exhausted="shrink",
            max_resample_rounds=3,
        )  # fmt: skip
        try:
            batch, _ = await shell.next_batch(2)
        except ResampleError:
            await close(shell)
            return shell
        sizes = [len(group.rollouts) for group in batch.groups]
        assert sizes == [3, 3]
        assert all(rollout.metrics["invalid_format"] == 0.0 for group in batch.groups for rollout in group.rollouts)
        advance(shell, 1)
        await close(shell)
        return shell

    strict = run(main(0, None))
    assert {entry for entry in left(strict) if entry[0] != "cancelled"} == {("dropped", "response_count", "invalid", "loop")}
    (message,) = [text for text in warnings(strict) if "response_count" in text and "told once" in text]
    assert "got 3 rollouts where 4 were expected" in message
    assert "is_use_additional_prompts" in message
    loose = run(main(4, 3))
    assert [entry[:2] for entry in left(loose) if entry[0] == "trained"] == [("trained", "kept")] * 2
    too_few = run(main(4, 4))
    assert not [entry for entry in left(too_few) if entry[0] == "trained"]


class HandMade(UserDefinedRolloutLoop):
    """A whole `_generate_and_reward_impl` of one's own, which tells nobody what it throws away."""

    rounds = 5

    async def _generate_and_reward_impl(self, context: RolloutContext, req: DataProto, domain: str) -> list[DataProto] | None:
        responses: list[DataProto] = []
        for _ in range(self.rounds):
            original_req = copy.deepcopy(req)
            data = await context.generate(req=req, domain=domain)
            if data is None:
                return None
            assert is_report_data_finished(data)
            req = postprocess_output_data(req, data, context.sequence_length)
            rewards = await context.compute_rewards(req=req, domain=domain)
            req.union(rewards)
            assert req.batch is not None
            output_count = req.batch.batch_size[0]
            assert output_count == req.meta_info["generation_config"]["num_return_sequences"]
            rejected = 0
            for item in [req[[index]] for index in range(output_count)]:
                if self.likes(item) and response_filter(item, context.pipeline_config):
                    responses.append(item)
                else:
                    rejected += 1
            if not rejected:
                break
            original_req.meta_info["generation_config"]["num_return_sequences"] = rejected
            req = original_req
        return responses

    def likes(self, item: DataProto) -> bool:
        return bool(item["response_mask"].sum() % 2 == 0)


@pytest.mark.parametrize("expand", [False, True])
def test_a_loop_that_throws_away_what_it_likes_gets_as_many_responses_as_it_asks_for(expand: bool) -> None:
    async def main() -> None:
        shell = shell_of(HandMade(), expand=expand, query=NO_FILTER)
        (batch,) = await fill(shell)
        for group in batch.groups:
            assert len(group.rollouts) == len({rollout.attempt_id for rollout in group.rollouts}) == 4
            assert all(rollout.sampled_tokens % 2 == 0 for rollout in group.rollouts)
        assert shell.scheduler.ledger.attempts["rejected"] > 0

    run(main())


def test_asking_on_and_on_is_bounded_by_the_rounds_and_gives_the_prompt_up() -> None:
    class Never(HandMade):
        rounds = 1000

        def likes(self, item: DataProto) -> bool:
            return False

    async def main() -> None:
        shell = shell_of(Never(), max_response_rounds=3, on_exhausted="shrink", max_resample_rounds=1)
        with pytest.raises(ResampleError, match="response_retries"):
            await shell.next_batch(1)
        await close(shell)
        assert records(shell)[0].attempts == 12
        assert left(shell)[0] == ("dropped", "response_retries", "invalid", "loop")

    run(main())


# ---------------------------------------------------------------- None, and what is said instead


@pytest.mark.parametrize("stage", ["before", "after_request", "after_generate", "after_rewards", "at_the_end"])
def test_none_at_any_stage_gives_the_prompt_up_and_another_one_is_drawn(stage: str) -> None:
    asked: list[int] = []

    async def process(context: RolloutContext) -> Any:
        asked.append(context.prompt_id)
        is_first = context.prompt_id == 0
        if is_first and stage == "before":
            return None
        request, domain = context.get_request_data(meta_info=context.meta_info)
        if is_first and stage == "after_request":
            return None
        async with context.do_generate_and_reward(max_concurrency=4):
            data = await context.generate(req=request, domain=domain)
            if is_first and stage == "after_generate":
                return None
            assert data is not None
            rows = postprocess_output_data(request, data, context.sequence_length)
            rows.union(await context.compute_rewards(req=rows, domain=domain))
            if is_first and stage == "after_rewards":
                return None
        return None if is_first else rows

    async def main() -> None:
        shell = shell_of(process)
        (batch,) = await fill(shell, groups=1)
        assert batch.groups[0].task.task_id == "t1"
        assert left(shell)[0] == ("dropped", "loop_returned_none", "invalid", "loop")
        assert asked == [0, 1]

    run(main())


def test_the_loop_may_say_why() -> None:
    async def process(context: RolloutContext) -> Any:
        context.give_up("too_long", "the prompt has 7 pictures")

    async def main() -> None:
        shell = shell_of(process, on_exhausted="shrink", max_resample_rounds=1)
        with pytest.raises(ResampleError, match="too_long"):
            await shell.next_batch(1)
        await close(shell)
        assert left(shell)[0] == ("dropped", "too_long", "invalid", "loop")

    run(main())


def test_what_the_query_filter_drops_is_recorded_with_its_own_reason_and_never_judged_twice() -> None:
    async def main() -> None:
        scorer = FunctionScorer(lambda call: scored(1.0 if call < 4 else float(call % 2)))
        shell = shell_of(UserDefinedRolloutLoop(), scorer=scorer, query=FilterConfig(type=f"{HERE}.Counts"))
        Counts.groups.clear()
        await fill(shell, groups=1)
        assert left(shell)[0] == ("dropped", "all_equal", "low_information", f"{HERE}.Counts")
        assert left(shell)[-1][:2] == ("trained", "kept")
        assert len(Counts.groups) == len(set(Counts.groups))

    run(main())


class Counts:
    """A query filter of the user's that says which groups it saw."""

    groups: list[int] = []  # noqa: RUF012 - one list for the test

    def judge(self, group: Any) -> Any:
        from sluice.types import Verdict

        self.groups.append(group.group_id)
        return Verdict.kept() if len(set(group.rewards.tolist())) > 1 else Verdict.dropped("all_equal", "low_information")


def test_the_guard_may_keep_what_the_query_filter_drops() -> None:
    async def main() -> None:
        settings = config()
        shell = make_shell(adapt_loop(UserDefinedRolloutLoop(), settings), scorer=FunctionScorer(lambda _: scored(1.0)))
        shell.scheduler.guard = RatioGuard(max_filter_ratio=0.5)
        (batch,) = await fill(shell, groups=1)
        assert len(batch.groups[0].rollouts) == 4

    run(main())


def test_a_group_without_rewards_is_not_kept_whatever_the_loop_says() -> None:
    async def process(context: RolloutContext) -> Any:
        request, domain = context.get_request_data()
        async with context.do_generate_and_reward():
            data = await context.generate(req=request, domain=domain)
            assert data is not None
            rows = postprocess_output_data(request, data, context.sequence_length)
            rows.union(await context.compute_rewards(req=rows, domain=domain))
        return rows

    async def main() -> None:
        scorer = FunctionScorer(lambda call: scored(None if call == 1 else float(call % 2)))
        shell = shell_of(process, scorer=scorer, on_member_failure="judge")
        (batch,) = await fill(shell, groups=1)
        assert left(shell)[0] == ("dropped", "incomplete", "invalid", "no_filter")
        assert batch.groups[0].task.task_id == "t1"

    run(main())


# ---------------------------------------------------------------- what a context says and refuses


def test_rows_have_the_columns_and_shapes_that_roll_code_reads() -> None:
    seen: list[DataProto] = []

    class Looks(UserDefinedRolloutLoop):
        async def _generate_and_reward_impl(self, context: RolloutContext, req: DataProto, domain: str) -> list[DataProto] | None:
            assert req["input_ids"].tolist() == [[3, 3, 5, 6, 7]]
            assert req["attention_mask"].tolist() == [[0, 0, 1, 1, 1]]
            assert list(req.non_tensor_batch["prompt"]) == [f"prompt of t{context.prompt_id}"]
            assert (context.domain, domain, context.is_val, context.sequence_length, context.prompt_length) == (
                "math",
                "math",
                False,
                14,
                5,
            )
            assert context.sampling_start_step == 0
            assert context.meta_info["generation_config"]["num_return_sequences"] == 4
            assert context.pipeline_config.rewards["math"].query_filter_config.type == "std_filter"
            answer = await super()._generate_and_reward_impl(context, req, domain)
            seen.extend(answer or [])
            return answer

    async def main() -> None:
        scorer = FunctionScorer(lambda call: Score(reward=call % 2 + 0.1, metrics={"invalid_format": float(call == 1)}, failure=None))
        await fill(shell_of(Looks(), scorer=scorer), groups=1)

    run(main())
    for index, row in enumerate(seen[:4]):
        assert row.batch is not None
        shapes = {name: tuple(tensor.shape) for name, tensor in row.batch.items()}
        wide = dict.fromkeys(("input_ids", "attention_mask", "position_ids", "prompt_mask", "response_mask", "scores"), (1, 14))
        assert shapes == {**wide, "response_level_rewards": (1,), "infer_logprobs": (1, 13), "prompts": (1, 5), "responses": (1, 9)}
        sampled = row.batch["response_mask"][0]
        assert row.batch["scores"].sum() == row.batch["response_level_rewards"][0] == np.float32(index % 2 + 0.1)
        assert row.batch["scores"][0].nonzero().tolist() == [[int(sampled.nonzero().max())]]
        assert int(row.batch["attention_mask"].sum()) == 3 + int(sampled.sum())
        assert not row.batch["infer_logprobs"][0][~sampled[1:]].any()
        assert row.non_tensor_batch["domain"][0] == "math"
        assert {"tags", "env_ids", "group_ids", "step_scores", "episode_scores"} <= set(row.non_tensor_batch)
        assert row.meta_info["metrics"] == {"invalid_format": float(index == 1)}
        assert row.meta_info["invalid_format"] == float(index == 1)
        assert not row.meta_info["env_timeout"]


def test_rewards_that_a_loop_changed_are_those_that_train_and_others_keep_all_their_digits() -> None:
    class Shapes(UserDefinedRolloutLoop):
        async def process_new_prompt(self, context: RolloutContext) -> Any:
            rows = await super().process_new_prompt(context)
            rows[0].batch["response_level_rewards"] += 2.0
            return [rows[:2], [rows[2:]]]

    async def main() -> None:
        scorer = FunctionScorer(lambda call: scored(call % 4 / 10))
        (batch,) = await fill(shell_of(Shapes(), scorer=scorer), groups=1)
        assert batch.groups[0].rewards.tolist() == [2.0, 0.1, 0.2, 0.3]

    run(main())


def test_the_verifier_of_another_domain_may_be_asked() -> None:
    domains: list[str] = []

    class Remembers(FunctionScorer):
        async def score(self, task: Any, response: str) -> Score:
            domains.append(task.domain)
            return await super().score(task, response)

    class Other(UserDefinedRolloutLoop):
        async def _generate_and_reward_impl(self, context: RolloutContext, req: DataProto, domain: str) -> list[DataProto] | None:
            return await super()._generate_and_reward_impl(context, req, "code")

    async def main() -> None:
        (batch,) = await fill(shell_of(Other(), scorer=Remembers(alternating)), groups=1)
        assert batch.groups[0].task.domain == "math"

    run(main())
    assert set(domains) == {"code"}


def test_aborted_requests_answer_at_once_and_their_tokens_are_counted() -> None:
    async def process(context: RolloutContext) -> Any:
        request, domain = context.get_request_data()
        requests = expand_requests(request, 4, True)
        async with context.do_generate_and_reward(max_concurrency=4):
            asked = [asyncio.create_task(context.generate(req=one, domain=domain)) for one in requests]
            await asyncio.sleep(0.5)
            assert len(context.inflight_requests) == 4
            await context.abort_running_requests()
            reports = await asyncio.gather(*asked)
            assert [is_report_data_finished(report) for report in reports] == [False] * 4
            assert [report.meta_info["output_token_ids"] for report in reports] == [[[]]] * 4
            again = await context.generate(req=request, domain=domain)
            assert again is not None
            with pytest.raises(LoopError, match="got the aborted one"):
                await context.compute_rewards(req=postprocess_output_data(request, reports[0], context.sequence_length), domain=domain)
        return None

    async def main() -> None:
        engine = NullEngine(same(tokens=3), cancel_latency_s=50.0)
        shell = shell_of(process, engine=engine, on_exhausted="shrink", max_resample_rounds=1)
        started = asyncio.get_running_loop().time()
        with pytest.raises(ResampleError, match="loop_returned_none"):
            await shell.next_batch(1)
        assert asyncio.get_running_loop().time() - started < 5
        await asyncio.sleep(100)
        await close(shell)
        assert shell.scheduler.ledger.attempts["cancelled"] >= 4

    run(main())


def test_a_shutdown_ends_loops_that_wait_and_an_engine_that_fails_is_tried_again() -> None:
    def answer(request: GenerationRequest) -> Answer:
        plain = same(tokens=3)(request)
        return replace(plain, error="it fell over") if request.request_id % 3 == 0 else plain

    async def main() -> None:
        shell = shell_of(UserDefinedRolloutLoop(), engine=NullEngine(answer), query=NO_FILTER)
        waiting = asyncio.create_task(shell.next_batch(4))
        await asyncio.sleep(2.5)
        waiting.cancel()
        await close(shell)
        assert shell.scheduler.ledger.attempts["failed"] > 0

    run(main())


WRONG: list[tuple[Callable[[RolloutContext], Awaitable[Any]], str]] = []


def wrong(says: str) -> Callable[[Process], Process]:
    def add(process: Process) -> Process:
        WRONG.append((process, says))
        return process

    return add


@wrong("expected get_request_data once")
async def twice(context: RolloutContext) -> None:
    context.get_request_data()
    context.get_request_data()


@wrong("expected generate inside `async with context.do_generate_and_reward")
async def outside(context: RolloutContext) -> None:
    await context.generate(req=context.get_request_data()[0], domain="math")


@wrong("expected do_generate_and_reward once")
async def nested(context: RolloutContext) -> None:
    async with context.do_generate_and_reward(max_concurrency=1), context.do_generate_and_reward(max_concurrency=1):
        pass


@wrong("expected a max_concurrency of at least 1, got 0")
async def none_at_once(context: RolloutContext) -> None:
    async with context.do_generate_and_reward(max_concurrency=0):
        pass


@wrong(r"expected a domain out of \['code', 'math'\], got 'maths'")
async def unknown_domain(context: RolloutContext) -> None:
    async with context.do_generate_and_reward():
        await context.generate(req=context_request(context), domain="maths")


@wrong("expected generation_config to leave the distribution as it is, got top_p = 0.9")
async def narrowed(context: RolloutContext) -> None:
    await asked(context, top_p=0.9)


@wrong(r"expected the temperature of the run \(1\) in generation_config, got 0.5")
async def cooler(context: RolloutContext) -> None:
    await asked(context, temperature=0.5)


@wrong("expected num_return_sequences of at least 1, got 0")
async def nothing(context: RolloutContext) -> None:
    await asked(context, num_return_sequences=0)


@wrong(r"expected non_tensor_batch\['rollout_id'\]")
async def nameless(context: RolloutContext) -> DataProto:
    return DataProto.from_dict({"response_level_rewards": torch.ones(4)})


@wrong("expected responses of prompt 0, got rollout_id '99'")
async def of_others(context: RolloutContext) -> DataProto:
    return DataProto.from_dict({"response_level_rewards": torch.ones(1)}, {"rollout_id": ["99"]})


@wrong("expected responses as DataProto or lists of them, got str")
async def of_another_kind(context: RolloutContext) -> list[str]:
    return ["done"]


@wrong("expected no request under way at the end of do_generate_and_reward, got 1")
async def left_running(context: RolloutContext) -> None:
    async with context.do_generate_and_reward():
        request = context_request(context)
        request.meta_info["generation_config"]["num_return_sequences"] = 1
        context.meta_info["task"] = asyncio.create_task(context.generate(req=request, domain="math"))
        await asyncio.sleep(0.01)


@wrong("ValueError: in a bad mood")
async def raises(context: RolloutContext) -> None:
    raise ValueError("in a bad mood")


def context_request(context: RolloutContext) -> DataProto:
    context._got_data = False
    tasks = context._context.task
    from sluice.roll.requests import request_of

    return request_of(tasks, prompt_length=5, pad_token_id=3, meta_info=copy.deepcopy(context.meta_info))


async def asked(context: RolloutContext, **generation_config: Any) -> None:
    request, domain = context.get_request_data(meta_info=context.meta_info)
    request.meta_info["generation_config"] |= generation_config
    async with context.do_generate_and_reward(max_concurrency=4):
        await context.generate(req=request, domain=domain)


@pytest.mark.parametrize(("process", "says"), WRONG, ids=[process.__name__ for process, _ in WRONG])
def test_what_a_loop_does_wrong_is_said_and_costs_its_group(process: Process, says: str) -> None:
    async def main() -> None:
        shell = shell_of(process, on_exhausted="shrink", max_resample_rounds=1)
        with pytest.raises(ResampleError, match=says):
            await shell.next_batch(1)
        await asyncio.sleep(10)
        await close(shell)
        assert left(shell)[0] == ("dropped", "loop_error", "invalid", "loop")

    run(main())


# ---------------------------------------------------------------- remote data


class Remote(UserDefinedRolloutLoop):
    """Makes every response remote, and never drops one."""

    def __init__(self, after: Process | None = None) -> None:
        self.after = after

    async def _generate_and_reward_impl(self, context: RolloutContext, req: DataProto, domain: str) -> list[DataProto] | None:
        rows = await super()._generate_and_reward_impl(context, req, domain)
        remote = None if rows is None else [row.to_remote() for row in rows]
        if self.after is not None:
            await self.after(context)
        return remote


@pytest.mark.parametrize("expand", [False, True])
def test_remote_responses_of_kept_and_of_dropped_groups_are_freed(store: InProcessStore, expand: bool) -> None:
    most = 0

    class Watches(Remote):
        async def process_new_prompt(self, context: RolloutContext) -> Any:
            nonlocal most
            answer = await super().process_new_prompt(context)
            most = max(most, len(store.rows))
            return answer

    async def main() -> None:
        scorer = FunctionScorer(lambda call: scored(float(call % 7 == 0)))
        shell = shell_of(Watches(), expand=expand, scorer=scorer, max_resample_rounds=500)
        batches = await fill(shell, batches=8, groups=2)
        assert {len(group.rollouts) for batch in batches for group in batch.groups} == {4}
        assert len([entry for entry in left(shell) if entry[0] == "dropped"]) > 3
        assert store.put_rows > 64
        assert most <= 2 * 4  # two groups at a time

    run(main())


@pytest.mark.parametrize("how", ["full", "timeout", "expired", "error", "none", "shutdown", "count"])
def test_remote_responses_are_freed_however_their_group_ends(store: InProcessStore, how: str) -> None:
    mine = 1 if how == "full" else 0  # the group that is looked at

    async def after(context: RolloutContext) -> None:
        if context.prompt_id != mine:
            return
        if how == "error":
            raise ValueError("in a bad mood")
        if how in ("timeout", "expired", "shutdown", "full"):
            await asyncio.sleep(1000)

    class Ends(Remote):
        async def process_new_prompt(self, context: RolloutContext) -> Any:
            answer = await super().process_new_prompt(context)
            if context.prompt_id == mine:
                return None if how == "none" else answer[:2] if how == "count" else answer
            return answer

    async def main() -> None:
        more: dict[str, Any] = {"timeout": {"group_timeout_s": 20.0}, "expired": {"async_generation_ratio": 1.0}}.get(how, {})
        if how == "full":  # the first group is dropped, after which more are launched than are needed
            more = {"additional": 2, "scorer": FunctionScorer(lambda call: scored(float(call > 3 and call % 2)))}
        shell = shell_of(Ends(after), engine=NullEngine(answers(lengths=(1, 8), latency_s=(1.0, 1.0))), **more)
        if how == "shutdown":
            waiting = asyncio.create_task(shell.next_batch(1))
            await asyncio.sleep(10)
            assert store.rows
            waiting.cancel()
        else:
            for step in range(4 if how == "expired" else 1):
                await shell.next_batch(1)
                advance(shell, step + 1)
        await close(shell)
        expected = {
            "full": ("cancelled", "batch_full"),
            "timeout": ("dropped", "group_timeout"),
            "expired": ("expired", "stale"),
            "error": ("dropped", "loop_error"),
            "none": ("dropped", "loop_returned_none"),
            "shutdown": ("cancelled", "shutdown"),
            "count": ("dropped", "response_count"),
        }
        (outcome,) = [entry[:2] for entry, record in zip(left(shell), records(shell), strict=True) if record.group_id == mine]
        assert outcome == expected[how]

    run(main())


# ---------------------------------------------------------------- loading


class SpeaksBoth(UserDefinedRolloutLoop):
    async def run(self, context: Any) -> None: ...


class NotAsync:
    def process_new_prompt(self, context: Any) -> None: ...


class WrongArgument:
    async def process_new_prompt(self, prompt: Any) -> None: ...


class TakesConfig(UserDefinedRolloutLoop):
    def __init__(self, given: Any) -> None:
        self.given = given


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("SpeaksBoth", r"has both run \(returns rollouts\) and process_new_prompt \(as in ROLL\).* - take one out"),
        ("NotAsync", r"got NotAsync\.process_new_prompt that is not async - make it async"),
        ("WrongArgument", r"is called with context=\.\.\., which it does not take"),
        ("Counts", r"needs `async def run\(self, context\)`, got none"),
    ],
)
def test_what_is_wrong_with_a_class_is_said_at_load(name: str, says: str) -> None:
    settings = config()
    with pytest.raises(LoopError, match=rf"^user_defined_rollout_loop_cls: .*{says}"):
        load_loop(f"{HERE}.{name}", settings, adapt=lambda theirs: adapt_loop(theirs, settings))


def test_a_class_may_take_the_configuration_and_needs_somebody_who_speaks_roll() -> None:
    settings = config()
    loop = load_loop(f"{HERE}.TakesConfig", settings, adapt=lambda theirs: adapt_loop(theirs, settings))
    assert loop.theirs.given is settings  # type: ignore[attr-defined]
    with pytest.raises(LoopError, match="as loops of ROLL have"):
        load_loop(f"{HERE}.TakesConfig", settings)


def test_query_filter_outside_of_a_loop_knows_no_group() -> None:
    rows = DataProto.from_dict({"response_level_rewards": torch.tensor([1.0, 1.0])}, {"domain": ["math", "math"]})
    assert not query_filter([rows], config())


def test_requests_are_copies_and_responses_any_nesting(  # the two functions alone
) -> None:
    from sluice.roll import expand_responses

    data = DataProto.from_dict({"input_ids": torch.zeros(1, 2)}, meta_info={"generation_config": {"num_return_sequences": 9}})
    for expand, counts in ((True, [1, 1, 1]), (False, [3])):
        requests = expand_requests(data, 3, expand)
        assert [one.meta_info["generation_config"]["num_return_sequences"] for one in requests] == counts
        assert all(one.meta_info["generation_config"] is not data.meta_info["generation_config"] for one in requests)
    rows = DataProto.from_dict({"a": torch.arange(3)})
    found: Sequence[DataProto] = expand_responses([rows[0], [rows[1:], []]])
    assert [int(row["a"][0]) for row in found] == [0, 1, 2]
    assert expand_responses(None) == []
    with pytest.raises(LoopError, match="got NoneType"):
        expand_responses([None])
    with pytest.raises(LoopError, match=r"meta_info\['generation_config'\]"):
        expand_requests(rows, 2, True)
