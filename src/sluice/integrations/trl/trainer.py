"""GRPOTrainer with dynamic sampling: whole batches of groups that filters keep, and TRL's own code on exactly those.

How it is put in: TRL makes a batch in `_generate_and_score_completions`, which generates once (`_generate`) and scores once
(`_calculate_rewards`). Here both are done as often as it takes to fill the batch; then TRL's method runs on the rows that were chosen, with
what was generated and scored for them handed to it at these two places. Padding, log-probs, advantages, loss, logging and everything behind
are TRL's, unchanged. Evaluation is TRL's altogether: no filter, no replacement.

The surprising part: TRL's data loader still drives the steps, but its rows are not used. Prompts come from a stream of our own over the
same data in the same order (`prompts.py`), since the loader cannot be asked for more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Final

import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from sluice.config.correction import TrainInferCorrectionConfig
from sluice.errors import ConfigError, RecordError, TrainerError
from sluice.integrations.trl.correction import check_correction, correct, loss_mask
from sluice.integrations.trl.rows import Generated, Row, join_rows, require_answer, split_rows
from sluice.integrations.trl.sampler import BatchSampler, Chosen, Watch, logger
from sluice.integrations.trl.settings import DynamicSampling
from sluice.records.checkpoints import decode, encode

STATE_FILE: Final = "sluice_state.json"

ROW_MEANS: Final = frozenset({"grpo", "sapo", "dr_grpo", "luspo"})  # losses that are means over the rows of a batch
TOKEN_MEANS: Final = frozenset({"dapo", "cispo", "vespo"})  # losses that divide by the batch's number of loss tokens


class DynamicSamplingMixin:
    """Dynamic sampling for any subclass of GRPOTrainer: `class Mine(DynamicSamplingMixin, TheirTrainer)`.

    Args:
        dynamic_sampling: what is dropped, what replaces it, and where that ends; None: the default, which replaces groups without spread.
        train_infer_correction: what is done about tokens to which trainer and sampler give different probabilities, as in a recipe; needs a
            sampler that reports log-probs (vLLM, or a rollout function). None: nothing.

    Raises:
        ConfigError: the settings cannot be, or cannot be together with the trainer's. Before anything is sampled.
        ResampleError: from `train()`, when a batch cannot be filled within its bounds.
    """

    def __init__(
        self,
        *args: Any,
        dynamic_sampling: DynamicSampling | None = None,
        train_infer_correction: TrainInferCorrectionConfig | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        settings = DynamicSampling.given(dynamic_sampling)
        self._capturing = False
        self._replayed: _Replay | None = None
        self._is_empty = False  # whether the correction has left nothing of the batch in the loss
        super().__init__(*args, **kwargs)
        trainer: Any = self
        self.train_infer_correction = check_correction(trainer, train_infer_correction)
        check_settings(trainer, settings, rejects=bool(self.train_infer_correction and self.train_infer_correction.enabled_filters))
        self.dynamic_sampling = settings
        self.batch_sampler = BatchSampler(
            trainer, settings, _Capture(self), reward_names=trainer.reward_func_names, reward_weights=trainer.reward_weights
        )

    @property
    def rollout_watch(self) -> Watch:
        """For a rollout function: where it tells what its environments do, and asks which rows are cut. See `Watch`."""
        return self.batch_sampler.watch

    # ---------------------------------------------------------------- where TRL makes a batch

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        trainer: Any = self
        if self._capturing or not trainer.model.training:
            return super()._generate_and_score_completions(inputs)  # type: ignore[misc,no-any-return]
        world = trainer.accelerator.num_processes
        chosen = self.batch_sampler.fill(len(inputs) * world)
        share = slice(trainer.accelerator.process_index * len(inputs), (trainer.accelerator.process_index + 1) * len(inputs))
        rows = chosen.rows[share]
        with self._replay(chosen, rows):
            output: dict[str, Any] = super()._generate_and_score_completions([_entry(row, trainer) for row in rows])  # type: ignore[misc]
        self._is_empty = False
        self._finish(output, chosen, rows)
        tell(trainer, chosen)
        return output

    def _generate(self, prompts: list[Any]) -> Any:
        if self._replayed is not None:
            return self._replayed.generated
        if not self._capturing:
            return super()._generate(prompts)  # type: ignore[misc]
        trainer: Any = self
        rollout_func = trainer.rollout_func
        trainer.rollout_func = checked(rollout_func)
        try:
            made = super()._generate(prompts)  # type: ignore[misc]
        finally:
            trainer.rollout_func = rollout_func
        raise _Captured(prompts, made)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        if self._replayed is not None:
            return self._replayed.rewards
        scored: torch.Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)  # type: ignore[misc]
        return scored

    @contextmanager
    def _replay(self, chosen: Chosen, rows: list[Row]) -> Iterator[None]:
        """TRL gets what was made of the chosen rows in place of generating and scoring; environments have been played already."""
        trainer: Any = self
        rewards = torch.tensor([row.rewards for row in chosen.rows], dtype=torch.float32, device=trainer.accelerator.device)
        self._replayed = _Replay(generated=tuple(join_rows(rows)), rewards=rewards)
        columns = {column for row in rows for column in row.logs}
        for column in sorted(columns):
            trainer._pending_extra_logs[column] = [row.logs.get(column) for row in rows]
        factories, trainer.environment_factories = trainer.environment_factories, None
        trainer.environments = None
        try:
            yield
        finally:
            self._replayed = None
            trainer.environment_factories = factories

    def _finish(self, output: dict[str, Any], chosen: Chosen, rows: list[Row]) -> None:
        """Rows that only fill a place, and what the correction rejects, leave the loss and whatever it is divided by."""
        trainer: Any = self
        gather, device = trainer.accelerator.gather, output["completion_mask"].device
        start = trainer.accelerator.process_index * len(rows)
        has_spread = torch.tensor(self.batch_sampler.has_spread(chosen.rows)[start : start + len(rows)], device=device)
        output["advantages"] = output["advantages"].masked_fill(~has_spread, 0.0)  # float32 may round off a mean of equals
        if chosen.neutral_rows:
            is_real = torch.tensor([not row.is_neutral for row in rows], device=device).unsqueeze(1)
            output["tool_mask"] = output.get("tool_mask", torch.ones_like(output["completion_mask"])) * is_real
        if self.train_infer_correction is not None:
            rejected, found = correct(trainer, output, self.train_infer_correction, self.batch_sampler.total(chosen.rows))
            chosen.metrics.update(found)
            left_out = chosen.neutral_rows + int(gather(rejected).sum())
        else:
            left_out = chosen.neutral_rows
        if not chosen.neutral_rows and self.train_infer_correction is None:
            return
        output["num_items_in_batch"] = gather(loss_mask(output).sum()).sum()
        self._is_empty = not output["num_items_in_batch"]
        trained = len(chosen.rows) - left_out
        if left_out and trained and trainer.loss_type in ROW_MEANS:
            output["loss_scale"] = torch.tensor(len(chosen.rows) / trained, device=device)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """As TRL's; a batch without a single loss token leaves all gradients None, so that the optimiser moves nothing."""
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        if self._is_empty:
            model.zero_grad(set_to_none=True)
        return loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = super()._compute_loss(model, inputs)  # type: ignore[misc]
        return loss * inputs["loss_scale"] if "loss_scale" in inputs else loss

    # ---------------------------------------------------------------- checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)  # type: ignore[misc]
        trainer: Any = self
        if trainer.args.should_save:
            save_state(self.batch_sampler, Path(trainer._get_output_dir(trial=trial)) / f"checkpoint-{trainer.state.global_step}")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            load_state(self.batch_sampler, Path(checkpoint))


