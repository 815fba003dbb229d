"""What a room logs reaches the run, and nothing stays behind."""

from __future__ import annotations

import logging

from sluice.pipeline.log_to_run import LogToRun


def test_warnings_of_our_loggers_are_told_once_and_not_passed_on() -> None:
    told: list[str] = []
    logger = logging.getLogger("sluice.filters.mean_filter")
    with LogToRun(told.append):
        logger.warning("a band drops a group with spread: mean %.1f", 0.5)
        logger.info("not for a person")
        logging.getLogger("other").warning("not ours")
    logger.warning("after the run")
    assert told == ["a band drops a group with spread: mean 0.5"]
    assert logging.getLogger("sluice").propagate
