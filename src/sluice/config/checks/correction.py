"""Rules of the train-infer correction: bounds, filters without effect, and what cannot be corrected."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.config.checks.finding import Finding
from sluice.config.correction import CorrectionFilterConfig, TrainInferCorrectionConfig, preset
from sluice.config.problems import KeyPath


def check_correction(config: TrainInferCorrectionConfig, path: KeyPath = ()) -> Iterator[Finding]:
    """What of these settings cannot hold. path: where they stand."""
    for index, chosen in enumerate(config.filters):
        yield from _check_filter(chosen, (*path, "filters", index))
    weighted = [name for name in config.presets if preset(name)[0].enabled]
    if len(weighted) > 1 and not config.is_weight.enabled:
        yield Finding(
            path=(*path, "presets"),
            reads=((*path, "is_weight"),),
            message=f"expected at most one preset with a weight, got {' and '.join(weighted)} - delete one, or give is_weight",
        )
    for index, name in enumerate(config.presets):
        if name in config.presets[:index]:
            yield Finding(path=(*path, "presets", index), message=f"expected each preset once, got {name} twice - delete one")


def _check_filter(chosen: CorrectionFilterConfig, path: KeyPath) -> Iterator[Finding]:
    for kind, low, high in (("ratio", chosen.ratio_low, chosen.ratio_high), ("diff", chosen.diff_low, chosen.diff_high)):
        if low is not None and high is not None and low > high:
            yield Finding(
                path=(*path, f"{kind}_low"),
                reads=((*path, f"{kind}_high"),),
                message=f"must not be above {kind}_high ({high:g}), got {low:g} - swap them or set one to null",
            )
    if not chosen.enabled:
        return
    if not chosen.ratio_enabled and not chosen.diff_enabled:
        yield Finding(
            path=(*path, "enabled"),
            reads=((*path, "ratio_enabled"), (*path, "diff_enabled")),
            message="has no effect because ratio_enabled and diff_enabled are false - enable one, or set enabled to false",
        )
    for kind, is_on, bounds in (
        ("ratio", chosen.ratio_enabled, (chosen.ratio_low, chosen.ratio_high)),
        ("diff", chosen.diff_enabled, (chosen.diff_low, chosen.diff_high)),
    ):
        if is_on and bounds == (None, None):
            yield Finding(
                path=(*path, f"{kind}_enabled"),
                reads=((*path, f"{kind}_low"), (*path, f"{kind}_high")),
                message=f"has no effect because {kind}_low and {kind}_high are null - give one, or set {kind}_enabled to false",
            )
    if chosen.rejects == "sequence" and chosen.agg_type in ("geometric", "sequence"):
        yield Finding(
            path=(*path, "rejects"),
            reads=((*path, "agg_type"),),
            message=f"has no effect because agg_type is {chosen.agg_type}, which judges whole rows anyway - delete it",
        )
