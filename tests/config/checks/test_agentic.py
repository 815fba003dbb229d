"""An agentic run: settings that exclude each other, and settings without effect."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config import AgenticConfig, parse_config
from sluice.config.checks import without_effect
from sluice.config.models import LARGEST_GROUP, MOST_GROUPS
from sluice.errors import ConfigError
from tests.config.recipes import AGENTIC_FULL, agentic, problems_of

SPREAD = {"type": "std_filter"}
NOTHING = {"type": "no_filter"}
HELD_OUT = {"num_env_groups": 16}
LAKE = {"type": "frozen_lake"}


def refused(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parse_config(agentic(**changes))
    return [problem.removeprefix("config: ") for problem in problems_of(raised.value)]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"rollout_batch_size": 60},
            "rollout_batch_size: must be a multiple of train_env_manager.group_size (8), got 60: a batch is whole groups - set it to 56 "
            "or 64",
        ),
        (
            {"rollout_batch_size": 7},
            "rollout_batch_size: must be a multiple of train_env_manager.group_size (8), got 7: a batch is whole groups - set it to 8",
        ),
        (
            {"rollout_batch_size": 4_194_303, "train_env_manager__group_size": 4_096},
            "rollout_batch_size: must be a multiple of train_env_manager.group_size (4096), got 4194303: a batch is whole groups - set it "
            "to 4190208 or 4194304",
        ),
        (
            {"rollout_batch_size": 4_194_303, "train_env_manager__group_size": 4_095},
            "rollout_batch_size: must be a multiple of train_env_manager.group_size (4095), got 4194303: a batch is whole groups - set it "
            "to 4193280",
        ),
        (
            {"rollout_batch_size": 131_074, "train_env_manager__group_size": 2},
            "rollout_batch_size: must be at most 131072 with train_env_manager.group_size 2, got 131074: a batch is of at most 65536 "
            "groups - lower it",
        ),
        (
            {"train_env_manager__max_traj_per_env": 1},
            "train_env_manager.max_traj_per_env: must be -1 or at least 2 with rollout_batch_size 64, num_env_groups 4 and group_size 8, "
            "got 1: the environment groups would not open enough episodes for a batch - delete it, or raise it",
        ),
        (
            {"train_env_manager__max_traj_per_env": 0, "train_env_manager__num_env_groups": 128},
            "train_env_manager.max_traj_per_env: must be -1 or at least 1 with rollout_batch_size 64, num_env_groups 128 and group_size 8, "
            "got 0: the environment groups would not open enough episodes for a batch - delete it, or raise it",
        ),
        (
            {"train_env_manager__max_traj_per_env": 20_000},
            "train_env_manager.max_traj_per_env: must be at most 16386 with num_env_groups 4, got 20000: at most 65536 groups run beyond "
            "those of a batch - lower one of the two",
        ),
        (
            {"train_env_manager__group_size": 1},
            "train_env_manager.group_size: must be at least 2, got 1: the advantage of a lone trajectory is 0, nothing would be learned - "
            "raise it",
        ),
        (
            {"train_env_manager": {}},
            "train_env_manager.group_size: must be at least 2, got 1: the advantage of a lone trajectory is 0, nothing would be learned - "
            "raise it",
        ),
        (
            {"val_env_manager": {**HELD_OUT, "group_filter_config": SPREAD}},
            "val_env_manager.group_filter_config: std_filter needs a spread, and val_env_manager.group_size 1 has none - raise that or "
            "choose another filter",
        ),
        (
            {"train_env_manager__group_filter_cls": "mine.Filter", "train_env_manager__group_filter_config": SPREAD},
            "train_env_manager.group_filter_config: excludes group_filter_cls, which is given as well, since one filter judges the "
            "groups - delete one of the two",
        ),
        (
            {"val_env_manager": {**HELD_OUT, "group_filter_cls": "mine.Filter", "group_filter_config": {"type": "drop_flag"}}},
            "val_env_manager.group_filter_config: excludes group_filter_cls, which is given as well, since one filter judges the groups - "
            "delete one of the two",
        ),
        (
            {"resampling__min_members": 9},
            "resampling.min_members: must not be above train_env_manager.group_size (8), got 9",
        ),
        (
            {"train_env_manager__group_size_redundancy": 4_089},
            "train_env_manager.group_size_redundancy: must be at most 4088 with train_env_manager.group_size 8, got 4089: a group has at "
            "most 4096 members at once - lower one of the two",
        ),
        (
            {"resampling__max_groups_per_batch": 7},
            "resampling.max_groups_per_batch: must be at least 8, the groups of a batch (rollout_batch_size 64 / "
            "train_env_manager.group_size 8), got 7: no batch could ever be filled",
        ),
        (
            {"async_generation_ratio": 1.5, "resampling__max_staleness": 1},
            "resampling.max_staleness: must be at least 2 with async_generation_ratio 1.5, got 1: groups start 2 steps ahead, and would "
            "expire before they could be used - raise it, or lower async_generation_ratio",
        ),
        (
            {"async_generation_ratio": 0.5, "resampling__surplus": "discard"},
            "resampling.surplus: must be carry with async_generation_ratio 0.5, got discard: all groups that started ahead would be thrown "
            "away - delete it, or set async_generation_ratio to 0",
        ),
        (
            {"resampling__surplus": "carry"},
            "resampling.surplus: carry needs a max_staleness of at least 1, got 0: a carried group is a step old when it is used - set "
            "resampling.max_staleness to 1 or more",
        ),
        (
            {"dialogue__max_tokens_per_turn": 512},
            "dialogue.max_tokens_per_turn: must be below sequence_length (512), which holds what the policy reads as well, got 512 - "
            "lower it, or raise sequence_length",
        ),
        (
            {"sequence_length": 64},
            "dialogue.max_tokens_per_turn: must be below sequence_length (64), which holds what the policy reads as well, got 64 - lower "
            "it, or raise sequence_length",
        ),
        ({"dialogue__stop": ["\n", ">", "\n"]}, "dialogue.stop.2: expected each text once, got '\\n' twice - delete one"),
        (
            {"dialogue__action_pattern": "(.*"},
            "dialogue.action_pattern: expected a regular expression, got '(.*': missing ), unterminated subpattern at position 0 - "
            "correct it, or delete it",
        ),
        (
            {"dialogue__action_pattern": ".*"},
            "dialogue.action_pattern: expected exactly one group, which is the action, such as <action>(.*?)</action>, got 0 in '.*' - put "
            "brackets around the action",
        ),
        (
            {"dialogue__action_pattern": "(go|take) (.*)"},
            "dialogue.action_pattern: expected exactly one group, which is the action, such as <action>(.*?)</action>, got 2 in "
            "'(go|take) (.*)' - write (?:...) for brackets that only hold together",
        ),
        (
            {"dialogue__turn_template": "{observation"},
            "dialogue.turn_template: expected a template for str.format: expected '}' before end of string - write {{ and }} for braces "
            "that stand for themselves",
        ),
        (
            {"dialogue__turn_template": "{observation} {admissible}"},
            "dialogue.turn_template: expected a field of the dialogue, got {admissible} - did you mean admissible_commands?",
        ),
        (
            {"dialogue__first_template": "{observation} {}"},
            "dialogue.first_template: expected a field of the dialogue, got {} - fields: admissible_commands, observation, turn, "
            "turns_left",
        ),
        (
            {"dialogue__turn_template": "{observation.__class__}"},
            "dialogue.turn_template: expected a field of the dialogue, got {observation.__class__} - did you mean observation?",
        ),
        (
            {"dialogue__first_template": "You are in a house."},
            "dialogue.first_template: expected at least the field {observation}, got none: the policy would not see what happens - add it",
        ),
        (
            {"dialogue__turn_template": "turn {turn}"},
            "dialogue.turn_template: expected at least the field {observation}, got none: the policy would not see what happens - add it",
        ),
        (
            {"dialogue__turn_template": "{observation} {turns_left}", "environment__max_steps": 9},
            "dialogue.turn_template: {turns_left} needs dialogue.max_turns, which is not given - give it, or leave the field out",
        ),
        (
            {"dialogue__turn_template": "{observation} {turn:>2}"},
            "dialogue.turn_template: expected {turn} alone, got {turn:>2} - fields of the dialogue are put in as they are",
        ),
        (
            {"dialogue__first_template": "{observation!r:{turn}}"},
            "dialogue.first_template: expected {observation} alone, got {observation!r:{turn}} - fields of the dialogue are put in as they "
            "are",
        ),
        (
            {"dialogue__max_turns": 31, "environment__max_steps": 30},
            "dialogue.max_turns: must not be above environment.max_steps (30), where every trajectory ends, got 31 - delete it, or lower "
            "it",
        ),
        (
            {
                "dialogue__max_turns": 40,
                "environment__max_steps": 30,
                "val_environment": {**LAKE, "max_steps": 39},
                "val_env_manager": HELD_OUT,
            },
            "dialogue.max_turns: must not be above environment.max_steps (30) and val_environment.max_steps (39), where every trajectory "
            "ends, got 40 - delete it, or lower it",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused(changes: dict[str, Any], problem: str) -> None:
    assert refused(**changes) == [problem]


@pytest.mark.parametrize("group_filter", [SPREAD, {"type": "any", "filter_args": {"filters": [{"type": "drop_flag"}, SPREAD]}}])
def test_a_spread_filter_on_lone_trajectories_is_refused_naming_both_options(group_filter: dict[str, Any]) -> None:
    assert refused(train_env_manager__group_size=1, train_env_manager__group_filter_config=group_filter) == [
        "train_env_manager.group_size: must be at least 2, got 1: the advantage of a lone trajectory is 0, nothing would be learned - "
        "raise it",
        "train_env_manager.group_filter_config: std_filter needs a spread, and train_env_manager.group_size 1 has none - raise that or "
        "choose another filter",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"train_env_manager__max_traj_per_env": 2, "resampling__fill": "shrink"},  # no more than a batch needs
        {"train_env_manager__max_traj_per_env": 2, "resampling__collect": "in_order"},
        {"train_env_manager__max_traj_per_env": 16_386},
        {"train_env_manager__num_env_groups": 65_536},  # most never open an episode
        {"train_env_manager__group_size_redundancy": LARGEST_GROUP - 8},
        {"resampling__max_groups_per_batch": 8},
        {"resampling": {"fill": "shrink", "min_members": 8}},
        {"resampling": {"surplus": "carry", "max_staleness": 1}},
        {"resampling__truncated": "drop_group"},
        {"async_generation_ratio": 2.0, "resampling__max_staleness": 2},
        {"async_generation_ratio": 1.0, "trainer__stale_tokens": "mask"},  # a trajectory goes on under the weights of its next turn
        {"async_generation_ratio": 1.0, "on_weight_update": "continue", "trainer__stale_tokens": "mask"},
        {"train_env_manager__group_filter_config": {"type": "env_timeout"}, "guard": {}},
        {"train_env_manager__group_filter_cls": "mine.Filter", "guard": {"scope": "window", "window": 9}},
        {"val_env_manager": {**HELD_OUT, "group_size": 4}},  # repeats of a greedy policy: environments may be random
        {"val_env_manager": {**HELD_OUT, "group_size": 2, "group_filter_config": SPREAD}, "validation__filtering": "record"},
        {
            "val_env_manager": HELD_OUT,
            "val_environment": {**LAKE, "run_in": "thread"},
            "validation": {"every_steps": 5, "temperature": 0.7},
        },
        {"environment__run_in": "thread", "env_monitor__on_hung": "replace"},
        {"environment__run_in": "inline", "env_monitor__on_hung": "name"},
        {
            "environment__run_in": "inline",
            "val_environment": LAKE,
            "val_env_manager": HELD_OUT,
            "env_monitor__on_hung": "replace",
        },
        {"dialogue": {"style": "chat", "system_prompt": "Play.", "turn_template": "{observation}"}},
        {"dialogue": {"turn_template": "{observation} {{x}} {turn}/{turn}", "first_template": None, "stop": ["\n", "."]}},
        {"dialogue": {"turn_template": "{observation} {turns_left}", "max_turns": 9}},
        {"dialogue__action_pattern": r"(?:go|take) (?P<what>.*)"},
        {"dialogue__action_pattern": "[[a]](.)"},  # of which Python warns that it may mean something else one day
        {"dialogue__max_turns": 30, "environment__max_steps": 30},
        {"dialogue__max_turns": 30, "environment__max_steps": 20, "val_environment": LAKE, "val_env_manager": HELD_OUT},
        {"environment": {**LAKE, "workers": 4, "episodes_per_worker": 9, "reset_timeout_s": None}},
    ],
)
def test_settings_that_go_together_are_taken(changes: dict[str, Any]) -> None:
    assert parse_config(agentic(**changes))


MONITOR_OFF = "env_monitor.enable is false - delete it, or set enable to true"
NO_VAL = "val_env_manager is not given - delete it, or give it, for an evaluation"
NO_WORKERS = "which has no worker processes - delete it, or set run_in to process"
SHRINK = "resampling.fill is shrink, which draws exactly the groups of one batch - delete it, or"


@pytest.mark.parametrize(
    ("changes", "path", "cause"),
    [
        ({"val_environment": LAKE}, "val_environment", NO_VAL),
        ({"val_environment": {**LAKE, "run_in": "inline", "workers": 3}}, "val_environment", NO_VAL),
        ({"validation__every_steps": 5}, "validation.every_steps", NO_VAL),
        ({"validation__temperature": 0.0}, "validation.temperature", NO_VAL),
        ({"validation__filtering": "record"}, "validation.filtering", NO_VAL),
        (
            {"val_env_manager": HELD_OUT, "validation__filtering": "apply"},
            "validation.filtering",
            "val_env_manager has no group filter that drops anything - delete it, or set val_env_manager.group_filter_cls or "
            "group_filter_config",
        ),
        (
            {"val_env_manager": {**HELD_OUT, "group_filter_config": NOTHING}, "validation__filtering": "apply"},
            "validation.filtering",
            "val_env_manager has no group filter that drops anything - delete it, or set val_env_manager.group_filter_cls or "
            "group_filter_config",
        ),
        (
            {"val_env_manager": {**HELD_OUT, "group_size_redundancy": 0}},
            "val_env_manager.group_size_redundancy",
            "an evaluation waits for every trajectory - delete it",
        ),
        (
            {"val_env_manager": {**HELD_OUT, "max_traj_per_env": -1}},
            "val_env_manager.max_traj_per_env",
            "an evaluation plays one episode of each environment group - delete it",
        ),
        ({"environment": {**LAKE, "run_in": "inline", "workers": 2}}, "environment.workers", f"environment.run_in is inline, {NO_WORKERS}"),
        (
            {"environment": {**LAKE, "run_in": "thread", "episodes_per_worker": 9}},
            "environment.episodes_per_worker",
            f"environment.run_in is thread, {NO_WORKERS}",
        ),
        (
            {"val_env_manager": HELD_OUT, "val_environment": {**LAKE, "run_in": "thread", "workers": 4}},
            "val_environment.workers",
            f"val_environment.run_in is thread, {NO_WORKERS}",
        ),
        ({"env_monitor": {"enable": False, "interval_s": 30.0}}, "env_monitor.interval_s", MONITOR_OFF),
        ({"env_monitor": {"enable": False, "hung_after_s": 30.0}}, "env_monitor.hung_after_s", MONITOR_OFF),
        ({"env_monitor": {"enable": False, "on_hung": "replace"}}, "env_monitor.on_hung", MONITOR_OFF),
        (
            {"environment__run_in": "inline", "env_monitor__on_hung": "replace"},
            "env_monitor.on_hung",
            "environment.run_in is inline, where no call can be ended - delete it, or set run_in to process",
        ),
        ({"dialogue__system_prompt": "Play."}, "dialogue.system_prompt", "dialogue.style is plain - delete it, or set style to chat"),
        (
            {"train_env_manager__max_traj_per_env": 3, "resampling__fill": "shrink"},
            "train_env_manager.max_traj_per_env",
            f"{SHRINK} set it to 2, or set fill to refill",
        ),
        (
            {"train_env_manager__max_traj_per_env": 3, "resampling__collect": "in_order"},
            "train_env_manager.max_traj_per_env",
            "resampling.collect is in_order, which waits for the groups launched first - delete it, or set it to 2, or set collect to "
            "as_finished",
        ),
        ({"resampling": {"fill": "shrink", "max_resample_rounds": 10}}, "resampling.max_resample_rounds", f"{SHRINK} set fill to refill"),
        ({"resampling": {"fill": "shrink", "max_groups_per_batch": 3}}, "resampling.max_groups_per_batch", f"{SHRINK} set fill to refill"),
        ({"resampling": {"fill": "shrink", "surplus": "carry"}}, "resampling.surplus", f"{SHRINK} set fill to refill"),
        (
            {"resampling__absent_after_batches": 10},
            "resampling.absent_after_batches",
            "an agentic run is of a single domain - delete it",
        ),
        (
            {"guard": {}},
            "guard",
            "train_env_manager has no group filter that drops anything - delete it, or set train_env_manager.group_filter_cls or "
            "group_filter_config",
        ),
        (
            {"guard": {}, "train_env_manager__group_filter_config": NOTHING},
            "guard",
            "train_env_manager has no group filter that drops anything - delete it, or set train_env_manager.group_filter_cls or "
            "group_filter_config",
        ),
        (
            {"guard__window": 9, "train_env_manager__group_filter_config": SPREAD},
            "guard.window",
            "guard.scope is cumulative - delete it, or set scope to window",
        ),
        (
            {"train_env_manager__group_filter_config": {**NOTHING, "metric": "acc"}},
            "train_env_manager.group_filter_config.metric",
            "train_env_manager.group_filter_config.type is no_filter - delete it, or choose a filter",
        ),
        (
            {"val_env_manager": {**HELD_OUT, "group_filter_config": {**NOTHING, "metric": "acc"}}},
            "val_env_manager.group_filter_config.metric",
            "val_env_manager.group_filter_config.type is no_filter - delete it, or choose a filter",
        ),
        (
            {"on_weight_update": "finish"},
            "on_weight_update",
            "async_generation_ratio is 0: nothing is generated while the weights change - delete it, or set async_generation_ratio above 0",
        ),
        (
            {"trainer__stale_tokens": "mask"},
            "trainer.stale_tokens",
            "async_generation_ratio is 0: nothing is generated while the weights change - delete it, or set async_generation_ratio above 0",
        ),
        (
            {"async_generation_ratio": 1.0, "on_weight_update": "restart", "trainer__stale_tokens": "mask"},
            "trainer.stale_tokens",
            "on_weight_update is restart, so that every response is sampled by one version of the weights - delete it, or set "
            "on_weight_update to continue",
        ),
        (
            {"resampling__max_staleness": 2},
            "resampling.max_staleness",
            "async_generation_ratio is 0 and no surplus is carried, so that no group outlives its batch - delete it, or raise "
            "async_generation_ratio",
        ),
        ({"trainer__bf16": True, "trainer__logprob_tolerance": 0.1}, "trainer.logprob_tolerance", None),
        ({"trainer__save_every_steps": None, "trainer__keep_checkpoints": 2}, "trainer.keep_checkpoints", None),
    ],
)
def test_a_setting_without_effect_is_refused_and_its_cause_named(changes: dict[str, Any], path: str, cause: str | None) -> None:
    (problem,) = refused(**changes)
    assert problem.startswith(f"{path}: has no effect because ")
    if cause is not None:
        assert problem == f"{path}: has no effect because {cause}"


def test_defaults_without_effect_are_no_problem() -> None:
    config = parse_config(agentic(environment__run_in="inline", val_env_manager=HELD_OUT))
    idle = {".".join(map(str, finding.path)) for finding in without_effect(config)}
    assert {"environment.workers", "dialogue.system_prompt", "val_env_manager.max_traj_per_env", "validation.filtering"} <= idle


# ---------------------------------------------------------------- advice

NUMBERS = st.fixed_dictionaries(
    {
        "rollout_batch_size": st.integers(1, 100),
        "train_env_manager__num_env_groups": st.integers(1, 20),
        "train_env_manager__group_size": st.integers(1, 12),
        "train_env_manager__max_traj_per_env": st.integers(-1, 65_536),
        "train_env_manager__group_size_redundancy": st.integers(0, LARGEST_GROUP),
        "resampling__min_members": st.integers(1, 12),
        "resampling__max_groups_per_batch": st.integers(1, 100),
        "sequence_length": st.integers(2, 200),
        "dialogue__max_tokens_per_turn": st.integers(1, 200),
    }
)

ADVISED = {  # how a message states a number that would do -> that number
    r"set it to (\d+)": 0,
    r"must be (?:-1 or )?at least (\d+)": 0,
    r"must be at most (\d+)": 0,
    r"must not be above [a-z_.]+ \((\d+)\)": 0,
    r"must be below sequence_length \((\d+)\)": -1,
}


@given(numbers=NUMBERS)
def test_whoever_follows_the_messages_arrives_at_a_configuration_that_loads(numbers: dict[str, int]) -> None:
    for _ in range(10):
        try:
            config = parse_config(agentic(**numbers))
        except ConfigError as err:
            path, _, message = problems_of(err)[0].removeprefix("config: ").partition(": ")
            advised = [int(found[1]) + shift for pattern, shift in ADVISED.items() if (found := re.search(pattern, message))]
            key = path.replace(".", "__")
            assert advised, message
            if advised[0] < 1:  # no turn is below a sequence of one token
                return
            assert numbers[key] != advised[0]
            numbers = {**numbers, key: advised[0]}
            continue
        assert isinstance(config, AgenticConfig)
        manager = config.train_env_manager
        assert config.groups_per_batch * manager.group_size == config.rollout_batch_size
        assert config.episodes_per_env * manager.num_env_groups >= config.groups_per_batch
        assert 0 <= config.additional_groups <= MOST_GROUPS
        return
    raise AssertionError(f"no end of advice: {numbers}")


@given(
    fill=st.sampled_from(["refill", "shrink"]),
    collect=st.sampled_from([None, "as_finished", "in_order"]),
    surplus=st.sampled_from([None, "carry", "discard"]),
    ratio=st.sampled_from([0.0, 0.5, 2.0]),
    on_update=st.sampled_from([None, "finish", "restart", "continue"]),
    run_in=st.sampled_from(["inline", "thread", "process"]),
    val_run_in=st.sampled_from([None, "inline", "process"]),
    watched=st.booleans(),
    chat=st.booleans(),
    extra=st.integers(0, 3),
    group_filter=st.sampled_from([None, "config", "cls"]),
    val_filter=st.sampled_from([None, "config", "cls"]),
    held_out=st.booleans(),
    scope=st.sampled_from([None, "cumulative", "window"]),
)
def test_what_has_no_effect_is_never_a_key_that_the_others_read(
    fill: str,
    collect: str | None,
    surplus: str | None,
    ratio: float,
    on_update: str | None,
    run_in: str,
    val_run_in: str | None,
    watched: bool,
    chat: bool,
    extra: int,
    group_filter: str | None,
    val_filter: str | None,
    held_out: bool,
    scope: str | None,
) -> None:
    changes: dict[str, Any] = {
        "resampling__fill": fill,
        "async_generation_ratio": ratio,
        "environment__run_in": run_in,
        "env_monitor__enable": watched,
        "dialogue__style": "chat" if chat else "plain",
    }
    filters: dict[str | None, dict[str, Any]] = {
        None: {},
        "config": {"group_filter_config": SPREAD},
        "cls": {"group_filter_cls": "mine.Filter"},
    }
    changes |= {f"train_env_manager__{name}": value for name, value in filters[group_filter].items()}
    changes["train_env_manager__max_traj_per_env"] = 2 + (extra if fill == "refill" and collect != "in_order" else 0)
    if run_in == "process":
        changes |= {"environment__workers": 3, "environment__episodes_per_worker": 9}
    if held_out:
        changes |= {f"val_env_manager__{name}": value for name, value in {"group_size": 2, **filters[val_filter]}.items()}
        changes |= {"validation__every_steps": 5, "validation__temperature": 0.5}
        if val_filter:
            changes["validation__filtering"] = "apply"
        if val_run_in:
            changes |= {"val_environment__type": "frozen_lake", "val_environment__run_in": val_run_in}
            if val_run_in == "process":
                changes["val_environment__workers"] = 1
    if watched:
        changes |= {"env_monitor__interval_s": 1.0, "env_monitor__hung_after_s": 2.0}
        if run_in != "inline" or (held_out and val_run_in == "process"):
            changes["env_monitor__on_hung"] = "replace"
    if chat:
        changes["dialogue__system_prompt"] = "Play."
    if ratio and on_update:
        changes["on_weight_update"] = on_update
        if on_update != "restart":
            changes["trainer__stale_tokens"] = "mask"
    if fill == "refill" and surplus and not (ratio and surplus == "discard"):
        changes["resampling__surplus"] = surplus
    if ratio or changes.get("resampling__surplus") == "carry":
        changes["resampling__max_staleness"] = 3
    if fill == "refill" and collect:
        changes["resampling__collect"] = collect
    if scope and group_filter:
        changes["guard__scope"] = scope
        if scope == "window":
            changes["guard__window"] = 5
    config = parse_config(agentic(**changes))  # what was written has an effect
    idle = [finding.path for finding in without_effect(config)]
    written = {tuple(name.split("__")) for name in changes}
    assert len(idle) == len(set(idle))
    assert not written & set(idle)
    assert not {path[:1] for path in idle if len(path) == 1} & {path[:1] for path in written}


def test_the_full_example_has_no_key_without_effect() -> None:
    assert parse_config(AGENTIC_FULL)
