"""NaN and Inf: steps are skipped, runs return to a good checkpoint, and nothing of it is ever saved."""

import pytest
import torch
from tiny import Recorder, plan_of, run, run_config, sudoku_dataset

from macbook_optimization.errors import NonFiniteError
from trm.runs.directory import EVENTS, Run
from trm.training import start
from trm.training.loop import Limits, Trainer
from trm.training.start import train


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


def events(path, *names):
    rows = Run(path).rows(EVENTS)
    return [row for row in rows if not names or row["event"] in names]


class Poisoned:
    """A real learner whose loss is NaN at the given steps, if the learning rate is above the given one: a
    weight is NaN during the step."""

    def __init__(self, learner, steps, above):
        self.learner = learner
        self.steps = steps
        self.above = above

    def __getattr__(self, name):
        return getattr(self.learner, name)

    def step(self, batch, settings, next_size):
        if settings.step not in self.steps or settings.learning_rate <= self.above:
            return self.learner.step(batch, settings, next_size)
        weight = self.learner.model.lm_head.weight
        before = weight.detach().clone()
        with torch.no_grad():
            weight.fill_(float("nan"))
        try:
            return self.learner.step(batch, settings, next_size)
        finally:
            with torch.no_grad():
                weight.copy_(before)


@pytest.fixture
def poison(monkeypatch):
    load = start.load_backend

    def at(*steps, above=0.0):
        class Backend:
            def __init__(self, execution):
                self.real = load(execution)

            def __getattr__(self, name):
                return getattr(self.real, name)

            def learner(self, *arguments):
                return Poisoned(self.real.learner(*arguments), steps, above)

        monkeypatch.setattr(start, "load_backend", Backend)

    return at


@pytest.mark.parametrize("supervision", ["deep", "terminal"])
def test_a_step_with_a_nan_loss_is_skipped_and_recorded(tmp_path, dataset, poison, supervision):
    poison(4, 5, 9)
    outcome = run(run_config(dataset, training__supervision=supervision), tmp_path / "run")
    assert (outcome.reason, outcome.step) == ("max_steps", 20)
    skipped = events(tmp_path / "run", "step skipped")
    assert [row["step"] for row in skipped] == [4, 5, 9]
    assert "loss is nan" in skipped[0]["cause"]
    assert [row["step"] for row in Run(tmp_path / "run").rows() if row.get("loss") != row.get("loss")] == []


def test_a_skipped_step_takes_new_examples_and_leaves_the_weights_unchanged(tmp_path, dataset, poison):
    config = run_config(dataset)
    run(config, tmp_path / "three", max_step=3)
    poison(4)
    run(config, tmp_path / "four", max_step=4)
    three, four = (Run(tmp_path / name).checkpoints().newest_intact() for name in ("three", "four"))
    for group in ("weights", "ema", "optimizer"):
        for name, tensor in three.load(group).items():
            assert torch.equal(tensor, four.load(group)[name])
    assert all(four.metadata["slots"]["halted"])


def test_three_skipped_steps_in_a_row_return_to_a_checkpoint_with_half_the_learning_rate(
    tmp_path, dataset, poison
):
    config = run_config(dataset, checkpoints={"every_steps": 4})
    poison(10, 11, 12, above=0.006)
    display = Recorder()
    outcome = train(config, tmp_path / "run", plan_of(config), Limits(), display)
    assert outcome.step == 20
    (rollback,) = events(tmp_path / "run", "rolled back")
    assert (rollback["step"], rollback["to"], rollback["learning_rate_scale"]) == (12, 8, 0.5)
    assert any("Returning to step 8 with 0.5" in text for text in display.messages)
    rates = {
        row["step"]: row["learning_rate"] for row in Run(tmp_path / "run").rows() if row["kind"] == "train"
    }
    assert rates[20] == pytest.approx(0.5 * config.training.learning_rate)
    newest = Run(tmp_path / "run").checkpoints().newest_intact()
    assert newest.metadata["learning_rate_scale"] == 0.5
    assert newest.metadata["rolled_back_from"] is None, "training got past it"


def test_without_a_checkpoint_a_rollback_starts_from_the_beginning(tmp_path, dataset, poison):
    poison(1, 2, 3, above=0.006)
    assert run(run_config(dataset), tmp_path / "run").step == 20
    (rollback,) = events(tmp_path / "run", "rolled back")
    assert (rollback["step"], rollback["to"]) == (3, 0)


