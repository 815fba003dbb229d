"""Several domains in one run: shares of what is kept or of what is drawn, domains that end, are absent, or may be older than others."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import SchedulerBug
from sluice.filters import RatioGuard
from sluice.scheduler import events as ev
from tests.fakes import NO_FILTER, DomainSource, ListSource, MachinePlayer, make_task

MIXED = [1.0, 0.0]
SAME = [1.0, 1.0]
HALVES = {"math": 0.5, "code": 0.5}


def mixed(shares: Mapping[str, float] = HALVES, sizes: Mapping[str, int] | None = None, **settings: object) -> MachinePlayer:
    source = DomainSource(shares, sizes)
    return MachinePlayer.make(**{"group_size": 2, "domains": tuple(shares), "domain_shares": shares, "source": source, **settings})


def domain_of(player: MachinePlayer, group_id: int) -> str:
    return player.scheduler._groups[group_id].task.domain


def play(player: MachinePlayer, group_id: int, is_kept: bool = True) -> str:
    """Finish one group; its domain."""
    domain = domain_of(player, group_id)
    player.finish_group(group_id, MIXED if is_kept else SAME)
    return domain


def shares_of(player: MachinePlayer, batch: int = -1) -> Counter[str]:
    return Counter(group.task.domain for group in player.batches[batch].groups)


def source_of(player: MachinePlayer) -> DomainSource:
    assert isinstance(player.source, DomainSource)
    return player.source


# ---------------------------------------------------------------- shares of what is kept


def play_case_136(player: MachinePlayer) -> None:
    """Math accepts everything, code the fourth, eighth, ... of its groups."""
    judged: Counter[str] = Counter()
    while player.scheduler.filling is not None:
        group_id = player.open_group_ids()[0]
        domain = domain_of(player, group_id)
        judged[domain] += 1
        play(player, group_id, is_kept=domain == "math" or judged[domain] % 4 == 0)


def test_case_136_shares_are_of_the_groups_that_train_whatever_each_domain_accepts() -> None:
    player = mixed(max_resample_rounds=100)
    player.want(4)
    play_case_136(player)
    assert shares_of(player) == {"math": 2, "code": 2}
    assert source_of(player).drawn_of("math") == 2
    assert source_of(player).drawn_of("code") == 8


def test_case_136_or_by_setting_of_the_prompts_that_are_drawn() -> None:
    player = mixed(mix_on="drawn", max_resample_rounds=100)
    for _ in range(6):
        player.want(4)
        play_case_136(player)
        player.step()
    drawn = Counter({domain: source_of(player).drawn_of(domain) for domain in HALVES})
    assert abs(drawn["math"] - drawn["code"]) <= 1
    kept = sum((shares_of(player, batch) for batch in range(6)), Counter())
    assert kept["math"] > 2 * kept["code"] > 0


@pytest.mark.parametrize("collect", ["as_finished", "in_order"])
@pytest.mark.parametrize("fill", ["refill", "shrink"])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_case_136_drawn_shares_hold_in_every_mode(ratio: float, fill: str, collect: str) -> None:
    player = mixed(
        {"math": 0.75, "code": 0.25}, mix_on="drawn", max_resample_rounds=100, async_generation_ratio=ratio, fill=fill, collect=collect
    )
    for _ in range(8):
        player.want(4)
        play_case_136(player)
        player.step()
    math_, code = source_of(player).drawn_of("math"), source_of(player).drawn_of("code")
    assert abs(math_ - 3 * code) <= 4


@pytest.mark.parametrize("collect", ["as_finished", "in_order"])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("shares", "groups", "expected"),
    [(HALVES, 4, (2, 2)), ({"math": 0.75, "code": 0.25}, 4, (3, 1)), ({"math": 0.9, "code": 0.1}, 10, (9, 1)), (HALVES, 2, (1, 1))],
)
def test_every_batch_has_its_shares_while_the_trainer_steps_and_without(
    shares: Mapping[str, float], groups: int, expected: tuple[int, int], ratio: float, collect: str
) -> None:
    player = mixed(shares, async_generation_ratio=ratio, collect=collect, max_resample_rounds=100)
    for _ in range(4):
        player.want(groups)
        play_case_136(player)
        assert shares_of(player) == dict(zip(shares, expected, strict=True))
        player.step()


@given(
    weights=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    groups=st.integers(1, 6),
    ratio=st.sampled_from([0.0, 1.0, 2.0]),
    additional=st.integers(0, 3),
    seed=st.integers(0, 1_000_000),
)
def test_over_many_batches_the_kept_shares_stay_within_a_group_of_what_was_asked(
    weights: list[int], groups: int, ratio: float, additional: int, seed: int
) -> None:
    chance = random.Random(seed)
    shares = {f"d{'abcd'[i]}": float(weight) for i, weight in enumerate(weights)}
    player = mixed(shares, async_generation_ratio=ratio, max_additional_running_prompts=additional, max_resample_rounds=1000)
    kept: Counter[str] = Counter()
    for number in range(1, 5):
        player.want(groups)
        while player.scheduler.filling is not None:
            play(player, chance.choice(player.open_group_ids()), chance.random() < 0.6)
        kept.update(shares_of(player))
        for domain, weight in shares.items():
            assert abs(kept[domain] - number * groups * weight / sum(weights)) < len(weights)
        player.step()


def test_a_replacement_is_of_the_domain_of_the_group_it_replaces() -> None:
    player = mixed()
    player.want(4)
    for group_id in range(4):
        domain = play(player, group_id, is_kept=False)
        assert domain_of(player, max(player.open_group_ids())) == domain


def test_ready_groups_of_a_full_domain_wait_and_are_bounded() -> None:
    player = mixed(async_generation_ratio=1.0, max_resample_rounds=1000)
    player.want(4)
    for _ in range(3):
        for group_id in player.open_group_ids():
            if domain_of(player, group_id) == "math":
                play(player, group_id)
        for group_id in player.open_group_ids():
            play(player, group_id, is_kept=False)
    ready = [group.task.domain for group in player.scheduler.buffer.groups()]
    assert ready == ["math"] * 4  # two for this batch, two for the next: no more of them are launched
    assert {domain_of(player, group_id) for group_id in player.open_group_ids()} == {"code"}
    assert not player.failures


def test_with_ready_groups_that_wait_the_next_batch_launches_only_what_it_lacks() -> None:
    player = mixed(async_generation_ratio=1.0)
    player.want(4)
    for group_id in player.open_group_ids():
        if domain_of(player, group_id) == "math":
            play(player, group_id)
    for group_id in player.open_group_ids()[:2]:
        play(player, group_id)
    assert shares_of(player) == {"math": 2, "code": 2}
    before = source_of(player).drawn_of("math")
    player.step()
    player.want(4)
    assert source_of(player).drawn_of("math") == before + 2


def test_groups_launched_ahead_are_of_the_domain_that_is_furthest_behind() -> None:
    player = mixed(max_additional_running_prompts=2, max_resample_rounds=1000)
    player.scheduler._judged, player.scheduler._kept = 100, 20
    player.want(4)
    domains = Counter(domain_of(player, group_id) for group_id in player.open_group_ids())
    assert domains == {"math": 3, "code": 3}
    for group_id in player.open_group_ids():
        if domain_of(player, group_id) == "math" and player.scheduler.filling is not None:
            play(player, group_id)
    assert player.scheduler.filling is not None
    play_case_136(player)
    assert shares_of(player) == {"math": 2, "code": 2}


def test_a_task_of_another_domain_than_the_one_asked_for_cannot_be() -> None:
    player = mixed()
    player.hold_draws = True
    player.want(2)
    asked = player.draws[0].domain
    other = "code" if asked == "math" else "math"
    with pytest.raises(SchedulerBug, match=f"a task of domain '{asked}' was to be drawn"):
        player.scheduler.handle(ev.TaskDrawn(task=make_task("x", other), epoch=0), 2.0)


def test_a_task_of_an_unknown_domain_cannot_be() -> None:
    player = MachinePlayer.make(group_size=2, source=ListSource([make_task("x", "physics")]))
    with pytest.raises(SchedulerBug, match=r"domain 'physics', known are \['math'\]"):
        player.want(1)


# ---------------------------------------------------------------- domains that end


@pytest.mark.parametrize("collect", ["as_finished", "in_order"])
@pytest.mark.parametrize("fill", ["refill", "shrink"])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize("mix_on", ["kept", "drawn"])
def test_the_share_of_a_domain_that_has_ended_goes_to_the_others_and_that_is_said_once(
    mix_on: str, ratio: float, fill: str, collect: str
) -> None:
    player = mixed(sizes={"code": 3}, async_generation_ratio=ratio, fill=fill, collect=collect, mix_on=mix_on)
    for _ in range(4):
        player.want(4)
        while player.scheduler.filling is not None:
            play(player, player.open_group_ids()[0])
        assert len(player.batches[-1].groups) == 4
        player.step()
    assert sum((shares_of(player, batch) for batch in range(4)), Counter()) == {"math": 13, "code": 3}
    assert [key for key in player.warning_keys if key.startswith("ended")] == ["ended/code"]
    assert "domain 'code' has no prompts left" in next(warning for warning in player.warnings if "no prompts left" in warning)


@pytest.mark.parametrize("collect", ["as_finished", "in_order"])
@pytest.mark.parametrize("fill", ["refill", "shrink"])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize("mix_on", ["kept", "drawn"])
@pytest.mark.parametrize("sizes", [(5, 3), (1, 8), (4, 4), (0, 5)])
def test_when_all_domains_have_ended_the_rest_is_trained_and_the_last_batch_told(
    mix_on: str, ratio: float, fill: str, collect: str, sizes: tuple[int, int]
) -> None:
    player = mixed(sizes=dict(zip(HALVES, sizes, strict=True)), async_generation_ratio=ratio, fill=fill, collect=collect, mix_on=mix_on)
    for _ in range(8):
        player.want(4)
        while player.scheduler.filling is not None:
            play(player, player.open_group_ids()[0])
        player.step()
        if player.batches[-1].is_last:
            break
    assert player.batches[-1].is_last
    assert not player.failures
    assert sum((shares_of(player, batch) for batch in range(len(player.batches))), Counter()) == Counter(
        {domain: size for domain, size in zip(HALVES, sizes, strict=True) if size}
    )


def test_a_prompt_that_comes_back_reopens_its_domain() -> None:
    player = mixed(sizes={"code": 1}, max_response_rounds=1)
    player.want(2)
    code = next(group_id for group_id in player.open_group_ids() if domain_of(player, group_id) == "code")
    player.lose_group(code)  # the only prompt of its domain: nothing else can take its place, so that it is tried once more
    assert [launch.task.task_id for launch in player.launches if launch.task.domain == "code"] == ["code0"] * 4
    while player.scheduler.filling is not None:
        play(player, player.open_group_ids()[0])
    assert shares_of(player) == {"math": 1, "code": 1}


def test_a_domain_that_ended_and_reopened_never_makes_a_full_batch_fail() -> None:
    """Code ends, its place goes to math; then its one group turns out to be too old, and its prompt is back."""
    player = mixed(sizes={"code": 1}, async_generation_ratio=1.0, max_resample_rounds=3)
    player.publish(5)
    player.tell(ev.StepAdvanced(step=5))
    player.want(4)
    code = next(group_id for group_id in player.open_group_ids() if domain_of(player, group_id) == "code")
    player.finish_group(code, MIXED, version=3)
    assert player.record_of(code).outcome == "expired"
    while player.scheduler.filling is not None:
        play(player, player.open_group_ids()[0])
    assert not player.failures
    assert len(player.batches[0].groups) == 4


# ---------------------------------------------------------------- absent domains


def test_a_domain_that_is_absent_for_long_is_told_and_again_after_as_many_batches() -> None:
    player = MachinePlayer.make(
        group_size=2,
        domains=("math", "code"),
        absent_after_batches=3,
        source=ListSource(make=lambda i: make_task(f"t{i}", "code" if i == 7 else "math")),
    )
    for number in range(1, 15):
        player.want(1)
        player.finish_group(player.open_group_ids()[0], MIXED)
        player.step()
        told = [key for key in player.warning_keys if key.startswith("absent")]
        # batches 3 and 6 without it; batch 8 has it; 11 and 14 again
        assert len(told) == sum(number >= batch for batch in (3, 6, 11, 14))
    assert set(told) == {"absent/code"}
    assert "domain 'code': 0 of the groups of the last 3 batches" in player.warnings[0]
    assert "domain_interleave_probs" in player.warnings[0]


def test_a_single_domain_is_never_absent_and_an_empty_batch_says_nothing() -> None:
    player = MachinePlayer.make(group_size=2, absent_after_batches=1)
    player.want(1)
    player.finish_group(0, MIXED)
    assert not player.warnings


# ---------------------------------------------------------------- ages


def slow_and_fast(player: MachinePlayer, steps: int) -> None:
    """Every slow group is finished four steps after its launch, every fast one at once."""
    launched: dict[int, int] = {}
    for _ in range(steps):
        player.want(2)
        while player.scheduler.filling is not None:
            for group_id in player.open_group_ids():
                launched.setdefault(group_id, player.scheduler.step)
            due = [g for g in player.open_group_ids() if domain_of(player, g) == "slow" and launched[g] + 4 <= player.scheduler.step]
            fast = [g for g in player.open_group_ids() if domain_of(player, g) == "fast"]
            group_id = (due + fast)[0]
            player.finish_group(group_id, MIXED, version=launched[group_id])
        player.step()


def alternating() -> ListSource:
    return ListSource(make=lambda i: make_task(f"t{i}", "slow" if i % 4 == 0 else "fast"))


def test_case_134_a_slow_domain_that_is_always_too_old_is_told() -> None:
    player = MachinePlayer.make(
        group_size=2,
        query=NO_FILTER,
        domains=("slow", "fast"),
        source=alternating(),
        async_generation_ratio=3.0,
        absent_after_batches=5,
        max_resample_rounds=1000,
    )
    slow_and_fast(player, 12)
    assert sum((shares_of(player, batch) for batch in range(12)), Counter()) == {"fast": 24}
    assert "domain 'slow': 0 of the groups of the last 5 batches" in player.warnings[0]
    assert "rewards.<domain>.max_staleness" in player.warnings[0]
    assert player.scheduler.ledger.groups["expired"] > 0


def test_case_134_with_a_limit_of_its_own_the_slow_domain_has_its_share() -> None:
    player = MachinePlayer.make(
        group_size=2,
        query=NO_FILTER,
        domains=("slow", "fast"),
        source=alternating(),
        async_generation_ratio=3.0,
        domain_staleness={"slow": 5},
        absent_after_batches=6,
        max_resample_rounds=1000,
    )
    slow_and_fast(player, 24)
    kept = sum((shares_of(player, batch) for batch in range(24)), Counter())
    assert player.scheduler.ledger.groups["expired"] == 0
    assert kept["slow"] >= 48 // 4 - 4
    assert not player.warnings


@pytest.mark.parametrize("age", [1, 2, 3])
def test_a_domain_of_its_own_age_expires_by_it_and_the_others_by_theirs(age: int) -> None:
    player = mixed(async_generation_ratio=1.0, domain_staleness={"code": age}, collect="in_order")
    player.want(2)
    for group_id in reversed(player.open_group_ids()):
        play(player, group_id)
    assert shares_of(player) == {"math": 1, "code": 1}
    for step in range(1, 5):
        player.step()
        left = Counter(group.task.domain for group in player.scheduler.buffer.groups())
        assert left["math"] == (step <= 1)
        assert left["code"] == (step <= age)


@pytest.mark.parametrize("ratio", [0.5, 0.25])
def test_a_domain_with_a_wider_age_is_not_bound_by_the_share_of_the_oldest_step_of_the_others(ratio: float) -> None:
    player = MachinePlayer.make(
        group_size=2,
        query=NO_FILTER,
        domains=("slow", "fast"),
        source=ListSource(make=lambda i: make_task(f"t{i}", "slow")),
        async_generation_ratio=ratio,
        domain_staleness={"slow": 4},
        max_additional_running_prompts=4,
    )
    player.scheduler._judged, player.scheduler._kept = 100, 10
    player.want(4)
    groups = player.open_group_ids()
    assert len(groups) > 6
    for group_id in groups:
        player.finish_group(group_id, MIXED)
    player.step()
    assert player.scheduler.ledger.groups["expired"] == 0
    assert player.scheduler.buffer.committed == len(groups) - 4


# ---------------------------------------------------------------- overflow


def carried(player: MachinePlayer, ready: int) -> list[int]:
    """A first batch of one math and one code; of the math launched ahead, `ready` groups are carried on. Their ids, oldest first."""
    player.scheduler._judged, player.scheduler._kept = 1000, 10  # a poor acceptance: groups are launched ahead
    player.want(2)
    maths = [group_id for group_id in player.open_group_ids() if domain_of(player, group_id) == "math"][: ready + 1]
    assert len(maths) == ready + 1
    for group_id in reversed(maths):
        play(player, group_id)
    play(player, next(group_id for group_id in player.open_group_ids() if domain_of(player, group_id) == "code"))
    assert maths[0] in player.trained()[-1]
    assert [group.group_id for group in player.scheduler.buffer.groups()] == maths[1:]
    player.step()
    player.scheduler._judged = player.scheduler._kept = 1000  # from now on everything is kept
    return maths[1:]


def test_carried_groups_of_a_full_domain_wait_for_their_batch() -> None:
    player = mixed(surplus="carry", max_staleness=2, max_additional_running_prompts=6)
    waiting = carried(player, 1)
    before = source_of(player).drawn_of("math")
    player.want(2)
    (code,) = player.open_group_ids()
    assert domain_of(player, code) == "code"
    assert source_of(player).drawn_of("math") == before
    play(player, code)
    assert player.trained()[-1] == [*waiting, code]


@pytest.mark.parametrize("ready", [2, 3])
def test_more_carried_groups_of_a_full_domain_than_the_batch_holds_do_not_starve_the_others(ready: int) -> None:
    player = mixed(surplus="carry", max_staleness=2, max_additional_running_prompts=6)
    waiting = carried(player, ready)
    player.want(2)
    assert not player.failures
    (code,) = player.open_group_ids()
    play(player, code)
    assert player.trained()[-1] == [waiting[0], code]
    assert [group.group_id for group in player.scheduler.buffer.groups()] == waiting[1:]


def test_case_82_when_ready_groups_of_a_full_domain_fill_the_buffer_the_one_with_the_oldest_member_goes() -> None:
    """The batch takes no additional prompts any more, and three carried groups of math leave no room for the code that it lacks."""
    player = mixed(surplus="carry", max_staleness=4, max_additional_running_prompts=6)
    player.publish(3)
    player.tell(ev.StepAdvanced(step=3))
    player.scheduler._judged, player.scheduler._kept = 1000, 10
    player.want(2)
    first, a, b, c = [group_id for group_id in player.open_group_ids() if domain_of(player, group_id) == "math"]
    for group_id, versions in {first: (3, 3), a: (1, 3), b: (1, 1), c: (2, 2)}.items():
        for version, reward in zip(versions, MIXED, strict=True):
            player.finish(player.members(group_id)[0], reward, version=version)
    play(player, next(group_id for group_id in player.open_group_ids() if domain_of(player, group_id) == "code"))
    assert [group.group_id for group in player.scheduler.buffer.groups()] == [a, b, c]
    player.step()
    state = player.scheduler.state_dict()
    prompt = player.scheduler._groups[b].task
    tasks = {group.task.task_id: group.task for group in player.scheduler.buffer.groups()}
    later = mixed(surplus="carry", max_staleness=4)
    later.scheduler.load_state_dict(state, tasks)
    source_of(later).draw("math")
    later.source = player.source
    returned: list[str] = []
    instructions = later.scheduler.handle(ev.BatchWanted(groups=2), 0.0)
    returned = [instruction.task.task_id for instruction in instructions if isinstance(instruction, ev.ReturnTask)]
    left = [instruction.record for instruction in instructions if isinstance(instruction, ev.RecordGroup)]
    assert [(record.group_id, record.outcome, record.reason) for record in left] == [
        (b, "surplus", "domain_full"),
        (a, "surplus", "domain_full"),
    ]
    assert returned == [prompt.task_id, player.scheduler._groups[a].task.task_id]
    assert ev.DrawTask(domain="code") in instructions


# ---------------------------------------------------------------- metrics, guard, quarantine


def test_metrics_tell_shares_and_acceptance_by_domain() -> None:
    player = mixed(max_resample_rounds=100)
    player.want(4)
    play_case_136(player)
    metrics = player.metrics[0]
    assert metrics["batch/domain_share/math"] == metrics["batch/domain_share/code"] == 0.5
    assert metrics["scheduler/acceptance_rate/math"] == 1.0
    assert metrics["scheduler/acceptance_rate/code"] == 0.25
    assert metrics["scheduler/acceptance_rate"] == 0.4
    assert metrics["scheduler/query_use_count"] == 10


def test_a_guard_that_shrinks_a_domain_leaves_the_others_their_places() -> None:
    source = DomainSource(HALVES)
    player = MachinePlayer.make(
        group_size=2, domains=tuple(HALVES), domain_shares=HALVES, source=source, guard=RatioGuard(0.0, policy="shrink")
    )
    player.want(4)
    code = next(group_id for group_id in player.open_group_ids() if domain_of(player, group_id) == "code")
    play(player, code, is_kept=False)
    for group_id in player.open_group_ids():
        play(player, group_id)
    assert shares_of(player) == {"math": 2, "code": 1}


def test_a_prompt_in_quarantine_is_skipped_within_its_domain() -> None:
    player = mixed(max_response_rounds=1, quarantine_after=1, requeue=False, sizes={"code": 3})
    player.want(2)
    code = next(group_id for group_id in player.open_group_ids() if domain_of(player, group_id) == "code")
    player.lose_group(code)
    assert player.scheduler.prompts.quarantined == {"code0": "response_retries"}
    source_of(player).put_back("code0", 0)  # it comes up again in another epoch
    code = next(group_id for group_id in player.open_group_ids() if domain_of(player, group_id) == "code")
    play(player, code, is_kept=False)
    assert player.scheduler.prompts.skipped == 1
    code = next(group_id for group_id in player.open_group_ids() if domain_of(player, group_id) == "code")
    assert player.pending[player.members(code)[0]].task.task_id == "code2"
