"""TRL's GRPOTrainer, fed with whole batches of rollouts that were sampled elsewhere.

One optimiser step is one batch, whatever its size: the batch is cut into micro batches of at most `micro_batch_size` rows here, and each
loss is weighted so that the sum is the loss of the whole batch. So nothing has to be padded to a fixed number of rows, and nothing is
dropped. Sources: TRL's `GRPOTrainer` (arXiv 2402.03300), loss types as in its `GRPOConfig.loss_type`.

Surprising, and found by trial: TRL's `completion_mask` is also what attention sees, so loss masks go into `tool_mask` alone. On resume,
transformers and peft pass over missing files and weights in silence, and begin with the learning rate of the old schedule: each is looked
after here. The placeholder data set is never read, so resuming skips nothing in it and costs no random number.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PrinterCallback, TrainerCallback, TrainerState
from transformers.cache_utils import DynamicCache
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from transformers.utils import logging as transformers_logging
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import use_adapter

from sluice.config.correction import TrainInferCorrectionConfig
from sluice.config.models import AdvantageConfig, ModelConfig, RlvrConfig, RunConfig
from sluice.correction.saved import save_batch, step_file
from sluice.errors import ConfigError, TrainerError
from sluice.generation.tokenizer import load_tokenizer
from sluice.trainer.assemble import StaleTokens, advantages_for, batch_metrics, collate, samples_from_batch
from sluice.trainer.base import BatchSource, OnSave, OnStep, Publisher
from sluice.trainer.correcting import correct, side_by_side
from sluice.types import Batch, Sample

PLACEHOLDER_ROWS = 2  # what TRL believes a step to hold; it refuses fewer than 2, and no loss reads it

SUSPICIOUS_GAP = 0.5  # mean |trainer - inference log-prob| of a token: rounding to 8 bits gives a tenth of it, a shift by one token more

# Where much cancels in a model, rounding comes out hundreds of times as large as elsewhere. A fault moves many tokens, or one far.
SENSITIVE = 100.0  # times the tolerance: the largest gap that may still be rounding
SENSITIVE_SHARE = 1e-3  # of the tokens: so many may be beyond the tolerance

TRAINER_STATE = "trainer_state.json"
RESUMED_FROM = (TRAINER_STATE, "optimizer.pt", "scheduler.pt", "rng_state.pth")  # beside the weights; without them it is another run

_ADVICE = (
    "There seems not to be a single sample in your epoch_iterator",  # an epoch began without a batch
    "The following arguments do not match the ones in the `trainer_state.json`",  # the settings of now hold
)

_log = logging.getLogger("sluice.trainer")

_Tensors = dict[str, Any]


class SluiceGRPOTrainer(GRPOTrainer):
    """GRPOTrainer that generates nothing: it asks a `BatchSource`, trains on exactly what it gets, and publishes.

    `train()` runs in the main thread; it ends after `max_steps`, when the source answers None, or after the step in which `stop` is set.
    Where checkpoints are wanted, each of these ends writes one.

    Args:
        source: asked once per optimiser step.
        publisher: gets the weights when training begins and after every step, before `on_step` is called.
        on_step: gets the step reached and its metrics.
        stop: ends training after the current step.
        on_save: gets the step and the folder of a checkpoint that has just been written, after `on_step` of that step. What it raises
            ends the run. Older checkpoints stay; only what already lies under the name of a new one is replaced.
        advantage: how rewards become advantages.
        micro_batch_size: most rows in one forward and backward pass; it does not change the loss.
        logprob_tolerance: largest |trainer - inference log-prob| of a token that was sampled by the very weights which its step begins
            with; None records it only. What older weights sampled must differ, and is recorded apart. One token in a thousand may be up
            to a hundred times as far off: that is counted, and told once.
        is_synchronous: no token of older weights can be in a batch, so the tolerance holds for all of them, whatever version they claim.
        stale_tokens: see `samples_from_batch`.
        own_old_logprobs: compute the log-probs at step start in a forward pass of their own, without dropout. Otherwise those of the
            training forward are taken, which are the same numbers as long as nothing in it is random: a batch is used for one update.
        correction: which tokens leave the loss because trainer and engine give them different probabilities, and how the others are
            weighted; it needs log-probs of their own. None: nothing is corrected.
        correction_dir: where both log-probs are saved at the steps of `correction.save_every_steps`; None: nowhere.
        torch_threads: threads of the training thread; None leaves torch's choice.
        trl: everything else that GRPOTrainer takes.

    Raises:
        TrainerError: from `train()`, see there and `BatchSource`.
    """

    def __init__(
        self,
        *,
        source: BatchSource,
        publisher: Publisher,
        on_step: OnStep,
        stop: threading.Event,
        on_save: OnSave | None = None,
        advantage: AdvantageConfig,
        micro_batch_size: int,
        logprob_tolerance: float | None,
        is_synchronous: bool = True,
        stale_tokens: StaleTokens = "train",
        own_old_logprobs: bool = False,
        correction: TrainInferCorrectionConfig | None = None,
        correction_dir: Path | None = None,
        torch_threads: int | None = None,
        **trl: Any,
    ) -> None:
        super().__init__(reward_funcs=_rewards_come_with_the_batch, **trl)
        if self.accelerator.num_processes != 1:
            raise TrainerError(f"expected one training process, got {self.accelerator.num_processes} - start without a launcher")
        self._source = source
        self._publisher = publisher
        self._on_step = on_step
        self._stop = stop
        self._on_save = on_save
        self._advantage = advantage
        self._micro_batch_size = micro_batch_size
        self._logprob_tolerance = logprob_tolerance
        self._is_synchronous = is_synchronous
        self._stale_tokens = stale_tokens
        self._own_old_logprobs = own_old_logprobs or correction is not None
        self._correction = correction
        self._correction_dir = correction_dir
        self._torch_threads = torch_threads
        self._shares_prompts = _can_share_prompts(self._model()) and not self.aux_loss_enabled
        self._seconds: dict[str, float] = {}  # of the current step, by part
        self._step_metrics: dict[str, float] = {}  # of the current step
        self._is_outlier_told = False
        self._is_gap_looked_at = False  # whether the first step has shown how far the engine's log-probs lie from the trainer's
        self._is_idle = False  # whether the current batch makes no gradient
        self._micro_batch_tokens: list[int] = []  # loss tokens of each micro batch of the current step
        self._logprobs: torch.Tensor | None = None  # [B, C] of the last training forward
        self._is_last = False  # whether the current batch is the last one
        self._saved_step = 0  # of the newest checkpoint; 0: there is none
        self._stepped_at = 0.0  # when the last backward pass of the step ended
        self.remove_callback(PrinterCallback)  # it prints every step's metrics; ours go to `on_step`
        self.add_callback(_PublishAndStop(self))

    # ---------------------------------------------------------------- life

    def train(self, resume_from_checkpoint: str | Path | None = None) -> Any:  # type: ignore[override]  # the rest has no use here
        """Train until the steps are done, the data end or `stop` is set.

        With a checkpoint of step S, weights, optimiser, schedule and random state are what they were after step S. The weights are
        published as version S, and the first batch asked for is that of step S + 1; with `max_steps` <= S none is. How the learning rate
        goes on is decided by the schedule and `max_steps` of now.

        Args:
            resume_from_checkpoint: a folder as `on_save` gets it.

        Raises:
            TrainerError: log-probs of trainer and engine disagree, a loss or gradient is not finite, a batch is malformed, a checkpoint
                could not be written or read, or the data ended before the first step.
        """
        if self._torch_threads is not None:
            torch.set_num_threads(self._torch_threads)
        folder = None if resume_from_checkpoint is None else Path(resume_from_checkpoint)
        self._saved_step = 0 if folder is None else _step_of(folder)
        with _without_advice():
            result = super().train(resume_from_checkpoint=None if folder is None else str(folder))
        if self.state.global_step == 0 and not self._stop.is_set():
            raise TrainerError(
                "expected at least one batch, got none: the source ended before the first update, so nothing was trained - check that the "
                "data set is not empty and what the filters reject"
            )
        return result

    def policy_state(self) -> dict[str, torch.Tensor]:
        """The weights as a `Publisher` gets them: those of the plain model, or the adapter's alone with LoRA. Detached, not copied."""
        model = self._model()
        state: dict[str, torch.Tensor] = (
            get_peft_model_state_dict(model, save_embedding_layers=False) if isinstance(model, PeftModel) else model.state_dict()
        )
        return state

    def save_policy(self, folder: Path) -> None:
        """Write model (with LoRA: the adapter) and tokenizer as `save_pretrained` does, to be loaded by path.

        Raises:
            TrainerError: they could not be written.
        """
        with _quiet(), _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)  # save_pretrained merely logs that a file is in its way
            self._model().save_pretrained(folder)
            self._tokenizer.save_pretrained(folder)

    def _model(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    # ---------------------------------------------------------------- one step

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[_Tensors], None]:
        """Ask for the batch of the next optimiser step; the placeholder data set is never read. Called by the training loop."""
        self._seconds = dict.fromkeys(("wait", "assemble", "old_logprobs", "forward", "backward", "optimizer", "publish"), 0.0)
        batch = None
        if not self._stop.is_set():
            with self._timed("wait"):
                batch = self._source.next_batch()
        if batch is None:
            self._end_here()
            return [], None
        if not batch.groups:
            raise TrainerError(f"expected a batch of at least one group for step {batch.step}, got none - end the data with None instead")
        self._is_last = batch.is_last
        return [{"batch": batch}], None

    def training_step(self, model: Any, inputs: _Tensors, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward over all micro batches of one batch. Returns its loss.

        A batch without a single loss token, or without a single advantage, leaves all gradients None, so that the optimiser moves nothing.
        """
        loss = torch.zeros((), device=self.accelerator.device)
        for micro_batch in self._micro_batches(inputs["batch"]):
            start = time.perf_counter()
            forward_before = self._seconds["forward"]
            loss += super().training_step(model, micro_batch, num_items_in_batch)  # type: ignore[no-untyped-call]
            self._seconds["backward"] += time.perf_counter() - start - (self._seconds["forward"] - forward_before)
        if self._is_idle:
            model.zero_grad(set_to_none=True)
        if not torch.isfinite(loss):
            raise TrainerError(f"expected a finite loss, got {loss.item()} at step {self.state.global_step} - lower trainer.learning_rate")
        self._stepped_at = time.perf_counter()
        return loss

    def _micro_batches(self, batch: Batch) -> list[_Tensors]:
        """The rows of one batch that train, in micro batches, with everything that TRL's loss reads."""
        with self._timed("assemble"):
            samples = samples_from_batch(batch, stale_tokens=self._stale_tokens)
            micro_batches = [self._tensors(rows, samples) for rows in self._micro_batch_rows(samples)]
            tokens, on_policy = self._count_tokens(micro_batches)
            self._step_metrics = {"actor/on_policy_token_share": on_policy / tokens} if tokens else {}
        if self._own_old_logprobs:
            with self._timed("old_logprobs"):
                self._model().eval()
                for micro_batch in micro_batches:
                    micro_batch["old_per_token_logps"] = self._frozen_logprobs(self.model, micro_batch)
                    self._compare_with_inference(micro_batch["old_per_token_logps"], micro_batch)
        if self._correction is not None:
            with self._timed("correction"):
                self._save_logprobs(micro_batches)
                corrected = correct(samples, micro_batches, self._correction)
                samples, micro_batches = corrected.samples, corrected.micro_batches
                self._step_metrics |= corrected.metrics
        with self._timed("assemble"):
            self._count_tokens(micro_batches)
            self._finish(batch, samples, micro_batches)
        if self.beta != 0.0:
            with self._timed("ref_logprobs"):
                for micro_batch in micro_batches:
                    micro_batch["ref_per_token_logps"] = self._reference_logprobs(micro_batch)
        return micro_batches

    def _save_logprobs(self, micro_batches: Sequence[_Tensors]) -> None:
        """Write what the correction reads, at the steps for which that is wanted."""
        every = None if self._correction is None else self._correction.save_every_steps
        step = self.state.global_step + 1
        if every is not None and step % every == 0 and self._correction_dir is not None and micro_batches:
            save_batch(step_file(self._correction_dir, step), *side_by_side(micro_batches))

    def _count_tokens(self, micro_batches: Sequence[_Tensors]) -> tuple[int, int]:
        """Tell every micro batch how many loss tokens all of them have, and how many the weights of now sampled. Returns both."""
        self._micro_batch_tokens = [int(m["tool_mask"].sum()) for m in micro_batches]
        tokens = sum(self._micro_batch_tokens)
        on_policy = sum(int((self._of_this_version(m) & m["tool_mask"].bool()).sum()) for m in micro_batches)
        for micro_batch in micro_batches:
            micro_batch["num_items_in_batch"] = torch.tensor(tokens, device=self.accelerator.device)
            micro_batch["on_policy_tokens"] = on_policy
        return tokens, on_policy

    def _finish(self, batch: Batch, samples: Sequence[Sample], micro_batches: Sequence[_Tensors]) -> None:
        """Advantages, the share of each micro batch in the loss, and what the batch is worth."""
        advantages = advantages_for(samples, self._advantage)
        self._step_metrics |= batch_metrics(batch, samples, advantages)
        # Where no rollout has an advantage and nothing else makes a gradient, one of zeros would move the weights all the same.
        self._is_idle = not micro_batches or (not advantages.any() and self.beta == 0.0 and not self.aux_loss_enabled)
        rows, tokens = sum(int((m["tool_mask"].sum(1) > 0).sum()) for m in micro_batches), sum(self._micro_batch_tokens)
        for micro_batch in micro_batches:
            of_rows = torch.zeros(len(micro_batch["tool_mask"]), device=self.accelerator.device)  # neutral rows may follow
            of_rows[: len(micro_batch["rows"])] = torch.from_numpy(advantages[micro_batch["rows"]]).float()
            is_weight = micro_batch.pop("is_weight", None)
            micro_batch["advantages"] = of_rows if is_weight is None else of_rows[:, None] * is_weight
            micro_batch["loss_share"] = _loss_share(self.loss_type, micro_batch["tool_mask"], rows=rows, tokens=tokens)
        self._step_metrics |= {
            "actor/rows": float(rows),
            "actor/micro_batches": float(len(micro_batches)),
            "actor/step_skipped": float(self._is_idle),
        }

    def _micro_batch_rows(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Which rows go through the model together: those that train, siblings side by side, groups of like length as neighbours."""
        rows = [row for row, sample in enumerate(samples) if sample.loss_mask.any()]
        longest: dict[int, tuple[int, int]] = {}
        for row in rows:
            sample = samples[row]
            completion, prompt = longest.get(sample.group_id, (0, 0))
            longest[sample.group_id] = (max(completion, len(sample.completion_ids)), max(prompt, len(sample.prompt_ids)))
        rows.sort(key=lambda row: (longest[samples[row].group_id], samples[row].group_id))
        return [rows[i : i + self._micro_batch_size] for i in range(0, len(rows), self._micro_batch_size)]

    def _tensors(self, rows: list[int], samples: Sequence[Sample]) -> _Tensors:
        """Rows that go through the model together; their advantages come later."""
        chosen = [samples[row] for row in rows]
        arrays = collate(chosen, np.zeros(len(rows)), pad_id=self._tokenizer.pad_token_id)
        tensors: _Tensors = {name: torch.from_numpy(array).to(self.accelerator.device) for name, array in arrays.items()}
        return tensors | {"samples": chosen, "rows": rows}

    def _prepare_inputs(self, generation_batch: _Tensors) -> _Tensors:
        return generation_batch  # a micro batch is complete and in place; here TRL would generate, shuffle and split

    def compute_loss(self, model: Any, inputs: _Tensors, return_outputs: bool = False, num_items_in_batch: Any = None) -> torch.Tensor:
        """TRL's loss of one micro batch, weighted by its share in the batch. Log-probs that do not match the engine's raise here."""
        with self._timed("forward"):
            loss = super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
            if not self._own_old_logprobs:
                assert self._logprobs is not None
                self._compare_with_inference(self._logprobs, inputs)
            self._logprobs = None
            weighted: torch.Tensor = loss * inputs["loss_share"]
            return weighted

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        if not torch.isfinite(torch.as_tensor(norm)):
            raise TrainerError(
                f"expected a finite gradient norm, got {float(norm)} at step {self.state.global_step} - nothing was updated; lower "
                "trainer.learning_rate, and look at the rewards of this batch"
            )
        return norm

    # ---------------------------------------------------------------- log-probs

    def _frozen_logprobs(self, model: Any, tensors: _Tensors) -> torch.Tensor:
        """Log-probs of the completion tokens without gradients. [B, C]"""
        with torch.no_grad():
            logprobs: torch.Tensor = self._get_per_token_logps_and_entropies(
                model,
                torch.cat([tensors["prompt_ids"], tensors["completion_ids"]], dim=1),
                torch.cat([tensors["prompt_mask"], tensors["completion_mask"]], dim=1),
                tensors["completion_ids"].size(1),
            )[0]
        return logprobs

    def _reference_logprobs(self, tensors: _Tensors) -> torch.Tensor:
        """Log-probs under the starting policy: TRL's own copy, or the model without its adapter. [B, C]"""
        if self.ref_model is not None:
            return self._frozen_logprobs(self.ref_model, tensors)
        with use_adapter(self._model(), adapter_name=None):
            return self._frozen_logprobs(self.model, tensors)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """TRL's log-probs and entropies [B, C], with the prompt of siblings computed once wherever the architecture allows it."""
        if self._shares_prompts:
            outputs = self._forward(model, input_ids, attention_mask, logits_to_keep)
            logps, entropies, aux_loss = outputs.log_probs[:, -logits_to_keep:], outputs.entropy, None
            entropies = None if entropies is None else entropies[:, -logits_to_keep:]
        else:
            logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        if torch.is_grad_enabled():
            self._logprobs = logps.detach()
        return logps, entropies, aux_loss

    def _forward(self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int) -> Any:
        """TRL's fused head over the last `width` tokens or more, in two passes: over the distinct prompts, then over what follows them.

        Keys and values of the first pass are repeated for the siblings, and gradients flow back through them. The last prompt token
        predicts the first completion token, so it goes with the second pass; the last completion token predicts nothing and is left out.
        Positions are counted from each row's first visible token, which TRL leaves to the model.
        """
        prefix = input_ids.size(1) - width - 1  # tokens that can be shared
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        labels[:, : prefix + 1] = -100
        cache, start = None, 0
        with self.accelerator.autocast():
            if prefix > 0:
                packed = input_ids[:, :prefix] * 2 + attention_mask[:, :prefix]
                distinct, row_prompt = torch.unique(packed, dim=0, return_inverse=True)
                if len(distinct) < len(input_ids):
                    cache, start = DynamicCache(), prefix
                    visible = distinct % 2
                    _without_adapter(self.accelerator.unwrap_model(model)).base_model(
                        input_ids=distinct // 2,
                        attention_mask=visible,
                        position_ids=(visible.cumsum(1) - 1).clamp(min=0),
                        cache=cache,
                        use_cache=True,
                    )
                    cache.batch_select_indices(row_prompt)
            return model(
                input_ids=input_ids[:, start:-1],
                attention_mask=attention_mask[:, :-1],
                position_ids=positions[:, start:-1],
                cache=cache,
                shift_labels=labels[:, start + 1 :],
                fused_lm_head=True,
            )

    def _of_this_version(self, tensors: _Tensors) -> torch.Tensor:
        """Which tokens the weights of now sampled, among those that the policy sampled. [B, C]"""
        return torch.eq(tensors["token_versions"], self.state.global_step)

    def _compare_with_inference(self, logprobs: torch.Tensor, tensors: _Tensors) -> None:
        """Record the largest and mean distance between trainer and engine on policy tokens, those of older weights apart.

        Raises above the tolerance where the two must agree; what older weights sampled only has to be a number. A few tokens that are
        a little above it are counted: where much cancels, rounding comes out hundreds of times as large as elsewhere.
        """
        mask, current = tensors["tool_mask"].bool(), self._of_this_version(tensors)
        gap = torch.where(mask, (logprobs.float() - tensors["sampling_per_token_logps"]).abs(), 0.0)
        tokens, on_policy, metrics = int(tensors["num_items_in_batch"]), int(tensors["on_policy_tokens"]), self._step_metrics
        is_nan = tensors["sampling_per_token_logps"].isnan() & mask
        metrics["actor/nan_logprobs"] = metrics.get("actor/nan_logprobs", 0.0) + float(is_nan.sum())
        if self._logprob_tolerance is None:
            gap = torch.where(is_nan, 0.0, gap)  # counted; with a tolerance it raises below
        for name, chosen, count in (("logprob_gap", current, on_policy), ("off_policy_logprob_gap", ~current, tokens - on_policy)):
            if count:
                part = torch.where(chosen, gap, 0.0)
                metrics[f"actor/{name}_max"] = float(np.fmax(metrics.get(f"actor/{name}_max", 0.0), part.max().item()))
                metrics[f"actor/{name}_mean"] = metrics.get(f"actor/{name}_mean", 0.0) + part.sum().item() / count
        if self._logprob_tolerance is None:
            return
        limit = torch.where(current | self._is_synchronous, self._logprob_tolerance, torch.finfo(gap.dtype).max)
        excess = torch.where(gap <= limit, 0.0, gap)  # a gap that is no number is within no limit
        count = int(excess.ne(0).sum())
        if not count:
            return
        message = _describe_gap(logprobs, tensors, excess, tolerance=self._logprob_tolerance, step=self.state.global_step)
        compared = int((mask & (current | self._is_synchronous)).sum())
        if not excess.max().item() <= SENSITIVE * self._logprob_tolerance or count > max(1, compared * SENSITIVE_SHARE):
            raise TrainerError(message)
        metrics["actor/logprob_gap_outliers"] = metrics.get("actor/logprob_gap_outliers", 0.0) + count
        if not self._is_outlier_told:
            self._is_outlier_told = True
            _log.warning(
                "%d of %d log-probs of trainer and engine differ by more than trainer.logprob_tolerance, so few and by so little that it "
                "is taken for rounding and counted in actor/logprob_gap_outliers: %s",
                count,
                compared,
                message.partition(" - ")[0],
            )

    # ---------------------------------------------------------------- what is told

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Hand the metrics of one step on. Called by the training loop after each step (and at the end, with a summary we do not need)."""
        trl, self._metrics["train"] = self._metrics["train"], defaultdict(list)
        if "grad_norm" not in logs:
            return
        metrics = self._step_metrics | {
            "actor/loss": logs["loss"],
            "actor/grad_norm": logs["grad_norm"],
            "actor/learning_rate": logs["learning_rate"],
        }
        for name, ours in (("entropy", "entropy"), ("kl", "kl"), ("clip_ratio/region_mean", "clip_fraction")):
            if trl.get(name):
                metrics[f"actor/{ours}"] = float(np.average(trl[name], weights=self._micro_batch_tokens))
        self._look_at_gap(metrics)
        for part, seconds in self._seconds.items():
            metrics[f"actor/{part}_seconds"] = seconds
        metrics["actor/step_seconds"] = sum(self._seconds.values())
        self._on_step(self.state.global_step, metrics)

    def _look_at_gap(self, metrics: dict[str, float]) -> None:
        """Warn once when the first log-probs that no tolerance is held against differ by more than another precision explains."""
        gap = metrics.get("actor/logprob_gap_mean")
        if gap is None or self._is_gap_looked_at:
            return
        self._is_gap_looked_at = True
        if self._logprob_tolerance is None and gap > SUSPICIOUS_GAP:
            _log.warning(
                "trainer and inference log-probs differ by %.2f a token in the first step, more than another precision explains - check "
                "that both are of the same token (one may be shifted), at the same temperature and of the same weights",
                gap,
            )

    def step_ended(self) -> None:
        """Publish the new weights. Called by the training loop's callback as soon as the optimiser has stepped."""
        self._seconds["optimizer"] = time.perf_counter() - self._stepped_at
        with self._timed("publish"):
            self.publish()
        if self._stop.is_set() or self._is_last:
            self._end_here()

    def _end_here(self) -> None:
        """Tell the training loop to end, and to write the checkpoint of this step first where checkpoints are wanted."""
        self.control.should_training_stop = True
        self.control.should_save = self.args.save_strategy != SaveStrategy.NO and self.state.global_step > self._saved_step

    def publish(self) -> None:
        """Give the current weights to the publisher, under the number of steps that made them."""
        self._publisher.publish(self.policy_state(), self.state.global_step)

    # ---------------------------------------------------------------- checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        folder = Path(str(self.args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        with _quiet(), _writing(folder):
            if folder.exists():  # of a run that was broken off: none of its files may pass for one of ours
                shutil.rmtree(folder)
            super()._save_checkpoint(model, trial)  # type: ignore[no-untyped-call]
        self._saved_step = step
        if self._on_save is not None:
            self._on_save(step, folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        with _quiet(), _reading(folder):
            _check_weights(folder, self.policy_state())
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Nothing: `_check_weights` has compared the names, and tied weights are missing by right."""

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        trained = super()._init_training_state(max_steps, *args, **kwargs)
        self.state.save_steps = int(self.args.save_steps)  # a setting of now, not of the checkpoint
        return trained

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        step = self.state.global_step
        with _reading(Path(checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[no-untyped-call]
        schedule: Any = self.lr_scheduler
        optimizer: Any = self.optimizer
        if schedule.last_epoch != step:
            raise _damaged(Path(checkpoint), f"{TRAINER_STATE} of step {step} beside a schedule of step {schedule.last_epoch}")
        # the optimiser came back with the rate that the old max_steps gave this step
        rates = [base * factor(step) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        schedule._last_lr = rates

    def _load_rng_state(self, checkpoint: Any) -> None:
        with _reading(Path(checkpoint)):
            super()._load_rng_state(checkpoint)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run folder says what the run was."""

    def _send_telemetry(self) -> None:
        """Nothing: a run reports to nobody."""

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - start


class _PublishAndStop(TrainerCallback):
    """Where the training loop calls us back."""

    def __init__(self, trainer: SluiceGRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.publish()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer.step_ended()


def build_trainer(
    config: RunConfig,
    *,
    longest_completion: int,
    model_path: str | Path,
    output_dir: Path,
    correction_dir: Path | None = None,
    source: BatchSource,
    publisher: Publisher,
    on_step: OnStep,
    stop: threading.Event | None = None,
    on_save: OnSave | None = None,
) -> SluiceGRPOTrainer:
    """The trainer that a configuration describes.

    The engine's model must not be copied from this trainer's (TRL rebinds its forward): build it from the same folder, before.

    Args:
        config: everything under `trainer` but `keep_checkpoints`, `train_infer_correction`, `model.lora`, `seed`,
            `engine.temperature` and whatever says how old a trained group may be is used.
        longest_completion: tokens behind a prompt, at most: the constant that dr_grpo divides by.
        model_path: folder with the model that the run starts from, on resume too, and its tokenizer.
        output_dir: where checkpoints go, when `trainer.save_every_steps` is set.
        correction_dir: where log-probs go, when `train_infer_correction.save_every_steps` is set.
        source: where batches come from.
        publisher: who samples with the weights.
        on_step: called after each step.
        stop: set it to end after the current step.
        on_save: called after each checkpoint.

    Raises:
        ConfigError: the folder holds no loadable model or tokenizer, or LoRA does not fit it.
    """
    settings = config.trainer
    with _quiet():
        model, tokenizer = _load(Path(model_path))
        return SluiceGRPOTrainer(
            source=source,
            publisher=publisher,
            on_step=on_step,
            stop=stop or threading.Event(),
            on_save=on_save,
            advantage=settings.advantage,
            micro_batch_size=settings.micro_batch_size,
            logprob_tolerance=None if settings.bf16 else settings.logprob_tolerance,
            is_synchronous=_is_synchronous(config),
            stale_tokens=settings.stale_tokens,
            own_old_logprobs=config.model.lora is not None and config.model.lora.dropout > 0,
            correction=config.train_infer_correction,
            correction_dir=correction_dir,
            torch_threads=settings.torch_threads,
            model=model,
            args=grpo_config(config, output_dir, longest_completion),
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": [""] * settings.max_steps}),
            peft_config=_lora_config(config.model, model),
        )


def grpo_config(config: RunConfig, output_dir: Path, longest_completion: int) -> GRPOConfig:
    """TRL's settings for a configuration. The one place where names are translated; whatever TRL would do beyond training is off."""
    settings = config.trainer
    on_cpu = not torch.cuda.is_available()
    return GRPOConfig(
        output_dir=str(output_dir),
        seed=config.seed,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        # optimiser and schedule
        max_steps=settings.max_steps,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.lr_scheduler_type,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        max_grad_norm=settings.max_grad_norm,
        bf16=settings.bf16,
        fp16=False,
        activation_checkpointing=False,  # it computes every forward twice; `micro_batch_size` bounds the memory
        # loss
        loss_type=settings.loss_type,
        beta=settings.beta,
        use_bias_correction_kl=True,
        temperature=config.engine.temperature,
        max_completion_length=longest_completion,  # the constant that dr_grpo divides by
        num_iterations=1,
        mask_truncated_completions=False,  # decided before the batch
        # one call of `training_step` is one optimiser step
        per_device_train_batch_size=PLACEHOLDER_ROWS,
        num_generations=PLACEHOLDER_ROWS,
        gradient_accumulation_steps=1,
        shuffle_dataset=False,
        ignore_data_skip=True,
        # records are ours
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        eval_strategy="no",
        save_strategy="no" if settings.save_every_steps is None else "steps",
        save_steps=settings.save_every_steps or settings.max_steps,
        save_total_limit=None,  # which checkpoints stay is decided elsewhere
    )


def _is_synchronous(config: RunConfig) -> bool:
    """Whether no group may be older than the step that trains it, in any domain."""
    usual = config.resampling.max_staleness
    if usual is None:
        usual = math.ceil(config.async_generation_ratio)
    own = [domain.max_staleness for domain in config.rewards.values()] if isinstance(config, RlvrConfig) else [None]
    return all((usual if age is None else age) == 0 for age in own)


def _load(folder: Path) -> tuple[Any, Any]:
    """Model in float32, every dropout off, and tokenizer. Reads the folder and nothing else."""
    wanted = "model.path: expected a folder with a causal language model as written by save_pretrained"
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{wanted}, but {folder} has no config.json - save a model there, or correct the path")
    tokenizer = load_tokenizer(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        for name, value in vars(config).items():
            if name.endswith(("dropout", "pdrop")) and isinstance(value, float):
                setattr(config, name, 0.0)
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, local_files_only=True)
    except Exception as error:  # torch, safetensors, transformers and the operating system each have their own
        raise ConfigError(f"{wanted}, but loading {folder} failed with {type(error).__name__}: {error} - save it again") from error
    return model, tokenizer


def _lora_config(config: ModelConfig, model: Any) -> LoraConfig | None:
    lora = config.lora
    if lora is None:
        return None
    names = [name for name, _ in model.named_modules()]
    for target in lora.target_modules:
        if target == "lm_head" or not any(f".{name}".endswith(f".{target}") for name in names):
            found = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)})
            raise ConfigError(
                f"model.lora.target_modules: expected names of linear layers inside {type(model).__name__}, got {target!r} - choose from "
                f"{', '.join(name for name in found if name != 'lm_head')}"
            )
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules),
        task_type="CAUSAL_LM",
    )


