"""Refuse absurd sizes by arithmetic, before anything is built or measured.

Every bound is a lower bound on what the recipe would take, computed from its sizes alone, so that nothing is
refused that a fast laptop could do. What is merely too large for the memory budget is left to an estimate or
a measurement (`trm.planning`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import psutil

from macbook_optimization.errors import ConfigError, LaptopError, MemoryBudgetError
from macbook_optimization.memory_management import MIB
from trm.backends.base import Program
from trm.backends.sizes import (
    count_latents,
    count_positions,
    count_weights,
    flops_per_recursion,
    flops_per_sample,
)
from trm.config import AnyModelConfig, DecoderConfig, InferenceConfig, ModelConfig, RunConfig
from trm.schedule import typical_cycles
from trm.tasks.base import DataSpec

MAX_HOURS = 1.0  # for one step, and for the answer to one question
# More than any laptop core reaches. Assumed, not measured: about 350 GFLOP/s per performance core with the
# matrix units of Apple Silicon, 150 with AVX-512.
FLOPS_PER_CORE = 500e9
# A pass through one layer takes at least this long, however small it is. Assumed for the fastest laptop: 180
# to 460 us were measured on an Intel Xeon at 2.8 GHz, in float32 without gradient.
LAYER_SECONDS = 100e-6
# A probe takes at least six steps, and has ten minutes for them (`trm.planning.measurer`).
MAX_LAYER_SECONDS_PER_STEP = 100.0
MAX_LAYERS = 1000  # Python objects: 1,000 layers are built in 0.5 s there, and 4,000 took 15 s to measure
MAX_LAYERS_WITH_GRADIENT = 10_000  # passes that autograd records in one step, each with dozens of objects
ANSWERS_AT_A_TIME = 64  # questions whose answers after every step are in memory together
_LAYERS_KEYS = {"transformer": "H_layers", "decoder": "num_layers"}  # by variant; the others have L_layers
_HOUR = 3600.0
_PASS_RATE = f"{1e6 * LAYER_SECONDS:.0f} us per pass through a layer"


@dataclass(frozen=True, slots=True)
class Machine:
    cores: int
    memory_bytes: int

    @classmethod
    def present(cls) -> Self:
        return cls(psutil.cpu_count() or 1, psutil.virtual_memory().total)


def check_training(program: Program, machine: Machine | None = None) -> None:
    """Raise an error if no plan could make this machine train the program."""
    if (problem := training_problem(program, machine)) is not None:
        raise problem


def training_problem(program: Program, machine: Machine | None = None) -> LaptopError | None:
    """Return why this machine cannot train the program with any plan; None if arithmetic finds no reason."""
    here = machine or Machine.present()
    return (
        _too_many_layers(program.model)
        or _too_large(program, here)
        or _too_many_passes(program)
        or _too_slow(program, here)
    )


def check_inference(program: Program, settings: InferenceConfig, machine: Machine | None = None) -> None:
    """Raise an error if the answer to one question would take more time or memory than there is."""
    here = machine or Machine.present()
    if (problem := _too_many_layers(program.model)) is not None:
        raise problem
    model = program.model
    recursions = 1 if program.training.supervision == "terminal" else model.cycles_per_step
    steps = settings.depth * (1 + settings.retries)
    passes = steps * recursions * _layers_per_recursion(model)
    flops = steps * recursions * flops_per_recursion(model, program.data)
    hours, how_fast = max(_hours_of_products(flops, here), _hours_of_passes(passes))
    retries = f" with {settings.retries:,} retries" if settings.retries else ""
    how = f"{settings.depth:,} inference steps{retries}"
    key = "retries" if settings.retries > settings.depth else "depth"
    if hours > MAX_HOURS:
        raise ConfigError(
            f"One answer of {how} takes at least {_amount(hours)} hours, even at {how_fast}; the limit is "
            f"{MAX_HOURS:g} hour",
            hint=f"Lower inference.{key} (--{key}).",
        )
    needed = settings.depth * program.data.max_len * ANSWERS_AT_A_TIME * 4
    if needed > here.memory_bytes:
        raise MemoryBudgetError(
            f"The answers after each of {settings.depth:,} inference steps need {_mib(needed)}; this machine "
            f"has {_mib(here.memory_bytes)}.",
            hint="Lower inference.depth (--depth).",
        )


def in_smallest_precision(config: RunConfig) -> RunConfig:
    """Return the recipe with the smallest precision that its plan may choose."""
    if config.plan.precision not in ("bfloat16", "auto"):
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"forward_dtype": "bfloat16"})})


def smallest_program(config: RunConfig, data: DataSpec) -> Program:
    """Return the program with which the recipe is bounded: no plan computes it with fewer bytes."""
    return Program.of(in_smallest_precision(config), data)


def least_bytes(program: Program) -> int:
    """Return what training needs at least, with any plan: weights, gradients, a moment, their average, puzzle
    embeddings, latents, the tokens of the batch, and the input of every layer for one example."""
    model = program.model
    data = program.data
    slots = program.num_slots
    bytes_per_weight = 4
    copies = 3 + program.training.ema
    if isinstance(
        model, DecoderConfig
    ):  # a factored moment takes next to nothing, nor do gradients in backward
        bytes_per_weight = 2 if model.weights_dtype == "bfloat16" else 4
        copies = 1 + program.training.ema
    weights = copies * count_weights(model, data)
    weights += data.num_puzzle_identifiers * model.puzzle_emb_ndim
    activations = count_positions(model, data) * model.hidden_size * _layers_per_recursion(model)
    if program.training.supervision == "deep":
        activations += slots * count_latents(model, data)
    bytes_each = 2 if model.forward_dtype == "bfloat16" else 4
    return bytes_per_weight * weights + bytes_each * activations + 2 * 8 * slots * data.max_len


def _layers_per_recursion(model: AnyModelConfig) -> int:
    return model.num_layers * model.block_passes_per_cycle


def _too_many_layers(model: AnyModelConfig) -> ConfigError | None:
    key = _LAYERS_KEYS.get(model.variant, "L_layers")
    if model.num_layers > MAX_LAYERS:
        return ConfigError(
            f"model.{key} is {model.num_layers:,}; the limit is {MAX_LAYERS:,} layers",
            hint=f"Lower model.{key}.",
        )
    passes = _layers_per_recursion(model)
    if passes > MAX_LAYERS_WITH_GRADIENT and isinstance(model, ModelConfig):
        return ConfigError(
            f"One recursion passes through {passes:,} layers (model.{key} x (model.L_cycles + 1)); the limit "
            f"is {MAX_LAYERS_WITH_GRADIENT:,}",
            hint=f"Lower model.L_cycles, which is {model.L_cycles:,}.",
        )
    return None


def _too_large(program: Program, machine: Machine) -> MemoryBudgetError | None:
    needed = least_bytes(program)
    if needed <= machine.memory_bytes:
        return None
    return MemoryBudgetError(
        f"This recipe needs at least {_mib(needed)} of memory, and this machine has "
        f"{_mib(machine.memory_bytes)}.",
        hint=f"Lower {_most_unusual(program)}, or use --fit to train a smaller model.",
    )


def _too_many_passes(program: Program) -> ConfigError | None:
    passes = typical_cycles(program.model, program.training) * _layers_per_recursion(program.model)
    seconds = passes * LAYER_SECONDS
    if seconds <= MAX_LAYER_SECONDS_PER_STEP:
        return None
    return ConfigError(
        f"One training step takes at least {_amount(seconds)} s, even at {_PASS_RATE}, for one example; the "
        f"limit is {MAX_LAYER_SECONDS_PER_STEP:g} s",
        hint=f"Lower {_largest(_depth_factors(program))}.",
    )


def _too_slow(program: Program, machine: Machine) -> ConfigError | None:
    cycles = typical_cycles(program.model, program.training)
    flops = program.num_slots * flops_per_sample(program.model, program.data, cycles)
    hours, how_fast = _hours_of_products(flops, machine)
    if hours <= MAX_HOURS:
        return None
    return ConfigError(
        f"One training step takes at least {_amount(hours)} hours, even at {how_fast}; the limit is "
        f"{MAX_HOURS:g} hour",
        hint=f"Lower {_most_unusual(program)}.",
    )


def _hours_of_products(flops: float, machine: Machine) -> tuple[float, str]:
    """Return the time of matrix products, and the speed that it follows from."""
    hours = flops / (FLOPS_PER_CORE * machine.cores) / _HOUR
    return hours, f"{FLOPS_PER_CORE / 1e9:.0f} GFLOP/s on each of {machine.cores} cores"


def _hours_of_passes(passes: int) -> tuple[float, str]:
    """Return the time that passes through a layer take however small it is, and the speed likewise."""
    return passes * LAYER_SECONDS / _HOUR, _PASS_RATE


def _most_unusual(program: Program) -> str:
    """Return the key, or the property of the dataset, that exceeds its usual value by the largest factor."""
    return _largest({**_depth_factors(program), **_width_factors(program)})


def _largest(factors: dict[str, float]) -> str:
    return max(factors, key=lambda name: factors[name])


def _depth_factors(program: Program) -> dict[str, float]:
    """Compare with their usual values what decides about the passes through a layer."""
    model = program.model
    training = program.training
    keys = [_LAYERS_KEYS.get(model.variant, "L_layers")]
    if model.variant in ("trm", "singlez"):
        keys.append("L_cycles")
    if training.supervision == "deep" and "L_cycles" in keys:
        keys.append("H_cycles")
    factors = _relative_to_default(model, keys)
    if training.supervision == "terminal" and isinstance(model, ModelConfig):
        factors[f"training.depths, which is {training.depths}"] = max(training.depths.values()) / 16
    return factors


def _width_factors(program: Program) -> dict[str, float]:
    """Compare with their usual values what decides about the size of a layer and of the batch."""
    model = program.model
    data = program.data
    is_decoder = isinstance(model, DecoderConfig)
    factors = (
        {} if is_decoder else _relative_to_default(model, ["expansion", "width_multiple", "puzzle_emb_len"])
    )
    width = model.hidden_size / type(model)().hidden_size
    factors[f"model.hidden_size, which is {model.hidden_size:,}"] = width**2
    slots = program.num_slots
    factors[f"training.effective_batch_size, which is {slots:,}"] = slots / 768
    rows = data.num_puzzle_identifiers * model.puzzle_emb_ndim
    of_dataset = f"for {data.num_puzzle_identifiers:,} puzzle identifiers"
    factors[f"model.puzzle_emb_ndim, which is {model.puzzle_emb_ndim:,} {of_dataset}"] = rows / 1e9
    return factors


def _relative_to_default(model: AnyModelConfig, keys: list[str]) -> dict[str, float]:
    usual = type(model)()
    return {
        f"model.{key}, which is {getattr(model, key):,}": getattr(model, key) / getattr(usual, key)
        for key in keys
    }


def _amount(value: float) -> str:
    if value >= 1e6:
        return f"{value:.1e}"
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"
