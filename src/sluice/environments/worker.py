"""What runs in a worker process: build the environment, then make one call after another.

The payload of a job is JSON, `["reset" | "step", argument]`, its answer `[what, *fields]`.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from sluice.environments.base import Call, EnvFault, EnvInfo, EnvReset, EnvStep
from sluice.environments.boundary import Answer, HeldEnvironment
from sluice.environments.build import build_environment, preload
from sluice.environments.settings import EnvironmentConfig
from sluice.errors import EnvError, describe
from sluice.workers import serve_jobs, tell_failed


def preload_config(settings: bytes) -> None:
    """Import what the environment of these settings needs; in the process from which workers are forked."""
    preload(EnvironmentConfig(**json.loads(settings)))


def serve(connection: socket.socket, settings: bytes) -> None:
    """Make calls until the connection is closed. Raises nothing that an environment can cause."""
    config = EnvironmentConfig(**json.loads(settings))
    held = HeldEnvironment(config.type, lambda: build_environment(config))
    try:
        held.build()
    except BaseException as err:  # noqa: BLE001 - told to the pool, which decides
        tell_failed(connection, str(err) if isinstance(err, EnvError) else describe(err))
        return

    def work(payload: bytes) -> list[Any]:
        call, argument = json.loads(payload)
        try:
            answer = held.perform(call, argument)
        except KeyboardInterrupt as err:  # Ctrl-C is ignored here: this one is the environment's own
            answer = EnvFault(kind="env_failed", detail=f"environment {config.type}, {call}: {describe(err)}", call=call)
        return pack_answer(answer)

    serve_jobs(connection, work)
    held.drop()


def pack_call(call: Call, argument: int | str) -> bytes:
    """The payload of a job."""
    return json.dumps([call, argument]).encode()


def pack_answer(answer: Answer) -> list[Any]:
    """An answer as plain data: what it is, and its fields."""
    if isinstance(answer, EnvFault):
        return ["fault", answer.kind, answer.detail, answer.call, answer.seconds]
    info = answer.info
    told = [info.admissible_commands, info.progress, info.success, info.task_type, info.env_id, dict(info.extra)]
    if isinstance(answer, EnvReset):
        return ["reset", answer.observation, told, answer.seconds]
    return ["step", answer.observation, answer.reward, answer.terminated, answer.truncated, told, answer.seconds]


def unpack_answer(data: list[Any]) -> Answer:
    """The answer that `pack_answer` packed. Raises `ValueError` for anything else."""
    match data:
        case ["fault", kind, detail, call, seconds]:
            return EnvFault(kind=kind, detail=detail, call=call, seconds=seconds)
        case ["reset", observation, told, seconds]:
            return EnvReset(observation=observation, info=_info(told), seconds=seconds)
        case ["step", observation, reward, terminated, truncated, told, seconds]:
            return EnvStep(
                observation=observation,
                reward=reward,
                terminated=terminated,
                truncated=truncated,
                info=_info(told),
                seconds=seconds,
            )
    raise ValueError("expected a packed answer of a worker")


def _info(told: list[Any]) -> EnvInfo:
    commands, progress, success, task_type, env_id, extra = told
    return EnvInfo(
        admissible_commands=None if commands is None else tuple(commands),
        progress=progress,
        success=success,
        task_type=task_type,
        env_id=env_id,
        extra=extra,
    )
