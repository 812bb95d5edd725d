"""How one checkpoint lies on the disk: a directory of safetensors and JSON, and what may be wrong with it.

Its manifest has the size and sha256 of every file and of itself: safetensors does not notice a flipped bit.
There is no pickle. The directory may come from anywhere, so nothing in it is read before its size is known.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from macbook_optimization.durable_files import sync, write_synced
from macbook_optimization.errors import CheckpointError, NonFiniteError

SCHEMA = 2
Tensors = Mapping[str, Mapping[str, Any]]  # file name -> tensor name -> torch tensor
_MIB = 2**20
_FILE_NAME = re.compile(r"[a-z]+\.(safetensors|json)")  # never a path out of the checkpoint
_MAX_JSON_BYTES = 8 * _MIB  # a thousand slots take 20 KiB
_MAX_HEADER_BYTES = 4 * _MIB  # a few dozen tensors take a few KiB
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


def step_of(path: Path) -> int:
    found = re.search(r"step-(\d+)", path.name)  # also in the name of one that was set aside
    return int(found[1]) if found else -1


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
    ours = text == signed(content)
    if manifest["schema"] != SCHEMA and (ours or "sha256" not in manifest):
        raise CheckpointError(
            f"{path} was written in format {manifest['schema']}; this version reads format {SCHEMA}",
            hint="Use the version of trm that wrote it, or --fresh.",
        )
    if not ours:
        raise ValueError("manifest.json is damaged")
    return manifest


def signed(content: Mapping[str, Any]) -> str:
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


def write_checkpoint(directory: Path, tensors: Tensors, metadata: Mapping[str, Any]) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    os.mkdir(directory)
    files = {
        f"{name}.safetensors": write_synced(directory / f"{name}.safetensors", _safetensors(group))
        for name, group in tensors.items()
    }
    state = json.dumps(metadata, indent=2, allow_nan=False).encode()
    files["state.json"] = write_synced(directory / "state.json", [state])
    manifest = signed({"schema": SCHEMA, "step": metadata["step"], "files": files})
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


def check_finite(tensors: Tensors) -> None:
    for group, named in tensors.items():
        for name, tensor in named.items():
            if tensor.is_floating_point() and tensor.numel():
                least, most = tensor.aminmax()  # takes no memory; NaN comes through
                if not (least - least == 0 and most - most == 0):
                    raise NonFiniteError(f"{name} of the {group} is not finite, so it is not saved.")


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
