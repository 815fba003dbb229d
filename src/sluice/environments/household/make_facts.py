"""Makes facts.json from an installed `alfworld` package: floor plans, affordances, and the words in which goals are told.

    python -m sluice.environments.household.make_facts [--out facts.json]

Needed again only when a new release of alfworld changes them; a test compares the file with what the installed package gives.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from sluice.environments.household.facts import FACTS_FILE, TASK_TYPES

# Receptacles that a floor plan has (they are among its objects) but of which alfworld records no place: how many there are of each.
WITHOUT_PLACE = {"StoveBurner": 4}
NOT_USED = {"PaintingHanger"}  # no floor plan has one
LAMPS = ("DeskLamp", "FloorLamp")


def make_facts() -> dict[str, Any]:
    """The facts, as they are written."""
    import alfworld.gen
    from alfworld.gen import constants, goal_library

    layouts = Path(alfworld.gen.__file__).parent / "layouts"
    fixed = set(constants.RECEPTACLES) - set(constants.MOVABLE_RECEPTACLES_SET) - NOT_USED
    can_hold = {
        receptacle: sorted(name for name in names if "Sliced" not in name)
        for receptacle, names in sorted(constants.VAL_RECEPTACLE_OBJECTS.items())
        if receptacle in fixed
    }
    movable = {name for names in can_hold.values() for name in names} | set(LAMPS)
    plans = {}
    for number in sorted(constants.SCENE_NUMBERS):
        objects = set(json.loads((layouts / f"FloorPlan{number}-objects.json").read_text()))
        placed = json.loads((layouts / f"FloorPlan{number}-openable.json").read_text())
        receptacles = []
        for place in placed:
            kind = place.split("|")[0]
            if kind in ("Sink", "Bathtub"):
                place, kind = f"{place}|{kind}Basin", f"{kind}Basin"
            if kind in fixed:
                receptacles.append(place)
        have = {kind_of(place) for place in receptacles}
        for kind in sorted((objects & fixed) - have):
            base = kind.removesuffix("Basin")
            last = f"|{kind}" if base != kind else ""
            receptacles += [f"{base}|+00.00|+00.00|+{copy:05.2f}{last}" for copy in range(WITHOUT_PLACE.get(kind, 1))]
        plans[str(number)] = {
            "kind": next(kind for kind, numbers in constants.SCENE_TYPE.items() if number in numbers),
            "is_test": number in constants.TEST_SCENE_NUMBERS,
            "receptacles": sorted(receptacles),
            "objects": sorted(objects & movable),
        }
    package = distribution("alfworld")
    return {
        "source": f"derived from alfworld {package.version} by make_facts.py",
        "licence": package.read_text("LICENSE"),
        "rooms": {task: sorted(constants.GOALS_VALID[task]) for task in TASK_TYPES},
        "templates": {task: goal_library.gdict[task]["templates"] for task in TASK_TYPES},
        "can_hold": can_hold,
        "openable": sorted(set(constants.OPENABLE_CLASS_LIST) & fixed),
        "does": {
            key.lower(): sorted(name for name in names if "Sliced" not in name)
            for key, names in sorted(constants.VAL_ACTION_OBJECTS.items())
        },
        "floor_plans": plans,
    }


def kind_of(place: str) -> str:
    """The class of a receptacle: the first part of its id, or the last one for a basin."""
    parts = place.split("|")
    return parts[-1] if parts[-1].endswith("Basin") else parts[0]


def written(facts: dict[str, Any]) -> str:
    """The text of the file: one line per entry, so that a change can be read."""
    lines = []
    for key, value in facts.items():
        if isinstance(value, dict):
            entries = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
            lines.append(f"{json.dumps(key)}: {{\n{entries}\n}}")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FACTS_FILE)
    parser.parse_args().out.write_text(written(make_facts()))
