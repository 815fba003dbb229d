"""Weights that change while responses are under way: which version samples what, and which versions stay in memory."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.config.models import LoraConfig
from sluice.errors import GenerationError
from sluice.generation.base import Span, versions_of
from sluice.generation.slot import SlotEngine
from tests.generation import tiny
from tests.generation.tiny import Passes, adapted, perturbed

PROMPTS = [[5], [7, 8], [9, 10, 11], list(range(2, 22)), [5, 5, 5, 5, 5]]


@pytest.fixture(scope="module")
def models(qwen2):
    """What the trainer holds at versions 0, 1, ... 4."""
    return [qwen2, *[perturbed(tiny.qwen2(), 0.03 * k) for k in range(1, 5)]]


@pytest.fixture(scope="module")
def crowded(qwen2_path):
    """By what becomes of responses under way: three slots and tiny prefill passes."""
    engines = {way: loaded(qwen2_path, slots=3, on_weight_update=way, prefill_tokens=7) for way in ("finish", "restart", "continue")}
    yield engines
    for engine in engines.values():
        engine.close()


def loaded(path, *, slots: int = 4, **how) -> SlotEngine:
    """An engine whose responses end at their limit only, so that they are under way when they should be."""
    engine = SlotEngine.load(path, max_slots=slots, max_length=64, threads=1, **how)
    engine._stops[:] = False
    return engine


def played(engine, asked, actions=None):
    """Submit everything at once; actions: before a pass, counted from 0, a function of the handles and the passes. All that came of it."""
    handles = []
    passes = Passes(engine, {at: lambda act=act: act(handles, passes) for at, act in (actions or {}).items()})

    async def all_of_them():
        handles.extend(engine.submit(one) for one in asked)
        return await asyncio.gather(*[handle.future for handle in handles], return_exceptions=True)

    try:
        return asyncio.run(all_of_them()), handles, passes
    finally:
        passes.stop()


def publish(model, version: int):
    return lambda handles, passes: passes.publish(model.state_dict(), version)


plans = st.lists(
    st.tuples(
        st.sampled_from(PROMPTS),
        st.integers(1, 24),
        st.sampled_from([0.0, 0.7, 1.0]),
        st.integers(0, 2**63),
        st.sampled_from(["train", "validation"]),
        st.none() | st.integers(0, 40),  # pass before which it is cancelled
    ),
    min_size=1,
    max_size=9,
)


def planned(plan, publishes, models):
    """Requests, and what is to happen before which pass."""
    asked = [
        tiny.request(i, prompt, new=new, temperature=temperature, seed=seed, purpose=purpose)
        for i, (prompt, new, temperature, seed, purpose, _) in enumerate(plan)
    ]

    def acting(at: int):
        def act(handles, passes):
            for i, (*_, cancelled_at) in enumerate(plan):
                if cancelled_at == at:
                    handles[i].cancel()
            for version, publish_at in enumerate(sorted(publishes), start=1):
                if publish_at == at:
                    passes.publish(models[version].state_dict(), version)

        return act

    return asked, {at: acting(at) for at in {*publishes, *[entry[-1] for entry in plan if entry[-1] is not None]}}


@settings(max_examples=25)
@given(plan=plans, publishes=st.lists(st.integers(0, 40), max_size=4), way=st.sampled_from(["finish", "restart", "continue"]))
def test_every_token_is_of_the_version_that_it_is_said_to_be_of(models, crowded, plan, publishes, way):
    """Queues, prompts in pieces, rows that move, cancels and publishes; with `finish`, as if nothing had been published at all."""
    engine = crowded[way]
    engine.publish(models[0].state_dict(), 0)
    before = {purpose: engine.sampled_tokens(purpose) for purpose in ("train", "validation")}
    asked, actions = planned(plan, publishes, models)
    generations, handles, passes = played(engine, asked, actions)
    for one, handle, generation in zip(asked, handles, generations, strict=True):
        tiny.assert_explained(models, one, generation)
        assert handle.sampled_tokens == len(generation.token_ids)
        assert generation.finish_reason == ("cancelled" if len(generation.token_ids) < one.max_new_tokens else "length")
        if way == "finish":
            assert generation.token_versions is None
    for purpose, count in before.items():
        mine = [g for g, one in zip(generations, asked, strict=True) if one.purpose == purpose]
        assert sum(len(g.token_ids) for g in mine) == engine.sampled_tokens(purpose) - count
    assert engine.metrics()["engine/versions_live"] == 1  # between passes: `Passes` sees to it that none is kept that no row needs
    assert way == "finish" or max(passes.versions_live) == 1


# ---------------------------------------------------------------- finish


def test_a_response_under_way_is_the_same_to_the_bit_as_without_a_publish(qwen2_path, models):
    asked = [tiny.request(i, PROMPTS[i], new=10 + 4 * i, temperature=0.7) for i in range(4)]
    with loaded(qwen2_path) as engine:
        undisturbed, _, _ = played(engine, asked)
        disturbed, _, passes = played(engine, asked, {3: publish(models[1], 1), 5: publish(models[2], 2)})
        assert engine.policy_version == 2
    assert passes.versions_live[:7] == [1, 1, 1, 1, 2, 2, 2]  # the second publish takes the place of the first, which nobody began under
    for one, other in zip(undisturbed, disturbed, strict=True):
        assert (other.policy_version, other.token_versions) == (0, None)
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.inference_logprobs, other.inference_logprobs)


def test_a_response_is_the_same_whoever_runs_beside_it_under_newer_weights(qwen2_path, models):
    asked = [tiny.request(i, PROMPTS[i % 5], new=30 if i == 0 else 4) for i in range(16)]
    actions = {4: publish(models[1], 1), 9: publish(models[2], 2), 16: publish(models[3], 3)}
    with loaded(qwen2_path) as engine:
        together, _, passes = played(engine, asked, actions)
        assert sorted({g.policy_version for g in together}) == [0, 1, 2, 3]
        assert max(passes.versions_live) == 3
        for version, model in enumerate(models[:4]):
            engine.publish(model.state_dict(), version)
            for one, generation in zip(asked, together, strict=True):
                if generation.policy_version == version:
                    alone = tiny.generate(engine, [one])[0]
                    np.testing.assert_array_equal(generation.token_ids, alone.token_ids)
                    np.testing.assert_allclose(generation.inference_logprobs, alone.inference_logprobs, atol=1e-5)


def test_a_version_is_freed_with_its_last_response(qwen2_path, models):
    """Publishes in quick succession during one long response: each version stays as long as it is needed, and at the end there is one."""
    asked = [tiny.request(i, [5 + i], new=new) for i, new in enumerate((40, 3, 6, 20, 6))]
    kept: list[list[weakref.ref]] = []
    with loaded(qwen2_path, slots=3) as engine:

        def note(handles, passes):
            assert [int(engine._rows.edition[rows[0]]) for rows in engine._rows.ready()] == [0, 1, 2]
            kept.append([weakref.ref(tensor) for tensors in engine._weights._editions.values() for tensor in tensors])

        generations, _, passes = played(engine, asked, {1: publish(models[1], 1), 4: publish(models[2], 2), 12: note})
        assert [g.policy_version for g in generations] == [0, 0, 0, 1, 2]
        assert max(passes.versions_live) == 3
        assert passes.versions_live[-1] == 2  # the long response, and what the next ones would begin under
        assert len(kept[0]) == 3 * len(engine._weights._editions[engine._weights.newest])
        assert engine.metrics()["engine/versions_live"] == 1
        gc.collect()
        assert sum(reference() is not None for reference in kept[0]) == len(kept[0]) // 3
        newest = {tensor.data_ptr() for tensor in engine._weights._editions[engine._weights.newest]}
        assert {parameter.data_ptr() for parameter in engine._model.net.parameters()} == newest
    assert engine.metrics()["engine/versions_live"] == 0


def test_a_publish_while_nothing_runs_copies_into_the_weights_that_are_there(engine, models):
    tiny.generate(engine, [tiny.request(0, [5])])
    before = {name: parameter.data_ptr() for name, parameter in engine._model.net.named_parameters()}
    engine.publish(models[1].state_dict(), 1)
    assert {name: parameter.data_ptr() for name, parameter in engine._model.net.named_parameters()} == before
    assert engine.metrics()["engine/versions_live"] == 1


def test_what_ends_at_a_cancel_keeps_no_weights_in_memory(qwen2_path, models):
    """The batch is full: everything under way is cancelled, and then the new weights come."""

    def cancel_and_publish(handles, passes):
        for handle in handles:
            handle.cancel()
        passes.publish(models[1].state_dict(), 1)

    with loaded(qwen2_path) as engine:
        generations, _, _ = played(engine, [tiny.request(i, [5], new=20) for i in range(6)], {4: cancel_and_publish})
        assert [g.finish_reason for g in generations] == ["cancelled"] * 6
        asyncio.run(asyncio.to_thread(engine.publish, models[2].state_dict(), 2))
        assert engine._weights.newest == 0  # never a second set


def test_a_prompt_that_waits_for_its_first_pass_begins_under_the_new_weights(qwen2_path, models):
    asked = [tiny.request(0, range(2, 22), new=5), tiny.request(1, [5], new=5)]
    with loaded(qwen2_path, prefill_tokens=8) as engine:
        generations, _, passes = played(engine, asked, {1: publish(models[1], 1)})  # before the second of the first prompt's three pieces
    assert [g.policy_version for g in generations] == [0, 1]
    for one, generation in zip(asked, generations, strict=True):
        tiny.assert_explained(models, one, generation)


def test_siblings_share_their_prefill_within_a_version_only(qwen2_path, models):
    """Four siblings, two at a time, with a publish between the first and the second pair; then all under one version."""
    asked = [tiny.request(i, range(2, 22), new=5) for i in range(4)]
    with loaded(qwen2_path, slots=2) as engine:
        played(engine, asked, {2: publish(models[1], 1)})
        assert engine.metrics()["engine/prefill_tokens"] == 2 * 20
        assert engine.metrics()["engine/prefill_tokens_shared"] == 2 * 20
    with loaded(qwen2_path, slots=3, prefill_tokens=8) as engine:
        # The third is seated, after the publish, while the first two are prefilled in pieces.
        generations, _, _ = played(engine, [tiny.request(9, [5], new=3), *asked[:3]], {3: publish(models[1], 1)})
        assert [g.policy_version for g in generations] == [0, 0, 0, 1]
        assert engine.metrics()["engine/prefill_tokens"] == 1 + 2 * 20
        for one, generation in zip(asked, generations[1:], strict=False):
            tiny.assert_explained(models, one, generation)


def test_two_weights_of_the_same_number_are_still_two(qwen2_path, models):
    asked = [tiny.request(0, [5], new=12), tiny.request(1, [5], new=3), tiny.request(2, [5], new=3)]
    with loaded(qwen2_path, slots=2) as engine:
        generations, _, passes = played(engine, asked, {2: publish(models[1], 0)})
    assert [g.policy_version for g in generations] == [0, 0, 0]
    assert max(passes.versions_live) == 2
    for one, generation, model in zip(asked, generations, (models[0], models[0], models[1]), strict=True):
        tiny.assert_explained([model], one, generation)


def test_cancels_across_versions_return_what_each_version_had_sampled(qwen2_path, models):
    asked = [tiny.request(0, [5], new=30), tiny.request(1, [6], new=3), tiny.request(2, [7], new=30), tiny.request(3, [8], new=30)]

    def cancel(index):
        return lambda handles, passes: handles[index].cancel()

    with loaded(qwen2_path, slots=2) as engine:
        actions = {2: publish(models[1], 1), 8: cancel(0), 11: publish(models[2], 2), 14: cancel(2), 18: cancel(3)}
        generations, handles, passes = played(engine, asked, actions)
        assert [g.policy_version for g in generations] == [0, 0, 1, 1]
        assert [g.finish_reason for g in generations] == ["cancelled", "length", "cancelled", "cancelled"]
        assert engine.sampled_tokens("train") == sum(len(g.token_ids) for g in generations) == sum(h.sampled_tokens for h in handles)
        assert (max(passes.versions_live), engine.metrics()["engine/versions_live"]) == (2, 1)
    for one, generation in zip(asked, generations, strict=True):
        assert len(generation.token_ids) > 0
        tiny.assert_explained(models, one, generation)


# ---------------------------------------------------------------- continue


def test_case_64_versions_grow_with_the_tokens(qwen2_path, models):
    asked = [tiny.request(0, [5], new=8)]
    with loaded(qwen2_path, on_weight_update="continue") as engine:
        (generation,), _, _ = played(engine, asked, {4: publish(models[1], 1)})
    assert generation.policy_version == 0
    assert generation.token_versions.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert len(generation.token_ids) == len(generation.inference_logprobs) == 8
    tiny.assert_explained(models, asked[0], generation)


def test_case_64_a_cancel_without_a_token_of_the_new_version_adds_none(qwen2_path, models):
    """Five tokens, new weights, and a cancel while the sequence is still being computed again under them."""
    asked = [tiny.request(0, range(2, 14), new=20)]
    with loaded(qwen2_path, on_weight_update="continue", prefill_tokens=8) as engine:
        actions = {5: publish(models[1], 1), 6: lambda handles, passes: handles[0].cancel()}
        (generation,), (handle,), _ = played(engine, asked, actions)
    assert generation.finish_reason == "cancelled"
    assert (generation.policy_version, generation.token_versions) == (0, None)
    assert len(generation.token_ids) == len(generation.inference_logprobs) == handle.sampled_tokens == 5


def test_versions_published_between_two_tokens_have_none(qwen2_path, models):
    asked = [tiny.request(0, [5], new=6), tiny.request(1, [6], new=2), tiny.request(2, [7], new=6)]

    def twice(handles, passes):
        for version in (1, 2):
            passes.publish(models[version].state_dict(), version)

    with loaded(qwen2_path, slots=2, on_weight_update="continue") as engine:
        generations, _, passes = played(engine, asked, {1: twice, 3: publish(models[3], 3)})
        assert max(passes.versions_live) == 1
    assert [g.policy_version for g in generations] == [0, 0, 2]
    assert generations[0].token_versions.tolist() == [0, 0, 2, 2, 3, 3]
    assert generations[1].token_versions is None
    for one, generation in zip(asked, generations, strict=True):
        tiny.assert_explained(models, one, generation)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=6))
def test_spans_give_each_token_its_version(drawn):
    """drawn: version and tokens of each span."""
    spans, expected = [], []
    for version, count in drawn:
        expected += [version] * count
        spans.append(Span(version, len(expected)))
    first, versions = versions_of(spans)
    assert first == (expected[0] if expected else drawn[-1][0])
    if len(set(expected)) > 1:
        assert versions.dtype == np.int64
        assert versions.tolist() == expected
    else:
        assert versions is None


# ---------------------------------------------------------------- in every mode


@pytest.mark.parametrize("way", ["finish", "restart", "continue"])
def test_case_80_what_is_asked_for_after_a_publish_is_of_its_version_while_older_responses_run(qwen2_path, models, way):
    with loaded(qwen2_path, on_weight_update=way) as engine:

        async def play():
            turnstile = tiny.Turnstile(engine)
            older = engine.submit(tiny.request(0, [5], new=10))
            await turnstile.arrival()
            turnstile.open()
            await asyncio.to_thread(engine.publish, models[1].state_dict(), 13)
            assert engine.policy_version == 13
            newer = engine.submit(tiny.request(1, [5], new=10))
            return await asyncio.gather(older.future, newer.future)

        older, newer = asyncio.run(play())
    assert (older.policy_version, newer.policy_version, newer.token_versions) == (0, 13, None)
    tiny.assert_explained({13: models[1]}, tiny.request(1, [5]), newer)


def poisoned(model, name: str):
    """Weights that are finite and give logits that are not."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state[name].fill_(3e38)
    return state


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.input_layernorm.weight"])
@pytest.mark.parametrize("new", [1, 6])
def test_weights_whose_logits_are_not_finite_fail_those_who_begin_under_them_and_nobody_else(qwen2_path, models, name, new):
    asked = [tiny.request(0, [5], new=20), tiny.request(1, [6], new=3), *[tiny.request(i, range(2, 22), new=new) for i in (2, 3)]]
    with loaded(qwen2_path, slots=2, prefill_tokens=8) as engine:
        undisturbed = tiny.generate(engine, asked[:2])
        counted = engine.sampled_tokens("train")
        results, handles, _ = played(engine, asked, {1: lambda handles, passes: passes.publish(poisoned(models[1], name), 7)})
        for result, generation in zip(results[:2], undisturbed, strict=True):
            np.testing.assert_array_equal(result.token_ids, generation.token_ids)
        for result in results[2:]:
            assert isinstance(result, GenerationError)
            assert "logits must be finite, but the weights of version 7 give NaN or infinity" in str(result)
        assert [handle.sampled_tokens for handle in handles] == [20, 3, 0, 0]
        assert engine.sampled_tokens("train") - counted == 23
        engine.publish(models[2].state_dict(), 8)  # and nothing that is not finite stays where others are seated
        for one, generation in zip(asked, tiny.generate(engine, asked), strict=True):
            tiny.assert_explained({8: models[2]}, one, generation)


