"""Real runs of the real command as processes of their own, forked from one that has everything imported (`zygote.py`)."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.pipeline import zygote

MOST_S = 120.0  # for one process, however busy the machine is
MARK = "SLUICE_TEST_MARK"  # in the environment of every process that is started here, directly or not


class Process:
    """One run of the command."""

    def __init__(self, number: int, output: Path) -> None:
        self.number = number
        self.output = output
        self.ended = threading.Event()
        self.pid = 0
        self.code = 0

    def told(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""


class Zygote:
    """The process from which runs are forked. Calls may come from any thread."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        root = Path(__file__).parents[2]
        environment = os.environ | {MARK: self.mark, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(zygote.__file__))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=root
        )
        assert self._process.stdout is not None
        assert json.loads(self._process.stdout.readline()) == {"ready": True}
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._runs: dict[int, Process] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def run(self, output: Path, *args: str) -> Process:
        with self._lock:
            run = Process(next(self._numbers), output)
            self._runs[run.number] = run
            self._tell({"run": run.number, "args": args, "output": str(output)})
        return run

    def kill(self, run: Process, number: int = signal.SIGKILL) -> None:
        with self._lock:
            self._tell({"kill": run.number, "signal": number})

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(MOST_S)
        self._reader.join(MOST_S)
        self._process.stdout.close()

    def left_over(self) -> list[psutil.Process]:
        """Processes that do not end although all this is closed."""
        deadline = time.monotonic() + MOST_S
        while (left := self.descendants()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def descendants(self) -> list[psutil.Process]:
        """All processes that have come from it, whoever their parent is now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue  # it is another user's, or has ended
        return found

    def _tell(self, command: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            report = json.loads(line)
            run = self._runs[report["run"]]
            if "code" in report:
                run.code = report["code"]
                run.ended.set()
            else:
                run.pid = report["pid"]
        for run in self._runs.values():
            run.ended.set()