class DynamicSamplingGRPOTrainer(DynamicSamplingMixin, GRPOTrainer):
    """TRL's GRPOTrainer, trained on whole batches of groups that teach something. Everything else is GRPOTrainer.

    ```python
    trainer = DynamicSamplingGRPOTrainer(model=..., reward_funcs=..., args=..., train_dataset=..., dynamic_sampling=DynamicSampling())
    ```
    """

    _tag_names = [*GRPOTrainer._tag_names, "sluice"]  # noqa: RUF012 - as in TRL


class _Replay:
    """What TRL is given at the two places."""

    def __init__(self, generated: tuple[Any, ...], rewards: torch.Tensor) -> None:
        self.generated = generated
        self.rewards = rewards


class _Captured(Exception):
    """No error: it carries a generation out of TRL's method, which would go on with it."""

    def __init__(self, prompts: list[Any], made: Any) -> None:
        super().__init__("a generation on its way out of TRL's method; nobody should see this")
        self.prompts = prompts
        self.made = Generated(*made)


class _Capture:
    """Generates and scores as TRL does: the part of its method before the log-probs, which also sets up tools and environments."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def generate(self, inputs: list[dict[str, Any]]) -> tuple[list[Row], torch.Tensor]:
        """See `Backend`."""
        trainer = self._trainer
        trainer._capturing = True
        try:
            trainer._generate_and_score_completions(inputs)
        except _Captured as captured:
            rows = split_rows(inputs, captured.prompts, captured.made)
            prompts, made = captured.prompts, captured.made
        else:
            raise TrainerError(
                f"expected {type(trainer).__name__}._generate_and_score_completions to generate once, by _generate, and it did not - it "
                "overrides TRL's method in a way that dynamic sampling cannot be put into"
            )
        finally:
            trainer._capturing = False
        return rows, score(trainer, inputs, prompts, made, rows, trainer.rollout_watch)


def checked(rollout_func: Any) -> Any:
    """A rollout function of which every answer is looked at; None: there is none."""
    if rollout_func is None:
        return None

    @wraps(rollout_func)
    def asked(prompts: list[Any], trainer: Any) -> Any:
        answer = rollout_func(prompts, trainer)
        require_answer(prompts, answer)
        return answer

    return asked


def tell(trainer: Any, chosen: Chosen) -> None:
    """Into TRL's own log: of what is of a batch the mean over the logging window, of counts since the start the newest value."""
    metrics = trainer._metrics["train"]
    for name, value in chosen.metrics.items():
        metrics[name].append(value)
    for name, value in chosen.totals.items():
        metrics[name] = [value]


