"""The gate of an agentic run, from its configuration: what decides on running groups, and on single trajectories."""

from __future__ import annotations

import time
from typing import Any

from sluice.config import AgenticConfig
from sluice.config.gate import FutilityConfig, GateConfig
from sluice.environments import step_limit
from sluice.errors import ConfigError
from sluice.gate import FutilityKeeper, FutilityRule, Gate, GateKeeper, LearnedFutility, LearnedRule, SequentialKeeper, build_rule
from sluice.gate.futility import MemberRule
from sluice.scheduler.gating import GroupKeeper, MachineGate


def build_gate(config: AgenticConfig) -> MachineGate | None:
    """A fresh gate, for one machine; None: the run has none. Raises `ConfigError` when a setting is wrong."""
    gate = config.gate
    if gate is None:
        return None
    horizon = horizon_of(config)
    return MachineGate(
        _groups(config, gate, horizon) if gate.cuts_groups else None,
        None if gate.futility is None else _members(config, gate, gate.futility, horizon),
        on_cut=gate.on_cut,
        barrier=gate.barrier and not gate.shadow,
        clock=time.perf_counter,
    )


def horizon_of(config: AgenticConfig) -> int | None:
    """Most environment steps of a trajectory. None: not known."""
    limits = (step_limit(config.environment), config.dialogue.max_turns)
    return min([limit for limit in limits if limit is not None], default=None)


def _groups(config: AgenticConfig, gate: GateConfig, horizon: int | None) -> GroupKeeper:
    settings: dict[str, Any] = {
        "group_size": config.train_env_manager.group_size,
        "redundancy": config.train_env_manager.group_size_redundancy,
        "seed": config.seed,
        "audit_rate": gate.audit_rate,
        "shadow": gate.shadow,
        "hold_precision": gate.hold_precision,
        "most_scale": gate.most_scale,
        "window": gate.window,
        "confidence": gate.confidence,
    }
    if gate.model is not None:
        return SequentialKeeper(LearnedRule.load(gate.model), floor=gate.floor, horizon=_known(horizon, "gate.model"), **settings)
    assert gate.k is not None
    if gate.rule is not None:
        return GateKeeper(Gate(k=gate.k, rule=build_rule(gate.rule), horizon=horizon), **settings)
    return GateKeeper(Gate(k=gate.k, threshold=gate.threshold, signal=gate.signal, horizon=horizon), **settings)


def _known(horizon: int | None, key: str) -> int:
    if horizon is None:
        raise ConfigError(
            f"{key}: expected a known step limit, for which it was fitted, got an environment without one - set environment.max_steps"
        )
    return horizon


def _members(config: AgenticConfig, gate: GateConfig, futility: FutilityConfig, horizon: int | None) -> FutilityKeeper:
    rule: MemberRule
    if futility.model is not None:
        horizon = _known(horizon, "gate.futility.model")
        rule = LearnedFutility(LearnedRule.load(futility.model, "gate.futility.model"), floor=futility.floor, horizon=horizon)
    else:
        rule = _signs(futility, horizon)
    return FutilityKeeper(
        rule,
        seed=config.seed,
        audit_rate=1.0 if gate.shadow else futility.audit_rate,
        window=futility.window,
        confidence=gate.confidence,
        horizon=horizon,
        hold_precision=None if gate.shadow else futility.hold_precision,
    )


def _signs(futility: FutilityConfig, horizon: int | None) -> FutilityRule:
    signs = futility.model_dump(include={"steps", "loops", "invalid_actions", "progress_steps"})
    for name, value in signs.items():
        if horizon is not None and value is not None and value >= horizon:
            raise ConfigError(
                f"gate.futility.{name}: expected a number below {horizon}, the steps after which every trajectory ends, got {value} - "
                "nothing is left to save there: lower it"
            )
    return FutilityRule(**signs)
