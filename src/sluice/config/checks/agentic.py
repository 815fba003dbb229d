"""Rules of an agentic run: environments, how the policy talks to them, and groups of trajectories."""

from __future__ import annotations

import re
import string
import warnings
from collections.abc import Iterator
from typing import Final

from sluice.config.agentic import MOST_TRAJECTORIES, AgenticConfig, EnvironmentConfig, EnvManagerConfig
from sluice.config.checks import gate, run
from sluice.config.checks.finding import Finding, Reason, idle, no_template
from sluice.config.models import MOST_GROUPS
from sluice.config.problems import KeyPath, dotted, suggestion

ONE_VERSION: Final = frozenset({"restart"})  # on_weight_update: with the others a trajectory goes on under the weights of its next turn

TEMPLATE_FIELDS: Final = ("observation", "admissible_commands", "turn", "turns_left")  # what a template of the dialogue may name

_BATCH: KeyPath = ("rollout_batch_size",)
_TRAIN: KeyPath = ("train_env_manager",)
_VAL: KeyPath = ("val_env_manager",)
_SIZE: KeyPath = (*_TRAIN, "group_size")
_ENV_GROUPS: KeyPath = (*_TRAIN, "num_env_groups")


def contradictions(config: AgenticConfig) -> Iterator[Finding]:
    """Settings that cannot all hold."""
    yield from _check_groups(config)
    yield from _check_batch(config)
    yield from _check_episodes(config)
    for path, manager in _managers(config):
        yield from _check_group_filter(path, manager)
    yield from run.check_staleness(config, _ages(config))
    yield from run.check_two_engines(config)
    yield from _check_dialogue(config)
    yield from _check_turns(config)
    yield from _check_templates(config)
    yield from gate.contradictions(config)


def without_effect(config: AgenticConfig) -> Iterator[Finding]:
    """Every key that does nothing because of another key, whether or not the user wrote it."""
    yield from _idle_environment_keys(config)
    yield from _idle_dialogue_keys(config)
    yield from _idle_episodes(config)
    yield from _idle_validation_keys(config)
    for path, manager in _managers(config):
        if manager.group_filter_config is not None:
            yield from run.idle_filter_keys((*path, "group_filter_config"), manager.group_filter_config)
    yield Finding(
        path=("resampling", "absent_after_batches"), message="has no effect because an agentic run is of a single domain - delete it"
    )
    yield from run.idle_filling_keys(config)
    yield from run.idle_async_keys(config, _ages(config), one_version=ONE_VERSION)
    yield from _idle_guard(config)
    yield from run.idle_guard_keys(config)
    yield from run.idle_trainer_keys(config)
    yield from gate.without_effect(config)


# ---------------------------------------------------------------- contradictions


def _check_groups(config: AgenticConfig) -> Iterator[Finding]:
    manager = config.train_env_manager
    yield from run.check_group_size(
        config,
        size=manager.group_size,
        size_key=_SIZE,
        redundancy=manager.group_size_redundancy,
        redundancy_key=(*_TRAIN, "group_size_redundancy"),
        member="trajectory",
    )


def _check_batch(config: AgenticConfig) -> Iterator[Finding]:
    batch, size = config.rollout_batch_size, config.train_env_manager.group_size
    below = batch - batch % size
    if batch != below:
        whole = " or ".join(str(number) for number in (below, below + size) if 0 < number <= MOST_TRAJECTORIES)
        yield Finding(
            path=_BATCH,
            reads=(_SIZE,),
            message=f"must be a multiple of train_env_manager.group_size ({size}), got {batch}: a batch is whole groups - set it to "
            f"{whole}",
        )
        return
    groups = config.groups_per_batch
    if groups > MOST_GROUPS:
        yield Finding(
            path=_BATCH,
            reads=(_SIZE,),
            message=f"must be at most {MOST_GROUPS * size} with train_env_manager.group_size {size}, got {batch}: a batch is of at most "
            f"{MOST_GROUPS} groups - lower it",
        )
    told = f"{groups}, the groups of a batch (rollout_batch_size {batch} / train_env_manager.group_size {size})"
    yield from run.check_most_groups(config, groups=groups, told=told, reads=(_BATCH, _SIZE))


