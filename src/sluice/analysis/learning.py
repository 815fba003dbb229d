"""From recorded runs to a learned rule: what of a recording can teach it, and on what it is fitted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from sluice.analysis.played import played_groups
from sluice.errors import AnalysisError, ConfigError, GateError, RecordError
from sluice.gate.fitting import fit_learned
from sluice.gate.learned import LearnedRule
from sluice.gate.played import PlayedGroup
from sluice.records.rollout_reader import RecordedGroup, read_rollouts

ALWAYS: Final = ("reply", "logprob")
"""What every recording holds of a step. Progress, and whether an action was admissible, only where the environment says it."""

WHERE_TOLD: Final = ("is_admissible", "progress")


def learn_rule(
    runs: Sequence[Path | str], *, horizon: int | None = None, futility_floor: float | None = None, folds: int = 5, seed: int = 0
) -> LearnedRule:
    """Fit on the groups of recorded runs that ran to their end.

    horizon: most environment steps of a trajectory; None: the longest that was recorded. Raises `AnalysisError` for recordings of single
    responses or of groups of different sizes, and for groups that cannot teach a rule.
    """
    groups: list[PlayedGroup] = []
    policies: list[str] = []
    for run in runs:
        try:
            recording = read_rollouts(run)
            read = list(recording)
        except RecordError as error:
            raise AnalysisError(str(error)) from error
        size = _group_size(read, recording.facts.get("group_size"), run)
        groups += played_groups(read, group_size=size)
        policies.append(str(recording.facts.get("identity", run)))
    if not groups:
        raise AnalysisError(f"{', '.join(map(str, runs))}: expected groups that ran to their end in an environment, got none - record more")
    sizes = {len(group.members) for group in groups}
    if len(sizes) > 1:
        raise AnalysisError(f"expected runs with groups of one size, got sizes {sorted(sizes)} - learn from each apart")
    steps = [step for group in groups for member in group.members for step in member.steps]
    inputs = (*ALWAYS, *(name for name in WHERE_TOLD if all(getattr(step, name) is not None for step in steps)))
    longest = max(len(member.steps) for group in groups for member in group.members)
    try:
        return fit_learned(
            groups,
            horizon=longest if horizon is None else horizon,
            inputs=inputs,
            futility_floor=futility_floor,
            folds=folds,
            seed=seed,
            provenance={"runs": policies},
        )
    except (ConfigError, GateError) as error:
        raise AnalysisError(str(error)) from error


def _group_size(groups: Sequence[RecordedGroup], told: object, run: Path | str) -> int:
    """Of a run: as it says, or that of most of its groups."""
    if isinstance(told, int):
        return told
    if not groups:
        raise AnalysisError(f"{run}: expected recorded groups, got none - record some")
    return Counter(len(group.members) for group in groups).most_common(1)[0][0]
