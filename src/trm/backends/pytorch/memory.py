"""Estimate how much memory a step takes, without allocating it.

This serves when a measurement is impossible because not even one example fits. The model is built without
weights and passed through once without arithmetic, and what autograd would keep for the backward pass is
counted.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from macbook_optimization.memory_management import MemoryModel
from trm.backends.base import Program
from trm.backends.formulas import STATE_COPIES
from trm.backends.pytorch.decoder import Decoder
from trm.backends.pytorch.model import TinyRecursiveModel
from trm.backends.pytorch.models import new_model
from trm.backends.sizes import (
    LOGITS_AT_A_TIME,
    RECOMPUTE_EVERY,
    count_latents,
    count_positions,
    count_weights,
)
from trm.config import AnyModelConfig, DecoderConfig
from trm.plan import Execution
from trm.tasks.base import DataSpec

_BYTES = 4  # weights, moments and losses are float32
_TEMPORARY_COPIES = 3  # of the weights, during an update; measured
_WORK = 1.3  # gradients and intermediate results of the backward pass, relative to what is kept; measured


def state_bytes(program: Program) -> int:
    """Return the size of everything except the examples that are being computed."""
    model = program.model
    training = program.training
    weights = count_weights(model, program.data)
    rows = program.data.num_puzzle_identifiers * model.puzzle_emb_ndim
    fixed = int(_bytes_per_weight(program) * weights) + rows * _BYTES
    if isinstance(model, DecoderConfig):
        fixed += _largest_update(model, program.data)
    if training.supervision == "deep":  # latents before and after the step
        fixed += 2 * program.num_slots * count_latents(model, program.data) * _activation_bytes(model)
    return fixed


def _bytes_per_weight(program: Program) -> float:
    """Return what is kept per weight: itself, its average, gradient and moments, and copies in an update.

    A decoder is updated one tensor at a time (`_largest_update`). Its gradients are kept twice, as those of a
    micro-batch are added to the sum, unless they leave the parameters one by one (`gradients.py`).
    """
    training = program.training
    moment = 2 if training.moments_dtype == "bfloat16" else _BYTES
    moments = STATE_COPIES[training.optimizer] * moment
    if isinstance(program.model, DecoderConfig):
        in_bfloat16 = program.model.weights_dtype == "bfloat16"
        weight = 2 if in_bfloat16 else _BYTES
        return (1 + training.ema) * weight + moments + (1 if in_bfloat16 else 2) * _BYTES
    return (2 + training.ema + _TEMPORARY_COPIES) * _BYTES + moments


def _largest_update(model: DecoderConfig, data: DataSpec) -> int:
    """Return what the update of the largest matrix takes: copies of it and of its gradient in float32."""
    rows = max(data.vocab_size, 2 * model.inner_size)
    return (1 + _TEMPORARY_COPIES) * rows * model.hidden_size * _BYTES


def estimate(program: Program, execution: Execution) -> MemoryModel:
    model = program.model
    kept = _kept_for_backward(program)
    layers = model.block_passes_per_cycle * model.num_layers
    every = RECOMPUTE_EVERY[execution.gradient_checkpointing]
    if every:  # a recomputed layer keeps its input; while one is recomputed, it keeps what it needs
        recomputed = layers / model.num_layers * math.ceil(model.num_layers / every)
        inputs = (
            recomputed * count_positions(model, program.data) * model.hidden_size * _activation_bytes(model)
        )
        kept = kept * (1 - recomputed / layers) + inputs + kept / layers
    logits = program.data.max_len * program.data.num_outputs * _BYTES * 6
    if isinstance(model, DecoderConfig):  # which computes a few of them at a time
        logits = min(logits, LOGITS_AT_A_TIME * _BYTES * 6)
    fixed = state_bytes(program)
    if execution.optimizer_in_backward and isinstance(model, DecoderConfig):  # no gradient is kept
        kept_twice = model.weights_dtype == "float32"
        fixed -= (1 + kept_twice) * _BYTES * count_weights(model, program.data)
    return MemoryModel(fixed, int(_WORK * kept + logits))


def _activation_bytes(model: AnyModelConfig) -> int:
    return 2 if model.forward_dtype == "bfloat16" else _BYTES


def _kept_for_backward(program: Program) -> float:
    """Return the bytes for one example.

    They are linear in the passes through the block and in the layers of each, so three small networks give
    the numbers of one with any number of layers and cycles.
    """

    model = program.model

    def at(layers: int, cycles: int) -> float:
        sizes = {"L_layers": layers, "H_layers": layers, "L_cycles": cycles}
        if isinstance(model, DecoderConfig):
            sizes = {"num_layers": layers}
        few = replace(program.data, num_puzzle_identifiers=1)
        smaller = replace(program, model=model.model_copy(update=sizes), data=few)
        return _kept_by(new_model(smaller, seed=None))

    smallest = at(1, 1)
    passes = model.block_passes_per_cycle
    fewest = min(passes, 2)  # the transformer variant and a decoder have one
    per_layer = (at(2, 1) - smallest) / fewest
    if passes == 1:
        return smallest + per_layer * (model.num_layers - 1)
    per_pass = at(1, 2) - smallest - per_layer
    return smallest + per_layer * (passes * model.num_layers - fewest) + per_pass * (passes - fewest)


def _kept_by(network: TinyRecursiveModel | Decoder) -> float:
    """Return what autograd keeps, with each storage counted once and weights not at all."""
    weights = {id(parameter.untyped_storage()) for parameter in network.parameters()}
    num_positions = count_positions(network.config, network.data)
    is_attention = getattr(network.config, "mixer", "attention") == "attention"
    stores: dict[int, tuple[object, int]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # On the CPU, attention keeps no L x L matrix; on the meta device it is decomposed and does.
        square = is_attention and tensor.shape[-2:] == (num_positions, num_positions)
        if id(storage) not in weights and not square:
            stores[storage._cdata] = (storage, storage.nbytes())
        return tensor

    inputs = torch.zeros(1, network.data.max_len, dtype=torch.long, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if isinstance(network, Decoder):
            network(inputs)
        else:
            width = network.config.puzzle_emb_ndim
            rows = torch.empty(1, width, device="meta") if width else None
            network(inputs, rows, network.start(1), cycles=1)
    return float(sum(size for _, size in stores.values()))
