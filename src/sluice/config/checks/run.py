"""Rules of every run: how big a group is, how a batch is filled, how old groups may be, the guard and the trainer."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from sluice.config.checks.correction import check_correction
from sluice.config.checks.finding import Finding, Reason, idle, types_in
from sluice.config.models import LARGEST_GROUP, FilterConfig, RunConfig
from sluice.config.problems import KeyPath, dotted

SPREAD_FILTERS = frozenset({"std_filter"})  # filters on groups that need two members to see a difference

Ages = Mapping[KeyPath, int | None]
"""Every key that says how old a trained group may be, with its value."""


# ---------------------------------------------------------------- contradictions


def check_group_size(
    config: RunConfig, *, size: int, size_key: KeyPath, redundancy: int, redundancy_key: KeyPath, member: str
) -> Iterator[Finding]:
    """Groups that teach something and fit into memory. `member`: what a run calls one of them."""
    least = config.resampling.min_members
    if least is not None and least > size:
        yield Finding(
            path=("resampling", "min_members"), reads=(size_key,), message=f"must not be above {dotted(size_key)} ({size}), got {least}"
        )
    if size + redundancy > LARGEST_GROUP:
        yield Finding(
            path=redundancy_key,
            reads=(size_key,),
            message=f"must be at most {LARGEST_GROUP - size} with {dotted(size_key)} {size}, got {redundancy}: a group has at most "
            f"{LARGEST_GROUP} members at once - lower one of the two",
        )
    if size == 1:
        yield Finding(
            path=size_key, message=f"must be at least 2, got 1: the advantage of a lone {member} is 0, nothing would be learned - raise it"
        )


def check_spread(path: KeyPath, group_filter: FilterConfig, *, size: int, size_key: KeyPath) -> Iterator[Finding]:
    """A filter that needs a difference between members has at least two of them."""
    if size > 1:
        return
    for name in sorted(types_in(group_filter.model_dump()) & SPREAD_FILTERS):
        yield Finding(
            path=path,
            reads=(size_key,),
            message=f"{name} needs a spread, and {dotted(size_key)} {size} has none - raise that or choose another filter",
        )


def check_most_groups(config: RunConfig, *, groups: int, told: str, reads: tuple[KeyPath, ...]) -> Iterator[Finding]:
    """The bound on groups leaves room for one batch of them. `told`: where their number comes from."""
    limit = config.resampling.max_groups_per_batch
    if limit is not None and limit < groups and config.resampling.fill == "refill":
        yield Finding(
            path=("resampling", "max_groups_per_batch"),
            reads=(*reads, ("resampling", "fill")),
            message=f"must be at least {told}, got {limit}: no batch could ever be filled",
        )


def check_staleness(config: RunConfig, ages: Ages) -> Iterator[Finding]:
    """Groups are not too old when they are used."""
    ratio_key: KeyPath = ("async_generation_ratio",)
    ahead = steps_ahead(config)
    for path, age in ages.items():
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
    if config.resampling.surplus == "carry" and ahead == 0 and _longest_age(config, ages) < 1:
        yield Finding(
            path=path,
            reads=(ratio_key, *ages),
            message="carry needs a max_staleness of at least 1, got 0: a carried group is a step old when it is used - set "
            "resampling.max_staleness to 1 or more",
        )


def check_two_engines(config: RunConfig) -> Iterator[Finding]:
    """What is done about the distance between trainer and engine."""
    correction = config.train_infer_correction
    if correction is not None:
        at: KeyPath = ("train_infer_correction",)
        yield from check_correction(correction, at)
        if not correction.is_weight.detach:
            yield Finding(
                path=(*at, "is_weight", "detach"),
                message="must be true in a run, got false: its old log-probs are computed without gradients - delete it; false is for "
                "whoever calls the library",
            )
    precision, path = config.engine.precision, ("trainer", "logprob_tolerance")
    if precision != "float32" and not config.trainer.bf16 and config.trainer.logprob_tolerance is not None:
        yield Finding(
            path=path,
            reads=(("engine", "precision"), ("trainer", "bf16")),
            message=f"must be null with engine.precision {precision}, got {config.trainer.logprob_tolerance:g}: an engine of another "
            "precision than the trainer's never gives the same log-probs - write null, so that they are compared and recorded only",
        )


# ---------------------------------------------------------------- keys without effect


def idle_filling_keys(config: RunConfig) -> Iterator[Finding]:
    """How a batch is filled up, where nothing is filled up."""
    if config.resampling.fill == "shrink":
        for name in ("max_resample_rounds", "max_groups_per_batch", "on_exhausted", "collect", "surplus"):
            yield idle(("resampling", name), _shrinks())


def nothing_additional(config: RunConfig) -> Reason | None:
    """Why no groups are launched beyond those that a batch needs. None: they may be."""
    if config.resampling.fill == "shrink":
        return _shrinks()
    if config.resampling.collect == "in_order":
        return Reason(("resampling", "collect"), "in_order, which waits for the groups launched first", "set collect to as_finished")
    return None


def idle_async_keys(config: RunConfig, ages: Ages, *, one_version: Collection[str]) -> Iterator[Finding]:
    """What happens while weights change, where nothing does.

    `one_version`: the values of `on_weight_update` with which all tokens of a rollout are sampled by the same weights.
    """
    stale_tokens: KeyPath = ("trainer", "stale_tokens")
    if config.async_generation_ratio > 0:
        if config.on_weight_update in one_version:
            state = f"{config.on_weight_update}, so that every response is sampled by one version of the weights"
            yield idle(stale_tokens, Reason(("on_weight_update",), state, "set on_weight_update to continue"))
        return
    synchronous = Reason(
        ("async_generation_ratio",), "0: nothing is generated while the weights change", "set async_generation_ratio above 0"
    )
    yield idle(("on_weight_update",), synchronous)
    yield idle(stale_tokens, synchronous)
    if config.resampling.fill == "shrink" or config.resampling.surplus != "carry":
        for path in ages:
            yield Finding(
                path=path,
                reads=(("async_generation_ratio",), ("resampling", "surplus"), ("resampling", "fill")),
                message="has no effect because async_generation_ratio is 0 and no surplus is carried, so that no group outlives its batch "
                "- delete it, or raise async_generation_ratio",
            )


def idle_guard_keys(config: RunConfig) -> Iterator[Finding]:
    """How far the guard looks back, where it looks back on everything."""
    if config.guard is not None and config.guard.scope != "window":
        yield idle(("guard", "window"), Reason(("guard", "scope"), config.guard.scope, "set scope to window"))


def idle_trainer_keys(config: RunConfig) -> Iterator[Finding]:
    """What other keys of the trainer make idle."""
    trainer = config.trainer
    if trainer.save_every_steps is None:
        yield idle(("trainer", "keep_checkpoints"), Reason(("trainer", "save_every_steps"), "null", "set save_every_steps"))
    at: KeyPath = ("trainer", "advantage")
    if trainer.advantage.type == "leave_one_out":
        for name in ("scale", "eps"):
            yield idle((*at, name), Reason((*at, "type"), "leave_one_out, which centres only", "set type to group_relative"))
    elif trainer.advantage.scale == "none":
        yield idle((*at, "eps"), Reason((*at, "scale"), "none", "set scale to std"))
    if trainer.bf16:
        yield idle(("trainer", "logprob_tolerance"), Reason(("trainer", "bf16"), "true, and it holds for float32", "set bf16 to false"))
    if trainer.lr_scheduler_type == "constant":
        remedy = "set lr_scheduler_type to constant_with_warmup"
        yield idle(("trainer", "warmup_steps"), Reason(("trainer", "lr_scheduler_type"), "constant", remedy))


def idle_filter_keys(path: KeyPath, group_filter: FilterConfig) -> Iterator[Finding]:
    """What a filter reads, where it reads nothing."""
    if group_filter.type == "no_filter":
        yield idle((*path, "metric"), Reason((*path, "type"), "no_filter", "choose a filter"))


# ---------------------------------------------------------------- reading


def steps_ahead(config: RunConfig) -> int:
    """How many steps before its batch a group may start."""
    return math.ceil(config.async_generation_ratio)


def _longest_age(config: RunConfig, ages: Ages) -> int:
    """How old a trained group of the most patient domain may be, in steps."""
    common, *of_domains = ages.values()
    default = steps_ahead(config) if common is None else common
    return max((default if age is None else age for age in of_domains), default=default)


def _shrinks() -> Reason:
    return Reason(("resampling", "fill"), "shrink, which draws exactly the groups of one batch", "set fill to refill")
