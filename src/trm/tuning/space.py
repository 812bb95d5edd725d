"""The search space: learning rate, effective batch size, depth and width, around those of a recipe.

A candidate with another batch size sees as many examples as the recipe: steps of its schedule are scaled, and
the moving average reaches as far back in examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from macbook_optimization.json_types import JsonObject
from trm.config import RunConfig

LEARNING_RATE = "learning_rate"
BATCH = "effective_batch_size"
WIDTH = "hidden_size"
DEPTH_FACTOR = "depth_factor"  # of all depths, in terminal supervision
CYCLES = "H_cycles"  # in deep supervision
MAX_STEPS = "halt_max_steps"  # likewise, for the variant that recurses once per step
LAYERS = "num_layers"  # of a decoder
_RATE_FACTOR = 10.0  # to either side
_MAX_RATE = 0.5
_BATCH_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_WIDTH_FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0)
_WIDTH_MULTIPLE = 8

Values = Mapping[str, int | float]


@dataclass(frozen=True, slots=True)
class Space:
    """The permitted choices: a range of learning rates, and lists of everything else."""

    learning_rates: tuple[float, float]
    choices: Mapping[str, tuple[int | float, ...]]


def search_space(config: RunConfig) -> Space:
    rate = config.training.learning_rate
    return Space(
        (rate / _RATE_FACTOR, min(_MAX_RATE, rate * _RATE_FACTOR)),
        {
            BATCH: _scaled(config.training.effective_batch_size, _BATCH_FACTORS),
            depth_key(config): _depths(config),
            WIDTH: _widths(config),
        },
    )


def start_values(config: RunConfig) -> dict[str, int | float]:
    """Return the recipe itself as a point of the space."""
    key = depth_key(config)
    return {
        LEARNING_RATE: config.training.learning_rate,
        BATCH: config.training.effective_batch_size,
        key: 1.0 if key == DEPTH_FACTOR else getattr(config.model, key),
        WIDTH: config.model.hidden_size,
    }


def depth_key(config: RunConfig) -> str:
    """Return what makes this kind of recipe deeper: a factor of the depths, or a key of the model."""
    if config.model.kind == "decoder":
        return LAYERS
    if config.training.supervision == "terminal":
        return DEPTH_FACTOR
    return MAX_STEPS if config.model.variant == "transformer" else CYCLES


def _scaled(value: int, factors: Sequence[float]) -> tuple[int, ...]:
    return tuple(sorted({max(1, round(value * factor)) for factor in factors}))


def _depths(config: RunConfig) -> tuple[int | float, ...]:
    key = depth_key(config)
    if key == DEPTH_FACTOR:  # halves of a depth of 1 do not exist
        return (0.5, 1.0, 2.0) if max(config.training.depths.values()) > 1 else (1.0, 2.0, 4.0)
    start = getattr(config.model, key)
    return tuple(range(1, start + 2)) if key == CYCLES else _scaled(start, (0.5, 1.0, 2.0))


def _widths(config: RunConfig) -> tuple[int, ...]:
    """Return widths that the heads and the positions of this model can have."""
    start = config.model.hidden_size
    rounded = {
        max(_WIDTH_MULTIPLE, round(start * factor / _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE)
        for factor in _WIDTH_FACTORS
        if factor != 1
    }
    return tuple(sorted({start, *rounded}))


def with_values(config: RunConfig, values: Values) -> RunConfig:
    """Return the recipe at this point of the space."""
    if dict(values) == start_values(config):
        return config
    tree = config.model_dump(mode="json")
    slots = int(values[BATCH])
    _scale_steps(tree, config.training.effective_batch_size / slots)
    training = tree["training"]
    training[LEARNING_RATE] = float(f"{values[LEARNING_RATE]:.3g}")
    training[BATCH] = slots
    _set_width(tree["model"], config, int(values[WIDTH]))
    key = depth_key(config)
    if key == DEPTH_FACTOR:
        factor = values[key]
        training["depths"] = {
            step: max(1, round(depth * factor)) for step, depth in training["depths"].items()
        }
    else:
        tree["model"][key] = int(values[key])
    return RunConfig.model_validate(tree)


def _set_width(model: JsonObject, config: RunConfig, width: int) -> None:
    before = config.model.hidden_size
    if width == before:
        return
    model.update(config.model.resized(width))
    embedding = config.model.puzzle_emb_ndim
    if embedding and embedding == before:
        model["puzzle_emb_ndim"] = width


def _scale_steps(tree: JsonObject, factor: float) -> None:
    """Scale everything that is counted in steps."""
    if factor == 1:
        return

    def steps(count: Any) -> int:
        return max(1, round(int(count) * factor))

    def schedule(values: JsonObject) -> dict[int, Any]:
        return {steps(start) if int(start) else 0: value for start, value in values.items()}

    training = tree["training"]
    training["max_steps"] = steps(training["max_steps"])
    training["warmup_steps"] = round(training["warmup_steps"] * factor)
    training["ema_rate"] = round(training["ema_rate"] ** (1 / factor), 6)
    training["extensions"] = {steps(start): steps(last) for start, last in training["extensions"].items()}
    training["depths"] = schedule(training["depths"])
    training["hints"] = schedule(training["hints"])
    for phase in training["phases"]:
        if phase["steps"] is not None:
            phase["steps"] = steps(phase["steps"])
    for section in (training["curriculum"], tree["evaluation"]):
        if section is not None and section["every_steps"] is not None:
            section["every_steps"] = steps(section["every_steps"])


def described(values: Values) -> str:
    """Return a candidate in words, for one line."""
    names = {
        LEARNING_RATE: "learning rate {:.3g}",
        BATCH: "batch {}",
        DEPTH_FACTOR: "depths x {:g}",
        CYCLES: "{} cycles",
        MAX_STEPS: "{} supervision steps",
        LAYERS: "{} layers",
        WIDTH: "width {}",
    }
    return ", ".join(text.format(values[name]) for name, text in names.items() if name in values)
