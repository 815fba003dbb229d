"""`query_filter` and `response_filter` as ROLL's loops call them. True keeps.

The configuration is that of the responses' domain, `config.rewards[domain].query_filter_config`: of a run of ours, of ROLL's RLVRConfig, or
any object or mapping of that form. The rules are those of `sluice.filters`, and so is the exactness: equal rewards have no spread.

Inside a loop of a run the filter that the run has built is asked, whose memory is part of checkpoints, and its verdict with reason and
evidence is the one that is recorded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast, get_args

import torch

from sluice.errors import FilterError
from sluice.filters import build_query_filter, build_response_filter
from sluice.filters.base import Filter
from sluice.filters.naming import nearest
from sluice.filters.no_filter import NoFilter
from sluice.roll.data import METRICS, DataProto
from sluice.roll.notes import metrics_of_row
from sluice.roll.requests import expand_responses
from sluice.roll.scope import current
from sluice.types import Rollout, RolloutFinish, Turn, Verdict

RESPONSE_VERDICT: Final = "response_verdict"
"""Column of responses that the run has judged already."""

MOST_BUILT: Final = 256  # filters that are remembered: more than a run has domains
_FINISHES: Final = frozenset(get_args(RolloutFinish))


def query_filter(data_list: Sequence[DataProto], config: Any) -> bool:
    """Whether a group of responses to one prompt is kept: True keeps.

    Elements with several responses are split first, so that one element that holds a whole group is judged like its rows. A single
    response is kept unseen. Raises `FilterError` for no response, responses of several domains, or a domain that the configuration does not
    have.
    """
    if data_list is None:
        raise FilterError("query_filter: expected the responses to one prompt, got None - return None to give the prompt up")
    rows = expand_responses(data_list)
    if not rows:
        raise FilterError("query_filter: expected the responses to one prompt, got none - return None to give the prompt up")
    if len(rows) == 1:
        return True
    group = current.get()
    return (judge_rows(rows, config) if group is None else group.judge(rows, config)).keep


def response_filter(data_item: DataProto, config: Any) -> bool:
    """Whether a response is kept, by `response_filter_config` of its domain, which is really read here; without one: True.

    A response that the run has judged already is not judged again. Raises `FilterError` for more than one response.
    """
    if not isinstance(data_item, DataProto):
        raise FilterError(f"response_filter: expected one response, got {type(data_item).__name__} - give a DataProto of one row")
    if len(data_item) != 1:
        raise FilterError(f"response_filter: expected one response, got {len(data_item)} - split them: data[index]")
    judged = data_item.non_tensor_batch.get(RESPONSE_VERDICT)
    if judged is not None and judged[0] is not None:  # None: its group has left before it could be
        return cast("Verdict", judged[0]).keep
    domain, reward = _reward_config(data_item, config)
    settings = _entry(reward, "response_filter_config")
    if settings is None or _settings(settings)[0] == NoFilter.name:
        return True
    return _once(build_response_filter, settings, f"rewards.{domain}.response_filter_config").judge(rollout_of_row(data_item)).keep


def judge_rows(rows: Sequence[DataProto], config: Any) -> Verdict:
    """The verdict of the domain's query filter on responses of one row each, by their rewards alone."""
    labels = {_label(row) for row in rows}
    if len(labels) > 1:
        raise FilterError(
            f"query_filter: expected the responses of one prompt, and so of one domain, got {sorted(labels)} - ask for each prompt alone"
        )
    domain, reward = _reward_config(rows[0], config)
    settings = _entry(reward, "query_filter_config")
    settings = {} if settings is None else settings
    built = _once(build_query_filter, settings, f"rewards.{domain}.query_filter_config")
    metric = _settings(settings)[2]
    if metric is None:
        return built.judge([reward_of(row) for row in rows])
    scores = [metrics_of_row(row.meta_info.get(METRICS), 0, 1) for row in rows]
    is_there = any(metric in own for own in scores)  # one of several that lacks it has no reward; of none it is a mistake
    return built.judge([own if metric in own or not is_there else None for own in scores])


