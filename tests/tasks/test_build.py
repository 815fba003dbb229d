from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.errors import ConfigError, TaskError
from sluice.tasks import DomainTasks, LoadedTasks, TaskList, build_tasks
from sluice.tasks.report import REASONS
from tests.tasks.fakes import CharTokenizer, jsonl, run_config, sums, transformers_tokenizer

EXACT = {"verifier": {"type": "exact"}}
CUSTOM = {"verifier": {"type": "my.module.score"}}
GYM: dict[str, Any] = {"type": "reasoning_gym", "name": "chain_sum", "domain": "math", "size": 20}


def build(train: Any, validation: Any = (), *, tokenizer: Any = None, **more: Any) -> LoadedTasks:
    return build_tasks(run_config(train, validation, **more), tokenizer or CharTokenizer())


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Writes rows as a JSON Lines file and gives its path."""
    return lambda rows, name="sums.jsonl": jsonl(tmp_path / name, rows)


def by_tag(path: Path, **more: Any) -> dict[str, Any]:
    """A source whose rows name their domain."""
    return {"type": "jsonl", "path": str(path), **more}


# ---------------------------------------------------------------- what a task holds


def test_a_row_becomes_a_task_with_all_that_its_verifier_needs(write: Any):
    file = write([{"prompt": "1+1=", "answer": "2", "difficulty": 3, "note": "x"}])
    (task,) = build(file).train.tasks
    assert (task.task_id, task.domain, task.prompt, task.answer, task.tag, task.difficulty) == ("sums/0", "math", "1+1=", "2", None, 3.0)
    assert task.prompt_ids.tolist() == [3 + ord(c) for c in "1+1="]
    assert task.entry == {"prompt": "1+1=", "answer": "2", "difficulty": 3, "note": "x"}


def test_reasoning_gym_data_and_a_real_tokenizer_make_tasks():
    loaded = build(
        [GYM], [GYM], tokenizer=transformers_tokenizer(), rewards={"math": {"verifier": {"type": "reasoning_gym"}}}, prompt_length=400
    )
    assert len(loaded.train) == 20
    assert len(loaded.validation) == 20  # default seeds of the two parts are far apart
    task = loaded.train.tasks[0]
    assert task.entry["metadata"]["source_dataset"] == "chain_sum"
    assert task.prompt == task.entry["question"]
    assert len(task.prompt_ids) == len(task.prompt) + 1  # characters and a begin token; the end token is taken off
    assert any("appends its end token: it was taken off 40 prompts" in warning for warning in loaded.report.warnings)


def test_task_ids_are_unique_and_the_same_in_every_run(write: Any, tmp_path: Path):
    first, second = write(sums(2)), tmp_path / "more"
    second.mkdir()
    other = jsonl(second / "sums.jsonl", sums(2, 10))

    def ids(seed: int) -> list[str]:
        loaded = build([first, other], [first], seed=seed, exclude_train_from_validation=False)
        return [task.task_id for task in (*loaded.train.tasks, *loaded.validation)]

    assert ids(1) == ids(2) == ["sums/0", "sums/1", "sums#2/0", "sums#2/1", "validation/sums/0", "validation/sums/1"]


def test_order_epochs_and_seed_reach_the_task_list(write: Any):
    loaded = build(write(sums(3)), shuffle=False, epochs=1)
    assert [draw[0].task_id if (draw := loaded.train.draw()) else None for _ in range(4)] == ["sums/0", "sums/1", "sums/2", None]


@pytest.mark.parametrize(("answer", "expected"), [("2", "2"), (2, "2"), (2.5, "2.5"), (-7, "-7"), (" x ", " x ")])
def test_an_answer_is_text_and_numbers_are_written_as_text(write: Any, answer: object, expected: str):
    (task,) = build(write([{"prompt": "a", "answer": answer}])).train.tasks
    assert task.answer == expected


@pytest.mark.parametrize("answer", [True, [1, 2], {"value": 1}])
def test_an_answer_that_is_no_text_is_refused_where_it_is_compared_and_left_to_other_verifiers(write: Any, answer: object):
    file = write([{"prompt": "a", "answer": answer}])
    with pytest.raises(TaskError, match=r"sums\.jsonl line 1: expected text or a number in field 'answer', which the verifier"):
        build(file)
    (task,) = build(file, rewards={"math": CUSTOM}).train.tasks
    assert task.answer is None
    assert task.entry["answer"] == answer


@pytest.mark.parametrize(
    ("verifier", "needs_one"),
    [
        ({"type": "exact"}, True),
        ({"type": "numeric"}, True),
        ({"type": "math_verify"}, True),
        ({"type": "regex", "args": {"pattern": "(?P<answer>.*)"}}, True),
        ({"type": "regex", "args": {"pattern": "yes"}}, False),
        ({"type": "my.module.score"}, False),
    ],
)
def test_a_row_without_an_answer_is_left_out_only_where_its_verifier_compares(write: Any, verifier: Any, needs_one: bool):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}, {"prompt": "c"}, {"prompt": "d", "answer": float("nan")}]
    loaded = build(write(rows), rewards={"math": {"verifier": verifier}})
    assert loaded.report.dropped("train") == ({"missing_answer": 3} if needs_one else {})


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), float("-inf"), 1e400])
def test_an_answer_that_is_no_finite_number_is_a_missing_one(write: Any, answer: float):
    file = write([{"prompt": "1/0=", "answer": answer}, {"prompt": "1+1=", "answer": 2}])
    for verifier in ("exact", "numeric"):
        loaded = build(file, rewards={"math": {"verifier": {"type": verifier}}})
        assert [task.answer for task in loaded.train.tasks] == ["2"]
        assert loaded.report.sources[0].dropped == {"missing_answer": 1}


def test_the_prompt_is_asked_for_before_the_answer(write: Any):
    with pytest.raises(
        TaskError, match=r"sums\.jsonl line 2: expected text or a list of chat messages in field 'prompt', got no such field"
    ):
        build(write([{"prompt": "1+1=", "answer": "2"}, {"question": "2+2="}]))
    loaded = build(write([{"prompt": "1+1=", "answer": "2"}, {"prompt": " "}]))
    assert loaded.report.sources[0].dropped == {"empty_prompt": 1}


def test_every_built_in_verifier_that_compares_is_known_to_the_tasks():
    import inspect

    from sluice.rewards.build import VERIFIERS
    from sluice.tasks.build import VERIFIERS_THAT_COMPARE

    comparing = {name for name, verifier in VERIFIERS.items() if "reference_answer(" in inspect.getsource(verifier)}
    assert comparing == VERIFIERS_THAT_COMPARE | {"regex"}


# ---------------------------------------------------------------- what is left out, and that it is counted

rows_of_any_kind = st.lists(
    st.fixed_dictionaries(
        {"prompt": st.sampled_from(["", " ", "ab", "abc", "abcdefgh", "x" * 20]), "tag": st.sampled_from(["math", "gsm8k", "law"])},
        optional={"answer": st.sampled_from(["1", "", None, 3]), "difficulty": st.sampled_from([0, 1, 2, 3, None, "hard"])},
    ),
    min_size=1,
    max_size=25,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    train=rows_of_any_kind,
    held_out=rows_of_any_kind,
    length=st.integers(1, 10),
    low=st.none() | st.integers(0, 2),
    samples=st.integers(0, 10),
    items=st.none() | st.integers(1, 10),
    exclude=st.booleans(),
    shares=st.sampled_from([None, {"math": 1.0}, {"law": 2.0, "math": 1.0}]),
)
def test_every_row_is_kept_or_dropped_for_one_reason(
    tmp_path: Path,
    train: Any,
    held_out: Any,
    length: int,
    low: int | None,
    samples: int,
    items: int | None,
    exclude: bool,
    shares: dict[str, float] | None,
):
    rewards = {"math": {**EXACT, "tag_included": ["gsm8k"]}, "law": CUSTOM}
    sources = [by_tag(jsonl(tmp_path / f"{name}.jsonl", rows)) for name, rows in (("a", train), ("b", train[::2]), ("c", held_out))]
    try:
        loaded = build(
            sources[:2],
            sources[2:],
            rewards=rewards,
            prompt_length=length,
            dataset_filter={"min_difficulty": low, "num_samples": samples},
            domain_interleave_probs=shares,
            **({"run_validation": {"max_items": items}} if items else {}),
            **{} if exclude else {"exclude_train_from_validation": False},
        )
    except TaskError as err:
        assert "none is left" in str(err) or "has its label" in str(err)  # noqa: PT017 - only these are meant
        return
    report = loaded.report
    assert [source.rows for source in report.sources] == [len(train), len(train[::2]), len(held_out)]
    for source in report.sources:
        assert source.rows == source.kept + sum(source.dropped.values())
        assert set(source.dropped) <= set(REASONS)
        assert sum(source.domains.values()) == source.kept
    assert len(loaded.train) == report.kept("train") <= (samples or 1000)
    assert len(loaded.validation) == report.kept("validation")
    everything = (*loaded.train.tasks, *loaded.validation)
    assert len({task.task_id for task in everything}) == len(everything)
    assert all(1 <= len(task.prompt_ids) <= length for task in everything)
    assert all(low is None or (task.difficulty is not None and task.difficulty >= low) for task in loaded.train.tasks)
    assert all(task.answer for task in everything if task.domain == "math")
    assert shares is None or {task.domain for task in loaded.train.tasks} == set(shares)
    if exclude:
        assert not {task.prompt for task in loaded.train.tasks} & {task.prompt for task in loaded.validation}


def test_a_prompt_of_exactly_prompt_length_is_kept_and_one_token_more_is_not(write: Any):
    loaded = build(write([{"prompt": "x" * n, "answer": "1"} for n in (4, 5, 6)]), prompt_length=5)
    assert [len(task.prompt_ids) for task in loaded.train.tasks] == [4, 5]
    (source,) = loaded.report.sources
    assert (source.dropped, source.shortest_prompt, source.longest_prompt) == ({"prompt_too_long": 1}, 4, 6)


def test_the_dataset_filter_counts_each_reason(write: Any, tmp_path: Path):
    rows = [{"prompt": f"p{k}", "answer": "1", "difficulty": k} for k in range(6)] + [{"prompt": "q", "answer": "1", "difficulty": "hard"}]
    other = write(sums(4), "other.jsonl")
    chosen = {"source": ["sums"], "min_difficulty": 1.0, "max_difficulty": 4.0, "num_samples": 2}
    loaded = build([write(rows), other], dataset_filter=chosen)
    assert [task.difficulty for task in loaded.train.tasks] == [1.0, 2.0]
    first, second = loaded.report.sources
    assert first.dropped == {"no_difficulty": 1, "difficulty": 2, "num_samples": 2}
    assert second.dropped == {"source": 4}


def test_num_samples_counts_prompts_that_can_be_used_over_all_sources(write: Any):
    long = [{"prompt": "x" * 200, "answer": "1"}]
    loaded = build([write(long + sums(2)), write(long + sums(5, 10), "other.jsonl")], dataset_filter={"num_samples": 4})
    assert [task.task_id for task in loaded.train.tasks] == ["sums/1", "sums/2", "other/1", "other/2"]
    assert loaded.report.dropped("train") == {"prompt_too_long": 2, "num_samples": 3}


def test_once_num_samples_is_reached_nothing_more_is_tokenised(write: Any):
    tokenizer = CharTokenizer()
    loaded = build(write(sums(5000)), tokenizer=tokenizer, dataset_filter={"num_samples": 10})
    assert tokenizer.calls == 1
    assert loaded.report.dropped("train") == {"num_samples": 4990}


def test_duplicates_in_training_are_kept_and_counted_per_domain(write: Any):
    rows = [*sums(3, tag="math"), *sums(2, tag="math"), *sums(1, tag="law")]
    loaded = build([by_tag(write(rows))], rewards={"math": EXACT, "law": EXACT})
    assert len(loaded.train) == 6
    assert loaded.report.duplicates("train") == 2


def test_validation_meets_no_dataset_filter(write: Any):
    held_out = write(sums(3, 50, difficulty=9), "held_out.jsonl")
    loaded = build(write(sums(3, difficulty=1)), held_out, dataset_filter={"source": ["sums"], "max_difficulty": 2.0, "num_samples": 1})
    assert (len(loaded.train), len(loaded.validation)) == (1, 3)


def test_validation_prompts_that_cannot_be_evaluated_are_left_out_with_a_warning(write: Any):
    held_out = [*sums(2, 50), {"prompt": "x" * 101, "answer": "1"}, {"prompt": "", "answer": "1"}, {"prompt": "y"}]
    loaded = build(write(sums(3)), write(held_out, "held_out.jsonl"))
    assert loaded.report.dropped("validation") == {"missing_answer": 1, "empty_prompt": 1, "prompt_too_long": 1}
    (warning,) = loaded.report.warnings
    assert "tasks.validation.0 (held_out): 3 of 5 held-out rows are not evaluated: 1 missing_answer" in warning


def test_training_prompts_are_left_out_of_the_validation_data_unless_asked_otherwise(write: Any):
    train, held_out = write(sums(5)), write(sums(5, 3), "held_out.jsonl")
    loaded = build(train, held_out)
    assert [task.prompt for task in loaded.validation] == ["5+1=", "6+1=", "7+1="]
    assert loaded.report.dropped("validation") == {"in_train": 2}
    assert len(build(train, held_out, exclude_train_from_validation=False).validation) == 5


def test_max_items_takes_from_every_source_in_turn(write: Any):
    sources = [write(sums(count, 100 * count), f"{name}.jsonl") for name, count in (("a", 1), ("b", 5), ("c", 5))]
    loaded = build(write(sums(3)), sources, run_validation={"max_items": 6})
    assert [task.task_id for task in loaded.validation] == [f"validation/{k}" for k in ("a/0", "b/0", "b/1", "b/2", "c/0", "c/1")]
    assert loaded.report.dropped("validation") == {"max_items": 5}


# ---------------------------------------------------------------- domains


def test_rows_find_their_domain_by_label(write: Any):
    rows = [*sums(1, tag="gsm8k"), *sums(1, 5, domain="law"), *sums(1, 9, tag="math")]
    loaded = build([by_tag(write(rows))], rewards={"math": {**EXACT, "tag_included": ["gsm8k"]}, "law": EXACT})
    assert [(task.domain, task.tag) for task in loaded.train.tasks] == [("math", "gsm8k"), ("law", None), ("math", None)]
    assert loaded.report.sources[0].domains == {"math": 2, "law": 1}


def test_a_label_without_a_domain_stops_the_run(write: Any):
    rows = [*sums(3, tag="gsm8"), *sums(2, 7, tag="math")]
    with pytest.raises(TaskError, match=r"3 rows of tasks\.train\.0 \(sums\) have the label 'gsm8' - did you mean gsm8k\?"):
        build([by_tag(write(rows))], rewards={"math": {**EXACT, "tag_included": ["gsm8k"]}})


def test_rows_that_the_dataset_filter_drops_need_no_domain(write: Any):
    sources = [by_tag(write(sums(2, tag="math"))), by_tag(write(sums(2, tag="law"), "cases.jsonl"))]
    assert len(build(sources, dataset_filter={"source": ["sums"]}).train) == 2


def test_a_domain_or_label_without_a_row_is_a_warning(write: Any):
    rewards = {"math": {**EXACT, "tag_included": ["aime"]}, "law": EXACT}
    warnings = build([by_tag(write(sums(2, tag="math")))], rewards=rewards).report.warnings
    assert any(warning.startswith("rewards.law: no training prompt belongs to this domain") for warning in warnings)
    assert "rewards.math.tag_included: no row is labelled 'aime'" in warnings


TWO = {"math": EXACT, "law": EXACT}
SHARES = {"math": 3.0, "law": 1.0}


def test_with_shares_tasks_are_drawn_by_domain_and_without_as_they_come(write: Any):
    source = by_tag(write([*sums(2, tag="math"), *sums(3, 5, tag="law")]))
    assert isinstance(build([source], rewards=TWO).train, TaskList)
    loaded = build([source], rewards=TWO, domain_interleave_probs=SHARES, shuffle=False, epochs=1)
    assert isinstance(loaded.train, DomainTasks)
    assert [draw[0].task_id if (draw := loaded.train.draw("law")) else None for _ in range(4)] == ["sums/2", "sums/3", "sums/4", None]
    assert len(loaded.train) == 5
    assert loaded.report.warnings == ()


def test_the_order_of_a_domain_follows_the_seed_of_the_run(write: Any):
    source = by_tag(write(sums(30, domain="law")))

    def order(seed: int) -> list[str]:
        loaded = build([source], rewards={"law": EXACT}, domain_interleave_probs={"law": 1.0}, seed=seed)
        return [draw[0].task_id for _ in range(30) if (draw := loaded.train.draw("law"))]

    assert order(1) == order(1) != order(2)


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        (sums(2, 5, tag="math"), {}, r"no row of tasks\.train \(sums\) has its label - correct the data"),
        (
            [{"prompt": "x" * 60, "answer": "1", "tag": "law"}, {"prompt": "y" * 50, "answer": "1", "tag": "law"}],
            {"prompt_length": 40},
            r"of its 2 rows \(sums\) none is left: 2 prompt_too_long \(more than prompt_length 40 tokens, the shortest has 50 - raise",
        ),
        ([{"prompt": "a", "tag": "law"}], {}, r"of its 1 rows \(sums\) none is left: 1 missing_answer"),
        (sums(3, 5, tag="law"), {"dataset_filter": {"num_samples": 2}}, r"of its 3 rows \(sums\) none is left: 3 num_samples"),
        (
            sums(3, 5, tag="law", difficulty=9),
            {"dataset_filter": {"max_difficulty": 2.0}},
            r"no row .* has its label\. Rows dropped before their label was read: 3 difficulty \(difficulty outside",
        ),
    ],
)
def test_a_domain_with_a_share_and_nothing_left_is_named_with_what_dropped_it(write: Any, rows: Any, more: dict[str, Any], message: str):
    source = by_tag(write([*sums(2, tag="math", difficulty=1), *rows]))
    with pytest.raises(
        TaskError, match=rf"domain_interleave_probs\.law: expected at least one prompt of this domain to train on, but {message}"
    ):
        build([source], rewards=TWO, domain_interleave_probs=SHARES, **more)


def test_rows_of_a_domain_without_a_share_are_left_out_of_training_with_a_warning_and_evaluated(write: Any):
    train, held_out = write([*sums(2, tag="math"), *sums(3, 5, tag="law")]), write(sums(2, 5, tag="law"), "held_out.jsonl")
    loaded = build([by_tag(train)], [by_tag(held_out)], rewards=TWO, domain_interleave_probs={"math": 1.0})
    assert {task.domain for task in loaded.train.tasks} == {"math"}
    assert loaded.report.dropped("train") == {"no_share": 3}
    assert loaded.report.warnings == (
        "rewards.law: 3 training rows are left out, since domain_interleave_probs gives this domain no share",
    )
    assert [task.domain for task in loaded.validation] == ["law", "law"]


# ---------------------------------------------------------------- nothing left, broken data


def test_when_every_prompt_is_too_long_the_error_names_the_limit_and_the_shortest(write: Any):
    with pytest.raises(
        TaskError, match=r"of 12 rows \(sums\) none is left: 12 prompt_too_long \(more than prompt_length 3 .* the shortest has 4"
    ):
        build(write(sums(12)), prompt_length=3)


def test_when_nothing_is_left_every_reason_is_told_with_its_count(write: Any):
    rows = [{"prompt": "", "answer": "1", "difficulty": 5}, {"prompt": "a", "difficulty": 5}, *sums(3, difficulty=1), *sums(2)]
    with pytest.raises(TaskError, match=r"tasks\.train: expected at least one prompt to train on, but of 7 rows") as raised:
        build(write(rows), dataset_filter={"min_difficulty": 2.0})
    for story in ("2 no_difficulty (no number in field 'difficulty'", "3 difficulty", "1 missing_answer", "1 empty_prompt"):
        assert story in str(raised.value)


def test_validation_that_is_all_training_data_is_an_error(write: Any):
    with pytest.raises(TaskError, match=r"tasks\.validation: expected at least one prompt to evaluate, .* 3 in_train"):
        build(write(sums(5)), write(sums(3), "held_out.jsonl"))


def test_validation_made_from_the_seeds_of_the_training_data_is_told():
    train = {**GYM, "seed": 40}
    loaded = build([train], [{**GYM, "seed": 50}])
    assert loaded.report.dropped("validation") == {"in_train": 10}
    assert any("tasks.validation.0.seed 50 makes 10 rows alike with tasks.train.0 (seed 40)" in w for w in loaded.report.warnings)
    with pytest.raises(TaskError, match=r"20 in_train .* makes 20 rows alike with tasks\.train\.0 .* choose a seed farther away"):
        build([train], [{**GYM, "seed": 40}])


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_an_empty_file_is_refused_even_beside_a_full_one(write: Any, tmp_path: Path, content: str):
    empty = tmp_path / "empty.jsonl"
    empty.write_text(content)
    with pytest.raises(TaskError, match=r"tasks\.train\.1 \(empty\): expected rows, but .*empty\.jsonl is empty"):
        build([write(sums(2)), empty])


@pytest.mark.parametrize("prompt", [None, 5, {"a": 1}])
def test_a_prompt_that_is_no_text_stops_the_run_with_its_line(write: Any, prompt: object):
    with pytest.raises(TaskError, match=r"sums\.jsonl line 3: expected text or a list of chat messages in field 'prompt'"):
        build(write([*sums(2), {"prompt": prompt, "answer": "1"}]))


def test_a_missing_prompt_field_names_the_fields_there_are(write: Any):
    with pytest.raises(TaskError, match="in field 'prompt', got no such field - it has answer, question"):
        build(write([{"question": "a", "answer": "1"}]))


def test_a_misspelt_answer_field_is_refused_whatever_the_verifier(write: Any):
    source = by_tag(write(sums(1)), domain="math", answer_field="anwser")
    with pytest.raises(
        ConfigError, match=r"tasks\.train\.0\.answer_field: expected a field of the data, got 'anwser' - did you mean answer\?"
    ):
        build([source], rewards={"math": CUSTOM})


def test_settings_are_checked_before_anything_is_read(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"tasks\.train\.0\.path"):
        build(tmp_path / "gone.jsonl")


def test_text_that_the_tokenizer_does_not_know_is_a_warning(write: Any):
    warnings = build(write([*sums(2), {"prompt": "π", "answer": "3"}])).report.warnings
    assert any("1 prompts hold text that the tokenizer of models/tiny does not know" in warning for warning in warnings)


# ---------------------------------------------------------------- the report, and what is imported


def test_the_report_can_be_read_by_a_person_and_as_metrics(write: Any):
    loaded = build(write([*sums(3), *sums(1), {"prompt": "x" * 101, "answer": "1"}]), write(sums(2, 50), "held_out.jsonl"))
    assert loaded.report.lines() == (
        "tasks.train.0 sums: 5 rows, 4 kept (math 4); dropped: prompt_too_long 1; 1 duplicates kept",
        "tasks.validation.0 held_out: 2 rows, 2 kept (math 2)",
    )
    assert loaded.report.metrics() == {
        "tasks/train/rows": 5,
        "tasks/train/kept": 4,
        "tasks/train/duplicates": 1,
        "tasks/train/dropped/prompt_too_long": 1,
        "tasks/validation/rows": 2,
        "tasks/validation/kept": 2,
        "tasks/validation/duplicates": 0,
    }


def test_importing_the_room_imports_nothing_heavy():
    heavy = ["torch", "transformers", "datasets", "pyarrow", "reasoning_gym", "pandas"]
    code = f"import sys, json, sluice.tasks; print(json.dumps([name for name in {heavy!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
