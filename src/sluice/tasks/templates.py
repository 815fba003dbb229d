"""A row becomes the text that the policy sees, and its tokens.

First the prompt template (str.format over the row's fields and the entries of mappings and lists in them, `{metadata[difficulty]}`, but
no attributes; `{question}` is the prompt text and hides a field of that name), then, with `use_chat_template`, the tokenizer's chat
template. A prompt given as chat messages keeps its messages; the prompt template is applied to the last one, the user's. The text
carries at most one begin token, and no end token that the tokenizer appends: the policy is to write on.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from sluice.config.models import TasksConfig
from sluice.config.problems import told
from sluice.errors import ConfigError, TaskError
from sluice.tasks.base import MISSING, Row, Tokenizer, listed
from sluice.types import TokenIds

_PLAIN: Final = "{question}"  # the template that changes nothing


def reads_question(template: str) -> bool:
    """Whether a template uses the prompt text. Raises `ValueError` when str.format could not read it."""
    return any(
        re.split(r"[.\[]", field, maxsplit=1)[0] == "question" or reads_question(spec or "")
        for _, field, spec, _ in string.Formatter().parse(template)
        if field is not None
    )


class PromptWriter:
    """Applies the templates and tokenises. Raises `ConfigError` at once when a chat template is asked for and the tokenizer has none."""

    def __init__(self, settings: TasksConfig, tokenizer: Tokenizer, *, tokenizer_place: str) -> None:
        """`tokenizer_place`: where the tokenizer came from, for messages."""
        if settings.use_chat_template and not tokenizer.chat_template:
            raise ConfigError(
                f"tasks.use_chat_template: expected a tokenizer with a chat template, but that of {tokenizer_place} has none - "
                f"set it to false and shape the prompt with tasks.prompt_template, or save a chat template with the tokenizer"
            )
        self._template = settings.prompt_template
        self._reads_question = reads_question(settings.prompt_template)
        self._uses_chat = settings.use_chat_template
        self._system_prompt = settings.system_prompt
        self._tokenizer = tokenizer
        # read once: a transformers tokenizer looks them up at every access
        self._begin, self._end, self._end_text = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token
        self.end_tokens_taken_off = 0  # prompts to which the tokenizer had appended its end token

    def has_prompt(self, row: Row, *, prompt_field: str) -> bool:
        """Whether the row holds the prompt text that the template needs. Raises `TaskError` for one that is neither text nor messages."""
        return not self._reads_question or bool(self._question(row, prompt_field)[0].strip())

    def write(self, row: Row, *, prompt_field: str) -> str:
        """The text that the policy sees; "" when the prompt is empty or blank.

        Raises `TaskError` for a prompt that is neither text nor chat messages, `ConfigError` for a template that the row cannot fill.
        """
        if not self.has_prompt(row, prompt_field=prompt_field):
            return ""
        question, earlier = self._question(row, prompt_field)
        text = question if self._template == _PLAIN else self._filled(row, question)
        if not text.strip():
            return ""
        return self._chat(row, [*earlier, {"role": "user", "content": text}]) if self._uses_chat else text

    def tokenize(self, texts: Sequence[str], rows: Sequence[Row]) -> list[TokenIds]:
        """Token ids of many prompts in one call of the tokenizer. Raises `TaskError` that names the row whose text it cannot read."""
        if not texts:
            return []
        try:
            all_ids = self._ids(list(texts))
        except Exception:  # noqa: BLE001 - tokenizers raise many kinds, and do not say which text it was
            all_ids = [self._ids_of_one(text, row) for text, row in zip(texts, rows, strict=True)]
        if not self._uses_chat:
            all_ids = [self._trimmed(ids, text) for ids, text in zip(all_ids, texts, strict=True)]
        return [np.array(ids, dtype=np.int64) for ids in all_ids]

    def _question(self, row: Row, prompt_field: str) -> tuple[str, list[dict[str, Any]]]:
        """The prompt text and the chat messages before it."""
        prompt = row.prompt
        if not self._reads_question:
            return "", []
        if isinstance(prompt, str):
            return str(prompt), []
        if isinstance(prompt, list | tuple):
            return self._messages(row, prompt, prompt_field) if prompt else ("", [])
        got = f"no such field - it has {listed(row.entry)}" if prompt is MISSING else "bytes" if isinstance(prompt, bytes) else told(prompt)
        raise TaskError(f"{row.where}: expected text or a list of chat messages in field '{prompt_field}', got {got}")

    def _messages(self, row: Row, messages: Sequence[object], prompt_field: str) -> tuple[str, list[dict[str, Any]]]:
        where = f"{row.where}, field '{prompt_field}'"
        kept: list[dict[str, Any]] = []
        for position, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise TaskError(f"{where}: expected chat messages with role and content, but message {position} is {told(message)}")
            for key in ("role", "content"):
                value = message.get(key)
                if not isinstance(value, str) or (key == "role" and not value):
                    raise TaskError(f"{where}: expected text as the {key} of message {position}, got {told(value)}")
            kept.append({key: value for key, value in message.items() if value is not None})
        if kept[-1]["role"] != "user":
            raise TaskError(
                f"{where}: expected the user's message as the last, which the policy answers, got one of role '{kept[-1]['role']}'"
            )
        if not self._uses_chat:
            raise TaskError(f"{where}: expected text, got chat messages - set tasks.use_chat_template: true, or give the prompt as text")
        if self._system_prompt is not None and any(message["role"] == "system" for message in kept):
            raise TaskError(f"{where}: expected no system message, since tasks.system_prompt is set, got one - drop one of them")
        return kept[-1]["content"], kept[:-1]

    def _filled(self, row: Row, question: str) -> str:
        fields = {**row.entry, "question": question} if self._reads_question else row.entry
        try:
            return self._template.format_map(fields)
        except (LookupError, AttributeError, ValueError, TypeError) as err:
            raise ConfigError(
                f"tasks.prompt_template: expected a template that every row can fill, but {row.where} cannot fill {told(self._template)}: "
                f"{type(err).__name__}: {err} - its fields are {listed({'question', *row.entry})}"
            ) from err

    def _chat(self, row: Row, messages: list[dict[str, Any]]) -> str:
        if self._system_prompt is not None:
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as err:
            raise TaskError(f"{row.where}: the tokenizer's chat template refuses it: {type(err).__name__}: {err}") from err
        if not isinstance(text, str):
            raise TaskError(f"{row.where}: expected text from the tokenizer's chat template, got {told(text)}")
        return text

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """A chat template writes its own begin token, so that the tokenizer must add none."""
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=not self._uses_chat, return_attention_mask=False)["input_ids"]
        return ids

    def _ids_of_one(self, text: str, row: Row) -> list[int]:
        try:
            return self._ids([text])[0]
        except Exception as err:
            shown = ascii(text[:60])  # it may hold half a character, which no terminal can show
            raise TaskError(f"{row.where}: the tokenizer cannot read the prompt {shown}: {type(err).__name__}: {err}") from err

    def _trimmed(self, ids: list[int], text: str) -> list[int]:
        if self._begin is not None and len(ids) > 1 and ids[0] == ids[1] == self._begin:
            ids = ids[1:]  # one stood in the text, one was added
        if self._end is not None and ids and ids[-1] == self._end and not (self._end_text and text.rstrip().endswith(self._end_text)):
            self.end_tokens_taken_off += 1
            ids = ids[:-1]
        return ids
