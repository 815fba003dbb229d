"""Settings: which environment, where it runs and within which limits, and who watches it."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

from pydantic import Field

from sluice.config.models import MOST_WORKERS, Section
from sluice.config.problems import KeyPath
from sluice.environments.base import Environment

LONGEST_CALL_S: Final = 604_800.0  # a week for one call


class EnvironmentConfig(Section):
    """One kind of environment and how its calls are made."""

    type: str = Field(min_length=1)  # name in the table of build.py, or an import path package.module.Class
    args: dict[str, Any] = Field(default_factory=dict)  # the settings of that environment
    max_steps: int | None = Field(default=None, ge=1)  # then an episode is truncated, whatever the environment says; None: only it says
    run_in: Literal["inline", "thread", "process"] = "process"  # inline: only what certainly returns; thread: cannot be killed
    workers: int = Field(default=2, ge=1, le=MOST_WORKERS)  # processes; each plays one episode at a time
    episodes_per_worker: int | None = Field(default=None, ge=1)  # then its process is replaced, for engines that leak; None: never
    reset_timeout_s: float | None = Field(default=120.0, gt=0, le=LONGEST_CALL_S)  # None: no limit (the monitor still watches)
    step_timeout_s: float | None = Field(default=60.0, gt=0, le=LONGEST_CALL_S)  # None: no limit

    def limit_s(self, call: str) -> float | None:
        """The time limit of a call."""
        return self.reset_timeout_s if call == "reset" else self.step_timeout_s


class EnvMonitorConfig(Section):
    """Watches for environments that are in one call for too long."""

    enable: bool = True
    interval_s: float = Field(default=30.0, gt=0, le=LONGEST_CALL_S)  # between two looks
    hung_after_s: float = Field(default=3600.0, gt=0, le=LONGEST_CALL_S)  # in one call
    on_hung: Literal["name", "replace"] = "name"  # only warn, or end the call, kill its process where it has one, and replace it


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

    def check(self) -> tuple[KeyPath, str] | None:
        """What is wrong with the arguments beyond their types, as (path of the argument, message); None: nothing."""
        return None
