"""Metrics reach every sink and run.db, and a bad metric or a broken sink never takes the run down."""

from __future__ import annotations

import builtins
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config.models import RecordsConfig
from sluice.errors import RecordError
from sluice.records import Journal, JsonlSink, RunFolder, Sinks, TensorBoardSink, build_sinks, open_for_reading, read_metrics
from sluice.records.sinks import check_metric_name, reduce_metric

part = st.text("abzAZ059_.@-", min_size=1, max_size=6)
names = st.lists(part, min_size=2, max_size=4).map("/".join)


class Remembering:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.written: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.written.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1


class Broken:
    """A sink on a disk that has gone."""

    def __init__(self) -> None:
        self.calls = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls += 1
        raise OSError("stale file handle")

    def close(self) -> None:
        raise OSError("stale file handle")


@pytest.fixture
def journal(folder: RunFolder) -> Iterator[Journal]:
    made = Journal(folder.run_db)
    yield made
    made.close("finished")


def metrics_in(folder: RunFolder) -> list[tuple[int, str, float | None]]:
    with open_for_reading(folder.run_db) as db:
        return db.execute("SELECT step, name, value FROM metrics").fetchall()


# ---------------------------------------------------------------- the fan-out


def test_every_sink_and_run_db_get_the_reports_of_all_components(folder: RunFolder, journal: Journal) -> None:
    first, second = Remembering(), Remembering()
    sinks = Sinks(journal, [first, second], warn=pytest.fail)
    written = sinks.write(3, {"a/x": 1, "a/y": np.float32(0.5)}, {"b/z": [1.0, None, 2.0], "b/none": None, "b/empty": []})
    sinks.close()
    journal.flush()
    assert written == {"a/x": 1.0, "a/y": 0.5, "b/z": 1.5}
    assert first.written == second.written == [(3, written)]
    assert metrics_in(folder) == [(3, name, value) for name, value in written.items()]
    assert (first.closed, second.closed) == (1, 1)


def test_a_failing_sink_is_dropped_with_one_warning_and_the_others_go_on(folder: RunFolder, journal: Journal) -> None:
    warnings: list[str] = []
    broken, sound = Broken(), Remembering()
    sinks = Sinks(journal, [broken, sound], warn=warnings.append)
    for step in range(3):
        sinks.write(step, {"a/x": 1.0})
    sinks.close()
    journal.flush()
    assert broken.calls == 1
    assert len(sound.written) == len(metrics_in(folder)) == 3
    assert warnings == ["Broken failed to write and gets no more metrics (OSError: stale file handle); run.db still holds them all"]
    assert sinks.dropped == {"Broken": "OSError: stale file handle"}


def test_a_sink_that_fails_to_close_is_warned_about(journal: Journal) -> None:
    warnings: list[str] = []
    Sinks(journal, [Broken()], warn=warnings.append).close()
    assert "failed to close" in warnings[0]


def test_a_failing_run_db_is_an_error_since_it_is_the_record(folder: RunFolder) -> None:
    journal = Journal(folder.run_db)
    journal.close("finished")
    with pytest.raises(RecordError):
        Sinks(journal, [], warn=pytest.fail).write(1, {"a/x": 1.0})


def test_case_13_metrics_never_take_the_run_down(journal: Journal) -> None:
    warnings: list[str] = []
    sinks = Sinks(journal, [], warn=warnings.append)
    bad: dict[Any, Any] = {"reward/mean": {"acc": 1, "fmt": 0}, "noroom": 1.0, "a/b c": 1.0, 7: 1.0, "a/text": "high", "a/object": object()}
    for step in range(2):
        assert sinks.write(step, bad, {"a/good": True, "a/also": np.int64(2), "a/scalar": np.array(0.25)}) == {
            "a/good": 1.0,
            "a/also": 2.0,
            "a/scalar": 0.25,
        }
    assert len(warnings) == len(bad)
    assert sinks.left_out == 2 * len(bad)
    assert any("'reward/mean'" in w and "must be a number" in w and "'acc': 1" in w for w in warnings)


def test_one_name_from_two_components_is_warned_about_and_the_later_value_counts(journal: Journal) -> None:
    warnings: list[str] = []
    assert Sinks(journal, [], warn=warnings.append).write(1, {"a/x": 1.0}, {"a/x": 2.0}) == {"a/x": 2.0}
    assert warnings == ["metric 'a/x' is reported by two components in one step: the later value counts"]


