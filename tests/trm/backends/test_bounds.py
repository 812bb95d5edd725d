"""Absurd sizes are refused by arithmetic, and nothing that a laptop could do is refused."""

import math
from dataclasses import replace

import pytest
from tiny import SPEC, VARIANTS, model_config, run_config, training_config

from macbook_optimization.errors import ConfigError, MemoryBudgetError
from macbook_optimization.memory_management import MIB
from trm.backends.base import Program
from trm.backends.bounds import (
    MAX_LAYER_SECONDS_PER_STEP,
    Machine,
    check_inference,
    check_training,
    least_bytes,
    smallest_program,
)
from trm.backends.pytorch.memory import _kept_by, _kept_for_backward, estimate
from trm.backends.pytorch.model import TinyRecursiveModel
from trm.backends.sizes import count_latents, count_weights
from trm.config import InferenceConfig, ModelConfig, TrainingConfig, load_config, shipped_recipes
from trm.plan import Execution
from trm.planning.measurer import PROBE_SECONDS
from trm.planning.probe import Stepper
from trm.tasks.base import DataSpec
from trm.tasks.registry import load_task

SMALL_LAPTOP = Machine(cores=2, memory_bytes=8 * 1024 * MIB)
HUGE = 2**31 - 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_and_latents_are_counted_without_building_the_model(variant):
    network = TinyRecursiveModel(model_config(**VARIANTS[variant]), SPEC)
    assert count_weights(network.config, SPEC) == sum(p.numel() for p in network.parameters())
    assert count_latents(network.config, SPEC) == network.start(1).numel()


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_deep_model_keeps_for_the_backward_pass_follows_from_small_ones(variant):
    config = model_config(**{**VARIANTS[variant], "L_layers": 3, "H_layers": 3, "L_cycles": 4})
    program = Program(config, training_config(), SPEC)
    assert _kept_for_backward(program) == _kept_by(TinyRecursiveModel(config, SPEC, seed=None))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_least_memory_is_below_every_estimate(variant):
    program = Program(model_config(**VARIANTS[variant]), training_config(), SPEC)
    assert least_bytes(program) < estimate(program, Execution(gradient_checkpointing="all")).peak_bytes(1)


def shipped_program(name):
    config = load_config(name)
    if config.task == "arc":  # whose spec needs the files
        return Program.of(config, DataSpec(900, 12, 12, num_puzzle_identifiers=10**6))
    if config.task == "email":  # whose spec needs the mail
        return Program.of(config, DataSpec(384, 16_000, 20))
    if config.task == "email-masked":
        return Program.of(config, DataSpec(384, 16_000, 16_000))
    if config.task == "text":
        return Program.of(config, DataSpec(1024, 32_000, 32_000))
    task = load_task(config.task)
    return Program.of(config, task.complete(task.spec(config.data.build)))


@pytest.mark.parametrize("name", shipped_recipes())
def test_no_shipped_recipe_is_refused_on_a_small_laptop(name):
    check_training(shipped_program(name), SMALL_LAPTOP)
    check_inference(shipped_program(name), load_config(name).inference, SMALL_LAPTOP)