def test_a_run_whose_rollback_did_not_help_stops_with_an_error(tmp_path, dataset, poison):
    config = run_config(dataset, checkpoints={"every_steps": 4}, evaluation__every_steps=100)
    poison(*range(10, 100))
    with pytest.raises(NonFiniteError, match=r"did not help. That checkpoint is intact") as stopped:
        run(config, tmp_path / "run")
    assert "training.learning_rate" in stopped.value.hint
    assert len(events(tmp_path / "run", "rolled back")) == 1
    newest = Run(tmp_path / "run").checkpoints().newest_intact()
    assert newest.step == 8
    for group in newest.load_all().values():
        assert all(torch.isfinite(tensor).all() for tensor in group.values())


def test_nothing_is_saved_while_steps_are_skipped(tmp_path, dataset, poison):
    """A rollback must not return to the weights that it is meant to leave."""
    config = run_config(dataset, checkpoints={"every_steps": 1, "keep": 2}, evaluation__every_steps=100)
    poison(*range(10, 100))
    with pytest.raises(NonFiniteError, match="did not help"):
        run(config, tmp_path / "run")
    assert [row["to"] for row in events(tmp_path / "run", "rolled back")] == [9]
    assert Run(tmp_path / "run").checkpoints().newest_intact().step == 9


@pytest.mark.slow
def test_a_stop_between_skipped_steps_does_not_change_the_target_of_the_rollback(tmp_path, dataset, poison):
    config = run_config(dataset, checkpoints={"every_steps": 4}, evaluation__every_steps=100)
    poison(10, 11, 12, above=0.006)
    for max_step in (11, 20):
        outcome = run(config, tmp_path / "resumed", max_step=max_step)
    assert outcome.step == 20
    run(config, tmp_path / "whole")
    assert [row["to"] for row in events(tmp_path / "resumed", "rolled back")] == [8]
    one, other = (
        Run(tmp_path / name).checkpoints().newest_intact().load_all() for name in ("resumed", "whole")
    )
    for group, named in one.items():
        assert all(torch.equal(tensor, other[group][name]) for name, tensor in named.items())
    assert (tmp_path / "resumed" / "checkpoints" / "abandoned-step-00000011").is_dir()


@pytest.fixture
def infinite(monkeypatch):
    """Once, after the given step, a moment of the optimizer is Inf."""

    def after(number):
        train_step, done = Trainer._train_step, []

        def with_inf(self, stop):
            result = train_step(self, stop)
            if self.state.step == number and not done:
                moments = self.state.learner.optimizer.moments
                done.append(moments["lm_head.weight.exp_avg_sq"].fill_(float("inf")))
            return result

        monkeypatch.setattr(Trainer, "_train_step", with_inf)

    return after


@pytest.mark.parametrize("at", [8, 20], ids=["during training", "at the end"])
def test_inf_in_the_state_is_never_saved(tmp_path, dataset, infinite, at):
    """It is found when the state is saved, so the run rolls back immediately."""
    infinite(at)
    config = run_config(dataset, checkpoints={"every_steps": 4}, evaluation__every_steps=100)
    outcome = run(config, tmp_path / "run")
    assert (outcome.reason, outcome.step) == ("max_steps", 20)
    (rollback,) = events(tmp_path / "run", "rolled back")
    assert (rollback["step"], rollback["to"]) == (at, at - 4)


def test_an_evaluation_whose_weights_cannot_be_saved_is_not_the_best(tmp_path, dataset, infinite):
    infinite(10)
    config = run_config(dataset, checkpoints={"every_steps": 4}, evaluation__target_accuracy=0.0)
    outcome = run(config, tmp_path / "run")
    assert (outcome.reason, outcome.step) == ("target", 10)
    (rollback,) = events(tmp_path / "run", "rolled back")
    assert (rollback["step"], rollback["to"]) == (10, 8)
    assert Run(tmp_path / "run").checkpoints().best_or_newest().step == 10


def test_a_rollback_past_a_damaged_checkpoint_saves_that_step_again(tmp_path, dataset, poison, monkeypatch):
    config = run_config(dataset, checkpoints={"every_steps": 4}, evaluation__every_steps=100)
    poison(10, 11, 12, above=0.006)
    roll_back = Trainer._roll_back

    def after_damage(self, error):
        (self.checkpointer.manager.path(8) / "ema.safetensors").write_bytes(b"")
        roll_back(self, error)

    monkeypatch.setattr(Trainer, "_roll_back", after_damage)
    display = Recorder()
    train(config, tmp_path / "run", plan_of(config), Limits(), display)
    assert not [text for text in display.messages if text.startswith("warning")]
    assert [row["to"] for row in events(tmp_path / "run", "rolled back")] == [4]
    assert (tmp_path / "run" / "checkpoints" / "damaged-step-00000008").is_dir()
