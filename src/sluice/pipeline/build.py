"""From a configuration to the job of its pipeline."""

from __future__ import annotations

from collections.abc import Callable

from sluice.config import AgenticConfig, RlvrConfig
from sluice.pipeline.job import Job


def build_job(config: RlvrConfig | AgenticConfig, phase: Callable[[str], None]) -> Job:
    """Build everything that a run is made of. phase: told what is under way. Whoever gets the job closes its engine.

    Raises:
        ConfigError, TaskError: a setting or the data are wrong.
    """
    if isinstance(config, AgenticConfig):
        from sluice.pipeline.agentic import AgenticJob

        return AgenticJob.build(config, phase)
    from sluice.pipeline.rlvr import RlvrJob

    return RlvrJob.build(config, phase)