def test_case_124_no_value_is_no_metric_and_never_a_zero() -> None:
    assert reduce_metric(None) is None
    assert reduce_metric([]) is None
    assert reduce_metric([None, None, None]) is None
    assert reduce_metric(np.array([1.0, 0.0])) == 0.5
    assert reduce_metric(x for x in (1, 0, None)) == 0.5
    assert math.isnan(reduce_metric([1.0, math.nan]) or 0.0)


@given(names)
def test_names_of_two_or_more_parts_are_taken(name: str) -> None:
    assert check_metric_name(name) == name


@pytest.mark.parametrize("name", ["x", "", "/x", "x/", "a//b", "a/b c", "a/b\n", "a/é", None, 3])
def test_other_names_are_refused(name: object) -> None:
    with pytest.raises(RecordError, match="write room/what/stat"):
        check_metric_name(name)


# ---------------------------------------------------------------- JSONL


@given(st.lists(st.dictionaries(names, st.floats(), max_size=4), max_size=5))
def test_what_the_jsonl_sink_writes_is_read_back_exactly_nan_and_infinities_included(
    tmp_path_factory: pytest.TempPathFactory, steps: list[dict[str, float]]
) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "metrics.jsonl"
    sink = JsonlSink(path, clock=lambda: 5.0)
    for step, metrics in enumerate(steps):
        sink.write(step, metrics)
    sink.close()
    expected = [{"step": step, "time": 5.0, **metrics} for step, metrics in enumerate(steps)]
    assert repr([dict(sorted(m.items())) for m in read_metrics(path)]) == repr([dict(sorted(m.items())) for m in expected])


def test_a_line_is_strict_json_and_names_what_is_not_finite(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl", clock=lambda: 5.0)
    sink.write(3, {"trainer/loss": math.nan, "reward/kept_mean": 0.5, "a/b": -math.inf})
    (line,) = (tmp_path / "m.jsonl").read_text().splitlines()  # on disk before close
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 3,
        "time": 5.0,
        "trainer/loss": None,
        "reward/kept_mean": 0.5,
        "a/b": None,
        "non_finite": {"trainer/loss": "nan", "a/b": "-inf"},
    }
    sink.close()
    sink.close()


@given(st.integers(min_value=1, max_value=200))
def test_a_last_line_torn_anywhere_is_left_out_and_cut_off_before_the_next_one(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in range(3):
        sink.write(step, {"a/x": 1.0, "a/long": 1.23456789})
    sink.close()
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    torn = min(cut, last - 1)
    path.write_bytes(whole[:-torn])
    assert [m["step"] for m in read_metrics(path)] == [0, 1]
    again = JsonlSink(path)
    again.write(2, {"a/x": 2.0})
    again.close()
    assert [(m["step"], m["a/x"]) for m in read_metrics(path)] == [(0, 1.0), (1, 1.0), (2, 2.0)]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\nnot json\n{"step": 2}\n')
    with pytest.raises(RecordError, match="line 2 must be a JSON object, got b'not json"):
        list(read_metrics(path))
    path.write_text("[1]\n")
    with pytest.raises(RecordError, match="line 1"):
        list(read_metrics(path))


def test_a_file_that_is_missing_or_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="No such file"):
        list(read_metrics(tmp_path / "m.jsonl"))
    with pytest.raises(RecordError, match=r"No such file .* records.jsonl: false"):
        JsonlSink(tmp_path / "nowhere" / "m.jsonl")


@given(cut=st.integers(0, 200), resume_step=st.integers(0, 5), torn_rewrite=st.booleans())
def test_a_resumed_run_goes_on_after_the_line_of_its_checkpoint_wherever_the_kill_cut_the_file(
    tmp_path_factory: pytest.TempPathFactory, cut: int, resume_step: int, torn_rewrite: bool
) -> None:
    path = tmp_path_factory.mktemp("resumed") / "metrics.jsonl"
    sink = JsonlSink(path, resume_step=0)  # nothing there yet
    for step in (0, 1, 2, 2, 3, 4):  # an evaluation after step 2 has a line of its own
        sink.write(step, {"a/x": float(step), "a/nan": math.nan})
    sink.close()
    path.write_bytes(path.read_bytes()[: -cut or None])
    known = [m["step"] for m in read_metrics(path)]
    if torn_rewrite:  # an earlier resume was killed while it rewrote the file
        path.with_name("metrics.jsonl.new").write_bytes(b'{"step": 1}\n{"st')
    again = JsonlSink(path, resume_step=resume_step)
    again.write(resume_step + 1, {"a/x": 9.0})
    again.close()
    kept = [step for step in known if step <= resume_step] if resume_step else []
    assert [m["step"] for m in read_metrics(path)] == [*kept, resume_step + 1]
    assert [p.name for p in path.parent.iterdir()] == ["metrics.jsonl"]


