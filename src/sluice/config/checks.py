"""What no single key can tell: settings that exclude each other, and settings that would do nothing.

Two lists of rules. `contradictions` are wrong whatever the user wrote. `without_effect` names every key that the rest of the
configuration makes idle; it is an error only where the user wrote it, and the resolved configuration leaves it out. A rule reads the
configuration and nothing else: whether a folder exists or a filter takes its arguments is for the room that uses it.

Not refused on purpose: intervals longer than the run (`validation.every_steps` above `trainer.max_steps` and the like), so that a
recipe can be tried with `trainer.max_steps=1`.

To add a rule, yield one `Finding`: the key to change, the keys it was weighed against, and what to do.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.config.models import LARGEST_GROUP, RlvrConfig, Section, TaskSourceConfig
from sluice.config.problems import KeyPath, dotted, suggestion

SUM_TOLERANCE = 1e-6  # of shares that make a whole: thirds may be written with seven digits
SPREAD_FILTERS = frozenset({"std_filter"})  # query filters that need two members to see a difference

_SOURCE_KEYS = {  # source type: keys it cannot do without, keys it may have; `type`, `domain` and `source_name` apply to all
    "reasoning_gym": (("name", "size"), ("seed", "params")),
    "jsonl": (("path",), ("prompt_field", "answer_field")),
    "huggingface": (("path",), ("split", "prompt_field", "answer_field")),
}
_COMMON_SOURCE_KEYS = ("type", "domain", "source_name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One rule that a configuration breaks."""

    path: KeyPath  # the key to change
    reads: tuple[KeyPath, ...] = ()  # the keys it was weighed against
    message: str


def contradictions(config: RlvrConfig) -> Iterator[Finding]:
    """Settings that cannot all hold."""
    yield from _check_sources(config)
    yield from _check_domains(config)
    yield from _check_prompts(config)
    yield from _check_dataset_filter(config)
    yield from _check_group_size(config)
    yield from _check_batch(config)
    yield from _check_staleness(config)
    yield from _check_mix(config)


def without_effect(config: RlvrConfig) -> Iterator[Finding]:
    """Every key that does nothing because of another key, whether or not the user wrote it."""
    for side, sources in _sides(config):
        for index, source in enumerate(sources):
            yield from _idle_source_keys(("tasks", side, index), source)
    if not config.tasks.use_chat_template:
        yield _idle(("tasks", "system_prompt"), ("tasks", "use_chat_template"), "false", "set use_chat_template to true")
    if not config.tasks.validation:
        reason = ("tasks", "validation"), "empty", "add a source there"
        yield _idle(("tasks", "exclude_train_from_validation"), *reason)
        for name in type(config.validation).model_fields:
            yield _idle(("validation", name), *reason)
    elif config.validation.temperature == 0:
        yield _idle(("validation", "repeats"), ("validation", "temperature"), "0, so that every repeat gives the same answer", "raise that")
    for domain in config.rewards:
        yield from _idle_reward_keys(config, domain)
    yield from _idle_filling_keys(config)
    yield from _idle_async_keys(config)
    yield from _idle_mix_keys(config)
    yield from _idle_guard_keys(config)
    yield from _idle_trainer_keys(config)


def template_fields(template: str) -> list[str]:
    """The fields of a str.format template as written, also those inside format specifications. Raises `ValueError` when it is none."""
    found = []
    for _, field, specification, _ in string.Formatter().parse(template):
        if field is not None:
            found += [field, *template_fields(specification or "")]
    return found


def is_written(config: Section, path: KeyPath) -> bool:
    """Whether the user gave this key a value (null is none)."""
    current: Any = config
    for part in path[:-1]:
        current = getattr(current, str(part)) if isinstance(current, Section) else current[part]
    name = str(path[-1])
    return name in current.model_fields_set and getattr(current, name) is not None


# ---------------------------------------------------------------- contradictions