def reward_of(row: DataProto) -> float:
    """The reward of a response as it stands in the batch; NaN when it has none. Raises `FilterError` unless there is one entry."""
    rewards = _column(row, "response_level_rewards")
    if rewards.numel() != 1:
        raise FilterError(
            f"response_level_rewards: expected one reward for each response, shape [1], got {list(rewards.shape)} - a response has one vote"
        )
    return float(rewards.reshape(-1)[0])


def rollout_of_row(row: DataProto) -> Rollout:
    """A response as the filters of `sluice.filters` know it, made of its columns."""
    sampled = _column(row, "response_mask")[0].bool()
    ids = _column(row, "input_ids")[0][sampled].cpu().numpy()
    logprobs = torch.zeros(len(sampled))
    if "infer_logprobs" in (row.batch.keys() if row.batch is not None else ()):
        logprobs[1:] = row["infer_logprobs"][0]
    told = row.meta_info.get("stop_reason") or next(iter(row.meta_info.get("finish_reasons", ())), "stop")
    finish = cast("RolloutFinish", told if told in _FINISHES else "stop")
    texts = row.non_tensor_batch.get("response_text")
    turn = Turn(
        prompt_ids=row["input_ids"][0][_column(row, "prompt_mask")[0].bool()].cpu().numpy(),
        token_ids=ids,
        inference_logprobs=logprobs[sampled].numpy(),
        text="" if texts is None else str(texts[0]),
        finish_reason="length" if finish == "length" else "stop",
        policy_version=0,
    )
    reward = reward_of(row)
    return Rollout(
        attempt_id=0,
        group_id=0,
        member_index=0,
        task_id="",
        turns=(turn,),
        finish_reason=finish,
        reward=reward if math.isfinite(reward) else None,
        metrics=metrics_of_row(row.meta_info.get(METRICS), 0, 1),
    )


def _reward_config(row: DataProto, config: Any) -> tuple[str, Any]:
    """The domain of a response and its section of the configuration: by its name, else by the tags that the sections include."""
    label = _label(row)
    rewards: Mapping[str, Any] | None = _entry(config, "rewards")
    if rewards is None:
        raise FilterError(f"expected a configuration with rewards, got {type(config).__name__} - give context.pipeline_config")
    if label in rewards:
        return label, rewards[label]
    for domain, reward in rewards.items():
        tags: Iterable[str] = _entry(reward, "tag_included") or ()
        if label in tags:
            return domain, reward
    raise FilterError(f"rewards: expected a domain out of {sorted(rewards)}, got {label!r} - {nearest(label, rewards)}")


def _label(row: DataProto) -> str:
    if "domain" not in row.non_tensor_batch:
        raise FilterError(f"expected non_tensor_batch['domain'] in a response, got {sorted(row.non_tensor_batch)} - say which rules apply")
    return str(row.non_tensor_batch["domain"][0])


def _column(row: DataProto, name: str) -> torch.Tensor:
    try:
        return cast("torch.Tensor", row[name])
    except KeyError as error:
        raise FilterError(f"expected {name} in the batch of a response: {error.args[0]} - give rows as the context made them") from None


def _entry(owner: Any, name: str) -> Any:
    return owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)


def _settings(config: Any) -> tuple[str, dict[str, Any], str | None]:
    return str(_entry(config, "type") or NoFilter.name), dict(_entry(config, "filter_args") or {}), _entry(config, "metric")


_built: Final[dict[tuple[object, ...], Filter[Any]]] = {}  # by what they were built from: one that warns once shall not warn at every group


def _once(build: Callable[..., Filter[Any]], settings: Any, where: str) -> Filter[Any]:
    """A filter built from a section of the configuration, the same one for the same settings."""
    kind, arguments, metric = _settings(settings)
    key = (build, kind, json.dumps(arguments, sort_keys=True, default=repr), metric, where)
    if key not in _built:
        if len(_built) >= MOST_BUILT:
            _built.clear()
        _built[key] = build({"type": kind, "filter_args": arguments, "metric": metric}, where=where)
    return _built[key]
