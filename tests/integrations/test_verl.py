"""verl's data go through our filters and come back whole, with the real package where it is installed and on data of its shape always."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ConfigError, FilterError, ResampleError
from sluice.filters import RatioGuard
from sluice.gate import Gate
from sluice.integrations.verl import BatchFiller, GroupFilter, decide
from tests.integrations.frameworks import AgentLoopOutput, DataProto, rows_of

Make = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]


def real(batch: Mapping[str, Any], columns: Mapping[str, Any]) -> Any:
    """verl's own DataProto of the same columns."""
    import torch
    from verl import DataProto as Real

    return Real.from_dict(tensors={name: torch.as_tensor(values) for name, values in batch.items()}, non_tensors=dict(columns))


@pytest.fixture(params=["shaped like it", "the real one"])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param == "shaped like it":
        return DataProto
    pytest.importorskip("verl", reason="verl is not installed")
    return real


def data_of(make: Make, groups: list[list[float]], *, sampled: int = 0, **columns: Any) -> Any:
    """Scores stand on the last of three tokens, as verl's reward managers put them. sampled: how often before; uids are new each time."""
    uids, rewards = rows_of(groups)
    uids = [uid + "'" * sampled for uid in uids]
    scores = np.zeros((len(rewards), 3), dtype=np.float32)
    scores[:, -1] = rewards
    mask = np.array([[1, 1, 0]] * len(rewards))
    return make({"rm_scores": scores, "response_mask": mask}, {"uid": np.array(uids, dtype=object), **columns})


GROUPS = [[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.5, 0.0]]


def test_groups_without_spread_leave_with_all_their_rows(make: Make) -> None:
    data = data_of(make, GROUPS, place=np.arange(9))
    judged = GroupFilter().judge(data)
    assert [(uid, verdict.keep) for uid, verdict in judged.verdicts.items()] == [("prompt0", True), ("prompt1", False), ("prompt2", True)]
    assert type(judged.data) is type(data)
    assert judged.data.non_tensor_batch["place"].tolist() == [0, 1, 2, 6, 7, 8]
    assert np.asarray(judged.data.batch["rm_scores"]).sum(-1).tolist() == [1.0, 0.0, 1.0, 0.0, 0.5, 0.0]
    assert len(data) == 9
    assert judged.metrics() == {
        "scheduler/group_filter_count": 1.0,
        "scheduler/acceptance_rate": 2 / 3,
        "batch/rejected/low_information/no_spread": 1.0,
    }


@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=4), min_size=1, max_size=6), st.randoms(use_true_random=False)
)
def test_where_rows_stand_does_not_matter(groups: list[list[float]], random: Any) -> None:
    uids, rewards = rows_of(groups)
    order = list(range(len(uids)))
    random.shuffle(order)
    data = DataProto({}, {"uid": np.array(uids, dtype=object)[order], "acc": np.array(rewards)[order]})
    judged = GroupFilter(query_filter={"type": "std_filter", "metric": "acc"}).judge(data)
    for index, group in enumerate(groups):
        assert judged.verdicts[f"prompt{index}"].keep == (len(set(group)) > 1)
    kept = [row for row in order if len(set(groups[int(uids[row].removeprefix("prompt"))])) > 1]
    assert [order[row] for row in judged.rows] == kept


def test_the_metric_is_read_and_never_the_shaped_score(make: Make) -> None:
    hopeless = data_of(make, [[0.0, 0.0, -0.5, -1.0]], acc=np.array([0.0, 0.0, 0.0, 0.0]))
    assert GroupFilter().judge(hopeless).kept == 1
    assert GroupFilter(query_filter={"type": "std_filter", "metric": "acc"}).judge(hopeless).kept == 0


def test_a_metric_that_is_not_there_is_an_error_that_names_what_is(make: Make) -> None:
    with pytest.raises(FilterError, match=r"metric is 'accuracy'.*acc"):
        GroupFilter(query_filter={"type": "std_filter", "metric": "accuracy"}).judge(data_of(make, GROUPS, acc=np.zeros(9)))


