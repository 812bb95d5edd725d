"""The checkpoints of a run: saving, choosing the one to resume from, and rotation.

A checkpoint is written under a temporary name, synced and renamed, so it is complete or absent. The newest
intact one is resumed. A damaged one is renamed so that its name says so, never deleted.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from macbook_optimization.checkpoint_files import (
    Checkpoint,
    Tensors,
    check_finite,
    find_damage,
    open_checkpoint,
    step_of,
    write_checkpoint,
)
from macbook_optimization.durable_files import (
    free_bytes,
    make_directory,
    remove_directory,
    replace_file,
    sync,
)
from macbook_optimization.errors import CheckpointError
from macbook_optimization.file_errors import hint_for, reason_of
from macbook_optimization.input_files import read_json
from macbook_optimization.json_types import JsonMapping, JsonObject
from macbook_optimization.units import MIB

_SPARE_BYTES = MIB  # for the manifest, the other files of a run, and the file system's metadata
_MAX_BEST_BYTES = MIB  # a few metrics take a few hundred bytes
_NAME = re.compile(r"step-\d{8,15}")


Warn: TypeAlias = Callable[[str], None]


def python_warning(text: str) -> None:
    """Report as a library does; a command prints the text instead."""
    warnings.warn(text, stacklevel=3)


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint directory as it was found on disk."""

    path: Path
    num_bytes: int
    damage: str | None  # None: intact


