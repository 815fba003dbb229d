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

from sluice.errors import GenerationError
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
