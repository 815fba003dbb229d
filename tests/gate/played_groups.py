"""Groups that were played in a small world of rooms, for tests of rules that are fitted."""

from __future__ import annotations

from functools import cache

import numpy as np
from hypothesis import strategies as st

from sluice.gate.boosting import Boosting
from sluice.gate.fitting import fit_learned
from sluice.gate.learned import LearnedRule
from sluice.gate.played import PlayedGroup, PlayedMember
from sluice.gate.traces import INPUTS, Step

HORIZON = 12


def played(seed: int, size: int = 4) -> PlayedGroup:
    """A hard problem in which everybody gets stuck, an easy one in which all succeed, or one of luck. Progress shows what becomes of it."""
    rng = np.random.default_rng(seed)
    chance = float(rng.choice([0.02, 0.3, 0.9], p=[0.4, 0.4, 0.2]))
    members = []
    for _ in range(size):
        is_stuck = False
        steps, at = [], 0
        while len(steps) < HORIZON and at < 4:
            is_stuck = is_stuck or rng.random() < 0.15 * (1 - chance)
            moves = not is_stuck and rng.random() < chance
            at += moves
            action = f"go to room {at}" if moves else "look" if is_stuck else f"open box {rng.integers(4)}"
            reply = f"room {at}" if moves else "nothing" if is_stuck else f"{action}: empty"
            steps.append(Step(action, reply, not is_stuck, at / 4, float(-0.1 - rng.random() * chance)))
        members.append(PlayedMember(steps=tuple(steps), reward=float(at == 4), first_observation="room 0"))
    return PlayedGroup(key=seed, members=tuple(members))


@st.composite
def interleavings(draw, group: PlayedGroup | None = None):
    """(group, events): a group, and its steps and ends in some order: ("step", member, t) and ("end", member)."""
    if group is None:
        group = played(draw(st.integers(0, 40)), draw(st.integers(2, 4)))
    waiting = dict.fromkeys(range(len(group.members)), 0)
    events = []
    while waiting:
        name = draw(st.sampled_from(sorted(waiting)))
        if waiting[name] == len(group.members[name].steps):
            events.append(("end", name))
            del waiting[name]
            continue
        waiting[name] += 1
        events.append(("step", name, waiting[name]))
        if waiting[name] == len(group.members[name].steps):  # the end of a trajectory is told with its last step
            events.append(("end", name))
            del waiting[name]
    return group, events


FEW = {"members": Boosting(trees=20, depth=3, rate=0.2), "of_groups": Boosting(trees=20, depth=2, rate=0.2)}
"""Models that are quick to fit."""


@cache
def fitted(futility_floor: float | None = None) -> LearnedRule:
    """A rule for groups of 4."""
    groups = [played(seed) for seed in range(260)]
    return fit_learned(groups, horizon=HORIZON, inputs=INPUTS, steps=range(2, HORIZON), futility_floor=futility_floor, folds=3, **FEW)
