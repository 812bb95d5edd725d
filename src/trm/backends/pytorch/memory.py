"""Estimate how much memory a step takes, without allocating it.

This serves when a measurement is impossible because not even one example fits. The model is built without
weights and passed through once without arithmetic, and what autograd would keep for the backward pass is
counted. Also here: what distinguishes a failed allocation from other errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from macbook_optimization.errors import AllocationFailed
from macbook_optimization.memory_management import MemoryModel
from trm.backends.base import Program
from trm.backends.pytorch.layers import RECOMPUTE_EVERY
from trm.backends.pytorch.model import TinyRecursiveModel
from trm.backends.pytorch.optim import OPTIMIZERS
from trm.plan import Execution

_BYTES = 4  # weights, moments and losses are float32
_TEMPORARY_COPIES = 3  # of the weights, during an update; measured
_WORK = 1.3  # gradients and intermediate results of the backward pass, relative to what is kept; measured


def state_bytes(program: Program) -> int:
    """Return the size of everything except the examples that are being computed."""
    training = program.training
    network = _shapes_only(program)
    weights = sum(parameter.numel() for parameter in network.parameters())
    copies = 2 + OPTIMIZERS[training.optimizer].state_copies + training.ema  # 2: weights and gradients
    rows = program.data.num_puzzle_identifiers * program.model.puzzle_emb_ndim
    fixed = ((copies + _TEMPORARY_COPIES) * weights + rows) * _BYTES
    if training.supervision == "deep":  # latents before and after the step
        fixed += 2 * program.num_slots * _size(network.start(1))
    return fixed


def estimate(program: Program, execution: Execution) -> MemoryModel:
    model = program.model
    network = _shapes_only(program)
    kept = _kept_for_backward(network)
    layers = model.block_passes_per_cycle * model.num_layers
    every = RECOMPUTE_EVERY[execution.gradient_checkpointing]
    if every:  # a recomputed layer keeps its input; while one is recomputed, it keeps what it needs
        recomputed = layers / model.num_layers * math.ceil(model.num_layers / every)
        inputs = recomputed * _size(network.start(1)[0])
        kept = kept * (1 - recomputed / layers) + inputs + kept / layers
    logits = program.data.max_len * program.data.num_outputs * _BYTES * 6
    return MemoryModel(state_bytes(program), int(_WORK * kept + logits))


def _shapes_only(program: Program) -> TinyRecursiveModel:
    return TinyRecursiveModel(program.model, program.data, seed=None)


def _kept_for_backward(network: TinyRecursiveModel) -> float:
    """Return the bytes for one example, with each storage counted once and weights not at all."""
    weights = {id(parameter.untyped_storage()) for parameter in network.parameters()}
    num_positions = network.num_positions
    stores: dict[int, tuple[object, int]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # On the CPU, attention keeps no L x L matrix; on the meta device it is decomposed and does.
        square = network.config.mixer == "attention" and tensor.shape[-2:] == (num_positions, num_positions)
        if id(storage) not in weights and not square:
            stores[storage._cdata] = (storage, storage.nbytes())
        return tensor

    inputs = torch.zeros(1, network.data.max_len, dtype=torch.long, device="meta")
    rows = torch.empty(1, network.config.puzzle_emb_ndim, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(inputs, rows if network.config.puzzle_emb_ndim else None, network.start(1), cycles=1)
    return float(sum(size for _, size in stores.values()))


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# torch has no exception for this; oneDNN and the C++ library have messages of their own.
_NO_MEMORY = ("allocate memory", "not enough memory", "out of memory", "bad_alloc", "create a primitive")


@contextmanager
def allocations(*, torn: bool) -> Iterator[None]:
    """Raise `AllocationFailed` for every kind of failed allocation; `torn` says that the weights may be
    half updated then."""
    failed = False
    try:
        yield
    except MemoryError:
        failed = True
    except RuntimeError as error:
        failed = any(words in str(error) for words in _NO_MEMORY)
        if not failed:
            raise
    if failed:  # raised here, where no traceback keeps the tensors alive
        raise AllocationFailed(torn=torn)
