"""The simulator itself: a seed is one run, and a scheduler with a bug is found, with the command that repeats it and the story."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from sluice.gate import GateKeeper
from sluice.ledger import Ledger
from sluice.records.checkpoints import decode, encode
from sluice.scheduler import MachineGate, ReplayBuffer, Scheduler, SchedulerConfig, judging
from sluice.scheduler import events as ev
from sluice.scheduler.prompts import Prompts
from sluice.sim import FaultPlan, Player, PlayerName, Scenario, SimulationFailure, draw_scenario, replay_command, simulate, simulate_many
from sluice.sim.shell_player import ShellPlayer
from sluice.types import Group, Verdict

# ---------------------------------------------------------------- one seed, one run


def story(seed: int, player: PlayerName) -> list[str]:
    trace: list[str] = []
    kinds: dict[PlayerName, type[Player] | type[ShellPlayer]] = {"machine": Player, "shell": ShellPlayer}
    kinds[player](draw_scenario(seed, player), codec=lambda state: decode(encode(state)), trace=trace).run()
    return trace


@pytest.mark.parametrize("player", ["machine", "shell"])
@pytest.mark.parametrize("seed", [1, 2, 11, 29])
def test_the_same_seed_is_the_same_run_event_by_event(seed: int, player: PlayerName) -> None:
    first = story(seed, player)
    assert first == story(seed, player)
    assert len(first) > 20


@pytest.mark.parametrize("player", ["machine", "shell"])
def test_seeds_are_different_runs(player: PlayerName) -> None:
    assert len({simulate(seed, player).digest for seed in range(20)}) == 20


def test_two_machines_with_the_same_seed_keep_the_same_ledger() -> None:
    players = [Player(draw_scenario(5), codec=lambda state: state) for _ in range(2)]
    for player in players:
        player.run()
    first, second = [player.machine.ledger.state_dict() for player in players]
    assert first == second
    assert first["groups_launched"] > 10


def test_the_scenarios_put_every_setting_into_play() -> None:
    drawn = [draw_scenario(seed).config for seed in range(400)]
    plain = SchedulerConfig(group_size=2)
    for name in SchedulerConfig.__dataclass_fields__:
        values = [getattr(config, name) for config in drawn]
        assert any(value != values[0] for value in values), f"{name} is always {values[0]}"
        assert getattr(plain, name) in values or name == "seed", f"the default of {name} is never drawn"
    assert {config.async_generation_ratio for config in drawn} == {0.0, 0.5, 1.0, 1.5, 2.0}


def test_gates_of_all_kinds_are_drawn_and_change_nothing_else() -> None:
    scenarios = [draw_scenario(seed) for seed in range(600)]
    gates = [scenario.gate for scenario in scenarios if scenario.gate is not None]
    assert 50 < len(gates) < 200
    for name in ("shadow", "barrier", "on_cut", "futile_steps", "hold_precision", "audit_rate", "k", "steps"):
        assert len({getattr(gate, name) for gate in gates}) > 1, name
    assert all(scenario.config.group_size > 1 and not scenario.config.has_user_loop for scenario in scenarios if scenario.gate is not None)
    assert all(draw_scenario(seed, "shell").gate is None for seed in range(100))


def test_the_scenarios_of_both_players_are_drawn_apart() -> None:
    assert draw_scenario(3, "machine") == draw_scenario(3, "machine")
    assert draw_scenario(3, "machine") != draw_scenario(3, "shell")


# ---------------------------------------------------------------- bugs are found


def keep_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    def abort(self: ReplayBuffer, group_id: int, verdict: object) -> bool:
        return group_id in self._running

    monkeypatch.setattr(ReplayBuffer, "abort", abort)


def commit_a_partial_group(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = judging.group_of

    def partial(open_group: Any, rollouts: tuple[Any, ...], counted: tuple[bool, ...]) -> Group:
        return whole(open_group, rollouts[1:], counted[1:]) if open_group.group_id == 3 else whole(open_group, rollouts, counted)

    monkeypatch.setattr(judging, "group_of", partial)


def count_tokens_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    once = Ledger.attempt_ended

    def twice(self: Ledger, outcome: str, tokens: int, reason: str | None = None) -> None:
        once(self, outcome, 2 * tokens if outcome == "failed" else tokens, reason)

    monkeypatch.setattr(Ledger, "attempt_ended", twice)


def forget_a_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    def owe(self: Scheduler, group: Any, round_number: int) -> None:
        pass

    monkeypatch.setattr(Scheduler, "_owe", owe)


def lose_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    def back(self: Scheduler, task: object, epoch: int, out: list[ev.Instruction]) -> None:
        pass

    monkeypatch.setattr(Scheduler, "_return", back)


def requeue_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prompts, "may_come_back", lambda self, task, epoch: True)


def train_what_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = ReplayBuffer.begin

    def begin(self: ReplayBuffer, group_id: int, max_staleness: int | None = None) -> int:
        return restore(self, group_id, 1000)

    monkeypatch.setattr(ReplayBuffer, "begin", begin)


def record_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    once = Scheduler._record_if_settled

    def twice(self: Scheduler, group: Any, now: float, out: list[ev.Instruction]) -> None:
        before = len(out)
        once(self, group, now, out)
        out.extend(out[before:])

    monkeypatch.setattr(Scheduler, "_record_if_settled", twice)


def never_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    def arm(self: Scheduler, out: list[ev.Instruction]) -> None:
        pass

    monkeypatch.setattr(Scheduler, "_arm", arm)


def let_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members that nobody needs are forgotten instead of cancelled."""

    def let_go(self: Scheduler, group: Any, member_index: int, out: list[ev.Instruction]) -> None:
        group.slots[member_index] = -1

    monkeypatch.setattr(Scheduler, "_let_go", let_go)


