"""A fixed set of simulated runs: whatever the settings, the data and the faults, nothing is lost, doubled or stuck."""

from __future__ import annotations

from collections import Counter

import pytest

from sluice.sim import PlayerName, Simulated, simulate, simulate_many
from sluice.sim.faults import KINDS

MACHINE_SEEDS = 1500  # about fifty seconds
SHELL_SEEDS = 500  # about ten
BUNCH = 50


def bunches(seeds: int) -> list[range]:
    return [range(first, first + BUNCH) for first in range(0, seeds, BUNCH)]


@pytest.fixture(scope="module")
def seen() -> dict[PlayerName, Simulated]:
    return {"machine": Simulated(), "shell": Simulated()}


@pytest.mark.parametrize("seeds", bunches(MACHINE_SEEDS), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_whatever_happens_around_the_machine_nothing_is_lost_doubled_or_stuck(seeds: range, seen: dict[PlayerName, Simulated]) -> None:
    for seed in seeds:
        seen["machine"] += simulate(seed, "machine")


@pytest.mark.parametrize("seeds", bunches(SHELL_SEEDS), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_whatever_happens_around_the_shell_nothing_is_lost_doubled_or_stuck(seeds: range, seen: dict[PlayerName, Simulated]) -> None:
    for seed in seeds:
        seen["shell"] += simulate(seed, "shell")


def test_in_these_runs_every_kind_of_fault_has_happened(seen: dict[PlayerName, Simulated]) -> None:
    if seen["machine"].runs < MACHINE_SEEDS or seen["shell"].runs < SHELL_SEEDS:
        pytest.skip("some of the runs were not asked for, or failed")
    happened: Counter[str] = seen["machine"].faults + seen["shell"].faults
    assert {*KINDS, "update_while_generating"} == set(happened)
    assert all(count >= 10 for count in happened.values())
    assert seen["machine"].lifecycles > 100_000


def test_runs_in_other_processes_are_the_same_runs() -> None:
    here = sum(simulate_many(range(7, 47)), Simulated())
    there = sum(simulate_many(range(7, 47), workers=2), Simulated())
    assert (here.digest, here.events, here.faults) == (there.digest, there.events, there.faults)
    assert here.runs == 40
    assert not here.failures
