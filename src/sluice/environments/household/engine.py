"""ALFWorld's own engine, played a game of ours; with what it works out again and again remembered.

The stock engine parses the same few grammar rules and queries at every step, copies what it knows of the things to tell each sentence,
does both for every admissible command, and translates a problem four times to load and reset one game. None of that depends on anything
that changes: the command of an operator ("take" a thing "from" a place), what a rule says, what a translation is. Remembered, what is
seen is letter for letter the same, which a test shows; only the time differs.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

from sluice.environments.household.game import Game
from sluice.environments.household.pddl import game_data

_PLAYING: Final = threading.RLock()  # the translator keeps its options in module variables and writes to sys.argv and sys.stdout


class AlfworldEngine:
    """One game in ALFWorld's engine. Load one at a time; the engine keeps its state in a library that each object loads anew."""

    def __init__(self, *, remember: bool = True) -> None:
        """Make the engine.

        Args:
            remember: use what is remembered; False: the stock engine.
        """
        choose_data_folder()
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld.envs import PddlEnv

        self._pddl = PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True))
        self._env: Any = AlfredDemangler(self._pddl, shuffle=False)
        self._memory = _Memory() if remember else None
        self._game: Game | None = None
        self._state: Any = None

    def reset(self, game: Game) -> str:
        """Begin the game; loading it takes a second or so, beginning the same one again much less."""
        with self._at_play():
            if game != self._game:
                self._game = None
                if self._memory is not None:
                    self._memory.forget_game()
                self._env.load(game_data(game))
                self._game = game
                if self._memory is not None:
                    logic = self._pddl._logic
                    logic.grammar = _RememberedCommands(logic.grammar, {action.template for action in logic.actions.values()})
            self._state = self._env.reset()
        return str(self._state.feedback)

    def step(self, command: str) -> str:
        """Carry out a command and tell what is seen."""
        with self._at_play():
            self._state, _, _ = self._env.step(command)
        return str(self._state.feedback)

    @property
    def is_won(self) -> bool:
        """Whether the goal is reached."""
        return bool(self._state["won"])

    def admissible(self) -> tuple[str, ...]:
        """The commands that do something now, sorted."""
        return tuple(self._state["admissible_commands"])

    def close(self) -> None:
        """Give back what it holds."""
        self._env.close()
        if self._memory is not None:
            self._memory.forget_game()
        self._state = self._game = None

    @contextmanager
    def _at_play(self) -> Iterator[None]:
        """While inside, the engine remembers; afterwards its modules and `sys` are as they were."""
        with _PLAYING:
            arguments = sys.argv
            try:
                with self._memory.in_use() if self._memory is not None else nullcontext():
                    yield
            finally:
                sys.argv = arguments


class _Memory:
    """What an engine has worked out before."""

    def __init__(self) -> None:
        import fast_downward
        import textworld.logic
        from textworld.envs.pddl import textgen

        self._translations: dict[tuple[str, str, bool], Any] = {}
        self._queries: dict[str, Any] = {}
        self._symbols: dict[str, Any] = {}
        self._translate = fast_downward.pddl2sas
        self._read_query = textworld.logic.Rule.parse_conjunctive_query
        self._read_symbols = textgen._parse_and_convert
        self._places: list[tuple[Any, str, Any]] = [
            (fast_downward, "pddl2sas", self._translated),
            (textworld.logic.Rule, "parse_conjunctive_query", self._query),
            (textgen, "_parse_and_convert", self._symbols_of),
            (textgen, "copy_context", _copy_context),
        ]

    def forget_game(self) -> None:
        """What belongs to one game."""
        self._translations.clear()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While inside, the engine's modules ask here."""
        before = [(owner, name, vars(owner)[name]) for owner, name, _ in self._places]
        for owner, name, function in self._places:
            setattr(owner, name, function)
        try:
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)

    def _translated(self, domain: str, problem: str, verbose: bool = False, optimize: bool = False) -> Any:
        key = (domain, problem, optimize)
        if key not in self._translations:
            self._translations[key] = self._translate(domain, problem, verbose=verbose, optimize=optimize)
        return self._translations[key]

    def _query(self, expression: str) -> Any:
        if expression not in self._queries:
            self._queries[expression] = self._read_query(expression)
        return self._queries[expression]

    def _symbols_of(self, text: str, **options: Any) -> Any:
        if text not in self._symbols:
            self._symbols[text] = self._read_symbols(text, **options)
        return deepcopy(self._symbols[text])  # symbols are given contexts while a sentence is told


def _copy_context(context: dict[str, Any]) -> dict[str, Any]:
    """The context of a symbol, in new dictionaries. The engine copies their entries too, which are read and never changed."""
    return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}


class _RememberedCommands:
    """The grammar of a game. The command of an operator is derived once."""

    def __init__(self, grammar: Any, templates: set[str]) -> None:
        self._grammar = grammar
        self._templates = templates
        self._commands: dict[tuple[str, ...], str] = {}

    def derive(self, start: str, context: dict[str, Any]) -> str:
        """Text of a symbol or template."""
        if start not in self._templates:
            return str(self._grammar.derive(start, context))
        key = (start, *(variable.name for variable in context["mapping"].values()))
        command = self._commands.get(key)
        if command is None:
            command = self._commands[key] = str(self._grammar.derive(start, context))
        return command


def choose_data_folder() -> None:
    """Give ALFWorld a folder that can be written, unless `ALFWORLD_DATA` names one: importing it makes the folder."""
    if not os.environ.get("ALFWORLD_DATA"):
        os.environ["ALFWORLD_DATA"] = str(Path(tempfile.gettempdir()) / f"sluice-alfworld-{os.getuid()}")
