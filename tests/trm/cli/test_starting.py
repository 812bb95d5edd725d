"""The start of `trm train` on a terminal: what takes time says so before it begins."""

import fcntl
import os
import pty
import struct
import subprocess
import termios
import time
from contextlib import suppress
from itertools import pairwise

import pytest
from tiny import FOUR, TINY, TRM

MAX_SILENT_SECONDS = 2.0  # a status changes every second
SLOW_IMPORT = """
import sys, time

class SlowTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            time.sleep(3)

sys.meta_path.insert(0, SlowTorch())
"""


def written_to_terminal(command, cwd, env):
    """Return what a command writes to a terminal, with the seconds since it was started."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=cwd, env=env, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    written = [(0.0, "")]
    with suppress(OSError):  # the end of a terminal is an error
        while part := os.read(controller, 65536):
            written.append((time.monotonic() - started, part.decode(errors="replace")))
    os.close(controller)
    assert process.wait(60) == 0
    return written


def longest_silence(written):
    return max(after[0] - before[0] for before, after in pairwise(written))


@pytest.mark.slow
def test_a_start_is_never_silent_while_pytorch_loads(tmp_path):
    """An import that takes seconds everywhere; the best of three starts, because machines are noisy."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": path}
    silences = []
    for attempt in range(3):
        options = (*FOUR, f"data.path=set{attempt}", *TINY, "training.max_steps=2", "--run", f"run{attempt}")
        written = written_to_terminal([TRM, "train", "sudoku-6x6", *options], tmp_path, env)
        text = "".join(part for _, part in written)
        announced = [
            text.find(f"{status} ...  0:00")
            for status in (
                "Starting",
                "Building the dataset",
                "Writing the dataset",
                "Verifying the dataset",
                "Starting the trainer",
                "Loading PyTorch",
                "Taking the first step",
            )
        ]
        assert announced[0] >= 0
        assert announced == sorted(announced), "every stage is announced, in order"
        assert "Loading PyTorch ...  0:02" in text
        silences.append(longest_silence(written))
        if silences[-1] < MAX_SILENT_SECONDS:
            break
    assert min(silences) < MAX_SILENT_SECONDS
