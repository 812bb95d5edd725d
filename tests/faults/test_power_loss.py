"""The power fails after any file operation: what was synced is kept, anything else is kept, lost or torn.

The operations of real saves are recorded and replayed on a model of a disk that guarantees no more than
POSIX does: a file's content is safe after `fsync` of the file, its name after `fsync` of its directory.
"""

import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from faults.operations import Operation, intercepted
from faults.saves import holds, manager_with, save

from macbook_optimization.checkpoint_management import CheckpointManager

PAGE = 4096


@dataclass
class Node:
    """A file or a directory: what is synced, and what has changed since."""

    is_directory: bool
    content: bytes = b""
    unsynced: bytes = b""
    entries: dict = field(default_factory=dict)
    changes: list = field(default_factory=list)  # (name, node or None) since the last sync


class Disk:
    def __init__(self, root):
        self.root, self.top = str(root), Node(is_directory=True)

    def find(self, path):
        node = self.top
        for name in Path(path).relative_to(self.root).parts:
            node = self.entries_now(node)[name]
        return node

    @staticmethod
    def entries_now(directory):
        entries = dict(directory.entries)
        for name, node in directory.changes:
            entries.pop(name, None) if node is None else entries.update({name: node})
        return entries

    def apply(self, operation: Operation):
        path = operation.path
        parent, name = os.path.split(path)
        if operation.name == "write":
            self.find(path).unsynced += operation.content
        elif operation.name == "fsync":
            node = self.find(path)
            node.content, node.unsynced = node.content + node.unsynced, b""
            node.entries, node.changes = self.entries_now(node), []
        elif operation.name == "rename":
            target_parent, target = os.path.split(operation.target)
            node = self.find(path)
            self.find(parent).changes.append((name, None))
            self.find(target_parent).changes.append((target, node))
        elif operation.name == "mkdir":
            self.find(parent).changes.append((name, Node(is_directory=True)))
        elif operation.name in ("unlink", "rmdir"):
            self.find(parent).changes.append((name, None))
        elif operation.creates:  # new files are empty
            self.find(parent).changes.append((name, Node(is_directory=False)))

    def write_out(self, target: Path, rng: random.Random, outcome: str):
        """Write the files that exist after the machine was switched on again."""
        self._write_out(self.top, target, rng, outcome)

    def _write_out(self, node, target, rng, outcome):
        if not node.is_directory:
            target.write_bytes(node.content + _torn(node.unsynced, rng, outcome))
            return
        target.mkdir()
        entries = dict(node.entries)
        for name, entry in node.changes:
            if outcome == "all kept" or (outcome == "some" and rng.random() < 0.5):
                entries.pop(name, None) if entry is None else entries.update({name: entry})
        for name, entry in entries.items():
            self._write_out(entry, target / name, rng, outcome)


def _torn(content, rng, outcome):
    if outcome == "all kept":
        return content
    if outcome == "all lost" or not content:
        return b""
    kept = bytearray(content[: rng.randrange(len(content) + 1)])
    for page in range(0, len(kept), PAGE):  # the size may be there before the data
        if rng.random() < 0.3:
            kept[page : page + PAGE] = bytes(len(kept[page : page + PAGE]))
    return bytes(kept)


@pytest.mark.slow
def test_a_power_loss_after_any_operation_leaves_the_old_or_the_new_checkpoint(tmp_path, tally, full):
    tally, run = tally("power lost"), tmp_path / "run"
    run.mkdir()
    disk, safe, outcomes = Disk(tmp_path), {None}, 40 if full else 4
    disk.apply(Operation("mkdir", str(run)))
    disk.apply(Operation("fsync", str(tmp_path)))

    def check_recovery():
        for number in range(outcomes):
            found = tmp_path.with_name(f"{tmp_path.name}-found")
            outcome = ("all lost", "all kept", "some")[min(number, 2)]
            disk.write_out(found, random.Random(number), outcome)
            checkpoint, _ = CheckpointManager(found / "run").recover()
            step = None if checkpoint is None else checkpoint.step
            good = step in safe and (checkpoint is None or holds(checkpoint))
            assert tally.add(good), f"{step} instead of {safe}, {outcome}, {number}"
            shutil.rmtree(found)

    def decide(operation, perform):
        result = perform()
        disk.apply(operation)
        check_recovery()
        return result

    check_recovery()
    manager = manager_with(run, keep=1)
    with intercepted(tmp_path, decide):
        for step in (1, 2, 3):
            before = max(safe - {None}, default=None)
            safe |= {step}
            save(manager, step)
            safe -= {None, before}
            check_recovery()
            manager.mark_best({"checkpoint": "step-00000001"})
    assert sorted(path.name for path in manager.directory.iterdir()) == ["step-00000001", "step-00000003"]


def test_the_model_of_the_disk_notices_a_missing_sync(tmp_path):
    """A save without any sync is lost, or found torn under its final name."""
    run = tmp_path / "run"
    run.mkdir()
    disk = Disk(tmp_path)
    disk.apply(Operation("mkdir", str(run)))
    disk.apply(Operation("fsync", str(tmp_path)))

    def decide(operation, perform):
        if operation.name != "fsync":
            disk.apply(operation)
        return perform()

    with intercepted(tmp_path, decide):
        save(manager_with(run), 1)
    disk.write_out(tmp_path.with_name("lost"), random.Random(0), "all lost")
    assert CheckpointManager(tmp_path.with_name("lost") / "run").newest_intact() is None
    torn = []
    for number in range(40):
        found = tmp_path.with_name(f"torn-{number}")
        disk.write_out(found, random.Random(number), "some")
        there = (found / "run" / "checkpoints" / "step-00000001").is_dir()
        torn.append(there and CheckpointManager(found / "run").newest_intact() is None)
    assert any(torn)
