"""Attention within a window: every position attends to its neighbours and to a few global positions.

Rows are divided into blocks as long as the window. A block's queries meet the keys of three blocks (their own
and its neighbours) and the global keys, so time and memory grow with the length and not with its square.

Shapes: B slots, H heads, L positions, S head size, W window, N blocks, G global positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def windowed_attention(
    heads: tuple[Tensor, Tensor, Tensor], mask_BL: Tensor, window: int, num_global: int
) -> Tensor:
    """Attend from each position to those at most `window` away, and from and to the first `num_global`.

    `heads` are query, key and value, (B, H, L, S); `mask_BL` is true at positions that may be attended to,
    among them all global ones. Returns (B, H, L, S).
    """
    query, key, value = heads
    L = query.shape[2]
    if window + num_global >= L:  # everything is within reach
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask_BL[:, None, None, :])
    near = _attend_in_blocks(heads, mask_BL, window, num_global)
    everywhere = F.scaled_dot_product_attention(
        query[:, :, :num_global], key, value, attn_mask=mask_BL[:, None, None, :]
    )
    return torch.cat((everywhere, near[:, :, num_global:L]), dim=2)


def _attend_in_blocks(
    heads: tuple[Tensor, Tensor, Tensor], mask_BL: Tensor, window: int, num_global: int
) -> Tensor:
    query, key, value = heads
    B, H, L, S = query.shape
    num_blocks = -(-L // window)
    missing = num_blocks * window - L
    query_blocks = F.pad(query, (0, 0, 0, missing)).view(B, H, num_blocks, window, S)
    mixed = F.scaled_dot_product_attention(
        query_blocks.transpose(1, 2).reshape(-1, H, window, S),
        _three_blocks(key, window, missing, num_global),
        _three_blocks(value, window, missing, num_global),
        attn_mask=_block_mask(mask_BL, window, missing, num_global),
    )
    return mixed.view(B, num_blocks, H, window, S).transpose(1, 2).reshape(B, H, num_blocks * window, S)


def _three_blocks(each_BHLS: Tensor, window: int, missing: int, num_global: int) -> Tensor:
    """Return (B x N, H, G + 3 W, S): the global positions, then every block with its two neighbours."""
    B, H, _, S = each_BHLS.shape
    padded = F.pad(each_BHLS, (0, 0, window, missing + window))
    blocks = padded.unfold(2, 3 * window, window).permute(0, 2, 1, 4, 3)
    first = each_BHLS[:, None, :, :num_global].expand(B, blocks.shape[1], H, num_global, S)
    return torch.cat((first, blocks), dim=3).flatten(0, 1)


def _block_mask(mask_BL: Tensor, window: int, missing: int, num_global: int) -> Tensor:
    """Return (B x N, 1, W, G + 3 W), true where a query of a block may attend."""
    usable = mask_BL.clone()
    usable[:, :num_global] = False  # these are there already, before the blocks
    unfolded_BNK = F.pad(usable, (window, missing + window)).unfold(1, 3 * window, window)
    of_query = torch.arange(window, device=mask_BL.device)[:, None]
    of_key = torch.arange(-window, 2 * window, device=mask_BL.device)
    within = (of_query - of_key).abs() <= window
    near = unfolded_BNK[:, :, None, :] & within
    return F.pad(near, (num_global, 0), value=True).flatten(0, 1)[:, None]
