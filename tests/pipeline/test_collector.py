"""The collector's settings hold inside, and are put back on every way out."""

from __future__ import annotations

import gc

import pytest

from sluice.pipeline.collector import THRESHOLDS, calm_garbage_collector


def test_the_settings_hold_inside_and_are_put_back_also_after_an_error() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    seen = []

    def fail_inside() -> None:
        with calm_garbage_collector():
            seen.append((gc.get_threshold(), gc.get_freeze_count() > frozen))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert seen == [(THRESHOLDS, True)]
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_what_existed_before_may_stay_out_of_sight_afterwards() -> None:
    with calm_garbage_collector(thaw=False):
        pass
    assert gc.get_freeze_count() > 0
    with calm_garbage_collector():
        pass
    assert gc.get_freeze_count() == 0


def test_cycles_are_still_collected_inside() -> None:
    with calm_garbage_collector():
        for _ in range(THRESHOLDS[0] * 3):
            cycle: list[object] = []
            cycle.append(cycle)
        assert len(gc.get_objects(generation=0)) < THRESHOLDS[0] * 2