def test_rewards_with_the_penalty_in_them_are_not_judged() -> None:
    data = DataProto({"token_level_rewards": np.zeros((2, 3))}, {"uid": np.array(["a", "a"], dtype=object)})
    with pytest.raises(FilterError, match=r"column of scores \(rm_scores or token_level_scores\).*token_level_rewards"):
        GroupFilter().judge(data)


def test_data_without_uids_are_refused() -> None:
    with pytest.raises(FilterError, match=r"the column 'uid'.*'index'"):
        GroupFilter().judge(DataProto({}, {"index": np.zeros(2)}))


def test_a_missing_score_makes_a_group_incomplete_and_is_never_0() -> None:
    uids, rewards = rows_of([[1.0, None, 0.0], [None, None, None]])
    data = DataProto({"rm_scores": np.array(rewards)}, {"uid": np.array(uids, dtype=object)})
    assert [verdict.reason for verdict in GroupFilter().judge(data).verdicts.values()] == ["incomplete", "incomplete"]
    assert GroupFilter(min_members=2).judge(data).verdicts["prompt0"].keep


def test_a_rollout_of_several_rows_has_one_vote() -> None:
    data = DataProto(
        {"rm_scores": np.array([1.0, 1.0, 1.0, 1.0])},
        {"uid": np.array(["p"] * 4, dtype=object), "rollout": np.array(["a", "a", "a", "b"], dtype=object)},
    )
    judged = GroupFilter(rollout_id="rollout", query_filter={"type": "mean_filter", "filter_args": {"threshold_down": 0.6}}).judge(data)
    assert judged.verdicts["p"].evidence["n"] == 2
    assert judged.rows.tolist() == [0, 1, 2, 3]
    data.batch["rm_scores"] = np.array([1.0, 0.0, 1.0, 1.0])
    with pytest.raises(FilterError, match="rollout: .*has one reward"):
        GroupFilter(rollout_id="rollout").judge(data)


def masked(groups: list[list[float]], lengths: list[int], **columns: Any) -> DataProto:
    """As `data_of`, with so many tokens of the policy in each row."""
    data = data_of(DataProto, groups, **columns)
    data.batch["response_mask"] = np.array([[1] * length + [0] * (3 - length) for length in lengths])
    return data


def test_a_row_of_which_no_token_trains_has_no_vote() -> None:
    """verl-project/verl#6310, NVIDIA-NeMo/RL#4160: an empty response with a reward on its padding, a row that is masked altogether."""
    judged = GroupFilter().judge(masked([[1, 1, 1, 0], [1, 0, 1, 0], [1, 0], [1, 0]], [2, 2, 2, 0, 2, 2, 2, 0, 2, 0, 0, 0]))
    assert [verdict.keep for verdict in judged.verdicts.values()] == [False, True, False, False]
    assert judged.verdicts["prompt0"].reason == "no_spread"
    assert judged.rows.tolist() == [4, 5, 6, 7]  # rows stay together: a loss leaves out what its mask leaves out
    parts = masked([[1, 1, 0, 0]], [2, 2, 2, 0], rollout=np.array([0, 1, 2, 2]))
    assert GroupFilter(rollout_id="rollout").judge(parts).kept == 1  # of a part of it something trains
    parts.batch["response_mask"][2] = 0
    assert GroupFilter(rollout_id="rollout").judge(parts).kept == 0
    outputs = [AgentLoopOutput(1.0), AgentLoopOutput(1.0), AgentLoopOutput(0.0, response_mask=[0, 0])]
    assert GroupFilter().judge_outputs(outputs).reason == "no_spread"
    assert GroupFilter().judge_outputs([*outputs, AgentLoopOutput(0.0)]).keep


def test_the_guard_bounds_what_is_dropped(make: Make) -> None:
    keeper = GroupFilter(guard=RatioGuard(max_filter_ratio=0.5))
    judged = keeper.judge(data_of(make, [[1.0, 1.0]] * 4))
    assert [verdict.reason for verdict in judged.verdicts.values()] == ["kept_by_guard", "no_spread", "kept_by_guard", "no_spread"]


