from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.config.models import DatasetFilterConfig
from sluice.tasks.dataset_filter import DatasetFilter
from tests.tasks.fakes import row

numbers = st.floats(-5, 5)


@given(low=st.none() | numbers, high=st.none() | numbers, difficulty=st.none() | numbers)
def test_a_row_is_kept_exactly_when_its_difficulty_is_within_the_bounds(low: float | None, high: float | None, difficulty: float | None):
    reason = DatasetFilter(DatasetFilterConfig(min_difficulty=low, max_difficulty=high)).reason_to_drop(row(difficulty=difficulty), "sums")
    if low is None and high is None:
        assert reason is None
    elif difficulty is None:
        assert reason == "no_difficulty"
    else:
        is_inside = (low is None or low <= difficulty) and (high is None or difficulty <= high)
        assert reason == (None if is_inside else "difficulty")


def test_bounds_are_inclusive():
    band = DatasetFilter(DatasetFilterConfig(min_difficulty=1.0, max_difficulty=3.0))
    assert [band.reason_to_drop(row(difficulty=d), "sums") for d in (0.99, 1.0, 3.0, 3.01)] == ["difficulty", None, None, "difficulty"]


def test_only_named_sources_pass_and_no_names_mean_all():
    chosen = DatasetFilter(DatasetFilterConfig(source=["sums", "products"]))
    assert [chosen.reason_to_drop(row(), name) for name in ("sums", "products", "cases")] == [None, None, "source"]
    assert DatasetFilter(DatasetFilterConfig()).reason_to_drop(row(), "cases") is None
