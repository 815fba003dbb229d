"""Recorded groups: figures by hand, against slow definitions, and of the published data where they are at hand."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ConfigError, GateError
from sluice.gate import OrTermination, SingleAxis, build_rule
from sluice.gate.offline import RecordedGroups, auroc, bootstrap, evaluate, oracle, spearman

ROOT = Path(__file__).parents[2]
PLACES = [Path(os.environ["SLUICE_SHARED"])] if "SLUICE_SHARED" in os.environ else [ROOT / "shared", ROOT.parent / "shared"]
NAME = "selective_rollout_features.csv"
PUBLISHED = next((place / "data" / NAME for place in PLACES if (place / "data" / NAME).is_file()), None)

D = "prefix_edit_distance_mean"


def groups(d, variance, *, k: int = 2, horizon: int = 8, **more) -> RecordedGroups:
    return RecordedGroups.of_columns({D: d, "reward_var": variance, **more}, k=k, horizon=horizon)


# ---------------------------------------------------------------- by hand


def test_the_figures_of_four_groups() -> None:
    """d 0.05 (equal), 0.10 (spread), 0.11 (equal), 0.5 (equal), threshold 0.11: two cuts, one of them right."""
    table = groups([0.05, 0.10, 0.11, 0.5], [0.0, 0.25, 0.0, 0.0], lengths=[[8, 8], [4, 2], [1, 8], [3, 3]])
    point = evaluate(table, SingleAxis(threshold=0.11))
    assert (point.groups, point.cut, point.true_cuts, point.false_cuts, point.missed) == (4, 2, 1, 1, 2)
    assert (point.precision, point.recall) == (0.5, 1 / 3)
    assert point.safe_saving == pytest.approx(1 * 6 / (4 * 8))
    assert point.raw_saving == pytest.approx(2 * 6 / (4 * 8))
    assert point.safe_step_saving == pytest.approx(12 / 37)
    assert point.raw_step_saving == pytest.approx(14 / 37)
    assert point.advantage_kept == 0.0
    best = oracle(table)
    assert (best.cut, best.precision, best.recall, best.advantage_kept) == (3, 1.0, 1.0, 1.0)
    assert best.safe_step_saving == best.raw_step_saving == pytest.approx((12 + 6 + 2) / 37)


def test_figures_that_do_not_exist_are_none() -> None:
    point = evaluate(groups([0.5, 0.6], [0.1, 0.2]), SingleAxis(threshold=0.1))
    assert (point.precision, point.recall, point.safe_step_saving, point.raw_step_saving) == (None, None, None, None)
    labels = RecordedGroups.of_columns({D: [0.0, 1.0], "zero_variance": [True, False]}, k=1, horizon=3)
    assert evaluate(labels, SingleAxis()).advantage_kept is None
    assert evaluate(groups([0.0, 1.0], [0.0, 0.0]), SingleAxis()).advantage_kept is None


def test_advantages_of_centred_groups_weigh_by_their_variance() -> None:
    table = groups([0.0, 1.0], [0.1, 0.3])
    assert evaluate(table, SingleAxis()).advantage_kept == pytest.approx(math.sqrt(1 / 2), abs=1e-6)
    assert evaluate(table, SingleAxis(), scale="none").advantage_kept == pytest.approx(math.sqrt(3 / 4))


def test_advantages_are_those_of_the_rewards() -> None:
    """Against advantages that are computed one by one, with the population deviation."""
    rewards = np.array([[0, 0, 1, 1], [0, 0, 0, 1.0], [1, 1, 1, 1], [0.2, 0.4, 0.4, 1]])
    table = groups([0.0, 0.5, 0.0, 0.5], rewards.var(axis=1))
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / (rewards.std(axis=1, keepdims=True) + 1e-8)
    kept = np.linalg.norm(advantages[[1, 3]]) / np.linalg.norm(advantages)
    assert evaluate(table, SingleAxis()).advantage_kept == pytest.approx(kept, abs=1e-9)


def test_ranks_with_ties() -> None:
    # Ranks 1, 2.5, 2.5, 4 against 2, 1, 3.5, 3.5.
    assert spearman([1, 2, 2, 3], [5, 1, 7, 7]) == pytest.approx(0.5)
    assert spearman([1, 2, 3], [10, 100, 1000]) == 1.0
    assert spearman([1, 2, 3], [3, 2, 1]) == -1.0
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert spearman([], []) is None
    # Positive 0.5, 0.9 against 0.1, 0.5: 3 of 4 pairs higher, one tie.
    assert auroc([0.5, 0.9, 0.1, 0.5], [True, True, False, False]) == 0.875
    assert auroc([0.5, 0.9], [True, True]) is None


# ---------------------------------------------------------------- properties

VALUES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=2, max_size=25)


@given(VALUES)
def test_auroc_is_the_share_of_pairs(pairs) -> None:
    values, positive = [v / 4 for v, _ in pairs], [p > 1 for _, p in pairs]
    won = [
        (a > b) + (a == b) / 2
        for a, is_a in zip(values, positive, strict=True)
        if is_a
        for b, is_b in zip(values, positive, strict=True)
        if not is_b
    ]
    assert auroc(values, positive) == (pytest.approx(sum(won) / len(won)) if won else None)


@given(VALUES)
def test_spearman_is_the_correlation_of_ranks(pairs) -> None:
    def ranks(column):
        return [sum(other < one for other in column) + (sum(other == one for other in column) + 1) / 2 for one in column]

    x, y = zip(*pairs, strict=True)
    found = spearman(x, y)
    if len({*x}) == 1 or len({*y}) == 1:
        assert found is None
    else:
        assert found == pytest.approx(np.corrcoef(ranks(x), ranks(y))[0, 1], abs=1e-12)
        assert -1 <= found <= 1


@given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0.0, 0.1, 0.25])), min_size=1, max_size=30), st.floats(0, 1))
def test_counts_add_up_and_the_order_of_groups_changes_nothing(rows, threshold: float) -> None:
    d, variance = zip(*rows, strict=True)
    table = groups(d, variance)
    point = evaluate(table, SingleAxis(threshold=threshold))
    assert point.true_cuts + point.false_cuts == point.cut == sum(one < threshold for one in d)
    assert point.true_cuts + point.missed == sum(one == 0 for one in variance)
    assert 0 <= point.safe_saving <= point.raw_saving <= 1
    assert evaluate(table.take(np.arange(len(table))[::-1]), SingleAxis(threshold=threshold)) == point
    best = oracle(table)
    assert best.safe_saving >= point.safe_saving
    assert best.advantage_kept in (None, 1.0)


def test_task_types_have_their_rules_and_their_figures() -> None:
    table = groups([0.1, 0.1, 0.1], [0.0, 0.2, 0.0], task_type=["look", "put", "look"])
    rule = build_rule({"type": "by_task_type", "rules": {"look": 0.2}})
    assert table.cuts(rule).tolist() == [True, False, True]
    assert {kind: evaluate(part, rule).cut for kind, part in table.by_task_type().items()} == {"look": 2, "put": 0}


def test_bootstrap_intervals_hold_the_figure_and_repeat_with_their_seed() -> None:
    source = np.random.default_rng(1)
    table = groups(source.random(60), np.where(source.random(60) < 0.4, 0.0, 0.2))
    point = evaluate(table, SingleAxis(threshold=0.4))
    ends = bootstrap(table, SingleAxis(threshold=0.4), np.random.default_rng(7), draws=300)
    assert ends["precision"][0] < point.precision < ends["precision"][1]
    assert ends["safe_saving"][0] < point.safe_saving < ends["safe_saving"][1]
    assert "safe_step_saving" not in ends
    assert ends == bootstrap(table, SingleAxis(threshold=0.4), np.random.default_rng(7), draws=300)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"reward_var": [0.0]}, "expected at least one of prefix_edit_distance_mean"),
        ({D: [0.1]}, "expected zero_variance or reward_var, got prefix_edit_distance_mean"),
        ({D: [0.1, 0.2], "reward_var": [0.0]}, f"signals.{D}: expected one entry per group, that is 1, got 2"),
        ({D: [math.nan, 0.2], "reward_var": [0.0, 0.0]}, f"signals.{D}: expected a number >= 0 and <= 1, got .*nan.* in row 0"),
        ({D: [0.1, 1.2], "reward_var": [0.0, 0.0]}, f"signals.{D}: .* in row 1"),
        ({D: [0.1], "reward_var": [math.nan]}, "reward_var: expected a finite variance >= 0"),
        ({D: [0.1], "reward_var": [-1.0]}, "reward_var: expected a finite variance >= 0"),
        ({D: [0.1], "reward_var": [0.5], "zero_variance": [True]}, "reward_var: expected 0 exactly where zero_variance is true"),
        ({D: [0.1], "zero_variance": [1]}, "zero_variance: expected true or false, got int64"),
        ({D: ["0.1", ""], "reward_var": [0.0, 0.1]}, f"{D}: expected numbers, got what numpy cannot read"),
        ({D: [0.1, 0.1], "reward_var": [0.0, 0.1], "lengths": [[1, 2], [3]]}, "lengths: expected numbers, got what numpy cannot read"),
        ({D: [], "reward_var": []}, "groups: expected at least one, got none"),
        ({D: [0.1], "reward_var": [0.0], "lengths": [[9, 3]]}, "lengths: .* with 0 to 8 steps each, got shape .* from 3 to 9"),
        ({D: [0.1], "reward_var": [0.0], "lengths": [3]}, "lengths: expected one row of members per group"),
        ({D: [0.1], "reward_var": [0.0], "task_type": []}, "task_types: expected one entry per group"),
    ],
    ids=str,
)
def test_a_table_that_cannot_be_says_what_to_change(columns, message: str) -> None:
    with pytest.raises(GateError, match=message):
        RecordedGroups.of_columns(columns, k=2, horizon=8)


def test_k_and_horizon_must_fit() -> None:
    for k in (8, 9):
        with pytest.raises(GateError, match=f"k: expected a step below the horizon 8, got {k}"):
            groups([0.1], [0.0], k=k)
    with pytest.raises(ConfigError, match="k: expected a whole number"):
        groups([0.1], [0.0], k=0)


def test_columns_and_masks_must_fit() -> None:
    table = groups([0.1, 0.2], [0.0, 0.1])
    with pytest.raises(GateError, match=r"cuts: expected one truth value per group, \[2\], got shape \(3,\) of bool"):
        evaluate(table, np.array([True, False, True]))
    with pytest.raises(GateError, match="the rule reads action_entropy"):
        evaluate(table, SingleAxis(signal="action_entropy"))
    with pytest.raises(GateError, match="scale: expected 'std' or 'none'"):
        evaluate(table, SingleAxis(), scale="max")
    with pytest.raises(GateError, match="spearman: expected columns of one length, got 2 and 1"):
        spearman([1, 2], [1])
    with pytest.raises(GateError, match="auroc: expected columns of one length, got 1 and 2"):
        auroc([1.0], [True, False])
    with pytest.raises(GateError, match="x: expected a number, got .*nan.* in row 1"):
        spearman([1, math.nan], [1, 2])
    with pytest.raises(GateError, match="signal: expected one number per group, got shape"):
        auroc([[1.0]], [True])


# ---------------------------------------------------------------- published data


@pytest.fixture(scope="module")
def published() -> dict[int, RecordedGroups]:
    """100 groups of 8 at K = 10, 15, 20 (arXiv 2605.05802, CC BY 4.0)."""
    if PUBLISHED is None:
        pytest.skip(f"{NAME} is not here: set SLUICE_SHARED to the folder that holds data/{NAME}")
    with PUBLISHED.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    tables = {}
    for k in (10, 15, 20):
        chosen = [row for row in rows if int(row["K"]) == k]
        columns = {name: [row[name] for row in chosen] for name in rows[0]}
        tables[k] = RecordedGroups.of_columns(columns, k=k, horizon=30)
    return tables


def test_the_published_operating_point(published) -> None:
    point = evaluate(published[10], SingleAxis(threshold=0.12))
    assert (point.cut, point.true_cuts, point.false_cuts) == (21, 17, 4)
    assert point.precision == pytest.approx(0.8095, abs=5e-5)
    assert point.recall == pytest.approx(0.4359, abs=5e-5)
    assert point.safe_saving == pytest.approx(0.1133, abs=5e-5)
    assert point.raw_saving == pytest.approx(0.14)
    assert point.advantage_kept == pytest.approx(0.96666, abs=5e-6)


@pytest.mark.parametrize(
    ("threshold", "cut", "true"), [(0.10, 20, 16), (0.12, 21, 17), (0.14, 24, 18), (0.18, 25, 19)], ids=["0.10", "0.12", "0.14", "0.18"]
)
def test_points_beside_it(published, threshold: float, cut: int, true: int) -> None:
    point = evaluate(published[10], SingleAxis(threshold=threshold))
    assert (point.cut, point.true_cuts) == (cut, true)


def test_the_published_references(published) -> None:
    assert oracle(published[10]).cut == 39
    both = evaluate(published[10], OrTermination())
    assert (both.cut, both.true_cuts) == (23, 19)


@pytest.mark.parametrize(("k", "rho", "area"), [(10, 0.3738, 0.7570), (15, 0.4192, 0.7728), (20, 0.4183, 0.7535)])
def test_the_published_correlations(published, k: int, rho: float, area: float) -> None:
    table = published[k]
    assert spearman(table.signals[D], table.reward_var) == pytest.approx(rho, abs=5e-5)
    assert auroc(table.signals[D], ~table.zero_variance) == pytest.approx(area, abs=5e-5)


@pytest.mark.parametrize("k", [10, 15, 20])
def test_the_published_correlations_of_all_seven_signals(published, k: int) -> None:
    with PUBLISHED.with_name("selective_rollout_correlation.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["K"]) == k]
    assert len(rows) == 7
    for row in rows:
        column = published[k].signals[row["metric"]]
        assert spearman(column, published[k].reward_var) == pytest.approx(float(row["spearman_rho"]), abs=1e-9)
        assert auroc(column, ~published[k].zero_variance) == pytest.approx(float(row["auroc_nonzero_var"]), abs=1e-9)
