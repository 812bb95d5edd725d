"""What changes over training: pure functions of the step, counted from 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from trm.batches import Purpose, uniforms
from trm.config import ModelConfig, TrainingConfig

T = TypeVar("T")


def learning_rate_factor(step: int, training: TrainingConfig) -> float:
    """Linear warm-up, then half a cosine down to `lr_min_ratio`."""
    if step < training.warmup_steps:
        return step / training.warmup_steps
    progress = (step - training.warmup_steps) / max(1, training.max_steps - training.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return training.lr_min_ratio + (1 - training.lr_min_ratio) * cosine


def in_force(schedule: Mapping[int, T], step: int) -> T:
    """The value of the last start before this step."""
    return schedule[max(start for start in schedule if start < step)]


def cycles_of_step(step: int, model: ModelConfig, training: TrainingConfig, seed: int) -> int:
    """Recursions in this step. Terminal supervision draws them for the whole step, so no cut and no split
    over machines can make two slots of one step differ."""
    if training.supervision == "deep":
        return model.cycles_per_step
    greatest = in_force(training.depths, step)
    return 1 + int(uniforms(seed, Purpose.DEPTH, step) * greatest)
