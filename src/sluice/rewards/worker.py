"""What runs in a worker process: build the verifiers, then score one job after another.

The payload of a job is a pickle of (task fields, response), its answer a score as plain data.
"""

from __future__ import annotations

import pickle
import socket
from typing import Any

import numpy as np

from sluice.config.models import RewardConfig
from sluice.errors import describe
from sluice.rewards.base import Score, Verifier
from sluice.rewards.build import build_verifier, preload
from sluice.rewards.score import failed, run_verifier
from sluice.types import Failure, Task
from sluice.workers import serve_jobs, tell_failed


def preload_verifiers(settings: bytes) -> None:
    """Import what the verifiers need, in the process from which workers are forked; what fails here fails again in the worker."""
    rewards: dict[str, RewardConfig] = pickle.loads(settings)
    for config in rewards.values():
        try:
            preload(config.verifier)
        except BaseException:  # noqa: BLE001 - the modules of the others are wanted all the same
            continue


def serve(connection: socket.socket, settings: bytes) -> None:
    """Score jobs until the connection is closed. Raises nothing that a verifier can cause."""
    rewards: dict[str, RewardConfig] = pickle.loads(settings)
    verifiers: dict[str, tuple[Verifier, str | None]] = {}
    for domain, config in rewards.items():
        try:
            verifiers[domain] = (build_verifier(config.verifier), config.reward_key)
        except BaseException as err:  # noqa: BLE001 - told to the pool, which decides
            tell_failed(connection, f"the verifier of rewards.{domain} cannot be built in a worker: {describe(err)}")
            return

    def work(payload: bytes) -> list[Any]:
        try:
            task, response = unpack_task(payload)
        except BaseException as err:  # noqa: BLE001 - unpickling runs code of the data's classes
            return pack_score(failed("task_not_picklable", f"the task cannot be unpickled in a worker: {describe(err)}"))
        verifier, reward_key = verifiers[task.domain]
        return pack_score(run_verifier(verifier, task, response, reward_key))

    serve_jobs(connection, work)


def pack_task(task: Task, response: str) -> bytes:
    """The payload of a job. Raises whatever pickling raises."""
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
    return pickle.dumps((fields, response), protocol=5)


def unpack_task(payload: bytes) -> tuple[Task, str]:
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
