"""Runs: the plan does not matter, interruptions do not matter, and stops happen where they should."""

import json
import os
import signal

import pytest
import torch
from tiny import run_config, sudoku_dataset

from macbook_optimization.errors import ConfigError, DataError, RunError
from trm.runs import Run, list_runs, set_aside
from trm.training.loop import Limits, train


class Recorder:
    """A display that remembers, and can do something when it hears a certain update."""

    def __init__(self, react=None):
        self.messages, self.react = [], react

    def update(self, what, done, total, facts=""):
        if self.react:
            self.react(facts, done)

    def message(self, text):
        self.messages.append(text)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


def run(config, path, react=None, **limits):
    return train(config, path, Limits(**limits), Recorder(react))


def state(path):
    checkpoint = Run(path).checkpoints().newest_good()
    return checkpoint.step, checkpoint.load_all(), checkpoint.metadata["slots"]


def assert_same_run(one, other):
    """Bit for bit."""
    first, second = state(one), state(other)
    assert first[0] == second[0]
    assert first[2] == second[2]
    for group, tensors in first[1].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, second[1][group][name]), f"{group} {name}"


@pytest.fixture
def float64():
    """Nearly without rounding. This tiny model amplifies it about sixfold a step: 1e-18 after the first
    step, 1e-9 after twelve (measured); in float32, a dozen steps would show nothing."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_same_up_to_rounding(one, other):
    first, second = state(one), state(other)
    assert first[2] == second[2]
    for name, tensor in first[1]["weights"].items():
        torch.testing.assert_close(second[1]["weights"][name], tensor, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("supervision", ["deep", "terminal"])
@pytest.mark.parametrize("stop_at", [1, 7, 10])
def test_stopping_and_resuming_changes_nothing(tmp_path, dataset, supervision, stop_at):
    config = run_config(dataset, training__supervision=supervision, training__depths={0: 1, 5: 3})
    run(config, tmp_path / "whole")
    outcome = run(config, tmp_path / "halves", max_step=stop_at)
    assert (outcome.reason, outcome.step) == ("limit", stop_at)
    assert run(config, tmp_path / "halves").reason == "max_steps"
    assert_same_run(tmp_path / "whole", tmp_path / "halves")


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("supervision", ["deep", "terminal"])
@pytest.mark.parametrize("micro_batch_size", [1, 4, 5])
def test_the_plan_changes_neither_the_order_nor_what_is_learned(
    tmp_path, dataset, supervision, micro_batch_size
):
    for path, size in (("whole", 6), ("cut", micro_batch_size)):
        config = run_config(dataset, training__supervision=supervision, plan__micro_batch_size=size)
        run(config, tmp_path / path, max_step=12)
    assert_same_up_to_rounding(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.usefixtures("float64")
def test_the_plan_may_change_in_the_middle_of_a_run(tmp_path, dataset):
    config = run_config(dataset)
    run(config, tmp_path / "whole", max_step=12)
    run(config, tmp_path / "changed", max_step=5)
    run(run_config(dataset, plan__micro_batch_size=2), tmp_path / "changed", max_step=12)
    assert_same_up_to_rounding(tmp_path / "whole", tmp_path / "changed")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_in_the_middle_of_a_step_saves_the_last_whole_one(tmp_path, dataset, number):
    config = run_config(dataset, plan__micro_batch_size=2)
    run(config, tmp_path / "whole")

    def interrupt(facts, done):
        if facts == "step 8" and done == 2:
            os.kill(os.getpid(), number)

    outcome = run(config, tmp_path / "broken", interrupt)
    assert (outcome.reason, outcome.step) == ("interrupted", 7)
    assert run(config, tmp_path / "broken").reason == "max_steps"
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_handlers_are_restored_after_a_run(tmp_path, dataset):
    before = signal.getsignal(signal.SIGINT)
    run(run_config(dataset), tmp_path / "run", max_step=1)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_stops_at_its_target(tmp_path, dataset):
    outcome = run(run_config(dataset, evaluation__target_accuracy=0.0), tmp_path / "run")
    assert (outcome.reason, outcome.step) == ("target", 10)


def test_a_run_stops_when_its_time_is_up(tmp_path, dataset):
    outcome = run(run_config(dataset), tmp_path / "run", max_seconds=1e-9)
    assert (outcome.reason, outcome.step) == ("limit", 0)


def test_a_finished_run_is_not_trained_again(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "run")
    again = run(run_config(dataset), tmp_path / "run")
    assert (again.reason, again.step) == ("max_steps", 20)
    assert again.best["examples"] == 12


def test_metrics_and_events_say_what_happened(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "run")
    directory = Run(tmp_path / "run")
    evaluations = [row for row in directory.rows() if "exact_accuracy" in row]
    assert [row["step"] for row in evaluations] == [10, 20]
    assert {"token_accuracy", "halt_accuracy", "mean_steps", "accuracy_by_depth", "seconds"} <= set(
        evaluations[0]
    )
    assert [row["event"] for row in directory.rows("events.jsonl")] == ["stopped"]
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["accumulation_steps"] == 1


def test_a_torn_last_line_is_ignored(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    whole = len(Run(tmp_path / "run").rows())
    metrics.write_text(metrics.read_text() + '{"step": 21, "lo')
    assert len(Run(tmp_path / "run").rows()) == whole


def test_another_recipe_in_the_same_directory_is_refused_by_name(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "run", max_step=1)
    with pytest.raises(RunError, match=r"training.learning_rate is 0.5 here and 0.01 in the run"):
        run(run_config(dataset, training__learning_rate=0.5), tmp_path / "run")


def test_other_data_are_refused(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "run", max_step=1)
    other = sudoku_dataset(tmp_path / "other", train=41)
    with pytest.raises(RunError, match="other data"):
        run(run_config(other), tmp_path / "run")


def test_a_directory_that_is_no_run_is_left_alone(tmp_path, dataset):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "letter.txt").write_text("dear")
    with pytest.raises(RunError, match="not empty and not a run"):
        run(run_config(dataset), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["letter.txt"]


def test_a_path_that_cannot_be_a_directory_is_an_error(tmp_path, dataset):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="Cannot create the run directory"):
        run(run_config(dataset), tmp_path / "file" / "run")


def test_a_missing_dataset_is_built_if_the_recipe_says_how(tmp_path):
    build = {"size": 4, "difficulty": "easy", "train": 40, "test": 12}
    config = run_config(tmp_path / "set", data={"path": str(tmp_path / "set"), "build": build})
    assert run(config, tmp_path / "run", max_step=1).step == 1
    with pytest.raises(DataError, match="There is no dataset"):
        run(run_config(tmp_path / "nowhere"), tmp_path / "other")
    misspelt = run_config(tmp_path, data={"path": str(tmp_path / "third"), "build": {"sise": 4}})
    with pytest.raises(ConfigError, match="unknown key sise; did you mean size"):
        run(misspelt, tmp_path / "other")


def test_the_best_checkpoint_is_kept_beside_the_last_ones(tmp_path, dataset):
    config = run_config(dataset, checkpoints={"every_steps": 2, "keep": 2}, evaluation__every_steps=4)
    run(config, tmp_path / "run")
    manager = Run(tmp_path / "run").checkpoints()
    kept = sorted(path.name for path in manager.directory.iterdir())
    best = manager.best()["checkpoint"]
    assert kept == sorted({best, "step-00000018", "step-00000020"})
    assert manager.best_or_newest().path.name == best


def test_a_fresh_start_sets_the_old_run_aside(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "run", max_step=1)
    assert set_aside(tmp_path / "run") == tmp_path / "run.1"
    run(run_config(dataset, seed=1), tmp_path / "run", max_step=1)
    assert [summary.path for summary in list_runs(tmp_path)] == [
        str(tmp_path / "run"),
        str(tmp_path / "run.1"),
    ]


def test_deterministic_mode_trains(tmp_path, dataset):
    config = run_config(dataset, training__deterministic=True, model__puzzle_emb_ndim=8)
    run(config, tmp_path / "a")
    run(config, tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b")
    torch.use_deterministic_algorithms(False)
