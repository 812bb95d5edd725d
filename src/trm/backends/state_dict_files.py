"""List the tensors in a `.pt` file of the reference implementation, without torch and without trusting it.

Such a file is a zip with raw tensors and a pickle that describes how to assemble them. `torch.load` with
`weights_only` has had vulnerabilities, and Intel Macs cannot leave torch 2.2. So the pickle is read here, in
a child process with limits, by an unpickler that resolves a handful of names and creates plain records.
"""

from __future__ import annotations

import pickle
import resource
import sys
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from macbook_optimization.children import ChildDied, Send, run_in_child
from macbook_optimization.errors import CheckpointError
from macbook_optimization.file_errors import hint_for, reason_of
from macbook_optimization.input_files import open_input
from macbook_optimization.json_types import JsonObject

STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
}
_MAX_PICKLE_BYTES = 16 * 2**20
_MAX_TENSOR_BYTES = 16 * 2**30
_CHILD_SECONDS = 20
_CHILD_BYTES = 2 * 2**30
_CRAFTED = (  # errors that reading a crafted file can raise
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OverflowError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location and layout of a tensor in the zip."""

    entry: str
    dtype: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """Describe every tensor; raise `CheckpointError` for anything but named tensors."""
    hint = "A file must be a state dict of plain tensors, saved by torch 1.6 or newer; a run is a directory."
    try:
        open_input(file).close()  # a pipe would block the child until its time is up
        found = run_in_child(f"{__name__}:describe", {"file": str(file)}, timeout_seconds=_CHILD_SECONDS)
    except OSError as error:
        raise CheckpointError(f"Cannot read {file}: {reason_of(error)}", hint_for(error, hint)) from error
    except CheckpointError as error:
        raise CheckpointError(f"{file} is not a checkpoint that can be read safely: {error}", hint) from error
    except ChildDied as death:
        raise CheckpointError(f"{file} is not a checkpoint: its reader {death}", hint) from death
    return {name: StoredTensor(**facts) for name, facts in found.items()}


def describe(file: str, send: Send) -> dict[str, JsonObject]:
    """Read the file in the child process, under limits of time and memory."""
    resource.setrlimit(resource.RLIMIT_CPU, (_CHILD_SECONDS, _CHILD_SECONDS))
    if sys.platform == "linux":  # macOS refuses this limit
        resource.setrlimit(resource.RLIMIT_AS, (_CHILD_BYTES, _CHILD_BYTES))
    try:
        with open_input(file) as opened, zipfile.ZipFile(opened) as archive:
            state = _unpickled(archive)
    except zipfile.BadZipFile as error:
        raise CheckpointError("it is not a zip file") from error
    except _CRAFTED as error:
        raise CheckpointError(f"its contents are inconsistent ({error})") from error
    if not isinstance(state, dict) or not state:
        raise CheckpointError("it is not a state dict")
    if not all(isinstance(name, str) and isinstance(item, StoredTensor) for name, item in state.items()):
        raise CheckpointError("it holds something other than named tensors")
    return {name: asdict(tensor) for name, tensor in state.items()}


def _unpickled(archive: zipfile.ZipFile) -> Any:
    names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(names) != 1:
        raise CheckpointError("the zip does not hold exactly one data.pkl")
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise CheckpointError("it has compressed entries, which torch never writes")
    if archive.getinfo(names[0]).file_size > _MAX_PICKLE_BYTES:
        raise CheckpointError("its table of contents is too large")
    if sum(entry.file_size for entry in entries) > _MAX_TENSOR_BYTES:
        raise CheckpointError(f"it is larger than {_MAX_TENSOR_BYTES // 2**30} GiB")
    with archive.open(names[0]) as stream:
        return _RecordsOnly(stream, names[0].removesuffix("data.pkl")).load()


class _StateDict(dict[str, StoredTensor]):
    """The type that a state dict is rebuilt as: it carries an attribute, which a plain dict cannot."""


class _RecordsOnly(pickle.Unpickler):
    """Resolves no other names than these, so that loading can create records and do nothing else."""

    def __init__(self, stream: Any, root: str) -> None:
        super().__init__(stream)
        self.root = root

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _StateDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _record
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"it requires {module}.{name}")

    def persistent_load(self, pid: Any) -> tuple[str, str]:
        kind, dtype, key, _, _ = pid
        if kind != "storage" or dtype not in STORAGES.values():
            raise pickle.UnpicklingError("it refers to an unknown object")
        return f"{self.root}data/{key}", dtype


def _record(storage: tuple[str, str], offset: int, size: Any, stride: Any, *ignored: Any) -> StoredTensor:
    entry, dtype = storage
    size, stride = tuple(size), tuple(stride)
    numbers = (offset, *size, *stride)
    if not all(isinstance(n, int) and 0 <= n < 2**48 for n in numbers) or len(size) != len(stride):
        raise ValueError("a tensor has an invalid shape")
    return StoredTensor(str(entry), str(dtype), offset, size, stride)
