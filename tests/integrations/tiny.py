"""Runs of TRL's GRPOTrainer with a model of some thousand weights, and everything that was seen of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from sluice.integrations.trl import DynamicSampling, DynamicSamplingGRPOTrainer

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # rollout functions and environments are called experimental, each time

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
LETTERS = "abcdefghij"


def letters(rows: int = 12) -> Dataset:
    """Different prompts of two letters, with a column for the reward functions."""
    return Dataset.from_dict(
        {
            "prompt": [LETTERS[i % 10] + LETTERS[(3 * i + i // 10) % 10] for i in range(rows)],
            "answer": [LETTERS[i % 10] for i in range(rows)],
        }
    )


def has_an_a(completions: Sequence[Any], **_: Any) -> list[float]:
    return [float("a" in text(completion)) for completion in completions]


def text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[0]["content"])


class Seen:
    """What a trainer was seen to train on: one entry per generation batch."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, Any]] = []
        self.prompts: list[list[str]] = []  # the tokens of each row's prompt, as text


def watched(cls: type[GRPOTrainer]) -> type[GRPOTrainer]:
    """The class, with a list of what every training batch held when TRL was done with it."""

    class Watched(cls):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.seen = Seen()
            super().__init__(*args, **kwargs)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            if self.model.training and output:
                ids = [row[mask.bool()] for row, mask in zip(output["prompt_ids"], output["prompt_mask"], strict=True)]
                self.seen.prompts.append([self._tokenizer.decode(row).replace(" ", "") for row in ids])
                self.seen.outputs.append(output)
            return output

    return Watched


def make(
    folder: Path,
    output: Path,
    cls: type[GRPOTrainer] = DynamicSamplingGRPOTrainer,
    *,
    dataset: Any = None,
    reward_funcs: Any = has_an_a,
    chat: bool = False,
    settings: DynamicSampling | None = None,
    args: Mapping[str, Any] | None = None,
    **trainer: Any,
) -> Any:
    """A trainer with batches of two groups of four, on a copy of the same weights each time."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    config = GRPOConfig(
        **{
            "output_dir": str(output),
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 4,
            "max_steps": 3,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            "seed": 3,
            "dataloader_pin_memory": False,
            "activation_checkpointing": False,
            **(args or {}),
        }
    )
    if settings is not None:
        trainer["dynamic_sampling"] = settings
    return watched(cls)(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=reward_funcs,
        args=config,
        train_dataset=letters() if dataset is None else dataset,
        **trainer,
    )


def steps(trainer: Any) -> list[dict[str, float]]:
    """What was logged of each training step."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def rewards_by_prompt(table: Mapping[str, Sequence[float]]) -> Callable[..., list[float]]:
    """A reward function that gives the members of a group the rewards in a table, by the letter that its prompt begins with."""

    def scripted(prompts: Sequence[Any], **_: Any) -> list[float]:
        places: dict[str, int] = {}
        given = []
        for prompt in prompts:
            key = text(prompt)
            place = places.get(key, 0)
            places[key] = place + 1
            given.append(float(table.get(key[0], [1, 0, 1, 0])[place % 4]))
        return given

    return scripted