def _check_episodes(config: AgenticConfig) -> Iterator[Finding]:
    manager = config.train_env_manager
    given, fewest = manager.max_traj_per_env, config.fewest_episodes_per_env
    path = (*_TRAIN, "max_traj_per_env")
    if given == -1:
        return
    if given < fewest:
        yield Finding(
            path=path,
            reads=(_BATCH, _ENV_GROUPS, _SIZE),
            message=f"must be -1 or at least {fewest} with rollout_batch_size {config.rollout_batch_size}, num_env_groups "
            f"{manager.num_env_groups} and group_size {manager.group_size}, got {given}: the environment groups would not open enough "
            "episodes for a batch - delete it, or raise it",
        )
    elif config.additional_groups > MOST_GROUPS:
        most = (MOST_GROUPS + config.groups_per_batch) // manager.num_env_groups
        yield Finding(
            path=path,
            reads=(_BATCH, _ENV_GROUPS, _SIZE),
            message=f"must be at most {most} with num_env_groups {manager.num_env_groups}, got {given}: at most {MOST_GROUPS} groups run "
            "beyond those of a batch - lower one of the two",
        )


def _check_group_filter(path: KeyPath, manager: EnvManagerConfig) -> Iterator[Finding]:
    group_filter = manager.group_filter_config
    if group_filter is None:
        return
    at = (*path, "group_filter_config")
    if manager.group_filter_cls is not None:
        yield Finding(
            path=at,
            reads=((*path, "group_filter_cls"),),
            message="excludes group_filter_cls, which is given as well, since one filter judges the groups - delete one of the two",
        )
    yield from run.check_spread(at, group_filter, size=manager.group_size, size_key=(*path, "group_size"))


def _check_dialogue(config: AgenticConfig) -> Iterator[Finding]:
    dialogue = config.dialogue
    if dialogue.max_tokens_per_turn >= config.sequence_length:
        yield Finding(
            path=("dialogue", "max_tokens_per_turn"),
            reads=(("sequence_length",),),
            message=f"must be below sequence_length ({config.sequence_length}), which holds what the policy reads as well, got "
            f"{dialogue.max_tokens_per_turn} - lower it, or raise sequence_length",
        )
    for index, text in enumerate(dialogue.stop):
        if text in dialogue.stop[:index]:
            yield Finding(path=("dialogue", "stop", index), message=f"expected each text once, got {text!r} twice - delete one")
    if dialogue.action_pattern is not None:
        yield from _check_pattern(("dialogue", "action_pattern"), dialogue.action_pattern)


def _check_pattern(path: KeyPath, pattern: str) -> Iterator[Finding]:
    try:
        with warnings.catch_warnings(action="ignore"):  # of what a later Python may read differently
            groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as err:
        yield Finding(path=path, message=f"expected a regular expression, got {pattern!r}: {err} - correct it, or delete it")
        return
    if groups != 1:
        yield Finding(
            path=path,
            message=f"expected exactly one group, which is the action, such as <action>(.*?)</action>, got {groups} in {pattern!r} - "
            + ("put brackets around the action" if groups == 0 else "write (?:...) for brackets that only hold together"),
        )


def _check_turns(config: AgenticConfig) -> Iterator[Finding]:
    turns = config.dialogue.max_turns
    limits = {(*path, "max_steps"): environment.max_steps for path, environment in _environments(config)}
    if turns is not None and all(limit is not None and limit < turns for limit in limits.values()):
        told = " and ".join(f"{dotted(path)} ({limit})" for path, limit in limits.items())
        yield Finding(
            path=("dialogue", "max_turns"),
            reads=tuple(limits),
            message=f"must not be above {told}, where every trajectory ends, got {turns} - delete it, or lower it",
        )


def _check_templates(config: AgenticConfig) -> Iterator[Finding]:
    for name in ("first_template", "turn_template"):
        template = getattr(config.dialogue, name)
        if template is not None:
            yield from _check_template(config, ("dialogue", name), template)


def _check_template(config: AgenticConfig, path: KeyPath, template: str) -> Iterator[Finding]:
    try:
        parts = [part for part in string.Formatter().parse(template) if part[1] is not None]
    except ValueError as err:
        yield Finding(path=path, message=no_template(err))
        return
    unknown = [field for _, field, _, _ in parts if field not in TEMPLATE_FIELDS]
    for field in unknown:
        near = suggestion(str(field), TEMPLATE_FIELDS, what="fields")
        yield Finding(path=path, message=f"expected a field of the dialogue, got {{{field}}}{near}")
    for _, field, specification, conversion in parts:
        if (specification or conversion) and field not in unknown:
            written = f"{field}{f'!{conversion}' if conversion else ''}{f':{specification}' if specification else ''}"
            yield Finding(
                path=path, message=f"expected {{{field}}} alone, got {{{written}}} - fields of the dialogue are put in as they are"
            )
    fields = {field for _, field, _, _ in parts}
    if "observation" not in fields and not unknown:
        yield Finding(
            path=path, message="expected at least the field {observation}, got none: the policy would not see what happens - add it"
        )
    if "turns_left" in fields and config.dialogue.max_turns is None:
        yield Finding(
            path=path,
            reads=(("dialogue", "max_turns"),),
            message="{turns_left} needs dialogue.max_turns, which is not given - give it, or leave the field out",
        )