def _check_sources(config: RlvrConfig) -> Iterator[Finding]:
    labels = _labels(config)
    for side, sources in _sides(config):
        for index, source in enumerate(sources):
            path = ("tasks", side, index)
            for name in _SOURCE_KEYS[source.type][0]:
                if getattr(source, name) is None:
                    yield Finding(path=(*path, name), reads=((*path, "type"),), message=f"a source of type {source.type} needs this key")
            if source.domain is not None and source.domain not in config.rewards:
                near = suggestion(source.domain, config.rewards, what="reward domains")
                yield Finding(
                    path=(*path, "domain"), reads=(("rewards",),), message=f"expected a domain of `rewards`, got {source.domain!r}{near}"
                )
            if source.domain is None and source.type == "reasoning_gym" and source.name is not None and source.name not in labels:
                yield Finding(
                    path=(*path, "domain"),
                    reads=((*path, "name"), ("rewards",)),
                    message=f"expected a domain: without this key the label of the rows is {source.name}, which is neither a domain of "
                    f"`rewards` ({', '.join(config.rewards)}) nor in a tag_included",
                )


def _check_domains(config: RlvrConfig) -> Iterator[Finding]:
    owner: dict[str, str] = {}
    named, is_open = _named_domains(config, "train", "validation")
    for domain, reward in config.rewards.items():
        path = ("rewards", domain)
        if not domain or set(domain) - set(string.ascii_letters + string.digits + "_-"):
            yield Finding(
                path=path,
                message="expected a domain name of letters, digits, '_' and '-' (it becomes part of metric names and overrides)"
                " - labels of the data with other characters go into tag_included",
            )
        if not is_open and domain not in named:
            yield Finding(
                path=path,
                reads=(("tasks",),),
                message="has no effect: no source of `tasks` has this domain - delete it, or correct the domain of a source",
            )
        for tag in reward.tag_included:
            here = (*path, "tag_included")
            if tag in config.rewards and tag != domain:
                yield Finding(
                    path=here, reads=(("rewards", tag),), message=f"{tag!r} is a domain of its own - delete it here, or the domain"
                )
            elif owner.setdefault(tag, domain) != domain:
                other = ("rewards", owner[tag], "tag_included")
                yield Finding(path=here, reads=(other,), message=f"{tag!r} already belongs to {dotted(other)} - a label has one domain")
        if reward.on_reward_timeout == "value" and reward.timeout_value is None:
            yield Finding(
                path=(*path, "timeout_value"),
                reads=((*path, "on_reward_timeout"),),
                message="on_reward_timeout: value needs this key - give the reward of a response that timed out",
            )


def _check_prompts(config: RlvrConfig) -> Iterator[Finding]:
    path = ("tasks", "prompt_template")
    try:
        fields = template_fields(config.tasks.prompt_template)
    except ValueError as err:
        yield Finding(
            path=path, message=f"expected a template for str.format: {err} - write {{{{ and }}}} for braces that stand for themselves"
        )
        return
    if not fields:
        yield Finding(path=path, message="expected at least one field such as {question}, got none: every prompt would be the same")
    for name in fields:
        if "." in re.sub(r"\[[^]]*\]", "", name):
            yield Finding(
                path=path,
                message=f"expected fields and entries such as {{question}} and {{metadata[difficulty]}}, got the attribute {{{name}}} - "
                "use brackets for an entry of a mapping",
            )
        elif not name or name[0].isdecimal():
            yield Finding(
                path=path, message=f"expected named fields such as {{question}}, got {{{name}}} - {{{{ and }}}} stand for plain braces"
            )


def _check_dataset_filter(config: RlvrConfig) -> Iterator[Finding]:
    chosen = config.dataset_filter
    low, high = chosen.min_difficulty, chosen.max_difficulty
    if low is not None and high is not None and low > high:
        path: KeyPath = ("dataset_filter", "min_difficulty")
        yield Finding(
            path=path,
            reads=(("dataset_filter", "max_difficulty"),),
            message=f"must not be above max_difficulty ({high:g}), got {low:g} - swap them or drop one",
        )
    names = {name for source in config.tasks.train for name in _source_names(source)}
    for index, name in enumerate(chosen.source):
        if name not in names:
            near = suggestion(name, names, what="sources")
            yield Finding(
                path=("dataset_filter", "source", index),
                reads=(("tasks", "train"),),
                message=f"expected a source of tasks.train, got {name!r}{near}",
            )


