"""A batch fills as fast as a list schedule that is told everything beforehand: replacements run at once, and in parallel."""

from __future__ import annotations

import pytest
from benchmarks.fill_time import BATCH, MOST, SIZE, WORKERS, Realised, fill_time, list_schedule


class Given:
    """Times and verdicts that can be checked by hand."""

    def __init__(self, seconds: float, dropped: set[int]) -> None:
        self._seconds = seconds
        self._dropped = dropped

    def seconds(self, group: int, member: int) -> float:
        return self._seconds

    def is_dropped(self, group: int) -> bool:
        return group in self._dropped


@pytest.mark.parametrize(("dropped", "fills_after"), [(set(), 8.0), ({0}, 9.0), ({0, 64}, 10.0), ({63}, 9.0)])
def test_the_yardstick_by_hand(dropped: set[int], fills_after: float) -> None:
    """64 workers do 8 groups a second. Group 0 is judged after the first one: its replacement waits behind all others."""
    assert (WORKERS, BATCH, SIZE) == (64, 64, 8)
    assert list_schedule(Given(1.0, dropped)) == fills_after  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_fills_as_fast_as_a_list_schedule(seed: int) -> None:
    assert 1.0 <= fill_time(seed) / list_schedule(Realised(seed)) <= MOST