class CheckpointManager:
    """The checkpoints of one run, and the record of the best one.

    Rotation keeps the last `keep` checkpoints and the best one. With `keep_every_hours`, it also keeps the
    first checkpoint of every such period of training time, as counted by `metadata["seconds"]`.
    """

    def __init__(self, run: Path, keep: int = 3, keep_every_hours: float | None = None) -> None:
        self.directory = run / "checkpoints"
        self.best_file = run / "best"
        self.keep = keep
        self.keep_every_hours = keep_every_hours

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def save(self, step: int, tensors: Tensors, metadata: JsonMapping) -> Checkpoint:
        """Write a checkpoint and return when it is safely on disk.

        After an error the call may be repeated: earlier checkpoints are untouched, and this one is complete
        or absent.
        """
        path = self.path(step)
        partial = self.directory / f".{path.name}.partial"
        check_finite(tensors)
        complete = {**metadata, "step": step}
        try:
            self.check_space(tensors)
            if path.is_dir() and (damage := find_damage(path)) is not None:
                report = _set_aside(path, damage)
                if path.is_dir():
                    raise CheckpointError(f"Cannot write {path}: {report}")
            if not path.is_dir():  # if it exists, an earlier attempt failed after the rename
                make_directory(self.directory)
                write_checkpoint(partial, tensors, complete)
                os.rename(partial, path)
            sync(self.directory)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise _cannot_write(path, error) from error
        with suppress(OSError):  # the next save removes what could not be removed now
            self._rotate(path)
        return Checkpoint(path, step, complete)

    def check_space(self, tensors: Tensors) -> None:
        """Raise `CheckpointError` if the disk has no room for these tensors."""
        needed = _SPARE_BYTES + sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
        free = free_bytes(self.directory)
        if free < needed:
            raise CheckpointError(
                f"A checkpoint needs {needed / MIB:.1f} MiB, and {free / MIB:.1f} MiB are free for "
                f"{self.directory}",
                hint="Free some disk space, or keep fewer checkpoints with checkpoints.keep.",
            )

    def intact_checkpoints(self) -> Iterator[Checkpoint]:
        """Yield the intact checkpoints, newest first. Changes nothing, so a trainer may be running."""
        return (open_checkpoint(path) for path in self._newest_first() if find_damage(path) is None)

    def newest_intact(self) -> Checkpoint | None:
        return next(self.intact_checkpoints(), None)

    def abandon_after(self, step: int) -> None:
        """Set aside the checkpoints after `step`: they belong to an abandoned continuation."""
        for path in self._newest_first():
            if step_of(path) > step:
                _set_aside(path, "", prefix="abandoned")

    def recover(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest intact checkpoint and a report of each newer, damaged one that was set aside.

        If none is intact, nothing is moved: a later start must not mistake the run for a new one.
        """
        for leftover in self._leftovers():
            shutil.rmtree(leftover, ignore_errors=True)
        damaged: dict[Path, str] = {}
        for path in self._newest_first():
            damage = find_damage(path)
            if damage is None:
                reports = [_set_aside(other, problem) for other, problem in damaged.items()]
                return open_checkpoint(path), reports
            damaged[path] = damage
        if damaged:
            listed = "\n  ".join(f"{path.name}: {damage}" for path, damage in damaged.items())
            raise CheckpointError(
                f"Every checkpoint in {self.directory} is damaged:\n  {listed}",
                hint="Start again with --fresh, which keeps this run next to the new one.",
            )
        return None, []

    def examine(self) -> Iterator[Found]:
        """Read every checkpoint completely, newest first, and those that were set aside last."""
        for path in [*self._newest_first(), *sorted(self.directory.glob("*-step-*"))]:
            with suppress(FileNotFoundError):  # a running trainer has just removed it
                files = (file for file in path.iterdir() if file.is_file())
                yield Found(path, sum(file.stat().st_size for file in files), find_damage(path))

    def newest_step(self) -> int | None:
        return max((step_of(path) for path in self._newest_first()), default=None)

    def mark_best(self, best: JsonMapping) -> None:
        """Record the best checkpoint: `best["checkpoint"]` is its name, the other keys say why."""
        try:
            replace_file(self.best_file, json.dumps(best, indent=2).encode())
        except OSError as error:
            raise _cannot_write(self.best_file, error) from error

    def best(self) -> JsonObject | None:
        """Return the record of the best checkpoint, or None if there is no valid one."""
        try:
            return checked_best(read_json(self.best_file, _MAX_BEST_BYTES))
        except (OSError, ValueError):
            return None

    def is_intact(self, name: str) -> bool:
        path = self.directory / name
        return path.is_dir() and find_damage(path) is None

    def best_problem(self) -> str | None:
        """Return why the recorded best checkpoint cannot be used; None if it can, or if none is recorded."""
        if not os.path.lexists(self.best_file):
            return None
        best = self.best()
        if best is None:
            return f"{self.best_file} cannot be read, or does not name a checkpoint"
        path = self.directory / best["checkpoint"]
        if not path.is_dir():
            return f"{path.name}, the best checkpoint of {self.best_file.parent}, is missing"
        damage = find_damage(path)
        if damage is None:
            return None
        return f"{path.name}, the best checkpoint of {self.best_file.parent}, is damaged ({damage})"

    def best_or_newest(self, warn: Warn = python_warning) -> Checkpoint:
        """Return the checkpoint to use for inference. `warn` receives why it is not the best one.

        A run that was not evaluated yet has no best checkpoint, which needs no warning.
        """
        problem = self.best_problem()
        best = self.best()
        if best is not None and problem is None:
            return open_checkpoint(self.directory / best["checkpoint"])
        newest = self.newest_intact()
        if newest is not None:
            saved = checked_best(newest.metadata.get("best"))
            if best is None and saved is not None and saved["checkpoint"] != newest.path.name:
                problem = problem or f"{self.best_file} is missing"
            if problem is not None:
                warn(f"{problem}; {newest.path.name}, the newest intact checkpoint, is used instead")
            return newest
        if self._newest_first():
            raise CheckpointError(
                f"{self.directory.parent} has no usable checkpoint: all are damaged",
                hint="`trm checkpoint verify` shows what is wrong with each.",
            )
        raise CheckpointError(
            f"{self.directory.parent} has no usable checkpoint",
            hint="Train it first: trm train; `trm runs` lists the existing runs.",
        )

    def _newest_first(self) -> list[Path]:
        named = (path for path in self.directory.glob("step-*") if _NAME.fullmatch(path.name))
        return sorted((path for path in named if path.is_dir()), key=step_of, reverse=True)

    def _leftovers(self) -> list[Path]:
        """Return the directories of processes that were killed while they saved or removed a checkpoint."""
        return [path for end in ("partial", "removed") for path in self.directory.glob(f".step-*.{end}")]

    def _rotate(self, newest: Path) -> None:
        """Remove surplus checkpoints, but only after the newest one was read back and found intact."""
        surplus = [path for path in self._surplus() if path != newest]
        if not surplus:
            return
        damage = find_damage(newest)
        if damage is not None:
            raise CheckpointError(
                f"The new checkpoint differs from what was written: {_set_aside(newest, damage)}",
                hint="The disk or the memory of this machine may be failing. Earlier checkpoints are kept.",
            )
        for path in surplus:
            remove_directory(path)

    def _surplus(self) -> list[Path]:
        paths = {step_of(path): path for path in self._newest_first()}
        best = self.best()
        kept = {step_of(Path(best["checkpoint"]))} if best else set()
        if self.keep_every_hours is not None:
            kept |= _first_of_each_period(self.keep_every_hours * 3600, _training_seconds(paths))
        return [paths[step] for step in surplus_steps(sorted(paths), self.keep, kept)]


def checked_best(content: Any) -> JsonObject | None:
    """Return the record of the best checkpoint if it is valid, else None.

    It must name a checkpoint, and every number in it must be finite. Which metrics it holds is up to the
    caller.
    """
    try:
        is_valid = isinstance(content, dict) and _is_finite_json(content)
    except RecursionError:
        is_valid = False
    name = content.get("checkpoint") if is_valid else None
    return content if isinstance(name, str) and _NAME.fullmatch(name) else None


def _is_finite_json(value: object) -> bool:
    """Return whether this is JSON in the strict sense: Python's parser also accepts NaN and Infinity."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_finite_json(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_finite_json(item) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int)


def surplus_steps(steps: Sequence[int], keep: int, kept: set[int]) -> list[int]:
    """Return which of these steps, in ascending order, rotation removes."""
    return [step for step in steps[:-keep] if step not in kept]


def _training_seconds(paths: Mapping[int, Path]) -> dict[int, float]:
    """Return the training time at each checkpoint; a damaged one is left out."""
    seconds = {}
    for step, path in paths.items():
        with suppress(OSError, ValueError, KeyError, TypeError):
            seconds[step] = float(open_checkpoint(path).metadata["seconds"])
    return {step: value for step, value in seconds.items() if math.isfinite(value)}


def _first_of_each_period(period_seconds: float, trained_seconds: Mapping[int, float]) -> set[int]:
    first: dict[int, int] = {}
    for step in sorted(trained_seconds):
        first.setdefault(int(trained_seconds[step] // period_seconds), step)
    return set(first.values())


def _set_aside(path: Path, reason: str, prefix: str = "damaged") -> str:
    """Rename a checkpoint so that it is no longer used, and describe what happened."""
    names = (f"{prefix}-{path.name}" + (f".{n}" if n else "") for n in count())
    target = next(new for name in names if not (new := path.with_name(name)).exists())
    try:
        os.rename(path, target)
    except OSError as error:
        return f"{path.name}: {reason}; it could not be renamed ({error.strerror})"
    return f"{path.name}: {reason}; it is now {target.name}"


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    hint = hint_for(error, "Check the disk.")
    return CheckpointError(
        f"Cannot write {path}: {reason_of(error)}", hint=f"{hint} Earlier checkpoints are untouched."
    )