def _without_adapter(model: Any) -> Any:
    """The causal language model inside peft's wrapper; its layers stay adapted."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _can_share_prompts(model: Any) -> bool:
    """Whether keys and values of a prompt are all that what follows needs: a plain decoder with full attention in every layer."""
    base = _without_adapter(model)
    text = base.config.get_text_config()
    layer_types = getattr(text, "layer_types", None) or ["full_attention"]
    is_windowed = getattr(text, "sliding_window", None) is not None and not hasattr(text, "layer_types")
    return not base._is_stateful and not is_windowed and set(layer_types) == {"full_attention"}


def _loss_share(loss_type: str, mask: torch.Tensor, *, rows: int, tokens: int) -> float:
    """What TRL's loss of a micro batch must be multiplied by, so that the micro batches sum to the loss of the whole batch.

    TRL means over the rows it sees (grpo, dr_grpo) or over their loss tokens (bnpo); dapo already divides by the tokens of the batch. Rows
    without a loss token count nowhere.
    """
    if loss_type in {"grpo", "dr_grpo"}:
        return mask.size(0) / rows if rows else 0.0
    if loss_type == "bnpo":
        return int(mask.sum()) / tokens if tokens else 0.0
    return 1.0


def _describe_gap(logprobs: torch.Tensor, tensors: _Tensors, excess: torch.Tensor, *, tolerance: float, step: int) -> str:
    """What a person needs to find the fault behind log-probs that do not match. `excess` [B, C] is the gap where too large, else 0."""
    row, position = divmod(int(torch.nan_to_num(excess, nan=torch.inf).argmax()), excess.size(1))
    sample: Sample = tensors["samples"][row]
    ours, theirs = logprobs[row].float().cpu().numpy(), sample.inference_logprobs
    length = len(theirs)
    versions = np.full(length, sample.policy_version) if sample.token_versions is None else sample.token_versions
    version = int(versions[position])
    comparable = sample.loss_mask & (versions == step)
    pairs = np.flatnonzero(comparable[:-1] & comparable[1:])  # where this token and the next should both agree
    shifts = (np.abs(ours[pairs] - theirs[pairs + 1]), np.abs(ours[pairs + 1] - theirs[pairs]))
    if len(pairs) > 1 and min(shift.max() for shift in shifts) <= tolerance:
        cause = "the two rows are shifted by one token against each other: a log-prob belongs to the token at its own place"
    elif not np.isfinite(theirs[position]):
        cause = "the engine must report a finite log-prob for every token that it sampled"
    elif version != step:
        cause = "the engine sampled with other weights: it must take each publish before it samples for the next batch"
    elif sample.token_versions is not None:
        cause = (
            "other weights sampled the tokens before it: after a publish the engine must compute the whole context anew, and not go on "
            "with what it had cached"
        )
    else:
        cause = (
            "the engine must report full-vocabulary log-probs at engine.temperature, and copy every published weight into a model of its "
            "own; sampling that cuts the vocabulary, or other precision than float32, also does this"
        )
    return (
        f"expected trainer and inference log-probs within {tolerance:g} of each other, got {excess[row, position].item():.6g} at step "
        f"{step}, group {sample.group_id}, attempt {sample.attempt_id}, completion token {position} of {length}: trainer "
        f"{ours[position]:.6f}, inference {theirs[position]:.6f}, sampled by version {version} - {cause}"
    )


def _rewards_come_with_the_batch(**_: Any) -> list[float | None]:
    raise AssertionError("rewards are computed before a batch is made; TRL must not ask for them")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Every way in which a disk refuses, as an error that names the folder: each library has a class of its own for it."""
    try:
        yield
    except Exception as error:
        raise TrainerError(
            f"expected to write the policy to {folder}, got {type(error).__name__}: {error} - what is in the folder is incomplete: free "
            "space, check the permissions, or choose another disk with records.root"
        ) from error


