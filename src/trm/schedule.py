"""Schedules of training: pure functions of the step, counted from 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from trm.arrays import IntArray
from trm.config import AnyModelConfig, PhaseConfig, TrainingConfig
from trm.slots import Purpose, uniforms

T = TypeVar("T")


def learning_rate_factor(step: int, training: TrainingConfig) -> float:
    """Linear warm-up, then half a cosine down to `lr_min_ratio`; each phase multiplies it by its factor."""
    phase = phase_of_step(step, training)
    factor = _warmup_and_decay(step, training)
    return factor if phase is None else phase.learning_rate_factor * factor


def _warmup_and_decay(step: int, training: TrainingConfig) -> float:
    if step < training.warmup_steps:
        return step / training.warmup_steps
    last_step = value_at(training.last_steps, step)
    progress = (step - training.warmup_steps) / max(1, last_step - training.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return training.lr_min_ratio + (1 - training.lr_min_ratio) * cosine


def phase_of_step(step: int, training: TrainingConfig) -> PhaseConfig | None:
    """Return the phase that this step belongs to; None before the first step, and without phases."""
    return value_at(training.phase_starts, step) if training.phases and step else None


def word_dropout_of_step(step: int, training: TrainingConfig) -> float:
    phase = phase_of_step(step, training)
    own = None if phase is None else phase.word_dropout
    return training.word_dropout if own is None else own


def label_smoothing_of_step(step: int, training: TrainingConfig) -> float:
    phase = phase_of_step(step, training)
    own = None if phase is None else phase.label_smoothing
    return training.label_smoothing if own is None else own


def value_at(schedule: Mapping[int, T], step: int) -> T:
    """Return the value of the last entry that starts before this step."""
    return schedule[max(start for start in schedule if start < step)]


def cycles_of_step(step: int, model: AnyModelConfig, training: TrainingConfig, seed: int) -> int:
    """Return the number of recursions in this step.

    Terminal supervision draws one number for the whole step, so that neither micro-batches nor ranks can
    make two slots of a step differ.
    """
    return int(cycles_of_steps(range(step, step + 1), model, training, seed)[0])


def cycles_of_steps(steps: range, model: AnyModelConfig, training: TrainingConfig, seed: int) -> IntArray:
    """Return the number of recursions in each of these steps."""
    if training.supervision == "deep":
        return np.full(len(steps), model.cycles_per_step)
    deepest = np.array([value_at(training.depths, step) for step in steps])
    drawn = uniforms(seed, Purpose.DEPTH, np.asarray(steps)) * deepest
    cycles: IntArray = 1 + drawn.astype(np.int64)
    return cycles


def typical_cycles(model: AnyModelConfig, training: TrainingConfig) -> int:
    """Return the recursions of a typical step, late in the schedule: the median where they are drawn."""
    if training.supervision == "deep":
        return model.cycles_per_step
    return (1 + max(training.depths.values())) // 2
