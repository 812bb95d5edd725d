"""A run begun with one backend continues with the other, and either answers."""

import json
from dataclasses import replace

import forked
import numpy as np
import pytest
from tiny import Recorder, plan_of
from twins import numbers

pytest.importorskip("mlx.core")

from trm.config import load_config
from trm.inference.predict import execution_of, load_search, open_model, open_test_set
from trm.plan import Execution
from trm.runs.directory import Run
from trm.tasks.grids.sudoku import TASK
from trm.training.loop import Limits
from trm.training.start import train

pytestmark = pytest.mark.mlx

RECIPE = """
task: sudoku
data: {path: set, build: {size: 4, difficulty: easy, train: 60, test: 12}}
model: {hidden_size: 16, mixer: mlp, pos_encodings: none, width_multiple: 4, expansion: 1.5}
training: {effective_batch_size: 4, max_steps: 6, warmup_steps: 0, learning_rate: 0.01}
inference: {depth: 2}
evaluation: {every_steps: 3}
plan: {backend: mlx, report: false}
"""


def train_until(step, config, path, backend="pytorch"):
    """Continue the run with this backend; return what was said."""
    plan = plan_of(config)
    plan = replace(plan, execution=replace(plan.execution, backend=backend))
    display = Recorder()
    outcome = train(config, path, plan, Limits(max_step=step), display)
    assert outcome.step == step
    return display.messages


def newest(path):
    return Run(path).checkpoints().newest_intact()


def sudoku_6x6(directory, steps):
    """Return the shipped recipe, with as many steps and a smaller dataset."""
    build = {"size": 6, "blanks": 22, "train": 400, "test": 200}
    changes = [
        f"data.path={directory / 'set'}", f"training.max_steps={steps}", "evaluation.target_accuracy=null",
        "evaluation.every_steps=null", "plan.threads=1", "plan.report=false",
    ]  # fmt: skip
    config = load_config("sudoku-6x6", changes)
    TASK.build(build, directory / "set", lambda what, done, total: None)
    return config


@pytest.mark.slow
def test_a_run_changes_its_backend_twice_and_learns_the_same(tmp_path):
    """Terminal supervision, whose trajectory can be compared: 100 steps, 10 with MLX, and 10 more."""
    config = sudoku_6x6(tmp_path, steps=120)
    changing, steady = tmp_path / "changing", tmp_path / "steady"
    train_until(100, config, changing)
    assert any("backend pytorch -> mlx" in text for text in train_until(110, config, changing, "mlx"))
    assert any("backend mlx -> pytorch" in text for text in train_until(120, config, changing))
    for step in (100, 110, 120):
        train_until(step, config, steady)
    np.testing.assert_allclose(losses(changing), losses(steady), rtol=1e-3)
    assert_close(newest(changing).load_all(), newest(steady).load_all(), relative=1e-3)
    assert_same_answers(changing)


def losses(path):
    """Return the mean loss of the steps of each start: rows may be split elsewhere."""
    rows = [row for row in Run(path).rows() if row["kind"] == "train"]
    means = []
    for first, last in ((0, 100), (100, 110), (110, 120)):
        parts = [(row["loss"], row["num_steps"]) for row in rows if first < row["step"] <= last]
        assert sum(steps for _, steps in parts) == last - first
        means.append(sum(loss * steps for loss, steps in parts) / (last - first))
    return means


def assert_close(found, expected, relative):
    """Compare weights and their average; the difference is relative to the largest number of a tensor."""
    for group in ("weights", "ema"):
        for name, tensor in expected[group].items():
            difference = np.abs(numbers(found[group][name]) - numbers(tensor)).max()
            assert difference <= relative * np.abs(numbers(tensor)).max(), f"{group} {name}: {difference:.1e}"


def test_with_auto_a_run_is_applied_with_what_it_was_trained_with():
    config = load_config("sudoku-6x6", ["plan.backend=auto", "plan.device=auto"])
    assert execution_of(config).backend == "pytorch"
    trained_with = Execution(backend="mlx", device="cpu")
    assert (execution_of(config, trained_with).backend, execution_of(config).device) == ("mlx", "cpu")


def assert_same_answers(path):
    """Answer the 200 puzzles of the test split with both backends."""
    model = open_model(path)
    batch = open_test_set(model).batch(np.arange(200))
    execution = execution_of(model.config)
    found = [
        load_search(model, model.config.inference, replace(execution, backend=backend, workers=1)).answer(
            batch
        )
        for backend in ("pytorch", "mlx")
    ]
    np.testing.assert_array_equal(found[0].tokens[-1], found[1].tokens[-1])
    np.testing.assert_array_equal(found[0].steps, found[1].steps)


@pytest.mark.slow
def test_a_run_of_mlx_evaluates_answers_and_is_exported(tmp_path):
    """The commands, with a recipe that says `plan.backend: mlx`; PyTorch imports what MLX has trained."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    commands = (
        ("train", "recipe.yaml", "--run", "run"),
        ("eval", "run", "--json"),
        ("predict", "run", "--example", "0", "--json"),
        ("checkpoint", "export", "run", "weights.pt"),
        ("checkpoint", "import", "weights.pt", "recipe.yaml", "--run", "again", "plan.backend=pytorch"),
        ("train", "again"),
    )
    for command in commands:
        done = forked.run(command, tmp_path)
        assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (plan["backend"], plan["workers"]) == ("mlx", 1)
