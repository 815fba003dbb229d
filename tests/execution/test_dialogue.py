"""Text to tokens and back: nothing sampled is encoded again, templates and actions are read as the configuration says."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trl
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sluice.config.agentic import DialogueConfig
from sluice.environments import EnvInfo
from sluice.errors import ConfigError
from sluice.execution import dialogue
from sluice.execution.dialogue import DialogueFormat, build_dialogue_format
from sluice.generation.tokenizer import load_tokenizer
from tests.fakes import LossyTokenizer

LOSSY = LossyTokenizer()
INFO = EnvInfo()
CHAT_TEMPLATES = Path(trl.__file__).parent / "chat_templates"
END_OF_TURN = {  # chat templates that say what the policy said as it stands -> what ends its message
    "qwen2_5": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "lfm2": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "phi3": "<|end|>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
}

texts = st.text(st.characters(codec="utf-8"), max_size=60)


def plain(tokenizer: Any = LOSSY, **changes: Any) -> DialogueFormat:
    return build_dialogue_format(DialogueConfig(**changes), tokenizer)


@lru_cache
def chat_tokenizer(name: str, eos: str | None = None) -> Any:
    """A byte per token, and the special tokens of a chat template."""
    template = (CHAT_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    end = END_OF_TURN.get(name, "<|im_end|>")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = {*re.findall(r"<\|[A-Za-z_0-9]+\|>|<(?:start|end)_of_turn>", template), end}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token=eos or end, additional_special_tokens=sorted(special - {eos or end})
    )
    tokenizer.chat_template = template
    return tokenizer


def chat(name: str = "qwen2_5", eos: str | None = None, **changes: Any) -> DialogueFormat:
    return build_dialogue_format(DialogueConfig(style="chat", turn_template="{observation}", **changes), chat_tokenizer(name, eos))


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


# ---------------------------------------------------------------- plain


@given(texts, texts)
def test_plain_text_is_its_templates_encoded_one_by_one(first: str, second: str) -> None:
    form = plain(first_template="Play.\n{observation}\n>", turn_template="[{turn}/{turns_left}] {observation}\n>", max_turns=9)
    assert form.opening(first, INFO, 9).tolist() == ids(LOSSY, f"Play.\n{first}\n>")
    assert form.reply(second, INFO, turn=2, turns_left=8, after=np.array([5])).tolist() == ids(LOSSY, f"[2/8] {second}\n>")


def test_without_a_first_template_the_first_turn_reads_as_every_other() -> None:
    form = plain(turn_template="{turn}:{observation}>")
    assert form.opening("a", INFO, None).tolist() == ids(LOSSY, "1:a>")


def test_braces_in_an_observation_mean_nothing() -> None:
    assert plain().opening("{turn} {0} {x.y} }{", INFO, None).tolist() == ids(LOSSY, "{turn} {0} {x.y} }{\n>")


def test_admissible_commands_stand_where_the_template_names_them() -> None:
    form = plain(turn_template="{observation} ({admissible_commands})>")
    assert form.opening("x", EnvInfo(admissible_commands=("look", "go {north}")), None).tolist() == ids(LOSSY, "x (look, go {north})>")
    assert form.opening("x", INFO, None).tolist() == ids(LOSSY, "x ()>")


def test_a_text_that_comes_back_has_the_same_tokens_and_cannot_be_written_to() -> None:
    form = plain()
    first, again = form.opening("a", INFO, None), form.opening("a", INFO, None)
    assert first is again
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 3


def test_what_is_remembered_is_bounded_in_number_and_in_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialogue, "MOST_CACHED", 10)
    form = plain()
    for round_ in range(2):
        for number in range(30):
            text = f"room {number}"
            assert form.opening(text, INFO, None).tolist() == ids(LOSSY, f"{text}\n>"), round_
            assert form.text_of(np.array(ids(LOSSY, text))) == text
        assert len(form._ids._entries) == len(form._texts._entries) == 10
    long = "x" * (dialogue.LONGEST_CACHED + 1)
    form.opening(long, INFO, None)
    form.text_of(np.array(ids(LOSSY, long)))
    assert all(len(text) < dialogue.LONGEST_CACHED for text, _ in form._ids._entries)
    assert len(form._texts._entries) == 10


def test_empty_and_enormous_texts_are_encoded() -> None:
    form = plain()
    assert form.opening("", INFO, None).tolist() == ids(LOSSY, "\n>")
    assert len(form.opening("x" * 1_000_000, INFO, None)) == 1_000_002


# ---------------------------------------------------------------- what the policy wrote


def test_the_text_of_a_turn_leaves_the_end_token_out_and_nothing_else() -> None:
    form = plain(stop=["\n"])
    newline = ids(LOSSY, "\n")[0]
    assert form.stop_token_ids == (newline, LOSSY.eos_token_id)
    written = LOSSY.written("go north")
    assert form.text_of(np.array([*written, LOSSY.eos_token_id])) == "go north"
    assert form.text_of(np.array([*written, newline])) == "go north"
    assert form.text_of(np.array(written)) == "go north"
    assert form.text_of(np.array([newline, *written])) == "\ngo north"
    assert form.text_of(np.zeros(0, dtype=np.int64)) == ""
    assert form.text_of(np.array([LOSSY.eos_token_id])) == ""


def test_the_tokens_of_a_text_are_not_those_from_which_it_was_read() -> None:
    """What the fake tokenizer is for."""
    written = LOSSY.written("go")
    assert LOSSY.decode(written, skip_special_tokens=True) == "go"
    assert ids(LOSSY, "go") != written


@given(texts)
def test_without_a_pattern_the_whole_text_is_the_action(text: str) -> None:
    assert plain().action_of(text, None) == (text.strip(), None)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<a>look</a>", "look"),
        ("I might <a>look</a>, no: <a> go north </a> it is", "go north"),
        ("look", ""),
        ("", ""),
        ("<a></a>", ""),
        ("<a>x</a><a>", "x"),
    ],
)
def test_with_a_pattern_its_last_match_is_the_action(text: str, action: str) -> None:
    assert plain(action_pattern=r"<a>(.*?)</a>").action_of(text, None) == (action, None)


def test_a_group_that_took_no_part_in_the_match_is_the_empty_action() -> None:
    assert plain(action_pattern="go|(look)").action_of("look, then go", None) == ("", None)


COMMANDS = ("go to  shelf 1", "LOOK", "take pen", "Take Pen", "straße")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("take pen", ("take pen", True)),
        ("Take Pen", ("Take Pen", True)),
        ("TAKE PEN", ("take pen", True)),  # the first that fits
        (" Go  to\nshelf 1 ", ("go to  shelf 1", True)),
        ("look", ("LOOK", True)),
        ("STRASSE", ("straße", True)),
        ("take  pens", ("take  pens", False)),
        ("", ("", False)),
        ("x" * 100_000, ("x" * 100_000, False)),
    ],
)
def test_case_and_white_space_do_not_make_another_command(text: str, answer: tuple[str, bool]) -> None:
    assert plain().action_of(text, COMMANDS) == answer


def test_where_nothing_is_admissible_no_action_is() -> None:
    assert plain().action_of("look", ()) == ("look", False)


@given(texts, st.lists(texts, max_size=5))
def test_an_action_is_admissible_exactly_when_it_reads_as_a_command(text: str, commands: list[str]) -> None:
    action, is_admissible = plain().action_of(text, tuple(commands))
    same = [command for command in commands if command.split() == text.split() or command.casefold().split() == text.casefold().split()]
    assert is_admissible == bool(text.strip() in commands or same)
    assert action == text.strip() or (is_admissible and action in commands)


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop": ["\n", "ab"]}, r"dialogue\.stop\[1\]: expected a text of exactly one token, got 'ab', which this tokenizer makes 2 of"),
        ({"turn_template": "{observtion}>"}, r"dialogue\.turn_template: expected only the fields .*, got 'observtion'"),
        ({"first_template": "{}>"}, r"dialogue\.first_template: expected only the fields .*, got ''"),
        ({"turn_template": "{observation.__class__}>"}, "got 'observation.__class__'"),
        ({"turn_template": "{observation!r}>"}, "expected only the fields"),
        ({"turn_template": "{observation:>10}>"}, "expected only the fields"),
        ({"turn_template": "{observation"}, r"dialogue\.turn_template: expected text with the fields"),
        ({"turn_template": "{turns_left}>"}, r"dialogue\.turn_template: the field \{turns_left\} needs dialogue\.max_turns"),
        ({"turn_template": "{observation}"}, r"dialogue\.turn_template: expected a template that has a token even where"),
        ({"first_template": ""}, r"dialogue\.first_template: expected a template that has a token"),
        ({"action_pattern": "(a"}, r"dialogue\.action_pattern: expected a regular expression, got '\(a'"),
        ({"action_pattern": "a"}, r"dialogue\.action_pattern: expected exactly one group, which is the action, got 0"),
        ({"action_pattern": "(a)(b)"}, "expected exactly one group, which is the action, got 2"),
        ({"style": "chat"}, r"dialogue\.style: expected plain for a tokenizer without a chat template, got chat"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_their_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plain(**changes)


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        plain(stop=["xy"], turn_template="{what}>", action_pattern="(")
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "dialogue.turn_template",
        "dialogue.action_pattern",
        "dialogue.stop[0]",
    ]


def test_a_brace_that_is_written_twice_is_a_brace() -> None:
    assert plain(turn_template="{{{observation}}}>").opening("a", INFO, None).tolist() == ids(LOSSY, "{a}>")


# ---------------------------------------------------------------- chat


@pytest.mark.parametrize("name", END_OF_TURN)
@given(first=texts, said=texts, second=texts)
def test_a_chat_is_the_conversation_that_the_template_renders(name: str, first: str, said: str, second: str) -> None:
    """Where the policy writes a text as it is encoded, the tokens are those of the whole conversation."""
    first, said, second = first.strip(), said.strip() or "go", second.strip()  # some templates strip what they are given
    tokenizer, form = chat_tokenizer(name), chat(name)
    messages = [("user", first), ("assistant", said), ("user", second)]
    whole = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages], tokenize=False, add_generation_prompt=True
    )
    sampled = ids(tokenizer, said)
    end = tokenizer.eos_token_id
    opening = form.opening(first, INFO, None).tolist()
    reply = form.reply(second, INFO, turn=2, turns_left=None, after=np.array([*sampled, end])).tolist()
    assert opening + sampled + [end] + reply == ids(tokenizer, whole)
    cut = form.reply(second, INFO, turn=2, turns_left=None, after=np.array(sampled)).tolist()
    assert opening + sampled + cut == ids(tokenizer, whole)


def test_a_chat_read_by_eye() -> None:
    tokenizer, form = chat_tokenizer("qwen2_5"), chat(system_prompt="Play.")
    assert tokenizer.decode(form.opening("A door.", INFO, None)) == (
        "<|im_start|>system\nPlay.<|im_end|>\n<|im_start|>user\nA door.<|im_end|>\n<|im_start|>assistant\n"
    )
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    said = ids(tokenizer, "open it")
    assert form.stop_token_ids == (end,)
    ended = form.reply("It opens.", INFO, turn=2, turns_left=None, after=np.array([*said, end]))
    assert tokenizer.decode(ended) == "\n<|im_start|>user\nIt opens.<|im_end|>\n<|im_start|>assistant\n"
    cut = form.reply("It opens.", INFO, turn=2, turns_left=None, after=np.array(said))
    assert tokenizer.decode(cut) == "<|im_end|>\n<|im_start|>user\nIt opens.<|im_end|>\n<|im_start|>assistant\n"


def test_a_turn_that_ended_by_another_token_gets_the_end_of_turn_of_its_template() -> None:
    tokenizer = chat_tokenizer("qwen2_5", "<|endoftext|>")
    form = chat(eos="<|endoftext|>")
    end, other = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert form.stop_token_ids == (other, end)  # both end a turn
    reply = form.reply("x", INFO, turn=2, turns_left=None, after=np.array([5, other]))
    assert tokenizer.decode(reply).startswith("<|im_end|>\n<|im_start|>user\n")
    assert reply.tolist()[1:] == form.reply("x", INFO, turn=2, turns_left=None, after=np.array([5, end])).tolist()


def test_where_the_next_message_ends_the_last_one_its_token_does_not_stand_twice() -> None:
    tokenizer = chat_tokenizer("glm4moe", "<|user|>")
    form = chat("glm4moe", "<|user|>")
    reply = form.reply("x", INFO, turn=2, turns_left=None, after=np.array([5, tokenizer.eos_token_id]))
    assert tokenizer.decode(reply) == "\nx<|assistant|>"


def test_a_system_prompt_that_the_template_refuses_is_a_setting_that_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"dialogue\.system_prompt: expected a conversation that .* renders"):
        chat("gemma", system_prompt="Play.")


def test_a_template_that_does_not_say_what_the_assistant_said_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dialogue\.style: expected a chat template that repeats"):
        chat("smolvlm")


def test_chat_text_is_read_without_special_tokens() -> None:
    tokenizer, form = chat_tokenizer("qwen2_5"), chat()
    im_start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert form.text_of(np.array([im_start, *ids(tokenizer, "go"), tokenizer.eos_token_id])) == "go"


# ---------------------------------------------------------------- real tokenizers


@given(texts)
def test_the_fast_way_to_encode_is_the_tokenizers_own(text: str) -> None:
    tokenizer = household_tokenizer()
    tokenizer.truncation_side, tokenizer.padding_side = "left", "left"
    form = plain(tokenizer)
    tokenizer(["a b c", "d"], padding=True, truncation=True, max_length=2, add_special_tokens=False)  # as another user of it may leave it
    assert form.opening(text, INFO, None).tolist() == tokenizer(f"{text}\n>", add_special_tokens=False)["input_ids"]


@lru_cache
def household_tokenizer() -> Any:
    return load_tokenizer(Path(__file__).parents[2] / "recipes" / "agentic_household" / "policy")
