"""A finished run can be trained longer, without changing what it has learned so far."""

import shutil

import pytest
import torch
from tiny import Recorder, run, run_config, sudoku_dataset

from macbook_optimization.errors import ConfigError, RunError
from trm.config import load_config
from trm.inference.predict import open_model
from trm.runs.directory import EVENTS, Run
from trm.runs.listing import summarise
from trm.training.extension import extend


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture(scope="module")
def config(dataset):
    """A learning rate that decays, so that the schedule depends on the last step."""
    return run_config(dataset, training__lr_min_ratio=0.1, checkpoints={"every_steps": 5})


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "run"
    assert run(config, path).reason == "max_steps"
    return path


@pytest.fixture
def finished(trained, tmp_path):
    return Run(shutil.copytree(trained, tmp_path / "run"))


def weights(path):
    checkpoint = Run(path).checkpoints().newest_intact()
    return checkpoint.step, checkpoint.load_all()


def assert_same_weights(one, other):
    first, second = weights(one), weights(other)
    assert first[0] == second[0]
    for group, tensors in first[1].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, second[1][group][name]), f"{group} {name}"


def request(run, num_steps, display=None, **options):
    """Do what `trm train RUN --more-steps N` does before it trains."""
    return extend(run, run.config, num_steps, display or Recorder(), **options)


def test_a_finished_run_is_trained_for_exactly_the_requested_steps(finished):
    display = Recorder()
    longer = request(finished, 10, display)
    assert (summarise(finished).state, summarise(finished).max_steps) == ("stopped", 30)
    outcome = run(longer, finished.path)
    assert (outcome.reason, outcome.step) == ("max_steps", 30)
    assert summarise(finished).state == "finished"
    (event,) = [row for row in finished.rows(EVENTS) if row["event"] == "extended"]
    assert (event["step"], event["last_step"]) == (20, 30)
    assert display.messages == [
        f"Training {finished.path} from step 20 to step 30, whatever its result. The learning rate decays "
        "until then: from 29% of its peak, after 10% in the last step."
    ]
    open_model(finished.path)  # whichever of its checkpoints is the best


@pytest.mark.slow
def test_an_extended_run_can_be_repeated_from_its_recipe_bit_for_bit(finished, tmp_path):
    """Even if the checkpoint that it was extended from is lost: earlier steps keep their learning rate."""
    longer = request(finished, 10)
    shutil.rmtree(finished.path / "checkpoints" / "step-00000020")
    run(longer, finished.path)
    run(load_config(finished.path), tmp_path / "repeated")
    assert_same_weights(finished.path, tmp_path / "repeated")


def test_the_same_request_resumes_an_extension_that_was_interrupted(finished):
    assert run(request(finished, 10), finished.path, max_step=25).reason == "limit"
    assert run(request(finished, 10), finished.path, max_step=26).step == 26
    assert run(finished.config, finished.path).step == 30, "and so does `trm train RUN`"


def test_a_different_request_before_the_end_is_refused_and_changes_nothing(finished):
    run(request(finished, 10), finished.path, max_step=25)
    before = finished.config
    with pytest.raises(RunError, match="has not finished: it is at step 25 of 30") as caught:
        request(finished, 11)
    assert f"`trm train {finished.path}` trains the rest" in caught.value.hint
    assert finished.config == before


def test_a_run_can_be_extended_again_when_it_has_finished(finished):
    run(request(finished, 10), finished.path)
    longer = request(finished, 5)
    assert longer.training.extensions == {20: 30, 30: 35}
    assert run(longer, finished.path).step == 35


def test_a_run_that_has_not_finished_is_not_extended(config, tmp_path):
    run(config, tmp_path / "run", max_step=5)
    with pytest.raises(RunError, match="it is at step 5 of 20"):
        request(Run(tmp_path / "run"), 10)


@pytest.mark.slow
def test_a_target_that_was_reached_does_not_stop_the_extension(dataset, tmp_path):
    """It ends N steps after the present one, even if that is before the `max_steps` that it did not need."""
    path = tmp_path / "run"
    config = run_config(dataset, evaluation__target_accuracy=0.0)
    assert (run(config, path).reason, run(config, path).step) == ("target", 10)
    outcome = run(request(Run(path), 3), path)
    assert (outcome.reason, outcome.step) == ("max_steps", 13)
    assert Run(path).rows()[-2]["kind"] == "eval"
    assert run(request(Run(path), 15), path).step == 28


def test_a_target_that_is_given_again_counts(finished, dataset):
    display = Recorder()
    with_target = run_config(
        dataset, training__lr_min_ratio=0.1, evaluation={"every_steps": 2, "target_accuracy": 0.0}
    )
    longer = extend(finished, with_target, 10, display, keep_target=True)
    assert "or a target of 0.0%" in display.messages[0]
    assert run(longer, finished.path).reason == "target"


def test_an_extension_does_not_change_what_is_learned_otherwise(finished, dataset):
    other = run_config(dataset, training__lr_min_ratio=0.1, training__learning_rate=0.5)
    before = finished.config
    with pytest.raises(RunError, match=r"training.learning_rate is 0.5 here and 0.01 in the run"):
        extend(finished, other, 10, Recorder())
    assert finished.config == before


def test_a_constant_learning_rate_is_not_mentioned(dataset, tmp_path):
    run(run_config(dataset), tmp_path / "run")
    display = Recorder()
    assert run(request(Run(tmp_path / "run"), 5, display), tmp_path / "run").step == 25
    assert "learning rate" not in display.messages[0]


@pytest.mark.parametrize("changes", [{"training__max_steps": 30}, {"training__extensions": {20: 30}}])
def test_a_recipe_of_another_length_is_refused_with_the_easy_way(finished, dataset, changes):
    other = run_config(dataset, training__lr_min_ratio=0.1, **changes)
    with pytest.raises(RunError, match="holds a run of another recipe") as caught:
        run(other, finished.path)
    assert f"`trm train {finished.path} --more-steps N` trains it longer" in caught.value.hint
    with pytest.raises(RunError) as caught:
        run(other.model_copy(update={"seed": 5}), finished.path)
    assert "--more-steps" not in caught.value.hint


def test_an_extension_ends_after_it_starts(dataset):
    with pytest.raises(ConfigError, match="extensions must end after they start"):
        load_config("sudoku-6x6", ["training.extensions={400: 400}"])
