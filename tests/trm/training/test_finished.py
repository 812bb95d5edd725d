"""A finished run says so immediately: without its data, a plan or a trainer."""

import json
import os
import shutil

import pytest
from tiny import Recorder, run, run_config, sudoku_dataset

import trm
from macbook_optimization import children
from macbook_optimization.errors import RunError
from trm.runs.directory import EVENTS, Run
from trm.training.finished import finished_outcome
from trm.training.preparation import outcome_if_finished


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture(scope="module")
def config(dataset):
    return run_config(dataset)


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "run"
    return path, run(config, path)


@pytest.fixture
def finished(trained, tmp_path):
    return Run(shutil.copytree(trained[0], tmp_path / "run"))


@pytest.fixture
def no_children(monkeypatch):
    """Fail when a process is started: neither a measurement nor a trainer is needed."""

    def refuse(*arguments, **options):
        pytest.fail(f"a process was started: {arguments}")

    monkeypatch.setattr(children.subprocess, "Popen", refuse)


def test_the_outcome_of_a_finished_run_is_that_of_its_training(trained, config):
    path, outcome = trained
    assert finished_outcome(Run(path), config) == outcome
    assert outcome.reason == "max_steps"


def test_a_finished_run_starts_nothing_and_says_so_first(finished, no_children, capfd):
    """Not even its dataset is needed, which is somewhere else by now."""
    tree = finished.config.model_dump(mode="json")
    tree["data"]["path"] = "nowhere"
    (finished.path / "recipe.yaml").write_text(json.dumps(tree))
    before = sorted(finished.path.rglob("*"))
    outcome = trm.train(finished.path)
    assert (outcome.reason, outcome.step) == ("max_steps", 20)
    assert capfd.readouterr().err == f"{finished.path} has finished already; nothing is left to train.\n"
    assert sorted(finished.path.rglob("*")) == before


def test_a_quiet_start_of_a_finished_run_says_nothing(finished, no_children, capfd):
    trm.train(finished.path, quiet=True)
    assert capfd.readouterr() == ("", "")


def test_a_run_that_reached_its_target_has_finished(dataset, tmp_path):
    config = run_config(dataset, evaluation={"every_steps": 2, "target_accuracy": 0.0})
    outcome = run(config, tmp_path / "run")
    assert (outcome.reason, outcome.step) == ("target", 2)
    assert finished_outcome(Run(tmp_path / "run"), config) == outcome


def test_a_run_without_evaluations_has_finished_after_its_last_step(dataset, tmp_path):
    config = run_config(dataset, training__max_steps=2, evaluation={"every_steps": None})
    outcome = run(config, tmp_path / "run")
    assert outcome.best is None
    assert finished_outcome(Run(tmp_path / "run"), config) == outcome


def test_a_recipe_without_a_model_is_finished_with_the_model_of_its_run(finished, config):
    without_model = type(config).model_validate(config.model_dump(exclude={"model"}, exclude_unset=True))
    assert "model" not in without_model.model_fields_set
    assert outcome_if_finished(without_model, finished.path) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"training__max_steps": 30},
        {"seed": 5},
        {"inference": {"depth": 4}},
        {"evaluation__every_steps": 5},
        {"evaluation": {"every_steps": 10, "examples": 3}},
        {"data__path": "elsewhere"},
    ],
    ids=str,
)
def test_other_settings_are_left_to_the_trainer(finished, dataset, changes):
    assert finished_outcome(finished, run_config(dataset, **changes)) is None


def append(run, **event):
    with (run.path / EVENTS).open("a") as file:
        file.write(json.dumps(event) + "\n")


def damage(path):
    with path.open("r+b") as file:
        file.write(b"\xff" * 8)


DOUBTS = {
    "no events": lambda run: (run.path / EVENTS).unlink(),
    "events are a pipe": lambda run: [(run.path / EVENTS).unlink(), os.mkfifo(run.path / EVENTS)],
    "interrupted later": lambda run: append(run, event="stopped", reason="interrupted", step=20, seconds=1.0),
    "an end without seconds": lambda run: append(run, event="stopped", reason="max_steps", step=20),
    "killed after a later step": lambda run: append(
        run, event="stopped", reason="max_steps", step=10, seconds=1.0
    ),
    "damaged": lambda run: damage(next((run.path / "checkpoints" / "step-00000020").glob("*.safetensors"))),
    "no best": lambda run: (run.path / "best").write_text("nonsense"),
    "no checkpoints": lambda run: shutil.rmtree(run.path / "checkpoints"),
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_a_doubtful_end_is_left_to_the_trainer(finished, config, doubt):
    assert finished_outcome(finished, config) is not None
    DOUBTS[doubt](finished)
    assert finished_outcome(finished, config) is None


def test_a_run_that_has_not_finished_or_does_not_exist_is_left_to_the_trainer(config, tmp_path):
    assert outcome_if_finished(config, tmp_path / "nowhere") is None
    run(config, tmp_path / "run", max_step=10)
    assert outcome_if_finished(config, tmp_path / "run") is None


def test_an_extended_run_has_not_finished(finished, config):
    from trm.training.extension import extend

    longer = extend(finished, config, 4, Recorder())
    assert finished_outcome(finished, longer) is None


def test_another_recipe_is_still_refused(finished, dataset):
    (finished.path.parent / "other.yaml").write_text(
        run_config(dataset, training__learning_rate=0.5).to_yaml()
    )
    with pytest.raises(RunError, match="holds a run of another recipe"):
        trm.train(finished.path.parent / "other.yaml", run=finished.path, quiet=True)
