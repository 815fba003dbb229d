"""The configuration of an agentic run: environments, how the policy talks to them, and how groups of trajectories are made.

Names that users of ROLL know keep their meaning: `rollout_batch_size` (here in trajectories), `train_env_manager` and `val_env_manager`
with `num_env_groups`, `group_size`, `group_size_redundancy`, `group_filter_cls` and `max_traj_per_env`, `env_monitor`,
`sequence_length`, `async_generation_ratio`.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from sluice.config.gate import GateConfig
from sluice.config.models import (
    LARGEST_GROUP,
    LONGEST_GROUP_S,
    MOST_GROUPS,
    MOST_TOKENS,
    MOST_WORKERS,
    FilterConfig,
    ImportPath,
    RunConfig,
    Section,
    greedy_or_warm,
)

LONGEST_CALL_S: Final = 604_800.0  # a week for one call
MOST_TURNS: Final = 100_000  # of one trajectory: a hundred times a long one
MOST_TRAJECTORIES: Final = MOST_GROUPS * 64  # of one batch: groups of 64 are large ones


class EnvironmentConfig(Section):
    """One kind of environment and how its calls are made."""

    type: str = Field(min_length=1)  # name in the table of environments/build.py, or an import path package.module.Class
    args: dict[str, Any] = Field(default_factory=dict)  # the settings of that environment
    max_steps: int | None = Field(default=None, ge=1)  # then an episode is truncated, whatever the environment says; None: only it says
    run_in: Literal["inline", "thread", "process"] = "process"  # inline: only what certainly returns; thread: cannot be killed
    workers: int = Field(default=2, ge=1, le=MOST_WORKERS)  # processes; each plays one episode at a time
    episodes_per_worker: int | None = Field(default=None, ge=1)  # then its process is replaced, for engines that leak; None: never
    reset_timeout_s: float | None = Field(default=120.0, gt=0, le=LONGEST_CALL_S)  # None: no limit (the monitor still watches)
    step_timeout_s: float | None = Field(default=60.0, gt=0, le=LONGEST_CALL_S)  # None: no limit

    def limit_s(self, call: str) -> float | None:
        """The time limit of a call."""
        return self.reset_timeout_s if call == "reset" else self.step_timeout_s


class EnvMonitorConfig(Section):
    """Watches for environments that are in one call for too long."""

    enable: bool = True
    interval_s: float = Field(default=30.0, gt=0, le=LONGEST_CALL_S)  # between two looks
    hung_after_s: float = Field(default=3600.0, gt=0, le=LONGEST_CALL_S)  # in one call
    on_hung: Literal["name", "replace"] = "name"  # only warn, or end the call, kill its process where it has one, and replace it


class DialogueConfig(Section):
    """How the policy and an environment talk in tokens, and where a trajectory ends."""

    style: Literal["plain", "chat"] = "plain"  # plain: templates alone; chat: messages through the tokenizer's chat template
    system_prompt: str | None = None  # chat only: the first message
    first_template: str | None = None  # what the policy reads before its first turn; None: as turn_template
    turn_template: str = "{observation}\n>"  # before every turn; fields {observation} {admissible_commands} {turn} {turns_left}
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)  # texts of one token each that end a turn
    action_pattern: str | None = None  # regular expression with one group: its last match is the action; None: the whole text, stripped
    max_tokens_per_turn: int = Field(default=64, ge=1, le=MOST_TOKENS)  # a turn that reaches it acts with what it has written
    max_turns: int | None = Field(default=None, ge=1, le=MOST_TURNS)  # then it ends with its reward; None: its environment ends it
    timeout_s: float | None = Field(default=None, gt=0, le=LONGEST_GROUP_S)  # of a trajectory, without the wait for an environment


class EnvManagerConfig(Section):
    """Groups of trajectories: how many environments there are, and who judges the groups."""

    num_env_groups: int = Field(default=128, ge=1, le=MOST_GROUPS)  # environment groups: each opens one episode after another
    group_size: int = Field(default=1, ge=1, le=LARGEST_GROUP)  # trajectories of one episode
    group_size_redundancy: int = Field(default=0, ge=0, le=LARGEST_GROUP)  # beyond group_size; the first group_size to finish count
    group_filter_cls: ImportPath | None = None  # import path of a class that judges groups of trajectories
    group_filter_config: FilterConfig | None = None  # or a filter of this project; None of both: every whole group is kept
    max_traj_per_env: int = Field(default=-1, ge=-1, le=MOST_GROUPS)  # episodes opened per environment group and step; -1: as few as do


class AgenticValidationConfig(Section):
    """Held-out evaluation: the first episode of every environment group of `val_env_manager`, each time the same."""

    every_steps: int | None = Field(default=None, ge=1)  # None: before and after the run only
    temperature: Annotated[float, AfterValidator(greedy_or_warm)] = 0.0  # 0: greedy
    filtering: Literal["record", "apply"] = "record"  # what its group filter would reject is counted, or taken out of the mean as well


class AgenticConfig(RunConfig):
    """A whole agentic run."""

    pipeline: Literal["agentic"]
    environment: EnvironmentConfig
    val_environment: EnvironmentConfig | None = None  # None: as `environment`
    env_monitor: EnvMonitorConfig = EnvMonitorConfig()
    dialogue: DialogueConfig = DialogueConfig()
    train_env_manager: EnvManagerConfig
    val_env_manager: EnvManagerConfig | None = None  # None: no evaluation
    rollout_batch_size: int = Field(ge=1, le=MOST_TRAJECTORIES)  # trajectories per optimiser step: a multiple of group_size
    sequence_length: int = Field(ge=2, le=MOST_TOKENS)  # tokens of a whole trajectory; one that reaches it is truncated
    validation: AgenticValidationConfig = AgenticValidationConfig()
    gate: GateConfig | None = None  # None: every group runs to its end

    @property
    def groups_per_batch(self) -> int:
        """Groups of one optimiser step."""
        return self.rollout_batch_size // self.train_env_manager.group_size

    @property
    def fewest_episodes_per_env(self) -> int:
        """Episodes that every environment group must open for one batch; replacements come on top."""
        manager = self.train_env_manager
        return -(-self.rollout_batch_size // (manager.num_env_groups * manager.group_size))

    @property
    def episodes_per_env(self) -> int:
        """Episodes that every environment group opens for one step; replacements come on top."""
        given = self.train_env_manager.max_traj_per_env
        return self.fewest_episodes_per_env if given == -1 else given

    @property
    def additional_groups(self) -> int:
        """Groups beyond the batch that may run at once, where `max_traj_per_env` makes room for them."""
        manager = self.train_env_manager
        return 0 if manager.max_traj_per_env == -1 else max(0, manager.num_env_groups * manager.max_traj_per_env - self.groups_per_batch)

    @property
    def most_open_groups(self) -> int:
        """Groups that may be under way at once: of the batch, of those that are prepared ahead, and additional ones."""
        ahead = math.ceil(Fraction(repr(self.async_generation_ratio)) * self.groups_per_batch)
        return self.groups_per_batch + ahead + self.additional_groups

    @property
    def on_member_failure(self) -> Literal["replace", "judge"]:
        """What becomes of a member that delivered without a reward: classes that judge groups expect to see it."""
        return self.resampling.on_member_failure or ("replace" if self.train_env_manager.group_filter_cls is None else "judge")

    @property
    def domain(self) -> str:
        """The name under which its groups are counted."""
        return self.environment.type.rsplit(".", 1)[-1]
