"""The records that flow through Sluice, in the order in which data meets them.

Task -> Turn -> Rollout -> Group -> Verdict -> Sample -> Batch. Every record is frozen: whoever learns something new makes a new record.
Token ids and log-probabilities are numpy arrays, so that this file imports neither torch nor any engine. A mask is True where we train.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int64]
Logprobs = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Rewards = npt.NDArray[np.float64]

FinishReason = Literal["stop", "length", "cancelled"]
"""Why a generation ended: an end token or stop text, its token limit (then it is truncated), or a cancel."""

RolloutFinish = Literal["stop", "length", "cancelled", "completed", "max_turns", "stopped_futile", "env_failed", "env_timeout", "timeout"]
"""Why a rollout ended. A response ends as its generation does.

A trajectory is `completed` by its environment, reaches a limit on turns (`max_turns`: an ordinary end with its reward), on tokens
(`length`: truncated) or on seconds (`timeout`), is stopped because it gets nowhere (`stopped_futile`: with the reward so far), or its
environment failed or hung.
"""

Flag = Literal["env_timeout", "env_failed", "drop_flag"]
"""What is wrong with a delivered trajectory: for the group filter, which sees it among the members."""

FailureCause = Literal["policy", "infrastructure"]
"""Who is to blame: what the policy wrote (its low reward is real), or the machinery (the member is no evidence)."""

Category = Literal["invalid", "low_information"]
"""Kind of rejection: broken data, or nothing to learn from it. Always counted apart."""

TruncatedPolicy = Literal["mask", "keep", "invalid", "drop_group"]

EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a group is sampled for: one prompt with its identity, its reward domain and whatever its verifier needs."""

    task_id: str  # unique in the run's data; the same prompt keeps it in every epoch
    domain: str  # reward domain: selects verifier and filters
    prompt: str  # the text the policy sees, templates applied
    prompt_ids: TokenIds = field(compare=False)  # [P]
    answer: str | None = None  # the reference answer; None when the verifier needs none
    entry: Mapping[str, Any] = field(default_factory=lambda: EMPTY)  # the raw data row, for the verifier; picklable
    tag: str | None = None  # label in the data that `tag_included` mapped to the domain; None: labelled by domain
    difficulty: float | None = None  # None: the data gives none


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # arrays have no one answer to `==`: turns are compared by identity
class Turn:
    """One generation of the policy, with the tokens that were put before it."""

    prompt_ids: TokenIds  # [P] tokens added before this generation: the prompt, or the environment's reply
    token_ids: TokenIds  # [N] sampled tokens, end token included when it was sampled
    inference_logprobs: Logprobs  # [N] log-prob of each sampled token under the full vocabulary at the sampling temperature
    text: str  # the sampled tokens as text, end token left out
    finish_reason: FinishReason
    policy_version: int  # version of the weights that sampled its first token: the oldest one
    token_versions: TokenIds | None = None  # [N] version that sampled each token; None: policy_version sampled them all
    observation: str = ""  # what the environment had answered before it; "" where there is no environment
    action: str | None = None  # what was read from the text and given to the environment; None: nothing was
    is_admissible: bool | None = None  # whether the action was among the commands that would do something; None: nobody says
    reward: float | None = None  # of the environment step that followed; None: none did
    progress: float | None = None  # as the environment had said before it, like the observation; None: it does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a member did not deliver, or delivered without a reward."""

    cause: FailureCause
    reason: str  # short, countable: "reward_timeout", "reward_error", "reward_missing", "reward_not_finite", "engine_error", "env_timeout"
    detail: str = ""  # for a person: the exception text


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One finished attempt at one member of a group: what was sampled and what it earned."""

    attempt_id: int  # the try that produced it; unique in the run
    group_id: int
    member_index: int  # 0 .. group_size - 1
    task_id: str
    turns: tuple[Turn, ...]
    finish_reason: RolloutFinish
    reward: float | None  # raw task reward (of a trajectory: the sum over its steps); None: it has none (then `failure` says why)
    metrics: Mapping[str, float] = field(default_factory=lambda: EMPTY)  # further named scores of the verifier
    failure: Failure | None = None
    seconds: float = 0.0  # from launch to reward
    flags: frozenset[Flag] = frozenset()  # what is wrong with it, for the group filter
    env_id: str | None = None  # names the problem that its environment gave; None: it does not say, or there is none
    task_type: str | None = None  # kind of that problem

    @property
    def env_steps(self) -> int:
        """Number of steps that its environment took."""
        return sum([turn.reward is not None for turn in self.turns])

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled: the length of this rollout."""
        turns = self.turns
        if len(turns) == 1:
            return len(turns[0].token_ids)
        return sum(len(turn.token_ids) for turn in turns)

    @property
    def is_truncated(self) -> bool:
        """Whether the last generation was cut by its token limit."""
        return self.finish_reason == "length"

    @property
    def policy_version(self) -> int:
        """The oldest version of the weights among its turns; -1 when it has no turn."""
        turns = self.turns
        if len(turns) == 1:  # the single-turn case, which is asked for every member
            return turns[0].policy_version
        return min([turn.policy_version for turn in turns], default=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The sibling rollouts of one task, whole: nothing partial is ever made into one."""

    group_id: int  # unique in the run
    task: Task
    rollouts: tuple[Rollout, ...]  # in order of member_index, which may have gaps where members were lost
    start_step: int  # global_step at launch
    round: int  # 1 for the groups first asked for, n + 1 for the replacement of a group of round n
    epoch: int  # pass over the data in which the task was drawn
    counted: tuple[bool, ...]  # parallel to rollouts: which of them enter statistics: scored, and not masked as truncated

    @property
    def rewards(self) -> Rewards:
        """Raw task rewards. [G] float64, NaN where a member has none."""
        return np.array([math.nan if r.reward is None else r.reward for r in self.rollouts], dtype=np.float64)

    @property
    def policy_version(self) -> int:
        """The oldest policy_version in the group; its start step where no member says what sampled it."""
        return min([rollout.policy_version for rollout in self.rollouts if rollout.turns], default=self.start_step)

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled by its members."""
        return sum(r.sampled_tokens for r in self.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A decision on a response or a group: keep or drop, who says so, why, on what evidence. keep=True always means keep.

    A verdict has no truth value, so that keep and drop cannot be confused: read `.keep`.
    """

    keep: bool
    reason: str  # "kept", or a short countable word: "no_spread", "mean_band", "incomplete", "format", ...
    category: Category | None = None  # None exactly when kept
    source: str = ""  # the filter that decided, e.g. "std_filter"
    evidence: Mapping[str, float] = field(default_factory=lambda: EMPTY)  # the numbers it decided on

    def __post_init__(self) -> None:
        if self.keep != (self.category is None):
            raise ValueError(
                f"Verdict: a drop needs a category ('invalid' or 'low_information') and a keep has none, "
                f"got keep={self.keep} with category={self.category!r} - use Verdict.kept() or Verdict.dropped()"
            )

    def __bool__(self) -> NoReturn:
        raise TypeError("a Verdict has no truth value (True could mean keep or drop) - read verdict.keep")

    @classmethod
    def kept(cls, source: str = "", reason: str = "kept", evidence: Mapping[str, float] = EMPTY) -> Verdict:
        """A keep."""
        return cls(keep=True, reason=reason, category=None, source=source, evidence=evidence)

    @classmethod
    def dropped(cls, reason: str, category: Category, source: str = "", evidence: Mapping[str, float] = EMPTY) -> Verdict:
        """A drop with its reason and category."""
        return cls(keep=False, reason=reason, category=category, source=source, evidence=evidence)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # arrays, as in a turn
class Sample:
    """One row of a training batch: one rollout as the trainer sees it."""

    group_id: int
    attempt_id: int
    prompt_ids: TokenIds  # [P]
    completion_ids: TokenIds  # [T] everything after the first prompt, environment replies included
    loss_mask: Mask  # [T] True on the policy's own tokens that train; all False for a member that is masked out
    inference_logprobs: Logprobs  # [T] 0 where the policy did not sample
    reward: float | None  # raw task reward
    is_counted: bool  # whether it enters group statistics; if not its advantage is 0
    policy_version: int
    token_versions: TokenIds | None = None  # [T] version that sampled each token, -1 where the policy did not; None: policy_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one optimiser step consumes: whole groups only."""

    groups: tuple[Group, ...]  # oldest launch first
    requested: int  # groups asked for; len(groups) differs only when a bound with `shrink` or the end of the data acted
    step: int  # global_step for which it was filled
    is_last: bool = False  # the data ended: no further batch will come
