"""A plateau of the primary metric lowers the learning rate, and interruptions change nothing about it."""

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import Recorder, plan_of, run, run_config, sudoku_dataset

from macbook_optimization.errors import RunError
from trm.config import PlateauConfig
from trm.runs.directory import EVENTS, Run
from trm.training.extension import extend
from trm.training.loop import Limits
from trm.training.plateau import Plateau
from trm.training.start import train

SETTINGS = {"patience": 1, "factor": 0.5, "min_ratio": 0.2}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


def plateau_config(dataset, every=3, **changes):
    """Return a recipe that hardly learns, so that its metric hardly improves."""
    return run_config(dataset, evaluation={"every_steps": every}, training__plateau=SETTINGS, **changes)


def scales_after(values, **settings):
    now = Plateau()
    scales = []
    for value in values:
        now = now.after(value, PlateauConfig.model_validate(settings))
        scales.append(now.scale)
    return scales


def test_the_learning_rate_is_lowered_after_patience_evaluations_without_a_new_best():
    values = [0.1, 0.2, 0.2, 0.1, 0.3, 0.3, 0.3, 0.2, 0.1]
    assert scales_after(values, patience=2, factor=0.5) == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125]


def test_reductions_end_at_the_lowest_ratio():
    assert scales_after([0.5] * 6, patience=1, factor=0.1, min_ratio=0.05) == [1, 0.1, 0.05, 0.05, 0.05, 0.05]


def test_a_metric_that_improves_changes_nothing():
    assert set(scales_after([step / 10 for step in range(10)], patience=1)) == {1.0}


@given(st.lists(st.floats(0, 1), max_size=40), st.integers(1, 5), st.floats(0.1, 0.9), st.floats(0.01, 1))
def test_the_factor_never_grows_and_never_falls_below_the_lowest_ratio(values, patience, factor, ratio):
    scales = [1.0, *scales_after(values, patience=patience, factor=factor, min_ratio=ratio)]
    assert scales == sorted(scales, reverse=True)
    assert scales[-1] >= min(ratio, 1.0)


def weights(path):
    checkpoint = Run(path).checkpoints().newest_intact()
    return checkpoint.step, checkpoint.load_all(), checkpoint.metadata["plateau"]


def assert_same_run(one, other):
    """Bit for bit, and with the same state of the plateau."""
    first, second = weights(one), weights(other)
    assert (first[0], first[2]) == (second[0], second[2])
    for group, tensors in first[1].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, second[1][group][name]), f"{group} {name}"


def lowered(path):
    return [
        (row["step"], row["scale"])
        for row in Run(path).rows(EVENTS)
        if row["event"] == "learning rate lowered"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("supervision", ["deep", "terminal"])
def test_stopping_and_resuming_changes_nothing(tmp_path, dataset, supervision):
    """Stops before, at and after an evaluation."""
    config = plateau_config(dataset, training__supervision=supervision)
    run(config, tmp_path / "whole")
    for stop_at in (5, 6, 10, 20):
        run(config, tmp_path / "parts", max_step=stop_at)
    assert lowered(tmp_path / "whole"), "nothing was lowered, so this shows nothing"
    assert lowered(tmp_path / "parts") == lowered(tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_a_lost_checkpoint_repeats_the_evaluations_and_their_decisions(tmp_path, dataset):
    config = plateau_config(dataset, checkpoints={"every_steps": 4, "keep": 9})
    run(config, tmp_path / "whole")
    run(config, tmp_path / "killed", max_step=13)
    directory = tmp_path / "killed" / "checkpoints"
    for path in directory.glob("step-*"):
        if path.name > "step-00000008":
            shutil.rmtree(path)
    run(config, tmp_path / "killed")
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_a_lower_learning_rate_is_used_recorded_and_shown(tmp_path, dataset):
    config = plateau_config(dataset, every=2, training__learning_rate=1e-9)
    display = Recorder()
    for stop_at in (2, 4, 6, 20):
        train(config, tmp_path / "run", plan_of(config), Limits(max_step=stop_at), display)
    assert lowered(tmp_path / "run") == [(4, 0.5), (6, 0.25), (8, 0.2)]
    rates = [row["learning_rate"] for row in Run(tmp_path / "run").rows() if row["kind"] == "train"]
    assert rates == pytest.approx([1e-9, 1e-9, 0.5e-9, 0.2e-9])
    shown = [text for text in display.messages if "learning rate is" in text]
    assert (
        shown[0] == "Exact accuracy has not improved on 0.0%: the learning rate is 0.5 of its schedule now."
    )
    assert len(shown) == 3


@pytest.mark.slow
def test_the_evaluation_at_the_end_does_not_count(tmp_path, dataset):
    """A longer run would not have made it, and more steps must give the same run."""
    config = plateau_config(dataset, every=8, training__learning_rate=1e-9)
    run(config, tmp_path / "run")
    assert lowered(tmp_path / "run") == [(16, 0.5)]
    longer = extend(Run(tmp_path / "run"), config, 10, Recorder())
    run(longer, tmp_path / "run")
    run(Run(tmp_path / "run").config, tmp_path / "repeated")
    assert_same_run(tmp_path / "run", tmp_path / "repeated")


def test_other_evaluations_are_another_run(tmp_path, dataset):
    run(plateau_config(dataset), tmp_path / "run", max_step=4)
    with pytest.raises(RunError, match=r"evaluation.every_steps is 5 here and 3 in the run"):
        run(plateau_config(dataset, every=5), tmp_path / "run")


def test_a_roll_back_to_the_start_forgets_the_plateau(tmp_path, dataset):
    from trm.backends.base import SingleProcess
    from trm.feed import Feed
    from trm.tasks.dataset import open_split
    from trm.tasks.registry import load_task
    from trm.training.state import TrainingState

    config = plateau_config(dataset)
    feed = Feed(config, load_task("sudoku"), open_split(dataset, "train"))
    state = TrainingState(config, plan_of(config), feed, SingleProcess(6), lambda: None)
    state.step = 3
    for _ in range(3):
        state.after_evaluation(0.5)
    assert state.plateau == Plateau(best=0.5, waited=0, scale=0.25)
    state.roll_back(None)
    assert (state.plateau, state.learning_rate_scale) == (Plateau(), 0.5)
