"""Arithmetic on a model's sizes that needs no backend: positions, and operations per step."""

from __future__ import annotations

import math

from macbook_optimization.errors import ConfigError
from trm.config import ModelConfig
from trm.tasks.base import DataSpec


def count_positions(config: ModelConfig, data: DataSpec) -> int:
    """Return the positions of the latents: prefix and tokens, or every digit of every cell.

    Raises `ConfigError` where the mixer needs a grid that the dataset does not have.
    """
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


def flops_per_sample(model: ModelConfig, data: DataSpec, cycles: int | None = None) -> int:
    """Return the FLOPs of the matrix products in one step of one example.

    A recursion with gradient counts three times: its backward pass multiplies by the weights and by the
    activations. Embedding, heads, normalisation and optimizer are left out.
    """
    D = model.hidden_size
    L = count_positions(model, data)
    mixing = {
        "attention": 4 * D * D * L + 2 * L * L * D,
        "mlp": 3 * L * model.inner_width(L) * D,
        "neighbourhood": model.neighbourhood_size**2 * L * D,
        "candidates": 0,  # pooled inside the channel network
    }[model.mixer]
    channels = 3 * D * model.inner_width(D) * L
    recursions = (cycles or model.cycles_per_step) - 1 + 3
    return 2 * (mixing + channels) * model.num_layers * model.block_passes_per_cycle * recursions
