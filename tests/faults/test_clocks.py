"""A suspended machine and a clock that jumps: no negative rates, and at most one additional save."""

import math
import os
import signal
import sys
import time
from itertools import pairwise

import pytest
import torch
from processes import start, trainer_of, wait_for

from macbook_optimization.checkpoint_files import open_checkpoint
from trm.runs.directory import Run

# Without evaluations, because a new best is saved immediately.
KEEP_ALL = ("checkpoints.every_steps=null", "checkpoints.keep=10000", "evaluation.every_steps=100000")


def has_rising_times_and_finite_rates(run):
    rows = [row for row in run.rows() if "loss" in row]
    times = [row["seconds"] for row in rows]
    rates = [row["samples_per_second"] for row in rows]
    rising = all(later > earlier for earlier, later in pairwise(times))
    return rows and rising and all(rate > 0 and math.isfinite(rate) for rate in rates)


def save_times(run):
    """Return the seconds of training at which checkpoints were saved."""
    paths = sorted((run.path / "checkpoints").glob("step-*"))
    return [open_checkpoint(path).metadata["seconds"] for path in paths]


@pytest.mark.slow
def test_a_suspended_process_saves_once_and_continues(tmp_path, tally, full):
    asleep, every, steps = (60, 20, 400) if full else (4, 1, 100)
    process = start(tmp_path, *KEEP_ALL, f"checkpoints.every_seconds={every}", "--max-steps", str(steps))
    run, trainer = Run(tmp_path / "run"), trainer_of(process)
    wait_for(lambda: any("loss" in row for row in run.rows()))
    for number in (signal.SIGSTOP, signal.SIGCONT):
        process.send_signal(number)
        trainer.send_signal(number)
        if number == signal.SIGSTOP:
            time.sleep(asleep)
    assert process.wait(300) == 0, (tmp_path / "log").read_text()
    close = [later - earlier for earlier, later in pairwise(save_times(run)[:-1]) if later - earlier < every]
    survived = has_rising_times_and_finite_rates(run) and not close  # the last save is that of the end
    longest = max(later["seconds"] - earlier["seconds"] for earlier, later in pairwise(run.rows()))
    assert longest >= asleep, "the process was not suspended while it trained"
    assert tally(f"suspended for {asleep} s").add(survived), save_times(run)


JUMPING = """
import itertools, time
_real, _jumps = time.time, itertools.cycle([0, 86400, -86400, 1e9, -1e9])
time.time = lambda: _real() + next(_jumps)
"""


@pytest.mark.slow
def test_a_clock_that_jumps_does_not_change_training(tmp_path, tally):
    (tmp_path / "jumping").mkdir()
    (tmp_path / "jumping" / "sitecustomize.py").write_text(JUMPING)
    python_path = os.pathsep.join([str(tmp_path / "jumping"), *sys.path])
    jumping = {**os.environ, "PYTHONPATH": python_path}
    settings = (*KEEP_ALL, "checkpoints.every_seconds=1", "--max-steps", "60")
    first = start(tmp_path, *settings, run="run")
    wait_for((tmp_path / "set").exists)  # the second start uses the same dataset
    for process in (first, start(tmp_path, *settings, run="shifted", env=jumping)):
        assert process.wait(300) == 0, (tmp_path / "log").read_text()
    run, shifted = Run(tmp_path / "run"), Run(tmp_path / "shifted")
    times = [row["time"] for row in shifted.rows("events.jsonl")]
    assert max(times) - min(times) > 80_000, "the clock did not jump"
    one, other = (each.checkpoints().newest_intact().load_all() for each in (run, shifted))
    same = all(torch.equal(one[group][name], other[group][name]) for group in one for name in one[group])
    spaced = all(later - earlier >= 1 for earlier, later in pairwise(save_times(shifted)[:-1]))
    assert tally("clock jumped").add(same and has_rising_times_and_finite_rates(shifted) and spaced)
