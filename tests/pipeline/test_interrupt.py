"""The first signal asks, the second one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sluice.pipeline.interrupt import SIGNALS, Interrupt

NEVER_STOPS = """
import threading, time
from sluice.pipeline.interrupt import Interrupt
stop = threading.Event()
with Interrupt(stop):
    print("ready", flush=True)
    stop.wait()
    print("asked to stop", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_and_the_second_one_ends_a_process_that_does_not_stop(number: signal.Signals) -> None:
    command = [sys.executable, "-c", NEVER_STOPS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            assert process.stdout.readline() == "asked to stop\n"
            assert process.poll() is None
            process.send_signal(number)
            assert process.wait(timeout=30) == 128 + number
        finally:
            process.kill()


def test_inside_a_signal_sets_the_event_and_outside_the_old_handlers_are_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    stop = threading.Event()
    with Interrupt(stop) as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(5)
        assert interrupt.was_interrupted
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_off_the_main_thread_nothing_is_changed() -> None:
    seen = []

    def enter() -> None:
        with Interrupt(threading.Event()):
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]
