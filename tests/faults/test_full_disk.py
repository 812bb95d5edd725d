"""A full disk and failing file operations: training continues, only what is saved is reported as saved, and
the first save after there is room succeeds."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import count

import pytest
import torch
from faults.operations import intercepted
from tiny import TRM, Recorder, plan_of, run_config, sudoku_dataset

from macbook_optimization.checkpoint_files import find_damage
from macbook_optimization.checkpoint_management import CheckpointManager
from macbook_optimization.errors import CheckpointError, RunError
from trm.runs.directory import Run
from trm.training.loop import Limits
from trm.training.start import train

STEPS = 5


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture(autouse=True)
def save_whenever_due(monkeypatch):
    """Retry immediately, however long a save takes."""
    monkeypatch.setattr("trm.training.checkpointing.RETRY_SECONDS", 0.0)
    monkeypatch.setattr("trm.training.checkpointing.TIME_SHARE", 1e9)


def recipe(dataset):
    every = {"every_steps": 2, "keep": 2}
    return run_config(dataset, training__max_steps=STEPS, checkpoints=every, evaluation__every_steps=3)


def weights(path):
    checkpoint = Run(path).checkpoints().newest_intact()
    return checkpoint.step, checkpoint.load_all()


def same(one, other):
    """Return whether step and tensors are equal bit for bit."""
    return one[0] == other[0] and all(
        torch.equal(tensor, other[1][group][name])
        for group, named in one[1].items()
        for name, tensor in named.items()
    )


@pytest.fixture(scope="module")
def undisturbed(dataset, tmp_path_factory):
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    train(recipe(dataset), path, plan_of(recipe(dataset)), Limits(), Recorder())
    return weights(path)


class Watcher(Recorder):
    """Checks after every step that what was reported as saved is intact, and makes room on request."""

    def __init__(self, path, make_room):
        super().__init__()
        self.path, self.make_room, self.honest, self.trained = path, make_room, True, 0

    def update(self, what, done, total, *facts):
        if what == "training":
            self.trained = done
        self.honest = self.honest and all(
            find_damage(path) is None for path in CheckpointManager(self.path)._newest_first()
        )

    def message(self, text):
        super().message(text)
        if "until it works" in text:
            self.make_room()
        if found := re.fullmatch(r"Step (\d+) is saved\.", text):
            path = CheckpointManager(self.path).path(int(found[1]))
            self.honest = self.honest and path.is_dir() and find_damage(path) is None


def survives(config, path, make_room, undisturbed):
    """Return whether a run with a fault ends like one without, or is refused at its start with a reason."""
    watcher = Watcher(path, make_room)
    try:
        train(config, path, plan_of(config), Limits(), watcher)
    except (CheckpointError, RunError) as refused:
        return watcher.trained == 0 and CheckpointManager(path).newest_intact() is None and bool(str(refused))
    return watcher.honest and watcher.trained == STEPS and same(weights(path), undisturbed)


class Failing:
    """Lets the operation of this number fail, once or from then on until it is repaired."""

    def __init__(self, number, lasting, code):
        self.number, self.lasting, self.code = number, lasting, code
        self.count, self.failed, self.repaired = 0, False, False

    def decide(self, operation, perform):
        self.count += 1
        if not self.repaired and (self.count == self.number or (self.lasting and self.count > self.number)):
            self.failed = True
            raise OSError(self.code, os.strerror(self.code), operation.path)
        return perform()

    def repair(self):
        self.repaired = True


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_training_continues_whichever_operation_fails(
    tmp_path, dataset, undisturbed, tally, full, lasting, code
):
    tally = tally(f"operation fails {'from then on' if lasting else 'once'}, {errno.errorcode[code]}")
    for number in count(1, 1 if full else 23):
        fault = Failing(number, lasting, code)
        with intercepted(tmp_path / "run", fault.decide):
            survived = survives(recipe(dataset), tmp_path / "run", fault.repair, undisturbed)
        if not fault.failed:  # there are fewer operations than this number
            break
        assert tally.add(survived), f"operation {number}"
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
    tally.remark("every one" if full else "every 23rd")


def in_tmpfs(directory, size_kib, *arguments):
    """Run this file as a program, in a mount namespace with a small file system at the directory."""
    directory.mkdir(exist_ok=True)
    mount = f"mount -t tmpfs -o size={size_kib}k tmpfs {directory}"
    command = f"{mount} && exec {sys.executable} {__file__} {directory} {' '.join(map(str, arguments))}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", command],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip


def can_mount(tmp_path):
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_a_disk_that_fills_up_at_any_point_does_not_stop_training(tmp_path, dataset, tally, full):
    if not can_mount(tmp_path):
        pytest.skip("needs to mount a small file system, which is not allowed here")
    tally = tally("disk full")
    reference = tmp_path / "undisturbed"
    reference.mkdir()
    config = recipe(dataset)
    train(config, reference / "run", plan_of(config), Limits(), Recorder())
    sizes = [4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320]  # KiB; two checkpoints: 90
    done = []
    for size in sizes if full else sizes[1::3]:
        answer = in_tmpfs(tmp_path / "small", size, dataset, reference / "run")
        assert answer.returncode == 0, answer.stderr
        facts = json.loads(answer.stdout.splitlines()[-1])
        done.append(facts)
        assert tally.add(facts["survived"]), (size, facts)
    assert any(facts["failed_saves"] for facts in done), "no disk was small enough to make a save fail"
    failed, refused = (sum(f["failed_saves"] for f in done), sum(not f["started"] for f in done))
    tally.remark(f"{failed} times there was no room to save; {refused} were refused at the start")


@pytest.mark.slow
@pytest.mark.parametrize("free_kib", [0, 8, 32])
def test_a_build_on_a_full_disk_is_one_error_line_and_leaves_nothing(tmp_path, free_kib):
    if not can_mount(tmp_path):
        pytest.skip("needs to mount a small file system, which is not allowed here")
    small = tmp_path / "small"
    small.mkdir()
    build = f"{TRM} data build sudoku --size 4 --difficulty easy --train 2000 --test 50 --jobs 1"
    command = (
        f"mount -t tmpfs -o size=64k tmpfs {small} && head -c {64 - free_kib}k /dev/zero > {small}/fill; "
        f"{build} --out {small}/deep/set; echo status $?; ls -A {small}"
    )
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", command],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["status", "1", "fill"]
    assert "No space left on device" in done.stderr
    assert "hint: Free some disk space." in done.stderr
    assert "Traceback" not in done.stderr


def main(directory, dataset, reference):
    """Train on a disk that is enlarged only on request. The check for free space is disabled, because another
    program may take the space just after it."""
    from pathlib import Path

    from macbook_optimization import checkpoint_management
    from trm.training import checkpointing

    torch.set_num_threads(1)
    checkpointing.RETRY_SECONDS = 0.0
    checkpointing.TIME_SHARE = 1e9
    checkpoint_management._SPARE_BYTES = -(2**40)
    path, config = Path(directory) / "run", recipe(Path(dataset))

    def make_room():
        subprocess.run(["mount", "-o", "remount,size=4m", directory], check=True)

    survived = survives(config, path, make_room, weights(Path(reference)))
    events = [row["event"] for row in Run(path).rows("events.jsonl")]
    started = CheckpointManager(path).newest_step() is not None
    facts = {"survived": bool(survived), "failed_saves": events.count("not saved"), "started": started}
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
