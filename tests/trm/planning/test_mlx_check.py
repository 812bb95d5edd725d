"""The check before a run, of MLX on this CPU: every optimizer, both precisions, weights in bfloat16."""

from dataclasses import asdict

import pytest
from tiny import model_config, run_config, sudoku_dataset

from trm.config import RunConfig
from trm.plan import Execution
from trm.planning import device_check
from trm.tasks.documents.text import TASK as TEXT

pytest.importorskip("mlx.core")

pytestmark = [pytest.mark.slow, pytest.mark.mlx]
DECODER = {
    "kind": "decoder", "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "intermediate_size": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text")
    (directory / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 200)
    options = {"from": [str(directory / "text.txt")], "tokenizer": "char", "context": 16}
    TEXT.build(options, directory / "set", lambda what, done, total: None)
    return directory / "set"


def compare(config, precision="float32"):
    execution = Execution(backend="mlx", precision=precision)
    return device_check.compare(config.model_dump(mode="json"), asdict(execution), lambda row: None)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "adam_atan2", "muon", "adafactor"])
def test_mlx_agrees_with_every_optimizer_in_both_precisions(dataset, optimizer, precision):
    assert compare(run_config(dataset, training__optimizer=optimizer), precision) is None


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [{}, {"weights_dtype": "bfloat16"}])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_mlx_agrees_where_weights_and_moments_are_stored_in_bfloat16(text, precision, stored, moments):
    config = RunConfig.model_validate(
        {
            "task": "text",
            "data": {"path": str(text)},
            "model": {**DECODER, **stored},
            "training": {
                "effective_batch_size": 8, "max_steps": 20, "learning_rate": 1e-3, "ema": False,
                "moments_dtype": moments,
            },
        }
    )  # fmt: skip
    assert compare(config, precision) is None


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_gradient_that_misses_a_part_is_found_in_both_precisions(dataset, precision, monkeypatch):
    """As if a kernel wrote nothing into the second half of a product."""
    from trm.backends.mlx import layers

    linear = layers.linear

    def half(x, weight, *more):
        y = linear(x, weight, *more)
        kept = y.shape[-1] // 2
        return layers.mx.concatenate([y[..., :kept], 0 * y[..., kept:]], axis=-1)

    monkeypatch.setattr(layers, "linear", half)
    found = compare(run_config(dataset, model=model_config(mixer="attention").model_dump()), precision)
    assert found is not None
    assert found["problem"].endswith("in step 1")


def test_what_a_step_occupies_is_reported(dataset):
    config = run_config(dataset).model_dump(mode="json")
    found = device_check.occupied(config, asdict(Execution(backend="mlx")), lambda row: None)
    assert found["driver_bytes"] == [0, 0], "on the CPU, everything is memory of the process"
    assert all(each > 2**20 for each in found["resident_bytes"])