@pytest.mark.parametrize(
    ("model", "training", "error", "named"),
    [
        ({"L_layers": 100_000}, {}, ConfigError, "model.L_layers"),
        ({"variant": "transformer", "H_layers": 100_000}, {}, ConfigError, "model.H_layers"),
        ({"L_cycles": HUGE}, {}, ConfigError, "model.L_cycles"),
        ({"H_cycles": HUGE}, {}, ConfigError, "model.H_cycles"),
        ({"hidden_size": 2**16}, {}, MemoryBudgetError, "model.hidden_size"),
        ({"width_multiple": HUGE}, {}, MemoryBudgetError, "model.width_multiple"),
        (
            {"puzzle_emb_ndim": 8, "puzzle_emb_len": HUGE},
            {"effective_batch_size": 1},
            MemoryBudgetError,
            "model.puzzle_emb_len",
        ),
        ({"puzzle_emb_ndim": 2**60, "puzzle_emb_len": 0}, {}, MemoryBudgetError, "model.puzzle_emb_ndim"),
        ({}, {"effective_batch_size": HUGE}, MemoryBudgetError, "training.effective_batch_size"),
        ({}, {"supervision": "terminal", "depths": {0: 1, 500: HUGE}}, ConfigError, "training.depths"),
        ({}, {"supervision": "terminal", "depths": {0: 1_000_000}}, ConfigError, "training.depths"),
        (
            {"hidden_size": 16, "num_heads": 2},
            {"supervision": "terminal", "depths": {0: 200_000}, "effective_batch_size": 10**7},
            ConfigError,
            "training.depths",
        ),
        (
            {},
            {"supervision": "terminal", "effective_batch_size": 2 * 10**8},
            MemoryBudgetError,
            "training.effective_batch_size",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_absurd_sizes_are_refused_with_the_key_to_lower(model, training, error, named):
    program = Program(ModelConfig(**model), TrainingConfig(**training), DataSpec(36, 8, 8))
    with pytest.raises(error, match=r"limit is|machine has") as refused:
        check_training(program, SMALL_LAPTOP)
    assert named in refused.value.hint


def test_a_step_is_refused_only_if_an_optimistic_machine_needs_more_than_an_hour_for_it():
    program = shipped_program("sudoku-extreme")  # 5 minutes per step on two cores, measured
    slower = replace(program, model=program.model.model_copy(update={"H_cycles": 15}))
    check_training(slower, SMALL_LAPTOP)
    slowest = replace(program, model=program.model.model_copy(update={"H_cycles": 3000}))
    with pytest.raises(ConfigError, match=r"at least [\d.]+ hours, even at 500 GFLOP/s on each of 2 cores"):
        check_training(slowest, SMALL_LAPTOP)
    check_training(slowest, Machine(cores=2**10, memory_bytes=SMALL_LAPTOP.memory_bytes))


def test_a_step_is_refused_if_its_passes_through_a_layer_outlast_a_probe():
    program = shipped_program("sudoku-6x6")  # 4 layers; the median of depths up to N is N / 2

    def with_depth(depth):
        return replace(program, training=program.training.model_copy(update={"depths": {0: depth}}))

    check_training(with_depth(500_000), SMALL_LAPTOP)  # 250,000 x 4 passes x 100 us = 100 s
    message = "at least 200 s, even at 100 us per pass through a layer, for one example; the limit is 100 s"
    with pytest.raises(ConfigError, match=message) as refused:
        check_training(with_depth(1_000_000), SMALL_LAPTOP)
    assert refused.value.hint == "Lower training.depths, which is {0: 1000000}."
    steps_of_a_probe = 2 * Stepper.PASSES  # two sizes at least
    assert steps_of_a_probe * MAX_LAYER_SECONDS_PER_STEP >= PROBE_SECONDS


def test_a_plan_in_bfloat16_halves_the_least_memory_of_activations_only(tmp_path):
    recipe = run_config(tmp_path)
    planned = recipe.model_copy(update={"plan": recipe.plan.model_copy(update={"precision": "bfloat16"})})
    full = least_bytes(smallest_program(recipe, SPEC))
    half = least_bytes(smallest_program(planned, SPEC))
    model = recipe.model
    latents = recipe.training.effective_batch_size * count_latents(model, SPEC)
    inputs = SPEC.max_len * model.hidden_size * model.num_layers * model.block_passes_per_cycle
    assert full - half == 2 * (latents + inputs)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"depth": 10**9}, "inference.depth (--depth)"),
        ({"depth": 16, "retries": 2**62, "noise": 1}, "inference.retries (--retries)"),
    ],
)
def test_an_answer_that_would_take_hours_is_refused(settings, named):
    program = Program(model_config(), training_config(), SPEC)
    message = "even at 100 us per pass through a layer; the limit is 1 hour"
    with pytest.raises(ConfigError, match=message) as refused:
        check_inference(program, InferenceConfig(**settings), SMALL_LAPTOP)
    assert named in refused.value.hint
    check_inference(program, InferenceConfig(depth=100_000, retries=10, noise=1), SMALL_LAPTOP)


def test_answers_that_would_fill_the_memory_are_refused():
    program = Program(model_config(), training_config(), SPEC)
    memory = math.prod((1000, SPEC.max_len, 64, 4))
    with pytest.raises(MemoryBudgetError, match="after each of 1,001 inference steps"):
        check_inference(program, InferenceConfig(depth=1001), Machine(2, memory))
    check_inference(program, InferenceConfig(depth=1000), Machine(2, memory))
