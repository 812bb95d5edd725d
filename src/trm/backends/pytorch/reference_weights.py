"""Weights in the files of the reference implementation.

Names are the same except for a prefix, and for the two initial latents, which we keep as one tensor.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor

from macbook_optimization.errors import CheckpointError
from macbook_optimization.file_errors import hint_for, reason_of
from macbook_optimization.input_files import open_input
from macbook_optimization.output_files import OutputFile
from trm.backends.state_dict_files import StoredTensor, stored_tensors
from trm.config import ModelConfig

_PREFIXES = ("_orig_mod.", "model.", "inner.")  # compiled model, loss head, halting wrapper
_INITIAL = {"trm": ("H_init", "L_init"), "singlez": ("L_init",), "transformer": ("H_init",)}


def from_reference_file(file: Path, model: ModelConfig) -> dict[str, Tensor]:
    return from_reference(read_state_dict(file), model)


def from_reference(state: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    weights = {}
    for name, tensor in state.items():
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        if model.variant == "transformer":
            name = name.replace("H_level.", "L_level.")
        weights[name] = tensor.float()
    missing = [name for name in _INITIAL[model.variant] if name not in weights]
    if missing:
        raise CheckpointError(
            f"The file has no {', '.join(missing)}, which a model of variant {model.variant} needs",
            hint="Choose a recipe, or model.variant=..., that matches the file.",
        )
    initial = torch.stack([weights.pop(name) for name in _INITIAL[model.variant]])
    return {**weights, "initial_latents": initial}


def to_reference(
    weights: Mapping[str, Tensor], model: ModelConfig, compiled: bool = True
) -> dict[str, Tensor]:
    """Return the weights under the names that the reference implementation loads.

    It compiles its model by default, and then loads names of compiled modules only.
    """
    block = "H_level." if model.variant == "transformer" else "L_level."
    renamed = {name.replace("L_level.", block): tensor for name, tensor in weights.items()}
    initial = renamed.pop("initial_latents")
    renamed |= dict(zip(_INITIAL[model.variant], initial.clone(), strict=True))
    prefix = "_orig_mod.model.inner." if compiled else "model.inner."
    return {f"{prefix}{name}": tensor.clone() for name, tensor in renamed.items()}


def write_reference_file(state: Mapping[str, Tensor], file: OutputFile) -> None:
    content = BytesIO()
    torch.save(dict(state), content)
    file.write(content.getvalue())


def read_state_dict(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a `.pt` file; raise `CheckpointError` for anything but plain tensors."""
    tensors = stored_tensors(file)
    try:
        with open_input(file) as opened, zipfile.ZipFile(opened) as archive:
            stored = sum(entry.file_size for entry in archive.infolist())
            if sum(math.prod(tensor.size) for tensor in tensors.values()) > stored:  # each is copied
                raise ValueError("its tensors are larger than the file")
            return {name: _read_tensor(archive, tensor) for name, tensor in tensors.items()}
    except OSError as error:
        raise CheckpointError(f"Cannot read {file}: {reason_of(error)}", hint_for(error)) from error
    except (zipfile.BadZipFile, LookupError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{file}: its contents are inconsistent ({error})") from error


def _read_tensor(archive: zipfile.ZipFile, stored: StoredTensor) -> Tensor:
    content = bytearray(archive.read(stored.entry))
    dtype = getattr(torch, stored.dtype)
    storage = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    if math.prod(stored.size) > storage.numel():  # a stride of 0 could turn a few bytes into gigabytes
        raise ValueError("a tensor is larger than its storage")
    return storage.as_strided(stored.size, stored.stride, stored.offset).clone()  # checks the bounds
