"""The pool's end of one worker: what it is in, what it has said, and a socket that never blocks."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any, Final, Generic, TypeVar

from sluice.workers.serving import HEADER

LARGEST_MESSAGE: Final = 1 << 26  # bytes that a worker may say at once: far beyond any honest answer
_CHUNK: Final = 1 << 16  # bytes read at once; from 128 KiB on every read would map fresh memory

JobT = TypeVar("JobT")


class Place(Generic[JobT]):
    """One of a pool's places: it holds a worker, starts one, or waits to try again."""

    __slots__ = ("failed_starts", "is_waiting", "last_words", "retry", "worker")

    def __init__(self) -> None:
        self.worker: Worker[JobT] | None = None
        self.failed_starts = 0  # in a row
        self.is_waiting = False  # for the next try
        self.last_words = ""  # why the last start failed, in the worker's words
        self.retry: asyncio.TimerHandle | None = None


class Worker(Generic[JobT]):
    """The pool's end of one worker process. It has one job at a time."""

    def __init__(self, worker_id: int, place: Place[JobT], connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self.id = worker_id
        self.place = place
        self.connection = connection
        self.connection.setblocking(False)
        self.is_ready = False
        self.hung_up = False
        self.was_killed = False  # by us
        self.job: JobT | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._loop = loop
        self._received = bytearray()
        self._unsent = memoryview(b"")
        self._is_sending = False  # the socket was full

    def send(self, message: bytes) -> None:
        """Send a job, as much as the socket takes now and the rest when it takes more."""
        self._unsent = memoryview(message)
        self._send_more()

    def read(self) -> list[Any]:
        """The messages that have arrived whole; nothing any more once it hung up."""
        if self.hung_up:
            return []
        try:
            while data := self.connection.recv(_CHUNK):
                self._received += data
                if len(data) < _CHUNK:
                    break
            else:
                self.hung_up = True
        except BlockingIOError:
            pass
        except OSError:
            self.hung_up = True
        messages = []
        while len(self._received) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._received)
            if size > LARGEST_MESSAGE:
                self.hung_up = True
                break
            end = HEADER.size + size
            if len(self._received) < end:
                break
            try:
                messages.append(json.loads(self._received[HEADER.size : end]))
            except ValueError:
                self.hung_up = True
                break
            del self._received[:end]
        return messages

    def stop_timer(self) -> None:
        """Whatever it was waited for has come."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def hang_up(self) -> None:
        """Stop listening to it."""
        self.stop_timer()
        self._loop.remove_writer(self.connection)
        self.connection.close()
        self.hung_up = True

    def _send_more(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]
        except BlockingIOError:
            self._loop.add_writer(self.connection, self._send_more)
            self._is_sending = True
            return
        except OSError:
            self._unsent = memoryview(b"")  # it is dead: the report says so
        if self._is_sending:
            self._loop.remove_writer(self.connection)
            self._is_sending = False
