"""What a gate did is read from run.db and from the scheduler's snapshot, and told in a few lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sluice.records import Journal, RunFolder, read_status, read_summary, status_lines, summary_lines
from sluice.records.gate_lines import TaskTypeTotal, gate_line, gate_lines, gate_of
from sluice.records.rundb import SCHEDULER
from sluice.scheduler.events import GroupRecord

METRICS = {
    "gate/judged": 50.0,
    "gate/undecided": 10.0,
    "gate/would_cut": 14.0,
    "gate/cut": 12.0,
    "gate/is_cutting": 1.0,
    "gate/precision_n": 20.0,
    "gate/precision": 0.9,
    "gate/precision_low": 0.683,
    "gate/precision_high": 0.988,
    "gate/env_steps_saved_estimate": 1234.0,
    "gate/env_steps_saved_estimate_low": 1000.0,
    "gate/env_steps_saved_estimate_high": 1500.0,
    "gate/env_steps_saved_bound": 2000.0,
    "gate/tokens_saved_estimate": 12340.0,
    "gate/tokens_saved_estimate_low": 10000.0,
    "gate/tokens_saved_estimate_high": 15000.0,
    "gate/tokens_saved_bound": 20000.0,
    "gate/seconds": 0.25,
}
FUTILE = {
    "gate/futile_would_stop": 9.0,
    "gate/futile_stopped": 8.0,
    "gate/futile_audited": 1.0,
    "gate/futile_precision": 1.0,
    "gate/futile_precision_low": 0.025,
    "gate/futile_precision_high": 1.0,
    "gate/futile_env_steps_saved_bound": 130.0,
}
MakeRecord = Callable[..., GroupRecord]


def without_prefix(metrics: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("gate/"): value for name, value in metrics.items()}


def test_the_printout_of_a_run_with_a_gate_reads_as_intended(folder: RunFolder, record: MakeRecord) -> None:
    with Journal(folder.run_db) as journal:
        for i in range(6):
            journal.group(record(i, task_type="look"))
        for i in range(6, 9):
            journal.group(record(i, outcome="cut", reason="converged_prefix", category="low_information", task_type="clean"))
        journal.group(record(9, outcome="cut", reason="converged_prefix", category="low_information", task_type="look"))
        journal.metrics(1, dict.fromkeys(METRICS, 0.0))
        journal.metrics(2, {**METRICS, **FUTILE})
        journal.ledger(2, {"trained": 60, "cut": 40}, {"trained": 12, "cut": 8})
    lines = summary_lines(read_summary(folder.run_db))
    start = lines.index("Gate                                    60  groups decided on")
    assert lines[start : lines.index("", start)] == [
        "Gate                                    60  groups decided on",
        "  cut                                   12    20.0%",
        "  would have been cut                   14    23.3%",
        "    precision                        0.900  (0.683 to 0.988, 20 audited)",
        "    environment steps saved          1,234  (1,000 to 1,500, at most 2,000)",
        "    tokens saved                    12,340  (10,000 to 15,000, at most 20,000)",
        "  members stopped as futile              8",
        "  would have been stopped                9",
        "    precision                        1.000  (0.025 to 1.000, 1 audited)",
        "    environment steps saved              -  (at most 130)",
        "  seconds spent deciding              0.25",
        "Kinds of problems                 launched      cut  trained",
        "  look                               70.0%    25.0%   100.0%",
        "  clean                              30.0%    75.0%     0.0%",
    ]
    assert "  cut                                   40   40.0%" in lines
    assert "    low_information/converged_prefix     4   40.0%" in lines
    assert all(len(line) <= 80 or str(folder.path) in line for line in lines)


def test_a_run_without_a_gate_says_nothing_of_one(folder: RunFolder, record: MakeRecord) -> None:
    with Journal(folder.run_db) as journal:
        journal.group(record(0, task_type="look"))
        journal.metrics(1, {"scheduler/acceptance_rate": 1.0})
    summary = read_summary(folder.run_db)
    assert (summary.gate, summary.task_types) == ({}, ())
    assert not any("Gate" in line or "Kinds" in line for line in summary_lines(summary))


def test_the_status_of_a_run_tells_its_gate_in_one_line(folder: RunFolder) -> None:
    with Journal(folder.run_db) as journal:
        journal.fact(SCHEDULER, {"time": 1.0, "step": 2, "gate": METRICS})
        journal.flush()
        report = read_status(folder.run_db, now=2.0)
    assert report.gate == without_prefix(METRICS)
    assert "  gate            12 of 60 groups cut, precision 0.90 (0.68 to 0.99)" in status_lines(report)


def test_the_status_of_a_run_that_has_ended_still_tells_its_gate(folder: RunFolder) -> None:
    with Journal(folder.run_db) as journal:
        journal.fact(SCHEDULER, {"time": 1.0, "step": 2, "gate": dict.fromkeys(METRICS, 0.0)})
        journal.metrics(2, METRICS)
        journal.close("finished")
    lines = status_lines(read_status(folder.run_db, now=2.0))
    assert lines[lines.index("At its end") + 1] == "  gate            12 of 60 groups cut, precision 0.90 (0.68 to 0.99)"


def test_long_names_of_kinds_leave_the_columns_where_they_are() -> None:
    kinds = tuple(
        TaskTypeTotal(task_type=name, launched=10, cut=3, trained=5) for name in ("look", "pick_clean_then_place_in_recep", "x" * 60)
    )
    *_, look, clean, longest = gate_lines(without_prefix(METRICS), kinds)
    assert (look[:6], clean[:32]) == ("  look", "  pick_clean_then_place_in_recep")
    assert look[36:] == clean[36:] == " 33.3%    33.3%    33.3%"
    assert longest == f"  {'x' * 60} 33.3%    33.3%    33.3%"


def test_one_line_says_what_kind_of_gate_it_is() -> None:
    assert gate_line(without_prefix({**METRICS, "gate/is_cutting": 0.0})) == "14 of 60 groups would be cut, precision 0.90 (0.68 to 0.99)"
    assert gate_line(without_prefix(FUTILE)) == "8 members stopped as futile, precision 1.00 (0.03 to 1.00)"
    assert gate_line({}) == "it has decided nothing yet"
    assert gate_line({"judged": 0.0, "undecided": 0.0}) == "0 of 0 groups would be cut"


def test_a_shadow_has_saved_nothing_and_says_what_it_would_have_done() -> None:
    shadow = {**METRICS, **FUTILE, "gate/cut": 0.0, "gate/is_cutting": 0.0, "gate/futile_stopped": 0.0}
    lines = gate_lines(without_prefix(shadow), ())
    assert not any("saved" in line for line in lines)
    assert "  would have been cut                   14    23.3%" in lines
    assert "  would have been stopped                9" in lines


def test_kinds_are_left_out_where_nothing_was_cut_or_no_environment_says_them() -> None:
    assert not any("Kinds" in line for line in gate_lines(without_prefix(METRICS), ()))


@given(
    st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), lambda inner: st.dictionaries(st.text(max_size=9), inner))
)
def test_whatever_a_snapshot_holds_it_is_told_or_left_out(told: Any) -> None:
    gate = gate_of(told)
    if gate is not None:
        assert isinstance(gate_line(gate), str)
        assert isinstance(gate_lines(gate, ()), list)
