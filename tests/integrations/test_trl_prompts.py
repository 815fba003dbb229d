"""The order of prompts: TRL's own, each once per epoch, also over a resume."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.trainer.utils import RepeatSampler

from sluice.errors import RecordError, TaskError
from sluice.integrations.trl.prompts import PromptStream, text_of


def data(rows: int) -> Dataset:
    return Dataset.from_dict({"prompt": [f"p{row}" for row in range(rows)]})


def drawn(stream: PromptStream, number: int) -> list[str]:
    return [stream.draw()[0].prompt for _ in range(number)]


@settings(max_examples=15)
@given(st.integers(1, 9), st.integers(0, 3), st.booleans())
def test_prompts_come_in_the_order_of_trls_sampler_epoch_by_epoch(rows: int, seed: int, shuffle: bool) -> None:
    sampler = RepeatSampler(range(rows), mini_repeat_count=1, batch_size=1, shuffle=shuffle, seed=seed)
    expected = [f"p{index}" for _ in range(3) for index in sampler]
    assert drawn(PromptStream(data(rows), shuffle=shuffle, seed=seed), 3 * rows) == expected


@settings(max_examples=15)
@given(st.integers(1, 6), st.integers(0, 20), st.data())
def test_a_stream_goes_on_where_its_state_was_taken(rows: int, before: int, choose: st.DataObject) -> None:
    whole, first = (PromptStream(data(rows), shuffle=True, seed=1) for _ in range(2))
    tasks = [first.draw() for _ in range(before)]
    expected = drawn(whole, before + 10)[before:]
    back = choose.draw(st.lists(st.sampled_from(tasks), max_size=2)) if tasks else []
    for task, epoch in back:
        first.put_back(task, epoch)
    second = PromptStream(data(rows), shuffle=True, seed=1)
    second.load_state_dict(first.state_dict())
    assert drawn(second, len(back)) == [task.prompt for task, _ in back]
    assert drawn(second, 10) == expected
    assert second.drawn == before + 10


def test_streams_of_rows_are_read_pass_after_pass_and_resumed_by_reading() -> None:
    def make() -> PromptStream:
        return PromptStream(IterableDataset.from_generator(lambda: iter(data(3))), shuffle=False, seed=0)

    first = make()
    assert drawn(first, 7) == ["p0", "p1", "p2", "p0", "p1", "p2", "p0"]
    second = make()
    second.load_state_dict(first.state_dict())
    assert drawn(second, 3) == ["p1", "p2", "p0"]
    assert first.epochs == 2


def test_shuffled_streams_have_another_order_in_every_pass() -> None:
    stream = PromptStream(IterableDataset.from_generator(lambda: iter(data(20))), shuffle=True, seed=0)
    first, second = drawn(stream, 20), drawn(stream, 20)
    assert sorted(first) == sorted(second)
    assert first != second


def test_data_that_cannot_be_are_refused() -> None:
    with pytest.raises(TaskError, match="got an empty data set"):
        PromptStream(data(0), shuffle=True, seed=0)
    with pytest.raises(TaskError, match="a stream without rows"):
        PromptStream(IterableDataset.from_generator(lambda: iter(())), shuffle=False, seed=0).draw()
    stream = PromptStream(data(2), shuffle=True, seed=0)
    with pytest.raises(RecordError, match="2 rows, got one with 3"):
        stream.load_state_dict(PromptStream(data(3), shuffle=True, seed=0).state_dict())
    with pytest.raises(RecordError, match="expected the state of a prompt stream"):
        stream.load_state_dict({})


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("plain", "plain"),
        ([{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}], "be brief\nwhy?"),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}], " what is it?"),
        ([{"role": "assistant", "content": None}], ""),
    ],
)
def test_prompts_and_completions_are_told_as_text(prompt: Any, text: str) -> None:
    assert text_of(prompt) == text


def test_rows_may_be_drawn_in_any_number_of_epochs() -> None:
    stream = PromptStream(data(2), shuffle=True, seed=5)
    assert len(list(islice(iter(stream.draw, None), 25))) == 25
    assert stream.epochs == 12.5
