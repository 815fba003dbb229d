"""The functions that slime and miles call: what they keep, what they answer with, and every kind of reward they meet."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ConfigError, FilterError
from sluice.filters import RatioGuard
from sluice.integrations.slime import FilterOutput, dynamic_filter, no_spread
from tests.integrations.frameworks import Args, Sample, Status


def samples(*rewards: Any, **fields: Any) -> list[Sample]:
    return [Sample(reward, **fields) for reward in rewards]


@given(st.lists(st.sampled_from([0.1, 0.3, 0.6, 1e9 + 0.1]), min_size=1, max_size=7))
def test_equal_rewards_are_dropped_and_others_are_kept_whatever_their_size(rewards: list[float]) -> None:
    answer = no_spread(Args(), samples(*rewards))
    assert answer.keep is (len(set(rewards)) > 1 or len(rewards) == 1)
    assert (answer.reason is None) == answer.keep


def test_the_reason_is_one_text_with_its_category() -> None:
    assert no_spread(Args(), samples(0.1, 0.1, 0.1)).reason == "low_information/no_spread"
    assert no_spread(Args(), samples(1.0, None)).reason == "invalid/incomplete"
    assert no_spread(Args(), samples(0.1, 0.1, 0.1001)) == FilterOutput(keep=True)


def test_our_own_answer_has_the_truth_of_what_it_says() -> None:
    assert bool(no_spread(Args(), samples(1.0, 0.0))) is True
    assert bool(no_spread(Args(), samples(1.0, 1.0))) is False


@dataclass
class OfMiles:
    keep: bool
    reason: str | None = None


@dataclass
class OfSlime(OfMiles):
    keep_when_insufficient: bool = False


@pytest.mark.parametrize("package", ["slime", "miles"])
def test_the_answer_is_of_the_framework_that_the_samples_are_of(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    theirs = OfSlime if package == "slime" else OfMiles
    base_types = ModuleType(f"{package}.rollout.filter_hub.base_types")
    base_types.DynamicFilterOutput = theirs  # type: ignore[attr-defined]
    for module in (package, f"{package}.rollout", f"{package}.rollout.filter_hub"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setitem(sys.modules, base_types.__name__, base_types)
    their_sample = type("Sample", (Sample,), {"__module__": f"{package}.utils.types"})
    answer = dynamic_filter({"type": "std_filter"}, keep_when_insufficient=True)(Args(), [their_sample(1.0), their_sample(1.0)])
    assert isinstance(answer, theirs)
    assert (answer.keep, answer.reason) == (False, "low_information/no_spread")
    assert getattr(answer, "keep_when_insufficient", None) is (True if package == "slime" else None)


def test_a_broken_group_is_never_kept_for_want_of_others() -> None:
    keep = dynamic_filter({"type": "std_filter"}, keep_when_insufficient=True)
    assert keep(Args(), samples(1.0, 1.0)).keep_when_insufficient
    assert not keep(Args(), samples(1.0, None)).keep_when_insufficient


def test_rewards_that_are_mappings_need_a_name() -> None:
    group = samples({"acc": 1, "fmt": 0}, {"acc": 0, "fmt": 0})
    assert no_spread(Args(reward_key="acc"), group).keep
    assert not no_spread(Args(reward_key="fmt"), group).keep
    assert dynamic_filter({"type": "std_filter", "metric": "acc"})(Args(), group).keep
    assert not dynamic_filter({"type": "std_filter", "metric": "fmt"})(Args(reward_key="acc"), group).keep
    with pytest.raises(FilterError, match=r"fields \['acc', 'fmt'\] - set --reward-key"):
        no_spread(Args(), group)
    with pytest.raises(FilterError, match=r"--reward-key is 'score', but its reward has only \['acc', 'fmt'\]"):
        no_spread(Args(reward_key="score"), group)


NAMED = {"type": "std_filter", "metric": "acc"}


def test_case_13_rewards_may_be_numbers_of_any_library() -> None:
    torch = pytest.importorskip("torch")
    for one, other in (
        (True, False),
        (np.float32(1), np.bool_(0)),
        (np.int64(1), 0),
        (torch.tensor(1.0), torch.tensor(0.0)),
        (2**53, 2**53 + 1),
    ):
        assert no_spread(Args(), samples(one, other)).keep
        assert no_spread(Args(reward_key="acc"), samples({"acc": one}, {"acc": other})).keep
        assert dynamic_filter(NAMED)(Args(), samples({"acc": one}, {"acc": other})).keep
        assert not no_spread(Args(), [samples(one, one), samples(one)]).keep  # parts of a sample, each with a value of its own


@pytest.mark.parametrize("bad", ["1", "x", [1], {"x": 1}], ids=str)
def test_a_reward_that_is_no_number_is_refused_in_words(bad: Any) -> None:
    for args, group in ((Args(reward_key="acc"), samples({"acc": bad}, {"acc": bad})), (Args(), [samples(bad), samples(bad)])):
        with pytest.raises(FilterError, match="expected one number as"):
            no_spread(args, group)
    with pytest.raises(FilterError, match="expected samples with a reward"):
        no_spread(Args(), [object()])


def test_a_sample_that_lacks_what_is_named_has_no_reward_and_a_name_that_nobody_has_is_a_mistake() -> None:
    some = samples({"acc": 1}, {"fmt": 1})
    for keep, args in ((no_spread, Args(reward_key="acc")), (dynamic_filter(NAMED), Args())):
        assert keep(args, some).reason == "invalid/incomplete"
    with pytest.raises(
        FilterError, match=r"metric is 'acc', but its reward has only \['fmt'\]"
    ):  # else every group would be dropped for ever
        dynamic_filter(NAMED)(Args(), samples({"fmt": 1}, {"fmt": 0}))


def test_parts_of_a_sample_agree_on_what_is_read_and_on_nothing_else() -> None:
    def parts(**other: Any) -> list[Any]:
        return [samples({"acc": 1, "turn": 1, **other}, {"acc": 1, "turn": 2, **other}), samples({"acc": 0})]

    assert no_spread(Args(reward_key="acc"), parts(notes=["a"])).keep
    with pytest.raises(FilterError, match="one reward for all 2 parts"):
        dynamic_filter({"type": "std_filter", "metric": "turn"})(Args(reward_key="acc"), parts())
    assert no_spread(Args(), [samples(math.nan, float("nan")), samples(1.0)]).reason == "invalid/incomplete"


def test_an_aborted_sample_makes_its_group_incomplete_unless_survivors_are_enough() -> None:
    group = [*samples(1.0, 0.0, 1.0), Sample(None, status=Status.ABORTED)]
    assert no_spread(Args(), group).reason == "invalid/incomplete"
    assert dynamic_filter({"type": "std_filter"}, min_members=3)(Args(), group).keep


def test_a_sample_fanned_out_into_parts_has_one_vote() -> None:
    mean = dynamic_filter({"type": "mean_filter", "filter_args": {"threshold_up": 0.6}})
    assert mean(Args(), [samples(1.0, 1.0, 1.0), samples(0.0)]).keep  # 0.5, and not 0.75
    with pytest.raises(FilterError, match="one reward for all 2 parts"):
        no_spread(Args(), [samples(1.0, 0.0), samples(0.0)])


def test_samples_of_different_groups_are_refused() -> None:
    """A sample whose group nobody tells may belong to any."""
    assert no_spread(Args(), [Sample(1.0, group_index=3), Sample(0.0, group_index=None), Sample(0.0, group_index=3)]).keep
    with pytest.raises(FilterError, match="got group_index 3 of sample 0 and 4 of sample 2"):
        no_spread(Args(), [Sample(1.0, group_index=3), Sample(1.0, group_index=3), [Sample(0.0, group_index=4)]])


def test_filters_of_responses_see_their_length_without_what_tools_said() -> None:
    def most(group: Any, tokens: int) -> bool:
        return all(rollout.sampled_tokens <= tokens for rollout in group.rollouts)

    module = ModuleType("filters_of_mine")
    module.most = most  # type: ignore[attr-defined]
    sys.modules["filters_of_mine"] = module
    try:
        keep = dynamic_filter({"type": "filters_of_mine.most", "filter_args": {"tokens": 9}})
        mask = [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1]
        assert keep(Args(), samples(1.0, 0.0, loss_mask=mask, response_length=15)).keep
        assert not keep(Args(), samples(1.0, 0.0, response_length=15)).keep
    finally:
        del sys.modules["filters_of_mine"]


def test_the_guard_bounds_what_is_dropped() -> None:
    keep = dynamic_filter({"type": "std_filter"}, guard=RatioGuard(max_filter_ratio=0.5))
    assert [keep(Args(), samples(1.0, 1.0)).keep for _ in range(4)] == [True, False, True, False]


def test_what_cannot_be_is_refused_where_the_filter_is_made() -> None:
    with pytest.raises(ConfigError, match="dynamic_filter"):
        dynamic_filter({"type": "std_filtr"})
    with pytest.raises(FilterError, match="got none"):
        no_spread(Args(), [])


# ---------------------------------------------------------------- samples of which nothing trains


def test_what_an_aborted_sample_was_given_as_its_reward_is_none() -> None:
    """radixark/miles#2801, THUDM/slime#2361: what the policy could not help is no wrong answer; seen: it trained as one, with reward 0."""
    group = [*samples(1.0, 1.0, 1.0), Sample(0.0, status=Status.ABORTED)]
    assert no_spread(Args(), group).reason == "invalid/incomplete"
    assert dynamic_filter({"type": "std_filter"}, min_members=3)(Args(), group).reason == "low_information/no_spread"
    assert no_spread(Args(), [*samples(1.0), Sample(0.0, status=Status.FAILED)]).keep  # it may have been the policy's own doing
    parts = [Sample(0.0), Sample(0.0, status=Status.ABORTED)]
    assert no_spread(Args(), [*samples(1.0, 1.0), parts]).reason == "invalid/incomplete"


NOTHING_TRAINS: list[dict[str, Any]] = [{"loss_mask": [0, 0], "response_length": 2}, {"response_length": 0}, {"remove_sample": True}]


@pytest.mark.parametrize("fields", NOTHING_TRAINS, ids=str)
def test_a_sample_of_which_no_token_trains_has_no_vote(fields: dict[str, Any]) -> None:
    """NVIDIA-NeMo/RL#4160, Gen-Verse/OpenClaw-RL#46, OpenRLHF/OpenRLHF#1239: seen: a group whose only spread came of such a row trained."""
    out = Sample(0.0, **fields)
    assert no_spread(Args(), [*samples(1.0, 1.0, 1.0), out]).reason == "low_information/no_spread"
    assert no_spread(Args(), [*samples(1.0, 0.0, 1.0), out]).keep
    assert not no_spread(Args(), [*samples(1.0), out]).keep  # one is left, which has nothing to be compared with
    assert not no_spread(Args(), [out, out]).keep
    assert no_spread(Args(), [*samples(1.0), [Sample(0.0, **fields), Sample(0.0)]]).keep  # of a part of it something trains