def _step_of(folder: Path) -> int:
    """The step of a checkpoint that is whole, as far as names tell.

    Raises:
        TrainerError: it is not.
    """
    missing = [name for name in RESUMED_FROM if not (folder / name).is_file()]
    if missing:
        raise _damaged(folder, f"no {', no '.join(missing)}")
    with _reading(folder):
        step = TrainerState.load_from_json(str(folder / TRAINER_STATE)).global_step
    if not isinstance(step, int) or step < 1:
        raise _damaged(folder, f"{TRAINER_STATE} of step {step!r}")
    return step


def _check_weights(folder: Path, policy: dict[str, torch.Tensor]) -> None:
    """Whether a checkpoint holds the tensors of this policy, all and no others: transformers and peft would pass over most differences.

    Raises:
        TrainerError: it does not.
    """
    shapes: dict[str, list[int]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118 - it is no dictionary
    held = {tensor.data_ptr() for name, tensor in policy.items() if name in shapes}  # of tied weights one name is saved
    is_adapter = all("lora_" in name for name in policy)  # peft saves an embedding layer beside one that adapts it
    for found, names in (
        ("no weights for", [name for name, tensor in policy.items() if name not in shapes and tensor.data_ptr() not in held]),
        ("weights that the policy lacks:", [name for name in shapes.keys() - policy.keys() if "lora_" in name or not is_adapter]),
        ("weights of another shape for", [name for name in shapes.keys() & policy.keys() if shapes[name] != list(policy[name].shape)]),
    ):
        if names:
            raise _damaged(folder, f"{found} {', '.join(sorted(names)[:3])} ({len(names)} in all)")


def _damaged(folder: Path, found: str) -> TrainerError:
    return TrainerError(
        f"expected in {folder} a whole checkpoint of this model, to resume from, got {found} - resume from another one, with the settings "
        "that it was written with"
    )


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Every way in which a file can be damaged, as an error that names the folder: each library has a class of its own for it."""
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        raise _damaged(folder, f"{type(error).__name__}: {error}") from error


@contextmanager
def _without_advice() -> Iterator[None]:
    """While training: not what transformers advises whoever ends before the first batch, or resumes with other settings."""

    def is_other(record: logging.LogRecord) -> bool:
        return not any(advice in record.getMessage() for advice in _ADVICE)

    loggers = [logging.getLogger(f"transformers.{name}") for name in ("trainer", "trainer_utils")]
    for logger in loggers:
        logger.addFilter(is_other)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_other)


@contextmanager
def _quiet() -> Iterator[None]:
    """While models are loaded, wrapped or saved: no progress bars over the display, and no warning about a name that peft still uses."""
    bars: Any = transformers_logging
    was_on = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
            yield
    finally:
        if was_on:
            bars.enable_progress_bar()
