"""The checkpoints of a run that several machines train: one of them has the directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from macbook_optimization.checkpoint_files import Checkpoint, Tensors
from macbook_optimization.checkpoint_management import CheckpointManager
from macbook_optimization.json_types import JsonMapping, JsonObject
from trm.backends.sharing import at_writer
from trm.backends.world import World


class SharedCheckpoints(CheckpointManager):
    """A manager that every rank calls together: the writer acts, and all get the result or the error.

    Tensors of a checkpoint are read and written by the writer alone (`Learner.state` and `load_state`).
    """

    def __init__(self, manager: CheckpointManager, world: World) -> None:
        super().__init__(manager.directory.parent, manager.keep, manager.keep_every_hours)
        self.manager = manager
        self.world = world

    def save(self, step: int, tensors: Tensors, metadata: JsonMapping) -> Checkpoint:
        return _checkpoint(at_writer(self.world, lambda: _facts(self.manager.save(step, tensors, metadata))))

    def check_space(self, tensors: Tensors) -> None:
        at_writer(self.world, lambda: self.manager.check_space(tensors))

    def intact_checkpoints(self) -> Iterator[Checkpoint]:
        found = at_writer(self.world, lambda: [_facts(each) for each in self.manager.intact_checkpoints()])
        return (_checkpoint(each) for each in found)

    def abandon_after(self, step: int) -> None:
        at_writer(self.world, lambda: self.manager.abandon_after(step))

    def recover(self) -> tuple[Checkpoint | None, list[str]]:
        def recovered() -> JsonObject:
            checkpoint, damaged = self.manager.recover()
            return {"checkpoint": None if checkpoint is None else _facts(checkpoint), "damaged": damaged}

        found = at_writer(self.world, recovered)
        checkpoint = found["checkpoint"]
        return None if checkpoint is None else _checkpoint(checkpoint), found["damaged"]

    def mark_best(self, best: JsonMapping) -> None:
        at_writer(self.world, lambda: self.manager.mark_best(best))

    def best(self) -> JsonObject | None:
        found: JsonObject | None = at_writer(self.world, self.manager.best)
        return found

    def is_intact(self, name: str) -> bool:
        return bool(at_writer(self.world, lambda: self.manager.is_intact(name)))

    def best_problem(self) -> str | None:
        found: str | None = at_writer(self.world, self.manager.best_problem)
        return found


def _facts(checkpoint: Checkpoint) -> JsonObject:
    return {"path": str(checkpoint.path), "step": checkpoint.step, "metadata": checkpoint.metadata}


def _checkpoint(facts: Any) -> Checkpoint:
    return Checkpoint(Path(facts["path"]), facts["step"], facts["metadata"])
