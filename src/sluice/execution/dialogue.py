"""How a trajectory's text becomes tokens and back: what the policy reads before every turn, and which action it wrote.

Tokens only grow. What the policy sampled is never encoded again: the text between two generations is encoded on its own and appended.

Two styles, made by `build_dialogue_format`: `plain` puts templates one after another, `chat` goes through the tokenizer's chat template.
"""

from __future__ import annotations

import copy
import re
import string
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import numpy as np

from sluice.config.agentic import DialogueConfig
from sluice.environments.base import EnvInfo
from sluice.errors import ConfigError
from sluice.types import TokenIds

Key = TypeVar("Key")
Value = TypeVar("Value")

FIELDS: Final = ("observation", "admissible_commands", "turn", "turns_left")  # what a template may name
MOST_CACHED: Final = 16_384  # texts, or rows of tokens: an observation is seen by all siblings, and many are seen again and again
LONGEST_CACHED: Final = 2_048  # characters or tokens: longer ones hardly ever come back, and this bounds the cache
_OPENING: Final = -2  # in the place of the token before a text: the conversation begins with it
_NO_END: Final = -1  # or: it is not an end token
_SEPARATOR: Final = ", "  # between admissible commands
_PROBE: Final = "A chair, 2 desks.\n\n You see: nothing\t(ünknown 中文)."  # text on which two ways to encode must agree
_MARK: Final = "Qz7kVx"  # stands for what the policy wrote; no template holds it by chance, and none has a reason to change it


class DialogueFormat(ABC):
    """Encodes observations, decodes turns, reads actions."""

    stop_token_ids: tuple[int, ...]  # tokens that end a turn; the engine must stop at them

    def __init__(self, config: DialogueConfig, tokenizer: Any) -> None:
        """Raises `ConfigError` for settings that do not fit the tokenizer."""
        problems: list[str] = []
        self._encode = _encoder(tokenizer)
        self._tokenizer = tokenizer
        self._ids: _Cache[tuple[str, int], TokenIds] = _Cache()  # by filled-in template and the end token before it
        self._texts: _Cache[bytes, str] = _Cache()  # by token ids
        self._plains: _Cache[str, str] = _Cache()  # by command
        turn = _Template("turn_template", config.turn_template, config, problems)
        first = turn if config.first_template is None else _Template("first_template", config.first_template, config, problems)
        self._first, self._turn = first, turn
        self._pattern = _pattern(config.action_pattern, problems)
        stops = [_stop(index, text, self._encode, problems) for index, text in enumerate(config.stop)]
        if problems:
            raise ConfigError("\n".join(problems))
        end = getattr(tokenizer, "eos_token_id", None)
        self.stop_token_ids = tuple(dict.fromkeys([*stops, *([] if end is None else [int(end)])]))

    @abstractmethod
    def opening(self, observation: str, info: EnvInfo, turns_left: int | None) -> TokenIds:
        """What the policy reads before its first turn. [P]

        turns_left: turns that it may still take, this one included; None: nobody limits them. The array is shared: it cannot be written to.
        """

    @abstractmethod
    def reply(self, observation: str, info: EnvInfo, *, turn: int, turns_left: int | None, after: TokenIds) -> TokenIds:
        """The tokens between two generations. [P]

        turn: number of the turn that follows, 2 for the first reply. after: what the policy sampled last. The array is shared, as above.
        """

    def text_of(self, token_ids: TokenIds) -> str:
        """The text of sampled tokens, the end token and all special tokens left out."""
        ids = token_ids[:-1] if len(token_ids) and int(token_ids[-1]) in self.stop_token_ids else token_ids
        key = ids.tobytes()
        text = self._texts.get(key)
        if text is None:
            text = str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))
            self._texts.put(key, text, len(ids))
        return text

    def action_of(self, text: str, admissible: Sequence[str] | None) -> tuple[str, bool | None]:
        """The action that a text holds, and whether it is among the admissible ones (None: nobody says which those are).

        One that differs from an admissible command in case and white space only is taken as that command; any other one is left as it is.
        """
        if self._pattern is not None:
            found = deque(self._pattern.finditer(text), maxlen=1)  # the last one
            text = (found[0].group(1) or "") if found else ""
        action = text.strip()
        if admissible is None:
            return action, None
        if action in admissible:
            return action, True
        wanted = _plain(action)
        for command in admissible:
            plain = self._plains.get(command)
            if plain is None:
                plain = _plain(command)
                self._plains.put(command, plain, len(command))
            if plain == wanted:
                return command, True
        return action, False

    def _encoded(self, text: str, after: int) -> TokenIds:
        """The tokens for a filled-in template. after: the end token that stands before them, `_NO_END` or `_OPENING`."""
        key = text, after
        ids = self._ids.get(key)
        if ids is None:
            ids = np.array(self._tokens(text, after), dtype=np.int64)
            ids.setflags(write=False)  # shared by all who get this text
            self._ids.put(key, ids, len(text))
        return ids

    def _tokens(self, text: str, after: int) -> list[int]:
        return self._encode(text)


