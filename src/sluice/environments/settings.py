"""The settings of an environment by its own name: base of the `args` that each kind takes."""

from __future__ import annotations

from typing import ClassVar

from sluice.config.agentic import EnvironmentConfig, EnvMonitorConfig
from sluice.config.models import Section
from sluice.config.problems import KeyPath
from sluice.environments.base import Environment

__all__ = ["EnvMonitorConfig", "EnvironmentConfig", "EnvironmentSettings"]


class EnvironmentSettings(Section):
    """Base of the environments that have a name: the fields of the class are the `args` of the configuration, checked while loading."""

    packages: ClassVar[tuple[str, ...]] = ()  # modules that must be installed, by the extra `agentic`; found out without importing them

    def build(self) -> Environment:
        """Make the environment. May import and may take long: it is called where the environment runs."""
        raise AssertionError(f"{type(self).__name__} does not say what it builds")

    def needed(self) -> tuple[str, ...]:
        """Modules that these settings need."""
        return self.packages

    def preload(self) -> None:
        """Import what the environment needs. Called once, in the process from which workers are forked."""

    def step_limit(self) -> int | None:
        """Environment steps after which an episode ends. None: there is no such number."""
        return None

    def check(self) -> tuple[KeyPath, str] | None:
        """What is wrong with the arguments beyond their types, as (path of the argument, message); None: nothing."""
        return None
