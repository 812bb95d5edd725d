"""When a run saves, what happens when it cannot, and which checkpoint is the best."""

import os
import signal

import pytest
import torch
from tiny import Recorder, plan_of, run, run_config, sudoku_dataset

from macbook_optimization.errors import CheckpointError
from trm.config import CheckpointsConfig
from trm.runs.directory import EVENTS, METRICS, Run
from trm.runs.events import SavedAgain
from trm.runs.rows import EvalRow
from trm.training.checkpointing import Checkpointer
from trm.training.log import RunLog
from trm.training.loop import Limits
from trm.training.start import train


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


def events(path, *names):
    rows = Run(path).rows(EVENTS)
    return [row for row in rows if not names or row["event"] in names]


# Full disks


def test_a_new_run_without_room_for_a_checkpoint_does_not_start(tmp_path, dataset, monkeypatch):
    monkeypatch.setattr("macbook_optimization.checkpoint_management.free_bytes", lambda path: 2**19)
    with pytest.raises(CheckpointError, match=r"A checkpoint needs 1.0 MiB, and 0.5 MiB are free"):
        run(run_config(dataset), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_whose_disk_is_full_warns_continues_and_saves_when_there_is_room(
    tmp_path, dataset, monkeypatch
):
    config = run_config(dataset, checkpoints={"every_steps": 2})
    run(config, tmp_path / "run", max_step=4)
    free = 2**19
    monkeypatch.setattr("macbook_optimization.checkpoint_management.free_bytes", lambda path: free)
    monkeypatch.setattr("trm.training.checkpointing.RETRY_SECONDS", 0.0)
    monkeypatch.setattr("trm.training.checkpointing.TIME_SHARE", 1e9)

    def make_room(facts, done):
        nonlocal free
        if done == 15:
            free = 2**40

    display = Recorder(make_room)
    assert train(config, tmp_path / "run", plan_of(config), Limits(), display).step == 20
    assert any("Nothing can be saved until there is room" in text for text in display.messages)
    warnings = [text for text in display.messages if text.startswith("warning: step")]
    assert len(warnings) == 1
    assert "step 4 is safe" in warnings[0]
    assert [row["step"] for row in events(tmp_path / "run", "not saved", "saved again")] == [6, 15]


@pytest.mark.parametrize("room", [True, False], ids=["which then has room", "which stays full"])
def test_ctrl_c_on_a_full_disk_waits_for_room_or_a_second_ctrl_c(tmp_path, dataset, monkeypatch, room):
    config = run_config(dataset, checkpoints={"every_steps": 2})
    run(config, tmp_path / "run", max_step=4)
    free = 0
    monkeypatch.setattr("macbook_optimization.checkpoint_management.free_bytes", lambda path: free)
    monkeypatch.setattr("trm.training.checkpointing.RETRY_SECONDS", 0.2)

    def interrupt(facts, done):
        if done == 9:
            os.kill(os.getpid(), signal.SIGINT)

    class Patient(Recorder):
        def message(self, text):
            nonlocal free
            if "Ctrl-C again gives up, and step 4 is safe" in text:
                free = 2**40 if room else free
                if not room:
                    os.kill(os.getpid(), signal.SIGINT)

    child = os.fork()  # the second Ctrl-C ends the process
    if child == 0:
        reason = train(config, tmp_path / "run", plan_of(config), Limits(), Patient(interrupt)).reason
        os._exit(0 if reason == "interrupted" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if room else 130)
    assert Run(tmp_path / "run").checkpoints().newest_intact().step == (9 if room else 4)


def test_ctrl_c_while_a_finished_run_waits_for_room_says_what_is_lost(tmp_path, dataset, monkeypatch):
    config = run_config(dataset, checkpoints={"every_steps": 2})
    run(config, tmp_path / "run", max_step=4)
    monkeypatch.setattr("macbook_optimization.checkpoint_management.free_bytes", lambda path: 0)

    class Impatient(Recorder):
        def message(self, text):
            if "Ctrl-C gives up" in text:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(CheckpointError, match=r"is lost: step 4 is safe"):
        train(config, tmp_path / "run", plan_of(config), Limits(), Impatient())


def eval_row(step):
    return EvalRow(
        step=step,
        seconds=1.0,
        examples=12,
        metrics={"exact_accuracy": 0.5},
        tables={},
        mean_steps=3.0,
        accuracy_by_depth=[0.5],
        evaluation_seconds=0.1,
    )


def test_rows_that_a_full_disk_refuses_are_written_when_there_is_room(tmp_path):
    (tmp_path / METRICS).mkdir()  # so that nothing can be written there
    display = Recorder()
    log = RunLog(Run(tmp_path), display)
    log.row(eval_row(step=1))
    log.event(SavedAgain(step=2))
    assert len(display.messages) == 1
    assert "Training continues" in display.messages[0]
    (tmp_path / METRICS).rmdir()
    log.row(eval_row(step=3))
    expected = [eval_row(step).to_json() for step in (1, 3)]
    assert [{**row, "time": 0} for row in Run(tmp_path).rows()] == [{**row, "time": 0} for row in expected]
    assert [row["event"] for row in Run(tmp_path).rows(EVENTS)] == ["saved again"]


# When to save


def make_checkpointer(tmp_path, **settings):
    run = Run(tmp_path)
    return Checkpointer(CheckpointsConfig(**settings), run.checkpoints(), RunLog(run, Recorder()))


def test_saving_takes_less_than_one_percent_of_the_time_on_any_disk(tmp_path):
    checkpointer = make_checkpointer(tmp_path, every_seconds=60)
    assert checkpointer.every_seconds == 60
    checkpointer.save_seconds = 3.0  # a slow disk
    assert checkpointer.save_seconds / checkpointer.every_seconds < 0.01
    checkpointer.saved_at -= 300
    assert not checkpointer.is_due(7)
    checkpointer.saved_at -= 400
    assert checkpointer.is_due(7)


def test_a_failed_save_is_retried_soon_but_not_at_every_step(tmp_path, monkeypatch):
    checkpointer = make_checkpointer(tmp_path, every_seconds=60, every_steps=1)
    monkeypatch.setattr("macbook_optimization.checkpoint_management.free_bytes", lambda path: 0)
    assert not checkpointer.save(3, {"weights": {"w": torch.zeros(2)}}, {})
    assert not checkpointer.is_due(4)
    checkpointer.failed_at -= 11
    assert checkpointer.is_due(4)


# The best


def test_a_target_that_was_reached_just_before_a_kill_still_ends_the_run(tmp_path, dataset, monkeypatch):
    """The kill comes between the checkpoint and the file that marks it as the best."""
    config = run_config(dataset, evaluation__target_accuracy=0.0)
    monkeypatch.setattr(Checkpointer, "mark_best", lambda self, best: os.kill(os.getpid(), signal.SIGKILL))
    child = os.fork()
    if child == 0:
        run(config, tmp_path / "run")
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    monkeypatch.undo()
    assert Run(tmp_path / "run").checkpoints().best() is None
    outcome = run(config, tmp_path / "run")
    assert (outcome.reason, outcome.step) == ("target", 10)
    assert Run(tmp_path / "run").checkpoints().best()["checkpoint"] == "step-00000010"


def test_a_best_that_could_not_be_marked_is_marked_before_rotation_removes_it(tmp_path, dataset):
    config = run_config(dataset, checkpoints={"every_steps": 2, "keep": 1}, evaluation__every_steps=5)
    obstacle = tmp_path / "run" / "best"

    def block(facts, done):
        if facts.startswith("loss") and done == 3:
            obstacle.mkdir()
        if facts.startswith("loss") and done == 6:
            obstacle.rmdir()

    display = Recorder(block)
    train(config, tmp_path / "run", plan_of(config), Limits(max_step=9), display)
    assert [text for text in display.messages if text.startswith("warning: Cannot write")]
    checkpoints = Run(tmp_path / "run").checkpoints()
    assert checkpoints.best()["checkpoint"] == "step-00000005"
    assert checkpoints.best_or_newest().step == 5


def test_a_best_whose_weights_are_lost_is_not_the_best(tmp_path, dataset):
    config = run_config(dataset, checkpoints={"every_steps": 4}, evaluation__every_steps=10)
    run(config, tmp_path / "run", max_step=10)
    (tmp_path / "run" / "checkpoints" / "step-00000010" / "ema.safetensors").write_bytes(b"")
    outcome = run(config, tmp_path / "run", max_step=12)
    assert outcome.best["step"] == 10
    assert Run(tmp_path / "run").checkpoints().best_or_newest().step == 10, "evaluated and saved again"
