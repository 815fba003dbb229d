"""`GateKeeper`: a decision at most once per group, in every interleaving; audits; the precision that is held; nothing left behind."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ConfigError, GateError
from sluice.gate import Gate, GateKeeper, build_rule, signals

K = 3


def keeper(gate: Gate | None = None, **settings) -> GateKeeper:
    return GateKeeper(gate or Gate(k=K, threshold=0.3, horizon=10), **{"group_size": 2, "audit_rate": 0.0, **settings})


def play(watch: GateKeeper, key, rows, *, rewards=None, to: int | None = None):
    """All members of a group step by step, up to step `to`; the decisions that came."""
    came = []
    for step in range(1, (to or max(map(len, rows))) + 1):
        for member, row in enumerate(rows):
            if step <= len(row):
                watch.observe(key, member, step, row[step - 1], f"{member} {step}")
                came.append(watch.decision(key))
                if rewards is not None and step == len(row):
                    watch.member_ended(key, member, rewards[member])
                    came.append(watch.decision(key))
    return [verdict for verdict in came if verdict is not None]


# ---------------------------------------------------------------- in every interleaving


@st.composite
def stories(draw):
    """A group as the scheduler would tell of it: steps, ends, losses with and without replacement, redundant members."""
    size = draw(st.integers(2, 4))
    redundancy = draw(st.integers(0, 2))
    k = draw(st.integers(1, 3))
    events = []
    alive = dict.fromkeys(range(size + redundancy), 0)
    following = len(alive)
    while alive and len(events) < 60:
        member = draw(st.sampled_from(sorted(alive)))
        what = draw(st.sampled_from(["step"] * 6 + ["end", "end", "lost", "gone"]))
        if what == "step":
            alive[member] += 1
            events.append(("step", member, alive[member], draw(st.sampled_from("ab")), draw(st.sampled_from("xy"))))
        elif what == "end":
            del alive[member]
            events.append(("end", member, draw(st.sampled_from([None, 0.0, 0.0, 1.0]))))
        else:
            del alive[member]
            events.append((what, member))
            if what == "lost":  # a replacement comes, sometimes under the same name
                name = member if draw(st.booleans()) else following
                following += 1
                alive[name] = 0
    return size, redundancy, k, events


@given(stories())
def test_a_group_is_decided_on_once_by_the_first_members_that_get_there(story) -> None:
    """Cases 140, 142: against a slow model that looks at everything again after every event."""
    size, redundancy, k, events = story
    gate = Gate(k=k, threshold=0.6)
    watch = GateKeeper(gate, group_size=size, redundancy=redundancy, audit_rate=0)
    watch.group_launched("g")
    actions: dict[int, list[str]] = {}
    seen: dict[int, list[str]] = {}
    arrived: list[int] = []
    ended: dict[int, float | None] = {}
    expected = size + redundancy
    is_decided = False
    for event in events:
        kind, member = event[0], event[1]
        if kind == "step":
            _, _, step, action, observation = event
            watch.observe("g", member, step, action, observation)
            actions.setdefault(member, []).append(action)
            seen.setdefault(member, []).append(observation)
            if step == k:
                arrived.append(member)
        elif kind == "end":
            watch.member_ended("g", member, event[2])
            ended[member] = event[2]
            actions.setdefault(member, [])
            seen.setdefault(member, [])
            if member not in arrived:
                arrived.append(member)
        else:
            watch.member_ended("g", member, None, False, is_replaced=kind == "lost")
            actions.pop(member, None)
            seen.pop(member, None)
            if member in arrived:
                arrived.remove(member)
            expected -= kind == "gone"
        verdict = watch.decision("g")
        needed = min(size, expected)
        if is_decided or len(arrived) < needed:
            assert verdict is None
            continue
        is_decided = True
        chosen = arrived[: max(needed, 0)]
        rewards = {reward for reward in ended.values() if reward is not None}
        if len(chosen) < 2 or all(one in ended for one in chosen) or len(rewards) > 1:
            assert verdict is None
        else:
            measured = signals([actions[one] for one in chosen], k, [seen[one] for one in chosen])
            assert verdict.keep == (measured["prefix_edit_distance_mean"] >= 0.6)
            assert measured.items() <= verdict.evidence.items()
            assert verdict.evidence["n"] == len(chosen)
        assert watch.watched == 0
    assert watch.group_ended("g", [0.0, 0.0]) is None
    assert watch.watched == 0


@given(stories(), st.randoms(use_true_random=False))
def test_finished_members_with_different_rewards_are_never_cut(story, source) -> None:
    size, redundancy, k, events = story
    watch = GateKeeper(Gate(k=k, threshold=1.0), group_size=size, redundancy=redundancy, audit_rate=0)
    watch.group_launched("g")
    rewards: set[float] = set()
    for event in events:
        if event[0] == "step":
            watch.observe("g", event[1], event[2], "a", "x")
        elif event[0] == "end":
            reward = source.random()
            rewards.add(reward)
            watch.member_ended("g", event[1], reward)
        else:
            watch.member_ended("g", event[1], comparable=False, is_replaced=event[0] == "lost")
        verdict = watch.decision("g")
        assert verdict is None or verdict.keep or len(rewards) < 2


def test_a_reward_that_comes_between_the_last_step_and_the_question_counts() -> None:
    watch = keeper(Gate(k=1, threshold=1.0), group_size=3)
    watch.group_launched(7)
    for member in range(3):
        watch.observe(7, member, 1, "a", "x")
    watch.member_ended(7, 0, 1.0)
    watch.member_ended(7, 1, None)
    watch.member_ended(7, 1, 0.0)  # scored later
    assert watch.decision(7) is None
    assert watch.metrics()["gate/undecided"] == 1


# ---------------------------------------------------------------- when, and on whom


def test_nothing_is_decided_before_every_live_member_is_there() -> None:
    """Case 142: n = 4, K = 3: m0 finished after 2 actions, m1 and m2 have 3, m3 died.

    The rule: a replacement of m3 is waited for; when none will come, three are compared.
    """
    watch = keeper(group_size=4)
    watch.group_launched("g")
    assert not play(watch, "g", ["ab", "abcdef", "abc"])
    watch.member_ended("g", 0, 0.0)
    watch.observe("g", 3, 1, "a", "x")
    watch.member_ended("g", 3, comparable=False)
    assert watch.decision("g") is None
    watch.observe("g", "3 again", 1, "a", "x")
    watch.member_ended("g", "3 again", comparable=False, is_replaced=False)
    verdict = watch.decision("g")
    assert verdict.evidence["n"] == 3
    assert watch.decision("g") is None


def test_one_member_left_is_no_decision() -> None:
    """Case 142: n = 1: the group runs on."""
    watch = keeper()
    watch.group_launched("g")
    watch.member_ended("g", 1, comparable=False, is_replaced=False)
    watch.observe("g", 0, 1, "a", "x")
    for step in (2, 3):
        watch.observe("g", 0, step, "a", "x")
        assert watch.decision("g") is None
    assert watch.metrics()["gate/judged"] == 0


def test_members_that_run_ahead_are_compared_by_their_first_k_actions() -> None:
    watch = keeper(Gate(k=3, threshold=0.3, horizon=20))
    watch.group_launched("g")
    for step in range(1, 9):
        watch.observe("g", "fast", step, "a" if step <= 3 else "b", "x")
    for step in range(1, 4):
        assert watch.decision("g") is None
        watch.observe("g", "slow", step, "a", "x")
    verdict = watch.decision("g")
    assert not verdict.keep
    assert verdict.evidence["prefix_edit_distance_mean"] == 0.0
    assert watch.metrics()["gate/env_steps_saved_bound"] == (20 - 8) + (20 - 3)


def test_redundant_members_count_only_among_the_first_to_get_there() -> None:
    watch = keeper(group_size=2, redundancy=1)
    watch.group_launched("g")
    watch.observe("g", "late", 1, "z", "x")
    for member in ("a", "b"):
        for step in (1, 2, 3):
            watch.observe("g", member, step, "a", "x")
    assert not watch.decision("g").keep


def test_the_task_type_may_be_known_late() -> None:
    gate = Gate(k=1, rule=build_rule({"type": "by_task_type", "rules": {"look": 1.0}}))
    for launched, told, is_cut in (("look", None, True), (None, "look", True), (None, None, False), ("put", None, False)):
        watch = keeper(gate)
        watch.group_launched("g", task_type=launched)
        if told:
            watch.task_type_known("g", told)
        (verdict,) = play(watch, "g", ["a", "a"])
        assert verdict.keep != is_cut


def test_without_observations_there_is_one_signal_less() -> None:
    watch = keeper(has_observations=False)
    watch.group_launched("g")
    for step in (1, 2, 3):
        for member in (0, 1):
            watch.observe("g", member, step, "a")
    assert "obs_unique_ratio" not in watch.decision("g").evidence


# ---------------------------------------------------------------- nothing is left behind


def test_a_cut_group_leaves_nothing_behind() -> None:
    """Case 144: what comes after the cut is ignored, and nothing is stored."""
    watch = keeper(group_size=4)
    watch.group_launched("g")
    (verdict,) = play(watch, "g", ["aaa"] * 4)
    assert not verdict.keep
    assert watch.watched == 0
    watch.observe("g", 0, 4, "b", "late")  # two requests were in flight
    watch.observe("g", 1, 4, "b", "late")
    watch.member_ended("g", 2, 1.0)
    assert watch.decision("g") is None
    assert watch.group_ended("g") is None
    assert watch.watched == 0
    assert watch.metrics()["gate/cut"] == 1
    watch.group_launched("g")  # the key is free again


def test_memory_does_not_grow_with_the_groups_that_left() -> None:
    """Case 78: cut, kept, audited, expired before K, and never stepped."""
    watch = keeper(audit_rate=0.3)
    for i in range(300):
        watch.group_launched(i)
        play(watch, i, [["aaa", "aaa"], ["abc", "def"], ["a", "a"], ["aaaaaa", "aaa"]][i % 4])
        watch.group_ended(i, None if i % 7 == 0 else [0.0, 0.0])
        assert watch.watched == 0


@pytest.mark.parametrize("step", [2, 0, 4, None])
def test_a_step_that_cannot_be_is_named(step) -> None:
    watch = keeper()
    watch.group_launched("g")
    if step == 2:
        watch.observe("g", 0, 1, "a", "x")
        watch.observe("g", 0, 2, "a", "x")
    with pytest.raises(GateError, match=r"expected step [13] of member 0 of group 'g', got step"):
        watch.observe("g", 0, step, "a", "x")


def test_a_member_that_ended_takes_no_step_and_a_group_begins_once() -> None:
    watch = keeper()
    watch.group_launched("g")
    watch.member_ended("g", 0, 0.0)
    with pytest.raises(GateError, match="expected no further step of member 0"):
        watch.observe("g", 0, 1, "a", "x")
    with pytest.raises(GateError, match="a finite number for member 'b', got nan"):
        watch.member_ended("g", "b", float("nan"))
    with pytest.raises(GateError, match="got 'g' again"):
        watch.group_launched("g")


# ---------------------------------------------------------------- audits


def test_lots_depend_on_seed_and_group_alone() -> None:
    def lots(seed: int) -> list[bool]:
        watch = keeper(audit_rate=0.25, seed=seed)
        found = []
        for i in range(400):
            watch.group_launched(i)
            (verdict,) = play(watch, i, ["aaa", "aaa"])
            found.append(verdict.keep)
        return found

    first = lots(1)
    assert first == lots(1)
    assert first != lots(2)
    assert 70 <= sum(first) <= 130
    assert keeper(audit_rate=0.25, seed=1)._audit.is_audited(("a", 3)) == keeper(audit_rate=0.25, seed=1)._audit.is_audited(("a", 3))


def test_an_audited_group_runs_on_and_tells() -> None:
    watch = keeper(audit_rate=1.0)
    for i, rewards in enumerate(([0.0, 0.0], [1.0, 1.0], [1.0, 0.0])):
        watch.group_launched(i)
        (verdict,) = play(watch, i, ["aaabb", "aaab"])
        assert verdict.keep
        assert verdict.reason == "audited"
        assert watch.watched == 1
        watch.group_ended(i, rewards)
    shown = watch.metrics()
    assert shown["gate/precision"] == pytest.approx(2 / 3)
    assert shown["gate/precision_n"] == shown["gate/audited"] == 3
    assert 0 < shown["gate/precision_low"] < 2 / 3 < shown["gate/precision_high"] < 1
    assert shown["gate/cut"] == shown["gate/env_steps_saved_estimate"] == 0


def test_a_group_that_did_not_run_to_its_end_tells_nothing() -> None:
    watch = keeper(audit_rate=1.0)
    for i, rewards in enumerate((None, [1.0], [1.0, None])):
        watch.group_launched(i)
        play(watch, i, ["aaa", "aaa"])
        watch.group_ended(i, rewards)
    assert watch.metrics()["gate/audited_lost"] == 3
    assert "gate/precision" not in watch.metrics()


def test_savings_are_the_remaining_steps_of_audited_groups() -> None:
    """Half of 2000 groups are audited; what the other half would have run on for lies in the interval."""
    watch = keeper(Gate(k=K, threshold=0.3, horizon=30), audit_rate=0.5, seed=3)
    source = random.Random(3)
    truth = 0
    for i in range(2000):
        lengths = [source.randint(4, 30), source.randint(4, 30)]
        watch.group_launched(i)
        (verdict,) = play(watch, i, ["a" * length for length in lengths])
        if not verdict.keep:
            truth += sum(lengths) - 2 * K
        watch.group_ended(i, [0.0, 0.0])
    shown = watch.metrics(tokens_per_env_step=7.0)
    assert shown["gate/env_steps_saved_estimate_low"] <= truth
    assert truth <= shown["gate/env_steps_saved_estimate_high"]
    assert shown["gate/env_steps_saved_estimate"] == pytest.approx(truth, rel=0.05)
    assert shown["gate/tokens_saved_estimate"] == 7 * shown["gate/env_steps_saved_estimate"]
    assert shown["gate/env_steps_saved_bound"] == shown["gate/cut"] * 2 * (30 - K) > truth


def test_steps_of_all_members_count_as_saved_those_of_replacements_too() -> None:
    watch = keeper(audit_rate=1.0)
    for i in range(2):
        watch.group_launched(i)
        play(watch, i, ["aaaa", "aaa"])  # decided at the second member's third step: the fourth step of the first comes later
        watch.member_ended(i, 1, comparable=False)
        for step in (1, 2, 3, 4, 5):
            watch.observe(i, 1, step, "z", "x")
        watch.group_ended(i, [0.0, 0.0])
    assert watch._audit._remaining.mean == 6


def test_a_shadow_gate_cuts_nothing_and_every_group_tells() -> None:
    watch = keeper(shadow=True)
    for i in range(20):
        watch.group_launched(i)
        (verdict,) = play(watch, i, [["aaaa", "aaaa"], ["abcd", "efgh"]][i % 2])
        assert verdict.keep
        assert verdict.reason == ("kept" if i % 2 else "shadow")
        watch.group_ended(i, [0.0, float(i % 4 == 0)])
    shown = watch.metrics()
    assert (shown["gate/cut"], shown["gate/would_cut"], shown["gate/is_cutting"]) == (0, 10, 0)
    assert shown["gate/precision"] == 0.5
    assert shown["gate/precision_n"] == 10


def test_shares_add_up() -> None:
    watch = keeper(audit_rate=0.3, seed=5)
    for i in range(200):
        watch.group_launched(i)
        play(watch, i, [["aaaa", "aaaa"], ["abcd", "efgh"], ["a", "a"]][i % 3], rewards=[1.0, 0.0])
        watch.group_ended(i, [1.0, 0.0])
    shown = watch.metrics()
    assert shown["gate/judged"] + shown["gate/undecided"] == 200
    assert shown["gate/would_cut"] == shown["gate/cut"] + shown["gate/audited"]
    assert shown["gate/cut_rate"] == shown["gate/cut"] / 200


# ---------------------------------------------------------------- the precision that is held


class World:
    """Groups whose distance d is drawn evenly from [0, 0.3), zero-variance with a chance that falls with d."""

    def __init__(self, seed: int, right_below: float, chance: float = 0.99, beyond: float = 0.6) -> None:
        self.source = random.Random(seed)
        self.right_below, self.chance, self.beyond = right_below, chance, beyond

    def group(self) -> tuple[float, bool]:
        d = 0.3 * self.source.random()
        return d, self.source.random() < (self.chance if d < self.right_below else self.beyond)


def run(watch: GateKeeper, world: World, groups: int, first: int = 0):
    """Groups through the keeper, by their distance alone: what was cut with what truth, and the warnings."""
    cuts, warnings = [], []
    for i in range(first, first + groups):
        d, is_right = world.group()
        watch.group_launched(i)
        group = watch._groups[i]
        verdict, tells = watch._decide(group, {"prefix_edit_distance_mean": d}, 8)
        if not verdict.keep:
            cuts.append(is_right)
        group.prefixes = None
        if not tells:
            del watch._groups[i]
        warning = watch.group_ended(i, [0.0, 0.0 if is_right else 1.0])
        if warning:
            warnings.append(warning)
    return cuts, warnings


def holding(**settings) -> GateKeeper:
    return keeper(Gate(k=10, threshold=0.12), **{"group_size": 8, "audit_rate": 0.2, "hold_precision": 0.9, **settings})


def test_nothing_is_cut_before_the_floor_is_known_to_hold() -> None:
    watch = holding()
    assert not watch.is_cutting
    cuts, warnings = run(watch, World(1, 0.3), 30)
    assert not cuts
    assert not warnings
    cuts, _ = run(watch, World(1, 0.3), 500, first=30)
    assert watch.is_cutting
    assert watch.scale == 2.0  # right everywhere: as far up as it may go
    assert len(cuts) > 200


@pytest.mark.parametrize("seed", range(5))
def test_the_threshold_moves_to_where_the_floor_holds(seed: int) -> None:
    """Cuts are right below d = 0.08 alone, the threshold given is 0.12."""
    watch = holding()
    cuts, _ = run(watch, World(seed, 0.08), 4000)
    assert len(cuts) > 100
    assert sum(cuts) / len(cuts) >= 0.9
    if watch.is_cutting:
        assert watch.scale <= 1.0
        assert watch.precision.low >= 0.9


@pytest.mark.parametrize(("precision", "most"), [(0.85, 0.03), (0.88, 0.25)])
def test_a_gate_a_little_below_its_floor_hardly_opens(precision: float, most: float) -> None:
    """The bound is looked at after every audited group: now and then it is lucky. As a share of what an open gate would have cut."""
    cuts = 0
    for seed in range(3):
        cuts += len(run(holding(), World(seed, 0.0, beyond=precision), 4000)[0])
    assert cuts / 3 < most * (0.8 * 0.4 * 4000)


@pytest.mark.parametrize("precision", [0.95, 0.99])
def test_a_gate_above_its_floor_is_open_most_of_the_time_and_stays_above_it(precision: float) -> None:
    for seed in range(2):
        cuts, _ = run(holding(), World(seed, 0.3, chance=precision), 4000)
        assert len(cuts) > 0.5 * (0.8 * 0.4 * 4000)
        assert sum(cuts) / len(cuts) > 0.9


def test_it_switches_off_with_a_warning_when_the_policy_has_changed_and_opens_again() -> None:
    watch = holding(window=100)
    run(watch, World(1, 0.3), 600)
    assert watch.is_cutting
    cuts, warnings = run(watch, World(2, 0.0, beyond=0.3), 3000, first=1000)
    assert not watch.is_cutting
    assert len(warnings) == 1
    assert "switched off" in warnings[0]
    assert "hold_precision 0.9" in warnings[0]
    assert len(cuts) < 200
    cuts, warnings = run(watch, World(3, 0.3), 1000, first=5000)
    assert watch.is_cutting
    assert not warnings


def test_a_floor_that_was_never_reached_is_said_once() -> None:
    watch = holding(window=60)
    cuts, warnings = run(watch, World(1, 0.0, beyond=0.5), 1000)
    assert not cuts
    assert len(warnings) == 1


def test_recorded_groups_are_evidence_to_begin_with() -> None:
    watch = holding()
    for i in range(60):
        assert watch.learn({"prefix_edit_distance_mean": 0.1}, [1.0, 1.0]) is None
        assert watch.learn({"prefix_edit_distance_mean": 0.9}, [1.0, float(i)]) is None
    assert watch.is_cutting


def test_audited_precision_is_not_biased_by_what_is_cut() -> None:
    """Half of the would-be cuts are right: whatever the lot, the audited share says so."""
    watch = keeper(Gate(k=10, threshold=0.12), group_size=8, audit_rate=0.2, window=100_000)
    cuts, _ = run(watch, World(9, 0.0, beyond=0.5), 20_000)
    precision = watch.precision
    assert precision.low <= sum(cuts) / len(cuts) <= precision.high
    assert precision.n == pytest.approx(0.2 * 0.4 * 20_000, rel=0.1)


# ---------------------------------------------------------------- settings and state


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 1}, "gate.group_size: expected a whole number >= 2, got 1 - a group of one has no pairs"),
        ({"group_size": 2.0}, "gate.group_size: .* got 2.0"),
        ({"redundancy": -1}, "gate.redundancy: expected a whole number >= 0, got -1"),
        ({"window": 0}, "gate.window: expected a whole number >= 1, got 0"),
        ({"audit_rate": 1.5}, "gate.audit_rate: expected a number >= 0 and <= 1, got 1.5"),
        ({"audit_rate": float("nan")}, "gate.audit_rate: .* got nan"),
        ({"hold_precision": 1.0, "audit_rate": 0.1}, "gate.hold_precision: expected a number > 0 and < 1, got 1.0"),
        ({"hold_precision": float("nan")}, "gate.hold_precision: .* got nan"),
        ({"hold_precision": 0.9}, "gate.audit_rate: expected more than 0 beside hold_precision"),
        ({"hold_precision": 0.9, "audit_rate": 0.1, "most_scale": 0}, "gate.most_scale: expected a number >= 0.05, got 0"),
        ({"hold_precision": 0.95, "audit_rate": 0.1, "window": 50}, "gate.window: expected at least 72 audited groups .* got 50"),
        ({"confidence": 1}, "gate.confidence: expected a number > 0 and < 1, got 1"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_say_what_to_change(settings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        keeper(**settings)


def test_a_keeper_goes_on_from_its_state() -> None:
    """Cut into two at any place, with a checkpoint between: the same decisions and figures. Running groups restart whole."""
    whole = holding()
    world = World(4, 0.2)
    whole_cuts, _ = run(whole, world, 1200)
    first, second, world = holding(), holding(), World(4, 0.2)
    cuts, _ = run(first, world, 700)
    first.group_launched("runs when it is saved")
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    assert second.watched == 0
    more, _ = run(second, world, 500, first=700)
    assert cuts + more == whole_cuts
    assert second.metrics() == whole.metrics()
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    "torn",
    [
        {"gate": "k=11"},
        {"counts": {}},
        {"counts": 3},
        {"records": [[0.1, 1]]},
        {"records": 3},
        {"records": [["a", True]]},
        {"scale": "1"},
        {"is_open": 1},
        {"remaining": [1, 2]},
        {"remaining": [-1, 0.0, 0.0]},
        {"remaining": [2, 0.0, -1.0]},
        {"scale": 0},
        {"scale": -1.0},
        {"scale": 1e9},
        {"records": [[-0.1, True]]},
        {"records": [[10**400, True]]},
        {"more": 1},
    ],
    ids=str,
)
def test_a_torn_state_changes_nothing(torn) -> None:
    watch = holding()
    run(watch, World(4, 0.2), 300)
    before = watch.state_dict()
    with pytest.raises(GateError, match="the state is torn, or of another gate"):
        watch.load_state_dict({**before, **torn})
    with pytest.raises(GateError, match="the state is torn"):
        watch.load_state_dict(None)
    assert watch.state_dict() == before


def test_groups_that_run_at_a_checkpoint_are_lost_to_the_audits() -> None:
    """They restart whole: what is counted of them is that of groups that left without telling."""
    first = keeper(audit_rate=1.0)
    for key in ("ends", "runs", "begins"):
        first.group_launched(key)
        play(first, key, ["aaaa", "aaaa"], to=2 if key == "begins" else K)
    first.group_ended("ends", [0.0, 0.0])
    second = keeper(audit_rate=1.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for key in ("runs", "begins"):
        first.group_ended(key)
    assert second.metrics() == first.metrics()
    shown = second.metrics()
    assert shown["gate/would_cut"] == 2 == shown["gate/cut"] + shown["gate/audited"] + shown["gate/audited_lost"]


def test_a_step_that_is_refused_has_not_happened() -> None:
    watch = keeper()
    watch.group_launched("g")
    with pytest.raises(GateError, match="hashable"):
        watch.observe("g", 0, 1, ["not hashable"], "hall")
    with pytest.raises(GateError, match="expected step 1 of member 1"):
        watch.observe("g", 1, 2, "a", "hall")
    assert [verdict.keep for verdict in play(watch, "g", ["aaaa", "aaaa"])] == [False]


def test_a_task_type_is_a_text() -> None:
    watch = keeper()
    with pytest.raises(GateError, match="task_type: expected a text"):
        watch.group_launched("g", task_type=3)
    watch.group_launched("g")
    with pytest.raises(GateError, match="task_type: expected a text"):
        watch.task_type_known("g", ["look"])
    assert watch.watched == 1


def test_the_bound_counts_members_that_have_not_begun() -> None:
    watch = keeper(redundancy=2)
    watch.group_launched("g")
    watch.observe("g", 2, 1, "a", "hall")
    [verdict] = play(watch, "g", ["aaa", "aaa"])
    assert not verdict.keep
    assert watch.metrics()["gate/env_steps_saved_bound"] == (10 - 3) + (10 - 3) + (10 - 1) + 10


def test_no_estimate_of_what_is_saved_is_above_its_bound() -> None:
    """Two audited groups that took very different numbers of steps have a wide interval."""
    first, watch = keeper(audit_rate=1.0), keeper()
    for key, steps in (("short", 4), ("long", 10)):
        first.group_launched(key)
        play(first, key, ["a" * steps] * 2)
        first.group_ended(key, [0.0, 0.0])
    watch.load_state_dict(first.state_dict())
    watch.group_launched("g")
    watch.observe("g", 0, 1, "a", "hall")
    play(watch, "g", ["", "aaa"])
    for step in (2, 3):
        watch.observe("g", 0, step, "a", "hall")
        watch.decision("g")
    shown = watch.metrics(tokens_per_env_step=2.0)
    assert shown["gate/cut"] == 1
    for name in ("estimate_low", "estimate", "estimate_high"):
        assert shown[f"gate/env_steps_saved_{name}"] <= shown["gate/env_steps_saved_bound"]
        assert shown[f"gate/tokens_saved_{name}"] <= shown["gate/tokens_saved_bound"]
    assert shown["gate/env_steps_saved_estimate_high"] == shown["gate/env_steps_saved_bound"] == 14
