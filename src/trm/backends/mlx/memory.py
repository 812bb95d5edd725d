"""Estimate how much memory a step takes, without allocating it.

PyTorch's estimate counts what autograd keeps; MLX cannot say that before it computes. So this is arithmetic
on the sizes of the arrays that the backward pass of each layer reads, and on what an update holds twice,
because arrays are replaced as a whole. `tests/trm/backends/test_mlx_memory.py` compares it with the peak that
MLX reports.
"""

from __future__ import annotations

import math

from macbook_optimization.memory_management import MemoryModel
from trm.backends.base import Program
from trm.backends.formulas import STATE_COPIES
from trm.backends.sizes import RECOMPUTE_EVERY, count_latents, count_positions, count_weights
from trm.config import AnyModelConfig, DecoderConfig, ModelConfig
from trm.plan import Execution
from trm.tasks.base import DataSpec

_BYTES = 4  # weights, moments and losses are float32
_LATENTS = 3  # before the step, of its micro-batches, and joined
_WORK = 1.3  # intermediate results of the backward pass, relative to what is kept; measured
_LOGITS = 6  # copies of an example's logits: probabilities, their logarithms and gradients


def state_bytes(program: Program) -> int:
    """Return the size of everything except the examples that are being computed."""
    model = program.model
    training = program.training
    weights = count_weights(model, program.data)
    weight = 2 if isinstance(model, DecoderConfig) and model.weights_dtype == "bfloat16" else _BYTES
    moment = 2 if training.moments_dtype == "bfloat16" else _BYTES
    replaced = (1 + training.ema) * weight + STATE_COPIES[training.optimizer] * moment
    gradients = 2 * _BYTES  # the sum, and those of a micro-batch
    rows = program.data.num_puzzle_identifiers * model.puzzle_emb_ndim
    fixed = (2 * replaced + gradients) * weights + 2 * rows * _BYTES
    if training.supervision == "deep":
        latents = count_latents(model, program.data) * _activation_bytes(model)
        fixed += _LATENTS * program.num_slots * latents
    return fixed


def estimate(program: Program, execution: Execution) -> MemoryModel:
    model = program.model
    positions = count_positions(model, program.data)
    layer = _kept_by_layer(model, program.data)
    inputs = positions * model.hidden_size * _activation_bytes(model)
    passes = model.block_passes_per_cycle
    every = RECOMPUTE_EVERY[execution.gradient_checkpointing]
    recomputed = math.ceil(model.num_layers / every) if every else 0
    kept = passes * ((model.num_layers - recomputed) * layer + recomputed * inputs)
    fixed = state_bytes(program)
    if every:  # one layer at a time is computed again, and the gradients of its weights wait to be added up
        kept += 2 * layer // every
        fixed += passes * recomputed * _layer_weights(model, program.data) * _BYTES
    logits = program.data.max_len * program.data.num_outputs * _BYTES * _LOGITS
    return MemoryModel(fixed, int(_WORK * kept + logits))


def _layer_weights(model: AnyModelConfig, data: DataSpec) -> int:
    """Return the weights of one layer."""
    one, two = (_with_layers(model, number) for number in (1, 2))
    return count_weights(two, data) - count_weights(one, data)


def _with_layers(model: AnyModelConfig, number: int) -> AnyModelConfig:
    names = ("num_layers",) if isinstance(model, DecoderConfig) else ("L_layers", "H_layers")
    return model.model_copy(update=dict.fromkeys(names, number))


def _kept_by_layer(model: AnyModelConfig, data: DataSpec) -> int:
    """Return the bytes that one pass of one example through a layer keeps for the backward pass."""
    L = count_positions(model, data)
    D = model.hidden_size
    normalized = 2 * L * D  # the sum, and the result
    if isinstance(model, DecoderConfig):
        inner = L * model.inner_size
        heads = L * (model.num_heads + 2 * model.kv_heads) * model.head_size
        mixing = 3 * heads + L * D + model.num_heads * L * L
    else:
        inner = L * model.inner_width(D)
        mixing = _kept_by_mixer(model, L)
    channels = 5 * inner + normalized  # both halves, the sigmoid, its product, and that with the other half
    return (mixing + normalized + channels) * _activation_bytes(model)


def _kept_by_mixer(model: ModelConfig, L: int) -> int:
    D = model.hidden_size
    if model.mixer == "mlp":
        return 5 * D * model.inner_width(L)
    if model.mixer == "neighbourhood":
        return (1 + model.neighbourhood_size**2) * L * D
    if model.mixer == "candidates":
        return L * model.inner_width(D)
    num_keys = L
    if model.attention_window is not None:
        num_keys = min(L, model.prefix_len + 1 + 3 * model.attention_window)
    return 7 * L * D + model.num_heads * L * num_keys  # heads, rotated and not; shares


def _activation_bytes(model: AnyModelConfig) -> int:
    return 2 if model.forward_dtype == "bfloat16" else _BYTES
