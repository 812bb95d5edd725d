"""Checkpoints: directories of safetensors and JSON that are complete or absent.

A checkpoint is written aside, synced and renamed, and carries a manifest with the size and sha256 of every
file and of itself: safetensors does not notice a flipped bit. The newest one that passes the check wins; one
that fails is set aside under a name that says so, never deleted. There is no pickle.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from macbook_optimization.durable_files import (
    free_bytes,
    make_directory,
    remove_directory,
    replace_file,
    sync,
    write_synced,
)
from macbook_optimization.errors import CheckpointError, NonFiniteError

SCHEMA = 2
Tensors = Mapping[str, Mapping[str, Any]]  # file name -> tensor name -> torch tensor
_MIB = 2**20
_FILE_NAME = re.compile(r"[a-z]+\.(safetensors|json)")  # never a path out of the checkpoint
_NAME = re.compile(r"step-\d{8,15}")
_MAX_JSON_BYTES = 8 * _MIB  # a thousand slots take 20 KiB
_MAX_HEADER_BYTES = 4 * _MIB  # a few dozen tensors take a few KiB
_SPARE_BYTES = _MIB  # for the manifest, the other files of a run, and the file system's own
_DTYPES = {
    "torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16",
    "torch.int64": "I64", "torch.int32": "I32", "torch.int16": "I16", "torch.int8": "I8",
    "torch.uint8": "U8", "torch.bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    step: int
    metadata: dict[str, Any]

    def load(self, name: str) -> dict[str, Any]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return dict(load_file(self.path / f"{name}.safetensors"))
        except (OSError, SafetensorError) as error:  # also if a trainer at work has just removed it
            raise CheckpointError(f"{self.path} has no readable {name}: {error}") from error

    def load_all(self) -> dict[str, dict[str, Any]]:
        """The files of the manifest; what else lies there is not ours."""
        names = [Path(name) for name in _read_manifest(self.path)["files"]]
        return {name.stem: self.load(name.stem) for name in names if name.suffix == ".safetensors"}


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
        _check_finite(tensors)
        complete = {**metadata, "step": step}
        try:
            self.check_space(tensors)
            if path.is_dir() and (problem := find_damage(path)) is not None:
                told = _set_aside(path, problem)
                if path.is_dir():
                    raise CheckpointError(f"Cannot write {path}: {told}")
            if not path.is_dir():  # otherwise an earlier try got as far as the rename
                make_directory(self.directory)
                _write(partial, tensors, complete)
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


def step_of(path: Path) -> int:
    found = re.search(r"step-(\d+)", path.name)  # also in the name of one that was set aside
    return int(found[1]) if found else -1


def _set_aside(path: Path, why: str, as_what: str = "damaged") -> str:
    names = (f"{as_what}-{path.name}" + (f".{n}" if n else "") for n in count())
    target = next(new for name in names if not (new := path.with_name(name)).exists())
    try:
        os.rename(path, target)
    except OSError as error:
        return f"{path.name}: {why}; it stays where it is ({error.strerror})"
    return f"{path.name}: {why}; it is now {target.name}"


def open_checkpoint(path: Path) -> Checkpoint:
    metadata = json.loads((path / "state.json").read_text(encoding="utf-8"))
    return Checkpoint(path, int(metadata["step"]), metadata)


def find_damage(path: Path) -> str | None:
    """None if every file is what the manifest says; otherwise what is wrong."""
    try:
        manifest = _read_manifest(path)
        for name, expected in manifest["files"].items():
            if not _FILE_NAME.fullmatch(name) or _size(path / name) != expected["bytes"]:
                return f"{name} is damaged"
            if name.endswith(".json") and expected["bytes"] > _MAX_JSON_BYTES:
                return f"{name} is too large"
            if _digest(path / name) != expected:
                return f"{name} is damaged"
        if not manifest["step"] == open_checkpoint(path).step == step_of(path):
            return "it is of another step than its name says"
        return _find_malformed(path, manifest["files"])
    except PermissionError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}") from error
    except FileNotFoundError as error:
        return f"incomplete or unreadable ({Path(error.filename).name} is missing)"
    except (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError, RecursionError):
        return "incomplete or unreadable (its manifest or its state makes no sense)"
    except (OSError, ValueError) as error:
        return f"incomplete or unreadable ({error})"


def _read_manifest(path: Path) -> dict[str, Any]:
    """Raises what reading, parsing and looking things up raise; `CheckpointError` at another format."""
    file = path / "manifest.json"
    if _size(file) > _MAX_JSON_BYTES:
        raise ValueError("manifest.json is too large")
    text = file.read_text(encoding="utf-8")
    manifest: dict[str, Any] = json.loads(text)
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    ours = text == _signed(content)
    if manifest["schema"] != SCHEMA and (ours or "sha256" not in manifest):
        raise CheckpointError(
            f"{path} was written in format {manifest['schema']}; this version reads format {SCHEMA}",
            hint="Use the version of trm that wrote it, or --fresh.",
        )
    if not ours:
        raise ValueError("manifest.json is damaged")
    return manifest


def _signed(content: Mapping[str, Any]) -> str:
    """The one way to write a manifest: even a changed blank in it is seen."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=2)


def _find_malformed(path: Path, names: Mapping[str, Any]) -> str | None:
    """Who makes a file up can also make up its sha256, so its structure is checked too."""
    from safetensors import SafetensorError, safe_open

    for name in names:
        if name.endswith(".safetensors"):
            with (path / name).open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > _MAX_HEADER_BYTES:
                return f"{name} is malformed (its header has {header_bytes} bytes)"
            try:
                with safe_open(path / name, framework="numpy"):
                    pass
            except SafetensorError as error:
                return f"{name} is malformed ({error})"
    return None


def _size(path: Path) -> int:
    """Of a file: a pipe or a device in its place would keep a reader for ever."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path.name} is not a file")
    return found.st_size


def _write(directory: Path, tensors: Tensors, metadata: Mapping[str, Any]) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    os.mkdir(directory)
    files = {
        f"{name}.safetensors": write_synced(directory / f"{name}.safetensors", _safetensors(group))
        for name, group in tensors.items()
    }
    state = json.dumps(metadata, indent=2, allow_nan=False).encode()
    files["state.json"] = write_synced(directory / "state.json", [state])
    manifest = _signed({"schema": SCHEMA, "step": metadata["step"], "files": files})
    write_synced(directory / "manifest.json", [manifest.encode()])
    sync(directory)


def _safetensors(group: Mapping[str, Any]) -> Iterator[Any]:
    """The file's parts, without a copy of the tensors: carried latents may be most of the memory there is.
    (The library's `save_file` also copies nothing, but tells a full disk from a bug by a string, and what
    it wrote would have to be read again to be hashed.) https://github.com/huggingface/safetensors#format"""
    import torch

    ordered = sorted(group.items(), key=lambda item: (-item[1].element_size(), item[0]))  # all are aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in ordered:
        ends = [offset, offset := offset + tensor.nbytes]
        header[name] = {
            "dtype": _DTYPES[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": ends
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _check_finite(tensors: Tensors) -> None:
    for group, named in tensors.items():
        for name, tensor in named.items():
            if tensor.is_floating_point() and tensor.numel():
                least, most = tensor.aminmax()  # takes no memory; NaN comes through
                if not (least - least == 0 and most - most == 0):
                    raise NonFiniteError(f"{name} of the {group} is not finite, so it is not saved.")


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"Cannot write {path}: {error.strerror or error}",
        hint="Free some disk space or make the directory writable; earlier checkpoints are untouched.",
    )