def test_a_batch_of_nothing_has_no_data(make: Make) -> None:
    judged = GroupFilter().judge(data_of(make, [[1.0, 1.0]]))
    assert (judged.data, judged.kept, judged.rows.tolist()) == (None, 0, [])


ACC = {"type": "std_filter", "metric": "acc"}


def objects(values: list[Any]) -> Any:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def verdicts(uids: list[Any], scores: Any, **settings: Any) -> list[tuple[Any, str]]:
    columns = settings.pop("columns", {})
    data = DataProto({"rm_scores": np.asarray(scores)}, {"uid": objects(uids), **{name: objects(v) for name, v in columns.items()}})
    return [(uid, verdict.reason) for uid, verdict in GroupFilter(**settings).judge(data).verdicts.items()]


def test_case_51_uids_are_told_apart_by_what_they_are_and_not_by_the_object_that_holds_them() -> None:
    torch = pytest.importorskip("torch")
    assert verdicts([torch.tensor(1), torch.tensor(1), np.int64(2), 2], [1.0, 0.0, 1.0, 1.0]) == [(1, "kept"), (2, "no_spread")]
    assert verdicts([1, "1", 1, "1"], [1.0, 0.0, 1.0, 0.0]) == [(1, "no_spread"), ("1", "no_spread")]
    mixed = DataProto({"rm_scores": np.array([1.0, 0.0, 1.0, 0.0])}, {"uid": [1, "1", 1, "1"]})  # a list, not an array
    assert [verdict.reason for verdict in GroupFilter().judge(mixed).verdicts.values()] == ["no_spread", "no_spread"]


@pytest.mark.parametrize("bad", [None, float("nan"), [1], {"a": 1}], ids=str)
def test_a_uid_that_tells_no_group_from_another_is_refused(bad: Any) -> None:
    with pytest.raises(FilterError, match=r"non_tensor_batch\['uid'\]: .*index 1.*gives every prompt a uid"):
        verdicts(["a", bad], [1.0, 0.0])


@pytest.mark.parametrize(
    ("scores", "columns"), [([1.0], {}), ([1.0, 0.0, 1.0], {}), ([[[1.0]], [[0.0]]], {}), ([1.0, 0.0], {"acc": [1.0]})], ids=str
)
def test_columns_that_do_not_fit_together_are_refused(scores: Any, columns: Any) -> None:
    with pytest.raises(FilterError, match="2 rows"):
        verdicts(["a", "a"], scores, columns=columns)


def test_case_1_the_same_scores_on_other_tokens_are_the_same_reward() -> None:
    tokens = [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]]
    assert tokens[0][0] + tokens[0][1] + tokens[0][2] != tokens[1][0] + tokens[1][1] + tokens[1][2]
    assert verdicts(["a", "a"], tokens) == [("a", "no_spread")]


def test_case_13_scores_beside_the_reward_may_be_numbers_of_any_library() -> None:
    torch = pytest.importorskip("torch")
    for one, other in ((True, False), (np.bool_(1), np.float32(0)), (torch.tensor(1.0), torch.tensor(0.0)), (2**53, 2**53 + 1)):
        assert verdicts(["a", "a"], [1.0, 1.0], columns={"acc": [one, other]}, query_filter=ACC) == [("a", "kept")]
        outputs = [AgentLoopOutput(None, [1], {"reward_extra_info": {"acc": value}}) for value in (one, other)]
        assert GroupFilter(query_filter=ACC).judge_outputs(outputs).keep
    assert GroupFilter().judge_outputs([AgentLoopOutput(torch.tensor(1.0)), AgentLoopOutput(np.float32(0))]).keep  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", ["1", {"x": 1}, [1]], ids=str)
def test_a_reward_that_is_no_number_is_refused_in_words(bad: Any) -> None:
    with pytest.raises(FilterError, match="expected one number as the reward"):
        verdicts(["a", "a"], [1.0, 1.0], columns={"acc": [bad, bad]}, query_filter=ACC)
    with pytest.raises(FilterError, match="expected one number as the reward"):
        GroupFilter().judge_outputs([AgentLoopOutput(bad), AgentLoopOutput(bad)])


