"""Weights from elsewhere: of the public TRM code, or of another run.

The public code's names are the same but for a prefix, and the two initial latents that we keep as one tensor.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from macbook_optimization.checkpoint_files import find_damage, open_checkpoint
from macbook_optimization.errors import CheckpointError
from trm.backends.pytorch.model import check_shapes, load_weights
from trm.backends.pytorch.step import learner
from trm.backends.state_dict_files import StoredTensor, stored_tensors
from trm.batches import Slots
from trm.config import ModelConfig, RunConfig
from trm.runs import Run, SavedState, begin, check_compatible, open_run
from trm.tasks import load_task
from trm.tasks.base import TaskShape, open_split

_PREFIXES = ("_orig_mod.", "model.", "inner.")  # compiled model, loss head, halting wrapper
_INITIAL = {"trm": ("H_init", "L_init"), "singlez": ("L_init",), "transformer": ("H_init",)}
_HEAD = ("lm_head.", "q_head.")  # what a new head replaces
_TOKENS = ("embed_tokens.", "puzzle_emb.")  # and what depends on the task: replaced where it does not fit


def import_weights(source: Path, config: RunConfig, path: Path, *, new_head: bool = False) -> list[str]:
    """A run at step 0 that answers, and goes on training, with the weights of SOURCE, a file of the public
    code or a run. Returns the names of those that are new."""
    if (path / "recipe.yaml").exists():
        raise CheckpointError(f"{path} already holds a run", hint="Choose a new --run directory.")
    weights = _weights_of_run(source) if source.is_dir() else from_reference_file(source, config.model)
    made = learner(config.model, config.training, _shape(config), config.seed)
    run = open_run(path, config)
    complete = _with_new_head(weights, made.model.state_dict()) if new_head else weights
    for model in (made.model, made.averaged):
        load_weights(model, complete)
    state = SavedState(
        recipe=config.what_is_learned(),
        shape=asdict(made.model.shape),
        data=None,  # nothing here has been learned from a dataset that we know
        slots=Slots.new(config.training.effective_batch_size).to_lists(),
    )
    begin(run, config)
    run.checkpoints().save(0, made.tensors(), state.model_dump(mode="json"))
    run.event("imported", file=str(source))
    return sorted(name for name in complete if complete[name] is not weights.get(name))


def _weights_of_run(path: Path) -> dict[str, Tensor]:
    """The best ones of a run, or those of one checkpoint in it."""
    if (path / "manifest.json").is_file():
        run = Run(path.resolve().parents[1])
        if (problem := find_damage(path)) is not None:
            raise CheckpointError(f"{path}: {problem}", hint="`trm checkpoint verify` tells which are good.")
        checkpoint = open_checkpoint(path)
    else:
        run = Run(path)
        checkpoint = run.checkpoints().best_or_newest()
    check_compatible(checkpoint, run.config)
    return checkpoint.load("ema" if run.config.training.ema else "weights")


def _with_new_head(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whatever else does not fit is an error of `load_weights`."""

    def taken(name: str, tensor: Tensor) -> Tensor:
        replaced = name.startswith(_HEAD)
        unfit = name not in theirs or theirs[name].shape != tensor.shape
        return tensor if replaced or (unfit and name.startswith(_TOKENS)) else theirs.get(name, tensor)

    check_shapes(_trunk(ours), _trunk(theirs), "The weights below the head do")
    return {name: taken(name, tensor) for name, tensor in ours.items()}


def _trunk(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith((*_HEAD, *_TOKENS))}


def export_reference(path: Path, file: Path, *, averaged: bool = True, compiled: bool = True) -> int:
    """The public code compiles its model unless told not to, and then loads compiled names only."""
    run = Run(path)
    config = run.config
    for key in ("neighbourhood", "candidates"):
        if getattr(config.model, key):
            raise CheckpointError(f"The public code has no layers like those of a model with `{key}`")
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


def from_reference_file(file: Path, model: ModelConfig) -> dict[str, Tensor]:
    return from_reference(read_state_dict(file), model)


def read_state_dict(file: Path) -> dict[str, Tensor]:
    """The tensors of a `.pt` file; raises `CheckpointError` at anything but plain tensors."""
    tensors = stored_tensors(file)
    try:
        with zipfile.ZipFile(file) as archive:
            stored = sum(entry.file_size for entry in archive.infolist())
            if sum(math.prod(tensor.size) for tensor in tensors.values()) > stored:  # each takes a copy
                raise ValueError("its tensors are larger than the file")
            return {name: _read_tensor(archive, tensor) for name, tensor in tensors.items()}
    except (zipfile.BadZipFile, LookupError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{file}: its contents do not fit together ({error})") from error


def _read_tensor(archive: zipfile.ZipFile, stored: StoredTensor) -> Tensor:
    content, dtype = bytearray(archive.read(stored.entry)), getattr(torch, stored.dtype)
    storage = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    if math.prod(stored.size) > storage.numel():  # a stride of 0 could make gigabytes of a few bytes
        raise ValueError("a tensor is larger than its storage")
    return storage.as_strided(stored.size, stored.stride, stored.offset).clone()  # checks that it lies inside
