"""Parts of a layer with gradients written by hand: SwiGLU, norms, attention heads, rotary positions.

Automatic differentiation keeps every intermediate result of a layer until the backward pass. These functions
keep only the inputs of matrix products, recompute the cheap rest, and write results in place instead of
concatenating copies: about half the memory, and fewer passes over it. Under `torch.compile` the same
functions are traced and fused. Devices other than the CPU use the formulas of `plain`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trm.backends.pytorch import plain
from trm.backends.pytorch.plain import product, widened

# Types of devices on which gradients are those written by hand; memory is estimated with "meta".
WRITTEN_BY_HAND = frozenset({"cpu", "meta"})


def by_hand(x: Tensor) -> bool:
    return x.device.type in WRITTEN_BY_HAND


# Changes hidden units by a symmetric matrix, so that gradients pass through the same function; in place where
# gradients are written by hand.
Pool = Callable[[Tensor], Tensor]


class _SwiGLU(torch.autograd.Function):
    """down(pool(silu(gate(x)) * up(x))) over the columns of x (n, width) or, with `dim` 0, over its rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, dim: int, pool: Pool) -> Tensor:
        inner = product(x, gate_up, dim)
        ctx.dim = dim
        ctx.pool = pool
        ctx.save_for_backward(x, gate_up, down, inner)
        gate, up = inner.chunk(2, dim=dim)
        return product(pool(F.silu(gate).mul_(up)), down, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_out,) = gradients
        x, gate_up, down, inner = ctx.saved_tensors
        dim = ctx.dim
        d_product = ctx.pool(product(d_out, down.T, dim))
        gate, up = inner.chunk(2, dim=dim)
        silu = F.silu(gate)
        hidden = silu * up
        d_down = _weight_gradient(d_out, ctx.pool(hidden), dim)
        # Nothing reads `inner` after this, so its gradient takes its place: writing to memory that is not in
        # the cache would take as long as all other elementwise operations here.
        torch.mul(d_product, up, out=hidden)
        torch.mul(d_product, silu, out=up)
        torch.ops.aten.silu_backward.grad_input(hidden, gate, grad_input=gate)
        d_gate_up = _weight_gradient(inner, x, dim)
        return product(inner, gate_up.T, dim), d_gate_up, d_down, None, None


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
        """With s the scale, w the weight and n channels: d_x = s w d_y - x s^3 sum(w d_y x) / n."""
        (d_y,) = gradients
        x, weight, scale = ctx.saved_tensors
        wide_x = widened(x)
        wide_d = widened(d_y)
        wide_weight = widened(weight)
        products = (wide_d * wide_x).flatten(0, -2)
        d_weight = torch.mv(products.T, scale.flatten()).to(weight.dtype)
        along = torch.mv(products, wide_weight).view_as(scale).div_(x.shape[-1])
        along.mul_(scale).mul_(scale).mul_(scale)  # one by one: the cube could underflow
        d_x = (wide_d * wide_weight).mul_(scale).addcmul_(wide_x, along, value=-1)
        return d_x.to(x.dtype), d_weight, None


class _GroupedHeads(torch.autograd.Function):
    """Query, key and value in new tensors, so that nothing keeps the product alive: query and key rotated,
    each head of key and value `copies` times.

    Each is (B, heads, L, size), and lies in memory by position, as the product and the gradients do.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, copies: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.kv_heads = kv_heads
        source, value = torch.split(qkv, [qkv.shape[2] - kv_heads, kv_heads], dim=2)
        rotated = torch.empty_like(source, memory_format=torch.contiguous_format)
        _rotate_into(rotated, source, cos[:, None], sin[:, None])
        query, key = torch.split(rotated, [source.shape[2] - kv_heads, kv_heads], dim=2)
        if copies > 1:
            key, value = (each.repeat_interleave(copies, dim=2) for each in (key, value))
        else:
            value = value.clone(memory_format=torch.contiguous_format)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        d_query, d_key, d_value = (each.transpose(1, 2) for each in gradients)
        B, L, heads, size = d_query.shape
        kv_heads = ctx.kv_heads
        d_qkv = torch.empty(B, L, heads + 2 * kv_heads, size, dtype=d_query.dtype, device=d_query.device)
        to_query, to_key, to_value = torch.split(d_qkv, [heads, kv_heads, kv_heads], dim=2)
        _rotate_into(to_query, d_query, cos[:, None], -sin[:, None])
        _rotate_into(to_key, _sum_of_copies(d_key, kv_heads), cos[:, None], -sin[:, None])
        to_value.copy_(_sum_of_copies(d_value, kv_heads))
        return d_qkv, None, None, None, None


def _sum_of_copies(gradient: Tensor, kv_heads: int) -> Tensor:
    """Sum over the copies of each head of (B, L, heads, size)."""
    B, L, heads, size = gradient.shape
    copies = gradient.reshape(B, L, kv_heads, heads // kv_heads, size).unbind(3)
    return reduce(torch.add, copies)


def _rotate_into(target: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the pairs (i, i + size / 2) by the angle of their position; cos and sin are (L, size / 2)."""
    cos = cos.to(x.dtype)
    sin = sin.to(x.dtype)
    torch.mul(x, torch.cat((cos, cos), dim=-1), out=target)
    first, second = x.chunk(2, dim=-1)
    to_first, to_second = target.chunk(2, dim=-1)
    to_first.addcmul_(second, sin, value=-1)
    to_second.addcmul_(first, sin)


def _unpooled(hidden: Tensor) -> Tensor:
    return hidden


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor, dim: int, pool: Pool = _unpooled) -> Tensor:
    weights = gate_up.to(x.dtype), down.to(x.dtype)
    if not by_hand(x):
        return product(pool(plain.gated(x, weights[0], dim)), weights[1], dim)
    result: Tensor = _SwiGLU.apply(x, *weights, dim, pool)  # type: ignore[no-untyped-call]
    return result


def converting_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return `F.linear`; a weight of another precision is not kept in that of the activations."""
    if weight.dtype == x.dtype or not by_hand(x):
        return F.linear(x, weight.to(x.dtype))
    result: Tensor = _Linear.apply(x, weight)  # type: ignore[no-untyped-call]
    return result


def add_and_normalize(x: Tensor, change: Tensor, dim: int, eps: float) -> Tensor:
    if not by_hand(x):
        return plain.add_and_normalize(x, change, dim, eps)
    result: Tensor = _AddAndNormalize.apply(x, change, dim, eps)  # type: ignore[no-untyped-call]
    return result


def normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not by_hand(x):
        return plain.normalized(x, weight, eps)
    result: Tensor = _Normalize.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return result


def grouped_heads(
    qkv: Tensor, angles: tuple[Tensor, Tensor], kv_heads: int, copies: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn (B, L, heads, size) into query, key and value, each (B, heads, L, size)."""
    if not by_hand(qkv):
        return plain.grouped_heads(qkv, angles, kv_heads, copies)
    heads: tuple[Tensor, Tensor, Tensor] = _GroupedHeads.apply(  # type: ignore[no-untyped-call]
        qkv, *angles, kv_heads, copies
    )
    return heads


def split_heads(qkv: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
    """Turn (L, B, 3, H, size) into query, key and value, each (B, H, L, size); the first two are rotated if
    there are angles."""
    if angles is None:
        return qkv.permute(2, 1, 3, 0, 4).unbind(0)
    if not by_hand(qkv):
        return plain.rotated_heads(qkv.permute(2, 1, 3, 0, 4), *angles)
    heads: Tensor = _Heads.apply(qkv, *angles)  # type: ignore[no-untyped-call]
    return heads.unbind(0)
