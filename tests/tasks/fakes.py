"""Configurations, tokenizers and data files for the tests of the tasks."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sluice.config.models import RlvrConfig
from sluice.tasks.base import Row

BEGIN, END, UNKNOWN = 0, 1, 2


class CharTokenizer:
    """One token per character; the interface of transformers, as far as the tasks use it."""

    def __init__(self, *, adds_begin: bool = False, adds_end: bool = False, chat_template: str | None = None) -> None:
        self.chat_template = chat_template
        self.bos_token_id, self.eos_token_id, self.unk_token_id = BEGIN, END, UNKNOWN
        self.eos_token = "<e>"
        self.adds_begin = adds_begin
        self.adds_end = adds_end
        self.calls = 0

    def __call__(self, text: list[str], *, add_special_tokens: bool, return_attention_mask: bool) -> dict[str, Any]:
        self.calls += 1
        begin = [BEGIN] if add_special_tokens and self.adds_begin else []
        end = [END] if add_special_tokens and self.adds_end else []
        return {"input_ids": [begin + self._ids(one) + end for one in text]}

    def apply_chat_template(self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert add_generation_prompt
        if any(message["role"] not in ("system", "user", "assistant") for message in conversation):
            raise ValueError("this template knows no such role")
        return "<b>" + "".join(f"{message['role']}:{message['content']}\n" for message in conversation) + "assistant:"

    @staticmethod
    def _ids(text: str) -> list[int]:
        text.encode()  # as Rust tokenizers do, refuse half a character
        ids = []
        while text:
            special = next((mark for mark in ("<b>", "<e>") if text.startswith(mark)), None)
            ids.append({"<b>": BEGIN, "<e>": END}[special] if special else 3 + ord(text[0]) if text[0] in string.printable else UNKNOWN)
            text = text[len(special) if special else 1 :]
        return ids


def transformers_tokenizer(chat_template: str | None = None) -> Any:
    """A real fast tokenizer of transformers: one token per character, and it adds a begin and an end token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<b>", "<e>", "<u>", *string.printable])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<u>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="<b> $A <e>", special_tokens=[("<b>", 0), ("<e>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<b>", eos_token="<e>", unk_token="<u>", chat_template=chat_template
    )


def run_config(train: Any, validation: Any = (), *, rewards: Mapping[str, Any] | None = None, **more: Any) -> RlvrConfig:
    """A configuration around these sources. Keys of `tasks` and the run stand side by side; `run_validation` is the run's `validation`."""
    tasks = {"train": _list(train), "validation": _list(validation)}
    for key in ("prompt_template", "use_chat_template", "system_prompt", "epochs", "shuffle", "exclude_train_from_validation"):
        if key in more:
            tasks[key] = more.pop(key)
    if "run_validation" in more:
        more["validation"] = more.pop("run_validation")
    return RlvrConfig.model_validate(
        {
            "exp_name": "test",
            "model": {"path": "models/tiny"},
            "tasks": tasks,
            "rewards": rewards or {"math": {"verifier": {"type": "exact"}}},
            "rollout_batch_size": 4,
            "num_return_sequences_in_group": 4,
            "prompt_length": 100,
            "response_length": 8,
            "trainer": {"max_steps": 1, "learning_rate": 1e-3},
            **more,
        }
    )


def jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write a JSON Lines file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(count: int, start: int = 0, **more: Any) -> list[dict[str, Any]]:
    """Rows with prompts of their own: "1+1=" with answer "2", and so on."""
    return [{"prompt": f"{k}+1=", "answer": str(k + 1), **more} for k in range(start, start + count)]


def row(prompt: object = "1+1=", *, answer: object = "2", domain: object = None, tag: object = None, **fields: Any) -> Row:
    """A row as a source gives it."""
    difficulty = fields.get("difficulty")
    entry = {"prompt": prompt, "answer": answer, **fields}
    return Row(index=0, where="data.jsonl line 1", prompt=prompt, answer=answer, domain=domain, tag=tag, difficulty=difficulty, entry=entry)


def _list(sources: Any) -> list[dict[str, Any]]:
    """One source or many; a path is a JSON Lines file of domain math. In strict mode paths are texts, as in YAML."""
    many = sources if isinstance(sources, list | tuple) else [sources]
    return [{"type": "jsonl", "path": str(one), "domain": "math"} if isinstance(one, Path) else one for one in many]
