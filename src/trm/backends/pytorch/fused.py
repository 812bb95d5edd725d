"""Parts of a layer with gradients written by hand: SwiGLU, norms, attention heads, rotary positions.

Automatic differentiation keeps every intermediate result of a layer until the backward pass. These functions
keep only the inputs of matrix products, recompute the cheap rest, and write results in place instead of
concatenating copies: about half the memory, and fewer passes over it. Under `torch.compile` the same
functions are traced and fused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """Return at least float32, for sums and logarithms; float64 stays, so that tests can avoid rounding."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# Changes hidden units in place by a symmetric matrix, so that gradients pass through the same function.
Pool = Callable[[Tensor], Tensor]


class _SwiGLU(torch.autograd.Function):
    """down(pool(silu(gate(x)) * up(x))) over the columns of x (n, width) or, with `dim` 0, over its rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, dim: int, pool: Pool) -> Tensor:
        inner = _product(x, gate_up, dim)
        ctx.dim = dim
        ctx.pool = pool
        ctx.save_for_backward(x, gate_up, down, inner)
        gate, up = inner.chunk(2, dim=dim)
        return _product(pool(F.silu(gate).mul_(up)), down, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_out,) = gradients
        x, gate_up, down, inner = ctx.saved_tensors
        dim = ctx.dim
        d_product = ctx.pool(_product(d_out, down.T, dim))
        gate, up = inner.chunk(2, dim=dim)
        silu = F.silu(gate)
        d_down = _weight_gradient(d_out, ctx.pool(silu * up), dim)
        d_inner = torch.empty_like(inner)
        d_gate, d_up = d_inner.chunk(2, dim=dim)
        torch.mul(d_product, silu, out=d_up)
        torch.ops.aten.silu_backward.grad_input(d_product.mul_(up), gate, grad_input=d_gate)
        d_gate_up = _weight_gradient(d_inner, x, dim)
        return _product(d_inner, gate_up.T, dim), d_gate_up, d_down, None, None


def _product(x: Tensor, weight: Tensor, dim: int) -> Tensor:
    return torch.mm(weight, x) if dim == 0 else torch.mm(x, weight.T)


def _weight_gradient(d_out: Tensor, x: Tensor, dim: int) -> Tensor:
    return torch.mm(d_out, x.T) if dim == 0 else torch.mm(d_out.T, x)


class _Linear(torch.autograd.Function):
    """A product with a weight of another precision, which is converted in both passes and not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_out,) = gradients
        x, weight = ctx.saved_tensors
        d_weight = torch.mm(d_out.flatten(0, -2).T, x.flatten(0, -2)).to(weight.dtype)
        return torch.matmul(d_out, weight.to(x.dtype)), d_weight


class _AddAndNormalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Tensor, dim: int, eps: float) -> Tensor:
        total = x + change
        wide = widened(total)
        squares = torch.linalg.vector_norm(wide, dim=dim, keepdim=True).square_()
        scale = squares.div_(x.shape[dim]).add_(eps).rsqrt_()
        y = (wide.mul_(scale) if wide is total else wide * scale).to(x.dtype)
        ctx.dim = dim
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_y,) = gradients
        y, scale = ctx.saved_tensors
        dim = ctx.dim
        wide_d = widened(d_y)
        wide_y = widened(y)
        along = (wide_d * wide_y).mean(dim, keepdim=True)
        d_total = torch.addcmul(wide_d, wide_y, along, value=-1).mul_(scale).to(y.dtype)
        return d_total, d_total, None, None


class _Heads(torch.autograd.Function):
    """Query, key and value in one new tensor, so that nothing keeps the product alive; query and key are
    rotated."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        source = qkv.permute(2, 1, 3, 0, 4)
        heads = torch.empty(source.shape, dtype=qkv.dtype, device=qkv.device)
        heads[2] = source[2]
        _rotate_into(heads[:2], source[:2], cos, sin)
        return heads

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_heads,) = gradients
        cos, sin = ctx.saved_tensors
        count, B, H, L, size = d_heads.shape
        d_qkv = torch.empty(L, B, count, H, size, dtype=d_heads.dtype, device=d_heads.device)
        target = d_qkv.permute(2, 1, 3, 0, 4)
        target[2] = d_heads[2]
        _rotate_into(target[:2], d_heads[:2], cos, -sin)
        return d_qkv, None, None


class _Normalize(torch.autograd.Function):
    """RMS norm over the last dimension with a scale per channel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = widened(x)
        squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        y: Tensor = (wide * scale).mul_(weight).to(x.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_y,) = gradients
        x, weight, scale = ctx.saved_tensors
        unit = widened(x) * scale
        wide_d = widened(d_y)
        d_weight = (wide_d * unit).flatten(0, -2).sum(0).to(weight.dtype)
        d_unit = wide_d * weight
        along = (d_unit * unit).mean(-1, keepdim=True)
        return torch.addcmul(d_unit, unit, along, value=-1).mul_(scale).to(x.dtype), d_weight, None


class _Rotate(torch.autograd.Function):
    """Rotary positions of (..., L, size)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        target = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _rotate_into(target, x, cos, sin)
        return target

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_y,) = gradients
        cos, sin = ctx.saved_tensors
        d_x = torch.empty(d_y.shape, dtype=d_y.dtype, device=d_y.device)
        _rotate_into(d_x, d_y, cos, -sin)
        return d_x, None, None


def _rotate_into(target: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the pairs (i, i + size / 2) by the angle of their position; cos and sin are (L, size / 2)."""
    cos = cos.to(x.dtype)
    sin = sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    to_first, to_second = target.chunk(2, dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin)


def _unpooled(hidden: Tensor) -> Tensor:
    return hidden


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor, dim: int, pool: Pool = _unpooled) -> Tensor:
    weights = gate_up.to(x.dtype), down.to(x.dtype)
    result: Tensor = _SwiGLU.apply(x, *weights, dim, pool)  # type: ignore[no-untyped-call]
    return result


def converting_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return `F.linear`; a weight of another precision is not kept in that of the activations."""
    if weight.dtype == x.dtype:
        return F.linear(x, weight)
    result: Tensor = _Linear.apply(x, weight)  # type: ignore[no-untyped-call]
    return result


def add_and_normalize(x: Tensor, change: Tensor, dim: int, eps: float) -> Tensor:
    result: Tensor = _AddAndNormalize.apply(x, change, dim, eps)  # type: ignore[no-untyped-call]
    return result


def normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    result: Tensor = _Normalize.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return result


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    result: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return result


def split_heads(qkv: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
    """Turn (L, B, 3, H, size) into (3, B, H, L, size), with query and key rotated if there are angles."""
    if angles is None:
        return qkv.permute(2, 1, 3, 0, 4)
    heads: Tensor = _Heads.apply(qkv, *angles)  # type: ignore[no-untyped-call]
    return heads
