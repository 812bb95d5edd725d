"""Weights from and for the public TRM code.

Its checkpoints are `.pt` files: a zip with raw tensors and a pickle that says how to put them together.
`torch.load(weights_only=True)` has been broken before, and Intel Macs cannot leave torch 2.2, so the pickle
is read here by an unpickler that knows five harmless names, in a child process. Ours is safetensors.

The names are the same but for a prefix, and the two initial latents that we keep as one tensor.
"""

from __future__ import annotations

import math
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from macbook_optimization.errors import CheckpointError
from trm.backends.pytorch.step import learner, load_weights
from trm.batches import Slots
from trm.config import ModelConfig, RunConfig
from trm.runs import DEFAULT_PLAN, Run, begin, open_run
from trm.tasks import load_task
from trm.tasks.base import TaskShape, open_split

_PREFIXES = ("_orig_mod.", "model.", "inner.")  # compiled model, loss head, halting wrapper
_INITIAL = {"trm": ("H_init", "L_init"), "singlez": ("L_init",), "transformer": ("H_init",)}
_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
}
_MAX_PICKLE_BYTES = 16 * 2**20
_MAX_TENSOR_BYTES = 16 * 2**30
_CHILD_SECONDS = 300
_CRAFTED = (  # what reading a crafted file can raise
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    LookupError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)


def import_reference(file: Path, config: RunConfig, path: Path) -> None:
    """A run at step 0 that answers, and goes on training, with the weights of FILE."""
    weights = from_reference(_read_in_child(file), config.model)
    made = learner(config.model, config.training, _shape(config), config.seed)
    for model in (made.model, made.averaged):
        load_weights(model, weights)
    run = open_run(path, config)
    if run.checkpoints().newest_step() is not None:
        raise CheckpointError(f"{path} already has checkpoints", hint="Choose a new --run directory.")
    metadata = {
        "recipe": config.what_is_learned(),
        "shape": asdict(made.model.shape),
        "data": None,  # nothing here has been learned from a dataset that we know
        "slots": Slots.new(config.training.effective_batch_size).to_lists(),
        "seconds": 0.0,
        "evaluated": 0,
    }
    begin(run, config, DEFAULT_PLAN)
    run.checkpoints().save(0, made.tensors(), metadata)
    run.event("imported", file=str(file))


def export_reference(path: Path, file: Path, *, averaged: bool = True, compiled: bool = True) -> int:
    """The public code compiles its model unless told not to, and then loads compiled names only."""
    run = Run(path)
    config = run.config
    checkpoint = run.checkpoints().best_or_newest()
    weights = checkpoint.load("ema" if averaged and config.training.ema else "weights")
    file = file.resolve()
    partial = file.with_name(f".{file.name}.partial")
    try:
        torch.save(to_reference(weights, config.model, compiled), partial)
        partial.replace(file)
    except (OSError, RuntimeError) as error:  # torch reports a missing directory as RuntimeError
        partial.unlink(missing_ok=True)
        raise CheckpointError(f"Cannot write {file}: {error}") from error
    return checkpoint.step


