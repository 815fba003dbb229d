"""The gate of a simulated run: the real keepers, and what members do at their environment steps.

What a member does follows from its seed: some tasks make all members do the same, so that there is something to cut, and some members see
the same again and again, so that there is something to stop.
"""

from __future__ import annotations

from typing import Final

from sluice.gate import FutilityKeeper, FutilityRule, Gate, GateKeeper
from sluice.scheduler import MachineGate
from sluice.scheduler import events as ev
from sluice.sim.scenario import Scenario

ACTIONS: Final = ("look", "go north", "go south", "open door")
STUCK_SHARE: Final = 0.25  # of the members: they see the same after every step


def make_gate(scenario: Scenario) -> MachineGate | None:
    """A fresh gate, for one machine; None: the scenario has none."""
    settings, config = scenario.gate, scenario.config
    if settings is None:
        return None
    keeper = GateKeeper(
        Gate(k=settings.k, threshold=settings.threshold, horizon=settings.steps + 1),
        group_size=config.group_size,
        redundancy=config.redundancy,
        seed=config.seed,
        audit_rate=settings.audit_rate,
        shadow=settings.shadow,
        hold_precision=settings.hold_precision,
        window=20,
        confidence=0.5,
    )
    futility = None
    if settings.futile_steps is not None:
        futility = FutilityKeeper(FutilityRule(steps=settings.futile_steps), seed=config.seed, audit_rate=settings.audit_rate)
    return MachineGate(keeper, futility, on_cut=settings.on_cut, barrier=settings.barrier)


def step_of(scenario: Scenario, launch: ev.LaunchMember, number: int, *, is_last: bool) -> ev.MemberStepped:
    """What a member does at its step of this number, from 1."""
    assert scenario.gate is not None
    assert launch.task.difficulty is not None
    is_converging = launch.task.difficulty < scenario.gate.converging
    own = 0 if is_converging else launch.seed >> (2 * number) & 3
    is_stuck = (launch.seed >> 33 & 255) < 256 * STUCK_SHARE
    return ev.MemberStepped(
        attempt_id=launch.attempt_id,
        env_step=number,
        action=ACTIONS[own],
        observation="start" if is_stuck else f"place {number - 1}",
        reply="start" if is_stuck else f"place {number}",
        task_type=launch.task.domain,
        is_last=is_last,
    )
