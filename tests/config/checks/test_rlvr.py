"""An RLVR run: settings that exclude each other, and settings without effect."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config import parse_config
from sluice.config.checks import without_effect
from sluice.errors import ConfigError
from tests.config.recipes import problems_of, smallest

SPREAD = {"type": "std_filter"}
HELD_OUT = {"type": "reasoning_gym", "name": "basic_arithmetic", "size": 10, "domain": "math"}
JSONL = {"type": "jsonl", "path": "/data/x.v1.jsonl", "domain": "math"}


def refused(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parse_config(smallest(**changes))
    return [problem.removeprefix("config: ") for problem in problems_of(raised.value)]


@pytest.mark.parametrize(
    ("changes", "path", "says"),
    [
        ({"resampling__min_members": 9}, "resampling.min_members", "must not be above num_return_sequences_in_group (8), got 9"),
        ({"resampling__max_groups_per_batch": 3}, "resampling.max_groups_per_batch", "must be at least rollout_batch_size (4), got 3"),
        (
            {"is_use_additional_prompts": True, "max_additional_running_prompts": 0},
            "is_use_additional_prompts",
            "because max_additional_running_prompts is 0",
        ),
        (
            {"dataset_filter": {"min_difficulty": 2.0, "max_difficulty": 1.0}},
            "dataset_filter.min_difficulty",
            "must not be above max_difficulty (1), got 2",
        ),
        (
            {"dataset_filter__source": ["basic_arithmetics"]},
            "dataset_filter.source.0",
            "got 'basic_arithmetics' - did you mean basic_arithmetic?",
        ),
        ({"tasks__train__0__domain": "maths"}, "tasks.train.0.domain", "expected a domain of `rewards`, got 'maths' - did you mean math?"),
        ({"tasks__validation": [{**HELD_OUT, "domain": "logic"}]}, "tasks.validation.0.domain", "got 'logic' - reward domains: math"),
        ({"tasks__train": [{"type": "jsonl", "domain": "math"}]}, "tasks.train.0.path", "a source of type jsonl needs this key"),
        (
            {"tasks__train": [{"type": "huggingface", "domain": "math"}]},
            "tasks.train.0.path",
            "a source of type huggingface needs this key",
        ),
        (
            {"tasks__train": [{"type": "reasoning_gym", "domain": "math", "size": 1}]},
            "tasks.train.0.name",
            "a source of type reasoning_gym needs this key",
        ),
        (
            {"tasks__train__0__domain": None, "tasks__validation": [{**JSONL, "domain": None}]},
            "tasks.train.0.domain",
            "the label of the rows is basic_arithmetic",
        ),
        ({"rewards__code": {"verifier": {"type": "exact"}}}, "rewards.code", "no source of `tasks` has this domain"),
        (
            {
                "rewards__math__tag_included": ["code"],
                "rewards__code": {"verifier": {"type": "exact"}},
                "tasks__validation": [{**HELD_OUT, "domain": "code"}],
            },
            "rewards.math.tag_included",
            "'code' is a domain of its own",
        ),
        (
            {"rewards__a/b": {"verifier": {"type": "exact"}}, "tasks__validation": [{**HELD_OUT, "domain": "a/b"}]},
            "rewards.a/b",
            "expected a domain name of letters",
        ),
        ({"rewards__math__on_reward_timeout": "value"}, "rewards.math.timeout_value", "on_reward_timeout: value needs this key"),
        ({"tasks__prompt_template": "2 + 2 ="}, "tasks.prompt_template", "expected at least one field such as {question}"),
        ({"tasks__prompt_template": "{question"}, "tasks.prompt_template", "write {{ and }} for braces"),
        ({"tasks__prompt_template": "{} {question}"}, "tasks.prompt_template", "expected named fields"),
        ({"tasks__prompt_template": "{question.__class__}"}, "tasks.prompt_template", "got the attribute {question.__class__}"),
        ({"tasks__prompt_template": "{question[0].real}"}, "tasks.prompt_template", "use brackets for an entry of a mapping"),
        ({"tasks__prompt_template": "{question:{width.real}}"}, "tasks.prompt_template", "got the attribute {width.real}"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(changes: dict[str, Any], path: str, says: str) -> None:
    (problem,) = refused(**changes)
    assert problem.startswith(f"{path}: ")
    assert says in problem


CODE = {"verifier": {"type": "exact"}}
ALSO_CODE = {**HELD_OUT, "domain": "code"}
TWO = {"rewards__code": CODE, "tasks__train": [HELD_OUT, ALSO_CODE]}  # two domains, of which the rows of either source are known
ROWS = {**JSONL, "domain": None}  # a source that leaves the domain to its rows


@pytest.mark.parametrize(
    ("changes", "path", "says"),
    [
        (
            {"num_return_sequences_in_group": 4000, "group_size_redundancy": 97},
            "group_size_redundancy",
            "must be at most 96 with num_return_sequences_in_group 4000, got 97",
        ),
        (
            {"async_generation_ratio": 0.5, "resampling__surplus": "discard"},
            "resampling.surplus",
            "must be carry with async_generation_ratio 0.5",
        ),
        ({"resampling__surplus": "carry"}, "resampling.surplus", "needs a max_staleness of at least 1, got 0"),
        ({"resampling": {"surplus": "carry", "max_staleness": 0}}, "resampling.surplus", "set resampling.max_staleness to 1 or more"),
        (
            {"resampling": {"surplus": "carry", "max_staleness": 1}, "rewards__math__max_staleness": 0},
            "resampling.surplus",
            "needs a max_staleness of at least 1",
        ),
        (
            {"async_generation_ratio": 1.5, "resampling__max_staleness": 1},
            "resampling.max_staleness",
            "must be at least 2 with async_generation_ratio 1.5, got 1: groups start 2 steps ahead, and would expire before they",
        ),
        (
            {"async_generation_ratio": 0.1, "resampling__max_staleness": 3, "rewards__math__max_staleness": 0},
            "rewards.math.max_staleness",
            "must be at least 1 with async_generation_ratio 0.1, got 0: groups start 1 step ahead",
        ),
        (
            {**TWO, "domain_interleave_probs": {"math": 0.5, "cod": 0.25, "code": 0.25}},
            "domain_interleave_probs.cod",
            "expected a domain of `rewards`, got 'cod' - did you mean code?",
        ),
        ({**TWO, "domain_interleave_probs": {"math": 1.0}}, "domain_interleave_probs", "got none for code, which would never be drawn"),
        (
            {**TWO, "tasks__train": [ROWS], "domain_interleave_probs": {"math": 1.0}},
            "domain_interleave_probs",
            "got none for code, which would never be drawn",
        ),
        (
            {"rewards__code": CODE, "tasks__validation": [ALSO_CODE], "domain_interleave_probs": {"math": 0.5, "code": 0.5}},
            "domain_interleave_probs.code",
            "no source of tasks.train has this domain",
        ),
        (
            {**TWO, "domain_interleave_probs": {"math": 0.3333, "code": 0.6666}},
            "domain_interleave_probs",
            "expected shares that sum to 1, got 0.9999 - divide each by their sum",
        ),
    ],
)
def test_impossible_settings_of_asynchrony_and_of_the_mix_are_refused(changes: dict[str, Any], path: str, says: str) -> None:
    (problem,) = refused(**changes)
    assert problem.startswith(f"{path}: ")
    assert says in problem


@pytest.mark.parametrize(
    "changes",
    [
        {"async_generation_ratio": 2.0},
        {"async_generation_ratio": 1.0, "trainer__logprob_tolerance": 1e-3},
        {"async_generation_ratio": 1.5, "resampling": {"max_staleness": 2, "surplus": "carry"}, "rewards__math__max_staleness": 7},
        {"async_generation_ratio": 1.0, "on_weight_update": "continue", "trainer__stale_tokens": "mask"},
        {"async_generation_ratio": 1.0, "resampling__fill": "shrink", "rewards__math__max_staleness": 1},
        {"resampling": {"surplus": "carry", "max_staleness": 1}},
        {"resampling__surplus": "carry", "rewards__math__max_staleness": 1},
        {"resampling__surplus": "discard"},
        {"resampling": {"quarantine_after": None, "requeue": False, "stall_warning_s": None, "collect": "in_order"}},
        {"num_return_sequences_in_group": 4000, "group_size_redundancy": 96},
        {**TWO, "domain_interleave_probs": {"math": 0.333333, "code": 0.666667}, "mix_on": "drawn", "resampling__absent_after_batches": 3},
        {**TWO, "tasks__train": [ROWS], "domain_interleave_probs": {"math": 0.5, "code": 0.5}},
        {**TWO, "tasks__train": [HELD_OUT, ROWS], "tasks__validation": [ROWS], "domain_interleave_probs": {"math": 0.5, "code": 0.5}},
        {
            "rewards__code": CODE,
            "rewards__law": CODE,
            "tasks__train": [ROWS],
            "tasks__validation": [{**HELD_OUT, "domain": "law"}],
            "domain_interleave_probs": {"math": 0.5, "code": 0.5},
        },
        {"rewards__math__query_filter_config": SPREAD, "guard": {"scope": "window", "window": 7}},
        {"user_defined_rollout_loop_cls": "my_package.loops.MyLoop", "guard": {}},
        {
            "user_defined_rollout_loop_cls": "my_package.MyLoop",
            "rewards__math__response_filter_config": {"type": "length", "filter_args": {"max_tokens": 9}},
        },
        {"trainer": {"max_steps": 1, "learning_rate": 1.0, "save_every_steps": None}},
    ],
)
def test_settings_that_go_together_are_taken(changes: dict[str, Any]) -> None:
    assert parse_config(smallest(**changes))


def test_a_single_share_of_several_domains_is_told_once() -> None:
    told = refused(**TWO, domain_interleave_probs={"math": 1.0}, mix_on="kept")
    assert told == [
        "domain_interleave_probs: expected a share for each domain of tasks.train, got none for code, which would never be drawn - add it, "
        "or delete its source"
    ]


SYSTEM = {"tasks__system_prompt": "be brief"}


@pytest.mark.parametrize(
    ("changes", "path", "cause"),
    [
        ({"max_additional_running_prompts": 16}, "max_additional_running_prompts", "is_use_additional_prompts is false"),
        (SYSTEM, "tasks.system_prompt", "tasks.use_chat_template is false"),
        ({"tasks__exclude_train_from_validation": True}, "tasks.exclude_train_from_validation", "tasks.validation is empty"),
        ({"validation__every_steps": 5}, "validation.every_steps", "tasks.validation is empty"),
        ({"validation__temperature": 0.0}, "validation.temperature", "tasks.validation is empty"),
        ({"tasks__validation": [HELD_OUT], "validation__repeats": 4}, "validation.repeats", "validation.temperature is 0"),
        ({"rewards__math__timeout_value": 0.0}, "rewards.math.timeout_value", "rewards.math.on_reward_timeout is missing"),
        ({"reward_pool__workers": 0, "rewards__math__reward_timeout_s": 10.0}, "rewards.math.reward_timeout_s", "reward_pool.workers is 0"),
        (
            {"rewards__math__query_filter_config": {"type": "no_filter", "metric": "acc"}},
            "rewards.math.query_filter_config.metric",
            "type is no_filter",
        ),
        ({"resampling": {"fill": "shrink", "max_resample_rounds": 10}}, "resampling.max_resample_rounds", "resampling.fill is shrink"),
        ({"resampling": {"fill": "shrink", "on_exhausted": "raise"}}, "resampling.on_exhausted", "resampling.fill is shrink"),
        ({"resampling": {"fill": "shrink", "max_groups_per_batch": 3}}, "resampling.max_groups_per_batch", "resampling.fill is shrink"),
        ({"resampling__fill": "shrink", "is_use_additional_prompts": True}, "is_use_additional_prompts", "resampling.fill is shrink"),
        (
            {"trainer__advantage": {"type": "leave_one_out", "scale": "std"}},
            "trainer.advantage.scale",
            "trainer.advantage.type is leave_one_out",
        ),
        (
            {"trainer__advantage": {"type": "leave_one_out", "eps": 1e-8}},
            "trainer.advantage.eps",
            "trainer.advantage.type is leave_one_out",
        ),
        ({"trainer__advantage": {"scale": "none", "eps": 1e-8}}, "trainer.advantage.eps", "trainer.advantage.scale is none"),
        (
            {"trainer__lr_scheduler_type": "constant", "trainer__warmup_steps": 5},
            "trainer.warmup_steps",
            "trainer.lr_scheduler_type is constant",
        ),
        ({"trainer__bf16": True, "trainer__logprob_tolerance": 1e-3}, "trainer.logprob_tolerance", "trainer.bf16 is true"),
        (
            {"trainer__save_every_steps": None, "trainer__keep_checkpoints": 2},
            "trainer.keep_checkpoints",
            "trainer.save_every_steps is null",
        ),
        ({"on_weight_update": "restart"}, "on_weight_update", "async_generation_ratio is 0"),
        ({"trainer__stale_tokens": "mask"}, "trainer.stale_tokens", "async_generation_ratio is 0"),
        (
            {"async_generation_ratio": 1.0, "on_weight_update": "restart", "trainer__stale_tokens": "mask"},
            "trainer.stale_tokens",
            "on_weight_update is restart",
        ),
        ({"resampling__max_staleness": 2}, "resampling.max_staleness", "async_generation_ratio is 0 and no surplus is carried"),
        ({"rewards__math__max_staleness": 2}, "rewards.math.max_staleness", "async_generation_ratio is 0 and no surplus is carried"),
        ({"resampling": {"fill": "shrink", "collect": "in_order"}}, "resampling.collect", "resampling.fill is shrink"),
        ({"resampling": {"fill": "shrink", "surplus": "carry"}}, "resampling.surplus", "resampling.fill is shrink"),
        (
            {"async_generation_ratio": 1.0, "resampling": {"fill": "shrink", "surplus": "discard"}},
            "resampling.surplus",
            "resampling.fill is shrink",
        ),
        (
            {"is_use_additional_prompts": True, "resampling__collect": "in_order"},
            "is_use_additional_prompts",
            "resampling.collect is in_order",
        ),
        ({"mix_on": "drawn"}, "mix_on", "domain_interleave_probs is not given"),
        ({"is_num_return_sequences_expand": True}, "is_num_return_sequences_expand", "user_defined_rollout_loop_cls is not given"),
        ({"domain_interleave_probs": {"math": 1.0}}, "domain_interleave_probs", "tasks.train is of a single domain"),
        ({"resampling__absent_after_batches": 3}, "resampling.absent_after_batches", "rewards is of a single domain"),
        ({"guard": {}}, "guard", "every query_filter_config is no_filter"),
        (
            {"rewards__math__query_filter_config": SPREAD, "guard": {"window": 100}},
            "guard.window",
            "guard.scope is cumulative",
        ),
    ],
)
def test_a_setting_without_effect_is_refused_and_its_cause_named(changes: dict[str, Any], path: str, cause: str) -> None:
    (problem,) = refused(**changes)
    assert problem.startswith(f"{path}: has no effect because ")
    assert cause in problem
    assert " - delete it, or " in problem


@pytest.mark.parametrize(
    ("source", "key", "value", "takers"),
    [
        (HELD_OUT, "split", "train", "huggingface"),
        (HELD_OUT, "path", "/x", "jsonl and huggingface"),
        (HELD_OUT, "prompt_field", "prompt", "jsonl and huggingface"),
        (JSONL, "name", "x", "reasoning_gym"),
        (JSONL, "seed", 1, "reasoning_gym"),
        (JSONL, "params", {}, "reasoning_gym"),
        (JSONL, "split", "train", "huggingface"),
        ({**JSONL, "type": "huggingface"}, "size", 3, "reasoning_gym"),
    ],
)
def test_a_key_that_does_not_apply_to_its_source_is_refused(source: dict[str, Any], key: str, value: Any, takers: str) -> None:
    for side in ("train", "validation"):
        (problem,) = refused(**{f"tasks__{side}": [{**source, key: value}]})
        assert problem == f"tasks.{side}.0.{key}: does not apply to a source of type {source['type']}, only to {takers} - delete it"


@pytest.mark.parametrize("template", ["{question} {metadata[difficulty]}", "{metadata[a.b]} {question!r:>8}", "{{a.b}} {question}"])
def test_entries_of_mappings_and_dots_that_are_no_attributes_are_allowed_in_a_template(template: str) -> None:
    assert parse_config(smallest(tasks__prompt_template=template))


def test_null_is_no_setting() -> None:
    parse_config(smallest(tasks__system_prompt=None, rewards__math__timeout_value=None, tasks__train__0__split=None))


def test_defaults_without_effect_are_no_problem() -> None:
    config = parse_config(smallest())
    idle = {".".join(map(str, finding.path)) for finding in without_effect(config)}
    assert {"max_additional_running_prompts", "tasks.system_prompt", "validation.repeats", "rewards.math.timeout_value"} <= idle


@pytest.mark.parametrize(
    "query_filter",
    [
        SPREAD,
        {"type": "all", "filter_args": {"filters": [{"type": "mean_filter", "filter_args": {"threshold_up": 1}}, SPREAD]}},
        {"type": "not", "filter_args": {"filter": {"type": "any", "filter_args": {"filters": [SPREAD]}}}},
    ],
)
def test_case_03_group_size_1_with_a_spread_filter_is_refused_naming_both_options(query_filter: dict[str, Any]) -> None:
    told = refused(num_return_sequences_in_group=1, rewards__math__query_filter_config=query_filter)
    assert told == [
        "num_return_sequences_in_group: must be at least 2, got 1: the advantage of a lone response is 0, nothing would be learned "
        "- raise it",
        "rewards.math.query_filter_config: std_filter needs a spread, and num_return_sequences_in_group 1 has none - raise that or choose "
        "another filter",
    ]


def test_labels_lead_to_one_domain() -> None:
    other = {"verifier": {"type": "exact"}, "tag_included": ["algebra", "sums"]}
    told = refused(rewards__math__tag_included=["algebra"], rewards__other=other, tasks__validation=[{**HELD_OUT, "domain": "other"}])
    assert told == ["rewards.other.tag_included: 'algebra' already belongs to rewards.math.tag_included - a label has one domain"]


def test_a_reasoning_gym_source_may_be_labelled_by_its_name() -> None:
    parse_config(smallest(tasks__train__0__domain=None, rewards__math__tag_included=["basic_arithmetic"]))


def test_sources_are_selected_by_name_or_by_the_name_of_their_file_or_folder() -> None:
    for name in ("x.v1", "x.v1.jsonl"):
        parse_config(smallest(tasks__train=[JSONL], dataset_filter__source=[name]))
    parse_config(smallest(tasks__train=[{**JSONL, "source_name": "mine"}], dataset_filter__source=["mine"]))
    assert (
        "expected a source of tasks.train, got 'x.v1'"
        in refused(tasks__train=[{**JSONL, "source_name": "mine"}], dataset_filter__source=["x.v1"])[0]
    )


def test_a_recipe_can_be_tried_with_few_steps() -> None:
    parse_config(
        smallest(tasks__validation=[HELD_OUT], validation__every_steps=50, trainer__warmup_steps=20, trainer__save_every_steps=100),
        ["trainer.max_steps=1"],
    )


@given(
    fill=st.sampled_from(["refill", "shrink"]),
    additional=st.booleans(),
    advantage=st.sampled_from([("group_relative", "std"), ("group_relative", "none"), ("leave_one_out", "std")]),
    chat=st.booleans(),
    held_out=st.booleans(),
    workers=st.integers(0, 2),
    schedule=st.sampled_from(["constant", "linear"]),
    bf16=st.booleans(),
    ratio=st.sampled_from([0.0, 0.5, 2.0]),
    surplus=st.sampled_from([None, "carry", "discard"]),
    on_update=st.sampled_from([None, "finish", "restart", "continue"]),
    collect=st.sampled_from([None, "as_finished", "in_order"]),
    domains=st.integers(1, 2),
    scope=st.sampled_from([None, "cumulative", "window"]),
)
def test_what_has_no_effect_is_never_a_key_that_the_others_read(
    fill: str,
    additional: bool,
    advantage: tuple[str, str],
    chat: bool,
    held_out: bool,
    workers: int,
    schedule: str,
    bf16: bool,
    ratio: float,
    surplus: str | None,
    on_update: str | None,
    collect: str | None,
    domains: int,
    scope: str | None,
) -> None:
    changes: dict[str, Any] = {
        "resampling__fill": fill,
        "tasks__use_chat_template": chat,
        "tasks__validation": [HELD_OUT] if held_out else [],
        "reward_pool__workers": workers,
        "trainer__lr_scheduler_type": schedule,
        "trainer__bf16": bf16,
        "trainer__advantage__type": advantage[0],
    }
    changes["async_generation_ratio"] = ratio
    if ratio and on_update:
        changes["on_weight_update"] = on_update
        if on_update == "continue":
            changes["trainer__stale_tokens"] = "mask"
    if fill == "refill" and surplus and not (ratio and surplus == "discard"):
        changes["resampling__surplus"] = surplus
    if ratio or changes.get("resampling__surplus") == "carry":
        changes |= {"resampling__max_staleness": 3, "rewards__math__max_staleness": 2}
    if fill == "refill" and collect:
        changes["resampling__collect"] = collect
    if additional and fill == "refill" and collect != "in_order":
        changes["is_use_additional_prompts"] = True
    if domains == 2:
        changes |= {**TWO, "domain_interleave_probs": {"math": 0.5, "code": 0.5}, "mix_on": "drawn", "resampling__absent_after_batches": 2}
    if scope:
        changes |= {"rewards__math__query_filter_config": SPREAD, "guard__scope": scope}
        if scope == "window":
            changes["guard__window"] = 5
    if advantage[0] == "group_relative":
        changes["trainer__advantage__scale"] = advantage[1]
    config = parse_config(smallest(**changes))  # what was written has an effect
    idle = [finding.path for finding in without_effect(config)]
    written = {tuple(int(part) if part.isdecimal() else part for part in name.split("__")) for name in changes}
    assert len(idle) == len(set(idle))
    assert not written & set(idle)