def forget_what_was_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Scheduler.state_dict

    def without(self: Scheduler, in_flight: Any = None) -> dict[str, Any]:
        return saved(self, in_flight) | {"committed": []}

    monkeypatch.setattr(Scheduler, "state_dict", without)


def deliver_short(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Scheduler._is_full
    monkeypatch.setattr(Scheduler, "_is_full", lambda self: full(self) or self.buffer.committed == 2)


def fail_without_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    exhausted = Scheduler._exhausted

    def gives_up(self: Scheduler, now: float, out: list[ev.Instruction]) -> None:
        if self.config.on_exhausted == "raise" and self.filling == (0, 1):
            self._fail(self._exhaustion_message(0, "raise"), now, out)
        else:
            exhausted(self, now, out)

    monkeypatch.setattr(Scheduler, "_exhausted", gives_up)
    monkeypatch.setattr(Scheduler, "_is_stuck", lambda self: True)


def hold_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(self: Scheduler, group: Any, out: list[ev.Instruction]) -> None:
        pass

    monkeypatch.setattr(Scheduler, "_release", release)


def cut_whatever_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    decision = GateKeeper.decision

    def always(self: GateKeeper, group_key: Any) -> Any:
        verdict = decision(self, group_key)
        return verdict if verdict is None else Verdict.dropped("converged_prefix", "low_information", "gate", verdict.evidence)

    monkeypatch.setattr(GateKeeper, "decision", always)


def remember_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MachineGate, "left", lambda self, group, rewards=None: None)


