"""ALFWorld's own engine, played a game of ours; with what it works out again and again remembered.

The stock engine parses the grammar and copies its state for every admissible command of every step. The command of an operator ("go to" a place, "take"
a thing from a place) depends on nothing that changes, so that it can be remembered, as can the translation of a problem, which the engine
makes four times to load and reset one game. What is seen is letter for letter the same; a test compares the two.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sluice.environments.household.game import Game
from sluice.environments.household.pddl import game_data

_TRANSLATING: Final = threading.Lock()  # the translator keeps its options in module variables, and writes to sys.argv and sys.stdout


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

        self._remember = remember
        self._pddl = PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True))
        self._env: Any = AlfredDemangler(self._pddl, shuffle=False)
        self._game: Game | None = None
        self._translations: dict[tuple[Any, ...], Any] = {}
        self._state: Any = None

    def reset(self, game: Game) -> str:
        """Begin the game; loading it takes a second or so, beginning the same one again much less."""
        with _TRANSLATING, self._translator():
            if game is not self._game:
                self._translations.clear()
                self._game = None
                self._env.load(game_data(game))
                self._game = game
                if self._remember:
                    self._pddl._logic.grammar = _Remembering(self._pddl._logic.grammar, self._pddl._logic.actions)
            self._state = self._env.reset()
        return str(self._state.feedback)

    def step(self, command: str) -> str:
        """Carry out a command and tell what is seen."""
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
        self._translations.clear()
        self._state = self._game = None

    @contextmanager
    def _translator(self) -> Iterator[None]:
        """While inside, translations of this engine are remembered, and the translator's traces in `sys` are removed afterwards."""
        import fast_downward

        translate: Callable[..., Any] = fast_downward.pddl2sas
        arguments = sys.argv

        def remembered(domain: str, problem: str, verbose: bool = False, optimize: bool = False) -> Any:
            key = (domain, problem, optimize)
            if key not in self._translations:
                self._translations[key] = translate(domain, problem, verbose=verbose, optimize=optimize)
            return self._translations[key]

        if self._remember:
            fast_downward.pddl2sas = remembered
        try:
            yield
        finally:
            fast_downward.pddl2sas = translate
            sys.argv = arguments


class _Remembering:
    """The grammar of a game. Commands of operators are derived once for each choice of things."""

    def __init__(self, grammar: Any, actions: dict[str, Any]) -> None:
        self._grammar = grammar
        self._templates = {action.template for action in actions.values()}
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
