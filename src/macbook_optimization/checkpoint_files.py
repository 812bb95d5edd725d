"""The on-disk format of one checkpoint: a directory of safetensors and JSON files with a manifest.

The manifest holds the size and sha256 of every file and of itself, because safetensors does not detect a
flipped bit. There is no pickle. The directory may come from an untrusted source, so the size of each file is
checked before it is read.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import numpy as np

from macbook_optimization.durable_files import Buffer, FileDigest, sync, write_synced
from macbook_optimization.errors import CheckpointError, NonFiniteError
from macbook_optimization.file_errors import SHORTAGES, hint_for, reason_of
from macbook_optimization.input_files import open_input, read_input, read_json
from macbook_optimization.json_types import JsonMapping, JsonObject, parse_json
from macbook_optimization.units import MIB

SCHEMA = 2
TensorDict: TypeAlias = dict[str, Any]  # tensor name -> torch tensor, or array of NumPy or MLX
Tensors: TypeAlias = Mapping[str, Mapping[str, Any]]  # file name -> tensor name -> tensor
# The suffix is the rank of a process that saves its own part: latents-1.safetensors. Without dots and slashes
# in the stem, a name can never lead out of the checkpoint's directory.
_FILE_NAME = re.compile(r"[a-z]+(-[0-9]{1,6})?\.(safetensors|json)")
_MAX_JSON_BYTES = 8 * MIB  # a thousand slots take 20 KiB
_MAX_HEADER_BYTES = 4 * MIB  # a few dozen tensors take a few KiB
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


class Manifest(TypedDict):
    schema: int
    step: int
    files: dict[str, FileDigest]
    sha256: str  # of the other keys


class TensorEntry(TypedDict):
    """Description of one tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]  # first byte and end, counted from the end of the header


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    step: int
    metadata: JsonObject

    def load(self, name: str, framework: str = "torch") -> TensorDict:
        """Load the tensors of one file (`name` has no extension) for "torch", "numpy" or "mlx"."""
        if framework == "mlx":  # whose part of the library does not read bfloat16 (safetensors 0.8)
            load_file = importlib.import_module("mlx.core").load
        else:
            load_file = importlib.import_module(f"safetensors.{framework}").load_file
        with _readable(self.path, name):
            return dict(load_file(str(self.path / f"{name}.safetensors")))

    def load_all(self, framework: str = "torch") -> dict[str, TensorDict]:
        """Load every tensor file of the manifest; other files in the directory are ignored."""
        return {name: self.load(name, framework) for name in self._tensor_files()}

    def open_all(self, framework: str = "torch") -> Mapping[str, Mapping[str, Any]]:
        """Open what `load_all` loads. Tensors of torch are read when they are requested, as those of MLX are
        by themselves."""
        if framework != "torch":
            return self.load_all(framework)
        return {name: StoredTensors.of(self.path, name) for name in self._tensor_files()}

    def _tensor_files(self) -> list[str]:
        files = [Path(name) for name in _read_manifest(self.path)["files"]]
        return [file.stem for file in files if file.suffix == ".safetensors"]


@dataclass(frozen=True, slots=True)
class StoredTensors(Mapping[str, Any]):
    """The torch tensors of one file, each read when it is requested.

    While a model resumes that fills most of the memory, there is no room for its weights a second time.
    """

    directory: Path
    file: str  # without extension
    names: tuple[str, ...]

    @classmethod
    def of(cls, directory: Path, file: str) -> StoredTensors:
        with _readable(directory, file), _opened(directory, file) as tensors:
            return cls(directory, file, tuple(tensors.keys()))

    def __getitem__(self, name: str) -> Any:
        if name not in self.names:
            raise KeyError(name)
        with _readable(self.directory, self.file), _opened(self.directory, self.file) as tensors:
            return tensors.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _opened(directory: Path, name: str) -> Any:
    from safetensors import safe_open

    return safe_open(directory / f"{name}.safetensors", framework="pt")


@contextmanager
def _readable(directory: Path, name: str) -> Iterator[None]:
    """Raise `CheckpointError` if a file of tensors cannot be read."""
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:  # a running trainer may just have removed it
        raise CheckpointError(f"{directory} has no readable {name}: {error}", hint_for(error)) from error
    except (RuntimeError, SafetensorError) as error:  # the library opens files without OSError
        raise CheckpointError(f"{directory} has no readable {name}: {error}") from error


def step_of(path: Path) -> int:
    """Return the step in a directory's name, also of one that was set aside; -1 if there is none."""
    found = re.search(r"step-(\d+)", path.name)
    return int(found[1]) if found else -1


def open_checkpoint(path: Path) -> Checkpoint:
    metadata = read_json(path / "state.json", _MAX_JSON_BYTES)
    return Checkpoint(path, int(metadata["step"]), metadata)


def find_damage(path: Path) -> str | None:
    """Describe what is wrong with a checkpoint, or return None if every file matches the manifest."""
    try:
        return _find_damage(path)
    except PermissionError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}", hint_for(error)) from error
    except FileNotFoundError as error:
        return f"incomplete or unreadable ({Path(error.filename).name} is missing)"
    except (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError, RecursionError):
        return "incomplete or unreadable (the manifest or the state is invalid)"
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in SHORTAGES:  # the checkpoint may be intact
            raise CheckpointError(f"Cannot read {path}: {error.strerror}", hint_for(error)) from error
        reason = reason_of(error) if isinstance(error, OSError) else error
        return f"incomplete or unreadable ({reason})"


