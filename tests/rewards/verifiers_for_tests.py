"""Verifiers of every temper, importable by worker processes. `task.entry` says what each needs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from sluice.types import Task


def right(task: Task, response: str) -> float:
    return float(response == task.answer)


def length(task: Task, response: str) -> float:
    return float(len(response))


def by_response(task: Task, response: str) -> object:
    """Answers with the Python value that the response writes."""
    return eval(response, {"nan": float("nan"), "inf": float("inf")})


def mapping(task: Task, response: str) -> dict[str, object]:
    return {"acc": float(response == task.answer), "fmt": 1.0, "why": "because"}


def raising(task: Task, response: str) -> float:
    raise ValueError(f"cannot read {response!r}")


def exiting(task: Task, response: str) -> float:
    sys.exit(3)


def interrupting(task: Task, response: str) -> float:
    raise KeyboardInterrupt


def echo(task: Task, response: str) -> dict[str, float]:
    return {
        "reward": 1.0,
        "prompt_ids_sum": float(task.prompt_ids.sum()),
        "prompt_length": float(len(task.prompt)),
        "digits": float(len(task.entry["metadata"]["digits"])),
        "blob_sum": float(task.entry["blob"].sum()),
    }


def many_metrics(task: Task, response: str) -> dict[str, float]:
    count = int(response) if response.isdigit() else 0
    return {"reward": 1.0, **{f"a_metric_with_a_long_name_{number}": 0.123456789 for number in range(count)}}


def as_told(task: Task, response: str) -> float:
    """Does what the response says. Before, it writes its process id and the call down where `entry` says."""
    folder = task.entry.get("pids")
    if folder:
        Path(folder, str(os.getpid())).touch()
    if "calls" in task.entry:
        with Path(task.entry["calls"]).open("a") as calls:
            calls.write(f"{response}\n")
    match response:
        case "loop":
            while True:
                pass
        case "loop deaf":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            while True:
                pass
        case "sleep":
            time.sleep(600)
        case "short sleep":
            time.sleep(0.02)
        case "die":
            os._exit(7)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "interrupt me":
            os.kill(os.getpid(), signal.SIGINT)
        case "hang up":
            os.closerange(3, 256)
            while True:
                pass
        case "sandbox":
            sandbox = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            Path(folder, str(sandbox.pid)).touch()
            time.sleep(600)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "read":
            assert sys.stdin.read() == ""
        case "fork":
            if os.fork() == 0:
                raise SystemExit  # the child goes on as if it were the worker
        case "babble":
            babble(b"\0\0\0\0\0\0\0\2{]")
        case "answer twice":
            answer = b"[1, 7.0, {}, null, 0.0]"
            babble(len(answer).to_bytes(8, "big") + answer)
        case "print":
            print("a verifier prints")
    return 1.0


def babble(message: bytes) -> None:
    """Writes to every connection of this process, that of the pool among them."""
    for descriptor in range(3, 256):
        try:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.send(message)
        except OSError:
            continue


class Counting:
    """Built with arguments, and remembers how often its object was called."""

    def __init__(self, *, start: int) -> None:
        self.calls = start

    def __call__(self, task: Task, response: str) -> float:
        self.calls += 1
        return float(self.calls)


class CannotBeBuilt:
    def __init__(self) -> None:
        raise RuntimeError("no model file")

    def __call__(self, task: Task, response: str) -> float:
        return 1.0


class NeverBuilt:
    def __init__(self) -> None:
        time.sleep(600)

    def __call__(self, task: Task, response: str) -> float:
        return 1.0


class NotCallable:
    pass


async def asynchronous(task: Task, response: str) -> float:
    return 1.0


def takes_one(task: Task) -> float:
    return 1.0


def takes_options(task: Task, response: str, *, bonus: float = 0.0) -> float:
    return 1.0 + bonus


NUMBER = 3
