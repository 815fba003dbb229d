"""A small process of its own from which workers are forked: single-threaded, with the modules of the work imported, so that a new worker
takes milliseconds and no process that runs torch is ever forked.

Why not the one of `multiprocessing`: there is one per program, whose list of modules is fixed by whoever starts it first; it imports the
main script again in every worker; an error other than ImportError in a module ends it; and every worker holds the pipe that keeps it alive,
so that a stuck worker survives the death of the program. This one belongs to one pool and ends with it.

What it imports first and what a worker does are two functions, given by name. What it guarantees: when its connection closes, or its
parent is gone, it kills and reaps every worker and whatever they started, and ends. When it is itself killed, the kernel kills the workers
(Linux).

`ForkServer` is the pool's side, `main` the process. Commands and reports are records of fixed size; a command to fork carries the
worker's end of its connection.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

COMMAND: Final = struct.Struct("!cQ")  # what, worker
REPORT: Final = struct.Struct("!cQq")  # what, worker, its exit code as subprocess gives it, or an errno
FORK, KILL = b"f", b"k"
ENDED, NOT_FORKED = b"e", b"n"

PARENT_CHECK_S: Final = 1.0  # how often it looks whether its parent lives, in case another process holds the connection open
REAP_LIMIT_S: Final = 0.7  # at the end: how long to wait for killed processes; one in an uninterruptible system call may take longer
_DEATH_SIGNAL, _CHILD_SUBREAPER = 1, 36  # options of prctl, from linux/prctl.h

# `-P`: without the working directory at the head of the path, so that a json.py lying there is not taken for the standard one.
_BOOT: Final = (
    "import json, sys; order = json.loads(sys.stdin.buffer.readline()); sys.path[:] = order['path']; "
    "from sluice.workers.forkserver import main; main(order, *map(int, sys.argv[1:]))"
)


class ForkServer:
    """The pool's side: starts the process, tells it to fork and to kill. No call waits."""

    def __init__(self, *, preload: str, serve: str, settings: bytes, import_path: list[str], folder: str) -> None:
        """Start it. It imports by itself, commands wait until then.

        Args:
            preload: "module:function", called once with the settings before any fork; what fails there fails again in the worker.
            serve: "module:function", called in a worker with (connection, settings); the worker ends when it returns.
            settings: for both functions.
            import_path: `sys.path` of the processes.
            folder: their working directory.

        Raises:
            OSError, ValueError: no process can be started.
        """
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)
        # One thread per worker unless the environment says otherwise: a process with threads of a numeric library is not safe to fork.
        variables = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **os.environ}
        order = json.dumps({"path": import_path, "preload": preload, "serve": serve})
        try:
            with theirs, tempfile.TemporaryFile() as given:
                given.write(order.encode() + b"\n" + settings)
                given.seek(0)
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-u", "-c", _BOOT, str(theirs.fileno()), str(os.getpid())],
                    stdin=given,
                    pass_fds=[theirs.fileno()],
                    cwd=folder,
                    env=variables,
                    start_new_session=True,  # Ctrl-C in the terminal is the run's affair
                )
        except BaseException:
            self.connection.close()
            raise

    def fork(self, worker: int, connection: socket.socket) -> None:
        """Have a worker forked that serves this connection; the caller closes its copy. Raises `OSError` when the process is gone."""
        socket.send_fds(self.connection, [COMMAND.pack(FORK, worker)], [connection.fileno()])

    def kill(self, worker: int) -> None:
        """Have a worker killed; a report follows when it is gone. Raises `OSError` when the process is gone."""
        self.connection.send(COMMAND.pack(KILL, worker))

    def reports(self) -> Iterator[tuple[bytes, int, int]]:
        """What it has reported and nobody has read: (ENDED or NOT_FORKED, worker, code). Raises `EOFError` when it is gone."""
        while True:
            try:
                data = self.connection.recv(REPORT.size, socket.MSG_WAITALL)
            except BlockingIOError:
                return
            except OSError as err:
                raise EOFError from err
            if len(data) < REPORT.size:
                raise EOFError
            yield REPORT.unpack(data)

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called: the connection is closed."""
        return self.connection.fileno() < 0

    def stop(self) -> None:
        """Ask it to end: it kills and reaps all workers first. Idempotent."""
        try:
            self.connection.shutdown(socket.SHUT_RDWR)  # reaches it even when a process forked from this one holds a copy
        except OSError:
            pass
        self.connection.close()

    def kill_now(self) -> None:
        """End it whatever it does; the kernel ends its workers."""
        self._process.kill()


def main(order: dict[str, Any], descriptor: int, parent: int) -> None:
    """Be the process: import, then obey until the connection closes."""
    settings = sys.stdin.buffer.read()
    _quiet_standard_streams()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(_CHILD_SUBREAPER, 1)  # what a worker leaves behind becomes our child, and can be found
    _preload(order["preload"], settings, parent)
    _Forker(socket.socket(fileno=descriptor), order["serve"], settings, parent).run()
    os._exit(0)  # at once: a module may have started threads that an ordinary exit would wait for


class _Forker:
    """The loop of the process."""

    def __init__(self, connection: socket.socket, serve: str, settings: bytes, parent: int) -> None:
        self._connection = connection
        self._serve = serve
        self._settings = settings
        self._parent = parent
        self._pids: dict[int, int] = {}  # worker -> process, while not reaped
        self._wakeup, self._wake = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        """Waits for commands and for children that end; unblocked by both, and by the end of the parent."""
        try:
            while os.getppid() == self._parent:
                ready, _, _ = select.select([self._connection, self._wakeup], [], [], PARENT_CHECK_S)
                if self._wakeup in ready:
                    self._wakeup.recv(4096)
                    self._reap()
                if self._connection in ready and not self._obey():
                    break
        except (BrokenPipeError, ConnectionResetError):
            pass  # nobody listens any more
        finally:
            self._end()

    def _obey(self) -> bool:
        """Carry out one command. False: the connection is closed."""
        data, descriptors, _, _ = socket.recv_fds(self._connection, COMMAND.size, 1)
        if len(data) < COMMAND.size:
            return False
        command, worker = COMMAND.unpack(data)
        if command == FORK:
            try:
                self._fork(worker, descriptors[0])
            except OSError as err:
                self._report(NOT_FORKED, worker, err.errno or 0)
            finally:
                os.close(descriptors[0])
        elif worker in self._pids:
            _kill_group(self._pids[worker])
        return True

    def _fork(self, worker: int, descriptor: int) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                _be_worker(server, descriptor, [self._connection, self._wakeup, self._wake], self._serve, self._settings)
            finally:
                os._exit(1)
        self._pids[worker] = pid
        try:
            os.setpgid(pid, pid)  # both sides do it, so that neither finds it undone
        except OSError:
            pass  # it has, or it is gone

    def _reap(self) -> None:
        """Report the workers that ended, and end what they left behind."""
        worker_of = {pid: worker for worker, pid in self._pids.items()}
        lost_worker = False
        while (pid := _ended_child()) is not None:
            if pid in worker_of:
                _kill_group(pid)  # before it is reaped: until then nobody else can have its number
                lost_worker = True
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if pid in worker_of:
                del self._pids[worker_of[pid]]
                self._report(ENDED, worker_of[pid], status)
        if lost_worker:
            for pid in _children() - set(self._pids.values()):  # what it had moved to a group of its own is our child now
                _kill_group(pid)
                _kill(pid)

    def _report(self, what: bytes, worker: int, code: int) -> None:
        self._connection.sendall(REPORT.pack(what, worker, code))

    def _end(self) -> None:
        """Kill and reap everything, within a bound."""
        deadline = time.monotonic() + REAP_LIMIT_S
        for pid in self._pids.values():
            _kill_group(pid)
        while time.monotonic() < deadline:
            try:
                pid = os.waitpid(-1, os.WNOHANG)[0]
            except ChildProcessError:
                return
            if pid == 0:
                for child in _children():
                    _kill_group(child)
                    _kill(child)
                time.sleep(0.002)


def _be_worker(server: int, descriptor: int, inherited: list[socket.socket], serve: str, settings: bytes) -> None:
    """Be a worker; returns only when the server is gone."""
    os.setpgid(0, 0)
    if _prctl(_DEATH_SIGNAL, signal.SIGKILL) and os.getppid() != server:
        return  # the server ended before the kernel was told to end us with it
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for connection in inherited:
        connection.close()
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            os.close(descriptor)
            _function(serve)(connection, settings)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the pool hung up in the middle
    except BaseException:  # noqa: BLE001 - the last chance to tell a person
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _preload(preload: str, settings: bytes, parent: int) -> None:
    """Import what the workers will need. What fails here fails again in the worker, which reports it."""

    def end_with_parent(*_: object) -> None:
        if os.getppid() != parent:
            os._exit(1)

    signal.signal(signal.SIGALRM, end_with_parent)  # an import may never end
    signal.setitimer(signal.ITIMER_REAL, PARENT_CHECK_S, PARENT_CHECK_S)
    try:
        _function(preload)(settings)
    except BaseException:  # noqa: BLE001
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    gc.collect()
    gc.freeze()  # objects made so far are not touched by collections in the workers: their memory stays shared


def _function(name: str) -> Callable[..., None]:
    module, _, attribute = name.partition(":")
    return cast(Callable[..., None], getattr(importlib.import_module(module), attribute))


def _quiet_standard_streams() -> None:
    """No input, and output goes to the error stream, so that work that prints does not disturb the progress display."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)


def _prctl(option: int, value: int) -> bool:
    """Tell the Linux kernel something about this process; False elsewhere."""
    if sys.platform != "linux":
        return False
    return int(ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)) == 0


def _ended_child() -> int | None:
    """A child that ended and is not reaped."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found else None


def _children() -> set[int]:
    """Processes whose parent is this one; empty where there is no /proc."""
    own = str(os.getpid())
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (OSError, UnicodeDecodeError):
            continue  # it ended meanwhile
        if fields[1] == own and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        _kill(pid)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
