"""A fixed set of simulated runs: whatever the settings, the data and the faults, nothing is lost, doubled or stuck."""

from __future__ import annotations

import pytest

from sluice.sim import PlayerName, Simulated, simulate, simulate_many
from sluice.sim.faults import ATTEMPT_KINDS, KINDS

BUNCH = 250  # seeds of one test, five to eight seconds: enough for every kind of fault to happen in each of them
BUNCHES = {"machine": 6, "shell": 2}
LIFECYCLES = {"machine": 25_000, "shell": 7_500}  # at least, in a bunch
HAPPEN = {  # what happens around each of the two
    "machine": {*KINDS, "update_while_generating"} - {"cancel"},
    "shell": {*ATTEMPT_KINDS, "worker_crash", "slow_consumer", "kill", "stop", "cancel"},
}


@pytest.mark.timeout(600)  # it takes a hundredth of that, unless the machine is busy with other things
@pytest.mark.parametrize(
    ("player", "seeds"),
    [(player, range(i * BUNCH, (i + 1) * BUNCH)) for player, count in BUNCHES.items() for i in range(count)],
    ids=lambda value: value if isinstance(value, str) else f"{value.start}-{value.stop - 1}",
)
def test_whatever_happens_around_machine_and_shell_nothing_is_lost_doubled_or_stuck(player: PlayerName, seeds: range) -> None:
    seen = sum((simulate(seed, player) for seed in seeds), Simulated())
    assert seen.runs == BUNCH
    assert set(seen.faults) == HAPPEN[player]
    assert all(count >= 5 for count in seen.faults.values()), seen.faults
    assert seen.lifecycles > LIFECYCLES[player]


def test_between_them_every_kind_of_fault_happens() -> None:
    assert HAPPEN["machine"] | HAPPEN["shell"] == {*KINDS, "update_while_generating"}


def test_runs_in_other_processes_are_the_same_runs() -> None:
    here = sum(simulate_many(range(7, 47)), Simulated())
    there = sum(simulate_many(range(7, 47), workers=2), Simulated())
    assert (here.digest, here.events, here.faults) == (there.digest, there.events, there.faults)
    assert here.runs == 40
    assert not here.failures
