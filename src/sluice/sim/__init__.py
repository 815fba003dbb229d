"""Simulated runs by the thousand: the real machine, filters, guard and ledger on a virtual clock, with everything around them made up.

A seed draws one scenario and plays it, the same way every time. After every event what must hold is looked at; where it does not, the
failure prints the command that repeats it and the story of the groups it is about.

    scenario.py      what a run is made of, drawn from its seed
    faults.py        what goes wrong in it, and how often it did
    world.py         tasks, sources, filters and guard of a scenario
    gate.py          its gate, and what members do for it to look at
    player.py        Player: the bare machine on a heap of events, fast
    loops.py         its user-defined loops
    records.py       rollouts and events, made quickly
    shell_player.py  ShellPlayer: the same scenarios through LocalShell and NullEngine on a virtual event loop
    invariants.py    what must hold
    prompts.py       what must hold of prompts: none lost, none twice
    violation.py     what is raised where it does not
    story.py         events and instructions in words
    run.py           one seed, many seeds, and what a failure says

A new setting of the machine belongs into `scenario._machine_settings`, a new kind of fault into the table of `faults.py` and into the
players, and whatever must hold of it into `invariants.py`.
"""

from __future__ import annotations

from sluice.sim.faults import FaultPlan, Kill
from sluice.sim.player import Player
from sluice.sim.run import Simulated, SimulationFailure, replay_command, simulate, simulate_many
from sluice.sim.scenario import PlayerName, Scenario, draw_scenario
from sluice.sim.violation import Violation

__all__ = [
    "FaultPlan",
    "Kill",
    "Player",
    "PlayerName",
    "Scenario",
    "Simulated",
    "SimulationFailure",
    "Violation",
    "draw_scenario",
    "replay_command",
    "simulate",
    "simulate_many",
]
