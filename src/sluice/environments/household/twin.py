"""The twin: the texts, commands and effects of ALFWorld's engine in plain Python, some hundred times as fast.

It is held to the engine by a differential test: the same game, the same commands, letter for letter the same observations and admissible
commands. Some of what it does looks odd and is the engine's own: only what is held can be examined, heating and cooling need no open
door, going to where one is is no command, and a lamp is turned on each time it is used.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Final

from sluice.environments.household.facts import KNIVES, LAMPS, facts
from sluice.environments.household.game import Game, enumerated
from sluice.environments.household.goals import is_reached

NOTHING: Final = "Nothing happens."
HELP: Final = (
    "Available commands:\n"
    "  look:                             look around your current location\n"
    "  inventory:                        check your current inventory\n"
    "  go to (receptacle):               move to a receptacle\n"
    "  open (receptacle):                open a receptacle\n"
    "  close (receptacle):               close a receptacle\n"
    "  take (object) from (receptacle):  take an object from a receptacle\n"
    "  move (object) to (receptacle):  place an object in or on a receptacle\n"
    "  examine (something):              examine a receptacle or an object\n"
    "  use (object):                     use an object\n"
    "  heat (object) with (receptacle):  heat an object using a receptacle\n"
    "  clean (object) with (receptacle): clean an object using a receptacle\n"
    "  cool (object) with (receptacle):  cool an object using a receptacle\n"
    "  slice (object) with (object):     slice an object using a sharp object\n"
)


class House:
    """A game being played. Reading its state is allowed; only `step` changes it."""

    def __init__(self, game: Game) -> None:
        """Begin."""
        self.game = game
        self.at: str | None = None  # the receptacle before which the player stands; None: the middle of the room
        self.held: str | None = None
        self.where: dict[str, str | None] = dict(game.place)  # thing -> receptacle; None: it is held
        self.inside: dict[str, set[str]] = {receptacle: set() for receptacle in game.receptacles}
        for thing, receptacle in game.place.items():
            self.inside[receptacle].add(thing)
        self.opened: set[str] = set()
        self.clean: set[str] = set()
        self.hot: set[str] = set()
        self.cool: set[str] = set()
        self.sliced: set[str] = set()
        self.lit: set[str] = set()  # lamps that were used
        self.is_won = is_reached(self)
        self._here = self._commands_here()

    @property
    def treated(self) -> Mapping[str, set[str]]:
        """Treatment -> the things that it was done to, as far as it still shows."""
        return {"clean": self.clean, "heat": self.hot, "cool": self.cool}

    def is_visible(self, receptacle: str) -> bool:
        """Whether one sees what is in it, standing before it."""
        return receptacle in self.opened or receptacle not in self.game.openable

    def admissible(self) -> tuple[str, ...]:
        """The commands that do something now, sorted."""
        here = sorted(self._here)
        split = bisect_left(here, "go to")  # none of them begins so, and all that do stand together
        gotos = self.game.gotos
        if self.at is not None:
            place = bisect_left(gotos, f"go to {self.at}")
            return (*here[:split], *gotos[:place], *gotos[place + 1 :], *here[split:])
        return (*here[:split], *gotos, *here[split:])

    def step(self, command: str) -> str:
        """Carry out a command and tell what is seen."""
        command = command.strip()
        words = command.split(" ")
        verb = words[0]
        if verb == "go":
            target = command[6:]
            if command[:6] != "go to " or target not in self.inside or target == self.at:
                return NOTHING
            self.at = target
            told = f"You arrive at {target}. {self._examine(target)}"
        elif command not in self._here:
            return NOTHING
        else:
            told = self._act(verb, words)
        self._here = self._commands_here()
        self.is_won = is_reached(self)
        return told

    def _act(self, verb: str, words: list[str]) -> str:
        """An admissible command other than going somewhere."""
        at, held = self.at, self.held
        named = " ".join(words[1:3])
        if verb == "look":
            if at is None:
                return "You are in the middle of a room. Looking quickly around you, you see nothing."
            return f"You are facing the {at}. Next to it, you see nothing."
        if verb == "inventory":
            return "You are not carrying anything." if held is None else f"You are carrying: a {held}."
        if verb == "help":
            return HELP
        if verb == "examine":
            return self._examine(named) if named in self.inside else self._describe(named)
        assert at is not None, "what else can be done is done at a receptacle"
        if verb == "open":
            self.opened.add(at)
            return f"You open the {at}. {self._examine(at)}"
        if verb == "close":
            self.opened.discard(at)
            return f"You close the {at}."
        if verb == "take":
            self.held, self.where[named] = named, None
            self.inside[at].discard(named)
            return f"You pick up the {named} from the {at}."
        if verb == "use":
            self.lit.add(named)
            return f"You turn on the {named}."
        assert held is not None, "the rest is done with what is held"
        if verb == "move":
            self.held, self.where[held] = None, at
            self.inside[at].add(held)
            return f"You move the {held} to the {at}."
        if verb == "slice":
            self.sliced.add(named)
            return f"You sliced the {named} with the {held}."
        if verb == "clean":
            self.clean.add(held)
        elif verb == "heat":
            self.hot.add(held)
            self.cool.discard(held)
        else:
            self.cool.add(held)
            self.hot.discard(held)
        return f"You {verb} the {held} using the {at}."

    def _commands_here(self) -> set[str]:
        """The admissible commands but for going somewhere."""
        commands = {"look", "inventory", "help"}
        held, at = self.held, self.at
        if held is not None:
            commands.add(f"examine {held}")
        if at is None:
            return commands
        game = self.game
        kinds, known = game.kinds, facts()
        commands.add(f"examine {at}")
        is_visible = True
        if at in game.openable:
            is_visible = at in self.opened
            commands.add(f"close {at}" if is_visible else f"open {at}")
        for thing in self.inside[at]:
            kind = kinds[thing]
            if kind in LAMPS:
                commands.add(f"use {thing}")
            elif held is None and is_visible:
                commands.add(f"take {thing} from {at}")
            if held is not None and kinds[held] in KNIVES and kind in known.sliceable:
                commands.add(f"slice {thing} with {held}")
        if held is not None:
            kind, appliance = kinds[held], kinds[at]
            if is_visible and kind in known.can_hold[appliance]:
                commands.add(f"move {held} to {at}")
            if appliance == "SinkBasin" and kind in known.cleanable:
                commands.add(f"clean {held} with {at}")
            elif appliance == "Microwave" and kind in known.heatable:
                commands.add(f"heat {held} with {at}")
            elif appliance == "Fridge" and kind in known.coolable:
                commands.add(f"cool {held} with {at}")
        return commands

    def _examine(self, receptacle: str) -> str:
        if receptacle not in self.game.openable:
            return f"On the {receptacle}, you see {self._contents(receptacle)}."
        if receptacle in self.opened:
            return f"The {receptacle} is open. In it, you see {self._contents(receptacle)}."
        return f"The {receptacle} is closed."

    def _contents(self, receptacle: str) -> str:
        return enumerated(sorted(self.inside[receptacle], key=self.game.rank.__getitem__))

    def _describe(self, thing: str) -> str:
        """What is told of a thing that is examined."""
        warmth = "hot" if thing in self.hot else "cool" if thing in self.cool else ""
        is_clean, is_sliced = thing in self.clean, thing in self.sliced
        if is_sliced and (warmth or is_clean):
            state = f"{warmth} and clean sliced" if warmth and is_clean else f"{warmth or 'clean'} sliced"
        elif warmth and is_clean:
            state = f"{warmth} and clean"
        elif warmth or is_clean:
            state = "cold" if warmth == "cool" else warmth or "clean"  # the engine's word, here alone
        elif is_sliced:
            state = "sliced"
        else:
            return f"There's nothing special about {thing}."
        return f"This is a {state} {thing}."
