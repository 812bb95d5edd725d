"""Real `trm train` processes, to be killed, stopped and started twice."""

import signal
import subprocess
import time
from contextlib import suppress

import psutil
from tiny import MIXER, TRM

RECIPE = (
    *MIXER, "data.build={size: 6, blanks: 22, train: 500, test: 16}", "data.path=set", "plan.threads=2",
    "plan.micro_batch_size=8", "training.deterministic=true", "training.depths={0: 2}",
    "evaluation.every_steps=200", "evaluation.depth=2", "evaluation.target_accuracy=null",
    "training.max_steps=100000", "checkpoints.every_steps=10",
)  # fmt: skip


def start(directory, *arguments, run="run", env=None):
    log = (directory / "log").open("ab")
    command = [TRM, "train", "sudoku-6x6", *RECIPE, *arguments, "--run", run]
    return subprocess.Popen(command, cwd=directory, stdout=log, stderr=log, env=env)


def find_trainer(process):
    """The child that trains, if there is one."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children():
            if "train_in_child" in " ".join(child.cmdline()):
                return child
    return None


def trainer_of(process, seconds=60.0):
    """The same, once there is one."""
    end = time.monotonic() + seconds
    while (trainer := find_trainer(process)) is None:
        assert time.monotonic() < end, "no trainer was started"
        assert process.poll() is None, "it ended before it trained"
        time.sleep(0.01)
    return trainer


def kill(process):
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        process.send_signal(signal.SIGKILL)


def kill_all(process):
    """As a machine does that loses its power: nobody gets to say anything."""
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
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)
