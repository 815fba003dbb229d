from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sluice.correction import TrainInferCorrectionConfig, read_settings
from sluice.correction.settings import Bands
from sluice.errors import ConfigError
from tests.config.recipes import problems_of


def refused(settings: Any) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        read_settings(settings)
    return [problem.removeprefix("train_infer_correction: ") for problem in problems_of(raised.value)]


def test_defaults_are_those_of_roll_and_do_nothing() -> None:
    config = read_settings({"filters": [{}]})
    assert config == read_settings(config)
    (chosen,) = config.filters
    assert (chosen.enabled, chosen.agg_type, chosen.ratio_enabled, chosen.ratio_low, chosen.ratio_high) == (False, "token", True, 0.8, 1.2)
    assert (chosen.diff_enabled, chosen.diff_low, chosen.diff_high) == (False, -0.2, 0.2)
    weight = config.is_weight
    assert (weight.enabled, weight.weight_type, weight.upper_bound, weight.detach) == (False, "token", 1.2, True)
    assert config.baseline == "survivors"
    assert config.enabled_filters == ()
    assert not config.weight.enabled
    assert read_settings(None) == TrainInferCorrectionConfig()


def test_settings_may_be_objects_with_the_same_attributes_or_a_whole_configuration() -> None:
    @dataclass
    class Filter:
        enabled: bool = True
        agg_type: str = "segment"
        ratio_low: float = 0.5

    @dataclass
    class Correction:
        is_weight: Any = field(default_factory=lambda: SimpleNamespace(enabled=True, weight_type="sequence", upper_bound=None))
        filters: tuple[Filter, ...] = (Filter(),)

    config = read_settings(SimpleNamespace(train_infer_correction=Correction()))
    assert config == read_settings(
        {
            "is_weight": {"enabled": True, "weight_type": "sequence", "upper_bound": None},
            "filters": [{"enabled": True, "agg_type": "segment", "ratio_low": 0.5}],
        }
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"filter": []}, "filter: unknown key - did you mean filters?"),
        (
            {"filters": [{"agg_type": "tokens"}]},
            "filters.0.agg_type: expected one of token, segment, geometric, sequence, got 'tokens' (text) - did you mean token?",
        ),
        ({"filters": [{"ratio_hi": 1.0}]}, "filters.0.ratio_hi: unknown key - did you mean ratio_high?"),
        ({"filters": [{"ratio_low": -1.0}]}, "filters.0.ratio_low: expected a number >= 0 or null, got -1.0 (a number)"),
        (
            {"filters": [{"ratio_low": 1.5, "ratio_high": 0.5}]},
            "filters.0.ratio_low: must not be above ratio_high (0.5), got 1.5 - swap them or set one to null",
        ),
        (
            {"filters": [{"diff_low": 0.5, "diff_high": 0.25}]},
            "filters.0.diff_low: must not be above diff_high (0.25), got 0.5 - swap them or set one to null",
        ),
        (
            {"filters": [{"enabled": True, "ratio_enabled": False}]},
            "filters.0.enabled: has no effect because ratio_enabled and diff_enabled are false - enable one, or set enabled to false",
        ),
        (
            {"filters": [{"enabled": True, "ratio_low": None, "ratio_high": None}]},
            "filters.0.ratio_enabled: has no effect because ratio_low and ratio_high are null - give one, or set ratio_enabled to false",
        ),
        (
            {"filters": [{"enabled": True, "agg_type": "sequence", "rejects": "sequence"}]},
            "filters.0.rejects: has no effect because agg_type is sequence, which judges whole rows anyway - delete it",
        ),
        (
            {"presets": ["token_is"]},
            "presets.0: expected one of token_tis, sequence_tis, token_mis, sequence_mis, icepop, geometric_rejection, token_veto, "
            "diagnostics, got 'token_is' (text) - did you mean token_tis?",
        ),
        (
            {"presets": ["token_tis", "icepop"]},
            "presets: expected at most one preset with a weight, got token_tis and icepop - delete one, or give is_weight",
        ),
        ({"presets": ["token_veto", "token_veto"]}, "presets.1: expected each preset once, got token_veto twice - delete one"),
        ({"is_weight": {"upper_bound": 0.0}}, "is_weight.upper_bound: expected a number > 0 or null, got 0.0 (a number)"),
        ({"baseline": "some"}, "baseline: expected one of survivors, all, got 'some' (text) - valid values: all, survivors"),
    ],
)
def test_wrong_settings_are_refused_with_the_key_what_was_expected_and_what_to_do(settings: Any, says: str) -> None:
    assert refused(settings) == [says]


def test_what_are_no_settings_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="train_infer_correction"):
        read_settings(3)


def test_filters_of_a_level_come_to_the_band_that_all_of_them_leave() -> None:
    filters = [
        {"enabled": True, "ratio_low": 0.5, "ratio_high": 3.0},
        {"enabled": True, "ratio_low": 0.25, "ratio_high": 2.0},
        {"enabled": True, "agg_type": "segment", "ratio_low": None, "ratio_high": 1e9, "rejects": "sequence"},
        {"enabled": False, "ratio_low": 0.9, "ratio_high": 1.0},
    ]
    bands = Bands.of(read_settings({"filters": filters}).enabled_filters, torch.float64)
    assert bands.unit.keys() == {("token", "ratio")}
    band = bands.unit["token", "ratio"]
    values = torch.tensor([0.49, 0.5, 1.0, 2.0, 2.01], dtype=torch.float64).log()
    assert band.contains(values).tolist() == [False, True, True, True, False]
    assert band.weights(values).tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert bands.veto["segment", "ratio"].contains(torch.tensor([-1e6, 1e6])).all()  # no ratio is taken beyond e^20


@pytest.mark.parametrize(("low", "high", "holds"), [(1e-10, 1e10, True), (1e10, None, False), (None, 1e-10, False), (None, 0.0, False)])
def test_bounds_beyond_what_a_ratio_can_be_bind_never_or_always(low: float | None, high: float | None, holds: bool) -> None:
    chosen = {"filters": [{"enabled": True, "ratio_low": low, "ratio_high": high}]}
    band = Bands.of(read_settings(chosen).enabled_filters, torch.float32).unit["token", "ratio"]
    assert (band.contains(torch.tensor([-100.0, 0.0, 100.0])) == holds).all()
