"""Constants of the formulas that every backend computes, and what its optimizers keep."""

from __future__ import annotations

import math
from collections.abc import Iterable

IMPOSSIBLE_LOGIT = -20.0  # of a token that is not a digit, with candidates
INITIAL_HALT_BIAS = -5.0  # hardly ever halt until it is learned

# Tensors of the weights' size that an optimizer keeps, at most: matrices of the block need one with Muon, and
# Adafactor keeps two vectors per matrix. Memory is planned by this.
STATE_COPIES = {"adamw": 2, "adam_atan2": 2, "muon": 2, "adafactor": 0}

# x <- a x + (b A + c A A) x with A = x x^T, five times, in Muon.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
LEAST_SIZE = 1e-3  # of a parameter in Adafactor: it may start at zero


def muon_scale(shape: Iterable[int]) -> float:
    """Scale a step to about the size of Adam's, so that one learning rate and decay serve both."""
    return 0.2 * math.sqrt(max(shape))
