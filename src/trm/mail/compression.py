"""Smaller weights for an exported network: magnitude pruning, and 8-bit integers.

Both change what the network answers; `trm email eval` on the exported model shows by how much.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trm.arrays import Float32Array

SCALE = ".scale"  # ends the name of the factors that belong to a quantized matrix
_LARGEST = 127
_MIN_ELEMENTS = 1024  # smaller tensors keep their precision: they take no room


def pruned(weights: dict[str, Float32Array], share: float) -> dict[str, Float32Array]:
    """Set this share of every matrix to zero: the weights of the smallest magnitude."""
    return {name: _pruned(each, share) if _is_matrix(each) else each for name, each in weights.items()}


def _pruned(matrix: Float32Array, share: float) -> Float32Array:
    threshold = np.quantile(np.abs(matrix), share)
    return np.where(np.abs(matrix) > threshold, matrix, np.float32(0)) if share else matrix


def quantized(weights: dict[str, Float32Array]) -> dict[str, np.ndarray]:
    """Store every matrix as 8-bit integers with one factor per row."""
    found: dict[str, np.ndarray] = {}
    for name, each in weights.items():
        if not _is_matrix(each):
            found[name] = each
            continue
        scale = np.abs(each).max(1, keepdims=True) / _LARGEST
        scale[scale == 0] = 1.0
        found[name] = np.rint(each / scale).astype(np.int8)
        found[name + SCALE] = scale.astype(np.float32)
    return found


def restored(tensors: Mapping[str, np.ndarray]) -> dict[str, Float32Array]:
    """Return quantized matrices as they are used; other tensors stay as they are."""
    return {
        name: tensor * tensors[name + SCALE] if name + SCALE in tensors else tensor
        for name, tensor in tensors.items()
        if not name.endswith(SCALE)
    }


def _is_matrix(tensor: np.ndarray) -> bool:
    return tensor.ndim == 2 and tensor.size >= _MIN_ELEMENTS
