"""What changes over training: pure functions of the step, counted from 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from trm.config import ModelConfig, TrainingConfig
from trm.slots import Purpose, uniforms

T = TypeVar("T")


def learning_rate_factor(step: int, training: TrainingConfig) -> float:
    """Linear warm-up, then half a cosine down to `lr_min_ratio`."""
    if step < training.warmup_steps:
        return step / training.warmup_steps
    last_step = value_at(training.last_steps, step)
    progress = (step - training.warmup_steps) / max(1, last_step - training.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return training.lr_min_ratio + (1 - training.lr_min_ratio) * cosine


def value_at(schedule: Mapping[int, T], step: int) -> T:
    """Return the value of the last entry that starts before this step."""
    return schedule[max(start for start in schedule if start < step)]


def cycles_of_step(step: int, model: ModelConfig, training: TrainingConfig, seed: int) -> int:
    """Return the number of recursions in this step.

    Terminal supervision draws one number for the whole step, so that neither micro-batches nor ranks can
    make two slots of a step differ.
    """
    if training.supervision == "deep":
        return model.cycles_per_step
    deepest = value_at(training.depths, step)
    return 1 + int(uniforms(seed, Purpose.DEPTH, step) * deepest)


def typical_cycles(model: ModelConfig, training: TrainingConfig) -> int:
    """Return the recursions of a typical step, late in the schedule: the median where they are drawn."""
    if training.supervision == "deep":
        return model.cycles_per_step
    return (1 + max(training.depths.values())) // 2
