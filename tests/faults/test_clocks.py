"""A night of sleep and a clock that jumps: no negative rates, and one save more at most."""

import math
import os
import signal
import time
from itertools import pairwise

import pytest
import torch
from processes import start, trainer_of, wait_for

from macbook_optimization.checkpoint_files import open_checkpoint
from trm.runs import Run

# A best answer would be a reason of its own to save.
KEEP_ALL = ("checkpoints.every_steps=null", "checkpoints.keep=10000", "evaluation.every_steps=100000")


def sane(run):
    rows = [row for row in run.rows() if "loss" in row]
    times = [row["seconds"] for row in rows]
    rates = [row["samples_per_second"] for row in rows]
    rising = all(later > earlier for earlier, later in pairwise(times))
    return rows and rising and all(rate > 0 and math.isfinite(rate) for rate in rates)


def saves(run):
    """Seconds of training at which there was a save."""
    paths = sorted((run.path / "checkpoints").glob("step-*"))
    return [open_checkpoint(path).metadata["seconds"] for path in paths]


@pytest.mark.slow
def test_a_process_that_was_stopped_saves_once_and_goes_on(tmp_path, tally, full):
    asleep, every, steps = (60, 20, 400) if full else (6, 2, 200)
    process = start(tmp_path, *KEEP_ALL, f"checkpoints.every_seconds={every}", "--max-steps", str(steps))
    run, trainer = Run(tmp_path / "run"), trainer_of(process)
    wait_for(lambda: any("loss" in row for row in run.rows()))
    for number in (signal.SIGSTOP, signal.SIGCONT):
        process.send_signal(number)
        trainer.send_signal(number)
        if number == signal.SIGSTOP:
            time.sleep(asleep)
    assert process.wait(300) == 0, (tmp_path / "log").read_text()
    close = [later - earlier for earlier, later in pairwise(saves(run)[:-1]) if later - earlier < every]
    survived = sane(run) and not close  # the last save is the end's
    longest = max(later["seconds"] - earlier["seconds"] for earlier, later in pairwise(run.rows()))
    assert longest >= asleep, "it was not asleep while it trained"
    assert tally(f"stopped for {asleep} s").add(survived), saves(run)


JUMPING = """
import itertools, time
_really, _jumps = time.time, itertools.cycle([0, 86400, -86400, 1e9, -1e9])
time.time = lambda: _really() + next(_jumps)
"""


@pytest.mark.slow
def test_a_clock_that_jumps_changes_nothing(tmp_path, tally):
    (tmp_path / "jumping").mkdir()
    (tmp_path / "jumping" / "sitecustomize.py").write_text(JUMPING)
    jumping = {**os.environ, "PYTHONPATH": str(tmp_path / "jumping")}
    for name, env in (("run", None), ("shifted", jumping)):
        settings = (*KEEP_ALL, "checkpoints.every_seconds=1", "--max-steps", "60")
        assert start(tmp_path, *settings, run=name, env=env).wait(300) == 0, (tmp_path / "log").read_text()
    run, shifted = Run(tmp_path / "run"), Run(tmp_path / "shifted")
    times = [row["time"] for row in shifted.rows("events.jsonl")]
    assert max(times) - min(times) > 80_000, "the clock did not jump"
    one, other = (each.checkpoints().newest_good().load_all() for each in (run, shifted))
    same = all(torch.equal(one[group][name], other[group][name]) for group in one for name in one[group])
    spaced = all(later - earlier >= 1 for earlier, later in pairwise(saves(shifted)[:-1]))
    assert tally("clock jumped").add(same and sane(shifted) and spaced)
