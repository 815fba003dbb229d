"""Dynamic sampling as a `rollout_func`, for a GRPOTrainer whose class cannot be changed.

TRL gives a rollout function the prompts of its data loader and wants as many completions back. This one answers with those of other prompts
where groups were replaced: it generates as the trainer would, scores with the same reward functions, and hands the chosen rows on with
their own token ids, their own columns of the data, and their rewards, which the reward functions that the trainer was given only pass on.

The surprising part: TRL's table of completions (`log_completions`) still shows the loader's prompts beside them. Where that matters, and
for tools, environments, reward models and losses that are means over rows, use `DynamicSamplingGRPOTrainer`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from transformers import TrainerCallback

from sluice.errors import ConfigError
from sluice.integrations.trl.rows import Generated, Row, join_rows, split_rows
from sluice.integrations.trl.sampler import BatchSampler, Chosen, Watch, logger
from sluice.integrations.trl.settings import DynamicSampling
from sluice.integrations.trl.trainer import STATE_FILE, TOKEN_MEANS, check_settings, checked, load_state, save_state, score, tell

REWARDS: Final = "sluice_rewards"
"""The column in which rewards are handed on: one list per row, by reward function; None where a function gave none."""

RewardFunction = Callable[..., Any]


class DynamicRollout:
    """Pass it as `rollout_func`, and its `reward_funcs` as `reward_funcs`:

    ```python
    dynamic = DynamicRollout([accuracy, format_reward])
    trainer = GRPOTrainer(model=..., reward_funcs=dynamic.reward_funcs, rollout_func=dynamic, args=..., train_dataset=...)
    ```

    Args:
        reward_funcs: functions as GRPOTrainer takes them; no reward models.
        dynamic_sampling: what is dropped, what replaces it, and where that ends; None: groups without spread are replaced.
        rollout_func: a rollout function of your own, which generates in place of the trainer.

    Raises:
        ConfigError: a reward function is none; at the first batch: the settings cannot be together with the trainer's.
        ResampleError: at a batch that cannot be filled within its bounds.
    """

    def __init__(
        self,
        reward_funcs: RewardFunction | Sequence[RewardFunction],
        *,
        dynamic_sampling: DynamicSampling | None = None,
        rollout_func: Callable[[list[Any], Any], dict[str, Any]] | None = None,
    ) -> None:
        functions = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
        for index, function in enumerate(functions):
            if isinstance(function, str | torch.nn.Module) or not callable(function):
                raise ConfigError(
                    f"reward_funcs[{index}]: expected a function, got {type(function).__name__} - for reward models use "
                    "DynamicSamplingGRPOTrainer"
                )
        self.dynamic_sampling = DynamicSampling.given(dynamic_sampling)
        self.reward_funcs: list[RewardFunction] = [_forwarded(function, index) for index, function in enumerate(functions)]
        self._functions = functions
        self._rollout_func = rollout_func
        self.batch_sampler: BatchSampler | None = None  # made at the first batch

    @property
    def rollout_watch(self) -> Watch:
        """For a rollout function of your own: where it tells what its environments do, and asks which rows are cut."""
        return Watch() if self.batch_sampler is None else self.batch_sampler.watch

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """What TRL calls. In evaluation exactly the given prompts are answered, and scored by TRL."""
        if not trainer.model.training:
            return self._plain(prompts, trainer)
        sampler = self.batch_sampler = self.batch_sampler or self._begin(trainer)
        chosen = sampler.fill(len(prompts) * trainer.accelerator.num_processes)
        rows = chosen.rows[trainer.accelerator.process_index * len(prompts) :][: len(prompts)]
        tell(trainer, chosen)
        return _answer(rows, chosen)

    def _plain(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        if self._rollout_func is not None:
            return self._rollout_func(prompts, trainer)
        with _as_trl_would(trainer, None):
            made = Generated(*trainer._generate(prompts))
        return {"prompt_ids": made.prompt_ids, "completion_ids": made.completion_ids, "logprobs": made.logprobs}

    def _begin(self, trainer: Any) -> BatchSampler:
        given = list(trainer.reward_funcs)
        if given != self.reward_funcs:
            raise ConfigError(
                "DynamicRollout: expected the trainer's reward_funcs to be those of this object, got others - pass dynamic.reward_funcs"
            )
        for name, is_given in (("tools", trainer.tools), ("environment_factory", trainer.environment_factories)):
            if is_given:
                raise ConfigError(f"DynamicRollout: expected a trainer without {name}, got one - use DynamicSamplingGRPOTrainer")
        settings = self.dynamic_sampling
        may_be_short = settings.on_exhausted != "raise" or settings.min_members is not None or settings.on_cut == "drop"
        if may_be_short and trainer.loss_type not in TOKEN_MEANS:
            raise ConfigError(
                f"DynamicRollout: on_exhausted {settings.on_exhausted!r}, min_members and on_cut 'drop' can leave a batch short, which "
                f"loss_type {trainer.loss_type!r} cannot be told - use on_exhausted='raise' without "
                "min_members, or DynamicSamplingGRPOTrainer"
            )
        if self.dynamic_sampling.gate is not None and self._rollout_func is None:
            raise ConfigError(
                "DynamicRollout: expected a rollout_func of yours that tells its steps to rollout_watch, got none beside a gate"
            )
        check_settings(trainer, self.dynamic_sampling)
        sampler = BatchSampler(
            trainer,
            self.dynamic_sampling,
            _Inside(self, trainer),
            reward_names=[_name(function) for function in self._functions],
            reward_weights=trainer.reward_weights,
        )
        if trainer.state.global_step:
            load_state(sampler, Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}")
        trainer.add_callback(_SaveWithCheckpoint(sampler))
        return sampler


class _Inside:
    """Generates and scores for a rollout function, in the trainer that called it."""

    def __init__(self, rollout: DynamicRollout, trainer: Any) -> None:
        self._rollout = rollout
        self._trainer = trainer

    def generate(self, inputs: list[dict[str, Any]]) -> tuple[list[Row], torch.Tensor]:
        """See `Backend`."""
        trainer, rollout = self._trainer, self._rollout
        prompts = [row["prompt"] for row in inputs]
        with _as_trl_would(trainer, checked(rollout._rollout_func), rollout._functions):
            made = Generated(*trainer._generate(prompts))
            rows = split_rows(inputs, prompts, made)
            return rows, score(trainer, inputs, prompts, made, rows, rollout.rollout_watch)


class _SaveWithCheckpoint(TrainerCallback):
    """Writes the state beside TRL's checkpoint."""

    def __init__(self, sampler: BatchSampler) -> None:
        self._sampler = sampler

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After a checkpoint has been written."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if args.should_save and folder.is_dir():
            save_state(self._sampler, folder)
        elif args.should_save:
            logger.warning(f"{STATE_FILE} was not written, since {folder} is not there")


