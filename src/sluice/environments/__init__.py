"""Environments: what a policy plays against in turns of text, and where they run so that a stuck one can be replaced.

base.py               what an environment offers; what a reset, a step and a fault are
boundary.py           reads an environment's answers: wrong types stop here, whatever it does becomes data
seeds.py              the seed of an episode: the same problem for all its members
settings.py           settings of an environment, its limits and its monitor
build.py              the table of environments; checks and builds one from its configuration
custom.py             `package.module.Class`: an environment of the user's own
gymnasium_adapter.py  `gymnasium`: an environment of the gymnasium library, played in text
textworld_game.py     `textworld`: game files of the TextWorld library
frozen_lake.py        `frozen_lake`: a small one without any package
household/            `household`: ALFWorld-format household tasks, by a fast twin or by the real engine
runners.py            where an environment runs: what inline, thread and process share
inline.py             in the caller's thread
thread.py             in a thread of its own
pool.py               in worker processes that are killed and replaced
worker.py             what runs in a worker process
monitor.py            names environments that are in one call for far too long

A new environment is one file with a class as base.py says, a subclass of `EnvironmentSettings` (its fields are the `args`) and one line
in the table of build.py. A bad environment is counted faults of single episodes; only settings, and an environment that cannot be started
at all, raise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from sluice.environments.base import EnvFault, EnvInfo, Environment, EnvReset, EnvStep
from sluice.environments.build import (
    ENVIRONMENTS,
    build_environment,
    check_environment,
    environment_problems,
    read_config,
    step_limit,
)
from sluice.environments.gymnasium_adapter import GymnasiumEnvironment
from sluice.environments.inline import InlineRunner
from sluice.environments.monitor import EnvMonitor, HungCall, hung_calls
from sluice.environments.pool import EnvironmentPool, PooledRunner
from sluice.environments.runners import Runner, RunnerCounts, RunningCall
from sluice.environments.seeds import episode_seed
from sluice.environments.settings import EnvironmentConfig, EnvironmentSettings, EnvMonitorConfig
from sluice.environments.thread import ThreadRunner
from sluice.errors import ConfigError

__all__ = [
    "ENVIRONMENTS",
    "EnvFault",
    "EnvInfo",
    "EnvMonitor",
    "EnvMonitorConfig",
    "EnvReset",
    "EnvStep",
    "Environment",
    "EnvironmentConfig",
    "EnvironmentHost",
    "EnvironmentPool",
    "EnvironmentSettings",
    "GymnasiumEnvironment",
    "HungCall",
    "InlineRunner",
    "PooledRunner",
    "Runner",
    "RunnerCounts",
    "RunningCall",
    "ThreadRunner",
    "build_environment",
    "check_environment",
    "environment_problems",
    "episode_seed",
    "read_config",
    "step_limit",
]


class EnvironmentHost:
    """Makes the runners that a configuration asks for, watches them and counts for all of them.

    Make as many runners as members play at once, and reuse them: each is kept until the host is closed.

    `async with EnvironmentHost(config) as host: runner = host.runner()`.
    """

    def __init__(
        self,
        config: EnvironmentConfig | Mapping[str, Any],
        monitor: EnvMonitorConfig | None = None,
        build: Callable[[], Environment] | None = None,
    ) -> None:
        """Check the settings, and start the pool where there is one.

        Args:
            config: which environment, and where it runs.
            monitor: who watches; None: with the defaults.
            build: makes the environment, instead of what `type` names; for inline and thread.

        Raises:
            ConfigError: a setting is wrong.
            EnvError: no process can be started.
        """
        self.config = read_config(config)
        if build is None:
            check_environment(self.config)
        elif self.config.run_in == "process":
            raise ConfigError(
                "environment.run_in: expected inline or thread for an environment given by `build`, got process - "
                "worker processes find it by import path: name its class in `type`"
            )
        self.counts = RunnerCounts()
        self.monitor = EnvMonitor(monitor or EnvMonitorConfig())
        self._build = build or (lambda: build_environment(self.config))
        self._pool = EnvironmentPool(self.config, self.counts) if self.config.run_in == "process" else None
        self._runners: list[Runner] = []

    def runner(self) -> Runner:
        """A new runner; it is closed with the host at the latest."""
        runner: Runner
        if self._pool is not None:
            runner = self._pool.runner()
        elif self.config.run_in == "thread":
            runner = ThreadRunner(self.config, self._build, self.counts)
        else:
            runner = InlineRunner(self.config, self._build, self.counts)
        self.monitor.watch(runner)
        self._runners.append(runner)
        return runner

    async def __aenter__(self) -> EnvironmentHost:
        self.monitor.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the runners and the pool; bounded in time, idempotent."""
        self.monitor.close()
        for runner in self._runners:
            await runner.close()
        if self._pool is not None:
            await self._pool.close()

    def longest_call(self) -> HungCall | None:
        """The call that is under way for longest; None: there is none. From any thread."""
        under_way = hung_calls(list(self._runners), time.monotonic(), 0.0)
        return under_way[0][1] if under_way else None

    def metrics(self) -> dict[str, float]:
        """Totals since the start."""
        return {**(self._pool.metrics() if self._pool is not None else self.counts.metrics()), **self.monitor.metrics()}
