"""Arithmetic on a model's sizes that needs no backend: positions, weights, latents, FLOPs."""

from __future__ import annotations

import math

from macbook_optimization.errors import ConfigError
from macbook_optimization.training_config_adapter import Checkpointing
from trm.config import AnyModelConfig, DecoderConfig
from trm.tasks.base import DataSpec

# One of this many layers is computed again in the backward pass; 0 for none.
RECOMPUTE_EVERY: dict[Checkpointing, int] = {"none": 0, "alternate": 2, "all": 1}
LOGITS_AT_A_TIME = 2**24  # 64 MiB in float32


def count_positions(config: AnyModelConfig, data: DataSpec) -> int:
    """Return the positions of the latents: prefix and tokens, or every digit of every cell.

    Raises `ConfigError` where the mixer needs a grid that the dataset does not have.
    """
    if isinstance(config, DecoderConfig):
        return data.max_len
    layout = data.layout
    if config.mixer == "candidates":
        digits = 0 if layout is None or layout.box is None else layout.rows
        if not digits or min(data.vocab_size, data.num_outputs) < digits:
            raise ConfigError(
                "model.mixer=candidates is for Sudoku, which has boxes and as many digits as cells in a row; "
                f"this dataset has {data.max_len} positions and {data.num_outputs} possible answers for each",
                hint="Use model.mixer=attention.",
            )
        return data.max_len * digits
    count = config.prefix_len + data.max_len
    if config.mixer == "neighbourhood" and math.isqrt(count) ** 2 != count:
        raise ConfigError(
            f"model.mixer=neighbourhood is for square grids; {count} positions do not form one",
            hint="Use model.mixer=attention.",
        )
    return count


def count_weights(model: AnyModelConfig, data: DataSpec) -> int:
    """Return the number of trained weights, without the puzzle embeddings."""
    D = model.hidden_size
    if isinstance(model, DecoderConfig):
        tables = 1 if model.tie_embeddings else 2
        return model.num_layers * model.layer_weights + tables * data.vocab_size * D + D
    L = count_positions(model, data)
    mixing = {
        "attention": 4 * D * D,
        "mlp": 3 * L * model.inner_width(L),
        "neighbourhood": model.neighbourhood_size**2 * D,
        "candidates": 0,  # pooled inside the channel network
    }[model.mixer]
    layers = model.num_layers * (mixing + 3 * D * model.inner_width(D))
    candidates = model.mixer == "candidates"
    embedded = (3 if candidates else data.vocab_size) + (L if model.pos_encodings == "learned" else 0)
    halt_head = 2 * D + 2
    return layers + D * (embedded + (1 if candidates else data.num_outputs)) + halt_head


def count_latents(model: AnyModelConfig, data: DataSpec) -> int:
    """Return how many numbers the latents of one example have."""
    if isinstance(model, DecoderConfig):
        return 0
    return (2 if model.variant == "trm" else 1) * count_positions(model, data) * model.hidden_size


def flops_per_recursion(model: AnyModelConfig, data: DataSpec) -> int:
    """Return the FLOPs of the matrix products in one recursion of one example, without gradient.

    A decoder passes through its layers once; its output has a product with the whole vocabulary per position,
    and the causal half of the attention is counted.
    """
    D = model.hidden_size
    L = count_positions(model, data)
    if isinstance(model, DecoderConfig):
        layers = model.num_layers * (model.layer_weights + L * D)
        return 2 * L * (layers + data.vocab_size * D)
    num_keys = L
    if model.attention_window is not None:  # computed in blocks, see `windows.py`
        num_keys = min(L, model.prefix_len + 1 + 3 * model.attention_window)
    mixing = {
        "attention": 4 * D * D * L + 2 * L * num_keys * D,
        "mlp": 3 * L * model.inner_width(L) * D,
        "neighbourhood": model.neighbourhood_size**2 * L * D,
        "candidates": 0,
    }[model.mixer]
    channels = 3 * D * model.inner_width(D) * L
    return 2 * (mixing + channels) * model.num_layers * model.block_passes_per_cycle


def flops_per_sample(model: AnyModelConfig, data: DataSpec, cycles: int | None = None) -> int:
    """Return the FLOPs of the matrix products in one step of one example.

    A recursion with gradient counts three times: its backward pass multiplies by the weights and by the
    activations. Embedding, heads, normalisation and optimizer are left out.
    """
    recursions = (cycles or model.cycles_per_step) - 1 + 3
    return flops_per_recursion(model, data) * recursions
