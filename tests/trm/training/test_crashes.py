"""A start that crashed is recorded by the next one: what it lost, and where it continues."""

import json

import pytest
from tiny import Recorder, plan_of, run, run_config, sudoku_dataset

from trm.reports.facts import REPEATED, read_history_leniently, time_shares, training_seconds
from trm.reports.monitor import view_of
from trm.runs.directory import EVENTS, METRICS, Run
from trm.training.loop import Limits
from trm.training.start import train


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("crashes") / "set")


def crash_after(path, step):
    """Make a run look as if it had gone on and been killed: a row after its last checkpoint, and no end."""
    found = Run(path)
    kept = [row for row in found.rows(EVENTS) if row["event"] != "stopped"]
    (path / EVENTS).write_text("".join(json.dumps(row) + "\n" for row in kept))
    last = found.last_row(accept=lambda row: row["kind"] == "train")
    lost = {**last, "step": step, "seconds": last["seconds"] + 5, "spent": {"forward": 3.0, "backward": 2.0}}
    found.append(METRICS, lost)
    return found


def resumed(config, path):
    display = Recorder()
    train(config, path, plan_of(config), Limits(), display)
    return display.messages


def test_a_crash_is_an_event_of_the_start_that_follows_it(tmp_path, dataset):
    config = run_config(dataset)
    run(config, tmp_path / "run", max_step=4)
    crashed = crash_after(tmp_path / "run", 9)
    messages = resumed(config, crashed.path)
    assert "The last start crashed after step 9: 5 steps will be repeated." in messages
    (event,) = [row for row in crashed.rows(EVENTS) if row["event"] == "crashed"]
    assert (event["step"], event["reported_step"], event["repeated_steps"]) == (4, 9, 5)
    view = view_of(crashed, config)
    view.read()
    shown = "the start before crashed after step 9; resumed from step 4, 5 steps repeated"
    assert any(shown in line for line in view.lines(200))
    history = read_history_leniently(crashed, [])
    shares = {part.activity: part.seconds for part in time_shares(history)}
    assert shares.pop(REPEATED) == pytest.approx(5.0)
    assert sum(shares.values()) == pytest.approx(training_seconds(history))


def test_a_crash_before_the_first_checkpoint_loses_every_step(tmp_path, dataset):
    config = run_config(dataset)
    run(config, tmp_path / "run", max_step=4)
    crashed = crash_after(tmp_path / "run", 9)
    for checkpoint in crashed.checkpoints().directory.iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)
    resumed(config, crashed.path)
    (event,) = [row for row in crashed.rows(EVENTS) if row["event"] == "crashed"]
    assert (event["step"], event["repeated_steps"]) == (0, 9)


def test_a_run_that_stopped_and_is_resumed_has_not_crashed(tmp_path, dataset):
    config = run_config(dataset)
    run(config, tmp_path / "run", max_step=4)
    resumed(config, tmp_path / "run")
    assert "crashed" not in [row["event"] for row in Run(tmp_path / "run").rows(EVENTS)]
