"""What surrounds a simulated machine: the real task sources, filters and guard of a scenario, over made-up tasks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Final, Protocol

import numpy as np

from sluice.config.models import FilterConfig, RewardConfig, VerifierConfig
from sluice.filters import DomainFilters, RatioGuard, build_domain_filters
from sluice.sim.scenario import Scenario
from sluice.tasks import DomainTasks, TaskList
from sluice.types import Task, Turn

QUANTILES: Final = 1024  # different latencies of one scenario: few enough that ties come about, as clocks with ticks have them
GOLDEN: Final = 0.6180339887  # steps of this size spread evenly over 0 to 1

_QUERIES: Final[Mapping[str, FilterConfig]] = {
    "no_filter": FilterConfig(type="no_filter"),
    "std_filter": FilterConfig(type="std_filter"),
    "mean_filter": FilterConfig(type="mean_filter", filter_args={"threshold_down": 0.0, "threshold_up": 1.0}),
    "solved": FilterConfig(type="mean_filter", filter_args={"threshold_down": 0.0}),
    "all": FilterConfig(
        type="all", filter_args={"filters": [{"type": "std_filter"}, {"type": "mean_filter", "filter_args": {"threshold_up": 0.9}}]}
    ),
}
_RESPONSES: Final[Mapping[str, FilterConfig]] = {
    "reward_range": FilterConfig(type="reward_range", filter_args={"low": 0.0, "high": 1.0}),
    "finish_reason": FilterConfig(type="finish_reason", filter_args={"denied": ["length"]}),
}
_PROMPT: Final = np.array([1, 2], dtype=np.int64)


class Source(Protocol):
    """The part of a task source that a player uses."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks."""

    def draw(self, domain: str | None = None) -> tuple[Task, int] | None:
        """The next task and its epoch; None: nothing is left."""

    def put_back(self, task_id: str, epoch: int) -> None:
        """It is drawn again."""

    def state_dict(self, outstanding: Any = ()) -> dict[str, Any]:
        """The position."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


@lru_cache(maxsize=64)
def make_tasks(number: int, domains: tuple[str, ...]) -> tuple[Task, ...]:
    """Tasks that take turns among the domains. `difficulty` is the chance, 0 to 1, that a response is right."""
    return tuple(
        Task(
            task_id=f"{domains[i % len(domains)]}/{i}",
            domain=domains[i % len(domains)],
            prompt="",
            prompt_ids=_PROMPT,
            difficulty=(i + 1) * GOLDEN % 1.0,
        )
        for i in range(number)
    )


def make_source(scenario: Scenario) -> Source:
    """The source that a run with these settings would draw from."""
    tasks, config = make_tasks(scenario.tasks, scenario.domains), scenario.config
    if config.domain_shares is not None:
        return DomainTasks(tasks, scenario.domains, seed=config.seed, epochs=scenario.epochs)
    return TaskList(tasks, seed=config.seed, epochs=scenario.epochs)


def make_filters(scenario: Scenario) -> Mapping[str, DomainFilters]:
    """The filters of every domain. None of them remembers anything, so that runs may share them."""
    config = scenario.config
    return _filters(scenario.query, scenario.response, scenario.domains, config.group_size, config.min_members)


@lru_cache(maxsize=1024)
def _filters(
    query: str, response: str | None, domains: tuple[str, ...], group_size: int, min_members: int | None
) -> Mapping[str, DomainFilters]:
    reward = RewardConfig(
        verifier=VerifierConfig(type="exact"),
        query_filter_config=_QUERIES[query],
        response_filter_config=None if response is None else _RESPONSES[response],
    )
    return build_domain_filters(dict.fromkeys(domains, reward), group_size, min_members=min_members)


def make_guard(scenario: Scenario) -> RatioGuard | None:
    """A fresh guard; None: the scenario has none."""
    guard = scenario.guard
    if guard is None:
        return None
    return RatioGuard(guard.max_filter_ratio, guard.scope, guard.window, guard.policy)


@lru_cache(maxsize=64)
def latencies(median_s: float, sigma: float) -> tuple[float, ...]:
    """Equally likely lognormal latencies, ascending."""
    normal = NormalDist()
    factors = np.exp(sigma * np.array([normal.inv_cdf((i + 0.5) / QUANTILES) for i in range(QUANTILES)]))
    return tuple((median_s * factors).tolist())


@lru_cache(maxsize=4096)
def turns_of(tokens: int, version: int, is_truncated: bool) -> tuple[Turn, ...]:
    """The one turn of a response. Nothing reads the tokens themselves, so that responses share them."""
    return (
        Turn(
            prompt_ids=_PROMPT,
            token_ids=_row(tokens, 0),
            inference_logprobs=_logprobs(tokens),
            text="",
            finish_reason="length" if is_truncated else "stop",
            policy_version=version,
        ),
    )


def mixed_turns_of(tokens: int, version: int, token_versions: np.ndarray[Any, np.dtype[np.int64]], is_truncated: bool) -> tuple[Turn, ...]:
    """The same where the weights changed on the way."""
    return (
        Turn(
            prompt_ids=_PROMPT,
            token_ids=_row(tokens, 0),
            inference_logprobs=_logprobs(tokens),
            text="",
            finish_reason="length" if is_truncated else "stop",
            policy_version=version,
            token_versions=token_versions,
        ),
    )


@lru_cache(maxsize=256)
def _row(tokens: int, value: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.full(tokens, value, dtype=np.int64)


@lru_cache(maxsize=256)
def _logprobs(tokens: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.full(tokens, -0.5, dtype=np.float32)
