"""What a run is told: reads a configuration, and refuses it while loading rather than at step 400.

    models.py     every key, its type, its default and its meaning: of every run, and of an RLVR run
    section.py    what all sections have in common
    correction.py the keys of the train-infer correction, and its presets
    agentic.py    the keys of an agentic run
    gate.py       the keys of its gate
    pipelines.py  which kinds of runs there are
    load.py       from a YAML file and overrides to a checked configuration, and back to YAML
    reading.py    YAML into plain data, with the line of every key
    overrides.py  settings from the command line
    explain.py    what the models refused, in the words of the configuration
    checks/       rules across keys: contradictions, and settings without effect
    problems.py   one problem, and all of them as one error

To add a key, write it into its model with a default and one line on its meaning. If another key can make it idle or impossible, add
the rule to the file of `checks/` that is about it.
"""

from __future__ import annotations

from sluice.config.agentic import (
    AgenticConfig,
    AgenticValidationConfig,
    DialogueConfig,
    EnvironmentConfig,
    EnvManagerConfig,
    EnvMonitorConfig,
)
from sluice.config.correction import CorrectionFilterConfig, IsWeightConfig, TrainInferCorrectionConfig
from sluice.config.gate import FutilityConfig, GateConfig
from sluice.config.load import check_config, load_config, parse_config, to_yaml
from sluice.config.models import (
    AdvantageConfig,
    DatasetFilterConfig,
    EngineConfig,
    FilterConfig,
    GuardConfig,
    LoraConfig,
    ModelConfig,
    RecordsConfig,
    ResamplingConfig,
    RewardConfig,
    RewardPoolConfig,
    RlvrConfig,
    RunConfig,
    TasksConfig,
    TaskSourceConfig,
    TrainerConfig,
    ValidationConfig,
    VerifierConfig,
)
from sluice.config.pipelines import AnyConfig

__all__ = [
    "AdvantageConfig",
    "AgenticConfig",
    "AgenticValidationConfig",
    "AnyConfig",
    "CorrectionFilterConfig",
    "DatasetFilterConfig",
    "DialogueConfig",
    "EngineConfig",
    "EnvManagerConfig",
    "EnvMonitorConfig",
    "EnvironmentConfig",
    "FilterConfig",
    "FutilityConfig",
    "GateConfig",
    "GuardConfig",
    "IsWeightConfig",
    "LoraConfig",
    "ModelConfig",
    "RecordsConfig",
    "ResamplingConfig",
    "RewardConfig",
    "RewardPoolConfig",
    "RlvrConfig",
    "RunConfig",
    "TaskSourceConfig",
    "TasksConfig",
    "TrainInferCorrectionConfig",
    "TrainerConfig",
    "ValidationConfig",
    "VerifierConfig",
    "check_config",
    "load_config",
    "parse_config",
    "to_yaml",
]
