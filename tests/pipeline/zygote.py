"""A process that has imported everything a run needs and runs nothing: it forks real runs of the real command in milliseconds.

It has one thread and never runs a torch operation, so that its children begin as a fresh process begins. Each child carries out one
`sluice` command line and ends with its exit code. Commands come as JSON lines on the standard input, reports leave on the standard output:

    {"run": 7, "args": ["train", ...], "output": "folder"}   ->   {"run": 7, "pid": 4711}, and later {"run": 7, "code": 0}
    {"kill": 7, "signal": 9}                                        unless it has ended; SIGUSR1 shows where its threads are

It alone waits for its children, so that a kill never meets another process that got the same number. When its input closes, it kills
what is left of them and ends; when it is killed, the kernel kills them (Linux).
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import json
import os
import select
import signal
import sys
import threading
import traceback
from typing import Any

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_NO_THREADS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}  # pyarrow's allocator


def main() -> None:
    os.environ.update(_NO_THREADS)
    _import_everything()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads is not safe to fork"
    gc.collect()
    gc.freeze()
    wakeup, wake = os.pipe()
    for end in (wakeup, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    pids: dict[int, int] = {}  # run -> process, while not reaped
    waiting = b""
    _tell(ready=True)
    while True:
        ready, _, _ = select.select([0, wakeup], [], [])
        if wakeup in ready:
            os.read(wakeup, 4096)
            _reap(pids)
        if 0 in ready:
            read = os.read(0, 65_536)
            if not read:
                break
            *lines, waiting = (waiting + read).split(b"\n")
            for line in lines:
                _obey(json.loads(line), pids)
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _import_everything() -> None:
    """All that a run imports, and what transformers would otherwise work out once in every process."""
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401
    from transformers import conversion_mapping

    import sluice.cli.app
    import sluice.cli.progress
    import sluice.cli.quiet
    import sluice.pipeline.train
    import sluice.trainer.trl  # noqa: F401
    import tests.pipeline.verifiers  # noqa: F401

    conversion_mapping.get_checkpoint_conversion_mapping("qwen2")


def _obey(command: dict[str, Any], pids: dict[int, int]) -> None:
    if "kill" in command:
        if command["kill"] in pids:
            os.kill(pids[command["kill"]], command["signal"])
        return
    pid = os.fork()
    if not pid:
        _be_a_run(command["args"], command["output"])
    pids[command["run"]] = pid
    _tell(run=command["run"], pid=pid)


def _reap(pids: dict[int, int]) -> None:
    for run, pid in list(pids.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del pids[run]
            _tell(run=run, code=os.waitstatus_to_exitcode(status))


def _be_a_run(args: list[str], output: str) -> None:
    code = 1
    try:
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            return
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        shown = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, shown), (2, shown)):
            os.dup2(source, target)
        faulthandler.register(signal.SIGUSR1)
        sys.argv = ["sluice", *args]
        from sluice.cli import main as command

        command()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the last chance to tell a person
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as an interpreter does at its end
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _tell(**report: Any) -> None:
    os.write(1, json.dumps(report).encode() + b"\n")


if __name__ == "__main__":
    main()
