"""The formulas of `fused` for automatic differentiation: every result is a new tensor.

They take more memory and time than those written by hand, and serve on devices other than the CPU: writing
in place into parts of a tensor is where such devices were silently wrong (pytorch#118115).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """Return at least float32, for sums and logarithms; float64 stays, so that tests can avoid rounding."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def product(x: Tensor, weight: Tensor, dim: int) -> Tensor:
    """Multiply the columns of x (n, width) by a weight or, with `dim` 0, its rows."""
    return torch.mm(weight, x) if dim == 0 else torch.mm(x, weight.T)


def gated(x: Tensor, gate_up: Tensor, dim: int) -> Tensor:
    """Return the hidden units of SwiGLU."""
    gate, up = product(x, gate_up, dim).chunk(2, dim=dim)
    return F.silu(gate) * up


def add_and_normalize(x: Tensor, change: Tensor, dim: int, eps: float) -> Tensor:
    wide = widened(x + change)
    return (wide * _root_scale(wide, dim, eps)).to(x.dtype)


def normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = widened(x)
    return (wide * _root_scale(wide, -1, eps) * weight).to(x.dtype)


def _root_scale(wide: Tensor, dim: int, eps: float) -> Tensor:
    return torch.rsqrt(wide.square().mean(dim, keepdim=True) + eps)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + size / 2) of (..., L, size) by the angle of their position."""
    cos = cos.to(x.dtype)
    sin = sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotated_heads(heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Return query, key and value of (3, B, H, L, size), the first two rotated."""
    query, key, value = heads.unbind(0)
    return rotated(query, cos, sin), rotated(key, cos, sin), value


def grouped_heads(
    qkv: Tensor, angles: tuple[Tensor, Tensor], kv_heads: int, copies: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn (B, L, heads, size) into query, key and value, with each head of key and value `copies` times."""
    query, key, value = torch.split(qkv.transpose(1, 2), [qkv.shape[2] - 2 * kv_heads, kv_heads, kv_heads], 1)
    key = rotated(key, *angles).repeat_interleave(copies, dim=1)
    return rotated(query, *angles), key, value.repeat_interleave(copies, dim=1)
