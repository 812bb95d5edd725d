"""The state of a run is decided once: `trm runs`, `trm watch` and `trm report` use the same words."""

import json
import time

import pytest
from click.testing import CliRunner
from recorded import append_all, recorded_run, train_row

from trm.cli import cli
from trm.runs.directory import EVENTS, METRICS, Run, begin, only_trainer
from trm.runs.events import Advised, Extended, PlanChosen, Resumed, Stopped
from trm.runs.listing import describe_runs, summarise
from trm.runs.state import read_last, state_of


def stop(run, reason, step):
    run.record(Stopped(reason, step, step + 2.0, 2**29))


def finished(run):
    stop(run, "max_steps", 40)


def finished_with_advice_after_it(run):
    stop(run, "max_steps", 40)
    run.record(Advised(40, "contention", "Other programs were busy.", "Close them."))


def stopped(run):
    (run.path / METRICS).write_text("".join(json.dumps(train_row(step)) + "\n" for step in range(1, 31)))
    stop(run, "interrupted", 30)


def extended(run):
    stop(run, "max_steps", 40)
    tree = run.config.model_dump()
    tree["training"]["extensions"] = {40: 60}
    begin(run, type(run.config).model_validate(tree))
    run.record(Extended(40, 60))


def crashed(run):
    run.record(Resumed(30, []))


def crashed_before_its_first_row(run):
    stopped(run)
    run.record(Resumed(30, []))
    run.record(PlanChosen({}))


def new(run):
    (run.path / METRICS).unlink()


STATES = {
    finished: "finished",
    finished_with_advice_after_it: "finished",
    stopped: "stopped",
    extended: "stopped",
    crashed: "crashed",
    crashed_before_its_first_row: "crashed",
    new: "new",
}


def said(command, run, *options):
    done = CliRunner().invoke(cli, [command, str(run.path), *options, "--json"], catch_exceptions=False)
    return json.loads(done.stdout)


def states_said(run):
    report = said("report", run, "--no-examples")["state"]["name"]
    return [said("runs", run)[0]["state"], said("watch", run)["state"], report]


@pytest.mark.parametrize("prepare", STATES)
def test_every_command_says_the_same(tmp_path, prepare):
    run = recorded_run(tmp_path / "run", stopped=False)
    prepare(run)
    assert states_said(run) == [STATES[prepare]] * 3
    with only_trainer(run.path):
        time.sleep(0.01)
        locked = states_said(run)
    assert locked == ["running"] * 3, "a lock that is newer than the last stop is that of another start"


def test_a_run_with_a_damaged_recipe_has_a_state_all_the_same(tmp_path):
    run = recorded_run(tmp_path / "run")
    (run.path / "recipe.yaml").write_text("- garbage")
    assert summarise(run).state == said("report", run, "--no-examples")["state"]["name"] == "finished"


def test_the_listed_step_and_seconds_are_of_the_same_row(tmp_path):
    run = recorded_run(tmp_path / "run", stopped=False)
    run.checkpoints().directory.joinpath("step-00000025").mkdir(parents=True)
    found = summarise(run)
    assert (found.step, found.seconds, found.saved_step) == (40, 40.0, 25)
    (line,) = describe_runs([found])
    assert "crashed  step 40/40 (saved: 25)  40 s" in line


def test_a_run_without_events_is_finished_if_its_last_step_is_saved(tmp_path):
    run = recorded_run(tmp_path / "run")
    (run.path / EVENTS).unlink()
    assert state_of(run, run.config, read_last(run)).name == "crashed"
    run.checkpoints().directory.joinpath("step-00000040").mkdir(parents=True)
    assert state_of(run, run.config, read_last(run)).name == "finished"


def test_a_copy_of_a_run_that_is_being_trained_is_not_running(tmp_path):
    run = recorded_run(tmp_path / "run", stopped=False)
    with only_trainer(run.path):
        copy = recorded_run(tmp_path / "copy", stopped=False)
        append_all(copy, METRICS, [train_row(41)])
        assert [summarise(Run(each.path)).state for each in (run, copy)] == ["running", "crashed"]
