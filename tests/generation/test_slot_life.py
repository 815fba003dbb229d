"""The life of a request: waiting, seated, cancelled, failed; and the end of the engine."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.errors import GenerationError, RequestRefused
from sluice.generation.slot import SlotEngine
from tests.generation import tiny
from tests.generation.tiny import Turnstile


@pytest.fixture
def endless(engine):
    """An engine whose responses end at their limit only."""
    engine._stops[:] = False
    return engine


def test_requests_beyond_the_slots_wait_and_are_served_in_order(endless):
    ended: list[int] = []

    async def submit_nine():
        handles = [endless.submit(tiny.request(i, [5 + i], new=6)) for i in range(9)]
        for i, handle in enumerate(handles):
            handle.future.add_done_callback(lambda _, i=i: ended.append(i))
        turnstile = Turnstile(endless)
        await turnstile.arrival()
        assert [handle.is_seated for handle in handles] == [True] * 4 + [False] * 5
        turnstile.open()
        await asyncio.gather(*[handle.future for handle in handles])
        assert max(turnstile.rows) == 4

    asyncio.run(submit_nine())
    assert ended == list(range(9))


def test_a_freed_slot_is_taken_in_the_next_pass(endless):
    async def play():
        turnstile = Turnstile(endless)
        short = endless.submit(tiny.request(0, [5], new=2))
        others = [endless.submit(tiny.request(i, [5], new=10)) for i in range(1, 5)]
        await turnstile.arrival()
        assert not others[-1].is_seated
        await turnstile.let_through()  # the short one ends; the last is prefilled before the next pass
        assert others[-1].is_seated
        turnstile.open()
        await asyncio.gather(short.future, *[handle.future for handle in others])
        assert turnstile.rows[:2] == [4, 4]

    asyncio.run(play())


def test_a_request_joins_in_the_middle_of_others(endless, qwen2):
    async def play():
        turnstile = Turnstile(endless)
        asked = [tiny.request(0, [5, 6, 7], new=9), tiny.request(1, [8], new=9)]
        first = endless.submit(asked[0])
        await turnstile.arrival()
        await turnstile.let_through()
        assert first.sampled_tokens == 2
        second = endless.submit(asked[1])
        await asyncio.sleep(0)  # requests set out in the loop's next iteration
        await turnstile.let_through()
        turnstile.open()
        for one, generation in zip(asked, await asyncio.gather(first.future, second.future), strict=True):
            expected = tiny.full_logprobs(qwen2, one, generation.token_ids)
            np.testing.assert_allclose(generation.inference_logprobs, expected, atol=1e-5)
        assert turnstile.rows == [1, 1, 2, 2, 2, 2, 2, 2, 1, 1]

    asyncio.run(play())


# ---------------------------------------------------------------- cancel


def test_a_cancel_in_the_middle_returns_what_was_sampled_by_then(endless):
    whole = tiny.generate(endless, [tiny.request(0, [5], new=10)])[0]
    counted = endless.sampled_tokens("train")

    async def play():
        turnstile = Turnstile(endless)
        handle = endless.submit(tiny.request(0, [5], new=10))
        await turnstile.arrival()
        await turnstile.let_through()
        await turnstile.let_through()
        assert handle.sampled_tokens == 3
        handle.cancel()
        handle.cancel()
        assert not handle.future.done()
        turnstile.open()
        return handle, await handle.future

    handle, generation = asyncio.run(play())
    assert generation.finish_reason == "cancelled"
    assert handle.sampled_tokens == len(generation.token_ids) == 4  # the pass under way counts
    np.testing.assert_array_equal(generation.token_ids, whole.token_ids[:4])
    assert endless.sampled_tokens("train") - counted == 4


def test_a_cancelled_waiting_request_resolves_at_once_without_tokens(endless):
    async def play():
        turnstile = Turnstile(endless)
        seated = [endless.submit(tiny.request(i, [5], new=3)) for i in range(4)]
        waiting = [endless.submit(tiny.request(i, [5], new=3)) for i in range(4, 6)]
        await turnstile.arrival()
        waiting[0].cancel()
        assert waiting[0].future.done()
        assert waiting[0].future.result().finish_reason == "cancelled"
        assert len(waiting[0].future.result().token_ids) == len(waiting[0].future.result().inference_logprobs) == 0
        turnstile.open()
        assert len((await waiting[1].future).token_ids) == 3
        await asyncio.gather(*[handle.future for handle in seated])

    asyncio.run(play())
    assert endless.sampled_tokens("train") == 5 * 3


def test_a_request_cancelled_before_the_engine_saw_it_costs_nothing(endless):
    async def play():
        handle = endless.submit(tiny.request(0, [5]))
        handle.cancel()
        assert handle.future.result().finish_reason == "cancelled"
        assert handle.sampled_tokens == 0

    asyncio.run(play())
    tiny.generate(endless, [tiny.request(1, [5], new=2)])
    assert endless.sampled_tokens("train") == 2


def test_a_request_that_ended_by_itself_keeps_its_reason_after_a_late_cancel(endless):
    async def play():
        handle = endless.submit(tiny.request(0, [5], new=2))
        generation = await handle.future
        handle.cancel()
        await asyncio.sleep(0)
        assert (await handle.future) is generation
        assert generation.finish_reason == "length"

    asyncio.run(play())


def test_cancelling_the_future_frees_the_slot_and_tokens_stay_counted(endless):
    async def play():
        turnstile = Turnstile(endless)
        handle = endless.submit(tiny.request(0, [5], new=40))
        await turnstile.arrival()
        handle.future.cancel()
        await asyncio.sleep(0)
        turnstile.open()
        generation = await endless.submit(tiny.request(1, [5], new=3)).future
        assert handle.sampled_tokens + len(generation.token_ids) == endless.sampled_tokens("train")
        assert handle.sampled_tokens == 2

    asyncio.run(play())


def test_a_cancelled_row_leaves_its_neighbours_alone(endless, qwen2):
    async def play():
        turnstile = Turnstile(endless)
        asked = [tiny.request(i, range(2, 4 + i), new=12) for i in range(6)]
        handles = [endless.submit(one) for one in asked]
        await turnstile.arrival()
        handles[0].cancel()
        await turnstile.let_through()
        handles[2].cancel()
        turnstile.open()
        return asked, await asyncio.gather(*[handle.future for handle in handles])

    asked, generations = asyncio.run(play())
    assert [g.finish_reason for g in generations] == ["cancelled", "length", "cancelled", "length", "length", "length"]
    for one, generation in zip(asked, generations, strict=True):
        np.testing.assert_allclose(generation.inference_logprobs, tiny.full_logprobs(qwen2, one, generation.token_ids), atol=1e-5)


@settings(max_examples=20)
@given(
    plan=st.lists(
        st.tuples(st.integers(1, 25), st.sampled_from(["train", "validation"]), st.none() | st.integers(0, 40)), min_size=1, max_size=12
    )
)
def test_resolved_generations_sum_to_the_counter_whatever_is_cancelled_when(crowd_engine, plan):
    """Each request: its length, its purpose, and after how many turns of the loop it is cancelled."""

    async def play():
        handles = [
            crowd_engine.submit(tiny.request(i, [5] * (1 + i % 3), new=new, purpose=purpose)) for i, (new, purpose, _) in enumerate(plan)
        ]
        for turn in range(42):
            for handle, (_, _, cancelled_at) in zip(handles, plan, strict=True):
                if cancelled_at == turn:
                    handle.cancel()
            await asyncio.sleep(0.0005 if turn % 4 == 0 else 0)
        return handles, await asyncio.gather(*[handle.future for handle in handles])

    before = {purpose: crowd_engine.sampled_tokens(purpose) for purpose in ("train", "validation")}
    handles, generations = asyncio.run(play())
    for purpose, count in before.items():
        mine = [g for g, (_, p, _) in zip(generations, plan, strict=True) if p == purpose]
        assert sum(len(g.token_ids) for g in mine) == crowd_engine.sampled_tokens(purpose) - count
    for handle, generation, (new, _, cancelled_at) in zip(handles, generations, plan, strict=True):
        assert handle.sampled_tokens == len(generation.token_ids) == len(generation.inference_logprobs) <= new
        assert cancelled_at is not None or generation.finish_reason != "cancelled"


@pytest.fixture(scope="module")
def crowd_engine(qwen2_path):
    with SlotEngine.load(qwen2_path, max_slots=3, max_length=64, threads=1) as engine:
        yield engine


# ---------------------------------------------------------------- errors and ends


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (tiny.request(0, []), "at least one token id"),
        (tiny.request(0, [2, 64]), "must lie within 0 .. 63, got 64"),
        (tiny.request(0, [-1]), "got -1"),
        (tiny.request(0, [2] * 60, new=5), "must fit into max_length 64, got 60"),
        (tiny.request(0, [2], new=0), "must fit"),
        (tiny.request(0, [2], temperature=-1.0), "temperature must be 0"),
        (tiny.request(0, [2], temperature=float("nan")), "temperature must be 0"),
        (tiny.request(0, [2], temperature=float("inf")), "temperature must be 0"),
        (tiny.request(0, [2], temperature=1e-40), r"at least 0\.0001, got 1e-40"),
        (tiny.request(0, [2], purpose="test"), "train, validation"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_at_once(engine, wrong, message):
    with pytest.raises(RequestRefused, match=message):
        tiny.generate(engine, [wrong])
    assert len(tiny.generate(engine, [tiny.request(1, [2] * 60, new=4)])) == 1  # the engine goes on


def test_an_exception_in_the_engines_thread_fails_open_and_later_requests_with_its_cause(endless):
    calls = 0
    decode = endless._model.decode

    def breaks_in_the_third_pass(*args):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise MemoryError("no room")
        return decode(*args)

    endless._model.decode = breaks_in_the_third_pass

    async def play():
        handles = [endless.submit(tiny.request(i, [5], new=10)) for i in range(6)]
        results = await asyncio.gather(*[handle.future for handle in handles], return_exceptions=True)
        for result in results:
            assert isinstance(result, GenerationError)
            assert isinstance(result.__cause__, MemoryError)
            assert "MemoryError: no room" in str(result)
        assert [handle.sampled_tokens for handle in handles] == [3, 3, 3, 3, 0, 0]
        assert endless.sampled_tokens("train") == 12
        with pytest.raises(GenerationError, match="no room") as raised:
            endless.submit(tiny.request(9, [5]))
        assert isinstance(raised.value.__cause__, MemoryError)

    asyncio.run(play())
    with pytest.raises(GenerationError, match="no room"):
        endless.publish({}, 1)
    endless.close()


def test_closing_fails_open_requests_and_frees_the_model(endless):
    async def play():
        turnstile = Turnstile(endless)
        handles = [endless.submit(tiny.request(i, [5], new=10)) for i in range(6)]
        await turnstile.arrival()
        turnstile.open()
        await asyncio.to_thread(endless.close)
        results = await asyncio.gather(*[handle.future for handle in handles], return_exceptions=True)
        assert all(isinstance(result, GenerationError) and "closed" in str(result) for result in results)
        with pytest.raises(GenerationError, match="closed"):
            endless.submit(tiny.request(9, [5]))

    asyncio.run(play())
    with pytest.raises(GenerationError, match="closed"):
        endless.publish({}, 1)
    assert not endless._thread.is_alive()
    assert endless._model is None
    endless.close()


def test_closing_an_idle_engine_ends_its_thread(qwen2_path):
    engine = SlotEngine.load(qwen2_path, max_slots=1, max_length=8)
    engine.close()
    engine.close()
    assert not engine._thread.is_alive()


def test_a_closed_loop_does_not_disturb_the_engine(endless):
    turnstile = Turnstile(endless)

    async def submit_and_leave():
        handle = endless.submit(tiny.request(0, [5], new=4))
        await turnstile.arrival()
        return handle

    handle = asyncio.run(submit_and_leave())
    turnstile.open()
    assert len(tiny.generate(endless, [tiny.request(1, [5], new=4)])[0].token_ids) == 4
    assert not handle.future.done()
    assert endless.sampled_tokens("train") == 8


def test_several_loops_share_an_engine(endless):
    results = {}

    def work(name: int) -> None:
        results[name] = tiny.generate(endless, [tiny.request(i, [5 + name], new=6) for i in range(5)])

    threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for name in range(3):
        assert [len(g.token_ids) for g in results[name]] == [6] * 5
    assert endless.sampled_tokens("train") == 3 * 5 * 6


def test_the_cache_grows_with_need_and_is_bounded_by_slots_and_length(qwen2_path):
    with SlotEngine.load(qwen2_path, max_slots=100, max_length=128, threads=1) as engine:
        cache = engine._model.cache
        assert cache.bytes == 0
        tiny.generate(engine, [tiny.request(i, [5], new=2) for i in range(3)])
        assert cache.size == (16, 64)
        tiny.generate(engine, [tiny.request(i, [5] * 70, new=2) for i in range(150)])
        assert cache.size == (100, 128)
        assert cache.bytes == 2 * 2 * 100 * 128 * 2 * 8 * 4  # keys and values, layers, slots, positions, heads, head size, bytes


def test_the_callers_torch_threads_stay_as_they_were(qwen2_path):
    import torch

    before = torch.get_num_threads()
    with SlotEngine.load(qwen2_path, max_slots=1, max_length=8, threads=before + 1) as engine:
        tiny.generate(engine, [tiny.request(0, [5], new=4)])
        assert torch.get_num_threads() == before
        seen = []
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert seen == [before]


def test_a_loop_that_ends_before_its_requests_set_out_does_not_hold_up_others(endless):
    loop = asyncio.new_event_loop()

    async def submit_and_stop():
        endless.submit(tiny.request(0, [5], new=4))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(submit_and_stop())
    loop.close()
    assert len(tiny.generate(endless, [tiny.request(1, [5], new=4)])[0].token_ids) == 4
    assert endless.sampled_tokens("train") == 4
