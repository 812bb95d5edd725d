"""How many operations a step takes: arithmetic on the model's sizes, without a backend."""

from __future__ import annotations

from trm.config import ModelConfig
from trm.tasks.base import DataSpec


def flops_per_sample(model: ModelConfig, data: DataSpec, cycles: int | None = None) -> int:
    """Return the FLOPs of the matrix products in one step of one example.

    A recursion with gradient counts three times: its backward pass multiplies by the weights and by the
    activations. Embedding, heads, normalisation and optimizer are left out.
    """
    D = model.hidden_size
    L = model.prefix_len + data.max_len
    if model.mixer == "candidates":
        L = data.max_len * round(data.max_len**0.5)
    mixing = {
        "attention": 4 * D * D * L + 2 * L * L * D,
        "mlp": 3 * L * model.inner_width(L) * D,
        "neighbourhood": model.neighbourhood_size**2 * L * D,
        "candidates": 0,  # pooled inside the channel network
    }[model.mixer]
    channels = 3 * D * model.inner_width(D) * L
    recursions = (cycles or model.cycles_per_step) - 1 + 3
    return 2 * (mixing + channels) * model.num_layers * model.block_passes_per_cycle * recursions
