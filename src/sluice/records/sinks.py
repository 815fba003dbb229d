"""Where metrics go besides run.db: a JSONL file, TensorBoard; and the fan-out that keeps a broken one from hurting the run.

A metric is a number named room/what/stat, as in `reward/kept_mean` or `scheduler/rejected/low_information/no_spread`.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from sluice.errors import RecordError

if TYPE_CHECKING:
    from sluice.config.models import RecordsConfig
    from sluice.records.run_folder import RunFolder
    from sluice.records.rundb import Journal

_NAME = re.compile(r"[A-Za-z0-9_.@-]+(/[A-Za-z0-9_.@-]+)+")  # "@" marks a reduction, as in ROLL's `actor/is_weight_clipfrac@sum`
_TENSORBOARD_FLUSH_S = 10


class MetricSink(Protocol):
    """A place for metrics. May raise: the fan-out drops it then and goes on."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one step: checked names, plain floats, NaN and infinities among them."""

    def close(self) -> None:
        """Write what is held back; idempotent."""


def build_sinks(folder: RunFolder, config: RecordsConfig, resume_step: int | None = None) -> list[MetricSink]:
    """The sinks that the configuration asks for.

    Args:
        folder: of the run.
        config: which sinks.
        resume_step: of the checkpoint that the run goes on from: what an earlier process wrote of later steps is forgotten. 0: the run
            begins anew, and everything is. None: a new run.

    Raises:
        RecordError: one cannot be opened, or its package is missing.
    """
    sinks: list[MetricSink] = []
    if config.jsonl:
        sinks.append(JsonlSink(folder.metrics_jsonl, resume_step=resume_step))
    if config.tensorboard:
        sinks.append(TensorBoardSink(folder.tensorboard, resume_step=resume_step))
    return sinks


def check_metric_name(name: object) -> str:
    """The name itself.

    Raises:
        RecordError: it does not read room/what/stat.
    """
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    raise RecordError(
        f"a metric name must have at least two parts of letters, digits, '_', '.', '-' or '@' joined by '/', got {name!r} - "
        "write room/what/stat, as in reward/kept_mean"
    )


