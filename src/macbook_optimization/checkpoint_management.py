"""Checkpoints: directories of safetensors and JSON that are complete or absent.

A checkpoint is written aside, synced and renamed, and carries a manifest with the size and sha256 of every
file: safetensors itself does not notice a flipped bit. The newest one that passes the check wins; one that
fails is set aside under a name that says so, never deleted. There is no pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from macbook_optimization.errors import CheckpointError

SCHEMA = 1
Tensors = Mapping[str, Mapping[str, Any]]  # file name -> tensor name -> torch tensor


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    step: int
    metadata: dict[str, Any]

    def load(self, name: str) -> dict[str, Any]:
        from safetensors.torch import load_file

        return dict(load_file(self.path / f"{name}.safetensors"))

    def load_all(self) -> dict[str, dict[str, Any]]:
        return {path.stem: self.load(path.stem) for path in sorted(self.path.glob("*.safetensors"))}


class CheckpointManager:
    """The checkpoints of one run, and which of them answered best."""

    def __init__(self, run: Path, keep: int = 3) -> None:
        self.directory = run / "checkpoints"
        self.best_file = run / "best"
        self.keep = keep

    def save(self, step: int, tensors: Tensors, metadata: Mapping[str, Any]) -> Checkpoint:
        path = self.directory / f"step-{step:08d}"
        partial = self.directory / f".{path.name}.partial"
        if path.exists():
            raise CheckpointError(f"{path} exists already", hint="A step is saved once; move it away.")
        complete = {**metadata, "step": step}
        try:
            _write(partial, tensors, complete)
            partial.rename(path)
            _sync(self.directory)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise _cannot_write(path, error) from error
        self._rotate()
        return Checkpoint(path, step, complete)

    def newest_good(self) -> Checkpoint | None:
        """Changes nothing, so it may be asked while a trainer is at work."""
        good = (path for path in self._newest_first() if find_damage(path) is None)
        return next((open_checkpoint(path) for path in good), None)

    def recover(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest good one, and what was found damaged on the way to it and set aside. Where none is
        good nothing moves, so that no later start can take the run for a new one."""
        for unfinished in self.directory.glob(".step-*.partial"):
            shutil.rmtree(unfinished, ignore_errors=True)
        damaged: dict[Path, str] = {}
        for path in self._newest_first():
            problem = find_damage(path)
            if problem is None:
                notes = [f"{bad.name}: {why}; it is now {_set_aside(bad)}" for bad, why in damaged.items()]
                return open_checkpoint(path), notes
            damaged[path] = problem
        if damaged:
            listed = "\n  ".join(f"{path.name}: {problem}" for path, problem in damaged.items())
            raise CheckpointError(
                f"Every checkpoint in {self.directory} is damaged:\n  {listed}",
                hint="Start anew with --fresh, which keeps this run beside the new one.",
            )
        return None, []

    def newest_step(self) -> int | None:
        return max((int(path.name.removeprefix("step-")) for path in self._newest_first()), default=None)

    def mark_best(self, best: Mapping[str, Any]) -> None:
        """`best["checkpoint"]` is the name of the checkpoint; the rest says why."""
        content = json.dumps(best, indent=2)
        partial = self.best_file.with_name(".best.partial")
        try:
            partial.write_text(content, encoding="utf-8")
            partial.replace(self.best_file)
        except OSError as error:
            raise _cannot_write(self.best_file, error) from error

    def best(self) -> dict[str, Any] | None:
        try:
            content = json.loads(self.best_file.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return content if isinstance(content, dict) and "checkpoint" in content else None

    def best_or_newest(self) -> Checkpoint:
        """The one to answer with."""
        best = self.best()
        path = self.directory / best["checkpoint"] if best else None
        if path is not None and path.is_dir() and find_damage(path) is None:
            return open_checkpoint(path)
        newest = self.newest_good()
        if newest is None:
            raise CheckpointError(
                f"{self.directory.parent} has no usable checkpoint",
                hint="Train it first: trm train; `trm runs` lists the runs there are.",
            )
        return newest

    def _newest_first(self) -> list[Path]:
        return sorted(self.directory.glob("step-" + "[0-9]" * 8), reverse=True)

    def _rotate(self) -> None:
        best = self.best()
        for path in self._newest_first()[self.keep :]:
            if best is None or path.name != best["checkpoint"]:
                shutil.rmtree(path, ignore_errors=True)


def _set_aside(path: Path) -> str:
    names = (f"damaged-{path.name}" + (f".{n}" if n else "") for n in count())
    return path.rename(next(new for name in names if not (new := path.with_name(name)).exists())).name


def open_checkpoint(path: Path) -> Checkpoint:
    metadata = json.loads((path / "state.json").read_text(encoding="utf-8"))
    return Checkpoint(path, int(metadata["step"]), metadata)


def find_damage(path: Path) -> str | None:
    """None if every file is what the manifest says; otherwise what is wrong."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        schema, files = manifest["schema"], manifest["files"].items()
        damaged = next((name for name, expected in files if _digest(path / name) != expected), None)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"incomplete or unreadable ({error})"
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}") from error
    if schema != SCHEMA:
        raise CheckpointError(
            f"{path} was written in format {schema}; this version reads format {SCHEMA}",
            hint="Use the version of trm that wrote it, or --fresh.",
        )
    return None if damaged is None else f"{damaged} is damaged"


def _write(directory: Path, tensors: Tensors, metadata: Mapping[str, Any]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        for name, group in tensors.items():
            save_file(dict(group), directory / f"{name}.safetensors")
    except SafetensorError as error:  # how a full disk surfaces
        raise OSError(str(error)) from error
    (directory / "state.json").write_text(json.dumps(metadata, indent=2), encoding="utf-8")
    files = {path.name: _digest(path) for path in sorted(directory.iterdir())}
    manifest = json.dumps({"schema": SCHEMA, "files": files}, indent=2)
    (directory / "manifest.json").write_text(manifest, encoding="utf-8")
    for path in (*directory.iterdir(), directory):
        _sync(path)


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"Cannot write {path}: {error.strerror or error}",
        hint="Free some disk space or make the directory writable; earlier checkpoints are untouched.",
    )