def from_reference(state: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    plain = {}
    for name, tensor in state.items():
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        plain[name.replace("H_level.", "L_level.") if model.variant == "transformer" else name] = (
            tensor.float()
        )
    missing = [name for name in _INITIAL[model.variant] if name not in plain]
    if missing:
        raise CheckpointError(
            f"The file has no {', '.join(missing)}, which a model of variant {model.variant} needs",
            hint="Choose a recipe, or model.variant=..., that matches the file.",
        )
    initial = torch.stack([plain.pop(name) for name in _INITIAL[model.variant]])
    return {**plain, "initial_latents": initial}


def to_reference(
    weights: Mapping[str, Tensor], model: ModelConfig, compiled: bool = True
) -> dict[str, Tensor]:
    level = "H_level." if model.variant == "transformer" else "L_level."
    plain = {name.replace("L_level.", level): tensor for name, tensor in weights.items()}
    initial = plain.pop("initial_latents")
    plain |= dict(zip(_INITIAL[model.variant], initial.clone(), strict=True))
    prefix = "_orig_mod.model.inner." if compiled else "model.inner."
    return {f"{prefix}{name}": tensor.clone() for name, tensor in plain.items()}


def _shape(config: RunConfig) -> TaskShape:
    if config.data.build is not None and not config.data.path.exists():
        return load_task(config.task).shape(config.data.build)
    return open_split(config.data.path, "train").shape


def _read_in_child(file: Path) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as directory:
        converted = Path(directory) / "weights.safetensors"
        # -P: nothing that lies beside the file, in the current directory, is imported
        command = [sys.executable, "-P", "-m", __name__, str(file), str(converted)]
        try:
            child = subprocess.run(
                command, capture_output=True, text=True, timeout=_CHILD_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise CheckpointError(f"{file} could not be read within {_CHILD_SECONDS} s") from error
        if child.returncode != 0:
            reason = child.stderr.strip().splitlines() or [
                f"the reader died with exit code {child.returncode}"
            ]
            raise CheckpointError(
                f"{file} is not a checkpoint that can be read safely: {reason[-1]}",
                hint="Only a state dict of plain tensors, saved by torch 1.6 or newer, is read.",
            )
        return dict(load_file(converted))


def read_state_dict(file: Path) -> dict[str, Tensor]:
    """The tensors of a `.pt` file; raises `CheckpointError` at anything but plain tensors."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(names) != 1:
                raise CheckpointError("the zip holds no single data.pkl")
            _check_sizes(archive, names[0])
            with archive.open(names[0]) as stream:
                state = _TensorsOnly(stream, archive, names[0].removesuffix("data.pkl")).load()
    except zipfile.BadZipFile as error:
        raise CheckpointError("it is not a zip file") from error
    except _CRAFTED as error:
        raise CheckpointError(f"its contents do not fit together ({error})") from error
    if not isinstance(state, dict) or not state:
        raise CheckpointError("it is not a state dict")
    if not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in state.items()):
        raise CheckpointError("it holds something else than named tensors")
    return state


def _check_sizes(archive: zipfile.ZipFile, pickle_name: str) -> None:
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise CheckpointError("it has compressed entries, which torch never writes")
    if archive.getinfo(pickle_name).file_size > _MAX_PICKLE_BYTES:
        raise CheckpointError("its table of contents is too large")
    if sum(entry.file_size for entry in entries) > _MAX_TENSOR_BYTES:
        raise CheckpointError(f"it is larger than {_MAX_TENSOR_BYTES // 2**30} GiB")


class _StateDict(dict[str, Tensor]):
    """What a module's state dict is rebuilt as: it carries an attribute, which a plain dict cannot."""


class _TensorsOnly(pickle.Unpickler):
    """Resolves no name outside this table, so loading can build tensors and do nothing else."""

    def __init__(self, stream: Any, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(stream)
        self.archive, self.root = archive, root

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _StateDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Tensor:
        kind, dtype, key, _, _ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError("it refers to an unknown object")
        content = bytearray(self.archive.read(f"{self.root}data/{key}"))
        return torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)


def _rebuild_tensor(storage: Tensor, offset: int, size: Any, stride: Any, *ignored: Any) -> Tensor:
    if math.prod(size) > storage.numel():  # a stride of 0 could make gigabytes of a few bytes
        raise ValueError("a tensor is larger than its storage")
    return storage.as_strided(size, stride, offset).clone()  # checks that it lies inside the storage


def _main(source: str, target: str) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CHILD_SECONDS, _CHILD_SECONDS))
    try:
        state = read_state_dict(Path(source))
    except CheckpointError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, target)


if __name__ == "__main__":
    os.umask(0o077)
    _main(*sys.argv[1:])
