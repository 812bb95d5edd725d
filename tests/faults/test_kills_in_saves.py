"""A process that is killed at any point of a save, a rotation or a resume leaves the old checkpoint or the
new one, never neither."""

import os
import shutil
import signal

import pytest
from faults.operations import in_fork, intercepted, killing, recorded
from faults.saves import holds, manager_with, save

from macbook_optimization.checkpoint_management import CheckpointManager

SHARES = [0, 0.01, 0.1, 0.25, 0.5, 0.6, 0.75, 0.9, 0.99, 1]  # of a write that are performed before the kill


def best_of(step):
    return {"checkpoint": f"step-{step:08d}", "exact_accuracy": step / 10}


def save_and_rotate(run):
    """Save a third checkpoint, which removes the first."""
    manager = CheckpointManager(run, keep=2)
    save(manager, 3)
    manager.mark_best(best_of(3))


def resume(run):
    CheckpointManager(run, keep=2).recover()


def prepare_save(run):
    manager_with(run, 1, 2).mark_best(best_of(2))


def prepare_resume(run):
    """Leave a damaged newest checkpoint, an incomplete save and an incomplete removal."""
    manager = manager_with(run, 1, 2, 3, keep=4)
    (manager.path(3) / "ema.safetensors").write_bytes(b"")
    manager.mark_best(best_of(2))
    shutil.copytree(manager.path(1), manager.directory / ".step-00000004.partial")
    shutil.copytree(manager.path(1), manager.directory / ".step-00000000.removed")


def survives(run, allowed):
    manager = CheckpointManager(run, keep=2)
    seen = manager.newest_intact()
    best = manager.best()
    good = seen is not None and seen.step in allowed and holds(seen) and best["checkpoint"][-1] in "23"
    recovered, _ = manager.recover()
    good = good and recovered.step == seen.step and manager.best_or_newest().step in (2, 3)
    save(manager, 9)  # further saves work
    left = [path.name for path in manager.directory.iterdir() if path.name.startswith(".")]
    return good and manager.newest_intact().step == 9 and left == []


@pytest.mark.slow
def test_a_kill_at_any_point_leaves_the_old_or_the_new_checkpoint(tmp_path, tally, full):
    for action, prepare, allowed in (
        (save_and_rotate, prepare_save, (2, 3)),
        (resume, prepare_resume, (2,)),
    ):
        prepare(tmp_path / "trace")
        points = recorded(tmp_path / "trace", lambda action=action: action(tmp_path / "trace"))
        shutil.rmtree(tmp_path / "trace")
        name = action.__name__.replace("_", " ")
        for number, point in enumerate(points):
            for share in SHARES if full else SHARES[number % 5 :: 5]:
                run = tmp_path / "run"
                prepare(run)

                def act(run=run, number=number, share=share, action=action):
                    with intercepted(run, killing(number, share)):
                        action(run)

                status = in_fork(act)
                assert os.WIFSIGNALED(status), f"{point} was not reached"
                assert os.WTERMSIG(status) == signal.SIGKILL, f"{point} was not reached"
                inside = point.name == "write" and 0 < share < 1
                which = tally(f"killed in {name}{', inside a write' if inside else ''}")
                assert which.add(survives(run, allowed)), f"{name}: {point}, {share}"
                shutil.rmtree(run)
        tally(f"killed in {name}").remark(f"{len({str(point) for point in points})} named points")
