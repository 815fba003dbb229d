"""The ledger: every whole is the sum of its parts, and what is saved comes back."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from sluice.ledger import OUTCOMES, Ledger

SETTLED = ("rejected", "failed", "cancelled")
LEFT = ("trained", "dropped", "cut", "expired", "surplus", "discarded")


RATES = {"scheduler/rejected/": "scheduler/rejected_rate/", "ledger/rejected_members/": "ledger/rejected_member_rate/"}


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    ledger = Ledger()
    for _ in range(draw(st.integers(0, 20))):
        ledger.groups_launched += 1
        size, tokens = draw(st.integers(1, 4)), draw(st.integers(0, 50))
        ledger.attempts_launched += size
        for _ in range(size):
            ledger.member_opened(tokens)
        outcome = draw(st.sampled_from((*LEFT, "open", "running")))
        if outcome in LEFT:
            ledger.members_left(outcome, size, size * tokens)
            category, reason = draw(st.sampled_from((("invalid", "incomplete"), ("low_information", "no_spread"))))
            ledger.group_left(outcome, category if outcome in ("dropped", "cut") else None, reason)
            ledger.group_settled(size * tokens, draw(st.integers(0, 9)))
    for _ in range(draw(st.integers(0, 20))):
        ledger.attempts_launched += 1
        ledger.attempt_ended(draw(st.sampled_from(SETTLED)), draw(st.integers(0, 9)), draw(st.none() | st.just("reward_error")))
    ledger.tokens_came_late(draw(st.integers(0, 9)))
    ledger.tokens_were_lost(draw(st.integers(0, 9)))
    return ledger


@given(ledgers())
def test_the_shares_of_every_whole_sum_to_one(ledger: Ledger) -> None:
    metrics = ledger.metrics()
    wholes = {
        "ledger/token_share/": ledger.total_tokens,
        "ledger/attempt_share/": sum(ledger.attempts.values()),
        "ledger/group_share/": sum(ledger.groups.values()),
    }
    for prefix, whole in wholes.items():
        shares = [value for name, value in metrics.items() if name.startswith(prefix)]
        assert math.isclose(sum(shares), 1.0) if whole else not shares
    dropped = sum(value for name, value in metrics.items() if name.startswith("scheduler/rejected_rate/"))
    assert math.isclose(dropped, metrics.get("ledger/group_share/dropped", 0.0) + metrics.get("ledger/group_share/cut", 0.0))


@given(ledgers())
def test_every_count_has_its_rate_and_no_rate_is_above_one(ledger: Ledger) -> None:
    metrics = ledger.metrics()
    for name in metrics:
        for count, rate in (
            ("scheduler/rejected/", "scheduler/rejected_rate/"),
            ("ledger/rejected_members/", "ledger/rejected_member_rate/"),
        ):
            if name.startswith(count):
                assert 0.0 <= metrics[name.replace(count, rate)] <= 1.0


@given(ledgers())
def test_a_saved_ledger_comes_back_whole(ledger: Ledger) -> None:
    state = json.loads(json.dumps(ledger.state_dict()))
    restored = Ledger()
    restored.load_state_dict(state)
    assert restored.state_dict() == ledger.state_dict()
    assert restored.metrics() == ledger.metrics()
    assert restored.running_attempts == ledger.running_attempts


def test_case_126_every_launched_rollout_ends_in_exactly_one_outcome() -> None:
    ledger = Ledger()
    ledger.attempts_launched = 10
    for outcome, number in (("trained", 5), ("dropped", 2), ("expired", 1)):
        for _ in range(number):
            ledger.member_opened(1)
        ledger.members_left(outcome, number, number)
    ledger.attempt_ended("failed", 1, "engine_error")
    ledger.attempt_ended("cancelled", 1)
    assert sum(ledger.attempts.values()) == 10
    assert set(ledger.attempts) == set(OUTCOMES)
    assert math.isclose(sum(value for name, value in ledger.metrics().items() if name.startswith("ledger/attempt_share/")), 1.0)
    assert ledger.metrics()["ledger/rejected_member_rate/engine_error"] == 0.1
