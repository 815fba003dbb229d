"""What runs in a worker process: one job after another until the other end hangs up.

A job is a header with its number and length, then its payload, which means whatever the pool and the work agree on. An answer is a header
with its length, then JSON, so that nothing the work produces is unpickled in the run's own process: first `{"ready": true}` or
`{"failed": why}`, then for each job a list that starts with its number.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import BinaryIO, Final

HEADER: Final = struct.Struct("!Q")  # length of the payload
JOB_HEADER: Final = struct.Struct("!QQ")  # number of the job, length of its payload


def serve_jobs(connection: socket.socket, work: Callable[[bytes], Sequence[object]]) -> None:
    """Say that the worker is ready, then answer jobs until the connection is closed.

    Args:
        connection: to the pool.
        work: makes of the payload of a job the fields of its answer. Raises nothing that its work can cause.
    """
    _send(connection, {"ready": True})
    jobs, own = connection.makefile("rb"), os.getpid()
    while (received := _receive(jobs)) is not None:
        number, payload = received
        answer = work(payload)
        if os.getpid() != own:
            os._exit(0)  # the work forked, and its child came back as if it were the worker
        _send(connection, [number, *answer])


def tell_failed(connection: socket.socket, why: str) -> None:
    """Say why this worker cannot begin; the pool decides whether another one is tried."""
    _send(connection, {"failed": why})


def pack_job(number: int, payload: bytes) -> bytes:
    """A job as bytes, header included."""
    return JOB_HEADER.pack(number, len(payload)) + payload


def _send(connection: socket.socket, message: object) -> None:
    payload = json.dumps(message).encode()
    connection.sendall(HEADER.pack(len(payload)) + payload)


def _receive(jobs: BinaryIO) -> tuple[int, bytes] | None:
    """Number and payload of the next job; None when the pool hung up."""
    header = jobs.read(JOB_HEADER.size)
    if len(header) < JOB_HEADER.size:
        return None
    number, size = JOB_HEADER.unpack(header)
    payload = jobs.read(size)
    return (number, payload) if len(payload) == size else None
