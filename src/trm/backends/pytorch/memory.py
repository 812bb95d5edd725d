"""How much memory a step should take, worked out without taking it.

For when a measurement cannot be made, because not even one example fits. The model is built without weights,
passed through once without arithmetic, and what autograd would keep for the backward pass is counted. And
what tells a lack of memory from other errors, when it is taken after all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from macbook_optimization.errors import AllocationFailed
from macbook_optimization.memory_management import MemoryModel
from macbook_optimization.training_config_adapter import Checkpointing
from trm.backends.pytorch.model import RECOMPUTE_EVERY, TinyRecursiveModel
from trm.config import ModelConfig, TrainingConfig
from trm.tasks.base import TaskShape

_BYTES = 4  # weights, moments and losses are float32
_WORK = 1.3  # gradients and intermediate results of the backward pass, on top of what is kept; measured


def state_bytes(model: ModelConfig, training: TrainingConfig, shape: TaskShape) -> int:
    """Everything but the examples that are being computed."""
    network = TinyRecursiveModel(model, shape, seed=None)
    weights = sum(parameter.numel() for parameter in network.parameters())
    copies = 7 + training.ema  # weights, gradients, two moments, average; and about three on their way
    rows = shape.num_puzzle_identifiers * model.puzzle_emb_ndim
    fixed = (copies * weights + rows) * _BYTES
    if training.supervision == "deep":  # before and after the step
        fixed += 2 * training.effective_batch_size * _size(network.start(1))
    return fixed


def estimate_memory(
    model: ModelConfig,
    training: TrainingConfig,
    shape: TaskShape,
    gradient_checkpointing: Checkpointing = "none",
) -> MemoryModel:
    network = TinyRecursiveModel(model, shape, seed=None)
    kept, layers = _kept_for_backward(network), _layers_kept(model)
    every = RECOMPUTE_EVERY[gradient_checkpointing]
    if every:  # such a layer keeps its input; while it is computed again, one keeps what it needs
        recomputed = layers / model.num_layers * math.ceil(model.num_layers / every)
        inputs = recomputed * _size(network.start(1)[0])
        kept = kept * (1 - recomputed / layers) + inputs + kept / layers
    logits = shape.seq_len * shape.output_vocab_size * _BYTES * 6
    return MemoryModel(state_bytes(model, training, shape), int(_WORK * kept + logits))


def _layers_kept(model: ModelConfig) -> int:
    """Layers that one recursion with gradient passes through."""
    levels = 1 if model.variant == "transformer" else model.L_cycles + 1
    return levels * model.num_layers


def _kept_for_backward(network: TinyRecursiveModel) -> float:
    """Bytes for one example, each stored tensor counted once and weights not at all."""
    weights = {id(parameter.untyped_storage()) for parameter in network.parameters()}
    num_positions = network.num_positions
    stores: dict[int, tuple[object, int]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # On the CPU, attention keeps no L x L matrix; without a device, torch works it out the long way.
        square = network.config.attention and tensor.shape[-2:] == (num_positions, num_positions)
        if id(storage) not in weights and not square:
            stores[storage._cdata] = (storage, storage.nbytes())
        return tensor

    inputs = torch.zeros(1, network.shape.seq_len, dtype=torch.long, device="meta")
    rows = torch.empty(1, network.config.puzzle_emb_ndim, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(inputs, rows if network.config.puzzle_emb_ndim else None, network.start(1), cycles=1)
    return float(sum(size for _, size in stores.values()))


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# torch has no exception of its own for this; oneDNN and C++ have words of theirs.
_NO_MEMORY = ("allocate memory", "not enough memory", "out of memory", "bad_alloc", "create a primitive")


@contextmanager
def allocations(*, torn: bool) -> Iterator[None]:
    failed = False
    try:
        yield
    except MemoryError:
        failed = True
    except RuntimeError as error:
        failed = any(words in str(error) for words in _NO_MEMORY)
        if not failed:
            raise
    if failed:  # raised out here, where no traceback keeps the tensors alive
        raise AllocationFailed(torn=torn)