def replace_the_lost_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate does not hear that a member is lost for good, and waits for it."""
    monkeypatch.setattr(MachineGate, "lost", lambda self, group, place, *, is_replaced: None)


BUGS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "capacity never returns": (keep_capacity, r"groups run|not everything has come back|nothing is under way"),
    "a partial group is committed": (commit_a_partial_group, r"group 3 has \d+ members|members \[1|group 3 is trained without"),
    "tokens of failures are counted twice": (count_tokens_twice, r"the ledger accounts for \d+ tokens"),
    "no replacement is launched": (forget_a_replacement, r"nothing allows that|did not act|nothing is under way"),
    "prompts are lost": (lose_prompts, r"prompts? .*(were not put back|never came back)|drawn, and no group was launched"),
    "prompts come back again and again": (requeue_for_ever, r"comes back a second time|comes back without requeue"),
    "stale groups are trained": (train_what_is_stale, r"steps old"),
    "groups are recorded twice": (record_twice, r"is recorded a second time"),
    "deadlines are forgotten": (never_wake, r"nothing will ever happen again|nothing is told to the machine any more"),
    "members run on": (let_run_on, r"running attempts|is cancelled|not in list|launched"),
    "accepted groups are lost in a checkpoint": (
        forget_what_was_committed,
        r"groups were launched and|does not add up|records hold|tokens",
    ),
    "batches are delivered short": (deliver_short, r"nothing allows that"),
    "the run is given up without a cause": (fail_without_a_cause, r"did not act"),
    "members wait for ever for a decision": (hold_for_ever, r"wait for each other|nothing will ever happen again|nothing is under way"),
    "groups are cut that have parted": (cut_whatever_is_looked_at, r"is cut as low_information/converged_prefix"),
    "keepers remember every group": (remember_every_group, r"a keeper of the gate watches|that is not watched yet"),
    "the gate waits for the lost": (replace_the_lost_unheard, r"wait for each other|expected (no further step|step \d+)|nothing (will|is)"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_scheduler_with_a_bug_is_found_with_its_story_and_the_command_that_repeats_it(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inject, message = BUGS[bug]
    inject(monkeypatch)
    for seed in range(200):
        try:
            simulate(seed)
        except SimulationFailure as failure:
            text = str(failure)
            assert re.search(message, text.splitlines()[0]), text.splitlines()[0]
            assert text.splitlines()[1] == f"repeat it with: sluice simulate --seed {seed} --player machine"
            assert "the last events:\n" in text
            assert "when it was repeated" not in text
            return
    raise AssertionError(f"nothing was found in 200 runs: {bug}")


def test_a_bug_of_the_shell_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from sluice.execution.responses import ResponsePlayer

    cancel = ResponsePlayer.cancel
    monkeypatch.setattr(ResponsePlayer, "cancel", lambda *args: None if (tokens := cancel(*args)) is None else tokens + 1)
    told = r"the ledger accounts for[\s\S]*repeat it with: sluice simulate --seed \d+ --player shell"
    with pytest.raises(SimulationFailure, match=told):
        any(map(partial(simulate, player="shell"), range(100)))


def test_a_failure_tells_the_story_of_the_groups_it_is_about(monkeypatch: pytest.MonkeyPatch) -> None:
    record_twice(monkeypatch)
    (total,) = simulate_many(range(4, 5))
    (failure,) = total.failures
    group_id = re.search(r"group (\d+) is recorded a second time", failure).group(1)  # type: ignore[union-attr]
    told = failure.split(f"story of group {group_id}:\n")[1].split("the last events:")[0]
    assert f"(group {group_id}, member 0)" in told
    assert "MemberFinished" in told
    assert f"RecordGroup (group {group_id})" in told
    assert total.runs == 1


def test_a_run_that_cannot_be_repeated_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def once(self: Scheduler, event: Any, now: float, out: list[ev.Instruction]) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ZeroDivisionError("only now")
        wanted(self, event, now, out)

    wanted = Scheduler._batch_wanted
    monkeypatch.setattr(Scheduler, "_batch_wanted", once)
    with pytest.raises(SimulationFailure, match=r"ZeroDivisionError: only now[\s\S]*does not depend on the seed alone"):
        simulate(0)


# ---------------------------------------------------------------- faults by themselves

PLAIN = Scenario(seed=9, config=SchedulerConfig(group_size=3, seed=9, max_resample_rounds=1000), batch=4, batches=10, tasks=50)


def test_without_faults_every_batch_is_exact_and_every_attempt_is_trained_or_dropped() -> None:
    player = Player(PLAIN, codec=lambda state: state)
    player.run()
    ledger = player.machine.ledger
    assert ledger.groups["trained"] == 40
    assert player.check.batches == 10
    assert not player.faults.counts
    assert ledger.attempts["rejected"] == ledger.attempts["failed"] == 0
    assert ledger.tokens["late"] == ledger.tokens["lost"] == 0


def test_a_hang_is_ended_by_the_deadline_of_its_group() -> None:
    config = replace(PLAIN.config, group_timeout_s=60.0)
    scenario = replace(PLAIN, config=config, faults=FaultPlan(hang=0.05))
    player = Player(scenario, codec=lambda state: state)
    player.run()
    assert player.faults.counts["hang"] > 0
    assert player.machine.ledger.rejected_groups["invalid", "group_timeout"] > 0
    assert player.machine.ledger.groups["trained"] == 40


def test_a_hang_without_a_deadline_is_a_violation() -> None:
    failed = replace(PLAIN, faults=FaultPlan(hang=0.05))
    with pytest.raises(
        SimulationFailure, match="nothing will ever happen again, but the run has not ended; the machine waits for .* members"
    ):
        simulate(9, scenario=failed)


def test_a_killed_run_accounts_for_what_was_lost_and_trains_as_much() -> None:
    from sluice.sim import Kill

    kills = (Kill(saved_at=60, killed_at=90, at_step=False), Kill(saved_at=40, killed_at=40, at_step=True))
    player = Player(replace(PLAIN, faults=FaultPlan(kills=kills)), codec=lambda state: decode(encode(state)))
    player.run()
    ledger = player.machine.ledger
    assert player.faults.counts["kill"] == 2
    assert ledger.groups["trained"] == 40
    assert ledger.tokens["lost"] > 0
    assert ledger.total_tokens == player.engine_tokens


def test_the_command_that_repeats_a_seed() -> None:
    assert replay_command(12, "shell") == "sluice simulate --seed 12 --player shell"