def _check_group_size(config: RlvrConfig) -> Iterator[Finding]:
    size_key: KeyPath = ("num_return_sequences_in_group",)
    size = config.num_return_sequences_in_group
    least = config.resampling.min_members
    if least is not None and least > size:
        yield Finding(
            path=("resampling", "min_members"),
            reads=(size_key,),
            message=f"must not be above num_return_sequences_in_group ({size}), got {least}",
        )
    if size + config.group_size_redundancy > LARGEST_GROUP:
        yield Finding(
            path=("group_size_redundancy",),
            reads=(size_key,),
            message=f"must be at most {LARGEST_GROUP - size} with num_return_sequences_in_group {size}, got "
            f"{config.group_size_redundancy}: a group has at most {LARGEST_GROUP} members at once - lower one of the two",
        )
    if size > 1:
        return
    yield Finding(
        path=size_key, message="must be at least 2, got 1: the advantage of a lone response is 0, nothing would be learned - raise it"
    )
    for domain, reward in config.rewards.items():
        path = ("rewards", domain, "query_filter_config")
        for name in sorted(_types_in(reward.query_filter_config.model_dump()) & SPREAD_FILTERS):
            yield Finding(
                path=path,
                reads=(size_key,),
                message=f"{name} needs a spread, and num_return_sequences_in_group 1 has none - raise that or choose another filter",
            )


def _check_batch(config: RlvrConfig) -> Iterator[Finding]:
    limit = config.resampling.max_groups_per_batch
    if limit is not None and limit < config.rollout_batch_size and config.resampling.fill == "refill":
        yield Finding(
            path=("resampling", "max_groups_per_batch"),
            reads=(("rollout_batch_size",), ("resampling", "fill")),
            message=f"must be at least rollout_batch_size ({config.rollout_batch_size}), got {limit}: no batch could ever be filled",
        )
    if config.is_use_additional_prompts and config.max_additional_running_prompts == 0:
        yield Finding(
            path=("is_use_additional_prompts",),
            reads=(("max_additional_running_prompts",),),
            message="has no effect because max_additional_running_prompts is 0 - raise it, or delete both keys",
        )


def _check_staleness(config: RlvrConfig) -> Iterator[Finding]:
    ratio_key: KeyPath = ("async_generation_ratio",)
    ahead = _steps_ahead(config)
    for path, age in _ages(config).items():
        if age is not None and age < ahead:
            yield Finding(
                path=path,
                reads=(ratio_key,),
                message=f"must be at least {ahead} with async_generation_ratio {config.async_generation_ratio:g}, got {age}: groups start "
                f"{ahead} {'step' if ahead == 1 else 'steps'} ahead, and would expire before they could be used - raise it, or lower "
                "async_generation_ratio",
            )
    if config.resampling.fill == "shrink":
        return
    path = ("resampling", "surplus")
    if config.resampling.surplus == "discard" and ahead > 0:
        yield Finding(
            path=path,
            reads=(ratio_key,),
            message=f"must be carry with async_generation_ratio {config.async_generation_ratio:g}, got discard: all groups that started "
            "ahead would be thrown away - delete it, or set async_generation_ratio to 0",
        )
    if config.resampling.surplus == "carry" and ahead == 0 and _longest_age(config) < 1:
        yield Finding(
            path=path,
            reads=(ratio_key, *_ages(config)),
            message="carry needs a max_staleness of at least 1, got 0: a carried group is a step old when it is used - set "
            "resampling.max_staleness to 1 or more",
        )


def _check_mix(config: RlvrConfig) -> Iterator[Finding]:
    shares = config.domain_interleave_probs
    if shares is None:
        return
    path: KeyPath = ("domain_interleave_probs",)
    drawn, is_open = _named_domains(config, "train")
    for domain in shares:
        if domain not in config.rewards:
            near = suggestion(domain, config.rewards, what="reward domains")
            yield Finding(path=(*path, domain), reads=(("rewards",),), message=f"expected a domain of `rewards`, got {domain!r}{near}")
        elif not is_open and domain not in drawn:
            yield Finding(
                path=(*path, domain),
                reads=(("tasks", "train"),),
                message="no source of tasks.train has this domain, so that nothing can be drawn for its share - delete it, or correct the "
                "domain of a source",
            )
    for domain in _without_share(config, shares):
        yield Finding(
            path=path,
            reads=(("rewards",), ("tasks",)),
            message=f"expected a share for each domain of tasks.train, got none for {domain}, which would never be drawn - add it, or "
            "delete its source",
        )
    total = math.fsum(shares.values())
    if abs(total - 1) > SUM_TOLERANCE:
        yield Finding(path=path, message=f"expected shares that sum to 1, got {total:.9g} - divide each by their sum")


# ---------------------------------------------------------------- keys without effect


