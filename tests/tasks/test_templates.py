from __future__ import annotations

from typing import Any

import pytest

from sluice.config.models import TasksConfig
from sluice.errors import ConfigError, TaskError
from sluice.tasks.base import MISSING, Tokenizer
from sluice.tasks.templates import PromptWriter, reads_question
from tests.tasks.fakes import BEGIN, END, CharTokenizer, row, transformers_tokenizer

CHAT = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


def writer(tokenizer: Tokenizer | None = None, **settings: Any) -> PromptWriter:
    train = [{"type": "jsonl", "path": "data.jsonl"}]
    return PromptWriter(
        TasksConfig.model_validate({"train": train, **settings}), tokenizer or CharTokenizer(), tokenizer_place="models/tiny"
    )


def chat_writer(**settings: Any) -> PromptWriter:
    return writer(CharTokenizer(adds_begin=True, chat_template=CHAT), use_chat_template=True, **settings)


def written(prompt: object, *, by: PromptWriter | None = None, **fields: Any) -> str:
    return (by or writer()).write(row(prompt, **fields), prompt_field="prompt")


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


# ---------------------------------------------------------------- the prompt template


def test_without_a_template_the_prompt_is_the_text_itself():
    assert written("a {b} %s") == "a {b} %s"


def test_a_template_is_filled_from_the_row():
    template = writer(prompt_template="{topic}: {question} ({metadata[level]}, {cost:.1f}) {{}}")
    assert written("1+1=?", by=template, topic="sums", metadata={"level": 3}, cost=2.25) == "sums: 1+1=? (3, 2.2) {}"


def test_question_is_the_prompt_text_whatever_field_it_stood_in():
    assert written("the prompt", by=writer(prompt_template="Q: {question}"), question="another field") == "Q: the prompt"


def test_a_template_without_question_needs_no_prompt():
    template = writer(prompt_template="{context} {problem}")
    assert written(MISSING, by=template, context="Given x.", problem="Find x.") == "Given x. Find x."
    assert not reads_question("{context} {problem}")
    assert reads_question("{x:{question}}")


def test_a_field_that_the_row_lacks_is_refused_with_the_fields_there_are():
    with pytest.raises(
        ConfigError, match=r"data\.jsonl line 1 cannot fill .*KeyError: 'topik' - its fields are answer, prompt, question, topic"
    ):
        written("a", by=writer(prompt_template="{topik} {question}"), topic="sums")


@pytest.mark.parametrize(
    "template", ["{question.nothing}", "{question:d}", "{metadata[gone]}", "{metadata[0]}", "{answer:{prompt}}", "{[0]}"]
)
def test_a_template_that_cannot_be_filled_is_refused(template: str):
    with pytest.raises(ConfigError, match=r"tasks\.prompt_template: expected a template that every row can fill"):
        written("a", by=writer(prompt_template=template), metadata={"level": 3})


@pytest.mark.parametrize("prompt", ["", "  \n\t", []])
def test_an_empty_prompt_gives_empty_text(prompt: object):
    assert written(prompt) == ""
    assert written(prompt, by=writer(prompt_template="Q: {question}")) == ""
    assert written(prompt, by=chat_writer(system_prompt="s")) == ""


def test_a_template_that_leaves_nothing_gives_empty_text():
    assert written("a", by=writer(prompt_template="{topic}"), topic=" ") == ""


@pytest.mark.parametrize(
    ("prompt", "got"),
    [(None, "null"), (7, r"7 \(a number\)"), (True, "true"), (b"a", "bytes"), ({"role": "user"}, "a mapping"), (1.5, "1.5")],
)
def test_a_prompt_that_is_neither_text_nor_messages_is_refused_with_its_place(prompt: object, got: str):
    with pytest.raises(TaskError, match=rf"data\.jsonl line 1: expected text or a list of chat messages in field 'prompt', got .*{got}"):
        written(prompt)


def test_a_missing_prompt_is_refused_with_the_fields_there_are():
    with pytest.raises(TaskError, match=r"line 1: expected text .* in field 'prompt', got no such field - it has answer, prompt, topic"):
        written(MISSING, topic="sums")


def test_a_huge_wrong_prompt_makes_no_huge_message():
    with pytest.raises(TaskError) as raised:
        written({"x" * 100_000: 1})
    assert len(str(raised.value)) < 300


# ---------------------------------------------------------------- the chat template


def test_a_text_prompt_becomes_the_users_message():
    assert written("1+1=?", by=chat_writer()) == "<b>user:1+1=?\nassistant:"
    assert written("1+1=?", by=chat_writer(system_prompt="Add.")) == "<b>system:Add.\nuser:1+1=?\nassistant:"


def test_chat_messages_are_kept_and_the_prompt_template_goes_to_the_last_one():
    messages = [user("1+1=?"), {"role": "assistant", "content": "2"}, user("2+2=?")]
    by = chat_writer(prompt_template="{question} Go.", system_prompt="Add.")
    assert written(messages, by=by) == "<b>system:Add.\nuser:1+1=?\nassistant:2\nuser:2+2=? Go.\nassistant:"


