"""The display tells a watcher how a run goes, in a terminal and in a log, and never hurts the run."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sluice.cli import progress
from sluice.cli.progress import ProgressDisplay
from sluice.execution.validation import ValidationResult


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A terminal as far as isatty goes; what is written stays readable after close."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> Iterator[tuple[ProgressDisplay, io.StringIO]]:
    stream = io.StringIO()
    with ProgressDisplay("run", stream=stream, clock=clock) as display:
        display.start(20)
        yield display, stream


def score(mean: float, items: int = 100) -> ValidationResult:
    return ValidationResult(items=items, scored=items, reward_sum=mean * items, unscored={}, truncated=0, sampled_tokens=0)


METRICS: Mapping[str, float] = {
    "scheduler/acceptance_rate": 0.62,
    "scheduler/collect_query_count": 16.0,
    "scheduler/rejected/low_information/no_spread": 30.0,
    "scheduler/rejected/low_information/mean_band": 7.0,
    "scheduler/rejected/invalid/reward_timeout": 1.0,
    "scheduler/rejected_rate/invalid/reward_timeout": 0.01,
    "ledger/groups/trained": 62.0,
    "ledger/groups/dropped": 38.0,
    "ledger/tokens/total": 12_000.0,
    "ledger/tokens/trained": 8_000.0,
    "ledger/tokens/dropped": 3_990.0,
    "ledger/tokens/late": 10.0,
    "ledger/tokens/failed": 0.0,
    "ledger/useful_token_yield": 0.55,
    "ledger/tokens_per_useful_group": 2_310.4,
    "reward/kept_mean": 0.52,
    "reward/launched_mean": 0.47,
    "batch/zero_advantage_share": 0.04,
}


def lines_of(stream: io.StringIO, display: ProgressDisplay) -> list[str]:
    display.stop()
    return stream.getvalue().splitlines()


def screen(display: ProgressDisplay, width: int = 80) -> list[str]:
    """The live view as text."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(display._render())
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


# ---------------------------------------------------------------- plain lines


def test_a_step_is_one_searchable_line(log: tuple[ProgressDisplay, io.StringIO], clock: Clock) -> None:
    display, stream = log
    clock.now += 10.0
    display.step(1, METRICS)
    assert lines_of(stream, display) == [
        "step=1/20 elapsed=0:10 left=3:10 kept=16 accepted=62% reward=0.520 "
        "rejected=low_information/no_spread:30,low_information/mean_band:7,invalid/reward_timeout:1 "
        "tokens=12000 useful=55% tokens_per_useful_group=2310"
    ]


def test_steps_faster_than_a_line_a_second_share_one_and_the_last_is_always_shown(
    log: tuple[ProgressDisplay, io.StringIO], clock: Clock
) -> None:
    display, stream = log
    for step in range(1, 13):
        clock.now += 0.3
        display.step(step, {})
    assert [line.split()[0] for line in lines_of(stream, display)] == ["step=1/20", "step=5/20", "step=9/20", "step=12/20"]


def test_evaluations_phases_and_messages_are_lines_in_their_order(log: tuple[ProgressDisplay, io.StringIO], clock: Clock) -> None:
    display, stream = log
    display.phase("evaluating", 0, 10)
    display.phase("evaluating", 10, 10)
    display.validation(0, {"add": score(0.5), "chain": score(0.25, items=300)})
    display.message("lower threshold_down", "warning")
    display.message("plain words")
    assert lines_of(stream, display) == [
        "phase evaluating",
        "validation step=0 mean=0.312 add=0.500 chain=0.250 items=400 scored=400",
        "warning: lower threshold_down",
        "plain words",
    ]


def test_a_batch_that_takes_long_gives_a_sign_of_life_now_and_then(log: tuple[ProgressDisplay, io.StringIO], clock: Clock) -> None:
    display, stream = log
    for kept in range(8):
        display.filling(kept, 16, 9)
        clock.now += 5.0
    assert lines_of(stream, display) == ["filling step=1/20 kept=3/16 running=9", "filling step=1/20 kept=6/16 running=9"]


@given(st.text())
def test_a_message_cannot_smuggle_control_characters_into_a_log(text: str) -> None:
    stream = io.StringIO()
    with ProgressDisplay(stream=stream, live=False) as display:
        display.start(1)
        display.message(f"\x1b[2J{text}\x1b[31m", "error")
    written = stream.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", written)
    assert all(line.startswith("error: ") for line in written.split("\n")[:-1])


