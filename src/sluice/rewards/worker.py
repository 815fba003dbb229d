"""What runs in a worker process: build the verifiers, then score one job after another until the other end hangs up.

Each message is a header with its length, then the payload. A job is a number and a pickle of (task fields, response). An answer is JSON, so
that nothing a verifier produces is unpickled in the run's own process: first `{"ready": true}` or `{"failed": why}`, then for each job a
list that starts with its number.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, Final

import numpy as np

from sluice.config.models import RewardConfig
from sluice.rewards.base import Score, Verifier
from sluice.rewards.build import build_verifier
from sluice.rewards.score import describe, failed, run_verifier
from sluice.types import Failure, Task

HEADER: Final = struct.Struct("!Q")  # length of the payload
JOB_HEADER: Final = struct.Struct("!QQ")  # number of the job, length of its payload


def serve(connection: socket.socket, rewards: Mapping[str, RewardConfig]) -> None:
    """Score jobs until the connection is closed. Raises nothing that a verifier can cause."""
    verifiers: dict[str, tuple[Verifier, str | None]] = {}
    for domain, config in rewards.items():
        try:
            verifiers[domain] = (build_verifier(config.verifier), config.reward_key)
        except BaseException as err:  # noqa: BLE001 - told to the pool, which decides
            _send(connection, {"failed": f"the verifier of rewards.{domain} cannot be built in a worker: {describe(err)}"})
            return
    _send(connection, {"ready": True})
    jobs, own = connection.makefile("rb"), os.getpid()
    while (received := _receive(jobs)) is not None:
        number, payload = received
        try:
            task, response = unpack_job(payload)
        except BaseException as err:  # noqa: BLE001 - unpickling runs code of the data's classes
            score = failed("task_not_picklable", f"the task cannot be unpickled in a worker: {describe(err)}")
        else:
            verifier, reward_key = verifiers[task.domain]
            score = run_verifier(verifier, task, response, reward_key)
        if os.getpid() != own:
            os._exit(0)  # the verifier forked, and its child came back as if it were the worker
        _send(connection, [number, *pack_score(score)])


def pack_job(number: int, task: Task, response: str) -> bytes:
    """A job as bytes, header included. Raises whatever pickling raises."""
    fields = (
        task.task_id,
        task.domain,
        task.prompt,
        np.asarray(task.prompt_ids, np.int64).tobytes(),
        task.answer,
        dict(task.entry),
        task.tag,
        task.difficulty,
    )
    payload = pickle.dumps((fields, response), protocol=5)
    return JOB_HEADER.pack(number, len(payload)) + payload


def unpack_job(payload: bytes) -> tuple[Task, str]:
    """Task and response of a job."""
    fields, response = pickle.loads(payload)
    task_id, domain, prompt, prompt_ids, answer, entry, tag, difficulty = fields
    task = Task(
        task_id=task_id,
        domain=domain,
        prompt=prompt,
        prompt_ids=np.frombuffer(prompt_ids, dtype=np.int64),
        answer=answer,
        entry=entry,
        tag=tag,
        difficulty=difficulty,
    )
    return task, response


def pack_score(score: Score) -> list[Any]:
    """A score as plain data: reward, metrics, failure, seconds."""
    failure = score.failure
    why = None if failure is None else [failure.cause, failure.reason, failure.detail]
    return [score.reward, dict(score.metrics), why, score.seconds]


def unpack_score(data: list[Any]) -> Score:
    """The score that `pack_score` packed."""
    reward, metrics, why, seconds = data
    failure = None if why is None else Failure(cause=why[0], reason=why[1], detail=why[2])
    return Score(reward=reward, metrics=metrics, failure=failure, seconds=seconds)


def _send(connection: socket.socket, answer: object) -> None:
    payload = json.dumps(answer).encode()
    connection.sendall(HEADER.pack(len(payload)) + payload)


def _receive(jobs: BinaryIO) -> tuple[int, bytes] | None:
    """Number and payload of the next job; None when the pool hung up."""
    header = jobs.read(JOB_HEADER.size)
    if len(header) < JOB_HEADER.size:
        return None
    number, size = JOB_HEADER.unpack(header)
    payload = jobs.read(size)
    return (number, payload) if len(payload) == size else None
