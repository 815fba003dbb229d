"""The display of a training run: a live view in a terminal, plain lines elsewhere.

Any thread may call the display at any time. A call notes what is new and returns: one thread of the display's own does all the drawing, at
most four times a second, so that neither the event loop nor the trainer ever waits for a terminal. Nothing here raises into the run.
"""

from __future__ import annotations

import atexit
import math
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from itertools import pairwise
from types import TracebackType
from typing import Any, Literal, ParamSpec, Protocol, Self, TextIO, TypeGuard

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sluice.execution.validation import ValidationResult
from sluice.records.gate_lines import gate_line, gate_of
from sluice.records.summary import clock_time, over_all
from sluice.types import Category

Level = Literal["info", "warning", "error"]

REDRAW_EVERY_S = 0.25
STEP_LINE_EVERY_S = 1.0  # plain lines: steps faster than this share a line
FILLING_LINE_EVERY_S = 15.0  # plain lines: a sign of life when a batch takes longer than this
_STOP_WITHIN_S = 2.0  # a terminal that takes no output holds the end of the run up for no longer
_MAX_WAITING_LINES = 1_000  # further ones are counted and named when the terminal takes output again
_RECENT_STEPS = 20  # steps whose mean duration and acceptance rate are shown
_SPARK = "▁▂▃▄▅▆▇█"
_SPARK_COLUMNS = 24
_CATEGORIES: tuple[Category, ...] = ("low_information", "invalid")
_LABEL_COLUMNS = 8
_MOST_REASONS = 3  # of each category; the rest as one
_SMALL_SHARE = 0.005  # shares that would be rounded away

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x1f\x7f-\x9f]")  # terminal sequences and control characters
_STYLE: Mapping[Level, str] = {"info": "", "warning": "yellow", "error": "bold red"}


P = ParamSpec("P")


def _harmless(method: Callable[P, None]) -> Callable[P, None]:
    """A display is never worth a run: what goes wrong in this call is not shown, and that is all."""

    @wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception:  # noqa: BLE001 - see above
            pass

    return guarded


