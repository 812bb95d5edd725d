"""`trm tune` as a user runs it: real training, Ctrl-C, and the recipe that it ends with."""

import json
import signal
import subprocess
import time

import pytest
from tiny import FOUR, TINY, TRM

from trm.config import load_config
from trm.runs.directory import EVENTS, Run
from trm.runs.listing import list_runs

pytest.importorskip("optuna")
COMMAND = [
    TRM, "tune", "sudoku-6x6", *FOUR, *TINY, "plan.micro_batch_size=16", "evaluation.every_steps=5",
    "training.max_steps=4000", "--trials", "4", "--run", "tuning", "--json",
]  # fmt: skip


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_a_search_trains_candidates_and_ends_with_a_recipe(tmp_path):
    command = [*COMMAND, "--minutes", "0.1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["seconds_per_trial"] == pytest.approx(1.5)
    assert facts["start"]["number"] == 0
    assert facts["start"]["seconds"] == pytest.approx(1.5, abs=1.0)
    assert facts["best"]["score"] >= facts["start"]["score"]
    assert facts["evaluated_on"] == "6 held-out training examples; the test split is not used"
    (start, *_) = list_runs(tmp_path / "tuning" / "trials")
    assert start.step == facts["start"]["step"] > 0
    evaluation = facts["start"]["evaluation"]
    assert evaluation["examples"] == 6
    best = load_config(tmp_path / facts["recipe"])
    assert str(best.data.path) == "set"
    train = [TRM, "train", facts["recipe"], "--max-steps", "2"]
    trained = subprocess.run(train, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert trained.returncode == 0, trained.stderr
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert again.returncode == 0
    assert json.loads(again.stdout)["trials"] == facts["trials"], "the time is over"


@pytest.mark.slow
def test_ctrl_c_keeps_everything_and_the_same_command_continues(tmp_path):
    command = [*COMMAND, "--minutes", "0.2"]
    first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run = Run(tmp_path / "tuning" / "trials" / "000")
    wait_for(lambda: (run.path / "metrics.jsonl").exists() and run.rows())
    first.send_signal(signal.SIGINT)
    output, errors = first.communicate(timeout=60)
    assert first.returncode == 130, errors
    assert "Traceback" not in errors
    assert json.loads(output)["is_interrupted"]
    step = run.checkpoints().newest_step()
    assert step is not None, "the run was saved"
    second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert second.returncode == 0, second.stderr
    facts = json.loads(second.stdout)
    assert facts["trials"][0]["run"] == "trials/000"
    events = run.rows(EVENTS)
    resumed = [event for event in events if event["event"] == "resumed"]
    assert resumed[0]["step"] == step
    assert facts["trials"][0]["seconds"] == pytest.approx(3.0, abs=1.5), "in both starts together"


def test_minutes_are_required(tmp_path):
    done = subprocess.run([TRM, "tune", "sudoku-6x6"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--minutes" in done.stderr


@pytest.mark.slow
def test_a_wrong_key_is_one_error_line(tmp_path):
    command = [TRM, "tune", "sudoku-6x6", "model.hiden_size=8", "--minutes", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "did you mean hidden_size?" in done.stderr
    assert not list(tmp_path.iterdir())
