from __future__ import annotations

from typing import Any

import pytest

from sluice.config.models import RewardConfig
from sluice.errors import TaskError
from sluice.tasks.labels import Labels
from tests.tasks.fakes import row


def labels(**tags: list[str]) -> Labels:
    return Labels(
        {domain: RewardConfig.model_validate({"verifier": {"type": "exact"}, "tag_included": tag}) for domain, tag in tags.items()}
    )


@pytest.mark.parametrize(
    ("fields", "source_domain", "expected"),
    [
        ({"domain": "code", "tag": "gsm8k"}, "math", ("math", None)),  # the source decides
        ({"domain": "code", "tag": "gsm8k"}, None, ("code", None)),  # then the row's domain
        ({"tag": "gsm8k"}, None, ("math", "gsm8k")),  # then its tag
        ({"domain": "", "tag": "math"}, None, ("math", None)),  # a tag may be the domain's own name
        ({"domain": "gsm8k"}, None, ("math", "gsm8k")),
    ],
)
def test_a_row_belongs_to_the_domain_of_its_source_else_its_domain_else_its_tag(fields: Any, source_domain: str | None, expected: Any):
    known = labels(math=["gsm8k", "aime"], code=[])
    assert known.find(row(**fields), "data", source_domain) == expected
    known.require_known()


def test_unknown_labels_are_told_with_their_source_their_rows_and_the_known_domains():
    known = labels(math=["gsm8k"], code=[])
    for _ in range(3):
        assert known.find(row(tag="gsm8"), "tasks.train.0 (sums)", None) is None
    assert known.find(row(domain="law"), "tasks.train.1 (cases)", None) is None
    assert known.find(row(), "tasks.train.1 (cases)", None) is None
    with pytest.raises(TaskError) as raised:
        known.require_known()
    told = str(raised.value)
    assert "a domain of `rewards` (code, math)" in told
    assert "3 rows of tasks.train.0 (sums) have the label 'gsm8' - did you mean gsm8k?" in told
    assert "1 rows of tasks.train.1 (cases) have the label 'law'" in told
    assert "1 rows of tasks.train.1 (cases) have no label - set its `domain`" in told


def test_many_unknown_labels_make_no_endless_message():
    known = labels(math=[])
    for k in range(1000):
        known.find(row(tag=f"label {k}"), "data", None)
    with pytest.raises(TaskError, match="990 more labels"):
        known.require_known()


@pytest.mark.parametrize("field", ["domain", "tag"])
def test_a_label_that_is_no_text_is_refused_with_its_row(field: str):
    fields: Any = {field: 3}
    with pytest.raises(TaskError, match=rf"data\.jsonl line 1: expected text in field '{field}', the label of a reward domain, got 3"):
        labels(math=[]).find(row(**fields), "data", None)
