"""The learned rule: what boosted trees make of what a trajectory and a group have shown, and how far that can be trusted.

Two models of boosted trees (`boosting.py`) read what is shown (`traces.py`). The first one tells of a running member the chance that it
earns anything more. The second one tells of a group the chance that all its rewards are equal, from what the group shows and from the first
one's chances. Each has a calibration (`calibration.py`). `fitting.py` makes it, `sequential.py` cuts groups with it, and `LearnedFutility`
stops single trajectories.

The surprising part: its bounds hold for groups like those that it was fitted on. A policy that learns moves away from them, and only audits
see it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sluice.errors import ConfigError
from sluice.gate.boosting import Trees
from sluice.gate.calibration import Calibration
from sluice.gate.rules import check_share
from sluice.gate.traces import Look, MemberTrace, Step, check_inputs, group_features, member_features
from sluice.gate.values import is_finite_number
from sluice.types import EMPTY

Floats = npt.NDArray[np.float64]

SCHEMA: Final = 1
"""Version of the file of a rule."""

OF_CHANCES: Final = ("none_earns", "all_earn", "earns_least", "earns_mean", "earns_most")
"""What the second model reads of the first one's chances: the log of the chance that no running member earns anything more, the log of the
chance that all do, and the lowest, mean and highest chance of a member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a look comes to."""

    score: float  # of the model
    chance: float  # of being right, calibrated
    bound: float  # lower bound of the share that is right of those that ever get such a score


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnedRule:
    """A fitted rule. It fits groups of one size and one horizon, with these inputs of every step, and refuses others."""

    inputs: tuple[str, ...]
    horizon: int
    group_size: int
    steps: tuple[int, ...]  # environment steps after which a group is looked at
    futility_floor: float | None  # that of the futility stop under which it was fitted; None: none
    member_model: Trees
    member_calibration: Calibration  # of the score 1 - chance that a member earns more
    group_model: Trees
    group_calibration: Calibration  # of the score: the chance of equal rewards
    provenance: Mapping[str, Any] = field(default_factory=lambda: EMPTY)  # what it was fitted on, and how well it did; plain data

    def of_group(self, look: Look) -> Score:
        """The score of an open group: one in which somebody still runs."""
        chances = self.member_model.chances(look.of_members)
        row = np.concatenate([look.of_group, of_chances(chances)])
        score = float(self.group_model.chances(row[None])[0])
        calibration = self.group_calibration
        return Score(score=score, chance=calibration.chance(score), bound=calibration.bound(score))

    def of_member(self, features: tuple[float, ...]) -> Score:
        """The score of a running member that it earns nothing more."""
        score = 1.0 - float(self.member_model.chances(np.array([features]))[0])
        calibration = self.member_calibration
        return Score(score=score, chance=calibration.chance(score), bound=calibration.bound(score))

    def check(self, group_size: int | None, horizon: int, key: str = "gate.model") -> None:
        """Refuse groups that it was not fitted for. key: of the setting that chose it. Raises `ConfigError`."""
        for name, own, given in (("group_size", self.group_size, group_size), ("horizon", self.horizon, horizon)):
            if given is not None and own != given:
                raise ConfigError(
                    f"{key}: expected groups as those it was fitted on, with {name} {own}, got {given} - fit it on recordings of such "
                    "groups"
                )

    def as_data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "schema": SCHEMA,
            "inputs": [*self.inputs],
            "horizon": self.horizon,
            "group_size": self.group_size,
            "steps": [*self.steps],
            "futility_floor": self.futility_floor,
            "member_features": [*member_features(self.inputs)],
            "group_features": [*group_features(self.inputs), *OF_CHANCES],
            "member_model": self.member_model.as_data(),
            "member_calibration": self.member_calibration.as_data(),
            "group_model": self.group_model.as_data(),
            "group_calibration": self.group_calibration.as_data(),
            "provenance": dict(self.provenance),
        }

    def save(self, path: Path | str) -> None:
        """Write it as JSON."""
        Path(path).write_text(self._text, encoding="utf-8")

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same rule only."""
        return blake2b(self._text.encode(), digest_size=8).hexdigest()

    @cached_property
    def _text(self) -> str:
        return json.dumps(self.as_data(), allow_nan=False)

    @classmethod
    def load(cls, path: Path | str, key: str = "gate.model") -> LearnedRule:
        """Read it back. key: of the setting that names the file.

        Raises `ConfigError` for a file that is none, is torn, or is of another version or other features.
        """
        path = Path(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{key}: expected a file, got {path}: {error.strerror or error} - check the path") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{key}: expected JSON in {path}, got {error} - fit and save the rule again") from None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise ConfigError(f"{key}: expected a rule of schema {SCHEMA} in {path}, got {found!r} - fit it with this version of Sluice")
        try:
            rule = _read(cls, data)
            rule.fingerprint  # noqa: B018 - it is plain data, or cannot be saved again
        except (KeyError, TypeError, ValueError) as error:  # our own errors are ValueErrors too
            raise ConfigError(f"{key}: expected a whole rule in {path}, got: {error} - fit and save it again") from None
        return rule