class PlainFormat(DialogueFormat):
    """Templates, encoded one by one and put one after another. Nothing stands between them and what the policy wrote."""

    def __init__(self, config: DialogueConfig, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        for template in (self._first, self._turn):
            if not self._encode(template.render("", EnvInfo(), 1, 1)):
                raise ConfigError(
                    f"dialogue.{template.key}: expected a template that has a token even where the observation is empty, got "
                    f"{template.text!r} - the policy needs something to continue: end it with a cue such as '\\n>'"
                )

    def opening(self, observation: str, info: EnvInfo, turns_left: int | None) -> TokenIds:
        """The first template."""
        return self._encoded(self._first.render(observation, info, 1, turns_left), _NO_END)

    def reply(self, observation: str, info: EnvInfo, *, turn: int, turns_left: int | None, after: TokenIds) -> TokenIds:
        """The template of a turn."""
        return self._encoded(self._turn.render(observation, info, turn, turns_left), _NO_END)


class ChatFormat(DialogueFormat):
    """Messages through the tokenizer's chat template: every observation is a message of the user, every turn one of the assistant.

    Chat templates render whole conversations, and some change what the assistant said. So a reply is rendered with a mark in the place of
    what the policy wrote, and only what follows the mark is encoded. It begins with the template's end of the assistant's message: of that
    only what the policy has not sampled itself is put, so that no end token stands twice and a turn that was cut is ended.
    """

    def __init__(self, config: DialogueConfig, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "dialogue.style: expected plain for a tokenizer without a chat template, got chat - save one with the tokenizer, or write "
                "the dialogue by templates"
            )
        self._system = [] if config.system_prompt is None else [{"role": "system", "content": config.system_prompt}]
        dummy = [*self._system, _message("user", "?"), _message("assistant", _MARK)]
        try:
            self._render(dummy[:-1], is_open=True)
        except Exception as error:
            key = "style" if config.system_prompt is None else "system_prompt"
            raise ConfigError(
                f"dialogue.{key}: expected a conversation that the tokenizer's chat template renders, it raises {type(error).__name__}: "
                f"{error} - leave the system prompt out, or use style plain"
            ) from error
        self._dummy = dummy
        try:
            ending = self._render(dummy, is_open=False).partition(_MARK)
            reply = self._after_mark("!")
        except Exception as error:
            raise ConfigError(
                f"dialogue.style: expected a chat template for conversations of several turns, it raises {type(error).__name__}: {error} - "
                "use style plain"
            ) from error
        if not ending[1] or not reply:
            raise ConfigError(
                "dialogue.style: expected a chat template that repeats what the assistant said and goes on after it, got one that does not "
                "- use style plain"
            )
        closing = self._encode(ending[2])
        added = getattr(tokenizer, "added_tokens_decoder", {})
        specials = {*self.stop_token_ids, *[token for token, about in added.items() if about.special]}
        ends = [token for token in closing if token in specials][:1]
        self.stop_token_ids = tuple(dict.fromkeys([*self.stop_token_ids, *ends]))
        self._closing_length = max(1, len(closing))  # 1: the next message's first token may be what ends this one

    def opening(self, observation: str, info: EnvInfo, turns_left: int | None) -> TokenIds:
        """System prompt, first message, and the beginning of the answer."""
        return self._encoded(self._first.render(observation, info, 1, turns_left), _OPENING)

    def reply(self, observation: str, info: EnvInfo, *, turn: int, turns_left: int | None, after: TokenIds) -> TokenIds:
        """What is left of the end of the assistant's message, the next message, and the beginning of the answer."""
        last = int(after[-1]) if len(after) else _NO_END
        return self._encoded(self._turn.render(observation, info, turn, turns_left), last if last in self.stop_token_ids else _NO_END)

    def _tokens(self, text: str, after: int) -> list[int]:
        if after == _OPENING:
            return self._encode(self._render([*self._system, _message("user", text)], is_open=True))
        ids = self._encode(self._after_mark(text))
        closing = ids[: self._closing_length]
        return ids[closing.index(after) + 1 :] if after in closing else ids

    def _after_mark(self, text: str) -> str:
        return self._render([*self._dummy, _message("user", text)], is_open=True).partition(_MARK)[2]

    def _render(self, messages: list[dict[str, str]], *, is_open: bool) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_open))


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


