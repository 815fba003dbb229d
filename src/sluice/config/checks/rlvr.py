"""Rules of an RLVR run: where prompts come from, which domains there are, and in which shares they are drawn."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Iterator, Mapping, Sequence

from sluice.config.checks import run
from sluice.config.checks.finding import Finding, Reason, idle, no_template, template_fields
from sluice.config.models import RlvrConfig, TaskSourceConfig
from sluice.config.problems import KeyPath, dotted, suggestion

SUM_TOLERANCE = 1e-6  # of shares that make a whole: thirds may be written with seven digits
ONE_VERSION = frozenset({"finish", "restart"})  # on_weight_update: one prompt, one response, sampled to its end by the same weights

_SOURCE_KEYS = {  # source type: keys it cannot do without, keys it may have; `type`, `domain` and `source_name` apply to all
    "reasoning_gym": (("name", "size"), ("seed", "params")),
    "jsonl": (("path",), ("prompt_field", "answer_field")),
    "huggingface": (("path",), ("split", "prompt_field", "answer_field")),
}
_COMMON_SOURCE_KEYS = ("type", "domain", "source_name")


def contradictions(config: RlvrConfig) -> Iterator[Finding]:
    """Settings that cannot all hold."""
    yield from _check_sources(config)
    yield from _check_domains(config)
    yield from _check_prompts(config)
    yield from _check_dataset_filter(config)
    yield from _check_groups(config)
    yield from _check_additional_prompts(config)
    yield from run.check_staleness(config, _ages(config))
    yield from run.check_two_engines(config)
    yield from _check_mix(config)


def without_effect(config: RlvrConfig) -> Iterator[Finding]:
    """Every key that does nothing because of another key, whether or not the user wrote it."""
    for side, sources in _sides(config):
        for index, source in enumerate(sources):
            yield from _idle_source_keys(("tasks", side, index), source)
    if not config.tasks.use_chat_template:
        yield idle(("tasks", "system_prompt"), Reason(("tasks", "use_chat_template"), "false", "set use_chat_template to true"))
    yield from _idle_validation_keys(config)
    for domain in config.rewards:
        yield from _idle_reward_keys(config, domain)
    yield from _idle_additional_prompts(config)
    yield from run.idle_filling_keys(config)
    yield from run.idle_async_keys(config, _ages(config), one_version=ONE_VERSION)
    yield from _idle_mix_keys(config)
    if config.user_defined_rollout_loop_cls is None:
        nothing = Reason(("user_defined_rollout_loop_cls",), "not given", "name a loop with process_new_prompt")
        yield idle(("is_num_return_sequences_expand",), nothing)
    yield from _idle_guard(config)
    yield from run.idle_guard_keys(config)
    yield from run.idle_trainer_keys(config)


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
        yield Finding(path=path, message=no_template(err))
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


def _check_groups(config: RlvrConfig) -> Iterator[Finding]:
    size, size_key = config.num_return_sequences_in_group, ("num_return_sequences_in_group",)
    yield from run.check_group_size(
        config,
        size=size,
        size_key=size_key,
        redundancy=config.group_size_redundancy,
        redundancy_key=("group_size_redundancy",),
        member="response",
    )
    for domain, reward in config.rewards.items():
        yield from run.check_spread(("rewards", domain, "query_filter_config"), reward.query_filter_config, size=size, size_key=size_key)
    batch = config.rollout_batch_size
    yield from run.check_most_groups(config, groups=batch, told=f"rollout_batch_size ({batch})", reads=(("rollout_batch_size",),))


def _check_additional_prompts(config: RlvrConfig) -> Iterator[Finding]:
    if config.is_use_additional_prompts and config.max_additional_running_prompts == 0:
        yield Finding(
            path=("is_use_additional_prompts",),
            reads=(("max_additional_running_prompts",),),
            message="has no effect because max_additional_running_prompts is 0 - raise it, or delete both keys",
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


def _idle_validation_keys(config: RlvrConfig) -> Iterator[Finding]:
    if not config.tasks.validation:
        nothing = Reason(("tasks", "validation"), "empty", "add a source there")
        yield idle(("tasks", "exclude_train_from_validation"), nothing)
        for name in type(config.validation).model_fields:
            yield idle(("validation", name), nothing)
    elif config.validation.temperature == 0:
        greedy = Reason(("validation", "temperature"), "0, so that every repeat gives the same answer", "raise that")
        yield idle(("validation", "repeats"), greedy)


def _idle_reward_keys(config: RlvrConfig, domain: str) -> Iterator[Finding]:
    reward = config.rewards[domain]
    path = ("rewards", domain)
    if config.reward_pool.workers == 0:
        no_limit = Reason(("reward_pool", "workers"), "0, and only worker processes can be timed out", "set workers to 1 or more")
        for name in ("reward_timeout_s", "on_reward_timeout", "timeout_value"):
            yield idle((*path, name), no_limit)
    elif reward.on_reward_timeout == "missing":
        yield idle((*path, "timeout_value"), Reason((*path, "on_reward_timeout"), "missing", "set on_reward_timeout to value"))
    yield from run.idle_filter_keys((*path, "query_filter_config"), reward.query_filter_config)


def _idle_additional_prompts(config: RlvrConfig) -> Iterator[Finding]:
    most: KeyPath = ("max_additional_running_prompts",)
    if not config.is_use_additional_prompts:
        yield idle(most, Reason(("is_use_additional_prompts",), "false", "set is_use_additional_prompts to true"))
    elif (reason := run.nothing_additional(config)) is not None:
        yield idle(("is_use_additional_prompts",), reason)
        yield idle(most, reason)


def _idle_mix_keys(config: RlvrConfig) -> Iterator[Finding]:
    shares = config.domain_interleave_probs
    if shares is None:
        yield idle(("mix_on",), Reason(("domain_interleave_probs",), "not given", "give the shares of the domains"))
    elif len(shares) == 1 and not _without_share(config, shares):
        for name in ("domain_interleave_probs", "mix_on"):
            yield idle((name,), Reason(("tasks", "train"), "of a single domain", "add a source of another one"))
    if len(config.rewards) == 1:
        yield idle(("resampling", "absent_after_batches"), Reason(("rewards",), "of a single domain", "add another one"))


def _idle_guard(config: RlvrConfig) -> Iterator[Finding]:
    if config.guard is None or config.user_defined_rollout_loop_cls is not None:
        return
    types: tuple[KeyPath, ...] = tuple(("rewards", domain, "query_filter_config", "type") for domain in config.rewards)
    if {reward.query_filter_config.type for reward in config.rewards.values()} == {"no_filter"}:
        yield Finding(
            path=("guard",),
            reads=(*types, ("user_defined_rollout_loop_cls",)),
            message="has no effect because every query_filter_config is no_filter, which drops nothing that could be kept - delete it, or "
            "choose a filter",
        )


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


def _ages(config: RlvrConfig) -> dict[KeyPath, int | None]:
    """Every key that says how old a trained group may be, with its value."""
    return {
        ("resampling", "max_staleness"): config.resampling.max_staleness,
        **{("rewards", domain, "max_staleness"): reward.max_staleness for domain, reward in config.rewards.items()},
    }


def _sides(config: RlvrConfig) -> tuple[tuple[str, Sequence[TaskSourceConfig]], ...]:
    return (("train", config.tasks.train), ("validation", config.tasks.validation))
