from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import FilterError
from sluice.filters import build_response_filter
from tests.fakes import make_group, make_rollout, make_turn


def response(kind, metric=None, **arguments):
    return build_response_filter({"type": kind, "filter_args": arguments, "metric": metric}, where="rewards.math.response_filter_config")


def multi_turn(*lengths, text="x"):
    """A rollout of several turns with three prompt (or environment) tokens before each."""
    return replace(make_rollout(), turns=tuple(make_turn(tokens=length, text=text) for length in lengths))


@given(st.lists(st.integers(0, 9), max_size=5), st.integers(0, 20), st.integers(0, 20))
def test_length_counts_the_tokens_of_the_policy_only(lengths, low, width):
    total = sum(lengths)
    verdict = response("length", min_tokens=low, max_tokens=low + width).judge(multi_turn(*lengths))
    assert verdict.keep == (low <= total <= low + width)
    if not verdict.keep:
        assert verdict.reason == ("too_short" if total < low else "too_long")
        assert (verdict.category, verdict.source, verdict.evidence) == ("invalid", "length", {"tokens": total})


def test_case_19_length_is_a_sum_and_not_a_span():
    rollout = multi_turn(4, 5)  # 4 tokens, an environment's reply, 5 tokens: 9, the span is 12
    verdict = response("length", max_tokens=10).judge(rollout)
    assert verdict.keep
    assert verdict.evidence == {"tokens": 9}
    nothing = replace(make_rollout(), turns=(replace(make_turn(0), token_ids=np.zeros(0, dtype=np.int64)),))
    assert response("length", max_tokens=0).judge(nothing).keep


def test_reward_range_includes_its_bounds_and_leaves_a_missing_side_open():
    both = response("reward_range", low=0, high=1)
    assert both.judge(make_rollout(reward=0.0)).keep
    assert both.judge(make_rollout(reward=1.0)).keep
    assert both.judge(make_rollout(reward=-0.1)).reason == "reward_too_low"
    assert both.judge(make_rollout(reward=1.1)).reason == "reward_too_high"
    assert response("reward_range", low=0).judge(make_rollout(reward=1e9)).keep
    assert response("reward_range", high=0).judge(make_rollout(reward=-1e9)).keep
    assert both.judge(make_rollout(reward=2.0)).category == "invalid"


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_response_without_a_reward_is_incomplete(reward):
    verdict = response("reward_range", low=0).judge(make_rollout(reward=reward))
    assert (verdict.keep, verdict.reason, verdict.category) == (False, "incomplete", "invalid")


def test_reward_range_reads_a_named_metric_and_never_a_substitute():
    acc = response("reward_range", metric="acc", low=1)
    assert acc.judge(make_rollout(reward=0.0, metrics={"acc": 1.0})).keep
    assert not acc.judge(make_rollout(reward=5.0, metrics={"acc": 0.0})).keep
    assert acc.judge(make_rollout(reward=None)).reason == "incomplete"
    with pytest.raises(FilterError, match=r"rewards\.math\.response_filter_config\.metric is 'acc'.*\['fmt'\]"):
        acc.judge(make_rollout(reward=5.0, metrics={"fmt": 0.0}))


def test_format_searches_or_matches_in_full():
    assert response("format", pattern=r"\d+").judge(make_rollout(text="it is 42.")).keep
    full = response("format", pattern=r"\d+", full=True)
    assert full.judge(make_rollout(text="42")).keep
    verdict = full.judge(make_rollout(text="it is 42."))
    assert (verdict.keep, verdict.reason, verdict.category, verdict.source) == (False, "format", "invalid", "format")
    assert response("format", pattern="(?s)a.*b").judge(make_rollout(text="a\nb")).keep
    assert response("format", pattern="(?m)^done$").judge(multi_turn(1, 1, text="done")).keep
    assert response("format", pattern="", full=True).judge(multi_turn()).keep


def test_finish_reasons_are_allowed_or_denied():
    stopped, cut = make_rollout(), make_rollout(finish_reason="length")
    for query in (response("finish_reason", allowed=["stop"]), response("finish_reason", denied=["length", "cancelled"])):
        assert query.judge(stopped).keep
        verdict = query.judge(cut)
        assert (verdict.keep, verdict.reason, verdict.category) == (False, "finish_reason", "invalid")


def test_a_response_filter_judges_rollouts_only():
    for bad in ("text", make_group([1.0]), [1.0]):
        with pytest.raises(FilterError, match="expected a Rollout, got"):
            response("length", max_tokens=1).judge(bad)
