"""What runs in a worker process: build the environment, then make one call after another until the other end hangs up.

Each message is a header with its length, then JSON, in both directions: nothing an environment produces is unpickled in the run's own
process. The first message of a worker is `{"ready": true}` or `{"failed": why}`; a call is `[number, "reset" | "step", argument]`, its
answer `[number, what, fields]`.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any, BinaryIO, Final

from sluice.environments.base import EnvFault, EnvInfo, EnvReset, EnvStep
from sluice.environments.boundary import Answer, HeldEnvironment, describe
from sluice.environments.build import build_environment, preload
from sluice.environments.settings import EnvironmentConfig
from sluice.errors import EnvError

HEADER: Final = struct.Struct("!Q")  # length of the payload


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
        connection.sendall(pack({"failed": str(err) if isinstance(err, EnvError) else describe(err)}))
        return
    connection.sendall(pack({"ready": True}))
    calls, own = connection.makefile("rb"), os.getpid()
    while (message := _receive(calls)) is not None:
        number, call, argument = message
        try:
            answer = held.perform(call, argument)
        except KeyboardInterrupt as err:  # Ctrl-C is ignored here: this one is the environment's own
            answer = EnvFault(kind="env_failed", detail=f"environment {config.type}, {call}: {describe(err)}", call=call)
        if os.getpid() != own:
            os._exit(0)  # the environment forked, and its child came back as if it were the worker
        connection.sendall(pack([number, *pack_answer(answer)]))
    held.drop()


def pack(message: object) -> bytes:
    """A message as bytes, header included."""
    payload = json.dumps(message).encode()
    return HEADER.pack(len(payload)) + payload


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


def _receive(calls: BinaryIO) -> list[Any] | None:
    """The next call; None when the pool hung up."""
    header = calls.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    payload = calls.read(size)
    if len(payload) < size:
        return None
    call: list[Any] = json.loads(payload)
    return call
