"""The checkpoints of a run: which of them is resumed, which one answers, and which may go.

A checkpoint is written aside, synced and renamed, so it is complete or absent. The newest one that passes
the check wins; one that fails is set aside under a name that says so, never deleted.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

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

_MIB = 2**20
_SPARE_BYTES = _MIB  # for the manifest, the other files of a run, and the file system's own
_NAME = re.compile(r"step-\d{8,15}")


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint as it lies there."""

    path: Path
    num_bytes: int
    damage: str | None


class CheckpointManager:
    """The checkpoints of one run, and which of them answered best.

    Rotation keeps the last `keep`, the best, and with `keep_every_hours` the first of every so many hours
    of training, which `metadata["seconds"]` counts.
    """

    def __init__(self, run: Path, keep: int = 3, keep_every_hours: float | None = None) -> None:
        self.directory = run / "checkpoints"
        self.best_file = run / "best"
        self.keep, self.keep_every_hours = keep, keep_every_hours

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def save(self, step: int, tensors: Tensors, metadata: Mapping[str, Any]) -> Checkpoint:
        """Returns when it is safe on the disk. After an error it may be tried again; earlier checkpoints
        are untouched, and what is there of this one is complete or absent."""
        path = self.path(step)
        partial = self.directory / f".{path.name}.partial"
        check_finite(tensors)
        complete = {**metadata, "step": step}
        try:
            self.check_space(tensors)
            if path.is_dir() and (problem := find_damage(path)) is not None:
                told = _set_aside(path, problem)
                if path.is_dir():
                    raise CheckpointError(f"Cannot write {path}: {told}")
            if not path.is_dir():  # otherwise an earlier try got as far as the rename
                make_directory(self.directory)
                write_checkpoint(partial, tensors, complete)
                os.rename(partial, path)
            sync(self.directory)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise _cannot_write(path, error) from error
        with suppress(OSError):  # then the next save removes what is too much
            self._rotate(path)
        return Checkpoint(path, step, complete)

    def check_space(self, tensors: Tensors) -> None:
        needed = _SPARE_BYTES + sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
        free = free_bytes(self.directory)
        if free < needed:
            raise CheckpointError(
                f"A checkpoint needs {needed / _MIB:.1f} MiB, and {free / _MIB:.1f} MiB are free for "
                f"{self.directory}",
                hint="Free some disk space; checkpoints.keep says how many stay.",
            )

    def good_ones(self) -> Iterator[Checkpoint]:
        """Newest first. Changes nothing, so it may be asked while a trainer is at work."""
        return (open_checkpoint(path) for path in self._newest_first() if find_damage(path) is None)

    def newest_good(self) -> Checkpoint | None:
        return next(self.good_ones(), None)

    def abandon_after(self, step: int) -> None:
        """Those beyond `step` are of a way that is not gone on with."""
        for path in self._newest_first():
            if step_of(path) > step:
                _set_aside(path, "", "abandoned")

    def recover(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest good one, and what was found damaged on the way to it and set aside. Where none is
        good nothing moves, so that no later start can take the run for a new one."""
        for unfinished in self._leftovers():
            shutil.rmtree(unfinished, ignore_errors=True)
        damaged: dict[Path, str] = {}
        for path in self._newest_first():
            problem = find_damage(path)
            if problem is None:
                return open_checkpoint(path), [_set_aside(bad, why) for bad, why in damaged.items()]
            damaged[path] = problem
        if damaged:
            listed = "\n  ".join(f"{path.name}: {problem}" for path, problem in damaged.items())
            raise CheckpointError(
                f"Every checkpoint in {self.directory} is damaged:\n  {listed}",
                hint="Start anew with --fresh, which keeps this run beside the new one.",
            )
        return None, []

    def examine(self) -> Iterator[Found]:
        """Every checkpoint, newest first, read to its last byte; those that were set aside come last."""
        for path in [*self._newest_first(), *sorted(self.directory.glob("*-step-*"))]:
            with suppress(FileNotFoundError):  # a trainer at work has just removed it
                files = (file for file in path.iterdir() if file.is_file())
                yield Found(path, sum(file.stat().st_size for file in files), find_damage(path))

    def newest_step(self) -> int | None:
        return max((step_of(path) for path in self._newest_first()), default=None)

    def mark_best(self, best: Mapping[str, Any]) -> None:
        """`best["checkpoint"]` is the name of the checkpoint; the rest says why."""
        try:
            replace_file(self.best_file, json.dumps(best, indent=2).encode())
        except OSError as error:
            raise _cannot_write(self.best_file, error) from error

    def best(self) -> dict[str, Any] | None:
        try:
            return checked_best(json.loads(self.best_file.read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError):
            return None

    def is_good(self, name: str) -> bool:
        path = self.directory / name
        return path.is_dir() and find_damage(path) is None

    def best_or_newest(self) -> Checkpoint:
        """The one to answer with."""
        best = self.best()
        if best is not None and self.is_good(best["checkpoint"]):
            return open_checkpoint(self.directory / best["checkpoint"])
        newest = self.newest_good()
        if newest is None:
            if self._newest_first():
                raise CheckpointError(
                    f"{self.directory.parent} has no usable checkpoint: all are damaged",
                    hint="`trm checkpoint verify` tells what is wrong with each.",
                )
            raise CheckpointError(
                f"{self.directory.parent} has no usable checkpoint",
                hint="Train it first: trm train; `trm runs` lists the runs there are.",
            )
        return newest

    def _newest_first(self) -> list[Path]:
        named = (path for path in self.directory.glob("step-*") if _NAME.fullmatch(path.name))
        return sorted((path for path in named if path.is_dir()), key=step_of, reverse=True)

    def _leftovers(self) -> list[Path]:
        """Of processes that were killed while they saved or removed."""
        return [path for end in ("partial", "removed") for path in self.directory.glob(f".step-*.{end}")]

    def _rotate(self, newest: Path) -> None:
        """Removes nothing before the newest one was read back and found good."""
        surplus = [path for path in self._surplus() if path != newest]
        if not surplus:
            return
        problem = find_damage(newest)
        if problem is not None:
            raise CheckpointError(
                f"What was just saved reads back otherwise: {_set_aside(newest, problem)}",
                hint="The disk or the memory of this machine may be failing. Earlier checkpoints are kept.",
            )
        for path in surplus:
            remove_directory(path)

    def _surplus(self) -> list[Path]:
        paths = {step_of(path): path for path in self._newest_first()}
        best = self.best()
        kept = {step_of(Path(best["checkpoint"]))} if best else set()
        if self.keep_every_hours is not None:
            kept |= _first_of_every(self.keep_every_hours * 3600, self._seconds(paths))
        return [paths[step] for step in surplus_steps(sorted(paths), self.keep, kept)]

    def _seconds(self, paths: Mapping[int, Path]) -> dict[int, float]:
        """Of training until each checkpoint; a damaged one does not say, and stays."""
        found = {}
        for step, path in paths.items():
            with suppress(OSError, ValueError, KeyError, TypeError):
                found[step] = float(open_checkpoint(path).metadata["seconds"])
        return {step: seconds for step, seconds in found.items() if math.isfinite(seconds)}


def checked_best(content: Any) -> dict[str, Any] | None:
    """What says which checkpoint answered best, if it makes sense."""
    if not isinstance(content, dict) or not isinstance(content.get("exact_accuracy", 0.0), (int, float)):
        return None
    name = content.get("checkpoint")
    return content if isinstance(name, str) and _NAME.fullmatch(name) else None


def surplus_steps(steps: Sequence[int], keep: int, kept: set[int]) -> list[int]:
    """Which of these, in rising order, rotation removes."""
    return [step for step in steps[:-keep] if step not in kept]


def _first_of_every(seconds: float, trained: Mapping[int, float]) -> set[int]:
    first: dict[int, int] = {}
    for step in sorted(trained):
        first.setdefault(int(trained[step] // seconds), step)
    return set(first.values())


def _set_aside(path: Path, why: str, as_what: str = "damaged") -> str:
    names = (f"{as_what}-{path.name}" + (f".{n}" if n else "") for n in count())
    target = next(new for name in names if not (new := path.with_name(name)).exists())
    try:
        os.rename(path, target)
    except OSError as error:
        return f"{path.name}: {why}; it stays where it is ({error.strerror})"
    return f"{path.name}: {why}; it is now {target.name}"


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"Cannot write {path}: {error.strerror or error}",
        hint="Free some disk space or make the directory writable; earlier checkpoints are untouched.",
    )
