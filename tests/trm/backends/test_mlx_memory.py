"""The estimate of what a step takes with MLX, against the peak that MLX reports."""

import gc

import pytest
from tiny import make_batch, model_config, training_config

from trm.backends.base import Program, SingleProcess, StepSettings, load_backend
from trm.plan import Execution
from trm.tasks.base import DataSpec, GridLayout

mx = pytest.importorskip("mlx.core")
pytestmark = pytest.mark.mlx

NINE = DataSpec(81, 11, 11)
SIX = DataSpec(36, 8, 8, layout=GridLayout(6, 6, box=(2, 3)))
LONG = DataSpec(128, 50, 12)
MODELS = {
    "mixer": (NINE, {"mixer": "mlp", "pos_encodings": "none", "hidden_size": 32}),
    "attention": (NINE, {"hidden_size": 32, "num_heads": 4}),
    "long rows": (LONG, {"hidden_size": 32, "num_heads": 4}),
    "window": (LONG, {"hidden_size": 32, "num_heads": 4, "attention_window": 16}),
    "neighbourhood": (SIX, {"mixer": "neighbourhood", "pos_encodings": "none", "hidden_size": 32}),
    "candidates": (SIX, {"mixer": "candidates", "pos_encodings": "none", "hidden_size": 32}),
}


def measured(program, execution):
    """Return what one example takes, and the peak with eight, from the peaks of two micro-batch sizes."""
    learner = load_backend(execution).learner(program, execution, SingleProcess(program.num_slots))
    peaks = {}
    for size in (2, 8):
        gc.collect()
        mx.clear_cache()
        mx.reset_peak_memory()
        batch = make_batch(program.num_slots, program.data)
        learner.step(batch, StepSettings(1, 1, 1e-3, 1e-3), lambda done, size=size: size)
        peaks[size] = mx.get_peak_memory()
    return (peaks[8] - peaks[2]) / 6, peaks[8]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "all"])
@pytest.mark.parametrize("model", MODELS)
def test_the_estimate_is_near_the_peak_and_rarely_below_it(model, checkpointing):
    """The peak counts arrays of this process only, so that other programs do not matter.

    What an update holds twice is counted in addition to the examples, although they are not there at the same
    time, so small models are on the safe side.
    """
    data, changes = MODELS[model]
    config = model_config(expansion=4.0, width_multiple=32, **changes)
    program = Program(config, training_config(effective_batch_size=8), data)
    execution = Execution(backend="mlx", gradient_checkpointing=checkpointing)
    estimate = load_backend(execution).estimate(program, execution)
    per_example, peak = measured(program, execution)
    assert 0.8 * per_example < estimate.bytes_per_example < 1.5 * per_example
    assert 0.9 * peak < estimate.peak_bytes(8) < 2 * peak


@pytest.mark.parametrize("model", MODELS)
def test_the_fixed_part_is_what_an_update_holds_twice_and_gradients(model):
    data, changes = MODELS[model]
    program = Program(model_config(**changes), training_config(effective_batch_size=8), data)
    execution = Execution(backend="mlx")
    backend = load_backend(execution)
    groups = backend.learner(program, execution, SingleProcess(8)).state()
    held = sum(each.nbytes for group in groups.values() for each in group.values())
    assert 2 * held < backend.state_bytes(program) < 3.5 * held


@pytest.mark.slow
def test_recomputing_layers_saves_what_it_should():
    """Of seven passes, each keeps its input instead of everything."""
    data, changes = MODELS["candidates"]
    config = model_config(expansion=4.0, width_multiple=32, L_cycles=6, **changes)
    program = Program(config, training_config(effective_batch_size=8, supervision="terminal"), data)
    plain, recomputed = (
        measured(program, Execution(backend="mlx", gradient_checkpointing=each))[0]
        for each in ("none", "all")
    )
    assert recomputed < plain / 3


def test_memory_that_is_kept_for_speed_is_released_on_request():
    execution = Execution(backend="mlx")
    backend = load_backend(execution)
    backend.prepare(execution)
    array = mx.zeros((2**20,)) + 1
    mx.eval(array)
    del array
    assert mx.get_cache_memory() >= 2**22
    assert backend.held_bytes(execution) == 0, "on the CPU, everything is memory of the process"
    assert backend.release_memory(execution) >= 2**22
    assert mx.get_cache_memory() == 0
