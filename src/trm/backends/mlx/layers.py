"""The layers: position mixers, the channel network, and the block that the recursion applies.

Functions of named weights, as MLX differentiates by arguments. Names and shapes are those of the PyTorch
backend, and so is the order in which initial weights are drawn: a seed is the same model.

Shapes: L positions (prefix included), B slots, D hidden size, H heads, S head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial, reduce
from operator import add
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from trm.arrays import IntArray
from trm.backends.draws import Draws
from trm.backends.mlx.windows import windowed_attention
from trm.config import ModelConfig
from trm.tasks.base import GridLayout

Weights: TypeAlias = Mapping[str, mx.array]
Angles: TypeAlias = tuple[mx.array, mx.array] | None  # cosines and sines of the rotary positions
Drawn: TypeAlias = dict[str, mx.array]


def linear(x: mx.array, weight: mx.array) -> mx.array:
    flat = x.reshape(-1, x.shape[-1]) @ weight.astype(x.dtype).T
    return flat.reshape(*x.shape[:-1], weight.shape[0])


def widened(x: mx.array) -> mx.array:
    """Return float32, for sums and logarithms."""
    return x.astype(mx.float32)


def with_rows(table: mx.array, rows: IntArray, values: mx.array) -> mx.array:
    """Return a copy of a table with other values in some of its rows."""
    changed = mx.array(table)
    changed[mx.array(rows.astype(np.int32))] = values.astype(table.dtype)
    return changed


def draw_projection(num_in: int, num_out: int, draws: Draws) -> mx.array:
    return mx.array(draws.truncated_normal(num_out, num_in, std=num_in**-0.5))


def draw_swiglu(name: str, width: int, config: ModelConfig, draws: Draws) -> Drawn:
    inner = config.inner_width(width)
    return {
        f"{name}.gate_up_proj.weight": draw_projection(width, 2 * inner, draws),
        f"{name}.down_proj.weight": draw_projection(inner, width, draws),
    }


Pool: TypeAlias = Callable[[mx.array], mx.array]


def gated(inner: mx.array, axis: int) -> mx.array:
    """Return silu(gate) * up of the two halves along the axis."""
    gate, up = mx.split(inner, 2, axis=axis)
    return gate * mx.sigmoid(gate) * up


def swiglu(weights: Weights, name: str, x: mx.array, pool: Pool | None = None) -> mx.array:
    hidden = gated(linear(x, weights[f"{name}.gate_up_proj.weight"]), -1)
    return linear(hidden if pool is None else pool(hidden), weights[f"{name}.down_proj.weight"])


def position_mlp(weights: Weights, name: str, x_LBD: mx.array) -> mx.array:
    """SwiGLU over all positions at once. Its weights fix the number of positions."""
    x = x_LBD.reshape(x_LBD.shape[0], -1)
    hidden = gated(weights[f"{name}.gate_up_proj.weight"].astype(x.dtype) @ x, 0)
    return (weights[f"{name}.down_proj.weight"].astype(x.dtype) @ hidden).reshape(x_LBD.shape)


def pool_groups(hidden_LBH: mx.array, box: tuple[int, int]) -> mx.array:
    """Sum hidden units over constraint groups of Sudoku candidates.

    A fifth of the units belong to a candidate alone. The others are summed over all candidates of its row, of
    its column, of its box (for the same digit) and of its cell (for all digits).
    """
    rows, columns = box
    size = rows * columns
    width = hidden_LBH.shape[-1]
    units = width // 5 // 8 * 8 or width // 5
    # Dimensions: box row, row in box, box column, column in box, digit, slot, unit.
    grid = hidden_LBH.reshape(columns, rows, rows, columns, size, -1, width)
    parts = mx.split(grid, [width - kinds * units for kinds in (4, 3, 2, 1)], axis=-1)
    summed_axes = ((2, 3), (0, 1), (1, 3), (4,))  # of a row, a column, a box, a cell
    pooled = [
        mx.broadcast_to(group.sum(axis=axes, keepdims=True) * size**-0.5, group.shape)
        for group, axes in zip(parts[1:], summed_axes, strict=True)
    ]
    return mx.concatenate([parts[0], *pooled], axis=-1).reshape(hidden_LBH.shape)


def rotated(x: mx.array, angles: Angles) -> mx.array:
    """Rotate the pairs (i, i + S / 2) of (..., L, S) by the angle of their position; no angles, no change."""
    if angles is None:
        return x
    cos, sin = (each.astype(x.dtype) for each in angles)
    first, second = mx.split(x, 2, axis=-1)
    return mx.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(
    weights: Weights, name: str, x_LBD: mx.array, config: ModelConfig, where: tuple[Angles, mx.array | None]
) -> mx.array:
    """`where` has the angles, and the positions (B, L) that may be attended to; None for all of them."""
    angles, mask_BL = where
    L, B, D = x_LBD.shape
    qkv = linear(x_LBD, weights[f"{name}.qkv_proj.weight"]).reshape(L, B, 3, config.num_heads, -1)
    query, key, value = qkv.transpose(2, 1, 3, 0, 4)  # each (B, H, L, S)
    heads = rotated(query, angles), rotated(key, angles), value
    if config.attention_window is not None:
        everywhere = mx.ones((B, L), dtype=mx.bool_) if mask_BL is None else mask_BL
        mixed = windowed_attention(heads, everywhere, config.attention_window, config.prefix_len + 1)
    else:
        keys = None if mask_BL is None else mask_BL[:, None, None, :]
        scale = query.shape[-1] ** -0.5
        mixed = mx.fast.scaled_dot_product_attention(*heads, scale=scale, mask=keys)
    return linear(mixed.transpose(2, 0, 1, 3).reshape(L, B, D), weights[f"{name}.o_proj.weight"])


def neighbourhood(weights: Weights, name: str, x_LBD: mx.array) -> mx.array:
    """Convolve each channel over a square grid, by adding shifted copies."""
    weight = weights[f"{name}.weight"].astype(x_LBD.dtype)
    L, B, D = x_LBD.shape
    side = math.isqrt(L)
    size = weight.shape[-1]
    edge = (size // 2, size // 2)
    padded = mx.pad(x_LBD.reshape(side, side, B, D), [edge, edge, (0, 0), (0, 0)])
    parts = [
        padded[row : row + side, column : column + side] * weight[:, 0, row, column]
        for row in range(size)
        for column in range(size)
    ]
    return reduce(add, parts).reshape(L, B, D)


def add_and_normalize(x: mx.array, change: mx.array, axis: int, eps: float) -> mx.array:
    """Add, and divide by the root mean square along the axis."""
    total = x + change
    if axis == -1:
        return mx.fast.rms_norm(total, None, eps)
    wide = widened(total)
    return (wide * mx.rsqrt(wide.square().mean(axis, keepdims=True) + eps)).astype(total.dtype)


Layer: TypeAlias = Callable[[Weights, mx.array], mx.array]


def computed_again(layer: Layer) -> Layer:
    """Return the layer with a backward pass that computes it again, one layer at a time.

    `mx.checkpoint` alone saves a third where this saves four fifths: MLX first computes what leads to the
    gradient of the input, and meanwhile keeps what the gradients of the weights need.
    """

    def backward(primals: tuple[Weights, mx.array], cotangent: mx.array, output: mx.array) -> Any:
        weights, x = primals
        (x,) = _after([x], [cotangent])  # not before it is their turn
        names = list(weights)

        def of_list(x: mx.array, *each: mx.array) -> mx.array:
            return layer(dict(zip(names, each, strict=True)), x)

        _, (d_x, *d_weights) = mx.vjp(of_list, [x, *weights.values()], [cotangent])
        (d_x,) = _after([d_x], d_weights)
        return dict(zip(names, d_weights, strict=True)), d_x

    again: Any = mx.custom_function(layer)
    again.vjp(backward)
    found: Layer = again
    return found


def _after(arrays: list[mx.array], others: list[mx.array]) -> list[mx.array]:
    """Return the arrays, to be computed after the others."""
    found: list[mx.array] = mx.depends(arrays, others)
    return found


class Block:
    """The layers that the recursion applies.

    Every `recompute_every`-th layer keeps only its input and is recomputed in the backward pass; 0: none.
    """

    def __init__(self, num_positions: int, config: ModelConfig, layout: GridLayout | None) -> None:
        self.num_positions = num_positions
        self.config = config
        self.layout = layout
        self.recompute_every = 0

    def draw(self, draws: Draws) -> Drawn:
        """Draw the initial weights."""
        drawn: Drawn = {}
        for number in range(self.config.num_layers):
            drawn |= self._draw_layer(f"layers.{number}", draws)
        return drawn

    def _draw_layer(self, layer: str, draws: Draws) -> Drawn:
        config = self.config
        D = config.hidden_size
        drawn: Drawn = {}
        if config.mixer == "attention":
            drawn[f"{layer}.self_attn.qkv_proj.weight"] = draw_projection(D, 3 * D, draws)
            drawn[f"{layer}.self_attn.o_proj.weight"] = draw_projection(D, D, draws)
        elif config.mixer == "mlp":
            drawn |= draw_swiglu(f"{layer}.mlp_t", self.num_positions, config, draws)
        elif config.mixer == "neighbourhood":
            size = config.neighbourhood_size
            drawn[f"{layer}.nearby.weight"] = mx.array(draws.truncated_normal(D, 1, size, size, std=1 / size))
        return drawn | draw_swiglu(f"{layer}.mlp", D, config, draws)

    def __call__(self, weights: Weights, x_LBD: mx.array, angles: Angles, mask: mx.array | None) -> mx.array:
        """`mask` (B, L) is true at positions that may be attended to; None for all of them."""
        for number in range(self.config.num_layers):
            prefix = f"layers.{number}."
            own = {
                name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)
            }
            layer = partial(self._layer, angles, mask)
            recomputed = self.recompute_every and number % self.recompute_every == 0
            x_LBD = (computed_again(layer) if recomputed else layer)(own, x_LBD)
        return x_LBD

    def _layer(self, angles: Angles, mask: mx.array | None, weights: Weights, x_LBD: mx.array) -> mx.array:
        """Mix positions, then channels; after each, add and normalise (over what was mixed, as published)."""
        config = self.config
        eps = config.rms_norm_eps
        if config.mixer == "attention":
            mixed = attention(weights, "self_attn", x_LBD, config, (angles, mask))
            x_LBD = add_and_normalize(x_LBD, mixed, -1, eps)
        elif config.mixer == "mlp":
            x_LBD = add_and_normalize(x_LBD, position_mlp(weights, "mlp_t", x_LBD), 0, eps)
        elif config.mixer == "neighbourhood":
            x_LBD = add_and_normalize(x_LBD, neighbourhood(weights, "nearby", x_LBD), -1, eps)
        return add_and_normalize(x_LBD, swiglu(weights, "mlp", x_LBD, self._pool), -1, eps)

    @property
    def _pool(self) -> Pool | None:
        """With candidates, the channel network pools over positions and there is no separate mixer."""
        if self.config.mixer != "candidates":
            return None
        assert self.layout is not None
        assert self.layout.box is not None
        box = self.layout.box
        return lambda hidden: pool_groups(hidden, box)
