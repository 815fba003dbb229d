"""A machine saved at any moment, through the codec of checkpoints, and gone on with afresh: nothing is lost, nothing comes twice."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.errors import RecordError
from sluice.filters import RatioGuard
from sluice.records.checkpoints import decode, encode
from sluice.scheduler import GroupRecord, Scheduler
from sluice.scheduler import events as ev
from sluice.tasks.domain_tasks import DomainTasks
from sluice.tasks.task_list import TaskList
from sluice.types import Task
from tests.fakes import NO_FILTER, MachinePlayer, make_filters, make_rollout, make_task, make_turn

MIXED = [1.0, 0.0]
SAME = [1.0, 1.0]
TASKS = [make_task(f"t{i}") for i in range(40)]


def started(tasks: list[Task] = TASKS, epochs: int | None = 1, **settings: object) -> MachinePlayer:
    player = MachinePlayer.make(**{"group_size": 2, **settings})
    player.source = TaskList(tasks, seed=0, epochs=epochs, shuffle=False)  # type: ignore[assignment]
    return player


def saved(player: MachinePlayer, tokens: int = 1) -> dict[str, Any]:
    """What a checkpoint holds of machine and tasks."""
    machine = player.scheduler.state_dict(dict.fromkeys(player.pending, tokens))
    source: Any = player.source
    tasks = source.state_dict([(task_id, epoch) for task_id, epoch in machine["outstanding"]])
    return dict(decode(encode({"machine": machine, "tasks": tasks})))


def resumed(player: MachinePlayer, tokens: int = 1, state: dict[str, Any] | None = None) -> MachinePlayer:
    """A fresh player that goes on where this one stands now, as after a kill. `tokens`: sampled so far for each running attempt."""
    state = saved(player, tokens) if state is None else state
    old = player.scheduler
    guard = None
    if old.guard is not None:
        guard = RatioGuard(0.5, old.guard.scope, old.guard.window, old.guard.policy)
    machine = Scheduler(old.config, old.filters, guard=guard)
    source: Any = player.source
    if isinstance(source, DomainTasks):
        fresh: Any = DomainTasks(source.tasks, source.domains, seed=0, epochs=source._lists[source.domains[0]]._epochs, shuffle=False)
    else:
        fresh = TaskList(source.tasks, seed=0, epochs=source._epochs, shuffle=False)
    fresh.load_state_dict(state["tasks"])
    later = MachinePlayer(machine, fresh)
    later.carry_out_unchecked(machine.load_state_dict(state["machine"], {task.task_id: task for task in source.tasks}))
    later.inherited_launches = machine.ledger.attempts_launched
    later.inherited_records = player.inherited_records + len(player.records)
    later.engine_tokens = player.engine_tokens + tokens * len(player.pending)
    later.now = player.now
    later.check()
    return later


def prompts(player: MachinePlayer) -> list[list[str]]:
    return [[group.task.task_id for group in batch.groups] for batch in player.batches]


def fill(player: MachinePlayer, rewards: list[float] = MIXED) -> None:
    while player.scheduler.filling is not None:
        player.finish_group(player.open_group_ids()[0], rewards)


# ---------------------------------------------------------------- every moment of a run


MODES = [
    {},
    {"async_generation_ratio": 1.0},
    {"async_generation_ratio": 1.5, "redundancy": 1},
    {"async_generation_ratio": 0.5, "max_response_rounds": 1},
    {"fill": "shrink", "async_generation_ratio": 1.0},
    {"fill": "shrink"},
    {"collect": "in_order", "async_generation_ratio": 2.0},
    {"on_exhausted": "keep_low_information", "max_resample_rounds": 2},
    {"max_additional_running_prompts": 3},
    {"surplus": "carry", "max_staleness": 2, "max_additional_running_prompts": 2},
    {"guard": RatioGuard(0.5, policy="wait"), "async_generation_ratio": 1.0},
    {"guard": RatioGuard(0.5, scope="window", window=5)},
    {"on_weight_update": "restart", "async_generation_ratio": 1.0, "group_timeout_s": 1000.0},
]


def fresh(mode: dict[str, object]) -> dict[str, object]:
    """The mode with a guard of its own."""
    guard = mode.get("guard")
    return {**mode, "guard": RatioGuard(0.5, guard.scope, guard.window, guard.policy)} if isinstance(guard, RatioGuard) else mode


def something_happens(player: MachinePlayer, chance: random.Random) -> None:
    """A cancel is acknowledged, or a member fails or delivers, perhaps one that was told to stop."""
    if player.acks and chance.random() < 0.3:
        player.carry_out(player.acknowledge(player.acks.pop(0)))
        return
    attempt_id = chance.choice(sorted(player.pending))
    if attempt_id in player.acks:
        player.acks.remove(attempt_id)
        player.finish(attempt_id)
    elif chance.random() < 0.1:
        player.fail(attempt_id)
    else:
        player.finish(attempt_id, float(chance.random() < 0.6))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: " ".join(f"{key}={value}" for key, value in mode.items() if key != "guard"))
@settings(max_examples=20)
@given(seed=st.integers(0, 1_000_000), kills=st.sets(st.integers(0, 80), max_size=3), slow_acks=st.booleans())
def test_killed_at_any_moment_no_prompt_is_skipped_or_repeated_and_no_accepted_group_lost(
    mode: dict[str, object], seed: int, kills: set[int], slow_acks: bool
) -> None:
    chance = random.Random(seed)
    player = started(**fresh(mode))
    records: list[GroupRecord] = []
    trained: list[str] = []
    moment = 0
    while len(trained) < 10 and not player.failures and not (player.batches and player.batches[-1].is_last):
        player.hold_acks = slow_acks
        if moment in kills:
            kept = {group.group_id for group in (*player.scheduler.buffer.groups(), *player.scheduler._delivered)}
            records += player.records
            player = resumed(player)
            assert {group.group_id for group in player.scheduler.buffer.groups()} == kept
        elif player.scheduler.filling is not None:
            something_happens(player, chance)
        elif player.scheduler._delivered:
            trained += [group.task.task_id for group in player.batches[-1].groups]
            player.step()
        else:
            player.want(2)
        moment += 1
    player.tell(ev.Shutdown())
    player.acknowledge_all()
    records += player.records
    assert len(trained) == len(set(trained))
    assert len({record.group_id for record in records}) == len(records) == player.scheduler.ledger.groups_launched
    assert sum(record.sampled_tokens for record in records) == player.engine_tokens
    source: Any = player.source
    consumed = {record.task_id for record in records if record.outcome != "cancelled"}
    returned = {TASKS[index].task_id for _, index in source._put_back}
    assert {task.task_id for task in TASKS[: source.position]} == consumed | returned
    judged = Counter(record.task_id for record in records if record.outcome in ("trained", "dropped", "surplus", "discarded", "expired"))
    assert sum(count - 1 for count in judged.values()) <= player.scheduler.prompts.requeued


def test_a_machine_is_not_changed_by_being_saved_and_its_state_is_plain_data() -> None:
    player = started(async_generation_ratio=1.0, max_response_rounds=1)
    player.want(2)
    player.finish_group(0, MIXED)
    player.fail(player.members(1)[0])
    before = encode(player.scheduler.state_dict())
    assert encode(player.scheduler.state_dict()) == before
    fill(player)
    assert prompts(player) == [["t0", "t2"]]


def test_what_is_saved_of_a_saved_machine_is_the_same_again() -> None:
    player = started(async_generation_ratio=1.0)
    player.want(2)
    for group_id in range(3):
        player.finish_group(group_id, MIXED)
    player.step()
    later = resumed(player)
    first, second = saved(player)["machine"], saved(later)["machine"]
    for name in ("interrupted", "outstanding", "open_groups", "again"):  # group 3 was running
        del first[name], second[name]
    assert encode(first) == encode(second)


def test_a_resumed_run_has_the_batches_of_one_that_was_never_killed() -> None:
    def play(kill_after: int | None) -> tuple[list[list[str]], list[int]]:
        player = started(async_generation_ratio=1.0, collect="in_order")
        batches: list[list[str]] = []
        for step in range(6):
            player.want(2)
            while player.scheduler.filling is not None:
                group_id = player.open_group_ids()[0]
                task_id = player.pending[player.members(group_id)[0]].task.task_id
                player.finish_group(group_id, SAME if int(task_id[1:]) % 5 == 3 else MIXED)
            batches.append(prompts(player)[-1])
            player.step()
            if step == kill_after:
                player = resumed(player)
        return batches, [launch.seed for launch in player.launches][-2:]

    undisturbed, _ = play(None)
    for step in range(5):
        assert play(step)[0] == undisturbed


# ---------------------------------------------------------------- the reports


def test_case_94_the_first_prompts_after_a_resume_are_those_in_flight_and_then_new_ones() -> None:
    player = started(TASKS[:10], async_generation_ratio=1.0)
    for _ in range(2):
        player.want(2)
        fill(player)
        player.step()
    assert prompts(player) == [["t0", "t1"], ["t2", "t3"]]
    later = resumed(player)
    for _ in range(2):
        later.want(2)
        fill(later)
        later.step()
    assert prompts(later) == [["t4", "t5"], ["t6", "t7"]]
    assert [record.outcome for record in later.records if record.task_id in ("t4", "t5")] == [
        "cancelled",
        "cancelled",
        "trained",
        "trained",
    ]
    assert {record.reason for record in later.records if record.outcome == "cancelled"} == {"restart"}


def test_case_96_filtered_prompts_are_consumed_and_the_next_one_is_new() -> None:
    player = started(TASKS[:10])
    rewards = {2: SAME}
    for _ in range(2):
        player.want(2)
        while player.scheduler.filling is not None:
            group_id = player.open_group_ids()[0]
            player.finish_group(group_id, rewards.get(group_id, MIXED))
        player.step()
    assert prompts(player) == [["t0", "t1"], ["t3", "t4"]]
    later = resumed(player)
    later.want(2)
    assert [launch.task.task_id for launch in later.launches[::2]] == ["t5", "t6"]
    assert later.scheduler.ledger.groups["trained"] == 4
    assert later.scheduler.ledger.groups["dropped"] == 1


@pytest.mark.parametrize("finished", [1, 2, 3])
def test_case_98_a_group_with_finished_members_restarts_as_a_whole_with_new_ids(finished: int) -> None:
    player = started(group_size=4, query=NO_FILTER)
    player.want(2)
    player.finish_group(1, [1.0] * 4)
    for attempt_id in range(finished):
        player.finish(attempt_id, 1.0)
    later = resumed(player)
    assert [(record.group_id, record.outcome, record.reason) for record in later.records] == [(0, "cancelled", "restart")]
    assert later.records[0].sampled_tokens == 2 * finished + (4 - finished)
    assert later.scheduler.ledger.attempts["discarded"] == finished
    assert later.scheduler.ledger.attempts["cancelled"] == 4 - finished
    later.want(2)
    assert len(later.pending) == 4
    assert {launch.task.task_id for launch in later.launches} == {"t0"}
    assert later.open_group_ids() == [2]
    assert min(later.pending) == 8
    fill(later, [1.0, 0.0, 1.0, 0.0])
    old, new = later.batches[0].groups
    assert (old.group_id, new.group_id) == (1, 2)
    assert sorted(rollout.member_index for rollout in new.rollouts) == [0, 1, 2, 3]


def test_case_98_a_restarted_group_samples_with_the_same_seeds() -> None:
    player = started()
    player.want(1)
    seeds = [launch.seed for launch in player.launches]
    later = resumed(player)
    later.want(1)
    assert [launch.seed for launch in later.launches] == seeds


@pytest.mark.parametrize("additional", [0, 4])
def test_case_88_a_batch_with_one_of_two_groups_asks_for_one_more_after_a_resume(additional: int) -> None:
    player = started(max_additional_running_prompts=additional)
    player.want(2)
    player.finish_group(0, MIXED)
    later = resumed(player)
    later.want(2)
    assert later.open_group_ids() == [2]
    assert later.scheduler.filling == (1, 2)
    fill(later)
    assert prompts(later) == [["t0", "t1"]]


@pytest.mark.parametrize("requeue", [True, False])
def test_case_84_a_resume_does_not_repeat_the_wedge_for_ever(requeue: bool) -> None:
    player = started(group_timeout_s=50.0, requeue=requeue, quarantine_after=2)
    player.want(2)
    player.finish_group(0, MIXED)
    player.sleep(50.0)  # group 1 never returns
    assert player.record_of(1).reason == "group_timeout"
    later = resumed(player)
    later.want(2)
    first = later.pending[min(later.pending)].task.task_id
    assert first == ("t1" if requeue else "t2")  # once more, by setting
    if requeue:
        later.sleep(55.0)
        assert later.scheduler.prompts.quarantined == {"t1": "group_timeout"}
        again = resumed(later)
        again.want(2)
        assert "t1" not in {launch.task.task_id for launch in again.launches}
        later = again
    fill(later)
    assert prompts(later)[0][0] == "t0"


# ---------------------------------------------------------------- what is in it


def test_committed_groups_come_back_whole_with_everything_that_trains() -> None:
    player = started(async_generation_ratio=1.0, query=NO_FILTER, min_members=1, on_member_failure="judge", truncated="keep")
    player.want(1)
    player.finish_group(0, MIXED)
    launch = player.pending.pop(2)
    turns = (
        dataclasses.replace(make_turn(3, version=0), observation="a hall", action="look", is_admissible=True, reward=0.25, progress=0.5),
        dataclasses.replace(make_turn(2, version=0), token_versions=np.array([0, 1]), prompt_ids=np.array([9])),
    )
    rollout = dataclasses.replace(make_rollout(launch, 0.5, metrics={"accuracy": 1.0}), turns=turns, finish_reason="length", seconds=1.5)
    player.engine_tokens += 5
    player.tell(ev.MemberFinished(rollout=rollout))
    player.finish(3, None)
    (group,) = player.scheduler.buffer.groups()
    later = resumed(player)
    again = later.scheduler.buffer.groups()[1]  # after the one that was being trained
    assert (again.group_id, again.task, again.start_step, again.round, again.epoch) == (1, group.task, 0, 1, 0)
    assert again.counted == group.counted == (True, False)
    first, second = again.rollouts
    assert (first.reward, first.finish_reason, first.seconds, dict(first.metrics)) == (0.5, "length", 1.5, {"accuracy": 1.0})
    assert (second.reward, second.failure) == (None, group.rollouts[1].failure)
    for old, new in zip(turns, first.turns, strict=True):
        for name in ("prompt_ids", "token_ids", "inference_logprobs"):
            assert getattr(new, name).dtype == getattr(old, name).dtype
        for field in dataclasses.fields(old):
            assert np.array_equal(getattr(new, field.name), getattr(old, field.name))
    assert first.turns[0].token_versions is None
    assert first.turns[1].token_versions is not None
    assert list(first.turns[1].token_versions) == [0, 1]


def test_numbers_of_libraries_in_rewards_metrics_and_verdicts_do_not_break_a_checkpoint() -> None:
    player = started(has_user_loop=True, query=NO_FILTER)
    player.want(2)
    rollouts = []
    for index in (0, 1):
        attempt_id = player.start_attempt(0, index)
        assert attempt_id is not None
        launch = player.pending.pop(attempt_id)
        player.engine_tokens += 2
        rollout = make_rollout(launch, np.float32(index), metrics={"accuracy": np.float64(0.5), "right": True})  # type: ignore[arg-type]
        player.tell(ev.MemberFinished(rollout=rollout))
        rollouts.append(rollout)
    from sluice.types import Verdict

    player.give_back(0, rollouts, judged=Verdict.kept("mine", evidence={"mean": np.float32(0.5)}))  # type: ignore[dict-item]
    assert player.scheduler.buffer.committed == 1
    later = resumed(player)
    assert [rollout.reward for rollout in later.scheduler.buffer.groups()[0].rollouts] == [0.0, 1.0]


def test_a_group_of_further_members_comes_back_as_it_was() -> None:
    player = started(has_user_loop=True, query=NO_FILTER)
    player.want(2)
    rollouts = player.deliver(0, [1.0, 0.0, 0.0, 1.0])
    player.give_back(0, [rollouts[1], rollouts[3]])
    later = resumed(player)
    assert [rollout.member_index for rollout in later.scheduler.buffer.groups()[0].rollouts] == [1, 3]


def test_groups_of_a_batch_that_was_not_stepped_on_are_trained_after_the_resume() -> None:
    player = started(async_generation_ratio=1.0)
    player.want(2)
    fill(player)
    later = resumed(player)
    assert [group.group_id for group in later.scheduler.buffer.groups()] == [0, 1]
    later.want(2)
    assert later.trained() == [[0, 1]]
    assert later.scheduler.step == 0
    assert later.open_group_ids() == [4, 5]  # the prompts of the two that ran
    assert {launch.task.task_id for launch in later.launches} == {"t2", "t3"}


@pytest.mark.parametrize("ratio", [0.5, 1.5])
def test_that_holds_for_groups_of_the_oldest_permitted_step_too(ratio: float) -> None:
    player = started(async_generation_ratio=ratio)
    for _ in range(3):
        player.want(4)
        for group_id in player.open_group_ids():
            if player.scheduler.filling is not None:
                player.finish_group(group_id, MIXED)
        if player.scheduler.step < 2:
            player.step()
    batch = player.trained()[-1]
    oldest = player.scheduler.step - (1 if ratio < 1 else 2)
    assert sum(group.start_step == oldest for group in player.batches[-1].groups) == 2
    later = resumed(player)
    later.want(4)
    assert later.trained() == [batch]
    assert later.scheduler.ledger.groups["expired"] == 0


def test_what_the_guard_has_counted_and_quarantine_and_absence_are_remembered() -> None:
    player = started(guard=RatioGuard(0.5), max_response_rounds=1, quarantine_after=1, domains=("math", "code"))
    player.want(2)
    player.fail(0)
    player.finish_group(1, SAME)  # the first of all: kept
    player.finish_group(2, SAME)  # 1 of 2: dropped
    fill(player)
    player.step()
    later = resumed(player)
    assert later.scheduler.guard is not None
    assert later.scheduler.guard.total == 3
    assert later.scheduler.guard.filtered["low_information"] == 1
    assert later.scheduler.prompts.quarantined == {"t0": "response_retries"}
    assert later.scheduler._absent == {"math": 0, "code": 1}
    assert later.scheduler.acceptance_rate == player.scheduler.acceptance_rate
    later.want(1)
    later.fail(next(iter(later.pending)))
    assert not [warning for warning in later.warnings if "engine_error" in warning]  # told once per run, not per process


def test_empty_tries_in_a_row_are_remembered() -> None:
    player = started(on_exhausted="shrink", max_resample_rounds=1)
    player.want(1)
    player.finish_group(0, SAME)
    player.finish_group(1, SAME)
    later = resumed(player)
    later.want(1)
    later.finish_group(later.open_group_ids()[0], SAME)
    assert "3 batches in a row" in later.failures[0]


def test_prompts_that_wait_to_come_back_are_outstanding() -> None:
    player = started(max_response_rounds=1)
    player.want(2)
    player.fail(0)
    player.finish_group(1, MIXED)
    state = saved(player)
    assert state["machine"]["outstanding"] == [["t0", 0], ["t2", 0]]
    later = resumed(player)
    later.want(2)
    assert later.launches[0].task.task_id == "t0"


def test_groups_that_the_guard_holds_or_that_are_in_reserve_leave_at_the_checkpoint_with_a_record() -> None:
    held = started(guard=RatioGuard(0.5, policy="wait"))
    held.want(2)
    held.finish_group(0, SAME)
    later = resumed(held)
    assert [(record.group_id, record.outcome) for record in later.records] == [(0, "discarded"), (1, "cancelled")]
    spare = started(on_exhausted="keep_low_information")
    spare.want(2)
    spare.finish_group(0, SAME)
    later = resumed(spare)
    assert [(record.group_id, record.outcome, record.reason) for record in later.records] == [
        (0, "dropped", "no_spread"),
        (1, "cancelled", "restart"),
        (2, "cancelled", "restart"),
    ]
    assert later.scheduler.ledger.rejected_groups == {("low_information", "no_spread"): 1}


def test_a_group_whose_cancels_were_on_their_way_keeps_its_outcome() -> None:
    player = started(max_response_rounds=1)
    player.hold_acks = True
    player.want(1)
    player.fail(0)
    assert player.acks == [1]
    later = resumed(player)
    assert [(record.group_id, record.outcome, record.reason) for record in later.records] == [
        (0, "dropped", "response_retries"),
        (1, "cancelled", "restart"),
    ]
    assert later.records[0].sampled_tokens == 2
    assert later.scheduler.ledger.groups["dropped"] == 1


def test_restored_groups_expire_by_their_age_and_are_recorded_once() -> None:
    player = started(async_generation_ratio=1.0)
    player.want(1)
    player.finish_group(0, MIXED)
    player.finish_group(1, MIXED)
    player.step()
    later = resumed(player)
    later.tell(ev.StepAdvanced(step=2))
    assert [(record.group_id, record.outcome) for record in later.records] == [(1, "expired")]
    assert later.scheduler.ledger.tokens["expired"] == 4


def test_domains_go_on_with_their_shares() -> None:
    tasks = [make_task(f"{domain}{i}", domain) for domain in ("math", "code") for i in range(40)]
    for mix_on in ("kept", "drawn"):
        shares = {"math": 2 / 3, "code": 1 / 3}
        player = MachinePlayer.make(
            group_size=2, domains=tuple(shares), domain_shares=shares, async_generation_ratio=1.0, mix_on=mix_on, collect="in_order"
        )
        player.source = DomainTasks(tasks, shares, seed=0, epochs=1, shuffle=False)  # type: ignore[assignment]
        domains: Counter[str] = Counter()
        for step in range(6):
            player.want(4)
            fill(player)
            domains.update(group.task.domain for group in player.batches[-1].groups)
            player.step()
            if step in (1, 3):
                player = resumed(player)
        # Prompts that were in flight are drawn once more, and have their turn in the mix of draws once more.
        assert abs(domains["math"] - 16) <= (0 if mix_on == "kept" else 2)


# ---------------------------------------------------------------- states that do not fit


def test_only_a_fresh_machine_takes_a_state() -> None:
    player = started()
    player.want(1)
    with pytest.raises(RecordError, match="fresh machine"):
        player.scheduler.load_state_dict(player.scheduler.state_dict(), {})


@pytest.mark.parametrize(
    ("change", "message"), [({"group_size": 3}, "group_size must be 3, got 2"), ({"seed": 9}, "seed must be 9, got 0")]
)
def test_a_state_of_other_settings_is_refused_and_names_them(change: dict[str, int], message: str) -> None:
    player = started()
    player.want(1)
    fill(player)
    config = dataclasses.replace(player.scheduler.config, **change)  # type: ignore[arg-type]
    with pytest.raises(RecordError, match=message):
        Scheduler(config, make_filters(group_size=config.group_size)).load_state_dict(player.scheduler.state_dict(), {})


def test_a_task_that_is_gone_from_the_data_is_named() -> None:
    player = started()
    player.want(1)
    fill(player)
    machine = Scheduler(player.scheduler.config, make_filters(group_size=2))
    with pytest.raises(RecordError, match="task 't0' of a saved group is not in the data"):
        machine.load_state_dict(player.scheduler.state_dict(), {})


def test_fewer_redundant_members_than_the_saved_run_had_are_no_crash() -> None:
    player = started(redundancy=2)
    player.want(1)
    player.finish(3, 1.0)
    player.finish(2, 0.0)
    config = dataclasses.replace(player.scheduler.config, redundancy=0)
    machine = Scheduler(config, make_filters(group_size=2))
    with pytest.raises(RecordError, match="redundancy|torn"):
        machine.load_state_dict(player.scheduler.state_dict(), {"t0": TASKS[0]})


@pytest.mark.parametrize("name", ["step", "buffer", "slots", "prompts", "ledger", "committed", "interrupted", "version"])
@pytest.mark.parametrize("value", ["gone", None, "text", -1])
def test_a_torn_state_is_refused_with_one_kind_of_error(name: str, value: object) -> None:
    player = started()
    player.want(1)
    fill(player)
    state = player.scheduler.state_dict()
    if value == "gone":
        del state[name]
    else:
        state[name] = value
    machine = Scheduler(player.scheduler.config, make_filters(group_size=2))
    if name == "step" and value == -1:
        return  # a number like any other
    with pytest.raises(RecordError, match="saved state of the scheduler"):
        machine.load_state_dict(state, {"t0": TASKS[0]})
