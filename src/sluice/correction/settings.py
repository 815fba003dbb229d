"""From whatever names the settings to settings that hold, and to the bands that tokens, runs and rows are compared with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from sluice.config.checks.correction import check_correction
from sluice.config.correction import LEVELS, CorrectionFilterConfig, Level, TrainInferCorrectionConfig
from sluice.config.explain import explain
from sluice.config.problems import Places, Problem, error
from sluice.correction.levels import MOST_LOG

Kind = Literal["ratio", "diff"]

KINDS: Final[tuple[Kind, ...]] = ("ratio", "diff")

SECTION: Final = "train_infer_correction"
ROUNDING_STEPS: Final = 4  # of the type of the log-probs: so far beyond a bound a value still counts as on it, since bounds are inclusive


def read_settings(settings: Any) -> TrainInferCorrectionConfig:
    """The settings in a `TrainInferCorrectionConfig`, a mapping of the same keys, an object with the same attributes, or a whole
    configuration that has a `train_infer_correction`. None: nothing is enabled.

    Raises:
        ConfigError: an unknown key, level or preset, bounds the wrong way round, a filter without effect. It names the key.
    """
    if settings is None:
        return TrainInferCorrectionConfig()
    settings = getattr(settings, SECTION, settings)
    if isinstance(settings, TrainInferCorrectionConfig):
        config = settings
    else:
        data = _plain(settings, TrainInferCorrectionConfig)
        try:
            config = TrainInferCorrectionConfig.model_validate(data)
        except ValidationError as refused:
            raise error(explain(TrainInferCorrectionConfig, refused, data), Places(source=SECTION)) from None
    problems = [Problem(path=finding.path, message=finding.message) for finding in check_correction(config)]
    if problems:
        raise error(problems, Places(source=SECTION))
    return config


def _plain(settings: Any, model: type[BaseModel]) -> Any:
    """Settings as mappings and lists. Objects are read by the names of the model; what is neither is left for the model to refuse."""
    if isinstance(settings, Mapping):
        return {name: _part(value, model, str(name)) for name, value in settings.items()}
    found = {name: getattr(settings, name) for name in model.model_fields if hasattr(settings, name)}
    return {name: _part(value, model, name) for name, value in found.items()} if found else settings


def _part(value: Any, model: type[BaseModel], name: str) -> Any:
    from sluice.config.correction import IsWeightConfig

    if model is TrainInferCorrectionConfig and name == "is_weight":
        return _plain(value, IsWeightConfig)
    if model is TrainInferCorrectionConfig and name == "filters" and isinstance(value, Iterable):
        return [_plain(one, CorrectionFilterConfig) for one in value]
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Where a logarithm of a ratio, or a difference, may lie; up to rounding both ends belong to it."""

    low: float = -math.inf
    high: float = math.inf

    def contains(self, values: Tensor) -> Tensor:
        """Which values it holds. Bool, of the shape of `values`"""
        return (values >= self.low) & (values <= self.high)

    def weights(self, values: Tensor) -> Tensor:
        """The same as 1 and 0 in the type of the values, which is several times faster than comparing."""
        return values.clamp(self.low, self.high).eq_(values)

    @property
    def holds_agreement(self) -> bool:
        """Whether it holds 0: two engines that agree."""
        return self.low <= 0 <= self.high

    def __neg__(self) -> Band:
        return Band(low=-self.high, high=-self.low)

    def __and__(self, other: Band) -> Band:
        return Band(low=max(self.low, other.low), high=min(self.high, other.high))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bands:
    """All enabled filters: of each level and kind what they come to together."""

    unit: Mapping[tuple[Level, Kind], Band]  # what is outside leaves the loss; a row, of the levels `geometric` and `sequence`
    veto: Mapping[tuple[Level, Kind], Band]  # of tokens and segments: where one is outside the row leaves the loss

    @classmethod
    def of(cls, filters: Iterable[CorrectionFilterConfig], dtype: torch.dtype) -> Bands:
        """The bands of filters on log-probs of this type."""
        unit: dict[tuple[Level, Kind], Band] = {}
        veto: dict[tuple[Level, Kind], Band] = {}
        for chosen in filters:
            target = veto if chosen.rejects == "sequence" else unit
            for kind in KINDS:
                if getattr(chosen, f"{kind}_enabled"):
                    key = (chosen.agg_type, kind)
                    target[key] = target.get(key, Band()) & _band(chosen, kind, dtype)
        return cls(unit=unit, veto=veto)


def _band(chosen: CorrectionFilterConfig, kind: Kind, dtype: torch.dtype) -> Band:
    low, high = getattr(chosen, f"{kind}_low"), getattr(chosen, f"{kind}_high")
    if kind == "ratio":  # ratios are taken within e^-20 and e^20: a bound beyond never binds, or always
        low, high = _log(low), _log(high)
        low = None if low is None or low <= -MOST_LOG else math.inf if low > MOST_LOG else low
        high = None if high is None or high >= MOST_LOG else -math.inf if high < -MOST_LOG else high
    slack = ROUNDING_STEPS * torch.finfo(dtype).eps
    return Band(low=-math.inf if low is None else low - slack, high=math.inf if high is None else high + slack)


def _log(bound: float | None) -> float | None:
    return None if bound is None else -math.inf if bound == 0 else math.log(bound)


__all__ = ["KINDS", "LEVELS", "SECTION", "Band", "Bands", "Kind", "Level", "read_settings"]