def test_messages_may_have_further_keys_and_nulls_are_dropped():
    class Seeing(CharTokenizer):
        def apply_chat_template(self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool) -> str:
            self.seen = conversation
            return "x"

    tokenizer = Seeing(chat_template=CHAT)
    first = {"role": "system", "content": "s", "name": "n", "tool_calls": None}
    written([first, user("u")], by=writer(tokenizer, use_chat_template=True))
    assert tokenizer.seen == [{"role": "system", "content": "s", "name": "n"}, {"role": "user", "content": "u"}]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (["hello"], r"message 0 is 'hello' \(text\)"),
        ([user("a"), None], "message 1 is null"),
        ([{"content": "a"}], "expected text as the role of message 0, got null"),
        ([{"role": "", "content": "a"}], "expected text as the role of message 0"),
        ([{"role": "user"}], "expected text as the content of message 0, got null"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "expected text as the content of message 0, got a list of 1"),
        ([{"role": "assistant", "content": "a"}], "expected the user's message as the last, .* got one of role 'assistant'"),
        ([{"role": "tool", "content": "a"}, user("b")], "chat template refuses it: ValueError: this template knows no such role"),
    ],
)
def test_malformed_chat_messages_are_refused_with_their_place(messages: list[object], message: str):
    with pytest.raises(TaskError, match=message) as raised:
        written(messages, by=chat_writer())
    assert "data.jsonl line 1" in str(raised.value)


def test_chat_messages_without_a_chat_template_are_refused():
    with pytest.raises(TaskError, match="got chat messages - set tasks.use_chat_template: true"):
        written([user("a")])


def test_two_system_messages_are_refused():
    with pytest.raises(TaskError, match="no system message, since tasks.system_prompt is set"):
        written([{"role": "system", "content": "a"}, user("b")], by=chat_writer(system_prompt="c"))


def test_a_tokenizer_without_a_chat_template_is_refused_at_once():
    with pytest.raises(
        ConfigError, match=r"tasks\.use_chat_template: expected a tokenizer with a chat template, but that of models/tiny has none"
    ):
        writer(use_chat_template=True)


def test_a_chat_template_that_gives_no_text_is_refused():
    class Odd(CharTokenizer):
        def apply_chat_template(self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool) -> Any:
            return [1, 2]

    with pytest.raises(TaskError, match="expected text from the tokenizer's chat template, got a list of 2"):
        written("a", by=writer(Odd(chat_template=CHAT), use_chat_template=True))


# ---------------------------------------------------------------- tokens


def tokens(text: str, by: PromptWriter) -> list[int]:
    (ids,) = by.tokenize([text], [row(text)])
    assert ids.dtype == "int64"
    return ids.tolist()


def test_a_prompt_has_exactly_one_begin_token_on_every_path():
    plain = writer(CharTokenizer(adds_begin=True))
    assert tokens("ab", plain).count(BEGIN) == 1
    assert tokens("<b>ab", plain) == tokens("ab", plain)
    chat = chat_writer()
    assert tokens(written("ab", by=chat), chat).count(BEGIN) == 1
    assert tokens("ab", writer(CharTokenizer())).count(BEGIN) == 0


def test_the_end_token_that_a_tokenizer_appends_is_taken_off_and_counted():
    by = writer(CharTokenizer(adds_end=True))
    assert END not in tokens("ab", by)
    assert by.end_tokens_taken_off == 1
    plain = writer(CharTokenizer())
    assert tokens("ab<e>", plain)[-1] == END  # written in the text on purpose
    assert plain.end_tokens_taken_off == 0


def test_a_text_that_the_tokenizer_cannot_read_is_refused_with_its_row():
    by = writer()
    with pytest.raises(TaskError, match=r"data\.jsonl line 1: the tokenizer cannot read the prompt 'a\\ud800': UnicodeEncodeError"):
        by.tokenize(["fine", "a\ud800"], [row("fine"), row("a\ud800")])


def test_no_prompts_are_no_call_of_the_tokenizer():
    tokenizer = CharTokenizer()
    assert writer(tokenizer).tokenize([], []) == []
    assert tokenizer.calls == 0


def test_a_real_tokenizer_keeps_all_of_this():
    plain = writer(transformers_tokenizer())
    assert tokens("ab", plain) == [0, *plain.tokenize(["ab"], [row()])[0].tolist()[1:]]
    assert tokens("<b>ab", plain) == tokens("ab", plain)
    assert END not in tokens("ab", plain)
    chat = writer(transformers_tokenizer(CHAT), use_chat_template=True, system_prompt="s")
    text = written("1+1=?", by=chat)
    assert text == "<b>system:s\nuser:1+1=?\nassistant:"
    assert tokens(text, chat).count(BEGIN) == 1
    with pytest.raises(TaskError, match="the tokenizer cannot read the prompt"):
        plain.tokenize(["a\ud800"], [row()])
    with pytest.raises(ConfigError, match="has none"):
        writer(transformers_tokenizer(), use_chat_template=True)
