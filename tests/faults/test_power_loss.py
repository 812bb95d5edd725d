"""The power fails after any file operation. What was synced is there; what was not is there, gone or torn.

The operations of real saves are recorded and replayed on a model of a disk that keeps no promise beyond
POSIX's: a file's content is safe after `fsync` of the file, its name after `fsync` of its directory.
"""

import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from faults.operations import Operation, intercepted
from faults.saves import holds, manager_with, save

from macbook_optimization.checkpoint_management import CheckpointManager

PAGE = 4096


@dataclass
class Node:
    """A file, or a directory if it has entries. Of both, what is safe and what came after."""

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
            node = self.now(node)[name]
        return node

    @staticmethod
    def now(directory):
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
            node.entries, node.changes = self.now(node), []
        elif operation.name == "rename":
            target_parent, target = os.path.split(operation.target)
            node = self.find(path)
            self.find(parent).changes.append((name, None))
            self.find(target_parent).changes.append((target, node))
        elif operation.name == "mkdir":
            self.find(parent).changes.append((name, Node(is_directory=True)))
        elif operation.name in ("unlink", "rmdir"):
            self.find(parent).changes.append((name, None))
        elif operation.creates:  # all of ours begin empty
            self.find(parent).changes.append((name, Node(is_directory=False)))

    def write_out(self, target: Path, fate: random.Random, mood: str):
        """What somebody finds who switches the machine on again."""
        self._write_out(self.top, target, fate, mood)

    def _write_out(self, node, target, fate, mood):
        if not node.is_directory:
            target.write_bytes(node.content + _torn(node.unsynced, fate, mood))
            return
        target.mkdir()
        entries = dict(node.entries)
        for name, entry in node.changes:
            if mood == "all kept" or (mood == "some" and fate.random() < 0.5):
                entries.pop(name, None) if entry is None else entries.update({name: entry})
        for name, entry in entries.items():
            self._write_out(entry, target / name, fate, mood)


def _torn(content, fate, mood):
    if mood == "all kept":
        return content
    if mood == "all lost" or not content:
        return b""
    kept = bytearray(content[: fate.randrange(len(content) + 1)])
    for page in range(0, len(kept), PAGE):  # the size may be there before the data
        if fate.random() < 0.3:
            kept[page : page + PAGE] = bytes(len(kept[page : page + PAGE]))
    return bytes(kept)


def test_a_power_loss_after_any_operation_leaves_the_old_or_the_new_checkpoint(tmp_path, tally, full):
    tally, run = tally("power lost"), tmp_path / "run"
    run.mkdir()
    disk, safe, fates = Disk(tmp_path), {None}, 40 if full else 4
    disk.apply(Operation("mkdir", str(run)))
    disk.apply(Operation("fsync", str(tmp_path)))

    def look():
        for number in range(fates):
            found = tmp_path.with_name(f"{tmp_path.name}-found")
            mood = ("all lost", "all kept", "some")[min(number, 2)]
            disk.write_out(found, random.Random(number), mood)
            checkpoint, _ = CheckpointManager(found / "run").recover()
            step = None if checkpoint is None else checkpoint.step
            good = step in safe and (checkpoint is None or holds(checkpoint))
            assert tally.add(good), f"{step} instead of {safe}, {mood}, {number}"
            shutil.rmtree(found)

    def decide(operation, really):
        result = really()
        disk.apply(operation)
        look()
        return result

    look()
    manager = manager_with(run, keep=1)
    with intercepted(tmp_path, decide):
        for step in (1, 2, 3):
            before = max(safe - {None}, default=None)
            safe |= {step}
            save(manager, step)
            safe -= {None, before}
            look()
            manager.mark_best({"checkpoint": "step-00000001"})
    assert sorted(path.name for path in manager.directory.iterdir()) == ["step-00000001", "step-00000003"]


def test_the_model_of_the_disk_would_notice_a_missing_sync(tmp_path):
    """A save that syncs nothing is lost, or worse: found torn under its own name."""
    run = tmp_path / "run"
    run.mkdir()
    disk = Disk(tmp_path)
    disk.apply(Operation("mkdir", str(run)))
    disk.apply(Operation("fsync", str(tmp_path)))

    def decide(operation, really):
        if operation.name != "fsync":
            disk.apply(operation)
        return really()

    with intercepted(tmp_path, decide):
        save(manager_with(run), 1)
    disk.write_out(tmp_path.with_name("lost"), random.Random(0), "all lost")
    assert CheckpointManager(tmp_path.with_name("lost") / "run").newest_good() is None
    torn = []
    for number in range(40):
        found = tmp_path.with_name(f"torn-{number}")
        disk.write_out(found, random.Random(number), "some")
        there = (found / "run" / "checkpoints" / "step-00000001").is_dir()
        torn.append(there and CheckpointManager(found / "run").newest_good() is None)
    assert any(torn)