class Sinks:
    """Takes what the components of a run report each step, checks and reduces it, and writes it to run.db and to every sink.

    Metrics never take a run down: a bad name or value is left out, a failing sink is dropped, each with one warning and counted. run.db
    is no sink but the record: when it fails, `write` raises.
    """

    def __init__(self, journal: Journal, sinks: Iterable[MetricSink], warn: Callable[[str], None]) -> None:
        """`warn` is told of each fault once."""
        self._journal = journal
        self._sinks = list(sinks)
        self._warn = warn
        self._warned: set[str] = set()
        self.dropped: dict[str, str] = {}
        """Sinks that failed and are written to no more: class name -> why."""
        self.left_out = 0
        """Values left out for a bad name or a bad value."""

    def write(self, step: int, *reports: Mapping[str, Any]) -> dict[str, float]:
        """Write one step.

        Args:
            step: global_step.
            reports: the components' metrics. A value is a number, an iterable of numbers (written as its mean), or None (no value:
                left out, as is an iterable without values).

        Returns:
            What was written.

        Raises:
            RecordError: run.db cannot be written.
        """
        metrics: dict[str, float] = {}
        for report in reports:
            for name, value in report.items():
                self._add(metrics, name, value)
        self._journal.metrics(step, metrics)
        for sink in tuple(self._sinks):
            self._guard(sink, "write", partial(sink.write, step, metrics))
        return metrics

    def close(self) -> None:
        """Close every sink; a failing one is warned about."""
        for sink in tuple(self._sinks):
            self._guard(sink, "close", sink.close)
        self._sinks.clear()

    def _add(self, metrics: dict[str, float], name: object, value: Any) -> None:
        try:
            checked = check_metric_name(name)
            number = reduce_metric(value)
        except Exception as error:  # noqa: BLE001 - a metric is never worth a run
            self.left_out += 1
            self._warn_once(f"{name!r}", f"metric {name!r} is left out: {error}")
            return
        if number is None:
            return
        if checked in metrics:
            self._warn_once(checked, f"metric {checked!r} is reported by two components in one step: the later value counts")
        metrics[checked] = number

    def _guard(self, sink: MetricSink, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a sink is never worth a run
            name = type(sink).__name__
            self.dropped[name] = f"{type(error).__name__}: {error}"
            self._sinks.remove(sink)
            self._warn_once(
                f"sink {name}", f"{name} failed to {what} and gets no more metrics ({self.dropped[name]}); run.db still holds them all"
            )

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            self._warn(message)


def reduce_metric(value: Any) -> float | None:
    """One float from what a component reports: a number, or the mean of an iterable of numbers; None when there is no value.

    Raises:
        TypeError, ValueError: it is neither.
    """
    if value is None:
        return None
    if isinstance(value, str | bytes | Mapping):
        raise TypeError(f"a metric must be a number or an iterable of numbers, got {type(value).__name__} {value!r}")
    if isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0:
        numbers = [float(entry) for entry in value if entry is not None]
        return math.fsum(numbers) / len(numbers) if numbers else None
    return float(value)


class JsonlSink:
    """metrics.jsonl: one object per step, on disk as soon as it is written; a kill can tear the last line only.

    `{"step": 3, "time": 1.7e9, "reward/kept_mean": 0.5, "trainer/loss": null, "non_finite": {"trainer/loss": "nan"}}`

    JSON has no NaN: a value that is not finite is null and named in `non_finite`. `read_metrics` puts it back.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time, resume_step: int | None = None) -> None:
        """Open for appending; a last line torn by a kill is cut off first, and lines of steps after `resume_step` are taken out.

        Raises:
            RecordError: the file cannot be opened.
        """
        self._clock = clock
        try:
            if resume_step is not None and path.exists():
                _take_out_later_lines(path, resume_step)
            self._file: IO[bytes] = path.open("ab")
            _cut_torn_line(path)
        except OSError as error:
            raise RecordError(f"{path} must be writable, got: {error.strerror} - check the disk or set records.jsonl: false") from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line and hand it to the system."""
        line: dict[str, Any] = {"step": step, "time": round(self._clock(), 3)}
        odd = {name: str(float(value)) for name, value in metrics.items() if not math.isfinite(value)}
        line.update((name, None if name in odd else value) for name, value in metrics.items())
        if odd:
            line["non_finite"] = odd
        self._file.write(json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, float]]:
    """The objects of a metrics.jsonl, with NaN and infinities put back. A last line torn by a kill is left out.

    Raises:
        RecordError: the file is missing, or a line before the last is no object.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return  # torn: a whole line ends with a newline, written together with it
                yield _read_line(line, path, number)
    except OSError as error:
        raise RecordError(f"{path} must be a metrics.jsonl, got: {error.strerror} - give the one of a run folder") from error


def _read_line(line: bytes, path: Path, number: int) -> dict[str, float]:
    try:
        entry = json.loads(line)
        odd = entry.pop("non_finite", {})
        entry.update((name, float(value)) for name, value in odd.items())
    except (ValueError, AttributeError, TypeError) as error:
        raise RecordError(f"{path}, line {number} must be a JSON object, got {line[:80]!r} - the file was edited or damaged") from error
    result: dict[str, float] = entry
    return result


def _cut_torn_line(path: Path) -> None:
    """Shorten the file to its last newline."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole != len(content):
        os.truncate(path, whole)


def _take_out_later_lines(path: Path, step: int) -> None:
    """Rewrite the file without lines of later steps (step 0: without any), whole or not at all. What a crash made of a line goes too."""
    temporary = path.with_name(path.name + ".new")
    with path.open("rb") as lines, temporary.open("wb") as kept:
        kept.writelines(line for line in lines if step > 0 and _step_of(line) <= step)
        kept.flush()
        os.fsync(kept.fileno())
    os.replace(temporary, path)


def _step_of(line: bytes) -> float:
    """The step that a line is of; infinity for what is no line of ours."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


class TensorBoardSink:
    """Scalars for TensorBoard, through tensorboard's own event writer: it needs neither torch nor TensorFlow."""

    def __init__(self, folder: Path, resume_step: int | None = None) -> None:
        """Make the folder and start an event file. It tells readers to forget steps after `resume_step`: written files stay as they are.

        Raises:
            RecordError: the package is missing, or the folder cannot be written.
        """
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise RecordError(
                f"records.tensorboard needs the package tensorboard, got: {error} - "
                "pip install 'sluice-rl[train]' or set records.tensorboard: false"
            ) from error
        self._event, self._summary = Event, Summary
        try:
            self._writer = EventFileWriter(str(folder), flush_secs=_TENSORBOARD_FLUSH_S)
        except OSError as error:
            raise RecordError(
                f"{folder} must be writable, got: {error.strerror} - check the disk or set records.tensorboard: false"
            ) from error
        self._is_closed = False
        if resume_step is not None:
            first = resume_step + 1 if resume_step > 0 else 0
            restart = SessionLog(status=SessionLog.START)
            self._writer.add_event(self._event(wall_time=time.time(), step=first, session_log=restart))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Put one event in the writer's queue; a thread of its own takes it to disk."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        """Flush and close the event file."""
        if not self._is_closed:
            self._is_closed = True
            self._writer.close()
