"""What is done about tokens to which the trainer and the sampler give different probabilities: they leave the loss, or are weighted.

It drops no rollout and samples nothing anew; the one room among those that decide which computes with torch. The ratio is
p_train / p_inference everywhere.

- `levels.py`: the divergence of tokens, runs of the mask and rows
- `settings.py`: settings that hold, and the bands that they stand for (the models are in `sluice.config.correction`)
- `tensors.py`: whether log-probs and masks fit together
- `tokens.py`: filters and weights of single tokens, stretch by stretch; `compute.py`: all of it, and what runs and rows decide
- `metrics.py`: the sums that come of it, under the names that ROLL has
- `apply.py`: a whole batch, by the names that ROLL has
- `saved.py`: batches in files; `report.py`: what there is to see in them before thresholds are chosen

To add a preset, write a function in `sluice.config.correction` that answers with a weight and filters, and name it in `PresetName` and
`PRESETS` there. A new level is an entry of `Level`, its values in `Divergence`, and its way back to tokens in `compute.py`.
"""

from __future__ import annotations

from sluice.config.correction import PRESETS, CorrectionFilterConfig, IsWeightConfig, TrainInferCorrectionConfig
from sluice.correction.apply import apply_train_infer_correction
from sluice.correction.compute import compute_train_infer_correction
from sluice.correction.metrics import CorrectionMetrics
from sluice.correction.report import DivergenceReport, report_on
from sluice.correction.saved import SavedBatch, load_batches, save_batch
from sluice.correction.settings import read_settings

__all__ = [
    "PRESETS",
    "CorrectionFilterConfig",
    "CorrectionMetrics",
    "DivergenceReport",
    "IsWeightConfig",
    "SavedBatch",
    "TrainInferCorrectionConfig",
    "apply_train_infer_correction",
    "compute_train_infer_correction",
    "load_batches",
    "read_settings",
    "report_on",
    "save_batch",
]
