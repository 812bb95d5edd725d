"""Smaller recipes, which learn something else and need less memory."""

from __future__ import annotations

from collections.abc import Iterator

from macbook_optimization.training_config_adapter import scaled_learning_rate
from trm.config import RunConfig, TrainingConfig

HIDDEN_SIZES = (768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 16)
Smaller = tuple[list[str], RunConfig]  # the changes as overrides, and the recipe with them


def smaller_recipes(config: RunConfig) -> Iterator[Smaller]:
    """List smaller models first, then smaller batches (whose slots carry latents) with a matching rate."""
    for batch in _batches(config):
        changes, training = _with_batch(config, batch)
        base = config.model_copy(update={"training": training})
        if changes:
            yield changes, base
        for hidden_size in HIDDEN_SIZES:
            if hidden_size < config.model.hidden_size:
                named, smaller = _with_hidden_size(base, hidden_size)
                yield changes + named, smaller


def _batches(config: RunConfig) -> list[int]:
    slots = config.training.effective_batch_size
    if config.training.supervision != "deep":
        return [slots]
    return [slots] + [slots // 2**halvings for halvings in range(1, 6) if slots // 2**halvings >= 8]


def _with_batch(config: RunConfig, batch: int) -> tuple[list[str], TrainingConfig]:
    training = config.training
    if batch == training.effective_batch_size:
        return [], training
    scaled = scaled_learning_rate(training.learning_rate, training.effective_batch_size, batch)
    rate = float(f"{scaled:.2g}")
    changes = [f"training.effective_batch_size={batch}", f"training.learning_rate={rate:g}"]
    return changes, training.model_copy(update={"effective_batch_size": batch, "learning_rate": rate})


def _with_hidden_size(config: RunConfig, hidden_size: int) -> Smaller:
    changed = config.model.resized(hidden_size)
    named = [f"model.{name}={value}" for name, value in changed.items()]
    return named, config.model_copy(update={"model": config.model.model_copy(update=changed)})