def _find_damage(path: Path) -> str | None:
    """Do the work of `find_damage`; invalid content raises whatever reading and parsing it raises."""
    manifest = _read_manifest(path)
    for name, expected in manifest["files"].items():
        if not _FILE_NAME.fullmatch(name) or _file_size(path / name) != expected["bytes"]:
            return f"{name} is damaged"
        if name.endswith(".json") and expected["bytes"] > _MAX_JSON_BYTES:
            return f"{name} is too large"
        if _digest(path / name) != expected:
            return f"{name} is damaged"
    if not manifest["step"] == open_checkpoint(path).step == step_of(path):
        return "its content belongs to another step than its name"
    return _find_malformed(path, manifest["files"])


def _read_manifest(path: Path) -> Manifest:
    """Read and verify the manifest.

    A damaged one raises whatever reading and parsing it raises; another format raises `CheckpointError`.
    """
    file = path / "manifest.json"
    if _file_size(file) > _MAX_JSON_BYTES:
        raise ValueError("manifest.json is too large")
    text = read_input(file, _MAX_JSON_BYTES).decode()
    manifest: Manifest = parse_json(text)
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    is_intact = text == signed(content)
    # An intact manifest of another schema, or one from before manifests were signed, is not damage: setting
    # it aside would lose a checkpoint that another version can read.
    if manifest["schema"] != SCHEMA and (is_intact or "sha256" not in manifest):
        raise CheckpointError(
            f"{path} was written in format {manifest['schema']}; this version reads format {SCHEMA}",
            hint="Use the version of trm that wrote it, or --fresh.",
        )
    if not is_intact:
        raise ValueError("manifest.json is damaged")
    return manifest


def signed(content: JsonMapping) -> str:
    """Return the canonical text of a manifest, with its sha256: even a changed blank is detected."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=2)


def _find_malformed(path: Path, names: Iterable[str]) -> str | None:
    """Check the structure of the tensor files: a forged file can carry a matching sha256."""
    from safetensors import SafetensorError, safe_open

    for name in names:
        if not name.endswith(".safetensors"):
            continue
        with open_input(path / name) as file:
            header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > _MAX_HEADER_BYTES:
            return f"{name} is malformed (its header has {header_bytes} bytes)"
        try:
            with safe_open(path / name, framework="numpy"):
                pass
        except SafetensorError as error:
            return f"{name} is malformed ({error})"
    return None


def _file_size(path: Path) -> int:
    """Return the size of a regular file; reading a pipe or a device in its place might never end."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path.name} is not a file")
    return status.st_size


def write_checkpoint(directory: Path, tensors: Tensors, metadata: JsonMapping) -> None:
    """Write all files of a checkpoint and sync them. The caller renames the directory when this returns."""
    if directory.exists():
        shutil.rmtree(directory)
    os.mkdir(directory)
    files = {
        f"{name}.safetensors": write_synced(directory / f"{name}.safetensors", _serialize(group))
        for name, group in tensors.items()
    }
    state = json.dumps(metadata, indent=2, allow_nan=False).encode()
    files["state.json"] = write_synced(directory / "state.json", [state])
    manifest = signed({"schema": SCHEMA, "step": metadata["step"], "files": files})
    write_synced(directory / "manifest.json", [manifest.encode()])
    sync(directory)


def _serialize(group: JsonMapping) -> Iterator[Buffer]:
    """Yield the parts of a safetensors file without copying the tensors: latents can fill most of the memory.

    The library's `save_file` does not copy either, but it reports a full disk only in the text of a generic
    error, and its output would have to be read again to be hashed.
    Format: https://github.com/huggingface/safetensors#format
    """
    # Largest elements first, so that every tensor is aligned to its element size.
    tensors = sorted(group.items(), key=lambda item: (-_element_size(item[1]), item[0]))
    entries: dict[str, TensorEntry] = {}
    start = 0
    for name, tensor in tensors:
        end = start + tensor.nbytes
        entries[name] = {
            "dtype": _DTYPES[str(tensor.dtype).rpartition(".")[2]],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    for _, tensor in tensors:
        yield _content(tensor)


def _element_size(tensor: Any) -> int:
    return int(tensor.itemsize)


def _content(tensor: Any) -> memoryview:
    """Return the bytes of a tensor; those of a contiguous one in main memory are not copied."""
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
    if not hasattr(tensor, "detach"):
        import mlx.core as mx

        return memoryview(tensor.reshape(-1).view(mx.uint8))
    import torch

    content: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return content


def check_finite(tensors: Tensors) -> None:
    """Raise `NonFiniteError` if a tensor holds NaN or Inf."""
    for group_name, group in tensors.items():
        for name, tensor in group.items():
            if not _is_finite(tensor):
                raise NonFiniteError(f"{name} of the {group_name} is not finite, so it is not saved.")


def _is_finite(tensor: Any) -> bool:
    """Check without a mask as large as the tensor: NaN passes through minimum and maximum."""
    if "float" not in str(tensor.dtype) or 0 in tensor.shape:
        return True
    extremes = tensor.aminmax() if hasattr(tensor, "aminmax") else (tensor.min(), tensor.max())
    return all(math.isfinite(extreme) for extreme in extremes)


def _digest(path: Path) -> FileDigest:
    with open_input(path) as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
