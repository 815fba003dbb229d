"""A kind of work for tests: a worker does what its job says."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence

from sluice.workers import serve_jobs, tell_failed

HERE = __name__


def preload(settings: bytes) -> None:
    """Nothing is needed."""


def serve(connection: socket.socket, settings: bytes) -> None:
    if settings == b"fail":
        tell_failed(connection, "there is no work to be had")
        return

    def work(payload: bytes) -> Sequence[object]:
        what, _, argument = payload.decode().partition(" ")
        if what == "die":
            os._exit(7)
        if what == "sleep":
            time.sleep(3600)
        if what == "promise":  # a message without end
            connection.sendall(struct.pack("!Q", 1 << 40))
            time.sleep(3600)
        return ["answer", argument] if what == "echo" else ["no answer"]

    serve_jobs(connection, work)
