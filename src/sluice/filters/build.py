"""From configuration to filters: the tables of types, and the checks that make a bad setting fail while loading."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, fields, replace
from numbers import Integral, Real
from typing import Any, Final, NoReturn, TypeVar

from sluice.config.agentic import EnvManagerConfig
from sluice.config.models import FilterConfig, RewardConfig
from sluice.errors import ConfigError
from sluice.filters.base import DomainFilters, Filter, QueryFilter, ResponseFilter, RewardFilter, RolloutFilter
from sluice.filters.compose import AllOf, AnyOf, Not
from sluice.filters.context import FilterContext, Mode
from sluice.filters.custom import Custom, load
from sluice.filters.drop_flag import DropFlag
from sluice.filters.env_faults import EnvFailed, EnvTimeout
from sluice.filters.finish_reason import FinishReasonFilter
from sluice.filters.format import Format
from sluice.filters.group_class import load_class
from sluice.filters.group_rewards import GroupRewards
from sluice.filters.length import Length
from sluice.filters.mean_filter import MeanFilter
from sluice.filters.min_survivors import MinSurvivors
from sluice.filters.missing_member import MissingMember
from sluice.filters.naming import nearest
from sluice.filters.no_filter import NoFilter
from sluice.filters.reward_range import RewardRange
from sluice.filters.std_filter import StdFilter
from sluice.filters.whole_group import WholeGroup
from sluice.types import Category, Rollout

T = TypeVar("T")

QUERY_FILTERS: Final[Mapping[str, type[Filter[GroupRewards]]]] = {cls.name: cls for cls in (NoFilter, MeanFilter, StdFilter)}
GROUP_FILTERS: Final[Mapping[str, type[Filter[GroupRewards]]]] = {
    **QUERY_FILTERS,
    **{cls.name: cls for cls in (MissingMember, EnvTimeout, EnvFailed, DropFlag, MinSurvivors)},
}
RESPONSE_FILTERS: Final[Mapping[str, type[Filter[Rollout]]]] = {cls.name: cls for cls in (RewardRange, Length, Format, FinishReasonFilter)}
COMPOSITIONS: Final = ("all", "any", "not")
GROUP_CATEGORY: Final[Category] = "invalid"  # of a group that user code drops without a word: never to be trained, whatever the bounds say

CONFIG_KEYS: Final = tuple(FilterConfig.model_fields)


def build_query_filter(
    config: FilterConfig | Mapping[str, Any], *, where: str = "query_filter", min_members: int | None = None, group_size: int | None = None
) -> QueryFilter:
    """Build a filter on groups from `{"type": ..., "filter_args": {...}, "metric": ...}`.

    `type` is `no_filter`, `mean_filter`, `std_filter`, a composition (`all`, `any` with `filters: [...]`; `not` with `filter: {...}`) or an
    import path. `where` is the path of the setting, for messages. `min_members` is the number of members with a reward that still make a
    group (None: a missing reward makes it incomplete). `group_size` is the configured size; with it, a group of which one member is left is
    no group of one. Raises `ConfigError` with the path of the bad key. The filter's `.judge` takes a `Group` or one reward per member.
    """
    for name, number in (("min_members", min_members), ("group_size", group_size)):
        if number is not None and number < 1:
            raise ConfigError(f"{where}: {name} must be at least 1, got {number} - leave it out if it is not known")
    context = FilterContext(where=where, min_members=min_members, group_size=group_size)
    return _build(config, context, QUERY_FILTERS, RewardFilter.drop_category)


def build_group_filter(
    manager: EnvManagerConfig,
    *,
    mode: Mode,
    where: str,
    min_members: int | None,
    config: object = None,
    adapt: Callable[[object], object] | None = None,
) -> QueryFilter:
    """Build the filter on groups of trajectories that `manager` names: `group_filter_config`, or the class of `group_filter_cls`.

    `where` is the path of the manager, for messages ("train_env_manager"). `config` is what a class gets as its configuration. `adapt` gets
    an object of a class with `.filter` and answers with one that has `.judge` instead (and the methods of state, if it has any); None: such
    a class is refused. Of a manager that names neither, every whole group is kept.

    Whatever the filter says, a group that is not whole is not kept. Raises `ConfigError` with the path of the bad key.
    """
    context = FilterContext(
        where=f"{where}.group_filter_config",
        min_members=min_members,
        group_size=manager.group_size,
        group_size_key=f"{where}.group_size",
        mode=mode,
    )
    if manager.group_filter_cls is None:
        chosen = manager.group_filter_config or FilterConfig(type=NoFilter.name)
        inner = _build(chosen, context, GROUP_FILTERS, GROUP_CATEGORY)
        return inner if isinstance(inner, RewardFilter) else WholeGroup(context=context, filter=inner)
    if manager.group_filter_config is not None:
        raise ConfigError(
            f"{where}: expected group_filter_cls or group_filter_config, got both - leave one out, or name the class as a type inside "
            "group_filter_config"
        )
    path, context = manager.group_filter_cls, replace(context, where=f"{where}.group_filter_cls")
    function, memory = load_class(path, manager, config, mode, context.where, adapt)
    custom = Custom(context=context, path=path, function=function, category=GROUP_CATEGORY, memory=memory, sees_all=True)
    return WholeGroup(context=context, filter=custom)


def build_response_filter(config: FilterConfig | Mapping[str, Any], *, where: str = "response_filter") -> ResponseFilter:
    """Build a filter on single responses from `{"type": ..., "filter_args": {...}, "metric": ...}`.

    `type` is `reward_range`, `length`, `format`, `finish_reason`, a composition or an import path. Raises `ConfigError` with the path of
    the bad key. The filter's `.judge` takes a `Rollout`.
    """
    return _build(config, FilterContext(where=where), RESPONSE_FILTERS, RolloutFilter.drop_category)


class DomainTable(dict[str, DomainFilters]):
    """Filters by domain; asking for an unknown domain says which ones there are."""

    def __missing__(self, domain: str) -> NoReturn:
        raise ConfigError(f"rewards: expected a domain out of {sorted(self)}, got {domain!r} - {nearest(domain, self)}")


def build_domain_filters(
    rewards: Mapping[str, RewardConfig], group_size: int, *, min_members: int | None = None
) -> Mapping[str, DomainFilters]:
    """Build the filters of every reward domain, and report every bad setting in one `ConfigError`, each with its full key path."""
    table = DomainTable()
    faults: list[str] = []
    for domain, config in rewards.items():
        query: QueryFilter | None = None
        response: ResponseFilter | None = None
        try:
            where = f"rewards.{domain}.query_filter_config"
            query = build_query_filter(config.query_filter_config, where=where, min_members=min_members, group_size=group_size)
        except ConfigError as error:
            faults.append(str(error))
        if config.response_filter_config is not None:
            try:
                response = build_response_filter(config.response_filter_config, where=f"rewards.{domain}.response_filter_config")
            except ConfigError as error:
                faults.append(str(error))
        if query is not None:
            table[domain] = DomainFilters(query=query, response=response)
    if faults:
        raise ConfigError("\n".join(faults))
    return table


def _build(config: object, context: FilterContext, known: Mapping[str, type[Filter[T]]], category: Category) -> Filter[T]:
    where = context.where
    kind, arguments, metric = _read(config, where)
    if kind in COMPOSITIONS:
        _refuse_metric(metric, kind, where)
        return _compose(kind, arguments, context, known, category)
    if kind in known:
        cls = known[kind]
        if not cls.reads_metric:
            _refuse_metric(metric, kind, where)
        context = replace(context, metric=metric)
        return cls(context=context, **_checked(cls, arguments, context))
    if "." in kind:
        _refuse_metric(metric, kind, where)
        function, memory = load(kind, arguments, context)
        sees_all = context.mode is not None
        return Custom(context=context, path=kind, function=function, category=category, memory=memory, sees_all=sees_all)
    raise ConfigError(
        f"{where}.type must be one of {sorted(known)}, {list(COMPOSITIONS)} or an import path package.module.name, got {kind!r} - "
        + nearest(kind, (*known, *COMPOSITIONS))
    )


def _read(config: object, where: str) -> tuple[str, Mapping[str, Any], str | None]:
    """Type, arguments and metric of one filter."""
    if isinstance(config, FilterConfig):
        return config.type, config.filter_args, config.metric
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where} must be a mapping with the key type, got {config!r} - write {{type: ...}}")
    for key in config:
        if key not in CONFIG_KEYS:
            raise ConfigError(f"{where}.{key} is no setting, expected {list(CONFIG_KEYS)} - {nearest(key, CONFIG_KEYS)}")
    if "type" not in config:
        raise ConfigError(f"{where}.type must be given, got only {sorted(config)} - name a filter")
    kind, arguments, metric = config["type"], config.get("filter_args"), config.get("metric")
    if not isinstance(kind, str):
        raise ConfigError(f"{where}.type must be the name of a filter, got {kind!r} - write it as text")
    if not isinstance(arguments, Mapping | None):
        raise ConfigError(f"{where}.filter_args must be a mapping, got {arguments!r} - write {{name: value}}")
    if not isinstance(metric, str | None):
        raise ConfigError(f"{where}.metric must be the name of a metric, got {metric!r} - write it as text, or leave it out for the reward")
    return kind, {} if arguments is None else arguments, metric


def _refuse_metric(metric: str | None, kind: str, where: str) -> None:
    if metric is not None:
        advice = "give it to the inner filters" if kind in COMPOSITIONS else "remove it"
        raise ConfigError(f"{where}.metric has no effect on {kind}, got {metric!r} - {advice}")


def _compose(
    kind: str, arguments: Mapping[str, Any], context: FilterContext, known: Mapping[str, type[Filter[T]]], category: Category
) -> Filter[T]:
    def inner(config: object, path: str) -> Filter[T]:
        return _build(config, replace(context, where=f"{context.where}.filter_args.{path}"), known, category)

    wanted = "filter" if kind == "not" else "filters"
    _refuse_unknown(arguments, (wanted,), kind, context.where)
    value = arguments.get(wanted)
    if kind == "not":
        if value is None:
            raise context.wrong("filter", "a filter", "nothing", "write {type: ...}")
        negated = inner(value, "filter")
        return Not(context=context, filter=negated, category=getattr(negated, "drop_category", category))
    if not isinstance(value, list | tuple) or not value:
        raise context.wrong(
            "filters", "a list of at least one filter", "nothing" if value is None else repr(value), "write [{type: ...}, ...]"
        )
    filters = tuple(inner(config, f"filters[{index}]") for index, config in enumerate(value))
    return AllOf(context=context, filters=filters) if kind == "all" else AnyOf(context=context, filters=filters)


def _refuse_unknown(arguments: Mapping[str, Any], known: tuple[str, ...], kind: str, where: str) -> None:
    for name in arguments:
        if name not in known:
            takes = f"expected {list(known)}" if known else "which takes none"
            raise ConfigError(f"{where}.filter_args.{name} is no argument of {kind}, {takes} - {nearest(name, known)}")


def _checked(cls: type[Filter[Any]], arguments: Mapping[str, Any], context: FilterContext) -> dict[str, Any]:
    """Arguments of the right names and types; the class itself checks how they fit together."""
    known: dict[str, Field[Any]] = {field.name: field for field in fields(cls) if field.init and field.name != "context"}
    _refuse_unknown(arguments, tuple(known), cls.name, context.where)
    checked: dict[str, Any] = {}
    for name, field in known.items():
        # Text under `from __future__ import annotations`, else a class or a union.
        declared = field.type.__name__ if isinstance(field.type, type) else str(field.type)
        optional = declared.endswith(" | None")
        if declared.removesuffix(" | None") not in ARGUMENT_TYPES:
            raise TypeError(f"{cls.__name__}.{name}: a filter's argument must be one of {list(ARGUMENT_TYPES)}, got {declared}")
        expected, convert = ARGUMENT_TYPES[declared.removesuffix(" | None")]
        if name not in arguments or (optional and arguments[name] is None):
            if name in arguments:
                checked[name] = None
            elif not optional and field.default is field.default_factory:  # both MISSING
                raise context.wrong(name, "given", "nothing", f"it is {expected}")
            continue
        value = arguments[name]
        try:
            checked[name] = convert(value)
        except (TypeError, ValueError, OverflowError):
            raise context.wrong(name, expected, f"{value!r} ({type(value).__name__})", "correct the value") from None
    return checked


def _to_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise TypeError
    return float(value)


def _to_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError
    return int(value)


def _to_bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _to_str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _to_list_of_str(value: object) -> list[str]:
    if not isinstance(value, list | tuple):
        raise TypeError
    return [_to_str(entry) for entry in value]


ARGUMENT_TYPES: Final = {
    "float": ("a finite number", _to_float),
    "int": ("a whole number", _to_int),
    "bool": ("true or false", _to_bool),
    "str": ("a text", _to_str),
    "list[str]": ("a list of texts", _to_list_of_str),
}
"""What the types of a filter's fields mean in a configuration: words for a message, and the conversion (TypeError when it does not fit)."""
