"""Slots, their tickets and the domains of a mix: shares hold in every stretch of tickets, whatever was forgotten or gone on with."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduler.slots import Mix, Slot, Slots

shares_of_domains = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 10.0), min_size=1)


@given(shares=shares_of_domains, size=st.integers(1, 40))
def test_after_any_number_of_tickets_every_domain_is_within_a_group_of_its_share(shares: dict[str, float], size: int) -> None:
    mix = Mix(shares)
    total = sum(Fraction(share) for share in shares.values())
    have: Counter[str] = Counter()
    for ticket in range(5 * size):
        have[mix.domain_of(ticket)] += 1
        for domain, share in shares.items():
            assert abs(have[domain] - Fraction(share) / total * (ticket + 1)) < len(shares)
            assert have[domain] < Fraction(share) / total * (ticket + 1) + 1


@given(shares=shares_of_domains, batches=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_counts_of_a_batch_are_those_of_its_tickets_and_forgetting_changes_nothing(shares: dict[str, float], batches: list[int]) -> None:
    whole, forgetful = Mix(shares), Mix(shares)
    first = 0
    for size in batches:
        domains = [whole.domain_of(ticket) for ticket in range(first, first + size)]
        assert forgetful.counts(first, first + size) == Counter(domains)
        first += size
        forgetful.forget_before(first)
    resumed = Mix(shares)
    resumed.advance_to(first)
    assert [resumed.domain_of(ticket) for ticket in range(first, first + 5)] == [
        whole.domain_of(ticket) for ticket in range(first, first + 5)
    ]


def test_the_domain_that_is_furthest_behind_comes_next_and_ties_go_to_the_larger_share_then_by_name() -> None:
    halves = Mix({"math": 0.5, "code": 0.5})
    assert [halves.domain_of(ticket) for ticket in range(4)] == ["code", "math", "code", "math"]
    unequal = Mix({"math": 0.75, "code": 0.25})
    assert [unequal.domain_of(ticket) for ticket in range(4)] == ["math", "math", "code", "math"]


def test_shares_are_a_ratio_and_need_not_sum_to_one() -> None:
    assert Mix({"a": 3, "b": 1}).counts(0, 8) == Mix({"a": 0.75, "b": 0.25}).counts(0, 8) == {"a": 6, "b": 2}


def test_the_largest_share_takes_what_others_leave() -> None:
    mix = Mix({"a": 0.2, "b": 0.5, "c": 0.3})
    assert mix.largest({"a", "c"}) == "c"
    assert mix.largest({"a", "b", "c"}) == "b"
    assert Mix({"b": 1, "a": 1}).largest({"a", "b"}) == "a"


@pytest.mark.parametrize("shares", [{}, {"a": 0.0}, {"a": 1.0, "b": -0.5}])
def test_a_mix_without_shares_is_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="share above 0"):
        Mix(shares)


def test_tickets_are_given_in_order_and_a_replacement_keeps_ticket_and_domain() -> None:
    slots = Slots(Mix({"math": 0.5, "code": 0.5}))
    first, second = slots.give(slots.next_ticket), slots.give(slots.next_ticket)
    assert (first, second) == (Slot(0, 1, "code"), Slot(1, 1, "math"))
    slots.owe_again(first, 2)
    assert slots.owed[0] == Slot(0, 2, "code")
    assert slots.to_draw(slots.owed[0]) == Slot(0, 2, "code")


def test_where_draws_are_mixed_a_slot_has_its_domain_when_it_is_drawn_for_and_its_replacement_another() -> None:
    slots = Slots(Mix({"math": 0.5, "code": 0.5}), mixes_draws=True)
    first = slots.give(0)
    assert first.domain is None
    drawn = slots.to_draw(first)
    assert drawn.domain == "code"
    slots.owe_again(drawn, 2)
    again = slots.to_draw(slots.owed.popleft())
    assert again == Slot(0, 2, "math")
    slots.next_batch(1)
    assert slots.to_draw(slots.give(1)).domain == "code"


def test_without_a_mix_slots_have_no_domain() -> None:
    slots = Slots(None)
    assert slots.to_draw(slots.give(3)) == Slot(3, 1, None)
    assert slots.next_ticket == 4


def test_what_is_forgotten_is_no_longer_owed_and_its_draws_are_answered_in_vain() -> None:
    slots = Slots(None)
    slots.draws.extend([slots.give(0), slots.give(1)])
    slots.owed.append(slots.give(2))
    assert (slots.drawing, len(slots.waiting())) == (2, 3)
    slots.forget()
    assert (slots.drawing, slots.waiting(), list(slots.draws)) == (0, [], [None, None])


@pytest.mark.parametrize("mixes_draws", [False, True])
def test_slots_go_on_where_they_were_saved(mixes_draws: bool) -> None:
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}
    slots = Slots(Mix(shares), mixes_draws=mixes_draws)
    for ticket in range(7):
        slots.to_draw(slots.give(ticket))
    slots.next_batch(7)
    later = Slots(Mix(shares), mixes_draws=mixes_draws)
    later.load_state_dict(slots.state_dict())
    assert (later.base, later.next_ticket, list(later.owed)) == (7, 7, [])
    for ticket in range(7, 20):
        assert later.to_draw(later.give(ticket)) == slots.to_draw(slots.give(ticket))