def _idle_source_keys(path: KeyPath, source: TaskSourceConfig) -> Iterator[Finding]:
    needed, optional = _SOURCE_KEYS[source.type]
    for name in type(source).model_fields:
        if name not in (*needed, *optional, *_COMMON_SOURCE_KEYS):
            takers = " and ".join(kind for kind, keys in _SOURCE_KEYS.items() if name in (*keys[0], *keys[1]))
            yield Finding(
                path=(*path, name),
                reads=((*path, "type"),),
                message=f"does not apply to a source of type {source.type}, only to {takers} - delete it",
            )


def _idle_reward_keys(config: RlvrConfig, domain: str) -> Iterator[Finding]:
    reward = config.rewards[domain]
    path = ("rewards", domain)
    if config.reward_pool.workers == 0:
        for name in ("reward_timeout_s", "on_reward_timeout", "timeout_value"):
            yield _idle(
                (*path, name), ("reward_pool", "workers"), "0, and only worker processes can be timed out", "set workers to 1 or more"
            )
    elif reward.on_reward_timeout == "missing":
        yield _idle((*path, "timeout_value"), (*path, "on_reward_timeout"), "missing", "set on_reward_timeout to value")
    if reward.query_filter_config.type == "no_filter":
        yield _idle((*path, "query_filter_config", "metric"), (*path, "query_filter_config", "type"), "no_filter", "choose a filter")


def _idle_filling_keys(config: RlvrConfig) -> Iterator[Finding]:
    if not config.is_use_additional_prompts:
        yield _idle(("max_additional_running_prompts",), ("is_use_additional_prompts",), "false", "set is_use_additional_prompts to true")
    if config.resampling.fill == "shrink":
        reason = ("resampling", "fill"), "shrink, which draws exactly rollout_batch_size groups", "set fill to refill"
        for name in ("max_resample_rounds", "max_groups_per_batch", "on_exhausted", "collect", "surplus"):
            yield _idle(("resampling", name), *reason)
    elif config.resampling.collect == "in_order":
        reason = ("resampling", "collect"), "in_order, which waits for the groups launched first", "set collect to as_finished"
    else:
        return
    if config.is_use_additional_prompts:
        yield _idle(("is_use_additional_prompts",), *reason)
        yield _idle(("max_additional_running_prompts",), *reason)


def _idle_async_keys(config: RlvrConfig) -> Iterator[Finding]:
    stale_tokens: KeyPath = ("trainer", "stale_tokens")
    if config.async_generation_ratio > 0:
        if config.on_weight_update != "continue":
            state = f"{config.on_weight_update}, so that every response is sampled by one version of the weights"
            yield _idle(stale_tokens, ("on_weight_update",), state, "set on_weight_update to continue")
        return
    reason = ("async_generation_ratio",), "0: nothing is generated while the weights change", "set async_generation_ratio above 0"
    yield _idle(("on_weight_update",), *reason)
    yield _idle(stale_tokens, *reason)
    if config.resampling.fill == "shrink" or config.resampling.surplus != "carry":
        for path in _ages(config):
            yield Finding(
                path=path,
                reads=(("async_generation_ratio",), ("resampling", "surplus"), ("resampling", "fill")),
                message="has no effect because async_generation_ratio is 0 and no surplus is carried, so that no group outlives its batch "
                "- delete it, or raise async_generation_ratio",
            )


def _idle_mix_keys(config: RlvrConfig) -> Iterator[Finding]:
    shares = config.domain_interleave_probs
    if shares is None:
        yield _idle(("mix_on",), ("domain_interleave_probs",), "not given", "give the shares of the domains")
    elif len(shares) == 1 and not _without_share(config, shares):
        for name in ("domain_interleave_probs", "mix_on"):
            yield _idle((name,), ("tasks", "train"), "of a single domain", "add a source of another one")
    if len(config.rewards) == 1:
        yield _idle(("resampling", "absent_after_batches"), ("rewards",), "of a single domain", "add another one")


def _idle_guard_keys(config: RlvrConfig) -> Iterator[Finding]:
    if config.guard is None:
        return
    types: tuple[KeyPath, ...] = tuple(("rewards", domain, "query_filter_config", "type") for domain in config.rewards)
    filters = {reward.query_filter_config.type for reward in config.rewards.values()}
    if filters == {"no_filter"} and config.user_defined_rollout_loop_cls is None:
        yield Finding(
            path=("guard",),
            reads=(*types, ("user_defined_rollout_loop_cls",)),
            message="has no effect because every query_filter_config is no_filter, which drops nothing that could be kept - delete it, or "
            "choose a filter",
        )
    if config.guard.scope != "window":
        yield _idle(("guard", "window"), ("guard", "scope"), config.guard.scope, "set scope to window")


