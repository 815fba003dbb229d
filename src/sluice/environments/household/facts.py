"""What is known of rooms and things: loaded once, from the file beside this one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal

FACTS_FILE: Final = Path(__file__).with_name("facts.json")

TaskType = Literal[
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
]
TASK_TYPES: Final[tuple[TaskType, ...]] = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)

LAMPS: Final = frozenset({"DeskLamp", "FloorLamp"})
KNIVES: Final = frozenset({"Knife", "ButterKnife"})
LAMP_STANDS: Final = ("SideTable", "Desk", "Dresser", "CoffeeTable", "Shelf", "DiningTable")  # where lamps stand

Treatment = Literal["clean", "heat", "cool"]
TREATMENTS: Final[Mapping[str, tuple[Treatment, str]]] = {
    "pick_clean_then_place_in_recep": ("clean", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("heat", "Microwave"),
    "pick_cool_then_place_in_recep": ("cool", "Fridge"),
}
"""Task type -> what is done with the thing first, and in what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorPlan:
    """One room of AI2-THOR, as far as ALFWorld records it."""

    number: int
    kind: str  # Kitchen, LivingRoom, Bedroom, Bathroom
    is_test: bool  # one of those that ALFWorld keeps for unseen rooms
    receptacles: tuple[str, ...]  # ids; where ALFWorld records no place, one with made-up coordinates
    objects: frozenset[str]  # classes of movable things and lamps that the room has


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything in facts.json."""

    floor_plans: Mapping[int, FloorPlan]
    rooms: Mapping[str, frozenset[str]]  # task type -> kinds of room in which it is set
    templates: Mapping[str, tuple[str, ...]]  # task type -> how its goal is told
    can_hold: Mapping[str, frozenset[str]]  # class of receptacle -> classes of things that may lie in it
    openable: frozenset[str]  # classes of receptacles that open and close
    cleanable: frozenset[str]
    heatable: frozenset[str]
    coolable: frozenset[str]
    sliceable: frozenset[str]


@cache
def facts() -> Facts:
    """The facts."""
    data = json.loads(FACTS_FILE.read_text())
    does = data["does"]
    return Facts(
        floor_plans={
            int(number): FloorPlan(
                number=int(number),
                kind=plan["kind"],
                is_test=plan["is_test"],
                receptacles=tuple(plan["receptacles"]),
                objects=frozenset(plan["objects"]),
            )
            for number, plan in data["floor_plans"].items()
        },
        rooms={task: frozenset(kinds) for task, kinds in data["rooms"].items()},
        templates={task: tuple(templates) for task, templates in data["templates"].items()},
        can_hold={receptacle: frozenset(names) for receptacle, names in data["can_hold"].items()},
        openable=frozenset(data["openable"]),
        cleanable=frozenset(does["cleanable"]),
        heatable=frozenset(does["heatable"]),
        coolable=frozenset(does["coolable"]),
        sliceable=frozenset(does["sliceable"]),
    )
