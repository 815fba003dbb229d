"""Draws games: split, task type, floor plan, size and seed give always the same game.

Every room has its real receptacles and its real classes of things; where a thing lies is drawn among the receptacles that may hold it.
The thing of the goal is laid anew, so that nothing is solved at the start.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from sluice.environments.household.facts import LAMP_STANDS, LAMPS, TASK_TYPES, TREATMENTS, FloorPlan, TaskType, facts
from sluice.environments.household.game import Game, Goal, class_of
from sluice.errors import EnvError

Split = Literal["train", "seen", "unseen"]
"""train: the rooms for training; seen: other games in the same rooms; unseen: games in rooms that training never enters."""

SizeName = Literal["tiny", "small", "full"]

MOST_TRIES: Final = 1_000  # rooms and things drawn for one seed until a goal is possible; one in two is


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much there is in a room."""

    copies: tuple[int, int]  # of every class of things, fewest and most
    most_of_a_kind: int | None = None  # receptacles of one class; None: all that the floor plan has
    most_classes: int | None = None  # of movable things; None: all that the floor plan has


SIZES: Final[Mapping[SizeName, Size]] = {
    "tiny": Size(copies=(1, 1), most_of_a_kind=2, most_classes=8),  # quick to load for the engine: for tests
    "small": Size(copies=(1, 1)),
    "full": Size(copies=(1, 3)),  # as in ALFRED
}


def floor_plans(task_type: TaskType, split: Split) -> list[int]:
    """The rooms in which games of this type and split are set."""
    known = facts()
    return [
        number
        for number, plan in sorted(known.floor_plans.items())
        if plan.is_test == (split == "unseen") and plan.kind in known.rooms[task_type]
    ]


def seeded_game(seed: int, split: Split = "train", size: SizeName = "small", task_types: Sequence[TaskType] = TASK_TYPES) -> Game:
    """The game of a seed: the task type and the room are drawn as well.

    Raises:
        EnvError: no game was possible in `MOST_TRIES` tries.
    """
    return _seeded_game(seed, split, size, tuple(task_types))


def make_game(task_type: TaskType, floor_plan: int, seed: int, split: Split = "train", size: SizeName = "small") -> Game | None:
    """The game of this type in this room; None when the things drawn make no such goal possible."""
    plan = facts().floor_plans[floor_plan]
    env_id = f"household/{split}/{task_type}/FloorPlan{floor_plan}/{size}/{seed}"
    rng = random.Random(env_id)
    room = _Room(plan, SIZES[size], rng)
    goal = _draw_goal(task_type, room)
    if goal is None:
        return None
    return Game(env_id=env_id, floor_plan=floor_plan, goal=goal, receptacle_ids=tuple(room.receptacles), placement=dict(room.placement))


@lru_cache(maxsize=256)  # the members of a group ask for the same game at about the same time
def _seeded_game(seed: int, split: Split, size: SizeName, task_types: tuple[TaskType, ...]) -> Game:
    rng = random.Random(f"household/{split}/{size}/{','.join(task_types)}/{seed}")
    for _ in range(MOST_TRIES):
        task_type = rng.choice(task_types)
        game = make_game(task_type, rng.choice(floor_plans(task_type, split)), rng.getrandbits(31), split, size)
        if game is not None:
            return game
    raise EnvError(
        f"environment household, reset: expected a possible game within {MOST_TRIES} tries, got none for seed {seed}, split {split}, "
        f"size {size}, task types {', '.join(task_types)} - allow more task types or a larger size"
    )