def test_a_group_without_the_metric_is_incomplete_and_a_metric_that_nobody_has_is_a_mistake() -> None:
    uids, values = ["a", "a", "b", "b"], [None, None, 1.0, 0.0]
    assert verdicts(uids, [1.0, 0.0] * 2, columns={"acc": values}, query_filter=ACC) == [("a", "incomplete"), ("b", "kept")]
    outputs = [AgentLoopOutput(None, [1], {"reward_extra_info": {"fmt": 1.0}})] * 2
    with pytest.raises(FilterError, match=r"metric is 'acc'.*\['fmt'\]"):
        GroupFilter(query_filter=ACC).judge_outputs(outputs)
    aborted = [AgentLoopOutput(None), AgentLoopOutput(None)]
    assert GroupFilter(query_filter=ACC).judge_outputs(aborted).reason == "incomplete"


def test_case_49_rows_of_one_rollout_agree_on_what_is_judged() -> None:
    rollouts = {"rollout": ["x", "x", "y"]}
    settings = {"rollout_id": "rollout", "query_filter": ACC}
    columns = rollouts | {"acc": [1, 1, 0]}
    assert verdicts(["a"] * 3, [0.5, 0.0, 0.0], columns=columns, **settings) == [("a", "kept")]  # scores of rows are not read
    with pytest.raises(FilterError, match=r"a rollout has one reward: name the column that holds it as the filter's metric"):
        verdicts(["a"] * 3, [0.0] * 3, columns=rollouts | {"acc": [1, 0, 0]}, **settings)


def test_a_group_of_another_size_is_dropped_where_the_size_is_said() -> None:
    uids = ["whole"] * 3 + ["short"] * 2 + ["long"] * 4
    scores = [1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert [reason for _, reason in verdicts(uids, scores, group_size=3)] == ["kept", "response_count", "response_count"]
    assert [reason for _, reason in verdicts(uids, scores, group_size=3, min_members=2)] == ["kept", "kept", "response_count"]
    assert [reason for _, reason in verdicts(uids, scores)] == ["kept"] * 3
    with pytest.raises(ConfigError, match="compares the members of a group"):
        GroupFilter(group_size=1)


def test_tensors_that_need_gradients_or_are_of_half_precision_are_read() -> None:
    torch = pytest.importorskip("torch")
    scores = torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16, requires_grad=True)
    data = DataProto({"rm_scores": scores, "response_mask": torch.ones(2, 1, dtype=torch.bfloat16)}, {"uid": objects(["a", "a"])})
    assert not GroupFilter(query_filter={"type": "mean_filter", "filter_args": {"threshold_up": 0.5}}).judge(data).kept


# ---------------------------------------------------------------- filling


def test_a_prompt_that_is_sampled_again_under_its_old_uid_is_no_second_group(make: Make) -> None:
    filler = BatchFiller(groups=3, group_filter=GroupFilter())
    filler.add(data_of(make, GROUPS[:2]))
    with pytest.raises(FilterError, match="uids of their own, got 'prompt0' again"):
        filler.add(data_of(make, GROUPS[:1]))
    assert filler.missing == 2
    filler.take()
    filler.add(data_of(make, GROUPS[:1]))


def test_batches_are_collected_until_they_are_full(make: Make) -> None:
    filler = BatchFiller(groups=3, group_filter=GroupFilter())
    assert filler.missing == 3
    filler.add(data_of(make, GROUPS, place=np.arange(9)))
    assert filler.missing == 1
    filler.add(data_of(make, GROUPS, sampled=1, place=np.arange(9, 18)))
    assert filler.missing == 0
    batch, metrics = filler.take()
    assert batch.non_tensor_batch["place"].tolist() == [0, 1, 2, 6, 7, 8, 9, 10, 11]
    assert metrics["scheduler/collect_query_count"] == 3
    assert metrics["scheduler/surplus_groups"] == 1
    assert metrics["scheduler/acceptance_rate"] == 4 / 6
    assert filler.missing == 3


