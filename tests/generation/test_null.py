"""The null engine keeps the contract of an engine, on any clock."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ConfigError, GenerationError, RequestRefused
from sluice.execution.clock import run
from sluice.generation import Answer, Engine, GenerationRequest, NullEngine, answers


def request(request_id: int = 0, *, new: int = 100, seed: int | None = None, purpose="train") -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id, prompt_ids=np.array([1, 2]), max_new_tokens=new, temperature=1.0,
        seed=request_id if seed is None else seed, purpose=purpose,
    )  # fmt: skip


def always(n: int = 10, **settings):
    answer = Answer(token_ids=np.arange(n), inference_logprobs=-np.arange(n, dtype=np.float32), **settings)
    return lambda _: answer


def test_it_is_an_engine_without_torch():
    engine: Engine = NullEngine()
    assert engine.policy_version == 0
    code = "import sluice.generation, sys; sluice.generation.NullEngine(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_answer_without_latency_is_there_when_submit_returns():
    async def play():
        engine = NullEngine(always(5))
        handle = engine.submit(request(7))
        generation = handle.future.result()
        assert generation.request_id == 7
        assert generation.token_ids.tolist() == [0, 1, 2, 3, 4]
        assert generation.finish_reason == "stop"
        assert handle.sampled_tokens == engine.sampled_tokens("train") == 5
        assert engine.sampled_tokens("validation") == 0

    run(play())


def test_an_answer_longer_than_asked_for_is_cut_as_length():
    async def play():
        generation = NullEngine(always(5)).submit(request(new=3)).future.result()
        assert generation.token_ids.tolist() == [0, 1, 2]
        assert len(generation.inference_logprobs) == 3
        assert generation.finish_reason == "length"

    run(play())


def test_tokens_appear_evenly_over_the_latency():
    async def play():
        engine = NullEngine(always(10, latency_s=100.0))
        handle = engine.submit(request())
        await asyncio.sleep(35)
        assert handle.sampled_tokens == engine.sampled_tokens("train") == 3
        generation = await handle.future
        assert asyncio.get_running_loop().time() == 100
        assert len(generation.token_ids) == handle.sampled_tokens == engine.sampled_tokens("train") == 10

    run(play())


def test_a_cancel_takes_effect_later_and_late_tokens_count():
    async def play():
        engine = NullEngine(always(10, latency_s=100.0), cancel_latency_s=20.0)
        handle = engine.submit(request())
        await asyncio.sleep(35)
        handle.cancel()
        handle.cancel()
        assert not handle.future.done()
        assert handle.sampled_tokens == 3
        generation = await handle.future
        assert asyncio.get_running_loop().time() == 55
        assert generation.finish_reason == "cancelled"
        assert len(generation.token_ids) == handle.sampled_tokens == engine.sampled_tokens("train") == 5
        await asyncio.sleep(1000)
        assert engine.sampled_tokens("train") == 5

    run(play())


def test_a_request_that_never_ends_can_be_cancelled():
    async def play():
        engine = NullEngine(always(10, latency_s=math.inf))
        handle = engine.submit(request())
        await asyncio.sleep(1e6)
        assert (handle.future.done(), handle.sampled_tokens, engine.open_requests) == (False, 0, 1)
        handle.cancel()
        assert (await handle.future).finish_reason == "cancelled"
        assert engine.open_requests == 0

    run(play())


def test_failures_are_injected_by_the_answer():
    async def play():
        engine = NullEngine(always(4, error="the disk is full", latency_s=2.0))
        handle = engine.submit(request())
        with pytest.raises(GenerationError, match="the disk is full"):
            await handle.future
        assert handle.sampled_tokens == engine.sampled_tokens("train") == 4

    run(play())


def test_a_breakdown_fails_open_and_later_requests_with_its_cause():
    async def play():
        engine = NullEngine(always(10, latency_s=10.0))
        handle = engine.submit(request())
        await asyncio.sleep(5)
        engine.break_down(MemoryError("no room"))
        for _ in range(2):
            with pytest.raises(GenerationError, match="no room") as raised:
                await handle.future
            assert isinstance(raised.value.__cause__, MemoryError)
        with pytest.raises(GenerationError, match="no room"):
            engine.submit(request())
        with pytest.raises(GenerationError, match="no room"):
            engine.publish({}, 1)
        assert handle.sampled_tokens == engine.sampled_tokens("train") == 5
        engine.close()

    run(play())


def test_closing_fails_open_requests_and_is_idempotent():
    async def play():
        engine = NullEngine(always(latency_s=10.0))
        handle = engine.submit(request())
        engine.close()
        engine.close()
        with pytest.raises(GenerationError, match="closed"):
            await handle.future
        with pytest.raises(GenerationError, match="closed"):
            engine.submit(request())

    run(play())


def test_the_policy_version_is_that_of_the_last_publish():
    async def play():
        engine = NullEngine(always(latency_s=10.0))
        first = engine.submit(request())
        engine.publish({}, 3)
        second = engine.submit(request())
        assert engine.policy_version == 3
        assert [(await first.future).policy_version, (await second.future).policy_version] == [0, 3]

    run(play())


# ---------------------------------------------------------------- slots


def test_requests_beyond_the_slots_wait_in_order_of_arrival_and_have_sampled_nothing():
    async def play():
        engine = NullEngine(always(10, latency_s=10.0), max_slots=2)
        handles = [engine.submit(request(i)) for i in range(5)]
        ended: dict[int, float] = {}
        for i, handle in enumerate(handles):
            handle.future.add_done_callback(lambda _, i=i: ended.setdefault(i, asyncio.get_running_loop().time()))
        await asyncio.sleep(5)
        assert [handle.sampled_tokens for handle in handles] == [5, 5, 0, 0, 0]
        assert (engine.sampled_tokens("train"), engine.open_requests) == (10, 5)
        engine.publish({}, 1)
        await asyncio.sleep(10)
        assert [handle.sampled_tokens for handle in handles] == [10, 10, 5, 5, 0]
        generations = await asyncio.gather(*[handle.future for handle in handles])
        assert [g.policy_version for g in generations] == [0, 0, 1, 1, 1]  # current when they were seated
        assert ended == {0: 10, 1: 10, 2: 20, 3: 20, 4: 30}
        assert engine.sampled_tokens("train") == 50

    run(play())


def test_a_waiting_request_is_cancelled_at_once():
    async def play():
        engine = NullEngine(always(10, latency_s=10.0), max_slots=1, cancel_latency_s=3.0)
        handles = [engine.submit(request(i)) for i in range(3)]
        engine.publish({}, 4)
        handles[1].cancel()
        handles[1].cancel()
        generation = handles[1].future.result()
        assert (generation.finish_reason, generation.policy_version, len(generation.token_ids)) == ("cancelled", 4, 0)
        handles[0].cancel()
        await handles[2].future
        assert asyncio.get_running_loop().time() == 13  # its slot was free when the cancel of the first had taken effect
        assert engine.sampled_tokens("train") == 3 + 10

    run(play())


def test_a_slot_is_freed_by_every_kind_of_end():
    async def play():
        kinds = [
            Answer(token_ids=np.arange(2), inference_logprobs=np.zeros(2, dtype=np.float32), latency_s=latency_s, error=error)
            for latency_s, error in ((1.0, None), (1.0, "the disk is full"), (math.inf, None), (math.inf, None), (0.0, None), (0.0, "no"))
        ]
        engine = NullEngine(lambda asked: kinds[asked.request_id % len(kinds)], max_slots=1)
        handles = [engine.submit(request(i)) for i in range(2 * len(kinds))]
        for handle in handles:
            await asyncio.sleep(1.5)
            if handle.request.request_id % len(kinds) == 2:
                handle.cancel()
            elif handle.request.request_id % len(kinds) == 3:
                assert engine.fail_running(1, "crashed") == 1
        results = await asyncio.gather(*[handle.future for handle in handles], return_exceptions=True)
        assert [isinstance(result, GenerationError) for result in results] == [False, True] * len(kinds)
        assert engine.open_requests == 0

    run(play())


def test_thousands_that_wait_for_one_slot_and_need_no_time_are_served_when_it_is_free():
    async def play():
        slow = Answer(token_ids=np.arange(1), inference_logprobs=np.zeros(1, dtype=np.float32), latency_s=1.0)
        engine = NullEngine(lambda asked: slow if asked.request_id == 0 else always(1)(asked), max_slots=1)
        handles = [engine.submit(request(i)) for i in range(5000)]
        assert engine.open_requests == 5000
        await asyncio.gather(*[handle.future for handle in handles])
        assert asyncio.get_running_loop().time() == 1

    run(play())


def test_closing_fails_those_who_wait_too():
    async def play():
        engine = NullEngine(always(10, latency_s=10.0), max_slots=1)
        handles = [engine.submit(request(i)) for i in range(3)]
        await asyncio.sleep(2)
        engine.close()
        results = await asyncio.gather(*[handle.future for handle in handles], return_exceptions=True)
        assert all(isinstance(result, GenerationError) for result in results)
        assert [handle.sampled_tokens for handle in handles] == [2, 0, 0]
        await asyncio.sleep(100)
        assert (engine.open_requests, engine.sampled_tokens("train")) == (0, 2)

    run(play())


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="max_slots must be at least 1, got 0"):
        NullEngine(max_slots=0)
    with pytest.raises(ConfigError, match="on_weight_update must be one of finish, restart, continue, got 'keep'"):
        NullEngine(on_weight_update="keep")


# ---------------------------------------------------------------- weights that change


@pytest.mark.parametrize("way", ["continue", "restart"])
def test_case_64_versions_grow_with_the_tokens(way):
    """Eight tokens in eight seconds: five of version 0, three of version 1; a cancel without a new token adds no version."""

    async def play():
        engine = NullEngine(always(8, latency_s=8.0), on_weight_update=way)
        whole, cut = engine.submit(request(0)), engine.submit(request(1))
        await asyncio.sleep(5.5)
        engine.publish({}, 1)
        cut.cancel()
        generation = await cut.future
        assert (len(generation.token_ids), generation.policy_version, generation.token_versions) == (5, 0, None)
        generation = await whole.future
        assert generation.token_versions.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
        assert len(generation.token_ids) == len(generation.inference_logprobs) == 8

    run(play())


def test_a_response_finishes_under_the_version_that_began_it():
    async def play():
        engine = NullEngine(always(8, latency_s=8.0))
        handle = engine.submit(request(0))
        for version in (1, 2, 3):
            await asyncio.sleep(2)
            engine.publish({}, version)
        generation = await handle.future
        assert (generation.policy_version, generation.token_versions) == (0, None)

    run(play())


def test_case_80_what_is_asked_for_after_a_publish_is_of_its_version_while_older_responses_run():
    async def play(way):
        engine = NullEngine(always(8, latency_s=8.0), on_weight_update=way)
        engine.publish({}, 12)
        older = engine.submit(request(0))
        await asyncio.sleep(4)
        engine.publish({}, 13)
        newer = engine.submit(request(1))
        assert ((await older.future).policy_version, (await newer.future).policy_version) == (12, 13)
        assert newer.future.result().token_versions is None

    for way in ("finish", "restart", "continue"):
        run(play(way))


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 9), st.none() | st.floats(0, 60)), min_size=1, max_size=8),
    st.lists(st.integers(0, 600), max_size=5, unique=True).map(lambda tenths: [tenth / 10 for tenth in tenths]),
    st.sampled_from(["finish", "continue"]),
    st.none() | st.integers(1, 3),
)
def test_each_token_is_of_the_version_that_was_published_when_it_appeared(plan, publishes, way, max_slots):
    """Each request: when it is submitted, its token limit, and after how long it is cancelled. Versions 1, 2, ... at `publishes`."""

    def published_by(time: float) -> int:
        return sum(at <= time for at in publishes)

    async def play():
        loop = asyncio.get_running_loop()
        engine = NullEngine(answers(seed=5, latency_s=(0.5, 40.0)), on_weight_update=way, max_slots=max_slots)
        for version, at in enumerate(sorted(publishes), start=1):
            loop.call_at(at, engine.publish, {}, version)

        async def one(i, start, new, cancel_after):
            await asyncio.sleep(start)
            handle = engine.submit(request(i, new=new))
            if cancel_after is not None:
                loop.call_later(cancel_after, handle.cancel)
            return handle, await handle.future

        done = await asyncio.gather(*[one(i, *entry) for i, entry in enumerate(plan)])
        assert engine.sampled_tokens("train") == sum(len(generation.token_ids) for _, generation in done)
        for handle, generation in done:
            n = len(generation.token_ids)
            assert len(generation.inference_logprobs) == n == handle.sampled_tokens
            versions = generation.token_versions
            if versions is None:
                versions = np.full(n, generation.policy_version)
            else:
                assert way == "continue"
            assert len(versions) == n
            if not handle.is_seated:
                assert n == 0
                continue

            for k, version in enumerate(versions.tolist()):
                appeared = handle.started_at
                if way == "continue":
                    appeared += (k + 1) / handle.length * handle.answer.latency_s
                # Of two things at the same moment either may come first.
                assert published_by(appeared - 1e-6) <= version <= published_by(appeared + 1e-6)

    run(play())


# ---------------------------------------------------------------- crashes


def test_a_crash_fails_the_requests_seated_longest_and_the_engine_lives_on():
    async def play():
        engine = NullEngine(always(10, latency_s=10.0), max_slots=3)
        handles = [engine.submit(request(i)) for i in range(5)]
        await asyncio.sleep(4)
        assert engine.fail_running(2, "worker 7 was killed") == 2
        for handle in handles[:2]:
            with pytest.raises(GenerationError, match="worker 7 was killed"):
                await handle.future
        assert [handle.sampled_tokens for handle in handles] == [4, 4, 4, 0, 0]
        generations = await asyncio.gather(*[handle.future for handle in handles[2:]])
        assert [len(g.token_ids) for g in generations] == [10, 10, 10]
        assert asyncio.get_running_loop().time() == 14  # those that waited took the slots at once
        assert engine.sampled_tokens("train") == 38

    run(play())


def test_a_crash_may_choose_its_requests_and_never_takes_those_who_wait():
    async def play():
        engine = NullEngine(always(10, latency_s=10.0), max_slots=4)
        handles = [engine.submit(request(i)) for i in range(6)]
        assert engine.fail_running(lambda asked: asked.request_id % 2 == 1, "gone") == 2
        results = await asyncio.gather(*[handle.future for handle in handles], return_exceptions=True)
        assert [isinstance(result, GenerationError) for result in results] == [False, True, False, True, False, False]
        assert engine.fail_running(9, "nobody is there") == 0

    run(play())


# ---------------------------------------------------------------- dialogues


def in_dialogue(request_id: int, dialogue_id: int, purpose="train") -> GenerationRequest:
    return request(request_id, purpose=purpose)._replace(dialogue_id=dialogue_id)


def test_a_dialogue_has_one_open_request_at_a_time_and_takes_no_slot_at_rest():
    async def play():
        engine = NullEngine(always(10, latency_s=10.0), max_slots=1)
        first = engine.submit(in_dialogue(0, 7))
        with pytest.raises(RequestRefused, match="dialogue 7 may have one open request at a time"):
            engine.submit(in_dialogue(1, 7))
        other = engine.submit(in_dialogue(2, 7, "validation"))
        assert engine.metrics()["engine/dialogues"] == 2
        await first.future
        await other.future
        await engine.submit(in_dialogue(3, 7)).future
        assert asyncio.get_running_loop().time() == 30
        assert (engine.sampled_tokens("train"), engine.sampled_tokens("validation")) == (20, 10)
        engine.end_dialogue(7)
        engine.end_dialogue(7)
        assert engine.metrics() == {"engine/dialogues": 1, "engine/dialogues_evicted": 0}

    run(play())


@pytest.mark.parametrize("seated", [True, False])
def test_the_end_of_a_dialogue_cancels_its_open_request_and_frees_its_number(seated):
    async def play():
        engine = NullEngine(always(10, latency_s=10.0), max_slots=1, cancel_latency_s=2.0)
        if not seated:
            engine.submit(request(9))
        handle = engine.submit(in_dialogue(0, 7))
        await asyncio.sleep(4)
        engine.end_dialogue(7)
        again = engine.submit(in_dialogue(1, 7))
        generation = await handle.future
        assert generation.finish_reason == "cancelled"
        assert len(generation.token_ids) == (6 if seated else 0)
        assert (await again.future).finish_reason == "stop"
        engine.end_dialogue(7)
        assert engine.metrics()["engine/dialogues"] == 0

    run(play())


def test_a_cancelled_request_leaves_its_dialogue_open():
    async def play():
        engine = NullEngine(always(10, latency_s=10.0))
        handle = engine.submit(in_dialogue(0, 7))
        handle.cancel()
        await handle.future
        await engine.submit(in_dialogue(1, 7)).future
        assert engine.metrics()["engine/dialogues"] == 1

    run(play())


@pytest.mark.parametrize("by_crash", [True, False])
def test_a_failed_dialogue_says_so_until_it_is_ended(by_crash):
    async def play():
        failing = Answer(
            token_ids=np.arange(4), inference_logprobs=np.zeros(4), latency_s=2.0, error=None if by_crash else "the disk is full"
        )
        engine = NullEngine(lambda asked: failing)
        handle = engine.submit(in_dialogue(0, 7))
        if by_crash:
            engine.fail_running(1, "the disk is full")
        with pytest.raises(GenerationError, match="the disk is full"):
            await handle.future
        for _ in range(2):
            with pytest.raises(GenerationError, match=r"dialogue 7 must not have failed.*end_dialogue\(7\).*the disk is full"):
                engine.submit(in_dialogue(1, 7))
        assert engine.metrics()["engine/dialogues"] == 0
        engine.end_dialogue(7)
        engine.submit(in_dialogue(1, 7))
        assert engine.metrics()["engine/dialogues"] == 1
        engine.close()
        engine.end_dialogue(7)
        assert engine.metrics()["engine/dialogues"] == 0

    run(play())


# ---------------------------------------------------------------- answers and counters


def test_prepared_answers_depend_on_the_seeds_only():
    one, same, other = answers(seed=1), answers(seed=1), answers(seed=2)
    asked = [request(i) for i in range(200)]
    assert all(one(r).token_ids is one(r).token_ids for r in asked)
    assert [one(r).token_ids.tolist() for r in asked] == [same(r).token_ids.tolist() for r in asked]
    assert [one(r).token_ids.tolist() for r in asked] != [other(r).token_ids.tolist() for r in asked]
    assert {len(one(r).token_ids) for r in asked} == set(range(1, 17))
    assert not one(asked[0]).token_ids.flags.writeable


@given(
    st.lists(
        st.tuples(
            st.floats(0, 50), st.integers(1, 30), st.sampled_from(["train", "validation"]), st.none() | st.floats(0, 100), st.booleans()
        ),
        max_size=20,
    ),
    st.sampled_from([0.0, 7.0]),
)
def test_counters_equal_the_sum_over_all_requests(plan, cancel_latency_s):
    """Each request: when submitted, token limit, purpose, when cancelled, whether it fails."""

    async def play():
        ready = answers(seed=3, latency_s=(0.0, 60.0))

        def answer(asked):
            good = ready(asked)
            if not plan[asked.request_id][4]:
                return good
            return Answer(
                token_ids=good.token_ids, inference_logprobs=good.inference_logprobs, latency_s=good.latency_s, error="injected"
            )  # fmt: skip

        engine = NullEngine(answer, cancel_latency_s=cancel_latency_s)

        async def one(i, start, new, purpose, cancel_after, fails):
            await asyncio.sleep(start)
            handle = engine.submit(request(i, new=new, purpose=purpose))
            if cancel_after is not None:
                asyncio.get_running_loop().call_later(cancel_after, handle.cancel)
            try:
                generation = await handle.future
            except GenerationError:
                assert fails
            else:
                assert len(generation.token_ids) == len(generation.inference_logprobs) == handle.sampled_tokens <= new
            return purpose, handle.sampled_tokens

        done = await asyncio.gather(*[one(i, *entry) for i, entry in enumerate(plan)])
        for purpose in ("train", "validation"):
            assert engine.sampled_tokens(purpose) == sum(tokens for p, tokens in done if p == purpose)
        assert engine.open_requests == 0

    run(play())
