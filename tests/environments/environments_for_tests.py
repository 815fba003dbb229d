"""Environments that do as the action says, and some that cannot even be built. Import paths of these are used in worker processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np

HERE = "tests.environments.environments_for_tests"

WRONG_STEPS = {
    "list": ["text", 0.0, False, False, {}],
    "none": None,
    "short": ("text", 0.0, False, {}),
    "bytes": (b"text", 0.0, False, False, {}),
    "reward text": ("text", "1", False, False, {}),
    "reward none": ("text", None, False, False, {}),
    "reward truth": ("text", True, False, False, {}),
    "reward nan": ("text", float("nan"), False, False, {}),
    "reward infinite": ("text", float("inf"), False, False, {}),
    "terminated number": ("text", 0.0, 1, False, {}),
    "truncated text": ("text", 0.0, False, "False", {}),
    "info list": ("text", 0.0, False, False, []),
    "info none": ("text", 0.0, False, False, None),
    "commands text": ("text", 0.0, False, False, {"admissible_commands": "look"}),
    "commands numbers": ("text", 0.0, False, False, {"admissible_commands": [1, 2]}),
    "progress large": ("text", 0.0, False, False, {"progress": 1.5}),
    "progress text": ("text", 0.0, False, False, {"progress": "half"}),
    "success text": ("text", 0.0, False, False, {"success": "yes"}),
    "env_id number": ("text", 0.0, False, False, {"env_id": 7}),
    "observation surrogate": ("half a pair: \ud800", 0.0, False, False, {}),
    "reward beyond float32": ("text", 3.5e38, False, False, {}),
    "reward below float32": ("text", -1e300, False, False, {}),
    "reward of 400 digits": ("text", 10**400, False, False, {}),
    "reward of 5000 digits": ("text", 10**5000, False, False, {}),
    "reward complex": ("text", 1j, False, False, {}),
    "commands surrogate": ("text", 0.0, False, False, {"admissible_commands": ["look", "\udfff"]}),
    "too many commands": ("text", 0.0, False, False, {"admissible_commands": [""] * 500_001}),
    "env_id long": ("text", 0.0, False, False, {"env_id": "x" * 1_001}),
    "env_id surrogate": ("text", 0.0, False, False, {"env_id": "\ud800"}),
    "task_type long": ("text", 0.0, False, False, {"task_type": "x" * 1_001}),
    "task_type surrogate": ("text", 0.0, False, False, {"task_type": "\ud800"}),
    "enormous": ("x" * 1_000_001, 0.0, False, False, {}),
    "enormous commands": ("text", 0.0, False, False, {"admissible_commands": ["x" * 1_000_001]}),
}


class Obedient:
    """Echoes actions; `seeds` and actions with a meaning do what their name says. Counts what it is told in `length`."""

    def __init__(self, horizon: int = 1000, build: str = "well", number: float = 0.0) -> None:
        if build == "raise":
            raise ValueError("it was told not to be built")
        if build == "exit":
            os._exit(3)
        self.horizon = horizon
        self.number = number
        self.steps = 0
        self.seed = 0
        self.closed = 0

    def reset(self, seed):
        self.seed, self.steps = seed, 0
        if seed == 666:
            raise ValueError("a seed that raises")
        if seed == 667:
            return "text without info"
        if seed == 668:
            time.sleep(3600)
        if seed == 669:
            os._exit(4)
        return f"seed {seed}", {"env_id": f"problem {seed}", "task_type": "obedience", "pid": os.getpid(), "thread": threading.get_ident()}

    def step(self, action):
        self.steps += 1
        word, _, rest = action.partition(" ")
        if word == "raise":
            raise ValueError("it was told to raise")
        if word == "exit":
            sys.exit("it was told to exit")
        if word == "interrupt":
            raise GeneratorExit
        if word == "ctrl-c":
            raise KeyboardInterrupt
        if word == "hang":
            time.sleep(3600)
        if word == "spin":
            while True:
                pass
        if word == "sleep":
            time.sleep(float(rest))
        if word == "die":
            os._exit(7)
        if word == "doomed":
            threading.Timer(0.05, os._exit, (9,)).start()
        if word == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "fork":
            if os.fork() == 0:
                return "the child", 0.0, False, False, {}
            os.wait()
        if word == "print":
            print("printed by an environment")
        if word == "wrong":
            return WRONG_STEPS[rest]
        if word == "numpy":
            info = {"progress": np.float32(0.5), "success": np.bool_(True), "array": np.zeros(3), "count": np.int64(3)}
            return np.str_("text"), np.float64(0.25), np.bool_(False), np.bool_(False), info
        if word == "number":
            return str(self.number), 0.0, False, False, {}
        if word == "rich":
            return "text", 2e38, False, False, {}
        if word == "integer":
            return "text", 0.0, False, False, {"small": 7, "large": 10**5000}
        terminated = word == "end"
        info = {
            "admissible_commands": ["end", "go on"],
            "progress": 1.0 if terminated else 0.5,
            "success": terminated,
            "length": len(action),
            "pid": os.getpid(),
            "object": object(),
        }
        return f"told: {action[:20]}", 1.0 if terminated else 0.0, terminated, not terminated and self.steps >= self.horizon, info

    def close(self):
        self.closed += 1
        if self.seed == 670:
            raise ValueError("closing raises")
        if self.seed == 671:
            time.sleep(3600)


class Lame:
    """Has no step."""

    def reset(self, seed):
        return "text", {}

    def close(self):
        pass


def nothing():
    """Builds no environment."""
    return 7


A_NUMBER = 5