def test_a_prompt_in_pieces_fails_at_the_first_piece_that_is_not_finite(qwen2_path, models):
    """Before a row that moves could leave such entries in the slot of another."""
    with loaded(qwen2_path, prefill_tokens=8) as engine:
        engine.publish(poisoned(models[1], "model.layers.0.input_layernorm.weight"), 7)
        results, _, _ = played(engine, [tiny.request(i, range(2, 22)) for i in range(2)])
        assert all(isinstance(result, GenerationError) for result in results)
        assert engine.metrics()["engine/prefill_tokens"] == 8


def test_responses_that_go_on_under_such_weights_fail_with_their_tokens_counted(qwen2_path, models):
    asked = [tiny.request(i, [5 + i], new=9) for i in range(3)]
    with loaded(qwen2_path, on_weight_update="continue") as engine:
        state = poisoned(models[1], "model.norm.weight")
        results, handles, _ = played(engine, asked, {3: lambda handles, passes: passes.publish(state, 7)})
        assert all(isinstance(result, GenerationError) and "version 7" in str(result) for result in results)
        assert [handle.sampled_tokens for handle in handles] == [4, 4, 4]
        assert engine.sampled_tokens("train") == 12


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft's
@pytest.mark.parametrize("way", ["finish", "continue"])
def test_with_lora_a_version_is_an_adapter(qwen2, qwen2_path, way):
    from peft import get_peft_model_state_dict

    lora = LoraConfig(r=4, alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    trainers = {0: qwen2, 1: adapted(lora, 0.3), 2: adapted(lora, 0.5)}
    states = {version: get_peft_model_state_dict(trainers[version]) for version in (1, 2)}

    def publish_adapter(version: int):
        return lambda handles, passes: passes.publish(states[version], version)

    asked = [tiny.request(0, PROMPTS[3], new=20), *[tiny.request(i, PROMPTS[3], new=5) for i in range(1, 6)]]
    with loaded(qwen2_path, slots=2, lora=lora, on_weight_update=way) as engine:
        generations, _, passes = played(engine, asked, {3: publish_adapter(1), 9: publish_adapter(2)})
        assert max(passes.versions_live) == (3 if way == "finish" else 1)
        assert engine.metrics()["engine/versions_live"] == 1
        assert len(engine._weights._editions[engine._weights.newest]) == len(states[1]) < len(list(engine._model.net.parameters()))
    versions = {version for g in generations for version in (g.token_versions if g.token_versions is not None else [g.policy_version])}
    assert versions == {0, 1, 2}
    assert (generations[0].token_versions is None) == (way == "finish")
    for one, generation in zip(asked, generations, strict=True):
        tiny.assert_explained(trainers, one, generation)


def test_tied_and_untied_models_change_editions_alike(tmp_path):
    """Parameters that share memory in one edition share it in all."""
    for tied in (True, False):
        settings_ = {"tie_word_embeddings": tied}
        models = [tiny.qwen2(**settings_), perturbed(tiny.qwen2(**settings_), 0.05)]
        asked = [tiny.request(0, [5], new=12), tiny.request(1, [6], new=2), tiny.request(2, [7], new=6)]
        with loaded(tiny.saved(models[0], tmp_path / str(tied)), slots=2) as engine:
            generations, _, _ = played(engine, asked, {1: publish(models[1], 1)})
        assert [g.policy_version for g in generations] == [0, 0, 1]
        for one, generation in zip(asked, generations, strict=True):
            tiny.assert_explained(models, one, generation)


def test_half_precision_weights_change_editions_too(qwen2_path, models):
    asked = [tiny.request(0, [5], new=12), tiny.request(1, [6], new=2), tiny.request(2, [7], new=6)]
    with loaded(qwen2_path, slots=2, precision="bfloat16") as engine:
        generations, _, passes = played(engine, asked, {1: publish(models[1], 1)})
        assert max(passes.versions_live) == 2
        engine.publish(models[1].state_dict(), 1)
        alone = tiny.generate(engine, [asked[2]])[0]
    np.testing.assert_array_equal(generations[2].token_ids, alone.token_ids)
