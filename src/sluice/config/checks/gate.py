"""Rules of the gate of an agentic run: what it decides on, what it may cost, and what of it does nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from sluice.config.agentic import AgenticConfig
from sluice.config.checks.finding import Finding, Reason, idle
from sluice.config.gate import FutilityConfig, GateConfig
from sluice.config.problems import KeyPath, dotted, suggestion, told

RULES: Final = ("by_task_type", "or_termination", "single_axis")  # the built-in rules
ZERO_AT_FIRST: Final = ("action_bigram_jaccard_mean", "termination_fraction")  # signals that are 0 after one step, whatever was done
SHARES: Final = ("threshold", "termination_threshold")  # their arguments that lie between 0 and 1
SIGNS: Final = ("steps", "loops", "invalid_actions", "progress_steps")  # of a futile trajectory

_GATE: KeyPath = ("gate",)
_K: KeyPath = (*_GATE, "k")
_AUDIT: KeyPath = (*_GATE, "audit_rate")
_HOLD: KeyPath = (*_GATE, "hold_precision")
_SHADOW: KeyPath = (*_GATE, "shadow")
_FUTILITY: KeyPath = (*_GATE, "futility")


def contradictions(config: AgenticConfig) -> Iterator[Finding]:
    """Settings that cannot all hold."""
    gate = config.gate
    if gate is None:
        return
    if not gate.cuts_groups and gate.futility is None:
        message = "expected k, the environment step at which groups are looked at, model or futility, got none - give one, or delete gate"
        yield Finding(path=_GATE, message=message)
    if gate.k is not None and gate.model is not None:
        yield Finding(
            path=_K, reads=((*_GATE, "model"),), message="excludes model, which looks at steps of its own - delete one of the two"
        )
    yield from _check_horizon(config, gate)
    if gate.futility is not None:
        yield from _check_signs(gate.futility)
        if gate.futility.hold_precision is not None and not gate.futility.audit_rate and not gate.shadow:
            hold = (*_FUTILITY, "hold_precision")
            message = f"must be above 0 with {dotted(hold)}, got 0: without audits no precision is known - set 0.1"
            yield Finding(path=(*_FUTILITY, "audit_rate"), reads=(hold, _SHADOW), message=message)
        if gate.futility.hold_precision is not None:
            yield from _check_window(_FUTILITY, "members", gate.futility.window, gate.futility.hold_precision, gate.confidence)
    if gate.cuts_groups:
        yield from _check_audit(gate)
        if gate.rule is not None:
            yield from _check_rule((*_GATE, "rule"), gate.rule, gate.k)
        elif gate.k == 1:
            yield from _check_first_step((*_GATE, "signal"), gate.signal)
        if gate.barrier and not gate.shadow:
            yield from _check_barrier(config)


def without_effect(config: AgenticConfig) -> Iterator[Finding]:
    """Every key that does nothing because of another key, whether or not the user wrote it."""
    gate = config.gate
    if gate is None:
        return
    if not gate.cuts_groups:
        names = ("threshold", "signal", "rule", "floor", "on_cut", "barrier", "audit_rate", "hold_precision", "most_scale", "window")
        for name in names:
            yield idle((*_GATE, name), Reason(_K, "not given, so that no group is looked at", "give k"))
    else:
        yield from _idle_of_groups(config, gate)
    if gate.futility is not None and gate.futility.model is None:
        yield idle((*_FUTILITY, "floor"), Reason((*_FUTILITY, "model"), "not given", "give it"))
    yield from _idle_audit(gate)


# ---------------------------------------------------------------- contradictions


def _check_horizon(config: AgenticConfig, gate: GateConfig) -> Iterator[Finding]:
    limits: dict[KeyPath, int | None] = {
        ("environment", "max_steps"): config.environment.max_steps,
        ("dialogue", "max_turns"): config.dialogue.max_turns,
    }
    known = {path: limit for path, limit in limits.items() if limit is not None}
    if not known:
        return
    path, horizon = min(known.items(), key=lambda entry: entry[1])
    steps = {_K: gate.k} if gate.futility is None else {_K: gate.k, **{(*_FUTILITY, sign): getattr(gate.futility, sign) for sign in SIGNS}}
    for key, value in steps.items():
        if value is not None and value >= horizon:
            yield Finding(
                path=key,
                reads=(path,),
                message=f"must be below {dotted(path)} ({horizon}), where every trajectory ends, got {value}: nothing is left to save "
                "there - lower it",
            )


def _check_signs(futility: FutilityConfig) -> Iterator[Finding]:
    given = [sign for sign in SIGNS if getattr(futility, sign) is not None]
    if futility.model is None and not given:
        message = f"expected at least one of {', '.join(SIGNS)}, or model, got none - give steps (6 to 8 is careful), or delete futility"
        yield Finding(path=_FUTILITY, message=message)
    elif futility.model is not None and given:
        message = f"excludes {given[0]}: a model decides alone - delete one of the two"
        yield Finding(path=(*_FUTILITY, "model"), reads=((*_FUTILITY, given[0]),), message=message)


def _check_audit(gate: GateConfig) -> Iterator[Finding]:
    if gate.audit_rate == 1 and not gate.shadow:
        yield Finding(path=_AUDIT, message="must be below 1, got 1: every group would be audited, and none cut - lower it, or set shadow")
    if gate.hold_precision is None:
        return
    if gate.audit_rate == 0 and not gate.shadow:
        yield Finding(
            path=_AUDIT,
            reads=(_HOLD, _SHADOW),
            message=f"must be above 0 with {dotted(_HOLD)} {gate.hold_precision:g}, got 0: without audits no precision is known - set 0.1",
        )
    yield from _check_window(_GATE, "groups", gate.window, gate.hold_precision, gate.confidence)


def _check_window(section: KeyPath, what: str, window: int, floor: float, confidence: float) -> Iterator[Finding]:
    enough = math.ceil(math.log((1 - confidence) / 2) / math.log(floor))
    if window < enough:
        hold = (*section, "hold_precision")
        yield Finding(
            path=(*section, "window"),
            reads=(hold, (*_GATE, "confidence")),
            message=f"must be at least {enough} with {dotted(hold)} {floor:g}, got {window}: even if all of so few audited {what} were "
            "right, the lower bound of the precision would stay below it - raise it, or lower hold_precision",
        )


def _check_first_step(path: KeyPath, signal: Any) -> Iterator[Finding]:
    """After one step two of the signals say nothing."""
    if signal in ZERO_AT_FIRST:
        yield Finding(
            path=path,
            reads=(_K,),
            message=f"must be another one with {dotted(_K)} 1, got {signal}: after one step it is 0 for every group, and all would be cut "
            "- raise k, or choose another signal",
        )


def _check_rule(path: KeyPath, rule: Mapping[str, Any], k: int | None) -> Iterator[Finding]:
    """The type of a rule, and shares among its arguments. What else its arguments must be is for whoever builds it."""
    kind = rule.get("type")
    if not isinstance(kind, str):
        found = "none" if kind is None else told(kind)
        yield Finding(path=(*path, "type"), message=f"expected one of {', '.join(RULES)}, or an import path, got {found} - give it")
        return
    if "." in kind:
        return
    if kind not in RULES:
        near = suggestion(kind, RULES, what="rules")
        yield Finding(path=(*path, "type"), message=f"expected one of {', '.join(RULES)}, or an import path, got {kind!r}{near}")
        return
    for name in SHARES:
        if name in rule:
            yield from _check_share((*path, name), rule[name])
    if k == 1:
        yield from _check_first_step((*path, "signal"), rule.get("signal"))
    rules = rule.get("rules")
    inner = [(("rules", str(name)), one) for name, one in rules.items()] if isinstance(rules, Mapping) else []
    for below, one in [*inner, (("default",), rule.get("default"))]:
        if isinstance(one, Mapping):
            yield from _check_rule((*path, *below), one, k)
        elif one is not None:
            yield from _check_share((*path, *below), one)


def _check_share(path: KeyPath, value: Any) -> Iterator[Finding]:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        yield Finding(path=path, message=f"expected a number >= 0 and <= 1, got {told(value)}")


def _check_barrier(config: AgenticConfig) -> Iterator[Finding]:
    """Members that wait hold their environment: nobody may wait for one that waits for it."""
    manager, groups = config.train_env_manager, config.most_open_groups
    key = (*_GATE, "barrier")
    if groups > manager.num_env_groups:
        yield Finding(
            path=key,
            reads=(("train_env_manager", "num_env_groups"), ("rollout_batch_size",), ("async_generation_ratio",)),
            message=f"needs an environment for every member of every open group, and {groups} groups may be open, "
            f"train_env_manager.num_env_groups is {manager.num_env_groups}: members would wait for each other - raise num_env_groups to "
            f"{groups}, or delete barrier",
        )
    members = groups * (manager.group_size + manager.group_size_redundancy)
    if config.environment.run_in == "process" and config.environment.workers < members:
        yield Finding(
            path=key,
            reads=(("environment", "workers"), ("environment", "run_in")),
            message=f"needs a worker for every member of every open group, and {members} may be open, environment.workers is "
            f"{config.environment.workers}: members would wait for each other - raise workers to {members}, set environment.run_in to "
            "inline or thread, or delete barrier",
        )


# ---------------------------------------------------------------- keys without effect


def _idle_of_groups(config: AgenticConfig, gate: GateConfig) -> Iterator[Finding]:
    if gate.model is not None:
        for name in ("threshold", "signal", "rule"):
            yield idle((*_GATE, name), Reason((*_GATE, "model"), "given, and decides alone", "delete model"))
    else:
        yield idle((*_GATE, "floor"), Reason((*_GATE, "model"), "not given", "give it"))
        if gate.rule is not None:
            for name in ("threshold", "signal"):
                yield idle((*_GATE, name), Reason((*_GATE, "rule"), "given, and decides alone", "delete rule"))
    if gate.shadow:
        for name in ("on_cut", "barrier"):
            yield idle((*_GATE, name), Reason(_SHADOW, "true: nothing is cut", "set shadow to false"))
    if config.resampling.fill == "shrink":
        yield idle((*_GATE, "on_cut"), Reason(("resampling", "fill"), "shrink, where nothing is replaced", "set fill to refill"))
    if gate.hold_precision is None:
        yield idle((*_GATE, "most_scale"), Reason(_HOLD, "not given, so that the threshold stays where it is", "give it"))


def _idle_audit(gate: GateConfig) -> Iterator[Finding]:
    futility = gate.futility
    groups_tell = gate.cuts_groups and (gate.shadow or gate.audit_rate > 0)
    members_tell = futility is not None and (gate.shadow or futility.audit_rate > 0)
    if gate.shadow:
        if gate.cuts_groups:
            yield idle(_AUDIT, Reason(_SHADOW, "true, where every group tells", "set shadow to false"))
        yield from _idle_futility(gate, "audit_rate", Reason(_SHADOW, "true, where every member tells", "set shadow to false"))
        yield from _idle_futility(gate, "hold_precision", Reason(_SHADOW, "true, where nobody is stopped", "set shadow to false"))
    if gate.cuts_groups and not groups_tell:
        yield idle((*_GATE, "window"), Reason(_AUDIT, "0, so that no group tells", "raise it"))
    if not members_tell:
        yield from _idle_futility(gate, "window", Reason((*_FUTILITY, "audit_rate"), "0, so that no member tells", "raise it"))
    if not groups_tell and not members_tell:
        cause = _AUDIT if gate.cuts_groups else (*_FUTILITY, "audit_rate")
        yield idle((*_GATE, "confidence"), Reason(cause, "0, so that there is nothing to have an interval of", "raise it"))


def _idle_futility(gate: GateConfig, name: str, reason: Reason) -> Iterator[Finding]:
    if gate.futility is not None:
        yield idle((*_FUTILITY, name), reason)