def save_state(sampler: BatchSampler, folder: Path) -> None:
    """Beside what TRL wrote into the folder of a checkpoint."""
    (folder / STATE_FILE).write_text(encode(sampler.state_dict()), encoding="utf-8")


def load_state(sampler: BatchSampler, folder: Path) -> None:
    """From there. Raises `RecordError` for a state that is torn or of other data; a checkpoint without one is of a plain run."""
    path = folder / STATE_FILE
    if not path.is_file():
        logger.warning(f"{folder} has no {STATE_FILE}: prompts are drawn from the beginning, as it is of a run without dynamic sampling")
        return
    try:
        sampler.load_state_dict(decode(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path}: expected the state of dynamic sampling, got {type(error).__name__}: {error}") from error


def score(trainer: Any, inputs: list[dict[str, Any]], prompts: list[Any], made: Generated, rows: list[Row], watch: Watch) -> torch.Tensor:
    """The rewards of a generation by TRL's own method, of the rows of all processes; NaN for rows that were cut, which nobody scores."""
    at = [index for index in range(len(rows)) if not watch.is_cut(index)]
    if len(at) == len(rows):
        rewards: torch.Tensor = trainer._calculate_rewards(inputs, prompts, made.completions, made.completion_ids)
        take_logs(trainer, rows)
        return rewards
    rewards = torch.full((len(rows), len(trainer.reward_funcs)), torch.nan, device=trainer.accelerator.device)
    if at:
        chosen = [[values[index] for index in at] for values in (inputs, prompts, made.completions, made.completion_ids)]
        rewards[at] = trainer._calculate_rewards(*chosen)
        take_logs(trainer, [rows[index] for index in at])
    return rewards


def take_logs(trainer: Any, rows: list[Row]) -> None:
    """What reward functions logged row by row goes with the rows; TRL gets back that of the rows which were chosen."""
    for column, values in trainer._pending_extra_logs.items():
        if len(values) == len(rows):
            for row, value in zip(rows, values, strict=True):
                row.logs[column] = value
    trainer._pending_extra_logs.clear()


def check_settings(trainer: Any, settings: DynamicSampling, *, rejects: bool = False) -> None:
    """Raise `ConfigError` for settings that do not go together with the trainer's. rejects: whether a correction may take rows out."""
    if settings.gate is not None and trainer.rollout_func is None:
        raise ConfigError(
            "DynamicSampling.gate: expected a rollout_func that tells the steps of its environments, got none - the gate is for "
            "trajectories of several turns: leave it out, or pass a rollout function"
        )
    if settings.gate is not None and trainer.accelerator.num_processes > 1:
        raise ConfigError(
            f"DynamicSampling.gate: expected one training process, got {trainer.accelerator.num_processes} - the members of a group lie in "
            "several processes, which would decide on a running group without knowing all of it: leave the gate out, or start one process"
        )
    causes = [f"on_exhausted {settings.on_exhausted!r}"] * (settings.on_exhausted != "raise")
    causes += ["on_cut 'drop'"] * (settings.gate is not None and settings.on_cut == "drop")
    causes += ["min_members"] * (settings.min_members is not None) + ["a correction with filters"] * rejects
    if causes and trainer.loss_type not in ROW_MEANS | TOKEN_MEANS:
        raise ConfigError(
            f"DynamicSampling: {' and '.join(causes)} can leave rows out of a batch, which loss_type {trainer.loss_type!r} cannot be "
            "divided by: it is a mean over each micro batch - use on_exhausted='raise' without min_members and such filters, or a "
            f"loss_type out of {sorted(ROW_MEANS | TOKEN_MEANS)}"
        )


def _entry(row: Row, trainer: Any) -> dict[str, Any]:
    """The row of the data as TRL shall see it: with the prompt as an environment completed it."""
    return {**row.entry, "prompt": row.prompt} if trainer.environment_factories is not None or "prompt" not in row.entry else row.entry