_STYLES: Final[dict[str, Callable[[DialogueConfig, Any], DialogueFormat]]] = {"plain": PlainFormat, "chat": ChatFormat}


def build_dialogue_format(config: DialogueConfig, tokenizer: Any) -> DialogueFormat:
    """The format that a configuration describes, for a tokenizer of transformers.

    Raises `ConfigError`, with the path of the key, for what cannot work with this tokenizer.
    """
    return _STYLES[config.style](config, tokenizer)


class _Template:
    """A text with fields, checked."""

    def __init__(self, key: str, text: str, config: DialogueConfig, problems: list[str]) -> None:
        self.key = key
        self.text = text
        problem = _template_problem(text, config)
        if problem:
            problems.append(f"dialogue.{key}: {problem}")
        self._names_commands = "{admissible_commands}" in text

    def render(self, observation: str, info: EnvInfo, turn: int, turns_left: int | None) -> str:
        """The text for one turn. Braces in what is filled in mean nothing."""
        commands = _SEPARATOR.join(info.admissible_commands or ()) if self._names_commands else ""
        return self.text.format(observation=observation, admissible_commands=commands, turn=turn, turns_left=turns_left)


def _template_problem(text: str, config: DialogueConfig) -> str | None:
    expected = " ".join(f"{{{name}}}" for name in FIELDS)
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        return f"expected text with the fields {expected}, got {text!r} ({error}) - write a brace that is no field twice"
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if name not in FIELDS or spec or conversion:
            return f"expected only the fields {expected}, got {name!r} - write a brace that is no field twice"
        if name == "turns_left" and config.max_turns is None:
            return "the field {turns_left} needs dialogue.max_turns, which is not set - set it, or leave the field out"
    return None


def _pattern(pattern: str | None, problems: list[str]) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        problems.append(f"dialogue.action_pattern: expected a regular expression, got {pattern!r} ({error})")
        return None
    if compiled.groups != 1:
        problems.append(
            f"dialogue.action_pattern: expected exactly one group, which is the action, got {compiled.groups} in {pattern!r} - "
            "write further ones as (?:...)"
        )
    return compiled


def _stop(index: int, text: str, encode: Callable[[str], list[int]], problems: list[str]) -> int:
    ids = encode(text)
    if len(ids) != 1:
        problems.append(
            f"dialogue.stop[{index}]: expected a text of exactly one token, got {text!r}, which this tokenizer makes {len(ids)} of - "
            "an engine stops at tokens: name one"
        )
        return -1
    return ids[0]


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Text to token ids, without special tokens beyond those that it names: the fastest way that this tokenizer has."""

    def slow(text: str) -> list[int]:
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return slow
    own = copy.deepcopy(backend)  # whoever else uses the tokenizer may set padding and truncation
    own.no_truncation()
    own.no_padding()

    def fast(text: str) -> list[int]:
        ids: list[int] = own.encode(text, add_special_tokens=False).ids
        return ids

    probe = _PROBE + "".join(str(token) for token in getattr(tokenizer, "all_special_tokens", ()))
    return fast if fast(probe) == slow(probe) and fast("") == slow("") else slow


class _Cache(Generic[Key, Value]):
    """A dictionary that forgets its oldest entries, and takes no long ones."""

    def __init__(self) -> None:
        self._entries: dict[Key, Value] = {}
        self.get = self._entries.get

    def put(self, key: Key, value: Value, length: int) -> None:
        """Remember, if it is short enough."""
        if length <= LONGEST_CACHED:
            if len(self._entries) >= MOST_CACHED:
                del self._entries[next(iter(self._entries))]
            self._entries[key] = value
