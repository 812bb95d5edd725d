"""The recipe: everything that decides what is learned, and the settings beside it.

A recipe is YAML. Unknown keys are refused with a suggestion, and every problem in a file is reported at once.
"""

from trm.config.decoder import DecoderConfig
from trm.config.inference import InferenceConfig
from trm.config.kinds import recursion_of
from trm.config.machine import LimitSettings, PlanSettings
from trm.config.model import ModelConfig
from trm.config.parsing import config_from_text, differences, load_config, parse_section
from trm.config.recipes import find_recipe, shipped_recipes
from trm.config.schedules import CurriculumConfig, EarlyStoppingConfig, PhaseConfig, PlateauConfig
from trm.config.sections import (
    AnyModelConfig,
    CheckpointsConfig,
    DataConfig,
    EvaluationConfig,
    LoadingConfig,
    RunConfig,
    TrainingConfig,
)
from trm.config.values import (
    Count,
    CountOrZero,
    Fraction,
    Positive,
    PositiveOrZero,
    Rate,
    Section,
    did_you_mean,
)

__all__ = [
    "AnyModelConfig",
    "CheckpointsConfig",
    "Count",
    "CountOrZero",
    "CurriculumConfig",
    "DataConfig",
    "DecoderConfig",
    "EarlyStoppingConfig",
    "EvaluationConfig",
    "Fraction",
    "InferenceConfig",
    "LimitSettings",
    "LoadingConfig",
    "ModelConfig",
    "PhaseConfig",
    "PlanSettings",
    "PlateauConfig",
    "Positive",
    "PositiveOrZero",
    "Rate",
    "RunConfig",
    "Section",
    "TrainingConfig",
    "config_from_text",
    "did_you_mean",
    "differences",
    "find_recipe",
    "load_config",
    "parse_section",
    "recursion_of",
    "shipped_recipes",
]