class ProgressDisplay:
    """Shows one run: how far it is, what the filters let through, what it has learnt, where the tokens went.

    Use it as a context manager, or call `stop` in a `finally`: it gives the terminal back (cursor, output streams) on every way out.
    """

    def __init__(
        self,
        title: str = "",
        *,
        stream: TextIO | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        title: name of the run.
        stream: where to draw; default standard error, so that results on standard output can be piped.
        live: whether to draw a live view; default: when the stream is a terminal that can, and NO_COLOR and CI are not set.
        """
        self._stream = sys.stderr if stream is None else stream
        self._is_live = _can_draw(self._stream) if live is None else live
        self._clock = clock
        self._lock = threading.Lock()  # held for moments, never while drawing
        self._state = _State(title=title, now=clock())
        self._lines: list[tuple[str, Level]] = []
        self._lost_lines = 0
        self._last_line_at = clock()
        self._pending_step = False  # plain: the latest step has no line yet
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @_harmless
    def start(self, total_steps: int) -> None:
        """The run begins; `total_steps` optimiser steps are wanted."""
        with self._lock:
            if self._thread is not None:
                return
            self._state.begin(total_steps, self._clock())
            self._thread = threading.Thread(target=self._draw_until_stopped, name="sluice-progress", daemon=True)
        atexit.register(self.stop)
        self._thread.start()

    @_harmless
    def phase(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """What goes on beside filling and training, as in "evaluating"; with `done` and `total` when it can be counted."""
        with self._lock:
            if not self._is_live and text != self._state.phase:
                self._put(f"phase {_ascii(text)}")
            self._state.phase, self._state.phase_count = text, None if done is None or total is None else (done, total)

    @_harmless
    def filling(self, kept: int, needed: int, running: int) -> None:
        """The batch in progress has `kept` of `needed` groups; `running` more are under way. Made to be called on every event."""
        state = self._state
        state.batch = (kept, needed, running)
        if not self._is_live and self._clock() - self._last_line_at >= FILLING_LINE_EVERY_S:
            with self._lock:
                self._put(f"filling step={state.step + 1}/{state.total} kept={kept}/{needed} running={running}")

    @_harmless
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Optimiser step number `step` is done; `metrics` are those of the step, under the names of the ledger and the scheduler."""
        with self._lock:
            now = self._clock()
            self._state.step_done(step, metrics, now)
            if self._is_live:
                return
            self._pending_step = True
            if now - self._last_line_at >= STEP_LINE_EVERY_S or step >= self._state.total or step <= 1:
                self._put_step()

    @_harmless
    def validation(self, step: int, results: Mapping[str, ValidationResult]) -> None:
        """A held-out evaluation after `step` optimiser steps, by domain."""
        with self._lock:
            state = self._state
            state.validated(step, results, self._clock())
            if not self._is_live:
                self._put_step()
                overall = over_all(results.values())
                means = "".join(f" {_ascii(domain)}={_number(result.mean)}" for domain, result in results.items())
                self._put(f"validation step={step} mean={_number(overall.mean)}{means} items={overall.items} scored={overall.scored}")

    @_harmless
    def message(self, text: str, level: Level = "info") -> None:
        """Something a person should read now. Above the live view, or as lines of their own."""
        with self._lock:
            lines = [_CONTROL.sub(" ", line).rstrip() for line in str(text).splitlines()] or [""]
            for line in lines:
                self._put(line if level == "info" else f"{level}: {line}", level)

    @_harmless
    def stop(self) -> None:
        """The run ended, however: draw the last state and give the terminal back. Again is fine."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is None:
                return
        try:
            with self._lock:
                self._state.end(self._clock())
                self._put_step()
        finally:
            self._stopping.set()
            atexit.unregister(self.stop)
            thread.join(_STOP_WITHIN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    # ------------------------------------------------------------ under the lock

    def _put(self, line: str, level: Level = "info") -> None:
        if len(self._lines) >= _MAX_WAITING_LINES:
            self._lost_lines += 1
            return
        self._lines.append((line, level))
        self._last_line_at = self._clock()

    def _put_step(self) -> None:
        if self._pending_step:
            self._pending_step = False
            self._put(_step_line(self._state, self._clock()))

    # ------------------------------------------------------------ the drawing thread

    def _draw_until_stopped(self) -> None:
        """Draws what was noted; waits for the next redraw; unblocked by `stop`. A stream that fails ends the drawing, not the run."""
        painter: _Painter = _LivePainter(self._stream, self._render) if self._is_live else _PlainPainter(self._stream)
        try:
            painter.open()
            while not self._stopping.wait(REDRAW_EVERY_S):
                self._draw(painter)
            self._draw(painter)
        except Exception:  # noqa: BLE001 - a closed or broken terminal: there is nobody left to tell
            pass
        finally:
            painter.close()

    def _draw(self, painter: _Painter) -> None:
        with self._lock:
            lines, self._lines = self._lines, []
            lost, self._lost_lines = self._lost_lines, 0
        if lost:
            lines.append((f"warning: {lost} lines are missing here: the terminal took no output", "warning"))
        painter.draw(lines)

    def _render(self) -> RenderableType:
        with self._lock:
            try:
                return _view(self._state, self._clock())
            except Exception as error:  # noqa: BLE001 - messages still come through
                return Text(f"(nothing to show: {type(error).__name__}: {error})", style="dim")


class _State:
    """What the display knows. Plain data; guarded by the display's lock, but for `batch`, which is replaced whole."""

    def __init__(self, title: str, now: float) -> None:
        self.title = title
        self.total = 0
        self.step = 0
        self.phase = ""
        self.phase_count: tuple[int, int] | None = None
        self.batch: tuple[int, int, int] | None = None  # kept, needed, running
        self.started_at = now
        self.ended_at: float | None = None
        self.last_step_at = now  # when the last step, or what came before the first, ended
        self.step_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self.acceptance: deque[float] = deque(maxlen=_RECENT_STEPS)
        self.metrics: dict[str, float] = {}  # latest value of each
        self.rewards: list[float] = []  # mean reward of each step's batch
        self.before: Mapping[str, ValidationResult] | None = None
        self.latest: Mapping[str, ValidationResult] | None = None
        self.latest_step = 0

    def begin(self, total: int, now: float) -> None:
        self.total = total
        self.started_at = self.last_step_at = now

    def end(self, now: float) -> None:
        self.ended_at = now

    def step_done(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        self.step = step
        self.step_s.append(now - self.last_step_at)
        self.last_step_at = now
        self.batch = (0, self.batch[1], 0) if self.batch is not None and step < self.total else None  # the next one begins
        self.phase, self.phase_count = "", None
        self.metrics.update(metrics)
        if _is_finite(rate := metrics.get("scheduler/acceptance_rate")):
            self.acceptance.append(float(rate))
        if _is_finite(reward := metrics.get("reward/kept_mean")):
            self.rewards.append(float(reward))

    def validated(self, step: int, results: Mapping[str, ValidationResult], now: float) -> None:
        self.phase, self.phase_count = "", None
        if self.before is None:
            self.before = dict(results)
        else:
            self.latest = dict(results)
        self.latest_step = step
        if self.step == 0:
            self.last_step_at = now  # the evaluation before the run is no part of its first step

    def elapsed_s(self, now: float) -> float:
        return (now if self.ended_at is None else self.ended_at) - self.started_at

    def left_s(self, now: float) -> float | None:
        if not self.step_s or self.step >= self.total or self.ended_at is not None:
            return None
        in_step = now - self.last_step_at
        mean = sum(self.step_s) / len(self.step_s)
        return max(mean * (self.total - self.step) - min(in_step, mean), 0.0)

    def accepted(self) -> float | None:
        return sum(self.acceptance) / len(self.acceptance) if self.acceptance else None

    def entries(self, prefix: str, parts: int) -> list[tuple[str, float]]:
        """Non-zero metrics `prefix` + that many name parts, largest first."""
        found = [(name[len(prefix) :], value) for name, value in self.metrics.items() if name.startswith(prefix)]
        chosen = [(rest, value) for rest, value in found if rest.count("/") == parts - 1 and _is_finite(value) and value > 0]
        return sorted(chosen, key=lambda entry: (-entry[1], entry[0]))

    def tokens(self) -> list[tuple[str, float]]:
        return [entry for entry in self.entries("ledger/tokens/", 1) if entry[0] != "total"]

    def rejected(self, category: Category) -> list[tuple[str, float]]:
        return self.entries(f"scheduler/rejected/{category}/", 1)

    def groups_left(self) -> float:
        return sum(count for _, count in self.entries("ledger/groups/", 1))


# ---------------------------------------------------------------- painters


class _Painter(Protocol):
    def open(self) -> None: ...
    def draw(self, lines: Sequence[tuple[str, Level]]) -> None: ...
    def close(self) -> None: ...


class _PlainPainter:
    """Lines without control characters, for logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def open(self) -> None:
        """Nothing to prepare."""

    def draw(self, lines: Sequence[tuple[str, Level]]) -> None:
        for line, _ in lines:
            try:
                self._stream.write(line + "\n")
            except UnicodeEncodeError:
                self._stream.write(_ascii(line) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing to give back."""


class _LivePainter:
    """A view of a few lines at the bottom of the terminal; everything printed meanwhile scrolls by above it."""

    def __init__(self, stream: TextIO, render: Callable[[], RenderableType]) -> None:
        self._console = Console(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._live = Live(
            console=self._console,
            get_renderable=render,
            auto_refresh=False,
            redirect_stdout=bool(sys.stdout and sys.stdout.isatty()),  # a piped standard output stays what it is
            redirect_stderr=True,
        )

    def open(self) -> None:
        self._live.start()

    def draw(self, lines: Sequence[tuple[str, Level]]) -> None:
        if lines:
            self._console.print(Text("\n").join(Text(line, style=_STYLE.get(level, "")) for line, level in lines))
        self._live.refresh()

    def close(self) -> None:
        with suppress(OSError, ValueError):  # the terminal is gone; output streams are restored before anything is drawn
            self._live.stop()


def _can_draw(stream: TextIO) -> bool:
    """Whether the stream is a terminal on which a live view can be drawn and is wanted."""
    if (
        os.environ.get("NO_COLOR")
        or os.environ.get("CI", "").lower() not in ("", "0", "false")
        or os.environ.get("TERM", "") in ("", "dumb")
    ):
        return False
    try:
        return stream.isatty() and (stream.encoding or "").lower().replace("-", "") == "utf8"
    except (AttributeError, ValueError):  # no real stream, or a closed one
        return False


# ---------------------------------------------------------------- what is shown


def _step_line(s: _State, now: float) -> str:
    """One line for one step: key=value, so that it can be searched and cut."""
    m = s.metrics
    left = s.left_s(now)
    rejected = [(f"{c}/{reason}", n) for c in _CATEGORIES for reason, n in s.rejected(c)]
    cells = [
        ("step", f"{s.step}/{s.total}"),
        ("elapsed", clock_time(s.elapsed_s(now))),
        ("left", None if left is None else clock_time(left)),
        ("kept", _count(m.get("scheduler/collect_query_count"))),
        ("accepted", _percent(m.get("scheduler/acceptance_rate"))),
        ("reward", _number(m.get("reward/kept_mean"))),
        ("rejected", ",".join(f"{_ascii(name)}:{n:.0f}" for name, n in rejected)),
        ("tokens", _count(m.get("ledger/tokens/total"))),
        ("useful", _percent(m.get("ledger/useful_token_yield"))),
        ("tokens_per_useful_group", _count(m.get("ledger/tokens_per_useful_group"))),
    ]
    return " ".join(f"{key}={value}" for key, value in cells if value not in (None, "", "-"))


def _view(s: _State, now: float) -> RenderableType:
    """The live view: one row per question a watcher has."""
    rows = Table.grid(padding=(0, 2), expand=True)
    rows.add_column(style="dim", no_wrap=True, width=_LABEL_COLUMNS)
    rows.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    rows.add_row("step", _bar_row(f"{s.step}/{s.total}", s.step, s.total, _times(s, now)))
    if s.ended_at is None:
        kept, needed, running = s.batch or (0, 0, 0)
        note = f"{running} group{'s' if running != 1 else ''} running" if running else ""
        rows.add_row("batch", _bar_row(f"{kept}/{needed}" if needed else "-", kept, needed, note))
    rows.add_row("accepted", _accepted_text(s))
    rows.add_row("dropped", _dropped_text(s, "low_information"))
    if s.rejected("invalid"):
        rows.add_row("", _dropped_text(s, "invalid"))
    if gate := gate_of({name: value for name, value in s.metrics.items() if name.startswith("gate/")}):
        rows.add_row("gate", gate_line(gate))
    rows.add_row("reward", _reward_text(s))
    rows.add_row("held-out", _held_out_text(s))
    if s.before is not None and len(s.before) > 1:
        rows.add_row("", _domains_text(s.before, s.latest))
    rows.add_row("tokens", _tokens_text(s))
    rows.add_row("useful", _useful_text(s))
    return Group("", _spread(Text(s.title, style="bold"), Text(_doing(s), style="cyan" if s.ended_at is None else "dim")), rows)


def _spread(left: Text, right: Text) -> RenderableType:
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(left, right)
    return grid


def _doing(s: _State) -> str:
    if s.ended_at is not None:
        return "done" if s.step >= s.total else "stopped"
    if s.phase:
        return s.phase if s.phase_count is None else f"{s.phase} {s.phase_count[0]}/{s.phase_count[1]}"
    if s.batch is None:
        return ""
    return "training" if s.batch[0] >= s.batch[1] else "filling the batch"


def _times(s: _State, now: float) -> str:
    left = s.left_s(now)
    return clock_time(s.elapsed_s(now)) + ("" if left is None else f", {clock_time(left)} left")


def _bar_row(count: str, done: int, total: int, note: str) -> RenderableType:
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True, width=9)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, width=19)
    grid.add_row(count, ProgressBar(total=max(total, 1), completed=min(done, total), complete_style="cyan", finished_style="green"), note)
    return grid


def _accepted_text(s: _State) -> Text:
    accepted = s.accepted()
    if accepted is None:
        return Text("-")
    text = Text(f"{_percent(accepted)} of the judged groups")
    return text.append(f" of the last {len(s.acceptance)} steps" if len(s.acceptance) > 1 else "", style="dim")


def _dropped_text(s: _State, category: Category) -> Text:
    rejected, left = s.rejected(category), s.groups_left()
    if not rejected or not left:
        return Text("-")
    text = Text().append(f"{category.replace('_', ' ')}  ", style="dim")
    return text.append(_shares(rejected, left, most=_MOST_REASONS), style="yellow" if category == "invalid" else "")


def _reward_text(s: _State) -> Text:
    if not s.rewards:
        return Text("-")
    text = Text(f"{s.rewards[-1]:.3f}  ")
    text.append(_sparkline(s.rewards), style="cyan")
    launched = s.metrics.get("reward/launched_mean")
    if _is_finite(launched):
        text.append(f"   launched {launched:.3f}", style="dim")
    zero = s.metrics.get("batch/zero_advantage_share")
    if _is_finite(zero):
        text.append(f"   zero advantage {_percent(zero)}", style="dim")
    return text


def _held_out_text(s: _State) -> Text:
    if s.before is None:
        return Text("-")
    before, latest = over_all(s.before.values()).mean, None if s.latest is None else over_all(s.latest.values()).mean
    text = Text(_number(before))
    if s.latest is None:
        text.append("  before the run", style="dim")
    else:
        text.append(" → ")
        text.append(_number(latest), style="bold")
        if before is not None and latest is not None:
            text.append(f"  {latest - before:+.3f}", style="green" if latest >= before else "red")
        text.append(f"  at step {s.latest_step}", style="dim")
    return text


def _domains_text(before: Mapping[str, ValidationResult], latest: Mapping[str, ValidationResult] | None) -> Text:
    text = Text()
    for domain, result in before.items():
        text.append("   " if text else "").append(f"{domain} ", style="dim").append(_number(result.mean))
        if latest is not None and domain in latest:
            text.append(f" → {_number(latest[domain].mean)}")
    return text


def _tokens_text(s: _State) -> Text:
    tokens = s.tokens()
    total = sum(count for _, count in tokens)
    return Text(f"{_short(total)}   ").append(_shares(tokens, total)) if total else Text("-")


def _useful_text(s: _State) -> Text:
    share, per_group = s.metrics.get("ledger/useful_token_yield"), s.metrics.get("ledger/tokens_per_useful_group")
    parts = [
        f"{_percent(share)} of the tokens" if _is_finite(share) else "",
        f"{per_group:,.0f} tokens per useful group" if _is_finite(per_group) else "",
    ]
    return Text("   ".join(part for part in parts if part) or "-")


def _shares(counts: Sequence[tuple[str, float]], whole: float, most: int | None = None) -> str:
    """Named shares of a whole; those after the first `most` as one."""
    shown = list(counts[:most])
    if most is not None and len(counts) > most:
        shown.append((f"{len(counts) - most} more", sum(count for _, count in counts[most:])))
    return ", ".join(f"{name} {_percent(count / whole)}" for name, count in shown)


def _sparkline(values: Sequence[float]) -> str:
    """The course of the values in at most `_SPARK_COLUMNS` characters, each the mean of a stretch of them."""
    columns = min(len(values), _SPARK_COLUMNS)
    edges = [round(i * len(values) / columns) for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_SPARK) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARK[round((mean - low) * scale)] for mean in means)


def _is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _number(value: float | None) -> str:
    return f"{value:.3f}" if value is not None and math.isfinite(value) else "-"


def _count(value: float | None) -> str:
    return f"{value:.0f}" if value is not None and math.isfinite(value) else "-"


def _percent(share: float | None) -> str:
    if share is None or not math.isfinite(share):
        return "-"
    if 0 < share < _SMALL_SHARE:
        return "<1%"
    return ">99%" if 1 - _SMALL_SHARE < share < 1 else f"{share:.0%}"


def _short(count: float) -> str:
    for unit, word in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if count >= unit:
            return f"{count / (unit if word != 'k' else 1e3):.{2 if word != 'k' else 0}f}{word}"
    return f"{count:,.0f}"


def _ascii(text: str) -> str:
    """The text in ASCII without blanks or control characters, for key=value lines."""
    return _CONTROL.sub(" ", text).encode("ascii", "backslashreplace").decode()
