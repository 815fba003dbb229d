"""When a goal is reached, and how much of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.environments.household.facts import TREATMENTS

if TYPE_CHECKING:
    from sluice.environments.household.twin import House


def is_reached(house: House) -> bool:
    """Whether the goal is reached now."""
    goal, kinds = house.game.goal, house.game.kinds
    if goal.lamp_class is not None:
        return house.held is not None and kinds[house.held] == goal.object_class and _is_under_lamp(house)
    return _most_together(house) >= goal.wanted


def progress(house: House) -> float:
    """0 .. 1: the share of what is to be done that is done now. Things count when they are held, treated, and lie where they belong."""
    if house.is_won:
        return 1.0
    goal, kinds = house.game.goal, house.game.kinds
    is_held = house.held is not None and kinds[house.held] == goal.object_class
    if goal.lamp_class is not None:
        return (is_held + _is_under_lamp(house)) / 2
    treatment = TREATMENTS.get(goal.task_type)
    if treatment is None:
        return (2 * _most_together(house) + is_held) / (2 * goal.wanted)
    done = house.treated[treatment[0]]
    return max((is_held and (1 + (house.held in done)), any(kinds[thing] == goal.object_class for thing in done))) / 3


def _is_under_lamp(house: House) -> bool:
    """Whether a lamp of the goal stands where the player is and was used."""
    goal, kinds = house.game.goal, house.game.kinds
    return house.at is not None and any(kinds[lamp] == goal.lamp_class and lamp in house.inside[house.at] for lamp in house.lit)


def _most_together(house: House) -> int:
    """How many things, as the goal wants them, lie in that receptacle of its class that holds the most."""
    goal, kinds = house.game.goal, house.game.kinds
    treatment = TREATMENTS.get(goal.task_type)
    done = None if treatment is None else house.treated[treatment[0]]
    counted: dict[str, int] = {}
    for thing in house.game.wanted_things:
        receptacle = house.where[thing]
        if receptacle is not None and kinds[receptacle] == goal.receptacle_class and (done is None or thing in done):
            counted[receptacle] = counted.get(receptacle, 0) + 1
    return max(counted.values(), default=0)
