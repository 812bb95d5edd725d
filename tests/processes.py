"""Real `trm train` processes that tests kill, suspend and start twice."""

import signal
import subprocess
import time
from contextlib import suppress

import psutil
from tiny import MIXER, TRM

RECIPE = (
    *MIXER, "data.build={size: 6, blanks: 22, train: 500, test: 16}", "data.path=set", "plan.threads=2",
    "plan.micro_batch_size=8", "training.deterministic=true", "training.depths={0: 2}",
    "evaluation.every_steps=200", "inference.depth=2", "evaluation.target_accuracy=null",
    "training.max_steps=100000", "checkpoints.every_steps=10",
)  # fmt: skip


def start(directory, *arguments, run="run", env=None):
    log = (directory / "log").open("ab")
    command = [TRM, "train", "sudoku-6x6", *RECIPE, *arguments, "--run", run]
    return subprocess.Popen(command, cwd=directory, stdout=log, stderr=log, env=env)


def find_trainer(process):
    """Return the child process that trains, or None."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children():
            if "train_in_child" in " ".join(child.cmdline()):
                return child
    return None


def trainer_of(process, seconds=60.0):
    """Wait for the child process that trains, and return it."""
    end = time.monotonic() + seconds
    while (trainer := find_trainer(process)) is None:
        assert time.monotonic() < end, "no trainer was started in time"
        assert process.poll() is None, "the command ended before it trained"
        time.sleep(0.01)
    return trainer


def kill(process):
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        process.send_signal(signal.SIGKILL)


def kill_all(process):
    """Kill the command and its trainer without warning, as a power failure would."""
    trainer = find_trainer(process)
    kill(process)
    if trainer is not None:
        kill(trainer)
        with suppress(psutil.NoSuchProcess):
            trainer.wait(10)
    process.wait(10)


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.05)
