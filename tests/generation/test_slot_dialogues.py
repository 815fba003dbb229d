"""Dialogues: what a turn samples is what an ordinary forward pass over the whole dialogue says, kept cache or not."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from sluice.errors import GenerationError, RequestRefused
from sluice.generation.slot import SlotEngine
from tests.generation import tiny
from tests.generation.tiny import Passes, Turnstile, perturbed

WAYS = ["finish", "restart", "continue"]


@pytest.fixture(scope="module")
def models(qwen2):
    """What the trainer holds at versions 0, 1, ... 4."""
    return [qwen2, *[perturbed(tiny.qwen2(), 0.03 * k) for k in range(1, 5)]]


def loaded(path, *, slots: int = 4, length: int = 128, **how) -> SlotEngine:
    """An engine whose responses end at their limit only."""
    engine = SlotEngine.load(path, max_slots=slots, max_length=length, threads=1, **how)
    engine._stops[:] = False
    return engine


@pytest.fixture
def impatient(monkeypatch):
    """A dialogue at rest gives up its slot at once when another needs it."""
    monkeypatch.setattr("sluice.generation.seats._KEEP_SLOT_S", 0.0)


class Talk:
    """One dialogue as its caller sees it: all its tokens, and what each request of it got."""

    def __init__(self, engine, dialogue_id: int, purpose="train") -> None:
        self.engine = engine
        self.dialogue_id = dialogue_id
        self.purpose = purpose
        self.tokens: list[int] = []
        self.turns: list[tuple] = []  # (request as one that stands alone, generation)
        self.handle = None

    def ask(self, prompt, *, new=4, seed=0, temperature=1.0):
        """Submit the next request."""
        asked = tiny.request(
            len(self.turns), prompt, new=new, seed=seed, temperature=temperature, purpose=self.purpose, dialogue=self.dialogue_id
        )
        self.handle = self.engine.submit(asked)
        self.tokens += list(prompt)
        return self.handle

    async def answer(self):
        """Wait for it."""
        generation = await self.handle.future
        alone = self.handle.request._replace(prompt_ids=np.array(self.tokens), dialogue_id=None)
        self.turns.append((alone, generation))
        self.tokens += generation.token_ids.tolist()
        return generation

    async def say(self, prompt, **how):
        """A request and its generation."""
        self.ask(prompt, **how)
        return await self.answer()

    def assert_explained(self, models) -> None:
        """Every turn is what a full forward pass gives."""
        for asked, generation in self.turns:
            tiny.assert_explained(models, asked, generation)


async def play_talks(engine, rng: random.Random, *, talks: int, turns: int, endings: float, cancels: float, pauses: bool):
    """Dialogues of random turns beside single requests, with random cancels and early ends. Everything that was asked, and what came."""
    done: list[tuple] = []
    counted = {"train": 0, "validation": 0}

    async def single(number: int) -> None:
        asked = tiny.request(1000 + number, [5 + number % 9] * (1 + number % 5), new=1 + number % 7)
        done.append((asked, await engine.submit(asked).future))
        counted["train"] += len(done[-1][1].token_ids)

    async def dialogue(number: int) -> None:
        talk = Talk(engine, number // 2, "validation" if number % 2 else "train")  # numbers are shared between purposes
        for _ in range(turns):
            prompt = [rng.randrange(2, tiny.VOCABULARY) for _ in range(rng.choice([1, 1, 2, 3, 5, 9]))]
            new = rng.randint(1, 6)
            if len(talk.tokens) + len(prompt) + new > 128:
                break
            handle = talk.ask(prompt, new=new, seed=rng.randrange(2**40), temperature=rng.choice([0.0, 0.7, 1.0]))
            if rng.random() < cancels:
                for _ in range(rng.choice([0, 1, 3])):
                    await asyncio.sleep(0.0005 if rng.random() < 0.5 else 0)
                handle.cancel()
            if rng.random() < endings:
                await asyncio.sleep(0)
                engine.end_dialogue(talk.dialogue_id, talk.purpose)
                await talk.answer()
                counted[talk.purpose] += len(talk.turns[-1][1].token_ids)
                done.extend(talk.turns)
                talk = Talk(engine, talk.dialogue_id, talk.purpose)  # the same number, anew
                continue
            await talk.answer()
            counted[talk.purpose] += len(talk.turns[-1][1].token_ids)
            if pauses and rng.random() < 0.3:
                await asyncio.sleep(0.002)
        engine.end_dialogue(talk.dialogue_id, talk.purpose)
        done.extend(talk.turns)

    async with asyncio.TaskGroup() as group:
        for number in range(talks):
            group.create_task(dialogue(number), name=f"dialogue {number}")
        for number in range(talks // 2):
            group.create_task(single(number), name=f"single {number}")
    return done, counted


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("slots", [3, 16])
def test_every_turn_is_what_a_full_forward_pass_says_in_any_company(qwen2, qwen2_path, slots, seed, impatient):
    """With three slots dialogues are put aside all the time, with sixteen never; prompts in pieces, rows that move, cancels, ends."""
    with loaded(qwen2_path, slots=slots, prefill_tokens=13 if seed % 2 else 2048) as engine:
        done, counted = asyncio.run(
            play_talks(engine, random.Random(seed), talks=9, turns=9, endings=0.08, cancels=0.2, pauses=bool(seed % 3))
        )
        for asked, generation in done:
            tiny.assert_explained([qwen2], asked, generation)
            assert generation.finish_reason in ("length", "cancelled")
        assert counted == {purpose: engine.sampled_tokens(purpose) for purpose in counted}
        asyncio.run(settled(engine))
        metrics = engine.metrics()
        assert metrics["engine/dialogues"] == 0
        assert slots == 3 or metrics["engine/dialogues_evicted"] == 0
        assert engine._rows.count == 0
        assert sorted(engine._seats._tickets) == list(range(slots))


async def settled(engine) -> None:
    """Wait until the engine has taken note of all that it was told: it may have read its notes just before the first request came."""
    for _ in range(2):
        await engine.submit(tiny.request(10**6, [5], new=1)).future


@pytest.mark.parametrize("on_publish", ["recompute", "keep"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(3))
def test_publishes_between_turns_and_during_turns_are_exact_in_every_mode(qwen2_path, models, way, on_publish, seed, impatient):
    """Under `keep` the log-probs are those of no single set of weights; conservation and versions must hold all the same."""
    with loaded(qwen2_path, slots=5, on_weight_update=way, on_publish=on_publish, prefill_tokens=40) as engine:
        passes = Passes(
            engine, {at: (lambda v=v: passes.publish(models[v].state_dict(), v)) for v, at in enumerate((8, 20, 21, 45), start=1)}
        )
        done, counted = asyncio.run(
            play_talks(engine, random.Random(seed), talks=8, turns=8, endings=0.05, cancels=0.15, pauses=bool(seed))
        )
        passes.stop()
        assert engine.policy_version == 4
        assert counted == {purpose: engine.sampled_tokens(purpose) for purpose in counted}
        assert engine.metrics()["engine/versions_live"] == 1
    for asked, generation in done:
        if on_publish == "recompute":
            tiny.assert_explained(models, asked, generation)
        if way == "finish":
            assert generation.token_versions is None
    versions = {generation.policy_version for _, generation in done}
    assert {0, 4} <= versions


# ---------------------------------------------------------------- the cache is kept


def test_a_turn_computes_only_the_tokens_that_are_new(qwen2, qwen2_path):
    async def play(engine):
        talk = Talk(engine, 7)
        await talk.say(range(2, 32), new=5)
        assert engine.metrics()["engine/prefill_tokens"] == 30
        assert engine.metrics()["engine/dialogues"] == 1
        await talk.say([40, 41], new=3)
        assert engine.metrics()["engine/prefill_tokens"] == 30 + 1 + 2  # the token sampled last was not stored yet
        await talk.say([42], new=3, temperature=0.0)
        assert engine.metrics()["engine/prefill_tokens"] == 33 + 1 + 1
        return talk

    with loaded(qwen2_path) as engine:
        talk = asyncio.run(play(engine))
        talk.assert_explained([qwen2])


def script(seed: int, turns: int = 8):
    rng = random.Random(seed)
    return [
        ([rng.randrange(2, tiny.VOCABULARY) for _ in range(rng.randint(1, 6))], rng.randint(1, 6), rng.randrange(2**40))
        for _ in range(turns)
    ]


async def scripted(engine, numbers, disturb=None):
    async def one(number):
        talk = Talk(engine, number)
        for prompt, new, seed in script(number):
            await talk.say(prompt, new=new, seed=seed)
            if disturb is not None:
                await disturb(number)
        return talk

    return await asyncio.gather(*[one(number) for number in numbers])


def test_tokens_are_the_same_with_the_cache_kept_and_computed_anew(qwen2, qwen2_path, impatient):
    with loaded(qwen2_path, slots=8) as engine:
        kept = asyncio.run(scripted(engine, range(6)))
        assert engine.metrics()["engine/dialogues_evicted"] == 0
        computed = engine.metrics()["engine/prefill_tokens"]
    with loaded(qwen2_path, slots=1) as engine:
        evicted = asyncio.run(scripted(engine, range(6)))
        assert engine.metrics()["engine/dialogues_evicted"] > 0
        assert engine.metrics()["engine/prefill_tokens"] > computed
    for one, other in zip(kept, evicted, strict=True):
        one.assert_explained([qwen2])
        other.assert_explained([qwen2])
        assert one.tokens == other.tokens


def test_a_dialogue_put_aside_before_every_turn_gives_the_same_tokens(qwen2, qwen2_path, impatient):
    with loaded(qwen2_path, slots=3) as engine:
        (kept,) = asyncio.run(scripted(engine, [3]))

        async def crowd_out(number):
            await asyncio.gather(*[engine.submit(tiny.request(100 + i, [5, 6], new=2)).future for i in range(3)])

        engine.end_dialogue(3)
        before = engine.metrics()["engine/dialogues_evicted"]
        (evicted,) = asyncio.run(scripted(engine, [3], crowd_out))
        assert engine.metrics()["engine/dialogues_evicted"] - before == len(evicted.turns)
    assert kept.tokens == evicted.tokens
    evicted.assert_explained([qwen2])


def test_the_dialogue_that_has_rested_longest_gives_up_its_slot(qwen2_path):
    async def play(engine):
        talks = [Talk(engine, number) for number in range(3)]
        for talk in talks:
            await talk.say([5, 6], new=2)
        await talks[0].say([7], new=2)  # now the second has rested longest
        await Talk(engine, 9).say([5], new=2)
        slots = {dialogue.key[1] for dialogue in engine._rows.owners}
        assert slots == {0, 2, 9}
        computed = engine.metrics()["engine/prefill_tokens"]
        await talks[2].say([8], new=2)
        assert engine.metrics()["engine/prefill_tokens"] - computed == 2
        await talks[1].say([8], new=2)  # all of its five tokens anew
        assert engine.metrics()["engine/prefill_tokens"] - computed == 2 + 5
        assert engine.metrics()["engine/dialogues_evicted"] == 2

    with loaded(qwen2_path, slots=3) as engine:
        asyncio.run(play(engine))


def test_a_dialogue_with_quick_replies_keeps_its_slot_though_others_wait(qwen2_path, monkeypatch):
    monkeypatch.setattr("sluice.generation.seats._KEEP_SLOT_S", 60.0)

    async def play(engine):
        talk = Talk(engine, 0)
        await talk.say([5], new=2)
        waiting = engine.submit(tiny.request(9, [5], new=2))
        for _ in range(3):
            await talk.say([6], new=2)
        assert not waiting.is_seated
        engine.end_dialogue(0)
        await waiting.future
        assert engine.metrics()["engine/dialogues_evicted"] == 0

    with loaded(qwen2_path, slots=1) as engine:
        asyncio.run(play(engine))


def test_siblings_that_say_the_same_share_what_is_computed_for_their_turns(qwen2, qwen2_path):
    async def play(engine):
        talks = [Talk(engine, number) for number in range(4)]
        for prompt in (range(2, 12), [40, 41, 42]):
            await asyncio.gather(*[talk.say(prompt, new=3, temperature=0.0) for talk in talks])
        return talks

    with loaded(qwen2_path) as engine:
        for talk in asyncio.run(play(engine)):
            talk.assert_explained([qwen2])
        assert engine.metrics()["engine/prefill_tokens"] == 10 + 4
        assert engine.metrics()["engine/prefill_tokens_shared"] == 3 * (10 + 4)


def test_rows_at_rest_are_computed_with_the_others_and_nothing_of_it_is_kept(qwen2, qwen2_path):
    """The second of three rests while the others decode around it, and goes on later."""

    async def play(engine):
        talks = [Talk(engine, number) for number in range(3)]
        await asyncio.gather(*[talk.say([5 + talk.dialogue_id], new=3) for talk in talks])
        turnstile = Turnstile(engine)
        stored = [layer.keys[1].clone() for layer in engine._model.cache._layers]
        talks[0].ask([9], new=10)
        talks[2].ask([10], new=10)
        turnstile.open()
        await talks[0].answer()
        await talks[2].answer()
        assert max(turnstile.rows) == 2
        assert [dialogue.key[1] for dialogue in engine._rows.owners] == [0, 1, 2]
        for layer, before in zip(engine._model.cache._layers, stored, strict=True):
            assert torch.equal(layer.keys[1, :, : before.shape[1]], before)
        counted = engine.sampled_tokens("train")
        await talks[1].say([11], new=4)
        assert engine.sampled_tokens("train") - counted == 4
        return talks

    with loaded(qwen2_path) as engine:
        for talk in asyncio.run(play(engine)):
            talk.assert_explained([qwen2])


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("way", WAYS)
def test_a_dialogue_is_computed_anew_under_new_weights_and_holds_no_old_ones(qwen2_path, models, way):
    async def play(engine):
        talk = Talk(engine, 0)
        await talk.say(range(2, 12), new=4)
        await asyncio.to_thread(engine.publish, models[1].state_dict(), 1)
        assert engine.metrics()["engine/versions_live"] == 1
        computed = engine.metrics()["engine/prefill_tokens"]
        generation = await talk.say([50], new=4)
        assert generation.policy_version == 1
        assert engine.metrics()["engine/prefill_tokens"] - computed == 15
        assert engine.metrics()["engine/dialogues_evicted"] == 0
        talk.assert_explained(models)

    with loaded(qwen2_path, on_weight_update=way) as engine:
        asyncio.run(play(engine))


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_a_dialogue_keeps_its_cache_over_a_publish_when_told_so(qwen2, qwen2_path, models, way):
    async def play(engine):
        talk = Talk(engine, 0)
        await talk.say(range(2, 12), new=4)
        await asyncio.to_thread(engine.publish, models[1].state_dict(), 1)
        computed = engine.metrics()["engine/prefill_tokens"]
        await talk.say([50], new=4)
        assert engine.metrics()["engine/prefill_tokens"] - computed == 2
        return talk

    with loaded(qwen2_path, on_weight_update=way, on_publish="keep") as engine:
        talk = asyncio.run(play(engine))
    cache = DynamicCache(config=qwen2.config)
    sequence = torch.tensor([talk.tokens])
    qwen2(input_ids=sequence[:, :13], cache=cache, use_cache=True)  # the last of the four sampled was not stored
    logits = models[1](input_ids=sequence[:, 13:-1], cache=cache, use_cache=True).logits[0]
    expected = torch.log_softmax(logits, -1)[1:].gather(1, sequence[0, 15:, None])[:, 0]
    (_, generation) = talk.turns[1]
    assert generation.policy_version == 1
    np.testing.assert_allclose(generation.inference_logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("on_publish", ["recompute", "keep"])
def test_a_turn_under_way_ends_under_its_weights_and_the_next_begins_under_the_new_ones(qwen2_path, models, on_publish):
    """Two editions side by side; the dialogue of the old one rests, its weights are freed, and it goes on under the new ones."""

    async def play(engine):
        talks = [Talk(engine, number) for number in range(3)]
        await talks[2].say([9, 10], new=2)
        turnstile = Turnstile(engine)
        talks[0].ask([5, 6], new=6)
        talks[1].ask([7, 8], new=12)
        await turnstile.arrival()
        passes_of_old = 2
        for _ in range(passes_of_old):
            await turnstile.let_through()
        publishing = asyncio.create_task(asyncio.to_thread(engine.publish, models[1].state_dict(), 1))
        while not engine._publishes:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.001)
        turnstile.open()
        await publishing
        await talks[2].say([11], new=8)
        for talk in talks[:2]:
            await talk.answer()
        assert [talk.turns[-1][1].policy_version for talk in talks] == [0, 0, 1]
        await asyncio.gather(*[talk.say([12], new=3) for talk in talks])
        assert [talk.turns[-1][1].policy_version for talk in talks] == [1, 1, 1]
        assert engine.metrics()["engine/versions_live"] == 1
        return talks

    with loaded(qwen2_path, on_weight_update="finish", on_publish=on_publish) as engine:
        talks = asyncio.run(play(engine))
    if on_publish == "recompute":
        for talk in talks:
            talk.assert_explained(models)


def test_a_dialogue_that_rests_beside_a_long_response_of_old_weights_holds_none(qwen2_path, models):
    """Versions in memory: those of responses under way and the newest, however many dialogues older ones have computed."""

    async def play(engine):
        talks = [Talk(engine, number) for number in range(3)]
        passes = Passes(engine)
        for version in range(1, 5):
            for talk in talks:
                await talk.say([5 + version], new=2)
            await asyncio.to_thread(engine.publish, models[version].state_dict(), version)
            assert engine.metrics()["engine/versions_live"] == 1
        passes.stop()
        return talks

    for on_publish in ("recompute", "keep"):
        with loaded(qwen2_path, on_publish=on_publish) as engine:
            asyncio.run(play(engine))


# ---------------------------------------------------------------- the life of a dialogue


def test_a_cancelled_turn_leaves_what_it_had_sampled(qwen2, qwen2_path):
    async def play(engine):
        talk = Talk(engine, 0)
        turnstile = Turnstile(engine)
        talk.ask([5, 6, 7], new=20)
        await turnstile.arrival()
        await turnstile.let_through()
        talk.handle.cancel()
        turnstile.open()
        generation = await talk.answer()
        assert (generation.finish_reason, len(generation.token_ids)) == ("cancelled", 3)
        await talk.say([8, 9], new=5)
        return talk

    with loaded(qwen2_path) as engine:
        asyncio.run(play(engine)).assert_explained([qwen2])


@pytest.mark.parametrize("is_first", [True, False])
def test_a_request_cancelled_before_it_began_leaves_its_prompt(qwen2, qwen2_path, is_first):
    async def play(engine):
        talk = Talk(engine, 0)
        if not is_first:
            await talk.say([5, 6, 7], new=3)
        talk.ask([8, 9], new=5)
        talk.handle.cancel()
        assert len((await talk.answer()).token_ids) == 0
        talk.ask([10], new=5)
        talk.handle.cancel()
        await talk.answer()
        await talk.say([11, 12], new=5)
        return talk

    with loaded(qwen2_path) as engine:
        asyncio.run(play(engine)).assert_explained([qwen2])


def test_prompts_of_cancelled_requests_survive_an_eviction_in_order(qwen2, qwen2_path):
    async def play(engine):
        talk = Talk(engine, 0)
        await talk.say([5, 6, 7], new=3)
        talk.ask([8, 9], new=5)
        talk.handle.cancel()
        await talk.answer()
        await Talk(engine, 1).say([5], new=2)  # takes the only slot
        talk.ask([10], new=5)
        talk.handle.cancel()
        await talk.answer()
        await talk.say([11, 12], new=5)
        return talk

    with loaded(qwen2_path, slots=1) as engine:
        asyncio.run(play(engine)).assert_explained([qwen2])


def test_one_request_of_a_dialogue_is_open_at_a_time(qwen2_path):
    async def play(engine):
        talk = Talk(engine, 4)
        talk.ask([5], new=3)
        with pytest.raises(RequestRefused, match="dialogue 4 may have one open request at a time"):
            engine.submit(tiny.request(9, [6], dialogue=4))
        engine.submit(tiny.request(9, [6], new=2, dialogue=4, purpose="validation"))  # another dialogue
        await talk.answer()
        await talk.say([6], new=3)

    with loaded(qwen2_path) as engine:
        asyncio.run(play(engine))


def test_the_whole_dialogue_must_fit_and_the_message_says_what_is_held(qwen2_path):
    async def play(engine):
        talk = Talk(engine, 4)
        await talk.say([5] * 10, new=4)
        with pytest.raises(RequestRefused, match=r"must fit into max_length 24, got 6 \+ 5 after the 14 tokens that dialogue 4 holds"):
            engine.submit(tiny.request(9, [5] * 6, new=5, dialogue=4))
        assert len((await talk.say([5] * 6, new=4)).token_ids) == 4  # a refused one changes nothing
        with pytest.raises(RequestRefused, match="after the 24 tokens"):
            engine.submit(tiny.request(9, [5], new=1, dialogue=4))
        with pytest.raises(RequestRefused, match="max_length 24, got 24 \\+ 1 -"):
            engine.submit(tiny.request(9, [5] * 24, new=1, dialogue=5))
        assert engine.metrics()["engine/dialogues"] == 1

    with loaded(qwen2_path, length=24) as engine:
        asyncio.run(play(engine))


def test_the_end_of_a_dialogue_cancels_its_request_frees_its_slot_and_its_number(qwen2, qwen2_path):
    async def play(engine):
        engine.end_dialogue(4)  # unknown: ignored
        talk = Talk(engine, 4)
        await talk.say([5, 6], new=3)
        turnstile = Turnstile(engine)
        talk.ask([7], new=30)
        await turnstile.arrival()
        engine.end_dialogue(4)
        engine.end_dialogue(4)
        assert engine.metrics()["engine/dialogues"] == 0
        again = Talk(engine, 4)
        again.ask([20, 21], new=3)
        turnstile.open()
        assert (await talk.answer()).finish_reason == "cancelled"
        await again.answer()
        await again.say([22], new=3)
        assert engine.metrics()["engine/prefill_tokens"] == 2 + 2 + 2 + 2
        engine.end_dialogue(4)
        await settled(engine)
        assert engine._rows.count == 0
        return talk, again

    with loaded(qwen2_path) as engine:
        for talk in asyncio.run(play(engine)):
            talk.assert_explained([qwen2])


def test_the_end_of_a_dialogue_that_waits_for_its_slot_resolves_its_request_at_once(qwen2_path):
    async def play(engine):
        turnstile = Turnstile(engine)
        first = engine.submit(tiny.request(0, [5], new=4))
        await turnstile.arrival()
        talk = Talk(engine, 4)
        talk.ask([7], new=30)
        await asyncio.sleep(0)
        engine.end_dialogue(4)
        assert talk.handle.future.result().finish_reason == "cancelled"
        turnstile.open()
        await first.future
        await settled(engine)
        assert engine._rows.count == 0

    with loaded(qwen2_path, slots=1) as engine:
        asyncio.run(play(engine))


def test_a_failed_dialogue_says_so_until_it_is_ended(qwen2_path, models):
    poisoned = {name: tensor.clone() for name, tensor in models[1].state_dict().items()}
    poisoned["model.norm.weight"].fill_(3e38)

    async def play(engine):
        talk, other = Talk(engine, 4), Talk(engine, 5)
        await asyncio.gather(talk.say([5, 6], new=3), other.say([5, 7], new=3))
        await asyncio.to_thread(engine.publish, poisoned, 1)
        counted = engine.sampled_tokens("train")
        with pytest.raises(GenerationError, match="logits must be finite"):
            await engine.submit(tiny.request(7, [8], dialogue=4)).future
        await asyncio.to_thread(engine.publish, models[2].state_dict(), 2)
        for _ in range(2):
            with pytest.raises(GenerationError, match=r"dialogue 4 must not have failed.*end_dialogue\(4\).*version 1"):
                engine.submit(tiny.request(8, [9], dialogue=4))
        assert engine.metrics()["engine/dialogues"] == 1
        await other.say([8], new=3)
        engine.end_dialogue(4)
        anew = Talk(engine, 4)
        await anew.say([5, 6, 7, 8], new=3)
        assert engine.sampled_tokens("train") - counted == 6
        other.assert_explained(models)
        anew.assert_explained(models)

    with loaded(qwen2_path) as engine:
        asyncio.run(play(engine))


def test_what_is_not_finite_in_one_row_reaches_no_row_at_rest(qwen2_path, models):
    """A response under old weights decodes around a dialogue at rest while others fail under new ones."""
    poisoned = {name: tensor.clone() for name, tensor in models[1].state_dict().items()}
    poisoned["model.layers.0.input_layernorm.weight"].fill_(3e38)

    async def play(engine):
        talks = [Talk(engine, number) for number in range(4)]
        await asyncio.gather(*[talk.say([5 + talk.dialogue_id, 6], new=3) for talk in talks])
        await asyncio.to_thread(engine.publish, poisoned, 1)
        for talk in (talks[0], talks[3]):
            with pytest.raises(GenerationError):
                await engine.submit(tiny.request(0, [8], dialogue=talk.dialogue_id)).future
        await asyncio.to_thread(engine.publish, models[2].state_dict(), 2)
        for talk in talks[1:3]:
            await talk.say([9], new=3)
        for number in (10, 11):
            talks.append(Talk(engine, number))
            await talks[-1].say([9, 10], new=3)
        return talks

    for on_publish in ("recompute", "keep"):
        with loaded(qwen2_path, on_publish=on_publish) as engine:
            talks = asyncio.run(play(engine))
        for talk in [*(talks[1:3] if on_publish == "recompute" else []), *talks[4:]]:
            talk.assert_explained(models)


def test_many_more_dialogues_than_slots_all_go_on(qwen2, qwen2_path):
    with loaded(qwen2_path, slots=2) as engine:
        talks = asyncio.run(scripted(engine, range(12)))
        for talk in talks:
            assert len(talk.turns) == 8
            talk.assert_explained([qwen2])
        assert engine.metrics()["engine/dialogues"] == 12
        for number in range(12):
            engine.end_dialogue(number)
        asyncio.run(settled(engine))
        assert engine._rows.count == 0


def test_dialogues_that_rest_for_ever_hold_up_nobody(qwen2_path):
    """Every slot is held by a dialogue that never goes on."""

    async def play(engine):
        for number in range(3):
            await Talk(engine, number).say([5], new=2)
        generations = await asyncio.gather(*[engine.submit(tiny.request(i, [6], new=3)).future for i in range(7)])
        assert [len(g.token_ids) for g in generations] == [3] * 7
        assert engine.metrics()["engine/dialogues"] == 3

    with loaded(qwen2_path, slots=3) as engine:
        asyncio.run(play(engine))


def test_closing_ends_every_dialogue(qwen2_path):
    async def play(engine):
        rests, open_ = Talk(engine, 0), Talk(engine, 1)
        await rests.say([5], new=2)
        turnstile = Turnstile(engine)
        open_.ask([6], new=50)
        await turnstile.arrival()
        turnstile.open()
        await asyncio.to_thread(engine.close)
        with pytest.raises(GenerationError, match="closed"):
            await open_.handle.future
        with pytest.raises(GenerationError, match="closed"):
            engine.submit(tiny.request(9, [5], dialogue=0))
        engine.end_dialogue(0)
        engine.end_dialogue(1)
        assert engine.metrics()["engine/dialogues"] == 0
        assert open_.handle.sampled_tokens == engine.sampled_tokens("train") - 2

    with loaded(qwen2_path) as engine:
        asyncio.run(play(engine))


def test_a_turn_that_reaches_the_last_position_is_exact(qwen2, qwen2_path):
    async def play(engine):
        talk, other = Talk(engine, 0), Talk(engine, 1)
        await asyncio.gather(talk.say(range(2, 62), new=10), other.say([5], new=3))
        await asyncio.gather(talk.say(range(2, 50), new=10), other.say([6], new=30))
        assert len(talk.tokens) == 128
        return talk, other

    with loaded(qwen2_path, length=128) as engine:
        for talk in asyncio.run(play(engine)):
            talk.assert_explained([qwen2])


def test_rows_far_apart_are_copied_and_long_responses_moved_together(qwen2, qwen2_path):
    """Of sixteen dialogues a few go on at a time, while the others rest in between."""

    async def play(engine):
        talks = [Talk(engine, number) for number in range(16)]
        await asyncio.gather(*[talk.say([5 + talk.dialogue_id], new=2) for talk in talks])
        order = [dialogue.key[1] for dialogue in engine._rows.owners]
        await asyncio.gather(*[talks[i].say([9, i + 2], new=2) for i in (1, 9)])
        assert [dialogue.key[1] for dialogue in engine._rows.owners] == order
        await asyncio.gather(*[talks[i].say([9, i + 2], new=50) for i in range(0, 16, 2)])
        assert [dialogue.key[1] for dialogue in engine._rows.owners] != order
        await asyncio.gather(*[talk.say([8], new=3) for talk in talks])
        return talks

    with loaded(qwen2_path, slots=16) as engine:
        engine._spread.note_end(50)
        for talk in asyncio.run(play(engine)):
            talk.assert_explained([qwen2])


@settings(max_examples=15)
@given(
    plan=st.lists(
        st.lists(st.tuples(st.integers(1, 7), st.integers(1, 6), st.none() | st.integers(0, 3)), min_size=1, max_size=5),
        min_size=1,
        max_size=5,
    ),
    publishes=st.lists(st.integers(0, 30), max_size=3),
    way=st.sampled_from(WAYS),
)
def test_any_dialogues_under_any_publishes_are_exact(models, crowded, plan, publishes, way):
    """Each dialogue: its turns as prompt, tokens, and when it is cancelled."""
    engine = crowded[way]
    engine.publish(models[0].state_dict(), 0)
    before = engine.sampled_tokens("train")
    passes = Passes(engine)
    passes._actions = {
        at: (lambda at=at: [passes.publish(models[v].state_dict(), v) for v, when in enumerate(sorted(publishes), start=1) if when == at])
        for at in publishes
    }

    async def play():
        async def one(number, turns):
            talk = Talk(engine, number)
            for k, (length, new, cancelled_after) in enumerate(turns):
                handle = talk.ask([2 + (number + k + i) % 60 for i in range(length)], new=new, seed=100 * number + k)
                if cancelled_after is not None:
                    for _ in range(cancelled_after):
                        await asyncio.sleep(0.0003)
                    handle.cancel()
                await talk.answer()
            engine.end_dialogue(number)
            return talk

        return await asyncio.gather(*[one(number, turns) for number, turns in enumerate(plan)])

    try:
        talks = asyncio.run(play())
    finally:
        passes.stop()
    assert engine.sampled_tokens("train") - before == sum(len(g.token_ids) for talk in talks for _, g in talk.turns)
    for talk in talks:
        talk.assert_explained(models)


@pytest.fixture(scope="module")
def crowded(qwen2_path):
    engines = {way: loaded(qwen2_path, slots=3, on_weight_update=way, prefill_tokens=7) for way in WAYS}
    yield engines
    for engine in engines.values():
        engine.close()