def test_lines_that_a_crash_of_the_machine_left_are_taken_out_when_the_run_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step"\n[2]\n\0\0\0\0\n{"step": 2}\n\0\0')
    JsonlSink(path, resume_step=2).close()
    assert [m["step"] for m in read_metrics(path)] == [1, 2]


# ---------------------------------------------------------------- TensorBoard


def test_tensorboard_reads_back_the_scalars(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoardSink(tmp_path / "tb")
    sink.write(1, {"reward/kept_mean": 0.25, "trainer/loss": math.nan})
    sink.write(2, {"reward/kept_mean": 0.5})
    sink.close()
    sink.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/kept_mean")] == [(1, 0.25), (2, 0.5)]
    assert math.isnan(events.Scalars("trainer/loss")[0].value)


@pytest.mark.parametrize("resume_step", [2, 0])
def test_tensorboard_forgets_the_steps_after_the_checkpoint_of_a_resumed_run(tmp_path: Path, resume_step: int) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    killed = TensorBoardSink(tmp_path)
    for step in range(5):
        killed.write(step, {"a/x": float(step)})
    killed.close()
    (file,) = tmp_path.iterdir()
    file.rename(
        tmp_path / "events.out.tfevents.0000000001.host.1.0"
    )  # files are read in the order of their names, which begin with the time
    again = TensorBoardSink(tmp_path, resume_step=resume_step)
    again.write(resume_step + 1, {"a/x": 10.0})
    again.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    kept = [(step, float(step)) for step in range(resume_step + 1)] if resume_step else []
    assert [(e.step, e.value) for e in events.Scalars("a/x")] == [*kept, (resume_step + 1, 10.0)]


def test_a_missing_tensorboard_is_an_error_at_the_start_that_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_tensorboard(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("tensorboard"):
            raise ImportError(f"No module named {name!r}")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tensorboard)
    with pytest.raises(
        RecordError, match=r"needs the package tensorboard.*pip install 'sluice-rl\[train\]' or set records.tensorboard: false"
    ):
        TensorBoardSink(tmp_path)


def test_a_tensorboard_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "tb").write_text("")
    with pytest.raises(RecordError, match=r"tb must be writable"):
        TensorBoardSink(tmp_path / "tb")


# ---------------------------------------------------------------- what a run gets


def test_the_configuration_chooses_the_sinks(folder: RunFolder) -> None:
    assert build_sinks(folder, RecordsConfig(jsonl=False, tensorboard=False)) == []
    sinks = build_sinks(folder, RecordsConfig())
    assert [type(sink) for sink in sinks] == [JsonlSink, TensorBoardSink]
    for sink in sinks:
        sink.close()
    assert folder.metrics_jsonl.exists()
    assert any(folder.tensorboard.iterdir())


def test_the_sinks_of_a_resumed_run_forget_what_came_after_its_checkpoint(folder: RunFolder) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resume_step, steps in ((None, (1, 2, 3)), (1, (2,))):
        for sink in build_sinks(folder, RecordsConfig(), resume_step):
            for step in steps:
                sink.write(step, {"a/x": float(step)})
            sink.close()
        for i, file in enumerate(sorted(folder.tensorboard.iterdir(), key=lambda file: file.stat().st_mtime_ns)):
            file.rename(file.with_name(f"events.out.tfevents.000000000{i}"))
    assert [m["step"] for m in read_metrics(folder.metrics_jsonl)] == [1, 2]
    events = accumulator.EventAccumulator(str(folder.tensorboard))
    events.Reload()
    assert [e.step for e in events.Scalars("a/x")] == [1, 2]


def test_the_room_loads_without_torch_and_tensorboard() -> None:
    code = "import sluice.records, sys; print(sorted({'torch', 'tensorboard', 'transformers', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
