"""Rewards: turns responses into scores. Verifiers decide, the pool runs them where a stuck one can be killed.

base.py           what a verifier, a scorer and a score are
score.py          makes a `Score` of whatever a verifier answered; counts scores
exact.py          `exact`: the reference answer, letter for letter
numeric.py        `numeric`: the number in the response, within a tolerance
regex.py          `regex`: a pattern finds the answer, or is the test
math_verify.py    `math_verify`: mathematically equal expressions
reasoning_gym.py  `reasoning_gym`: the data set that made a row scores it
custom.py         `package.module.name`: a function or class of the user
build.py          the table of verifiers; checks and builds one from its configuration
inline.py         scores in the caller's thread, without limits
pool.py           scores in worker processes, with limits
worker.py         what runs in a worker process

A new verifier is one file with a subclass of `BuiltinVerifier` (its fields are the `args`, its `__call__` the score) and one line in the
table of build.py. A bad verifier, a bad answer and a bad worker are counted failures of single items; only settings and a pool that cannot
work at all raise.
"""

from __future__ import annotations

from collections.abc import Mapping

from sluice.config.models import RewardConfig, RewardPoolConfig
from sluice.rewards.base import BuiltinVerifier, Score, Scorer, Verifier
from sluice.rewards.build import (
    VERIFIERS,
    build_verifier,
    check_rewards,
    check_verifier,
    reward_problems,
    verifier_problems,
)
from sluice.rewards.inline import InlineScorer
from sluice.rewards.pool import RewardPool
from sluice.rewards.score import make_score

__all__ = [
    "VERIFIERS",
    "BuiltinVerifier",
    "InlineScorer",
    "RewardPool",
    "Score",
    "Scorer",
    "Verifier",
    "build_scorer",
    "build_verifier",
    "check_rewards",
    "check_verifier",
    "make_score",
    "reward_problems",
    "verifier_problems",
]


def build_scorer(rewards: Mapping[str, RewardConfig], pool: RewardPoolConfig) -> InlineScorer | RewardPool:
    """The scorer that a run is configured with. Raises `ConfigError` for wrong settings and `RewardError` when nothing can be started."""
    check_rewards(rewards)
    return RewardPool(rewards, pool.workers) if pool.workers else InlineScorer(rewards)