def _idle_trainer_keys(config: RlvrConfig) -> Iterator[Finding]:
    if config.trainer.save_every_steps is None:
        yield _idle(("trainer", "keep_checkpoints"), ("trainer", "save_every_steps"), "null", "set save_every_steps")
    advantage: KeyPath = ("trainer", "advantage")
    if config.trainer.advantage.type == "leave_one_out":
        for name in ("scale", "eps"):
            yield _idle((*advantage, name), (*advantage, "type"), "leave_one_out, which centres only", "set type to group_relative")
    elif config.trainer.advantage.scale == "none":
        yield _idle((*advantage, "eps"), (*advantage, "scale"), "none", "set scale to std")
    if config.trainer.bf16:
        yield _idle(("trainer", "logprob_tolerance"), ("trainer", "bf16"), "true, and it holds for float32", "set bf16 to false")
    if config.trainer.lr_scheduler_type == "constant":
        yield _idle(
            ("trainer", "warmup_steps"), ("trainer", "lr_scheduler_type"), "constant", "set lr_scheduler_type to constant_with_warmup"
        )


def _idle(path: KeyPath, cause: KeyPath, state: str, remedy: str) -> Finding:
    return Finding(path=path, reads=(cause,), message=f"has no effect because {dotted(cause)} is {state} - delete it, or {remedy}")


# ---------------------------------------------------------------- reading


def _source_names(source: TaskSourceConfig) -> set[str]:
    """The names by which `dataset_filter.source` may select a source. A path may be a file or a folder: only the disk knows which."""
    if source.source_name is not None:
        return {source.source_name}
    if source.path is not None:
        return {source.path.stem, source.path.name}
    return {source.name} if source.name is not None else set()


def _labels(config: RlvrConfig) -> dict[str, str]:
    """Label in the data -> its domain."""
    return {label: domain for domain, reward in config.rewards.items() for label in (domain, *reward.tag_included)}


def _named_domains(config: RlvrConfig, *sides: str) -> tuple[set[str], bool]:
    """The domains that the sources of these sides name, and whether one leaves it to its rows, or names a domain that is not there."""
    labels = _labels(config)
    named: set[str] = set()
    is_open = False
    for side, sources in _sides(config):
        for source in sources if side in sides else ():
            label = source.domain or (source.name if source.type == "reasoning_gym" else None)
            if label in labels:
                named.add(labels[label])
            else:
                is_open = True
    return named, is_open


def _without_share(config: RlvrConfig, shares: Mapping[str, float]) -> list[str]:
    """The domains without a share of which it is known that training has them: a source names them, or none but a training source can."""
    drawn, is_open = _named_domains(config, "train")
    held_out, is_held_out_open = _named_domains(config, "validation")
    if is_open and not is_held_out_open:
        drawn |= set(config.rewards) - held_out
    return [domain for domain in config.rewards if domain in drawn and domain not in shares]


def _steps_ahead(config: RlvrConfig) -> int:
    """How many steps before its batch a group may start."""
    return math.ceil(config.async_generation_ratio)


def _ages(config: RlvrConfig) -> dict[KeyPath, int | None]:
    """Every key that says how old a trained group may be, with its value."""
    return {
        ("resampling", "max_staleness"): config.resampling.max_staleness,
        **{("rewards", domain, "max_staleness"): reward.max_staleness for domain, reward in config.rewards.items()},
    }


def _longest_age(config: RlvrConfig) -> int:
    """How old a trained group of the most patient domain may be, in steps."""
    common, *of_domains = _ages(config).values()
    default = _steps_ahead(config) if common is None else common
    return max(default if age is None else age for age in of_domains)


def _sides(config: RlvrConfig) -> tuple[tuple[str, Sequence[TaskSourceConfig]], ...]:
    return (("train", config.tasks.train), ("validation", config.tasks.validation))


def _types_in(value: Any) -> set[str]:
    """Every `type` inside a filter's configuration: its own and those of the filters it is composed of."""
    if isinstance(value, Mapping):
        own = {value["type"]} if isinstance(value.get("type"), str) else set()
        return own.union(*map(_types_in, value.values()))
    if isinstance(value, (list, tuple)):
        return set().union(*map(_types_in, value))
    return set()
