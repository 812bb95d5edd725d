"""A run that is killed repeatedly ends with exactly the weights of an uninterrupted one."""

import random
import time

import pytest
import torch
from processes import kill, kill_all, start, trainer_of, wait_for

from trm.runs.directory import Run

INTERVAL = 10  # checkpoints.every_steps of the recipe in processes.py


def last_step(run):
    return max((row.get("step", 0) for row in run.rows()), default=0)


def starts(run):
    return sum(row["event"] == "plan" for row in run.rows("events.jsonl"))


def state(run):
    checkpoint = run.checkpoints().newest_intact()
    return checkpoint.step, checkpoint.load_all(), checkpoint.metadata["slots"]


def same(one, other):
    """Return whether step, slots and all tensors, optimizer state included, are equal bit for bit."""
    return one[0] == other[0] and one[2] == other[2] and all(
        torch.equal(tensor, other[1][group][name])
        for group, named in one[1].items()
        for name, tensor in named.items()
    )  # fmt: skip


@pytest.mark.slow
def test_kills_at_random_times_do_not_change_the_result(tmp_path, tally, full):
    run, rng = Run(tmp_path / "run"), random.Random(0)
    tally, kills = tally("run killed and resumed"), 200 if full else 4
    process, lost_most = start(tmp_path), 0
    longest_wait = 7 if full else 5  # loading takes two to three seconds
    for number in range(kills):
        trainer, begun = trainer_of(process), starts(run)
        if number % 4 < 2:
            time.sleep(rng.uniform(0, longest_wait))  # possibly while it still loads
        else:
            wait_for(lambda begun=begun: starts(run) > begun)
            saved = run.checkpoints().newest_step() or 0
            wait_for(lambda saved=saved: (run.checkpoints().newest_step() or 0) > saved)
            time.sleep(rng.uniform(0, 3 if full else 1.5))
        if number % 2:
            kill_all(process)
        else:
            kill(trainer)
            trainer.wait(10)
        checkpoint = run.checkpoints().newest_intact()
        safe = checkpoint.step if checkpoint else 0
        lost = last_step(run) - safe
        lost_most = max(lost_most, lost)
        if number % 2:
            process = start(tmp_path)
        continues = trainer_of(process).is_running()  # by itself, or with the same command
        assert tally.add(lost <= INTERVAL and continues), (number, lost)
    kill_all(process)
    end = run.checkpoints().newest_step() + 5
    both = [start(tmp_path, "--max-steps", str(end), run=name) for name in ("run", "uninterrupted")]
    for process in both:
        assert process.wait(1200) == 0, (tmp_path / "log").read_text()[-2000:]
    assert same(state(run), state(Run(tmp_path / "uninterrupted")))
    resumed = sum(row["event"] == "resumed" for row in run.rows("events.jsonl"))
    assert resumed > kills // 4, "most were killed before they had resumed"
    tally.remark(f"{end} steps, bit for bit; {resumed} resumed by then, at most {lost_most} steps lost")
