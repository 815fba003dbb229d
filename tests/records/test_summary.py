"""The final printout tells what a run did, and its figures come from run.db alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.execution.validation import ValidationResult
from sluice.records import ENGINE_TOKENS, MAX_STEPS, BatchRecord, Journal, RunFolder, RunSummary, over_all, read_summary, summary_lines
from sluice.records.rundb import create_run_db
from sluice.records.summary import clock_time
from sluice.scheduler.events import GroupRecord


def result(mean: float | None, items: int = 200, unscored: int = 0) -> ValidationResult:
    scored = items - unscored
    return ValidationResult(
        items=items,
        scored=scored,
        reward_sum=0.0 if mean is None else mean * scored,
        unscored={"reward_timeout": unscored} if unscored else {},
        truncated=0,
        sampled_tokens=items,
    )


@pytest.fixture
def run(folder: RunFolder, record: Callable[..., GroupRecord]) -> RunSummary:
    """A small run: 3 steps asked, 2 done, one batch short, 9 groups, held-out accuracy measured three times."""
    now = iter(range(1_000))
    with Journal(folder.run_db, clock=lambda: float(next(now))) as journal:
        journal.fact(MAX_STEPS, 3)
        journal.validation(0, {"add": result(0.48), "chain": result(0.35)})
        for i in range(5):
            journal.group(record(i))
        for i in range(5, 7):
            journal.group(record(i, outcome="dropped", reason="no_spread", category="low_information"))
        journal.group(record(7, outcome="dropped", reason="reward_timeout", category="invalid"))
        journal.group(record(8, outcome="cancelled", reason="batch_full", sampled_tokens=4))
        journal.ledger(1, {"trained": 30, "dropped": 10, "cancelled": 0, "late": 0}, {"trained": 6, "dropped": 2})
        journal.batch(BatchRecord(step=1, requested=3, group_ids=(0, 1, 2), tokens=30, useful_groups=2, useful_tokens=20, fill_s=1.0))
        journal.validation(1, {"add": result(0.6), "chain": result(0.5)})
        journal.ledger(2, {"trained": 50, "dropped": 30, "cancelled": 4, "late": 1}, {"trained": 10, "dropped": 6, "cancelled": 2})
        journal.batch(BatchRecord(step=2, requested=3, group_ids=(3, 4), tokens=20, useful_groups=2, useful_tokens=20, fill_s=1.0))
        journal.validation(2, {"add": result(0.76), "chain": result(0.7, unscored=10)})
        journal.event("warning", "a batch was short")
        journal.fact(ENGINE_TOKENS, 85)
    return read_summary(folder.run_db)


def test_the_printout_reads_as_intended(run: RunSummary) -> None:
    lines = summary_lines(replace(run, seconds=381.0))
    assert [line.replace(str(run.run_db.parent), "RUN") for line in lines] == [
        "Run finished after 2 of 3 steps in 6:21",
        "  1 of 6 requested groups did not come: some batches were short",
        "  1 warning: see the table events in run.db",
        "",
        "Held-out reward                 before   after  change   items",
        "  add                            0.480   0.760  +0.280     200",
        "  chain                          0.350   0.700  +0.350     200  (10 not scored)",
        "  mean                           0.415   0.731  +0.316     400  (10 not scored)",
        "",
        "Tokens generated                        85  = 85 counted by the engine",
        "  trained                               50   58.8%",
        "  dropped                               30   35.3%",
        "  cancelled                              4    4.7%",
        "  late                                   1    1.2%",
        "Useful tokens                           40   47.1%  (non-zero advantage)",
        "Tokens per useful group                 21  (4 useful groups)",
        "",
        "Groups launched                          9",
        "  trained                                5   55.6%",
        "  dropped                                3   33.3%",
        "    low_information/no_spread            2   22.2%",
        "    invalid/reward_timeout               1   11.1%",
        "  cancelled                              1   11.1%",
        "    batch_full                           1   11.1%",
        "",
        "Results        RUN",
    ]


def test_the_lines_are_ascii_and_fit_80_columns(run: RunSummary) -> None:
    large = replace(
        run,
        ledger=tuple(replace(total, tokens=total.tokens * 10_000_000) for total in run.ledger),
        engine_tokens=850_000_000,
        useful_tokens=400_000_000,
    )
    for line in summary_lines(large)[:-1]:
        assert line.isascii()
        assert len(line) <= 80


def test_tokens_that_the_engine_counted_otherwise_are_said_loudly(run: RunSummary) -> None:
    lines = summary_lines(replace(run, engine_tokens=97))
    assert "Tokens generated                        85  BUT 97 counted by the engine" in lines
    assert "  not in the ledger                     12  (please report it)" in lines


def test_what_expired_and_what_a_kill_took_is_told_in_words_and_the_parts_sum_to_the_whole(
    folder: RunFolder, record: Callable[..., GroupRecord]
) -> None:
    with Journal(folder.run_db) as journal:
        journal.group(record(0))
        journal.group(record(1, outcome="expired", reason="stale"))
        journal.ledger(1, {"trained": 50, "expired": 25, "lost": 15, "of_a_later_version": 10}, {"trained": 4})
        journal.fact(ENGINE_TOKENS, 100)
    assert [line for line in summary_lines(read_summary(folder.run_db)) if "%" in line or "Tokens" in line] == [
        "Tokens generated                       100  = 100 counted by the engine",
        "  trained                               50   50.0%",
        "  expired                               25   25.0%",
        "  lost to kills                         15   15.0%",
        "  of_a_later_version                    10   10.0%",
        "Useful tokens                            0    0.0%  (non-zero advantage)",
        "  trained                                1   50.0%",
        "  expired                                1   50.0%",
        "    stale                                1   50.0%",
    ]


def test_results_that_exist_are_named(run: RunSummary) -> None:
    (run.run_db.parent / "model").mkdir()
    assert f"  Trained model {run.run_db.parent / 'model'}" in summary_lines(run)


def test_a_run_that_did_nothing_has_a_printout(tmp_path: Path) -> None:
    create_run_db(tmp_path / "run.db", {})
    summary = read_summary(tmp_path / "run.db")
    lines = summary_lines(summary)
    assert lines[0] == "Run running after 0 steps in 0:00"
    assert summary.before is None
    assert summary.after is None
    assert not any("Held-out" in line or "nan" in line for line in lines)


def test_one_evaluation_is_shown_as_before_only(tmp_path: Path) -> None:
    create_run_db(tmp_path / "run.db", {})
    with Journal(tmp_path / "run.db") as journal:
        journal.validation(0, {"add": result(0.5)})
    lines = summary_lines(read_summary(tmp_path / "run.db"))
    assert "  add                            0.500       -       -     200" in lines
    assert not any(line.startswith("  mean") for line in lines)


@settings(max_examples=15)  # each is a database
@given(st.data())
def test_case_126_every_group_is_counted_once_and_shares_sum_to_one(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    ways = [
        ("trained", "kept", None),
        ("dropped", "no_spread", "low_information"),
        ("dropped", "reward_timeout", "invalid"),
        ("dropped", "no_spread", "invalid"),
        ("cancelled", "batch_full", None),
        ("surplus", "batch_full", None),
        ("expired", "stale", None),
        ("of_a_later_version", "whatever", None),
    ]
    chosen = data.draw(st.lists(st.sampled_from(ways), min_size=1, max_size=40))
    path = tmp_path_factory.mktemp("summary") / "run.db"
    create_run_db(path, {})
    with Journal(path) as journal:
        for i, (outcome, reason, category) in enumerate(chosen):
            journal.group(
                GroupRecord(
                    group_id=i,
                    task_id="t",
                    domain="d",
                    epoch=0,
                    round=1,
                    start_step=0,
                    end_step=0,
                    outcome=outcome,
                    reason=reason,
                    category=category,  # type: ignore[arg-type]
                    source="s",
                    attempts=1,
                    sampled_tokens=i,
                    seconds=0.0,
                    policy_version=0,
                    rewards=(),
                )
            )
    summary = read_summary(path)
    assert Counter({(t.outcome, t.reason, t.category): t.groups for t in summary.groups}) == Counter(chosen)
    assert summary.launched == len(chosen)
    assert sum(t.groups / summary.launched for t in summary.groups) == pytest.approx(1.0)
    assert sum(t.tokens for t in summary.groups) == sum(range(len(chosen)))


def test_case_124_unscored_items_are_outside_the_mean_and_counted() -> None:
    pooled = over_all([result(1.0, items=3, unscored=2), result(0.0, items=1)])
    assert (pooled.items, pooled.scored, pooled.mean, pooled.unscored) == (4, 2, 0.5, {"reward_timeout": 2})
    assert over_all([result(None, items=3, unscored=3)]).mean is None
    assert over_all([]).mean is None


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 50), st.integers(0, 3)), min_size=1, max_size=5), st.randoms())
def test_the_overall_mean_weighs_items_and_does_not_depend_on_the_order_of_domains(
    domains: list[tuple[float, int, int]], rng: object
) -> None:
    results = [result(mean, items=scored + unscored, unscored=unscored) for mean, scored, unscored in domains]
    shuffled = list(results)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    pooled = over_all(results)
    assert pooled == over_all(shuffled)
    assert pooled.mean == pytest.approx(sum(m * n for m, n, _ in domains) / sum(n for _, n, _ in domains))


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (381, "6:21"), (3_723, "1:02:03"), (-1, "0:00")])
def test_times_read_as_on_a_clock(seconds: float, text: str) -> None:
    assert clock_time(seconds) == text
