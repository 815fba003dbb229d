"""Writes a game as ALFWorld reads it: the problem in PDDL, the domain and the grammar of texts from the `alfworld` package.

`game_data` is what a game.tw-pddl file holds; `write_game` makes one, with the traj_data.json beside it that ALFWorld's own loader looks
for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sluice.environments.household.facts import LAMPS, facts
from sluice.environments.household.game import Game, class_of, mangle


def game_data(game: Game) -> dict[str, Any]:
    """The contents of the game file. Needs the package alfworld."""
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

    return {
        "pddl_domain": Path(ALFRED_PDDL_PATH).read_text(),
        "grammar": Path(ALFRED_TWL2_PATH).read_text().replace("UNKNOWN GOAL", game.goal.text),
        "pddl_problem": problem(game),
        "solvable": True,  # every thing can be taken, and carried to where it is wanted
        "walkthrough": None,
    }


def problem(game: Game) -> str:
    """The problem in PDDL. Needs the package alfworld, which has the goals."""
    from alfworld.gen.goal_library import gdict

    known, goal = facts(), game.goal
    receptacles, things = sorted(game.receptacle_ids), sorted(game.placement)
    receptacle_classes = sorted({class_of(receptacle) for receptacle in receptacles})
    thing_classes = sorted({class_of(thing) for thing in things})
    location = {receptacle: f"loc|{index}|0|0|30" for index, receptacle in enumerate(receptacles)}
    start = f"loc|{len(receptacles)}|0|0|30"
    objects = [
        "agent1 # agent",
        *_typed((f"{kind}Type" for kind in thing_classes), "otype"),
        *_typed((f"{kind}Type" for kind in receptacle_classes), "rtype"),
        *_typed(things, "object"),
        *_typed(receptacles, "receptacle"),
        *_typed((*location.values(), start), "location"),
    ]
    init = ["(= (total-cost) 0)", f"(atLocation agent1 {start})"]
    for receptacle in receptacles:
        kind = class_of(receptacle)
        init += [f"(receptacleType {receptacle} {kind}Type)", f"(receptacleAtLocation {receptacle} {location[receptacle]})"]
        if kind in known.openable:
            init.append(f"(openable {receptacle})")
    for receptacle_class in receptacle_classes:
        init += [f"(canContain {receptacle_class}Type {kind}Type)" for kind in thing_classes if kind in known.can_hold[receptacle_class]]
    able = {"cleanable": known.cleanable, "heatable": known.heatable, "coolable": known.coolable, "sliceable": known.sliceable}
    for thing in things:
        kind, receptacle = class_of(thing), game.placement[thing]
        init += [
            f"(objectType {thing} {kind}Type)",
            f"(inReceptacle {thing} {receptacle})",
            f"(objectAtLocation {thing} {location[receptacle]})",
            f"({'toggleable' if kind in LAMPS else 'pickupable'} {thing})",
            *(f"({predicate} {thing})" for predicate, kinds in able.items() if kind in kinds),
        ]
    # The order matters to the planner, which does not find the objects when a metric stands before them.
    lines = [f"(define (problem plan_{game.floor_plan})", "(:domain alfred)", "(:objects", *objects, ")", "(:init", *init, ")"]
    wanted = gdict[goal.task_type]["pddl"].format(obj=goal.object_class, recep=goal.receptacle_class or "", toggle=goal.lamp_class or "")
    return mangle("\n".join(lines) + "\n" + wanted)


def write_game(game: Game, folder: Path) -> Path:
    """Write the game into a folder of its own below `folder`, as ALFWorld's loader finds it; answers with the game file."""
    own = folder / game.env_id.replace("/", "-") / "trial_0"
    own.mkdir(parents=True, exist_ok=True)
    goal = game.goal
    parameters = {
        "object_target": goal.object_class,
        "parent_target": goal.receptacle_class or "",
        "toggle_target": goal.lamp_class or "",
        "mrecep_target": "",
        "object_sliced": False,
    }
    scene = {"scene_num": game.floor_plan, "floor_plan": f"FloorPlan{game.floor_plan}"}
    trajectory = {"task_type": goal.task_type, "task_id": own.parent.name, "pddl_params": parameters, "scene": scene}
    (own / "traj_data.json").write_text(json.dumps(trajectory))
    file = own / "game.tw-pddl"
    file.write_text(json.dumps(game_data(game)))
    return file


def _typed(names: Iterable[str], kind: str) -> list[str]:
    return [f"{name} # {kind}" for name in names]
