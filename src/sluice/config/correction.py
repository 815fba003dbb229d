"""Settings of the train-infer correction: which tokens leave the loss, how the others are weighted, and named combinations of both.

The ratio is always p_train / p_inference of the sampled token: `old_logprobs` (the trainer's, at the start of the step) minus
`inference_logprobs` (the sampler's), then exp. Above 1 the trainer finds the token likelier than the sampler did.
Names and defaults of `is_weight` and `filters` are those of ROLL's `train_infer_correction`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal, get_args

from pydantic import Field

from sluice.config.section import Section

Level = Literal["token", "segment", "geometric", "sequence"]
"""Over what log ratios are taken together before exp: each by itself; the mean over each contiguous run of the mask; the mean, or the
sum, over the whole row."""

LEVELS: Final[tuple[Level, ...]] = get_args(Level)

PresetName = Literal[
    "token_tis", "sequence_tis", "token_mis", "sequence_mis", "icepop", "geometric_rejection", "token_veto", "diagnostics"
]  # fmt: skip

TRUNCATION: Final = 2.0  # largest weight of truncated and masked importance sampling: what verl and ms-swift begin with
ICEPOP_BAND: Final = (0.5, 5.0)  # the band of the IcePop report
GEOMETRIC_BAND: Final = (0.99, 1.01)  # a mean of 1 % a token; the bands in use lie between 0.1 % and 1 %
VETO_RATIO: Final = 1e-4  # verl's recommendation for its veto


class IsWeightConfig(Section):
    """The importance weight of a token in the loss: the ratio of its level, cut off at `upper_bound`."""

    enabled: bool = False
    weight_type: Level = "token"
    upper_bound: float | None = Field(default=1.2, gt=0)  # None: no bound
    detach: bool = True  # false: gradients flow through the weight


class CorrectionFilterConfig(Section):
    """Bounds, all inclusive, outside of which a token, segment or row leaves the loss."""

    enabled: bool = False
    agg_type: Level = "token"
    ratio_enabled: bool = True
    ratio_low: float | None = Field(default=0.8, ge=0)  # p_train / p_inference; None: no bound
    ratio_high: float | None = Field(default=1.2, ge=0)
    diff_enabled: bool = False
    diff_low: float | None = -0.2  # p_train - p_inference, taken together without exp; None: no bound
    diff_high: float | None = 0.2
    rejects: Literal["unit", "sequence"] = "unit"  # what leaves: the token, segment or row itself, or the whole row around it


class TrainInferCorrectionConfig(Section):
    """What to do about tokens to which trainer and sampler give different probabilities. With nothing enabled it only measures."""

    presets: list[PresetName] = Field(default_factory=list)  # named combinations, besides what follows
    is_weight: IsWeightConfig = IsWeightConfig()  # where enabled, instead of a preset's weight
    filters: list[CorrectionFilterConfig] = Field(default_factory=list)  # a token trains when these and those of the presets let it pass
    baseline: Literal["survivors", "all"] = "survivors"  # whether a row that is rejected whole stays in the baseline of its group
    save_every_steps: int | None = Field(default=None, ge=1)  # both log-probs, for `sluice correction report`; None: not

    @property
    def weight(self) -> IsWeightConfig:
        """The weight in force: its own, or that of a preset; one that is not enabled where there is neither."""
        if self.is_weight.enabled:
            return self.is_weight
        weights = [weight for weight, _ in map(preset, self.presets) if weight.enabled]
        return weights[0] if weights else self.is_weight

    @property
    def enabled_filters(self) -> tuple[CorrectionFilterConfig, ...]:
        """The filters in force: those of the presets, then its own."""
        of_presets = [found for _, filters in map(preset, self.presets) for found in filters]
        return tuple(found for found in (*of_presets, *self.filters) if found.enabled)


Parts = tuple[IsWeightConfig, tuple[CorrectionFilterConfig, ...]]
"""What a preset stands for."""


def token_tis() -> Parts:
    """Truncated importance sampling of tokens: each weighted by min(p_train / p_inference, 2). Nothing leaves the loss.

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
    (https://fengyao.notion.site/off-policy-rl); the truncation is that of Ionides 2008, "Truncated Importance Sampling".
    """
    return _weight("token"), ()


def sequence_tis() -> Parts:
    """Truncated importance sampling of sequences: all tokens of a row weighted by min(product of p_train / p_inference, 2).

    Source: Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"
    (https://richardli.xyz/rl-collapse).
    """
    return _weight("sequence"), ()


def token_mis() -> Parts:
    """Masked importance sampling of tokens: weighted by p_train / p_inference, and out of the loss where that is above 2.

    Source: Liu et al. 2025, as `sequence_tis`; its form for single tokens.
    """
    return _weight("token"), (_ratio("token", None, TRUNCATION),)


def sequence_mis() -> Parts:
    """Masked importance sampling of sequences: as `token_mis`, with the product of p_train / p_inference over the row, which leaves the
    loss as a whole.

    Source: Liu et al. 2025, as `sequence_tis`.
    """
    return _weight("sequence"), (_ratio("sequence", None, TRUNCATION),)


def icepop() -> Parts:
    """Band-zero: a token is weighted by p_train / p_inference inside [0.5, 5], and out of the loss outside.

    Source: Zhao et al. 2025, "Small Leak Can Sink a Great Ship - Boost RL Training on MoE with IcePop!" (https://ringtech.notion.site/icepop).
    There a token outside has weight 0 and still counts where the loss is averaged; here it leaves the average as well.
    """
    low, high = ICEPOP_BAND
    return _weight("token", high), (_ratio("token", low, high),)


def geometric_rejection() -> Parts:
    """A row leaves the loss when the geometric mean of its p_train / p_inference is outside [0.99, 1.01]. It does not depend on the length.

    Source: Liu et al. 2025, as `sequence_tis`, part 3; also the mean of k1 per sequence, which is minus the logarithm of this ratio.
    """
    return IsWeightConfig(), (_ratio("geometric", *GEOMETRIC_BAND),)


def token_veto() -> Parts:
    """A row leaves the loss when p_train / p_inference of a single token is below 1e-4: the trainer would hardly ever have sampled it.

    Source: Liu et al. 2025, as `sequence_tis`, and verl's rollout correction, `rollout_token_veto_threshold`.
    """
    return IsWeightConfig(), (_ratio("token", VETO_RATIO, None, rejects="sequence"),)


def diagnostics() -> Parts:
    """Nothing leaves the loss and nothing is weighted: the divergence is only measured, with three estimates of KL(inference || train).

    With r = p_train / p_inference of tokens that the inference engine sampled: k1 = -log r (unbiased, may be negative), k2 = (log r)^2 / 2
    (low variance, biased), k3 = r - 1 - log r (unbiased, never negative). They are recorded under every setting; this preset has
    nothing else. Source: Schulman 2020, "Approximating KL Divergence" (http://joschu.net/blog/kl-approx.html).
    """
    return IsWeightConfig(), ()


PRESETS: Final[Mapping[str, Callable[[], Parts]]] = {
    made.__name__: made for made in (token_tis, sequence_tis, token_mis, sequence_mis, icepop, geometric_rejection, token_veto, diagnostics)
}
"""Name of a preset -> what it stands for."""


def preset(name: str) -> Parts:
    """Weight and filters of a preset."""
    return PRESETS[name]()


def _weight(level: Level, upper_bound: float = TRUNCATION) -> IsWeightConfig:
    return IsWeightConfig(enabled=True, weight_type=level, upper_bound=upper_bound)


def _ratio(level: Level, low: float | None, high: float | None, rejects: Literal["unit", "sequence"] = "unit") -> CorrectionFilterConfig:
    return CorrectionFilterConfig(enabled=True, agg_type=level, ratio_low=low, ratio_high=high, rejects=rejects)
