"""Plays well with what it has seen: for demonstrations, for tests, and to say what can be reached.

It knows what a player knows: the room's receptacles and the goal from the first observation, what lies where it has looked, what it
holds. It searches where the thing may lie, open places first, and reaches about 95 % of the goals within 30 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sluice.environments.household.facts import LAMP_STANDS, TREATMENTS
from sluice.environments.household.twin import House

NO_IDEA: Final = "look"


class Expert:
    """Plays one game. Make a new one for each."""

    def __init__(self, house: House) -> None:
        """Play in this house, of which only what shows is used."""
        self._house = house
        game = house.game
        kinds, rank = game.kinds, game.rank
        self._looked: set[str] = set()  # receptacles into which it has looked
        self._seen: dict[str, str] = {}  # thing -> receptacle in which it lay when last looked
        homes = [receptacle for receptacle in game.receptacles if game.goal.object_class in _holdable(house, receptacle)]
        # First those of the goal's own class come last: what lies there is no help, but for a second look.
        self._search = sorted(
            homes, key=lambda name: (kinds[name] == game.goal.receptacle_class, name in game.openable, kinds[name], rank[name])
        )
        self._stands = sorted(
            (receptacle for receptacle in game.receptacles if kinds[receptacle] in LAMP_STANDS), key=lambda name: (kinds[name], rank[name])
        )

    def act(self) -> str:
        """The next command."""
        self._look()
        held = self._house.held
        if held is None:
            return self._fetch()
        if self._house.game.kinds[held] != self._house.game.goal.object_class:
            return self._lay_down(held)
        if self._house.game.goal.lamp_class is not None:
            return self._light()
        return self._bring(held)

    def _look(self) -> None:
        """Remember what shows."""
        house, at = self._house, self._house.at
        if at is None or not house.is_visible(at):
            return
        self._looked.add(at)
        for thing in [thing for thing, place in self._seen.items() if place == at]:
            del self._seen[thing]
        self._seen |= dict.fromkeys(house.inside[at], at)

    def _fetch(self) -> str:
        """Take a thing of the goal, or look for one."""
        game = self._house.game
        known = [
            thing
            for thing, place in self._seen.items()
            if game.kinds[thing] == game.goal.object_class and game.kinds[place] != game.goal.receptacle_class
        ]
        if known:
            thing = min(known, key=lambda name: (self._seen[name] != self._house.at, game.rank[name]))
            return self._there(self._seen[thing], lambda place: f"take {thing} from {place}")
        return self._look_into(self._search)

    def _bring(self, held: str) -> str:
        """Treat what is held if need be, then carry it to where it is wanted."""
        house, game = self._house, self._house.game
        treatment = TREATMENTS.get(game.goal.task_type)
        if treatment is not None and held not in house.treated[treatment[0]]:
            verb, appliance = treatment
            places = [receptacle for receptacle in game.receptacles if game.kinds[receptacle] == appliance]
            if house.at in places:
                return f"{verb} {held} with {house.at}"
            return f"go to {places[0]}"
        places = [receptacle for receptacle in game.receptacles if game.kinds[receptacle] == game.goal.receptacle_class]
        begun = [place for thing, place in self._seen.items() if place in places and game.kinds[thing] == game.goal.object_class]
        place = begun[0] if game.goal.wanted > 1 and begun else min(places, key=lambda name: (name != house.at, game.rank[name]))
        return self._there(place, lambda here: f"move {held} to {here}")

    def _light(self) -> str:
        """Use a lamp of the goal, or look for one."""
        game = self._house.game
        lamps = [thing for thing in self._seen if game.kinds[thing] == game.goal.lamp_class]
        if not lamps:
            return self._look_into(self._stands)
        return self._there(self._seen[lamps[0]], lambda _: f"use {lamps[0]}")

    def _lay_down(self, held: str) -> str:
        """Get rid of a thing that nobody wants."""
        house, game = self._house, self._house.game
        places = [receptacle for receptacle in game.receptacles if game.fits(held, receptacle)]
        if not places:
            return NO_IDEA
        place = min(places, key=lambda name: (name != house.at, name in game.openable, game.rank[name]))
        return self._there(place, lambda here: f"move {held} to {here}")

    def _look_into(self, receptacles: list[str]) -> str:
        """Look into the next of them that it has not looked into."""
        unknown = next((receptacle for receptacle in receptacles if receptacle not in self._looked), None)
        return NO_IDEA if unknown is None else self._there(unknown, lambda _: NO_IDEA)

    def _there(self, receptacle: str, then: Callable[[str], str]) -> str:
        """Go there, open it if need be, then do something."""
        if self._house.at != receptacle:
            return f"go to {receptacle}"
        return then(receptacle) if self._house.is_visible(receptacle) else f"open {receptacle}"


def _holdable(house: House, receptacle: str) -> frozenset[str]:
    from sluice.environments.household.facts import facts

    return facts().can_hold[house.game.kinds[receptacle]]
