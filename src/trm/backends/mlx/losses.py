"""The loss of a supervision step: every slot counts the same, whatever its number of labels.

MLX has no boolean indexing, so positions without a label are masked. Where few positions have labels, the
step passes the places of those (`MicroBatch.places`), and the head is applied to them only.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from trm.backends.mlx.layers import widened
from trm.batch import IGNORE_LABEL, exact_rows


class SlotLosses(NamedTuple):
    total: mx.array  # sum over slots, with gradient
    correct_tokens: mx.array  # (B,)
    labelled_tokens: mx.array  # (B,)
    halt_margins: mx.array  # (B,), positive where the slot wants to halt


def log_stablemax(logits: mx.array) -> mx.array:
    """Return log(s(x) / sum s), with s(x) = x + 1 for x >= 0 and 1 / (1 - x) below.

    The clamp keeps the branch that is not taken finite: without it, 1 / (1 - x) at x = 1 puts NaN into
    the gradient.
    """
    below = 1 / (1 - mx.minimum(logits, 0))
    scores = mx.where(logits < 0, below, logits + 1)
    return mx.log(scores) - mx.log(scores.sum(-1, keepdims=True))


def log_probabilities(logits: mx.array, loss: str) -> mx.array:
    wide = widened(logits)
    if loss == "softmax_cross_entropy":
        return wide - mx.logsumexp(wide, axis=-1, keepdims=True)
    return log_stablemax(wide)


def token_losses(logits: mx.array, labels: mx.array, loss: str, smoothing: float = 0.0) -> mx.array:
    """Return the cross-entropy of each label, of which `smoothing` is spread evenly over all outputs; 0 where
    there is no label."""
    labelled = labels != IGNORE_LABEL
    found = log_probabilities(logits, loss)
    of_label = -mx.take_along_axis(found, mx.where(labelled, labels, 0)[..., None], axis=-1).squeeze(-1)
    if smoothing:
        of_label = (1 - smoothing) * of_label - smoothing * found.mean(-1)
    return mx.where(labelled, of_label, 0)


def count_correct(logits: mx.array, labels: mx.array) -> tuple[mx.array, mx.array]:
    """Return how many labels of each row are the likeliest tokens, and how many there are."""
    correct = mx.argmax(logits, axis=-1) == labels  # IGNORE_LABEL is not a token
    return correct.sum(-1), (labels != IGNORE_LABEL).sum(-1)


def sum_over_slots(per_token_BM: mx.array, counts_B: mx.array, weights_B: mx.array | None) -> mx.array:
    """Return the sum of the slots' mean losses, each scaled by its weight if there are weights."""
    per_slot = per_token_BM.sum(-1) / mx.maximum(counts_B, 1)
    return (per_slot if weights_B is None else per_slot * weights_B).sum()


def halt_losses(halt_logits_B: mx.array, correct: mx.array, labelled: mx.array) -> mx.array:
    """Return the sum of the halting head's losses: it predicts whether the answer is exact."""
    exact = mx.stop_gradient(exact_rows(correct, labelled).astype(halt_logits_B.dtype))
    return (mx.logaddexp(halt_logits_B, 0) - halt_logits_B * exact).sum()