# ---------------------------------------------------------------- keys without effect


def _idle_environment_keys(config: AgenticConfig) -> Iterator[Finding]:
    environments = _environments(config)
    for path, environment in environments:
        if environment.run_in != "process":
            own = Reason((*path, "run_in"), f"{environment.run_in}, which has no worker processes", "set run_in to process")
            yield idle((*path, "workers"), own)
            yield idle((*path, "episodes_per_worker"), own)
    if not config.env_monitor.enable:
        for name in ("interval_s", "hung_after_s", "on_hung"):
            yield idle(("env_monitor", name), Reason(("env_monitor", "enable"), "false", "set enable to true"))
    elif config.env_monitor.on_hung == "replace" and all(environment.run_in == "inline" for _, environment in environments):
        yield Finding(
            path=("env_monitor", "on_hung"),
            reads=tuple((*path, "run_in") for path, _ in environments),
            message="has no effect because environment.run_in is inline, where no call can be ended - delete it, or set run_in to process",
        )


def _idle_dialogue_keys(config: AgenticConfig) -> Iterator[Finding]:
    if config.dialogue.style == "plain":
        yield idle(("dialogue", "system_prompt"), Reason(("dialogue", "style"), "plain", "set style to chat"))


def _idle_episodes(config: AgenticConfig) -> Iterator[Finding]:
    reason = run.nothing_additional(config)
    if reason is not None and config.train_env_manager.max_traj_per_env > config.fewest_episodes_per_env:
        state, remedy = reason.state, f"set it to {config.fewest_episodes_per_env}, or {reason.remedy}"
        found = idle((*_TRAIN, "max_traj_per_env"), Reason(reason.cause, state, remedy))
        yield Finding(path=found.path, reads=(*found.reads, _BATCH, _ENV_GROUPS, _SIZE), message=found.message)


def _idle_validation_keys(config: AgenticConfig) -> Iterator[Finding]:
    manager = config.val_env_manager
    if manager is None:
        nothing = Reason(_VAL, "not given", "give it, for an evaluation")
        yield idle(("val_environment",), nothing)
        for name in type(config.validation).model_fields:
            yield idle(("validation", name), nothing)
        return
    yield Finding(
        path=(*_VAL, "group_size_redundancy"), message="has no effect because an evaluation waits for every trajectory - delete it"
    )
    yield Finding(
        path=(*_VAL, "max_traj_per_env"),
        message="has no effect because an evaluation plays one episode of each environment group - delete it",
    )
    if not _drops(manager):
        yield Finding(
            path=("validation", "filtering"),
            reads=((*_VAL, "group_filter_cls"), (*_VAL, "group_filter_config")),
            message="has no effect because val_env_manager has no group filter that drops anything - delete it, or set "
            "val_env_manager.group_filter_cls or group_filter_config",
        )


def _idle_guard(config: AgenticConfig) -> Iterator[Finding]:
    if config.guard is not None and not _drops(config.train_env_manager):
        yield Finding(
            path=("guard",),
            reads=((*_TRAIN, "group_filter_cls"), (*_TRAIN, "group_filter_config")),
            message="has no effect because train_env_manager has no group filter that drops anything - delete it, or set "
            "train_env_manager.group_filter_cls or group_filter_config",
        )


# ---------------------------------------------------------------- reading


def _ages(config: AgenticConfig) -> run.Ages:
    """Every key that says how old a trained group may be, with its value."""
    return {("resampling", "max_staleness"): config.resampling.max_staleness}


def _managers(config: AgenticConfig) -> tuple[tuple[KeyPath, EnvManagerConfig], ...]:
    train = (_TRAIN, config.train_env_manager)
    return (train,) if config.val_env_manager is None else (train, (_VAL, config.val_env_manager))


def _environments(config: AgenticConfig) -> tuple[tuple[KeyPath, EnvironmentConfig], ...]:
    """The environments that are played, each with where it stands."""
    train: tuple[KeyPath, EnvironmentConfig] = (("environment",), config.environment)
    if config.val_environment is None or config.val_env_manager is None:
        return (train,)
    return (train, (("val_environment",), config.val_environment))


def _drops(manager: EnvManagerConfig) -> bool:
    """Whether a filter judges these groups that may drop one."""
    chosen = manager.group_filter_config
    return manager.group_filter_cls is not None or (chosen is not None and chosen.type != "no_filter")
