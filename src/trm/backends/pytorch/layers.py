"""The layers: position mixers, the channel network, and the block that the recursion applies.

Parameter names are those of the reference implementation, so checkpoints differ by a prefix only. Tensors are
kept sequence first: an MLP over positions then multiplies along the first dimension, and the channel network
along the last, without a single transposition.

Shapes: L positions (prefix included), B slots, D hidden size, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trm.backends.draws import TRUNCATED_STD
from trm.backends.pytorch.fused import add_and_normalize, by_hand, split_heads, swiglu
from trm.backends.pytorch.windows import windowed_attention
from trm.config import ModelConfig
from trm.tasks.base import GridLayout

Generator: TypeAlias = torch.Generator | None  # None: shapes without content
Angles: TypeAlias = tuple[Tensor, Tensor] | None  # cosines and sines of the rotary positions

# Only oneDNN has a fast depthwise convolution, and PyTorch for Apple Silicon is built without it.
_ONEDNN = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def truncated_normal(*shape: int, std: float, generator: Generator) -> Tensor:
    """Draw from a normal truncated at two of its standard deviations, scaled to have `std` afterwards.

    Without a generator the result has a shape and no content: a model of such tensors takes no memory.
    """
    if generator is None:
        return torch.empty(*shape, device="meta")
    bound = math.erf(math.sqrt(2))
    uniform = torch.rand(*shape, generator=generator) * (2 * bound) - bound
    normal = torch.erfinv(uniform) * math.sqrt(2)
    return normal.clamp(-2, 2) * (std / TRUNCATED_STD)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


class Projection(nn.Module):
    """A matrix under the name that the reference implementation gives it."""

    def __init__(self, num_in: int, num_out: int, generator: Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(truncated_normal(num_out, num_in, std=num_in**-0.5, generator=generator))


class SwiGLU(nn.Module):
    def __init__(self, width: int, config: ModelConfig, generator: Generator) -> None:
        super().__init__()
        inner = config.inner_width(width)
        self.gate_up_proj = Projection(width, 2 * inner, generator)
        self.down_proj = Projection(inner, width, generator)

    def forward(self, x_LBD: Tensor) -> Tensor:
        x = x_LBD.reshape(-1, x_LBD.shape[-1])
        return swiglu(x, self.gate_up_proj.weight, self.down_proj.weight, dim=1).view_as(x_LBD)


class GroupPoolingMLP(SwiGLU):
    """SwiGLU over Sudoku candidates whose hidden units are sum-pooled over constraint groups.

    A fifth of the units belong to a candidate alone. The others are summed over all candidates of its row, of
    its column, of its box (for the same digit) and of its cell (for all digits). Nothing depends on where a
    group is or which digit it is about.
    """

    def __init__(self, layout: GridLayout, config: ModelConfig, generator: Generator) -> None:
        super().__init__(config.hidden_size, config, generator)
        assert layout.box is not None
        self.box = layout.box
        inner = config.inner_width(config.hidden_size)
        self.units = inner // 5 // 8 * 8 or inner // 5  # per kind of group, aligned

    def forward(self, x_LBD: Tensor) -> Tensor:
        x = x_LBD.reshape(-1, x_LBD.shape[-1])
        return swiglu(x, self.gate_up_proj.weight, self.down_proj.weight, 1, self.pool).view_as(x_LBD)

    def pool(self, hidden: Tensor) -> Tensor:
        rows, columns = self.box
        size = rows * columns
        # Dimensions: box row, row in box, box column, column in box, digit, slot, unit.
        grid = hidden.view(columns, rows, rows, columns, size, -1, hidden.shape[-1])
        summed_dims = ((2, 3), (0, 1), (1, 3), (4,))  # of a row, a column, a box, a cell
        first = hidden.shape[-1] - 4 * self.units
        parts = [grid[..., :first]]
        for kind, dims in enumerate(summed_dims):
            start = first + kind * self.units
            group = grid[..., start : start + self.units]
            pooled = group.sum(dims, keepdim=True).mul_(size**-0.5).expand_as(group)
            if by_hand(hidden):
                group.copy_(pooled)
            else:
                parts.append(pooled)
        return hidden if by_hand(hidden) else torch.cat(parts, dim=-1).view_as(hidden)


class PositionMLP(SwiGLU):
    """SwiGLU over all positions at once. Its weights fix the number of positions."""

    norm_dim = 0  # normalised over what was mixed, as published

    def forward(self, x_LBD: Tensor, angles: Angles = None, mask: Tensor | None = None) -> Tensor:
        x = x_LBD.reshape(x_LBD.shape[0], -1)
        return swiglu(x, self.gate_up_proj.weight, self.down_proj.weight, dim=0).view_as(x_LBD)


class Attention(nn.Module):
    norm_dim = -1

    def __init__(self, config: ModelConfig, generator: Generator) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.window = config.attention_window
        self.num_global = config.prefix_len + 1
        self.qkv_proj = Projection(config.hidden_size, 3 * config.hidden_size, generator)
        self.o_proj = Projection(config.hidden_size, config.hidden_size, generator)

    def forward(self, x_LBD: Tensor, angles: Angles, mask: Tensor | None = None) -> Tensor:
        """`mask` (B, L) is true at positions that may be attended to; None for all of them."""
        L, B, D = x_LBD.shape
        qkv = linear(x_LBD, self.qkv_proj.weight).view(L, B, 3, self.num_heads, D // self.num_heads)
        query, key, value = split_heads(qkv, angles)  # each (B, H, L, head size)
        if self.window is not None:
            everywhere = x_LBD.new_ones(B, L, dtype=torch.bool) if mask is None else mask
            mixed = windowed_attention((query, key, value), everywhere, self.window, self.num_global)
        else:
            keys = None if mask is None else mask[:, None, None, :]
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=keys)
        return linear(mixed.permute(2, 0, 1, 3).reshape(L, B, D), self.o_proj.weight)


class Neighbourhood(nn.Module):
    """A depthwise convolution over a square grid: each channel has weights of its own."""

    norm_dim = -1

    def __init__(self, config: ModelConfig, generator: Generator) -> None:
        super().__init__()
        size = config.neighbourhood_size
        self.weight = nn.Parameter(
            truncated_normal(config.hidden_size, 1, size, size, std=1 / size, generator=generator)
        )

    def forward(self, x_LBD: Tensor, angles: Angles = None, mask: Tensor | None = None) -> Tensor:
        fast = _ONEDNN and x_LBD.dtype == torch.float32 and x_LBD.device.type == "cpu"
        convolve = by_convolution if fast else by_shifts
        return convolve(x_LBD, self.weight.to(x_LBD.dtype))


def by_convolution(x_LBD: Tensor, weight: Tensor) -> Tensor:
    """Convolve one picture with B x D channels, in which slots and channels lie side by side as they are."""
    L, B, D = x_LBD.shape
    side = math.isqrt(L)
    picture = x_LBD.reshape(1, side, side, B * D).permute(0, 3, 1, 2)
    mixed = F.conv2d(picture, weight.repeat(B, 1, 1, 1), padding=weight.shape[-1] // 2, groups=B * D)
    return mixed.permute(0, 2, 3, 1).reshape(L, B, D)


def by_shifts(x_LBD: Tensor, weight: Tensor) -> Tensor:
    """Convolve by adding shifted copies, where there is no fast depthwise convolution."""
    L, B, D = x_LBD.shape
    side = math.isqrt(L)
    size = weight.shape[-1]
    edge = size // 2
    padded = F.pad(x_LBD.reshape(side, side, B, D), (0, 0, 0, 0, edge, edge, edge, edge))
    parts = (
        padded[row : row + side, column : column + side] * weight[:, 0, row, column]
        for row in range(size)
        for column in range(size)
    )
    return reduce(torch.add, parts).reshape(L, B, D)


PositionMixer: TypeAlias = Attention | PositionMLP | Neighbourhood
_MIXER_NAMES = {"attention": "self_attn", "mlp": "mlp_t", "neighbourhood": "nearby", "candidates": None}


def _position_mixer(num_positions: int, config: ModelConfig, generator: Generator) -> PositionMixer:
    if config.mixer == "attention":
        return Attention(config, generator)
    if config.mixer == "mlp":
        return PositionMLP(num_positions, config, generator)
    return Neighbourhood(config, generator)


class Layer(nn.Module):
    """Mix positions, then channels; after each, add and normalise (over what was mixed, as published).

    With candidates, the channel network pools over positions and there is no separate mixer.
    """

    def __init__(
        self, num_positions: int, config: ModelConfig, layout: GridLayout | None, generator: Generator
    ) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.mixer_name = _MIXER_NAMES[config.mixer]
        if self.mixer_name is not None:
            self.add_module(self.mixer_name, _position_mixer(num_positions, config, generator))
        if config.mixer == "candidates":
            assert layout is not None
            self.mlp: SwiGLU = GroupPoolingMLP(layout, config, generator)
        else:
            self.mlp = SwiGLU(config.hidden_size, config, generator)

    def forward(self, x_LBD: Tensor, angles: Angles, mask: Tensor | None = None) -> Tensor:
        if self.mixer_name is not None:
            mixer = getattr(self, self.mixer_name)
            x_LBD = add_and_normalize(x_LBD, mixer(x_LBD, angles, mask), mixer.norm_dim, self.eps)
        return add_and_normalize(x_LBD, self.mlp(x_LBD), -1, self.eps)


class Block(nn.Module):
    """The layers that the recursion applies.

    Of `recompute_every` layers, one keeps only its input and is computed again in the backward pass; 0 keeps
    everything. The gradient is the same to the last bit. `compiled` replaces the layers for full rows,
    `compiled_size` slots and `compiled_threads` threads; any other shape would be compiled anew.
    """

    recompute_every = 0
    compiled: Callable[[Tensor, Angles], Tensor] | None = None
    compiled_size: int | None = None
    compiled_threads: int | None = None

    def __init__(
        self, num_positions: int, config: ModelConfig, layout: GridLayout | None, generator: Generator
    ) -> None:
        super().__init__()
        self.num_positions = num_positions
        self.layers = nn.ModuleList(
            Layer(num_positions, config, layout, generator) for _ in range(config.num_layers)
        )

    def forward(self, x_LBD: Tensor, angles: Angles, mask: Tensor | None = None) -> Tensor:
        if self.compiled is not None and mask is None:
            now = (*x_LBD.shape[:2], torch.get_num_threads())
            if now == (self.num_positions, self.compiled_size, self.compiled_threads):
                return self.compiled(x_LBD, angles)
        return self.through_layers(x_LBD, angles, mask)

    def through_layers(self, x_LBD: Tensor, angles: Angles, mask: Tensor | None = None) -> Tensor:
        for index, layer in enumerate(self.layers):
            if self.recompute_every and torch.is_grad_enabled() and index % self.recompute_every == 0:
                x_LBD = checkpoint(layer, x_LBD, angles, mask, use_reentrant=False, preserve_rng_state=False)
            else:
                x_LBD = layer(x_LBD, angles, mask)
        return x_LBD
