"""Attention within a window: every position attends to its neighbours and to a few global positions.

Rows are divided into blocks as long as the window, as in the PyTorch backend. A block's queries meet the keys
of three blocks (their own and its neighbours) and the global keys.

Shapes: B slots, H heads, L positions, S head size, W window, N blocks, G global positions.
"""

from __future__ import annotations

import mlx.core as mx


def windowed_attention(
    heads: tuple[mx.array, mx.array, mx.array], mask_BL: mx.array, window: int, num_global: int
) -> mx.array:
    """Attend from each position to those at most `window` away, and from and to the first `num_global`.

    `heads` are query, key and value, (B, H, L, S); `mask_BL` is true at positions that may be attended to,
    among them all global ones. Returns (B, H, L, S).
    """
    query, key, value = heads
    L = query.shape[2]
    if window + num_global >= L:  # everything is within reach
        return _attend(heads, mask_BL[:, None, None, :])
    near = _attend_in_blocks(heads, mask_BL, window, num_global)
    everywhere = _attend((query[:, :, :num_global], key, value), mask_BL[:, None, None, :])
    return mx.concatenate([everywhere, near[:, :, num_global:L]], axis=2)


def _attend(heads: tuple[mx.array, mx.array, mx.array], mask: mx.array) -> mx.array:
    scale = heads[0].shape[-1] ** -0.5
    return mx.fast.scaled_dot_product_attention(*heads, scale=scale, mask=mask)


def _attend_in_blocks(
    heads: tuple[mx.array, mx.array, mx.array], mask_BL: mx.array, window: int, num_global: int
) -> mx.array:
    query, key, value = heads
    B, H, L, S = query.shape
    num_blocks = -(-L // window)
    missing = num_blocks * window - L
    padded = mx.pad(query, [(0, 0), (0, 0), (0, missing), (0, 0)])
    blocks = padded.reshape(B, H, num_blocks, window, S).transpose(0, 2, 1, 3, 4)
    keys, values = (_three_blocks(each, window, missing, num_global) for each in (key, value))
    mask = _block_mask(mask_BL, window, missing, num_global)
    mixed = _attend((blocks.reshape(-1, H, window, S), keys, values), mask)
    return mixed.reshape(B, num_blocks, H, window, S).transpose(0, 2, 1, 3, 4).reshape(B, H, -1, S)


def _neighbours(blocks: mx.array) -> mx.array:
    """Join each block (B, N + 2, W, ...) with the two beside it: (B, N, 3 W, ...)."""
    return mx.concatenate([blocks[:, :-2], blocks[:, 1:-1], blocks[:, 2:]], axis=2)


def _three_blocks(each_BHLS: mx.array, window: int, missing: int, num_global: int) -> mx.array:
    """Return (B x N, H, G + 3 W, S): the global positions, then every block with its two neighbours."""
    B, H, _, S = each_BHLS.shape
    padded = mx.pad(each_BHLS, [(0, 0), (0, 0), (window, missing + window), (0, 0)])
    blocks = _neighbours(padded.transpose(0, 2, 1, 3).reshape(B, -1, window, H, S))
    num_blocks = blocks.shape[1]
    first = each_BHLS[:, :, :num_global].transpose(0, 2, 1, 3)[:, None]
    first = mx.broadcast_to(first, (B, num_blocks, num_global, H, S))
    joined = mx.concatenate([first, blocks], axis=2)
    return joined.reshape(B * num_blocks, -1, H, S).transpose(0, 2, 1, 3)


def _block_mask(mask_BL: mx.array, window: int, missing: int, num_global: int) -> mx.array:
    """Return (B x N, 1, W, G + 3 W), true where a query of a block may attend."""
    B, L = mask_BL.shape
    usable = mask_BL & (mx.arange(L) >= num_global)  # the first are there already, before the blocks
    padded = mx.pad(usable, [(0, 0), (window, missing + window)])
    blocks_BNK = _neighbours(padded.reshape(B, -1, window))
    of_query = mx.arange(window)[:, None]
    of_key = mx.arange(-window, 2 * window)
    within = mx.abs(of_query - of_key) <= window
    near = blocks_BNK[:, :, None, :] & within
    first = mx.ones((*near.shape[:3], num_global), dtype=mx.bool_)
    return mx.concatenate([first, near], axis=3).reshape(-1, 1, window, num_global + 3 * window)
