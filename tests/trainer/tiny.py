"""A model small enough to train in milliseconds, an engine that samples from a copy of it, and a run that records everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from sluice.config.models import RlvrConfig
from sluice.trainer.base import OnSave
from sluice.trainer.trl import SluiceGRPOTrainer, build_trainer
from sluice.types import Batch, Failure, Group, Rollout, Task, Turn

PAD, END = 0, 1
VOCABULARY = 12


def save_tiny_model(folder: Path) -> Path:
    words = {"<pad>": PAD, "<end>": END} | {chr(ord("a") + i): i + 2 for i in range(VOCABULARY - 2)}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.3,
        pad_token_id=PAD,
        eos_token_id=END,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def tiny_config(
    folder: Path,
    *,
    lora: Mapping[str, Any] | None = None,
    temperature: float = 1.0,
    async_generation_ratio: float = 0.0,
    correction: Mapping[str, Any] | None = None,
    **trainer: Any,
) -> RlvrConfig:
    return RlvrConfig.model_validate(
        {
            "exp_name": "tiny",
            "model": {"path": str(folder), "lora": lora},
            "tasks": {"train": [{"type": "jsonl", "path": "none.jsonl"}]},
            "rewards": {"d": {"verifier": {"type": "exact"}}},
            "rollout_batch_size": 3,
            "num_return_sequences_in_group": 4,
            "prompt_length": 8,
            "response_length": 6,
            "async_generation_ratio": async_generation_ratio,
            "engine": {"temperature": temperature},
            "train_infer_correction": correction,
            "trainer": {"max_steps": 2, "learning_rate": 1e-2, "micro_batch_size": 5, "save_every_steps": None} | trainer,
        }
    )


def logprobs_of(model: Any, rows: Sequence[Sequence[int]], temperature: float = 1.0) -> list[torch.Tensor]:
    """Log-prob of each token after the first, per row. Rows are filled up on the right, which a causal model cannot see. [len(row) - 1]"""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows])
    logprobs = torch.log_softmax(model(ids).logits[:, :-1].float() / temperature, dim=-1).gather(2, ids[:, 1:, None])[:, :, 0]
    return [logprobs[index, : len(row) - 1] for index, row in enumerate(rows)]


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class FakeEngine:
    """Log-probs by full forward passes of a model of its own; keeps every state that it was given."""

    def __init__(self, folder: Path, *, temperature: float = 1.0, seed: int = 0) -> None:
        self.folder = folder
        self.model = load(folder)
        self.temperature = temperature
        self.random = np.random.default_rng(seed)
        self.published: list[tuple[int, dict[str, torch.Tensor]]] = []
        self.takes_weights = True
        self.next_id = 0

    @property
    def version(self) -> int:
        return self.published[-1][0]

    def publish(self, state: Mapping[str, Any], version: int) -> None:
        self.published.append((version, {name: tensor.detach().clone() for name, tensor in state.items()}))
        if self.takes_weights and not any("lora" in name for name in state):
            self.model.load_state_dict(self.published[-1][1])

    def end_dialogue(self, dialogue_id: int, purpose: str = "train") -> None:
        """It keeps nothing of dialogues."""

    @torch.no_grad()
    def sample(self, contexts: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Turn]:
        """One turn per context. Any tokens will do: what matters is that their log-probs are those of this model."""
        rows = [[*c, *self.random.integers(0, VOCABULARY, length).tolist()] for c, length in zip(contexts, lengths, strict=True)]
        return [
            Turn(
                prompt_ids=np.array(prompt, dtype=np.int64),
                token_ids=np.array(row[len(context) :], dtype=np.int64),
                inference_logprobs=logprobs[len(context) - 1 :].numpy().astype(np.float32),
                text="",
                finish_reason="stop",
                policy_version=self.published[-1][0] if self.published else 0,
            )
            for context, prompt, row, logprobs in zip(contexts, prompts, rows, logprobs_of(self.model, rows, self.temperature), strict=True)
        ]

    def group(
        self,
        group_id: int,
        prompt: Sequence[int],
        lengths: Sequence[int],
        rewards: Sequence[float | None],
        counted: Sequence[bool] | None = None,
        reply: Sequence[int] = (),
    ) -> Group:
        """One group; a length of 0 makes a member that never sampled; with a reply every member takes a second turn after it."""
        members = [[turn] for turn in self.sample([prompt] * len(lengths), [prompt] * len(lengths), lengths)]
        if reply:
            contexts = [[*prompt, *turns[0].token_ids.tolist(), *reply] for turns in members]
            for turns, second in zip(members, self.sample(contexts, [reply] * len(lengths), lengths), strict=True):
                turns.append(second)
        rollouts = []
        for index, (turns, length, reward) in enumerate(zip(members, lengths, rewards, strict=True)):
            rollouts.append(
                Rollout(
                    attempt_id=self.next_id,
                    group_id=group_id,
                    member_index=index,
                    task_id=f"t{group_id}",
                    turns=tuple(turns) if length else (),
                    finish_reason="stop",
                    reward=reward,
                    failure=Failure(cause="infrastructure", reason="reward_missing") if reward is None else None,
                )
            )
            self.next_id += 1
        return Group(
            group_id=group_id,
            task=Task(task_id=f"t{group_id}", domain="d", prompt="", prompt_ids=np.array(prompt, dtype=np.int64)),
            rollouts=tuple(rollouts),
            start_step=0,
            round=1,
            epoch=0,
            counted=tuple(counted) if counted is not None else tuple(r is not None for r in rewards),
        )

    def batch(self, *, is_last: bool = False) -> Batch:
        """Three groups with prompts and completions of uneven length and different rewards."""
        groups = (
            self.group(0, [2, 3, 4], [1, 2, 3, 6], [1.0, 0.0, 0.5, 0.0]),
            self.group(1, [5, 6, 7, 8, 9], [4, 4, 2, 1], [0.0, 1.0, 1.0, 0.0]),
            self.group(2, [3], [2, 5, 3, 3], [0.0, 0.0, 1.0, 0.25]),
        )
        return Batch(groups=groups, requested=3, step=self.published[-1][0] if self.published else 0, is_last=is_last)


class Source:
    """Answers with whatever `make` returns for each call, counted from 0."""

    def __init__(self, make: Callable[[int], Batch | None]) -> None:
        self.make = make
        self.given: list[Batch | None] = []

    def next_batch(self) -> Batch | None:
        self.given.append(self.make(len(self.given)))
        return self.given[-1]


class Run:
    """A tiny training run with everything that was seen of it."""

    def __init__(
        self,
        folder: Path,
        output: Path,
        make: Callable[[FakeEngine, int], Batch | None],
        *,
        engine: FakeEngine | None = None,
        on_save: OnSave | None = None,
        **config: Any,
    ) -> None:
        self.config = tiny_config(folder, **config)
        self.engine = engine or FakeEngine(folder, temperature=self.config.engine.temperature)
        self.source = Source(lambda call: make(self.engine, call))
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.gradients: list[dict[str, torch.Tensor]] = []  # of each step, before clipping
        self.trainer: SluiceGRPOTrainer = build_trainer(
            self.config,
            longest_completion=self.config.response_length,
            model_path=folder,
            output_dir=output,
            source=self.source,
            publisher=self.engine,
            on_step=lambda step, metrics: self.steps.append((step, dict(metrics))),
            on_save=on_save,
        )
        clip = self.trainer._clip_grad_norm

        def keep_and_clip(model: Any) -> Any:
            self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            return clip(model)

        self.trainer._clip_grad_norm = keep_and_clip

    def train(self, resume_from_checkpoint: Path | None = None) -> Run:
        self.trainer.train(resume_from_checkpoint)
        return self
