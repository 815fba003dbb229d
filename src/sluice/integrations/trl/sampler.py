"""Fills generation batches for a trainer of TRL: it plays the scheduler's rounds with whatever generates and scores there.

With several processes each of them plays the same machine on the same prompts and the same gathered rewards, so that all of them decide
alike; a round is generated in equal shares, as TRL's own batches are, and the rows that were chosen are dealt out anew.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from accelerate.utils import gather_object

from sluice.advantage import group_relative
from sluice.errors import RecordError, ResampleError, TrainerError
from sluice.filters import filters_state, load_filters_state
from sluice.integrations.judging import Member, rollout_of
from sluice.integrations.rounds import Filled, RoundPlayer
from sluice.integrations.trl.prompts import PromptStream, text_of
from sluice.integrations.trl.rows import Row
from sluice.integrations.trl.settings import DynamicSampling
from sluice.scheduler import Scheduler
from sluice.scheduler import events as ev
from sluice.types import Rollout

logger = logging.getLogger("sluice.integrations.trl")

# Of the metrics of a batch, those that say nothing here: generation is synchronous.
_SILENT: Final = frozenset({"scheduler/off_policy_ratio", "scheduler/off_policy_max"})
# Of the counts since the start, those that are shown. Shares of them can be computed.
_TOTALS: Final = ("ledger/tokens/", "ledger/useful_token_yield", "scheduler/rejected/", "guard/", "scheduler/quarantined_prompts", "gate/")
_ALWAYS: Final = frozenset(
    {"ledger/tokens/total", "ledger/tokens/trained", "ledger/tokens/dropped"}
)  # of outcomes, also those without a token

_NAMES: Final = {"resampling.": "DynamicSampling.", "guard.": "DynamicSampling.guard.", "response_length": "max_completion_length"}


class Backend(Protocol):
    """Whoever generates and scores in this process."""

    def generate(self, inputs: list[dict[str, Any]]) -> tuple[list[Row], torch.Tensor]:
        """One row per input, in their order, and the rewards of the rows of all processes, by reward function. [world x rows, functions]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A full generation batch, the same in every process."""

    rows: list[Row]  # of all processes, groups side by side
    metrics: dict[str, float]  # of this batch
    totals: dict[str, float]  # since the start

    @property
    def neutral_rows(self) -> int:
        """Rows that only fill a place."""
        return sum([row.is_neutral for row in self.rows])


class Watch:
    """What a rollout function tells of its environments while it runs, and what it is told: which rows nobody waits for any more.

    A row is the place of a prompt in what the rollout function was given. Where no gate is set, and in evaluation, nothing is ever cut.
    """

    def __init__(self, player: RoundPlayer | None = None, attempts: Sequence[int] = ()) -> None:
        self._player = player
        self._attempts = attempts
        self._steps = [0] * len(attempts)

    @property
    def steps(self) -> int:
        """Steps that were told."""
        return sum(self._steps)

    def step(self, row: int, action: str, observation: str = "") -> None:
        """The environment of a row took a step. observation: what the policy saw before it."""
        if self._player is not None and row < len(self._attempts):
            self._steps[row] += 1
            self._player.stepped(self._attempts[row], self._steps[row], action, observation)

    def ended(self, row: int) -> None:
        """The episode of a row ended by itself; its group may be decided on without it."""
        if self._player is not None and row < len(self._attempts):
            self._player.ended(self._attempts[row])

    def is_cut(self, row: int) -> bool:
        """Whether its group was cut: stop it, and answer with what it has so far."""
        return self._player is not None and row < len(self._attempts) and self._player.is_cut(self._attempts[row])


class BatchSampler:
    """Fills generation batches: see the top of this file.

    Args:
        trainer: a GRPOTrainer, whose settings, tokenizer and accelerator are used.
        settings: see there.
        backend: generates and scores.
        reward_names: of the reward functions, in their order.
        reward_weights: parallel to them. [functions]

    Raises:
        ConfigError: a filter, guard or bound cannot be.
    """

    def __init__(
        self, trainer: Any, settings: DynamicSampling, backend: Backend, *, reward_names: Sequence[str], reward_weights: torch.Tensor
    ) -> None:
        self.group_size: int = trainer.num_generations
        self._trainer = trainer
        self._backend = backend
        self._names = list(reward_names)
        self._weights = reward_weights
        if trainer.multi_objective_aggregation == "normalize_then_sum":
            settings = settings.by_function(self._names)
        self._filters = settings.filters(group_size=self.group_size)
        config = settings.scheduler_config(
            group_size=self.group_size, seed=trainer.args.seed, masks_truncated=trainer.mask_truncated_completions
        )
        gate = settings.machine_gate(group_size=self.group_size, seed=trainer.args.seed)
        self.machine = Scheduler(config, self._filters, guard=settings.ratio_guard(), gate=gate)
        dataset = trainer.train_dataset
        if trainer.args.remove_unused_columns:
            dataset = trainer._remove_unused_columns(dataset, "training")
        self.prompts = PromptStream(dataset, shuffle=trainer.shuffle_dataset, seed=trainer.args.seed)
        self._player = RoundPlayer(self.machine, self.prompts, self._sample, self._warn)
        self._rows: dict[int, Row] = {}  # of the batch being filled, by attempt
        self._padding_tokens = 0  # sampled so that every process had its share of a round
        self.watch = Watch()
        self._told_of_problems = False

    # ---------------------------------------------------------------- a batch

    def fill(self, rows: int) -> Chosen:
        """A batch of `rows` rows over all processes. Raises `ResampleError` when it cannot be filled."""
        if rows % self.group_size:
            raise TrainerError(f"expected a batch of whole groups of {self.group_size}, got {rows} rows - see generation_batch_size")
        self._rows = {}
        try:
            filled = self._player.fill(rows // self.group_size)
        except ResampleError as error:
            raise ResampleError(_in_trls_words(str(error))) from None
        chosen = self._choose(filled, rows)
        rewards = [math.nan if row.is_neutral else reward for row, reward in zip(chosen, self.total(chosen), strict=True)]
        group_ids = [index // self.group_size for index in range(rows)]
        advantages = group_relative(rewards, group_ids)
        useful = [row.sampled_tokens for row, advantage in zip(chosen, advantages, strict=True) if advantage != 0.0]
        metrics = {name: value for name, value in filled.metrics.items() if name not in _SILENT}
        metrics |= {
            "scheduler/rounds": float(filled.rounds),
            "batch/groups": float(len(filled.batch.groups)),
            "batch/zero_advantage_share": float(np.mean(advantages == 0.0)),
            "batch/neutral_rows": float(sum([row.is_neutral for row in chosen])),
        }
        useful_groups = len({group for group, advantage in zip(group_ids, advantages, strict=True) if advantage != 0.0})
        self._player.trained(useful_groups, sum(useful))
        self._rows = {}
        return Chosen(rows=chosen, metrics=metrics, totals=self._totals())

    def total(self, rows: Sequence[Row]) -> list[float]:
        """The reward of each row as TRL adds it up: weighted, over the functions that gave one; NaN where none did."""
        by_function = torch.tensor([row.rewards for row in rows], dtype=torch.float32).reshape(len(rows), len(self._names))
        totals = (by_function * self._weights.cpu().unsqueeze(0)).nansum(dim=1)
        totals[torch.isnan(by_function).all(dim=1)] = torch.nan
        summed: list[float] = totals.tolist()
        return summed

    def has_spread(self, rows: Sequence[Row]) -> list[bool]:
        """Whether the group of each row has any spread in what TRL makes advantages of: in exact terms, not in rounded means."""
        values = torch.tensor([row.rewards for row in rows], dtype=torch.float32).reshape(len(rows), len(self._names))
        if self._trainer.multi_objective_aggregation == "sum_then_normalize":
            values = torch.tensor(self.total(rows), dtype=torch.float32).unsqueeze(1)
        groups = values.reshape(-1, self.group_size, values.shape[1])
        most, least = groups.nan_to_num(-torch.inf).amax(1), groups.nan_to_num(torch.inf).amin(1)
        spread: list[bool] = (most > least).any(1).repeat_interleave(self.group_size).tolist()
        return spread

    def _choose(self, filled: Filled, rows: int) -> list[Row]:
        """The rows of the batch, group by group; what is missing is filled up with neutral rows."""
        chosen: list[Row] = []
        for group in filled.batch.groups:
            members = [
                self._rows[rollout.attempt_id] if is_counted or rollout.reward is None else _uncounted(self._rows[rollout.attempt_id])
                for rollout, is_counted in zip(group.rollouts, group.counted, strict=True)
            ]
            chosen += members + [members[-1].as_neutral()] * (self.group_size - len(members))
        filler = chosen[-1].as_neutral()
        return chosen + [filler] * (rows - len(chosen))

    def _totals(self) -> dict[str, float]:
        shown = {name: value for name, value in self.machine.metrics().items() if name.startswith(_TOTALS)}
        totals = {name: value for name, value in shown.items() if value or not name.startswith("ledger/tokens/") or name in _ALWAYS}
        return totals | {
            "scheduler/prompts_drawn": float(self.prompts.drawn),
            "scheduler/data_epochs": float(self.prompts.epochs),
            "ledger/padding_tokens": float(self._padding_tokens),
        }

    # ---------------------------------------------------------------- a round

    def _sample(self, launches: Sequence[ev.LaunchMember]) -> list[Rollout]:
        """Generate and score a round, in calls of at most a generation batch each."""
        rollouts: list[Rollout] = []
        for part, generations in self._parts(launches):
            most = max(generations, self._trainer.args.generation_batch_size // generations * generations)
            for start in range(0, len(part), most):
                rollouts += self._generate(part[start : start + most], generations)
        return rollouts

    def _parts(self, launches: Sequence[ev.LaunchMember]) -> list[tuple[list[ev.LaunchMember], int]]:
        """Whole new groups, and single completions in place of rejected ones, where whoever generates must know the difference."""
        if not self._trainer.use_vllm and self._trainer.rollout_func is None:
            return [(list(launches), self.group_size)]
        whole: list[ev.LaunchMember] = []
        single: list[ev.LaunchMember] = []
        index = 0
        while index < len(launches):
            group = launches[index : index + self.group_size]
            if len(group) == self.group_size and len({launch.group_id for launch in group}) == 1:
                whole += group
                index += self.group_size
            else:
                single.append(launches[index])
                index += 1
        return [(part, size) for part, size in ((whole, self.group_size), (single, 1)) if part]

    def _generate(self, launches: Sequence[ev.LaunchMember], generations: int) -> list[Rollout]:
        trainer, world = self._trainer, self._trainer.accelerator.num_processes
        unit = math.lcm(generations, world) if world > 1 else 1
        padded = list(launches) + [launches[index % len(launches)] for index in range(-len(launches) % unit)]
        share = len(padded) // world
        mine = padded[trainer.accelerator.process_index * share :][:share]
        before, trainer.num_generations = trainer.num_generations, generations
        self.watch = Watch(self._player, [launch.attempt_id for launch in mine])
        try:
            local, rewards = self._backend.generate([dict(launch.task.entry) for launch in mine])
            if self.machine.gate is not None and not self.watch.steps:
                raise TrainerError(
                    "DynamicSampling.gate: expected the rollout function to tell what its environments do, by rollout_watch.step(row, "
                    "action, observation), got not a single step of a whole round - without steps nothing can be cut: tell them, or leave "
                    "the gate out"
                )
        finally:
            trainer.num_generations = before
            self.watch = Watch()
        rows: list[Row] = gather_object(local) if world > 1 else local
        if len(rows) != len(padded) or len(rewards) != len(padded):
            raise TrainerError(f"expected {len(padded)} rows with their rewards from a round, got {len(rows)} and {len(rewards)}")
        for row, by_function in zip(rows, rewards.tolist(), strict=True):
            row.rewards = tuple(by_function)
        self._padding_tokens += sum([row.sampled_tokens for row in rows[len(launches) :]])
        rows = rows[: len(launches)]
        self._check_problems(launches, rows)
        totals = self.total(rows)
        rollouts = []
        for launch, row, reward in zip(launches, rows, totals, strict=True):
            self._rows[launch.attempt_id] = row
            if not row.sampled_tokens:  # nothing of it trains: what it was given says nothing about its siblings
                reward = math.nan
            if not math.isfinite(reward):  # to TRL as to the machine it has none, and is outside of its group's statistics
                row.rewards = (math.nan,) * len(row.rewards)
            rollouts.append(self._rollout(launch, row, reward))
        return rollouts

    def _check_problems(self, launches: Sequence[ev.LaunchMember], rows: Sequence[Row]) -> None:
        """Say once that members of a group were given different prompts: their rewards are compared, whatever they were earned for."""
        first: dict[int, Row] = {}
        for launch, row in zip(launches, rows, strict=True):
            if not self._told_of_problems and row.prompt_ids != first.setdefault(launch.group_id, row).prompt_ids:
                self._told_of_problems = True
                self._warn(
                    f"different prompts in one group (group {launch.group_id}, prompt {launch.task.prompt[:60]!r}): its members are "
                    "compared as answers to one problem - make the rollout function or environment draw its problem by the prompt, not "
                    "anew each time"
                )

    def _rollout(self, launch: ev.LaunchMember, row: Row, reward: float) -> Rollout:
        """A completion as filters and the machine see it."""
        ends = {*self._trainer.eos_token_ids, self._trainer._tokenizer.pad_token_id}
        is_truncated = bool(row.completion_ids) and row.completion_ids[-1] not in ends
        metrics = {name: value for name, value in zip(self._names, row.rewards, strict=True) if not math.isnan(value)}
        member = Member(
            reward=reward,
            metrics=metrics,
            tokens=row.sampled_tokens,
            text=text_of(row.completion),
            finish_reason="length" if is_truncated else "stop",
            detail=_why(row, reward),
        )
        return rollout_of(
            member,
            task=launch.task,
            group_id=launch.group_id,
            index=launch.member_index,
            attempt_id=launch.attempt_id,
            version=self.machine.step,
        )

    def _warn(self, message: str) -> None:
        if self._trainer.accelerator.is_main_process:
            logger.warning(_in_trls_words(message))

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything that a later process needs to go on, as plain data. To be taken between batches."""
        return {
            "prompts": self.prompts.state_dict(),
            "machine": self.machine.state_dict(now=0.0),
            "filters": filters_state(self._filters),
            "padding_tokens": self._padding_tokens,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, in a trainer that has generated nothing. Raises `RecordError` for a state that is torn or of other data."""
        if set(state) != set(self.state_dict()):
            raise RecordError(f"expected the state of dynamic sampling, got {sorted(state)} - resume from a checkpoint of this run")
        self.prompts.load_state_dict(state["prompts"])
        self.machine.load_state_dict(state["machine"], {})
        load_filters_state(self._filters, state["filters"])
        self._padding_tokens = int(state["padding_tokens"])


def _why(row: Row, reward: float) -> str:
    """Why a completion has no reward, for a person."""
    if not row.sampled_tokens:
        return "env_mask leaves none of its tokens to train on"
    return "no reward function gave a number" if math.isnan(reward) else f"the reward functions gave {reward}"


def _in_trls_words(message: str) -> str:
    """The settings of a recipe by the names that they have here."""
    for ours, theirs in _NAMES.items():
        message = message.replace(ours, theirs)
    return message


def _uncounted(row: Row) -> Row:
    """A member that is outside the statistics of its group: TRL gives it no advantage, as one without any reward."""
    return Row(**{name: getattr(row, name) for name in Row.__dataclass_fields__} | {"rewards": (math.nan,) * len(row.rewards)})
