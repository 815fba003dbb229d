"""Filters decide after the fact: a response filter judges one finished response, a query filter judges a finished group.

A group filter is a query filter on a group of trajectories: it looks at what befell the members as well as at their rewards.

Both answer with a `Verdict`: keep or drop, with a reason, a category and the numbers it was decided on. They read the raw task reward, or
the metric that is named, never a shaped reward. A query filter also takes the rewards alone, as a plain sequence.

- `base.py`: what a filter is, its two kinds, the filters of a domain; `context.py`: what a filter knows besides its arguments
- `group_rewards.py`: from whatever holds the rewards of a group to the few numbers that filters decide on; `scores.py`: scores by name
- `no_filter.py`, `mean_filter.py`, `std_filter.py`: query filters
- `missing_member.py`, `env_faults.py`, `drop_flag.py`, `min_survivors.py`: group filters; `whole_group.py`: what no group filter keeps
- `reward_range.py`, `length.py`, `format.py`, `finish_reason.py`: response filters
- `compose.py`: `all`, `any`, `not`, for both kinds
- `custom.py`: your own, by import path; `group_class.py`: the class of `group_filter_cls`; `state.py`: what they remember, for checkpoints
- `guard.py`: how large a share of the judged groups may be dropped
- `build.py`: the tables from `type` to class, the checks of a configuration, `build_...`; `naming.py`: the nearest valid name

To add one: a file with a subclass of `RewardFilter` (query) or `RolloutFilter` (response) whose fields are its arguments and whose `rule`
answers with `self.keep(...)` or `self.drop(reason, ...)`, its class in the table in `build.py`, and a test. A `MemberFilter` (group) has an
`is_faulty` in its place.
"""

from __future__ import annotations

from sluice.filters.base import DomainFilters, MemberFilter, QueryFilter, ResponseFilter, RewardFilter, RolloutFilter
from sluice.filters.build import build_domain_filters, build_group_filter, build_query_filter, build_response_filter
from sluice.filters.context import FilterContext
from sluice.filters.group_rewards import GroupRewards, RewardStats, number_of, sum_steps
from sluice.filters.guard import RatioGuard, build_guard
from sluice.filters.state import filters_state, load_filters_state

__all__ = [
    "DomainFilters",
    "FilterContext",
    "GroupRewards",
    "MemberFilter",
    "QueryFilter",
    "RatioGuard",
    "ResponseFilter",
    "RewardFilter",
    "RewardStats",
    "RolloutFilter",
    "build_domain_filters",
    "build_group_filter",
    "build_guard",
    "build_query_filter",
    "build_response_filter",
    "filters_state",
    "load_filters_state",
    "number_of",
    "sum_steps",
]
