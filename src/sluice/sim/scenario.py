"""One simulated run, drawn whole from one seed: the settings of the machine, the data, the engine, the trainer, and what goes wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final, Literal

from sluice.scheduler import SchedulerConfig
from sluice.scheduler.groups import mix
from sluice.sim.faults import FaultPlan, Kill
from sluice.types import Category

PlayerName = Literal["machine", "shell"]
Query = Literal["no_filter", "std_filter", "mean_filter", "solved", "all"]
Response = Literal["reward_range", "finish_reason"]

DOMAINS: Final = ("algebra", "logic", "code")
NO_FAULTS: Final = FaultPlan()
_SCENARIO, _SHELL, _GATE = 11, 12, 13  # words that keep the random numbers of different purposes apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The settings of a ratio guard."""

    max_filter_ratio: float | Mapping[Category, float]
    scope: Literal["cumulative", "window"]
    window: int
    policy: Literal["keep", "wait", "shrink", "raise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The settings of a gate, and what members do for it to look at."""

    steps: int  # environment steps of every member
    converging: float  # share of the tasks whose members all do the same
    k: int
    threshold: float
    audit_rate: float = 0.0
    shadow: bool = False
    hold_precision: float | None = None
    on_cut: Literal["replace", "drop"] = "replace"
    barrier: bool = False
    futile_steps: int | None = None  # None: no member is stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that one run is made of. Times are in simulated seconds."""

    seed: int
    config: SchedulerConfig
    query: Query = "std_filter"
    response: Response | None = None
    guard: Guard | None = None
    gate: Gate | None = None  # members take environment steps where there is one
    domains: tuple[str, ...] = DOMAINS[:1]
    tasks: int = 64  # prompts of one epoch, of all domains together
    epochs: int | None = None  # passes over the data; None: no end
    solve_shift: float = 0.0  # added to the chance, 0 to 1 by prompt, that a response is right
    truncated_share: float = 0.0  # responses cut by their token limit
    odd_share: float = 0.0  # responses with a reward out of range, which the response filter `reward_range` drops
    batch: int = 4  # groups per step
    batches: int = 8  # steps after which the trainer stops
    tells_batches_left: bool = False
    asks_again: int = 0  # how often the trainer asks again after a Fail
    step_s: float = 1.0  # of the trainer, for one step
    pause_s: float = 0.0  # from the end of a step to the next request
    publish_s: float = 0.0  # from the end of a step until the engine has its weights
    publishes_first: bool = False  # the weights are there before the step is told
    workers: int = 16  # generations at once; further ones wait in order
    latency_s: float = 1.0  # median of a generation
    latency_sigma: float = 1.0  # of its logarithm
    max_tokens: int = 12  # of a generation
    cancel_latency_s: float = 0.0  # from a cancel until the engine stops sampling
    score_s: float = 0.0  # of scoring one response
    draw_s: float = 0.0  # of drawing one task
    faults: FaultPlan = NO_FAULTS

    def __str__(self) -> str:
        """The settings that differ from their defaults, for a person."""
        config = {name: value for name, value in _fields(self.config) if value != getattr(_PLAIN, name)}
        own = {name: value for name, value in _fields(self) if name not in ("config", "faults", "seed")}
        faults = {name: value for name, value in _fields(self.faults) if value}
        parts = [f"{name}={_short(value)}" for name, value in (*config.items(), *own.items(), *faults.items())]
        return ", ".join(parts)


def draw_scenario(seed: int, player: PlayerName = "machine") -> Scenario:
    """The scenario of a seed: the same one wherever it is drawn."""
    rng = Random(mix(seed, _SCENARIO if player == "machine" else _SHELL))
    pick, chance = rng.choice, rng.random
    domains = DOMAINS[: pick((1, 1, 1, 2, 3))]
    batch = pick((1, 2, 3, 4, 4, 6, 8, 12, 16))
    ratio = pick((0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.5, 2.0))
    has_user_loop = chance() < 0.15
    config = SchedulerConfig(**_machine_settings(rng, batch, ratio, domains, has_user_loop))
    queries: tuple[Query, ...] = ("std_filter", "std_filter", "std_filter", "no_filter", "mean_filter", "all")
    query = pick(("no_filter", "solved") if config.group_size == 1 else queries)
    goal = pick((50, 100, 200, 400)) if player == "machine" else pick((10, 20, 40))
    latency_s = pick((0.2, 1.0, 1.0, 3.0))
    finite = chance() < 0.4
    gate = None if player == "shell" or has_user_loop or config.group_size < 2 else _gate(Random(mix(seed, _GATE)))
    scenario = Scenario(
        seed=seed,
        config=config,
        query=query,
        response=pick((None, None, "reward_range", "finish_reason")),
        guard=_guard(rng) if chance() < 0.3 else None,
        domains=domains,
        tasks=max(len(domains), pick((3, 20, 40, 40, 90, 90, 300))),
        epochs=pick((1, 1, 2, 3)) if finite else None,
        solve_shift=pick((0.0, 0.0, 0.0, -0.3, 0.3)),
        truncated_share=pick((0.0, 0.0, 0.05, 0.3)),
        odd_share=pick((0.0, 0.0, 0.05, 0.2)),
        batch=batch,
        batches=min(60, max(2, goal // batch)),
        tells_batches_left=chance() < 0.5,
        asks_again=pick((0, 0, 1, 2)) if player == "machine" else 0,
        step_s=pick((0.0, 0.5, 1.0, 3.0, 20.0)),
        pause_s=pick((0.0, 0.0, 0.5)),
        publish_s=pick((0.0, 0.0, 0.0, 0.3, 4.0)) if player == "machine" else 0.0,
        publishes_first=chance() < 0.5,
        workers=pick((1, 3, 8, 16, 64)),
        latency_s=latency_s,
        latency_sigma=pick((0.0, 0.3, 1.0, 1.0, 1.5)),
        max_tokens=pick((1, 4, 12, 30)),
        cancel_latency_s=pick((0.0, 0.0, 0.05, 1.0)),
        score_s=pick((0.0, 0.0, 0.2, 2.0)),
        draw_s=pick((0.0, 0.0, 0.0, 0.05, 2.0)) if player == "machine" else 0.0,
        faults=_faults(rng, config, latency_s, player) if chance() < 0.65 else NO_FAULTS,
        gate=gate,
    )
    return _with_places(scenario) if gate is not None and gate.barrier else scenario


def _machine_settings(rng: Random, batch: int, ratio: float, domains: tuple[str, ...], has_user_loop: bool) -> dict[str, Any]:
    pick, chance = rng.choice, rng.random
    size = pick((1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 4, 4, 8))
    ahead = math.ceil(ratio)
    fill = pick(("refill", "refill", "refill", "shrink"))
    collect = pick(("as_finished", "as_finished", "in_order")) if fill == "refill" else "as_finished"
    by_ticket = fill == "shrink" or collect == "in_order"
    surplus = None
    staleness = pick((None, None, ahead, ahead + 1, ahead + 3))
    if ratio == 0 and fill == "refill":
        surplus = pick((None, "discard", "carry", "carry"))
        if surplus == "carry":
            staleness = pick((1, 2, 5))
    shares = None
    if len(domains) > 1 and chance() < 0.6:
        shares = {domain: pick((0.2, 0.5, 1.0, 2.0)) for domain in domains}
    return {
        "group_size": size,
        "seed": rng.getrandbits(32),
        "redundancy": pick((0, 0, 0, 0, 0, 0, 1, 2)),
        "fill": fill,
        "collect": collect,
        "max_resample_rounds": pick((1, 2, 3, 10, 50, 50)) if size * batch <= 32 else pick((1, 2, 3, 10)),  # a run shall end soon
        "max_groups_per_batch": pick((None, None, batch, batch + 2, 4 * batch)) if fill == "refill" else None,
        "max_response_rounds": pick((1, 2, 3, 5)),
        "on_exhausted": pick(("raise", "shrink", "shrink", "keep_low_information", "keep_low_information")),
        "min_members": pick((None, None, None, 1, size, max(1, size - 1))),
        "truncated": pick(("mask", "mask", "keep", "invalid", "drop_group")),
        "on_member_failure": pick(("replace", "replace", "judge")),
        "max_additional_running_prompts": 0 if by_ticket else pick((0, 0, 1, 3, 16)),
        "async_generation_ratio": ratio,
        "on_weight_update": pick(("finish", "finish", "restart", "continue")),
        "surplus": surplus,
        "max_staleness": staleness,
        "domain_staleness": {domain: ahead + pick((0, 1, 2)) for domain in domains if chance() < 0.15},
        "domain_shares": shares,
        "mix_on": pick(("kept", "kept", "drawn")),
        "absent_after_batches": pick((1, 3, 10)),
        "group_timeout_s": pick((None, None, 8.0, 40.0)),
        "requeue": chance() < 0.75,
        "quarantine_after": pick((None, 1, 2, 3)),
        "stall_warning_s": pick((None, None, 2.0, 30.0)),
        "has_user_loop": has_user_loop,
    }


def _gate(rng: Random) -> Gate | None:
    """From random numbers of its own, so that all else in a scenario is the same with and without one."""
    pick = rng.choice
    if rng.random() < 0.7:
        return None
    steps = pick((1, 2, 3, 5))
    shadow = rng.random() < 0.15
    return Gate(
        steps=steps,
        converging=pick((0.0, 0.3, 0.6, 1.0)),
        k=rng.randint(1, steps),
        threshold=pick((0.1, 0.4, 0.7, 1.0)),
        audit_rate=pick((0.0, 0.1, 0.5)),
        shadow=shadow,
        hold_precision=0.6 if shadow and rng.random() < 0.5 else None,
        on_cut=pick(("replace", "replace", "drop")),
        barrier=rng.random() < 0.4,
        futile_steps=pick((None, None, 1, 2)),
    )


def _with_places(scenario: Scenario) -> Scenario:
    """The same with a place in the engine for every member of every open group: members that wait for each other must all have one."""
    config, batch = scenario.config, scenario.batch
    groups = batch + math.ceil(config.async_generation_ratio * batch) + config.max_additional_running_prompts
    return replace(scenario, workers=max(scenario.workers, groups * (config.group_size + config.redundancy)))


def _guard(rng: Random) -> Guard:
    pick = rng.choice
    limits: tuple[float | Mapping[Category, float], ...] = (0.0, 0.25, 0.5, 0.5, 0.8, {"low_information": 0.4}, {"invalid": 0.0})
    return Guard(
        max_filter_ratio=pick(limits),
        scope=pick(("cumulative", "window")),
        window=pick((1, 4, 20)),
        policy=pick(("keep", "keep", "wait", "wait", "shrink", "raise")),
    )


def _faults(rng: Random, config: SchedulerConfig, latency_s: float, player: PlayerName) -> FaultPlan:
    pick, chance = rng.choice, rng.random

    def rate(*rates: float) -> float:
        return pick(rates) if chance() < 0.3 else 0.0

    events = 400 if player == "machine" else 100  # of which the run's first part is made
    saved_at = rng.randrange(5, events)
    kills = tuple(
        Kill(saved_at=saved_at // (1 + number), killed_at=saved_at // (1 + number) + pick((0, 0, 7, 60)), at_step=chance() < 0.5)
        for number in range(pick((0, 0, 1, 2)))
    )
    return FaultPlan(
        engine_error=rate(0.02, 0.1, 0.3),
        hang=rate(0.01, 0.05, 0.2) if config.group_timeout_s is not None else 0.0,
        reward_error=rate(0.02, 0.1, 0.3),
        reward_timeout=rate(0.02, 0.1),
        reward_nan=rate(0.02, 0.1),
        duplicate=rate(0.05, 0.2) if player == "machine" else 0.0,
        late_result=rate(0.2, 1.0) if player == "machine" else 0.0,
        slow_ack=rate(0.2, 1.0) if player == "machine" else 0.0,
        slow_consumer=rate(0.1, 0.5),
        slow_publish=rate(0.1, 0.5) if player == "machine" else 0.0,
        slow_draw=rate(0.05, 0.3) if player == "machine" else 0.0,
        worker_crash_s=rate(3.0, 10.0, 50.0) * latency_s,
        false_tick_s=rate(5.0, 30.0) if player == "machine" else 0.0,
        kills=kills,
        stop_at=rng.randrange(3, 2 * events) if chance() < 0.1 else None,
        cancel_at=tuple(pick((math.inf, math.inf, 0.0, 0.5, 2.0)) * latency_s for _ in range(8)) if player == "shell" else (),
    )


def _fields(record: Any) -> list[tuple[str, Any]]:
    return [(name, getattr(record, name)) for name in record.__dataclass_fields__]


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


_PLAIN: Final = SchedulerConfig(group_size=1)