class LearnedFutility:
    """Stops a trajectory as soon as the lower bound that it earns nothing more clears `floor`: a rule for `FutilityKeeper`.

    Raises `ConfigError` for a floor that no score clears, and for a horizon that is not that of the rule.
    """

    reason: Final = "predicted_futile"

    def __init__(self, rule: LearnedRule, *, floor: float = 0.95, horizon: int | None = None) -> None:
        rule.check(None, rule.horizon if horizon is None else horizon, "gate.futility.model")
        self.rule: Final = rule
        self.floor: Final = floor
        self.threshold: Final = threshold(rule.member_calibration, floor, "gate.futility.floor")

    @property
    def name(self) -> str:
        """What the records of its audits depend on."""
        return f"learned futility {self.rule.fingerprint} floor={self.floor}"

    def watch(self, first_observation: Hashable = None, first_progress: float | None = None) -> _Watch:
        """For one trajectory."""
        return _Watch(self, MemberTrace(self.rule.horizon, self.rule.inputs, first_observation))

    def stop_of(self, steps: Sequence[Step], first_observation: Hashable = None, first_progress: float | None = None) -> int | None:
        """The first step, from 1, at which a recorded trajectory is stopped; None: never."""
        if not steps:
            return None
        trace = MemberTrace(self.rule.horizon, self.rule.inputs, first_observation)
        scores = 1.0 - self.rule.member_model.chances(np.array([trace.add(step) for step in steps]))
        found = np.flatnonzero(scores >= self.threshold)
        return int(found[0]) + 1 if len(found) else None


class _Watch:
    """Of one trajectory."""

    def __init__(self, futility: LearnedFutility, trace: MemberTrace) -> None:
        self._futility = futility
        self._trace = trace

    def step(self, step: Step) -> str | None:
        """Why it is stopped after this step, or None."""
        futility = self._futility
        score = futility.rule.of_member(self._trace.add(step)).score
        return futility.reason if score >= futility.threshold else None


def threshold(calibration: Calibration, floor: float, key: str = "gate.floor") -> float:
    """The score from which on a floor is cleared. key: of the setting. Raises `ConfigError` where none does."""
    check_share(key, floor, "it is the least share of decisions that are right")
    found = calibration.threshold(floor)
    if math.isinf(found) or not floor:
        raise ConfigError(
            f"{key}: expected more than 0 and at most {calibration.most:.3f}, the highest lower bound of this rule, got {floor} - "
            "lower the floor, or fit on more recorded groups"
        )
    return found


def of_chances(chances: Floats) -> Floats:
    """[5] `OF_CHANCES` of the chances of at least one member [R]."""
    none, every = math.fsum(np.log1p(-chances).tolist()), math.fsum(np.log(chances).tolist())
    return np.array([none, every, chances.min(), math.fsum(chances.tolist()) / len(chances), chances.max()])


def _whole(name: str, value: Any) -> int:
    if type(value) is not int or value < 2:
        raise ValueError(f"{name}: expected a whole number >= 2, got {value!r}")
    return value


def _read(cls: type[LearnedRule], data: Mapping[str, Any]) -> LearnedRule:
    inputs = check_inputs(data["inputs"])
    expected = {"member_features": member_features(inputs), "group_features": (*group_features(inputs), *OF_CHANCES)}
    for name, own in expected.items():
        if tuple(data[name]) != own:
            raise ValueError(f"{name} {', '.join(map(str, data[name]))} where this version has {', '.join(own)}")
    of_member, of_group = Trees.from_data(data["member_model"]), Trees.from_data(data["group_model"])
    for model, names in zip((of_member, of_group), expected.values(), strict=True):
        if model.columns != len(names):
            raise ValueError(f"trees over {model.columns} features instead of {len(names)}")
    horizon, group_size = (_whole(name, data[name]) for name in ("horizon", "group_size"))
    steps, floor = data["steps"], data["futility_floor"]
    are_steps = isinstance(steps, list) and all(type(step) is int for step in steps)
    if not are_steps or not steps or steps != sorted({*steps}) or steps[0] < 1 or steps[-1] >= horizon:
        raise ValueError(f"steps: expected ascending steps from 1 to {horizon - 1}, got {steps!r}")
    if floor is not None and (not is_finite_number(floor) or not 0 < floor < 1):
        raise ValueError(f"futility_floor: expected a number > 0 and < 1, or null, got {floor!r}")
    return cls(
        inputs=inputs,
        horizon=horizon,
        group_size=group_size,
        steps=tuple(steps),
        futility_floor=None if floor is None else float(floor),
        provenance={**data["provenance"]},
        member_model=of_member,
        group_model=of_group,
        member_calibration=Calibration.from_data(data["member_calibration"]),
        group_calibration=Calibration.from_data(data["group_calibration"]),
    )
