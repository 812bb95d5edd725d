"""Training ends when the primary metric stops improving; neither a plan nor an interruption changes where."""

import json
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import Recorder, plan_of, run, run_config, sudoku_dataset

import trm
from macbook_optimization.errors import RunError
from trm.cli.train import _outcome_text
from trm.config import EarlyStoppingConfig, RunConfig
from trm.runs.directory import EVENTS, Run
from trm.runs.listing import summarise
from trm.runs.saved_state import SavedState
from trm.training.early_stopping import EarlyStopping
from trm.training.extension import extend
from trm.training.finished import finished_outcome
from trm.training.loop import Limits
from trm.training.start import train

NEVER_LEARNS = {"training__learning_rate": 1e-9}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


def stopping_config(dataset, every=2, patience=3, **changes):
    settings = {"patience": patience}
    return run_config(
        dataset, evaluation={"every_steps": every}, training__early_stopping=settings, **changes
    )


def ends_after(values, **settings):
    """Return after how many evaluations training ends, or None."""
    config = EarlyStoppingConfig.model_validate(settings)
    now = EarlyStopping()
    for number, value in enumerate(values, start=1):
        now = now.after(value, config)
        if now.is_over(config):
            return number
    return None


@pytest.mark.parametrize(
    ("values", "settings", "end"),
    [
        ([0.1, 0.2, 0.2, 0.1], {"patience": 2}, 4),
        ([0.1, 0.2, 0.2, 0.3, 0.3], {"patience": 2}, None),
        ([0.5], {"patience": 1}, None),
        ([0.5, 0.5], {"patience": 1}, 2),
        ([0.1, 0.12, 0.14, 0.16], {"patience": 2, "min_delta": 0.05}, 3),
        ([0.1, 0.14, 0.16, 0.2, 0.22], {"patience": 2, "min_delta": 0.05}, None),  # small steps add up
        ([0.3] * 10, {}, None),
        ([0.3] * 11, {}, 11),
    ],
)
def test_training_ends_after_patience_evaluations_without_an_improvement(values, settings, end):
    assert ends_after(values, **settings) == end


@given(st.lists(st.floats(0, 1), max_size=40), st.integers(1, 5), st.floats(0, 0.5))
def test_more_patience_never_ends_training_sooner(values, patience, min_delta):
    never = len(values) + 1
    sooner, later = (
        ends_after(values, patience=each, min_delta=min_delta) or never for each in (patience, patience + 1)
    )
    assert sooner <= later


def tensors(path):
    checkpoint = Run(path).checkpoints().newest_intact()
    return checkpoint.step, checkpoint.load_all(), checkpoint.metadata["early_stopping"]


def assert_same_run(one, other):
    """Bit for bit, and with the same state of early stopping."""
    first, second = tensors(one), tensors(other)
    assert (first[0], first[2]) == (second[0], second[2])
    for group, found in first[1].items():
        for name, tensor in found.items():
            assert torch.equal(tensor, second[1][group][name]), f"{group} {name}"


def test_a_run_ends_early_and_says_why(tmp_path, dataset):
    config = stopping_config(dataset, **NEVER_LEARNS)
    display = Recorder()
    outcome = train(config, tmp_path / "run", plan_of(config), Limits(), display)
    assert (outcome.reason, outcome.step) == ("early stopping", 8)
    said = "Exact accuracy has not improved on 0.0% for 3 evaluations: training ends early."
    assert display.messages[-1] == said
    stopped = Run(tmp_path / "run").rows(EVENTS)[-1]
    assert (stopped["event"], stopped["reason"], stopped["step"]) == ("stopped", "early stopping", 8)
    assert Run(tmp_path / "run").checkpoints().newest_step() == 8


@pytest.mark.parametrize("supervision", ["deep", "terminal"])
def test_stopping_and_resuming_changes_nothing(tmp_path, dataset, supervision):
    """Interruptions before, at and after an evaluation."""
    config = stopping_config(dataset, every=3, patience=2, training__supervision=supervision, **NEVER_LEARNS)
    whole = run(config, tmp_path / "whole")
    assert (whole.reason, whole.step) == ("early stopping", 9)
    for stop_at in (2, 3, 5, 6, 8):
        assert run(config, tmp_path / "parts", max_step=stop_at).reason == "limit"
    parts = run(config, tmp_path / "parts")
    assert (parts.reason, parts.step) == (whole.reason, whole.step)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_every_plan_ends_at_the_same_step(tmp_path, dataset):
    for size in (1, 4, 6):
        config = stopping_config(dataset, plan__micro_batch_size=size, **NEVER_LEARNS)
        assert run(config, tmp_path / f"by {size}").step == 8


def test_the_weights_are_those_of_a_run_without_early_stopping(tmp_path, dataset):
    run(stopping_config(dataset, **NEVER_LEARNS), tmp_path / "early")
    run(run_config(dataset, evaluation={"every_steps": 2}, **NEVER_LEARNS), tmp_path / "other", max_step=8)
    for group, found in tensors(tmp_path / "early")[1].items():
        for name, tensor in found.items():
            assert torch.equal(tensor, tensors(tmp_path / "other")[1][group][name])


