"""A dataset whose build is killed is complete or absent, and the next build succeeds."""

import random
import subprocess
import time

import psutil
import pytest
from processes import kill, wait_for
from tiny import TRM

from trm.tasks.dataset import open_split

BUILD_FILE = ("data", "build", "maze", "--size", "10", "--min-path", "9", "--train", "400", "--test", "100")


def build(directory):
    return subprocess.Popen(
        [TRM, *BUILD_FILE, "--out", "set", "--jobs", "2"], cwd=directory, stderr=subprocess.PIPE, text=True
    )


def is_complete(directory):
    return [len(open_split(directory / "set", name)) for name in ("train", "test")] == [400, 100]


def kill_with_workers(process):
    """Kill only the parent process; its workers have to notice."""
    workers = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    kill(process)
    process.communicate()
    wait_for(lambda: not any(worker.is_running() for worker in workers), 10)


@pytest.mark.slow
def test_a_killed_build_leaves_a_complete_dataset_or_none(tmp_path, tally, full):
    started = time.monotonic()
    assert build(tmp_path).wait() == 0
    seconds, rng = time.monotonic() - started, random.Random(0)
    (tmp_path / "set").rename(tmp_path / "first")
    tally = tally("dataset build killed")
    for _ in range(50 if full else 4):
        process = build(tmp_path)
        time.sleep(rng.uniform(0, 1.1 * seconds))
        kill_with_workers(process)
        there = (tmp_path / "set").exists()
        assert tally.add(not there or is_complete(tmp_path))
        if there:
            (tmp_path / "set").rename(tmp_path / f"set-{rng.random()}")
    assert build(tmp_path).wait() == 0
    assert is_complete(tmp_path)
    assert not list(tmp_path.glob(".*.partial")), "a successful build removes what killed ones left"
    inputs = [(tmp_path / name / "train" / "all__inputs.npy").read_bytes() for name in ("set", "first")]
    assert inputs[0] == inputs[1]