class _Room:
    """A room while its game is drawn."""

    def __init__(self, plan: FloorPlan, size: Size, rng: random.Random) -> None:
        self.rng = rng
        self.receptacles = list(plan.receptacles)
        if size.most_of_a_kind is not None:
            rng.shuffle(self.receptacles)
            counted: dict[str, int] = {}
            kept = []
            for receptacle in self.receptacles:
                kind = class_of(receptacle)
                counted[kind] = counted.get(kind, 0) + 1
                if counted[kind] <= size.most_of_a_kind:
                    kept.append(receptacle)
            self.receptacles = sorted(kept)
        self.placement: dict[str, str] = {}  # id of a thing -> id of its receptacle
        classes = sorted(plan.objects - LAMPS)
        if size.most_classes is not None and len(classes) > size.most_classes:
            classes = sorted(rng.sample(classes, size.most_classes))
        for kind in classes:
            for _ in range(rng.randint(*size.copies)):
                self.put(kind)
        for lamp in sorted(LAMPS & plan.objects):
            stands = [receptacle for receptacle in self.receptacles if class_of(receptacle) in LAMP_STANDS]
            if stands:
                self.placement[self._new_id(lamp)] = rng.choice(stands)

    def classes(self) -> set[str]:
        """Classes of what lies in the room."""
        return {class_of(thing) for thing in self.placement}

    def homes(self, kind: str) -> list[str]:
        """Receptacles that may hold a thing of the class."""
        can_hold = facts().can_hold
        return [receptacle for receptacle in self.receptacles if kind in can_hold[class_of(receptacle)]]

    def put(self, kind: str, avoid: str | None = None) -> bool:
        """Lay a new thing of the class somewhere, but not in a receptacle of the class `avoid`. False: there is no place."""
        homes = [receptacle for receptacle in self.homes(kind) if class_of(receptacle) != avoid]
        if not homes:
            return False
        self.placement[self._new_id(kind)] = self.rng.choice(homes)
        return True

    def take_away(self, kind: str) -> None:
        """Remove everything of the class."""
        for thing in [thing for thing in self.placement if class_of(thing) == kind]:
            del self.placement[thing]

    def _new_id(self, kind: str) -> str:
        count = sum(class_of(thing) == kind for thing in self.placement)
        return f"{kind}|+00.00|+00.00|+{count:05.2f}"


def _draw_goal(task_type: TaskType, room: _Room) -> Goal | None:
    """A goal that the room allows; its thing is laid anew."""
    rng, known = room.rng, facts()
    classes = sorted(room.classes() - LAMPS)
    template = rng.choice(known.templates[task_type])
    if task_type == "look_at_obj_in_light":
        lamps = sorted(room.classes() & LAMPS)
        if not lamps or not classes:
            return None
        kind = rng.choice(classes)
        room.take_away(kind)
        if not room.put(kind):
            return None
        return _goal(task_type, kind, None, rng.choice(lamps), template)
    treatment = TREATMENTS.get(task_type)
    kinds_here = sorted({class_of(receptacle) for receptacle in room.receptacles})
    if treatment is not None:
        verb, appliance = treatment
        if appliance not in kinds_here:
            return None
        able = {"clean": known.cleanable, "heat": known.heatable, "cool": known.coolable}[verb]
        classes = [kind for kind in classes if kind in able]
    pairs = [
        (kind, receptacle)
        for kind in classes
        for receptacle in kinds_here
        if kind in known.can_hold[receptacle]
        and receptacle != "ToiletPaperHanger"
        and (treatment is None or receptacle != treatment[1])
        and any(class_of(home) != receptacle for home in room.homes(kind))
    ]
    if not pairs:
        return None
    kind, receptacle = rng.choice(pairs)
    room.take_away(kind)
    copies = rng.choice((2, 2, 3)) if task_type == "pick_two_obj_and_place" else rng.choice((1, 1, 2))
    for _ in range(copies):
        if not room.put(kind, avoid=receptacle):
            return None
    return _goal(task_type, kind, receptacle, None, template)


def _goal(task_type: TaskType, kind: str, receptacle: str | None, lamp: str | None, template: str) -> Goal:
    text = template.format(obj=kind.lower(), recep=(receptacle or "").lower(), toggle=(lamp or "").lower())
    return Goal(task_type=task_type, object_class=kind, receptacle_class=receptacle, lamp_class=lamp, text=text)
