"""Where everything stands, for a person: plain data for JSON at every moment, and words for what is waited for."""

from __future__ import annotations

import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.filters import RatioGuard
from sluice.scheduler import events as ev
from tests.fakes import MachinePlayer

MIXED = [1.0, 0.0]
SAME = [1.0, 1.0]


def look(player: MachinePlayer) -> dict[str, object]:
    snapshot = player.scheduler.snapshot(player.now)
    assert json.loads(json.dumps(snapshot, allow_nan=False)) == snapshot
    return snapshot


def test_before_anything_is_asked_for_nothing_is_wanted() -> None:
    assert look(MachinePlayer.make(group_size=2)) == {
        "step": 0,
        "policy_version": None,
        "wanted": None,
        "kept": None,
        "running_groups": 0,
        "running_attempts": 0,
        "committed": 0,
        "held_by_guard": 0,
        "draws": 0,
        "waiting_for": "",
        "waiting_since_s": None,
        "acceptance_rate": None,
        "oldest_group": None,
        "groups_launched": 0,
        "rejected": {},
        "quarantined": 0,
        "tokens": 0,
        "gate": None,
    }


def test_while_a_batch_is_filled_it_tells_how_far_and_what_is_oldest() -> None:
    player = MachinePlayer.make(group_size=2, async_generation_ratio=1.0, max_response_rounds=1, quarantine_after=1)
    player.publish(0)
    player.want(2)  # at 2.0
    player.finish_group(1, MIXED)
    player.finish_group(2, SAME)
    player.fail(player.members(3)[0])
    player.now += 10.0
    snapshot = look(player)
    assert snapshot["policy_version"] == 0
    assert (snapshot["kept"], snapshot["wanted"]) == (1, 2)
    assert (snapshot["running_groups"], snapshot["running_attempts"], snapshot["committed"]) == (3, 6, 1)
    assert snapshot["acceptance_rate"] == 0.5
    assert snapshot["rejected"] == {"low_information/no_spread": 1, "invalid/response_retries": 1}
    assert snapshot["quarantined"] == 1
    assert snapshot["groups_launched"] == 6
    assert snapshot["tokens"] == player.engine_tokens
    assert snapshot["waiting_since_s"] == player.now - 2.0
    assert snapshot["oldest_group"] == {"group_id": 0, "task_id": "t0", "age_s": player.now - 2.0}
    assert snapshot["waiting_for"] == f"6 members of 3 groups; the oldest is group 0 (task 't0'), since {player.now - 2.0:.1f} s"


def test_between_two_batches_nothing_is_waited_for_but_what_runs_is_told() -> None:
    player = MachinePlayer.make(group_size=2, async_generation_ratio=1.0)
    player.want(1)
    player.finish_group(0, MIXED)
    snapshot = look(player)
    assert (snapshot["wanted"], snapshot["waiting_for"], snapshot["waiting_since_s"]) == (None, "", None)
    assert snapshot["running_groups"] == 1
    assert snapshot["oldest_group"] is not None


def test_expired_groups_are_told_apart_from_dropped_ones() -> None:
    player = MachinePlayer.make(group_size=2, async_generation_ratio=1.0)
    player.want(1)
    player.finish_group(0, MIXED)
    player.advance()
    player.tell(ev.StepAdvanced(step=2))
    assert look(player)["rejected"] == {"expired/stale": 1}


def test_in_order_counts_only_what_the_batch_may_take() -> None:
    player = MachinePlayer.make(group_size=2, async_generation_ratio=1.0, collect="in_order")
    player.want(2)
    for group_id in (0, 2, 3):
        player.finish_group(group_id, MIXED)
    snapshot = look(player)
    assert (snapshot["kept"], snapshot["wanted"], snapshot["committed"]) == (1, 2, 3)


def test_groups_that_the_guard_holds_are_no_members_under_way() -> None:
    player = MachinePlayer.make(group_size=2, guard=RatioGuard(0.0, policy="wait"))
    player.want(2)
    player.finish_group(0, SAME)
    snapshot = look(player)
    assert snapshot["held_by_guard"] == 1
    assert str(snapshot["waiting_for"]).startswith("2 members of 1 groups; the oldest is group 1")


def test_several_causes_are_told_together() -> None:
    player = MachinePlayer.make(group_size=2, async_generation_ratio=1.0, max_staleness=1)
    player.publish(4)
    player.tell(ev.StepAdvanced(step=5))
    player.hold_draws = True
    player.want(1)
    player.answer_draw()
    assert player.scheduler.waiting_for(player.now) == (
        "1 prompt from the task source; and for 2 members of 1 groups; the oldest is group 0 (task 't0'), since 0.0 s"
    )


def test_the_story_of_a_group_tells_everything_that_happened_to_it_and_ends_with_it() -> None:
    player = MachinePlayer.make(group_size=2, max_response_rounds=2)
    player.want(1)
    player.finish(0, None)
    player.finish(1, 1.0)
    player.fail(2)
    assert player.scheduler.story(0) == "group 0 is not open"
    player.finish(3, 1.0)
    story = player.scheduler.story(1)
    for part in ("group 1, task 't1', domain 'math', epoch 0, round 2", "launched in round 2", "delivered 0", "attempts running [4]"):
        assert part in story


@settings(max_examples=30)
@given(seed=st.integers(0, 1_000_000), ratio=st.sampled_from([0.0, 0.5, 1.0]), slow=st.booleans())
def test_at_every_moment_it_is_plain_data_and_says_what_a_wanted_batch_waits_for(seed: int, ratio: float, slow: bool) -> None:
    chance = random.Random(seed)
    player = MachinePlayer.make(
        group_size=2, async_generation_ratio=ratio, max_response_rounds=1, guard=RatioGuard(0.5, policy="wait"), max_resample_rounds=100
    )
    player.hold_draws = slow
    for _ in range(3):
        player.want(2)
        while player.scheduler.filling is not None:
            snapshot = look(player)
            assert snapshot["waiting_for"] not in ("", "nothing")
            kept, wanted = snapshot["kept"], snapshot["wanted"]
            assert isinstance(kept, int)
            assert isinstance(wanted, int)
            assert kept >= 0
            assert kept < wanted or player.draws
            if player.draws and (not player.pending or chance.random() < 0.5):
                player.answer_draw()
            elif chance.random() < 0.1:
                player.fail(chance.choice(sorted(player.pending)))
            else:
                player.finish(chance.choice(sorted(player.pending)), float(chance.random() < 0.5))
        assert look(player)["waiting_for"] == ""
        player.step()