def test_a_log_that_knows_only_ascii_gets_everything(clock: Clock) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with ProgressDisplay(stream=stream, clock=clock) as display:
        display.start(1)
        display.message("größer als 1 → drop")
        display.validation(0, {"größe": score(0.5)})
        clock.now += 2.0
        display.step(1, METRICS)
    stream.flush()
    assert raw.getvalue().startswith(b"gr\\xf6\\xdfer als 1 \\u2192 drop\n")
    assert b"step=1/1" in raw.getvalue()


@pytest.mark.parametrize(
    ("environment", "live"),
    [
        ({}, True),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, True),
        ({"CI": "true"}, False),
        ({"CI": "false"}, True),
        ({"TERM": "dumb"}, False),
    ],
)
def test_the_live_view_needs_a_terminal_that_wants_it(environment: Mapping[str, str], live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert progress._can_draw(Terminal()) is live
    assert progress._can_draw(io.StringIO()) is False
    closed = io.StringIO()
    closed.close()
    assert progress._can_draw(closed) is False


# ---------------------------------------------------------------- the live view


def test_the_view_shows_the_run_in_80_columns(clock: Clock) -> None:
    display = ProgressDisplay("sums, seed 42", stream=Terminal(), live=True, clock=clock)
    display._state.begin(20, clock.now)
    display.validation(0, {"add": score(0.5), "chain": score(0.25)})
    for step in (1, 2):
        clock.now += 6.0
        display.step(step, {**METRICS, "reward/kept_mean": 0.25 * step})
    display.validation(2, {"add": score(0.75), "chain": score(0.5)})
    display.filling(11, 16, 9)
    assert [re.sub(" *[━╸╺]+ *", " === ", line) for line in screen(display)] == [
        "",
        "sums, seed 42                                                  filling the batch",
        "step      2/20 === 0:12, 1:48 left",
        "batch     11/16 === 9 groups running",
        "accepted  62% of the judged groups of the last 2 steps",
        "dropped   low information  no_spread 30%, mean_band 7%",
        "          invalid  reward_timeout 1%",
        "reward    0.500  ▁█   launched 0.470   zero advantage 4%",
        "held-out  0.375 → 0.625  +0.250  at step 2",
        "          add 0.500 → 0.750   chain 0.250 → 0.500",
        "tokens    12k   trained 67%, dropped 33%, late <1%",
        "useful    55% of the tokens   2,310 tokens per useful group",
    ]


def test_the_view_of_a_run_that_has_not_begun_is_whole(clock: Clock) -> None:
    display = ProgressDisplay(stream=Terminal(), live=True, clock=clock)
    lines = screen(display)
    assert [line.split()[0] for line in lines if line] == ["step", "batch", "accepted", "dropped", "reward", "held-out", "tokens", "useful"]


@pytest.mark.parametrize("width", [20, 40, 200])
def test_no_line_is_wider_than_the_terminal(width: int, clock: Clock) -> None:
    display = ProgressDisplay("a title of a run that is long" * 3, stream=Terminal(), live=True, clock=clock)
    display.step(1, METRICS)
    display.validation(1, {f"domain_{i}": score(0.5) for i in range(9)})
    assert all(len(line) <= width for line in screen(display, width))


def test_many_reasons_are_summed_up(clock: Clock) -> None:
    display = ProgressDisplay(stream=Terminal(), live=True, clock=clock)
    display.step(1, {"ledger/groups/dropped": 100.0, **{f"scheduler/rejected/invalid/reason_{i}": 10.0 + i for i in range(5)}})
    assert any("reason_4 14%, reason_3 13%, reason_2 12%, 2 more 21%" in line for line in screen(display))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=200))
def test_the_course_of_the_reward_fits_its_columns(values: list[float]) -> None:
    line = progress._sparkline(values)
    assert len(line) == min(len(values), progress._SPARK_COLUMNS)
    assert set(line) <= set(progress._SPARK)


def test_the_remaining_time_follows_the_recent_steps(clock: Clock) -> None:
    display = ProgressDisplay(stream=Terminal(), live=True, clock=clock)
    display._state.begin(100, clock.now)
    clock.now += 500.0  # loading and the evaluation before the run are no part of the first step
    display.validation(0, {"add": score(0.5)})
    assert display._state.left_s(clock.now) is None
    for step in range(1, 51):
        clock.now += 2.0
        display.step(step, {})
    assert display._state.left_s(clock.now) == pytest.approx(100.0)
    assert display._state.left_s(clock.now + 1.0) == pytest.approx(99.0)