def test_surplus_groups_are_carried_where_that_is_wanted(make: Make) -> None:
    filler = BatchFiller(groups=1, group_filter=GroupFilter(), surplus="carry")
    filler.add(data_of(make, GROUPS))
    filler.take()
    assert filler.missing == 0
    filler.take()
    assert filler.missing == 1


@pytest.mark.parametrize("kept", [0, 1])
def test_the_bound_ends_the_filling(make: Make, kept: int) -> None:
    groups = [[1.0, 1.0]] * 3 if not kept else [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    raising = BatchFiller(groups=4, group_filter=GroupFilter(), max_gen_batches=2)
    shrinking = BatchFiller(groups=4, group_filter=GroupFilter(), max_gen_batches=2, on_exhausted="shrink")
    for filler in (raising, shrinking):
        for time in range(2):
            assert filler.missing > 0
            filler.add(data_of(make, groups, sampled=time))
    with pytest.raises(ResampleError, match=rf"4 groups, kept {2 * kept} after max_gen_batches \(2\).*no_spread {6 - 2 * kept}"):
        _ = raising.missing
    if kept:
        assert shrinking.missing == 0
        assert len(shrinking.take()[0]) == 4
    else:
        with pytest.raises(ResampleError):
            _ = shrinking.missing


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="query_filter"):
        GroupFilter(query_filter={"type": "std"})
    with pytest.raises(ValueError, match="on_exhausted: expected one of raise, shrink"):
        BatchFiller(groups=1, group_filter=GroupFilter(), on_exhausted="wait")
    with pytest.raises(ValueError, match="at least 1"):
        BatchFiller(groups=0, group_filter=GroupFilter())


# ---------------------------------------------------------------- agent loops


def output(kind: str, reward: float | None, **extra: Any) -> Any:
    if kind == "shaped like it":
        return AgentLoopOutput(reward, [1, 0, 1], extra)
    loop = pytest.importorskip("verl.experimental.agent_loop.agent_loop", reason="verl is not installed with its agent loops")
    return loop.AgentLoopOutput(
        prompt_ids=[1],
        response_ids=[2, 3, 4],
        response_mask=[1, 0, 1],
        reward_score=reward,
        metrics=loop.AgentLoopMetrics(),
        extra_fields=extra,
    )


@pytest.mark.parametrize("kind", ["shaped like it", "the real one"])
def test_trajectories_are_judged_by_their_score_or_by_what_came_with_it(kind: str) -> None:
    group = [output(kind, reward, reward_extra_info={"acc": 1.0}) for reward in (1.0, 0.5)]
    assert GroupFilter().judge_outputs(group).keep
    by_accuracy = GroupFilter(query_filter={"type": "std_filter", "metric": "acc"})
    assert by_accuracy.judge_outputs(group).reason == "no_spread"
    assert by_accuracy.judge_outputs([output(kind, None, reward_extra_info={"acc": acc}) for acc in (1.0, 0.0)]).keep
    assert GroupFilter().judge_outputs([output(kind, None), output(kind, 1.0)]).reason == "incomplete"


@pytest.mark.parametrize("kind", ["shaped like it", "the real one"])
def test_the_gate_decides_on_running_trajectories(kind: str) -> None:
    gate = Gate(k=3, threshold=0.5)
    together = [output(kind, None, actions=["north", "north", "take"]) for _ in range(4)]
    apart = [output(kind, None, actions=[f"{name}{step}" for step in range(3)]) for name in "abcd"]
    cut = decide(gate, together)
    assert cut is not None
    assert (cut.keep, cut.reason) == (False, "converged_prefix")
    kept = decide(gate, apart)
    assert kept is not None
    assert kept.keep
    assert decide(gate, [*together[:2], output(kind, 1.0, actions=["north"]), output(kind, 0.0, actions=["up"])]) is None  # they differ
    assert decide(gate, [output(kind, 1.0, actions=["north"])] * 2) is None  # nobody runs any more