def test_a_lost_checkpoint_repeats_the_decision(tmp_path, dataset):
    config = stopping_config(dataset, checkpoints={"every_steps": 2, "keep": 9}, **NEVER_LEARNS)
    run(config, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        if path.name > "step-00000004":
            shutil.rmtree(path)
    again = run(config, tmp_path / "run")
    assert (again.reason, again.step) == ("early stopping", 8)


# Before its time, and after it


def test_the_target_and_the_last_step_come_first(tmp_path, dataset):
    config = stopping_config(dataset, patience=1, **NEVER_LEARNS)
    reached = config.model_copy(
        update={"evaluation": config.evaluation.model_copy(update={"target_accuracy": 0.0})}
    )
    assert run(reached, tmp_path / "target").reason == "target"
    short = stopping_config(dataset, patience=1, training__max_steps=4, **NEVER_LEARNS)
    assert run(short, tmp_path / "short").reason == "max_steps"


def test_the_evaluation_at_the_end_does_not_count(tmp_path, dataset):
    config = stopping_config(dataset, every=8, patience=2, **NEVER_LEARNS)
    assert run(config, tmp_path / "run").reason == "max_steps"
    assert tensors(tmp_path / "run")[2] == {"best": 0.0, "waited": 1}


def test_a_lower_learning_rate_must_have_a_chance(dataset):
    plateau = {"training__plateau": {"patience": 3}}
    with pytest.raises(ValueError, match=r"early_stopping\.patience 3 ends training before a learning rate"):
        stopping_config(dataset, patience=3, **plateau)
    stopping_config(dataset, patience=4, **plateau)


def test_with_a_plateau_the_learning_rate_is_lowered_before_training_ends(tmp_path, dataset):
    config = stopping_config(dataset, patience=3, training__plateau={"patience": 1}, **NEVER_LEARNS)
    run(config, tmp_path / "run")
    lowered = [row["step"] for row in Run(tmp_path / "run").rows(EVENTS) if "lowered" in row["event"]]
    assert lowered == [4, 6, 8]


def test_early_stopping_needs_evaluations(dataset):
    with pytest.raises(ValueError, match=r"training\.early_stopping is decided by evaluations"):
        stopping_config(dataset, every=None)


# A run that has ended early


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "run"
    config = stopping_config(dataset, **NEVER_LEARNS)
    return path, config, run(config, path)


@pytest.fixture
def ended(trained, tmp_path):
    return Run(shutil.copytree(trained[0], tmp_path / "run"))


def changed(config, **training):
    tree = config.model_dump()
    tree["training"].update(training)
    return RunConfig.model_validate(tree)


def test_it_is_finished_without_a_trainer_and_listed_as_stopped_early(trained, capfd):
    path, config, outcome = trained
    assert finished_outcome(Run(path), config) == outcome
    assert summarise(Run(path)).state == "stopped early"
    assert trm.train(path).reason == "early stopping"
    assert "has finished already" in capfd.readouterr().err


def test_the_command_line_says_so_and_how_to_continue(trained):
    path, _, outcome = trained
    lines = _outcome_text(outcome).splitlines()
    expected = "Early stopping: the primary metric no longer improved. Training ended after step 8,"
    assert lines[0].startswith(expected)
    assert lines[-1] == f"To train it longer: trm train {path} --more-steps N"


def test_another_patience_or_none_continues_it(ended, trained):
    patient = changed(trained[1], early_stopping={"patience": 5})
    assert finished_outcome(ended, patient) is None
    outcome = run(patient, ended.path)
    assert (outcome.reason, outcome.step) == ("early stopping", 12)
    outcome = run(changed(trained[1], early_stopping=None), ended.path)
    assert (outcome.reason, outcome.step) == ("max_steps", 20)
    assert summarise(ended).state == "finished"


def test_more_steps_are_trained_whatever_the_accuracy(ended, trained):
    display = Recorder()
    longer = extend(ended, trained[1], 6, display)
    assert display.messages == [f"Training {ended.path} from step 8 to step 14, whatever its result."]
    assert summarise(ended).state == "stopped"
    run(longer, ended.path, max_step=10)
    again = extend(ended, ended.config, 6, display)  # the same request, after an interruption
    outcome = run(again, ended.path)
    assert (outcome.reason, outcome.step) == ("max_steps", 14)


def test_more_steps_with_another_patience_end_by_it(ended, trained):
    display = Recorder()
    longer = extend(ended, changed(trained[1], early_stopping={"patience": 4}), 6, display)
    assert display.messages[0].endswith("to step 14 or early stopping.")
    assert run(longer, ended.path, max_step=9).reason == "limit"
    again = extend(ended, longer, 6, display)
    outcome = run(again, ended.path)
    assert (outcome.reason, outcome.step) == ("early stopping", 10)


def test_more_steps_before_the_end_are_refused(tmp_path, dataset):
    config = stopping_config(dataset, **NEVER_LEARNS)
    run(config, tmp_path / "run", max_step=6)
    with pytest.raises(RunError, match="has not finished: it is at step 6 of 20"):
        extend(Run(tmp_path / "run"), config, 5, Recorder())


def test_a_run_that_was_killed_before_it_recorded_its_end_ends_again(ended, trained):
    rows = [row for row in ended.rows(EVENTS) if row["event"] != "stopped"]
    (ended.path / EVENTS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = run(trained[1], ended.path)
    assert (outcome.reason, outcome.step) == ("early stopping", 8)


def test_evaluations_with_other_settings_start_anew(ended, trained):
    tree = trained[1].model_dump()
    tree["inference"]["depth"] = 2
    outcome = run(RunConfig.model_validate(tree), ended.path)
    assert (outcome.reason, outcome.step) == ("early stopping", 16)


def test_a_checkpoint_of_an_earlier_version_has_waited_for_nothing(ended):
    metadata = dict(ended.checkpoints().newest_intact().metadata)
    del metadata["early_stopping"]
    assert SavedState.model_validate(metadata).early_stopping.waited == 0