# ---------------------------------------------------------------- never into the run


def test_no_call_raises_whatever_it_is_given() -> None:
    for live in (True, False):
        display: Any = ProgressDisplay(stream=Terminal(), live=live)
        for _ in range(2):
            display.step(None, None)
            display.step("x", {3: object(), "reward/kept_mean": "high", "ledger/tokens/x": float("nan")})
            display.filling("a", None, [])
            display.validation(1, {"a": None})
            display.message(None, "no such level")
            display.phase(None, "a", "b")
            display.start("many")
        thread = display._thread
        display.stop()
        display.stop()
        assert not thread.is_alive()


def test_a_stream_that_breaks_ends_the_display_not_the_run() -> None:
    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError("the terminal was closed")

    for live in (True, False):
        with ProgressDisplay(stream=Gone(), live=live) as display:
            display.start(3)
            display.message("hello")
            display.step(1, METRICS)


def test_case_92_a_terminal_that_takes_no_output_blocks_neither_calls_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = threading.Event()

    class Stopped(io.StringIO):
        def write(self, text: str) -> int:
            taken.wait(30.0)
            return len(text)

    monkeypatch.setattr(progress, "_STOP_WITHIN_S", 0.1)
    monkeypatch.setattr(progress, "_MAX_WAITING_LINES", 50)
    display = ProgressDisplay(stream=Stopped())
    display.start(3)
    for i in range(1_000):
        display.message(str(i))
        display.filling(i, 1_000, 1)
    assert len(display._lines) <= 50
    display.stop()
    taken.set()


def test_calls_may_come_from_any_thread() -> None:
    stream = io.StringIO()
    with ProgressDisplay(stream=stream, live=False) as display:
        display.start(100)
        threads = [threading.Thread(target=lambda n=n: [display.message(f"{n}-{i}") for i in range(100)]) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(stream.getvalue().splitlines()) == sorted(f"{n}-{i}" for n in range(4) for i in range(100))


# ---------------------------------------------------------------- a real terminal

RUN = """
import signal, sys, time
from sluice.cli.progress import ProgressDisplay
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background may have it ignored
with ProgressDisplay("sums") as display:
    display.start(2)
    display.filling(1, 4, 3)
    display.message("look at this", "warning")
    print("a print of a library")
    time.sleep(0.6)
    {end}
print("the end")
"""


def run_in_terminal(end: str) -> tuple[str, int]:
    """What a program writes to a real pseudo-terminal, and its exit status."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "CI")} | {
        "TERM": "xterm-256color",
        "PYTHONIOENCODING": "utf-8",
    }
    process = subprocess.Popen([sys.executable, "-c", RUN.format(end=end)], stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    chunks: list[bytes] = []
    while select.select([ours], [], [], 60.0)[0]:
        try:
            chunk = os.read(ours, 65_536)
        except OSError:  # the other side is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(ours)
    return b"".join(chunks).decode(), process.wait(60)


HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


@pytest.mark.parametrize(
    "end", ["display.step(2, {})", "raise RuntimeError('broken')", "import os, signal; os.kill(os.getpid(), signal.SIGINT)"]
)
def test_the_terminal_is_given_back_on_every_way_out(end: str) -> None:
    written, status = run_in_terminal(end)
    assert written.index(HIDE) < written.rindex(SHOW)
    assert written.count(HIDE) == written.count(SHOW)
    assert "warning: look at this" in written
    assert "a print of a library" in written
    assert (status == 0) == ("step" in end)
    after = written[written.rindex(SHOW) :]
    assert ("the end" in after) if status == 0 else (("RuntimeError: broken" in after) or ("KeyboardInterrupt" in after))


def test_at_most_four_redraws_a_second() -> None:
    calls = "(display.filling(i % 5, 4, 3), display.message(str(i)), time.sleep(0.002))"
    written, _ = run_in_terminal(f"t = time.time(); [{calls} for i in range(500)]; print('took', time.time() - t)")
    took = float(re.search(r"took ([\d.]+)", written).group(1)) + 0.6  # type: ignore[union-attr]
    drawn_with_lines = 2  # times the view is written again in one redraw that brings lines
    assert written.count("filling the batch") <= drawn_with_lines * (took / progress.REDRAW_EVERY_S + 3)
