"""One game: a room with receptacles and things, a goal, and the names by which they are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from sluice.environments.household.facts import TaskType, facts

_MANGLED: Final = (("-", "_minus_"), ("#", "-"), ("|", "_bar_"), ("+", "_plus_"), (".", "_dot_"), (",", "_comma_"))


def mangle(text: str) -> str:
    """An id, or a whole problem, as ALFWorld writes it into PDDL, where most signs have a meaning. `#` stands for a type's dash."""
    for sign, word in _MANGLED:
        text = text.replace(sign, word)
    return text


def class_of(thing_id: str) -> str:
    """The class of a thing or receptacle: the first part of its id, or the last one for a basin."""
    parts = thing_id.split("|")
    return parts[-1] if parts[-1].endswith("Basin") else parts[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is to be done."""

    task_type: TaskType
    object_class: str  # of the thing to be moved or looked at
    receptacle_class: str | None  # where it is to go; None: looked at
    lamp_class: str | None  # under which it is looked at; None: moved
    text: str  # as the policy is told

    @property
    def wanted(self) -> int:
        """How many things of the class."""
        return 2 if self.task_type == "pick_two_obj_and_place" else 1


@dataclass(frozen=True, kw_only=True)
class Game:
    """The beginning of a game. Things are called by name ("apple 2"), in the order in which the engine tells them."""

    env_id: str  # names the game: split, task type, floor plan, size, seed
    floor_plan: int
    goal: Goal
    receptacle_ids: tuple[str, ...]  # "Cabinet|+00.68|+00.50|-02.20"
    placement: Mapping[str, str]  # id of a movable thing or lamp -> id of the receptacle it lies in

    @cached_property
    def names(self) -> Mapping[str, str]:
        """Id -> name. ALFWorld counts down: the first id of a class, in the order of the mangled ids, has the highest number."""
        ids = sorted((*self.receptacle_ids, *self.placement), key=_order)
        left = Counter(class_of(thing_id) for thing_id in ids)
        names = {}
        for thing_id in ids:
            kind = class_of(thing_id)
            names[thing_id] = f"{kind.lower()} {left[kind]}"
            left[kind] -= 1
        return names

    @cached_property
    def receptacles(self) -> tuple[str, ...]:
        """Names, in the engine's order."""
        return tuple(self.names[thing_id] for thing_id in sorted(self.receptacle_ids, key=_order))

    @cached_property
    def things(self) -> tuple[str, ...]:
        """Names of everything that lies in a receptacle, in the engine's order."""
        return tuple(self.names[thing_id] for thing_id in sorted(self.placement, key=_order))

    @cached_property
    def kinds(self) -> Mapping[str, str]:
        """Name -> class, of receptacles and things."""
        return {name: class_of(thing_id) for thing_id, name in self.names.items()}

    @cached_property
    def place(self) -> Mapping[str, str]:
        """Name of a thing -> name of the receptacle in which it lies at first."""
        return {self.names[thing_id]: self.names[receptacle_id] for thing_id, receptacle_id in self.placement.items()}

    @cached_property
    def wanted_things(self) -> tuple[str, ...]:
        """Names of the things of the goal's class."""
        return tuple(name for name in self.things if self.kinds[name] == self.goal.object_class)

    @cached_property
    def rank(self) -> Mapping[str, int]:
        """Name -> place in the engine's order."""
        return {name: index for index, name in enumerate(self.names.values())}

    @cached_property
    def openable(self) -> frozenset[str]:
        """Names of the receptacles that open and close; the others are open."""
        return frozenset(name for name in self.receptacles if self.kinds[name] in facts().openable)

    @cached_property
    def gotos(self) -> tuple[str, ...]:
        """The commands that go somewhere, sorted."""
        return tuple(sorted(f"go to {name}" for name in self.receptacles))

    @cached_property
    def intro(self) -> str:
        """The first observation."""
        seen = enumerated(self.receptacles)
        return (
            "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see "
            f"{seen}.\n\nYour task is to: {self.goal.text}."
        )

    def fits(self, thing: str, receptacle: str) -> bool:
        """Whether the thing may lie in the receptacle."""
        return self.kinds[thing] in facts().can_hold[self.kinds[receptacle]]


def enumerated(names: Iterable[str]) -> str:
    """ "a mug 1, a pan 1, and a pot 2", as the engine tells it."""
    told = [f"a {name}" for name in names]
    if not told:
        return "nothing"
    return told[0] if len(told) == 1 else ", ".join(told[:-1]) + f", and {told[-1]}"


def _order(thing_id: str) -> str:
    return mangle(thing_id).lower()