@contextmanager
def _as_trl_would(trainer: Any, rollout_func: Any, functions: Sequence[RewardFunction] | None = None) -> Iterator[None]:
    """The trainer generates by itself (or with another rollout function) and scores with the functions themselves.

    TRL counts and logs what a rollout function returns; so it forgets what was generated in here.
    """
    before = trainer.rollout_func, trainer.reward_funcs
    seen = trainer.state.num_input_tokens_seen
    lengths = {name: len(values) for metrics in trainer._metrics.values() for name, values in metrics.items()}
    trainer.rollout_func = rollout_func
    if functions is not None:
        trainer.reward_funcs = list(functions)
    try:
        yield
    finally:
        trainer.rollout_func, trainer.reward_funcs = before
        trainer.state.num_input_tokens_seen = seen
        for metrics in trainer._metrics.values():
            for name, values in metrics.items():
                if name.startswith("completions/"):
                    del values[lengths.get(name, 0) :]


def _answer(rows: Sequence[Row], chosen: Chosen) -> dict[str, Any]:
    """The chosen rows as TRL takes them: tokens, and everything that belongs to a row as columns."""
    made = join_rows(rows)
    columns: dict[str, Any] = {
        column: [row.entry.get(column) for row in rows] for column in {name: None for row in rows for name in row.entry if name != "prompt"}
    }
    columns[REWARDS] = [[None if math.isnan(reward) else reward for reward in row.rewards] for row in rows]
    if made.tool_mask is not None or chosen.neutral_rows:
        columns["env_mask"] = [
            [0] * len(row.completion_ids) if row.is_neutral else row.tool_mask or [1] * len(row.completion_ids) for row in rows
        ]
    return columns | {"prompt_ids": made.prompt_ids, "completion_ids": made.completion_ids, "logprobs": made.logprobs}


def _forwarded(function: RewardFunction, index: int) -> RewardFunction:
    """A reward function of the same name that passes on what was earned already, and scores by itself where nothing was (evaluation)."""

    def passed_on(kwargs: dict[str, Any]) -> list[float | None] | None:
        handed = kwargs.pop(REWARDS, None)
        return None if handed is None else [rewards[index] for rewards in handed]

    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004 - its kind

        async def pass_on_later(**kwargs: Any) -> Any:
            handed = passed_on(kwargs)
            return await function(**kwargs) if handed is None else handed

        pass_on_later.__name__ = _name(function)
        return pass_on_later

    def pass_on(**kwargs: Any) -> Any:
        handed = passed_on(kwargs)
        return function(**kwargs) if handed is None else handed

    pass_on.__name__ = _name(function)
    return pass_on


def _name(function: RewardFunction) -> str:
    """As TRL names it in its metrics."""
    return getattr(function, "__name__", type(function).__name__)
