"""The door for ROLL users: custom code written for ROLL runs after changing only its import lines.

    data.py          DataProto: rows of tensors, objects and notes
    remote.py        rows kept in a store, freed by `drop()` and at the end of their group
    requests.py      requests, reports of the engine, and the rows made of both
    filters.py       query_filter, response_filter (True keeps)
    loop.py          UserDefinedRolloutLoop, and what runs a class of that form
    context.py       RolloutContext: what a loop knows and can do for one prompt
    members.py       a trajectory as the DataProto that a group filter sees
    group_filter.py  GroupFilter (True drops), and what turns a class of that form into one of ours
    queue.py         a GroupQueue of DataProto, for environment managers of one's own
    correction.py    the train-infer correction on a DataProto
    inside.py        the other way round: our filters inside ROLL
    notes.py         what the notes of several rows say of one
    scope.py         which group the running code belongs to

Names load on first use, and torch and tensordict with them. What is another way here than in ROLL, and how to move, is in docs/roll.md. A
further function of ROLL goes beside its kind, and into the table below.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.config import AgenticConfig as AgenticConfig
    from sluice.config import EnvManagerConfig as EnvManagerConfig
    from sluice.config import RlvrConfig
    from sluice.roll.context import RolloutContext as RolloutContext
    from sluice.roll.correction import apply_train_infer_correction as apply_train_infer_correction
    from sluice.roll.data import DataProto as DataProto
    from sluice.roll.data import DataProtoItem as DataProtoItem
    from sluice.roll.filters import query_filter as query_filter
    from sluice.roll.filters import response_filter as response_filter
    from sluice.roll.group_filter import GroupFilter as GroupFilter
    from sluice.roll.group_filter import adapt_group_filter as adapt_group_filter
    from sluice.roll.inside import FilterForRoll as FilterForRoll
    from sluice.roll.loop import UserDefinedRolloutLoop as UserDefinedRolloutLoop
    from sluice.roll.loop import adapt_loop as adapt_loop
    from sluice.roll.members import member_of as member_of
    from sluice.roll.members import members_of as members_of
    from sluice.roll.queue import build_group_queue as build_group_queue
    from sluice.roll.remote import InProcessStore as InProcessStore
    from sluice.roll.remote import RemoteStore as RemoteStore
    from sluice.roll.remote import remote_store as remote_store
    from sluice.roll.remote import use_remote_store as use_remote_store
    from sluice.roll.requests import expand_requests as expand_requests
    from sluice.roll.requests import expand_responses as expand_responses
    from sluice.roll.requests import is_report_data_finished as is_report_data_finished
    from sluice.roll.requests import postprocess_output_data as postprocess_output_data

    RLVRConfig = RlvrConfig

_HOME_OF = {
    "DataProto": "data",
    "DataProtoItem": "data",
    "FilterForRoll": "inside",
    "GroupFilter": "group_filter",
    "InProcessStore": "remote",
    "RemoteStore": "remote",
    "RolloutContext": "context",
    "UserDefinedRolloutLoop": "loop",
    "adapt_group_filter": "group_filter",
    "adapt_loop": "loop",
    "apply_train_infer_correction": "correction",
    "build_group_queue": "queue",
    "expand_requests": "requests",
    "expand_responses": "requests",
    "is_report_data_finished": "requests",
    "member_of": "members",
    "members_of": "members",
    "postprocess_output_data": "requests",
    "query_filter": "filters",
    "remote_store": "remote",
    "response_filter": "filters",
    "use_remote_store": "remote",
}

_CONFIGS = {"AgenticConfig": "AgenticConfig", "EnvManagerConfig": "EnvManagerConfig", "RLVRConfig": "RlvrConfig"}
"""Classes of `sluice.config` by the names that ROLL has for them."""

__all__ = [*sorted({*_HOME_OF, *_CONFIGS})]  # noqa: PLE0604 - names only


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name in _HOME_OF:
        value = getattr(import_module(f"sluice.roll.{_HOME_OF[name]}"), name)
    elif name in _CONFIGS:
        value = getattr(import_module("sluice.config"), _CONFIGS[name])
    else:
        raise AttributeError(f"module 'sluice.roll' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
