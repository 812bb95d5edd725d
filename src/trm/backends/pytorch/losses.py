"""The loss of a supervision step: every slot counts the same, whatever its number of labels.

The head is applied to labelled positions only, so a classifier is the same model with one labelled position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trm.backends.pytorch.plain import widened
from trm.batch import IGNORE_LABEL, exact_rows
from trm.config import TrainingConfig

if TYPE_CHECKING:
    from trm.backends.pytorch.model import TinyRecursiveModel


def log_stablemax(logits: Tensor) -> Tensor:
    """Return log(s(x) / sum s), with s(x) = x + 1 for x >= 0 and 1 / (1 - x) below.

    The clamp keeps the branch that is not taken finite: without it, 1 / (1 - x) at x = 1 puts NaN into
    the gradient in float32.
    """
    below = 1 / (1 - logits.clamp(max=0))
    scores = torch.where(logits < 0, below, logits + 1)
    return torch.log(scores) - torch.log(scores.sum(-1, keepdim=True))


def probabilities(logits: Tensor, loss: str) -> Tensor:
    """Return the probabilities that the loss was computed with."""
    wide = widened(logits)
    return wide.softmax(-1) if loss == "softmax_cross_entropy" else log_stablemax(wide).exp()


def token_losses(logits: Tensor, labels: Tensor, loss: str, smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy of each label, of which `smoothing` is spread evenly over all outputs."""
    wide = widened(logits)
    if loss == "softmax_cross_entropy":
        return F.cross_entropy(wide, labels, reduction="none", label_smoothing=smoothing)
    log_probabilities = log_stablemax(wide)
    of_label = -log_probabilities.gather(-1, labels[:, None]).squeeze(-1)
    if not smoothing:
        return of_label
    return (1 - smoothing) * of_label - smoothing * log_probabilities.mean(-1)


class SlotLosses(NamedTuple):
    total: Tensor  # sum over slots, with gradient
    correct_tokens: Tensor  # (B,)
    labelled_tokens: Tensor  # (B,)
    halt_margins: Tensor  # (B,), positive where the slot wants to halt


def slot_losses(
    model: TinyRecursiveModel,
    y_LBD: Tensor,
    labels_BL: Tensor,
    training: TrainingConfig,
    weights_B: Tensor | None = None,
    label_smoothing: float | None = None,
) -> SlotLosses:
    """`weights_B` scale the loss of each slot's answer; halting is learned alike from all of them.

    `label_smoothing` replaces that of the recipe.
    """
    labelled = labels_BL != IGNORE_LABEL
    slot_of = labelled.nonzero()[:, 0]
    labels = labels_BL[labelled]
    logits = model.token_logits(model.answer_positions(y_LBD)[labelled])
    counts = labelled.sum(-1)
    smoothing = training.label_smoothing if label_smoothing is None else label_smoothing
    per_token = token_losses(logits, labels, training.loss, smoothing) / counts[slot_of]
    if weights_B is not None:
        per_token = per_token * weights_B[slot_of]
    with torch.no_grad():
        right = (logits.argmax(-1) == labels).int()  # MPS cannot add 64-bit integers by index
        correct = torch.zeros_like(counts, dtype=torch.int32).index_add_(0, slot_of, right)
    halt_logits, continue_logits = model.halt_logits(y_LBD).unbind(-1)
    exact = exact_rows(correct, counts).to(halt_logits.dtype)
    halt_loss = F.binary_cross_entropy_with_logits(halt_logits, exact, reduction="sum")
    total = per_token.sum() + training.halt_loss_weight * halt_loss
    # As published: recursive variants halt when the halt logit is positive, the transformer baseline when it
    # exceeds the continue logit.
    margins = halt_logits - continue_logits if model.config.variant == "transformer" else halt_logits
    return SlotLosses(total, correct, counts, margins.detach())


def decoder_losses(
    logits_of: Callable[[Tensor], Tensor],
    hidden_BLD: Tensor,
    labels_BL: Tensor,
    loss: str,
    smoothing: float = 0.0,
    positions_at_a_time: int = 2**20,
) -> SlotLosses:
    """Return the losses of a decoder, some positions at a time.

    The logits of a whole micro-batch would take more memory than the model where the vocabulary is large.
    Those of a chunk are computed again in the backward pass instead of being kept.
    """
    labelled = labels_BL != IGNORE_LABEL
    counts = labelled.sum(-1)
    full = bool(labelled.all())  # as in all of training: nothing has to be copied
    if full:
        hidden, labels = hidden_BLD.flatten(0, 1), labels_BL.flatten()
    else:
        hidden, labels = hidden_BLD[labelled], labels_BL[labelled]
    pairs = (torch.split(each, positions_at_a_time) for each in (hidden, labels))
    parts = list(zip(*pairs, strict=True))

    def of_chunk(hidden_ND: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits_of(hidden_ND)
        return token_losses(logits, labels_N, loss, smoothing), (logits.argmax(-1) == labels_N).long()

    if len(parts) == 1 or not torch.is_grad_enabled():
        computed = [of_chunk(*part) for part in parts]
    else:
        computed = [
            checkpoint(of_chunk, *part, use_reentrant=False, preserve_rng_state=False) for part in parts
        ]
    per_token, right = (torch.cat(each) for each in zip(*computed, strict=True))
    if full:
        total = (per_token / labels_BL.shape[1]).sum()
        return SlotLosses(total, right.view(labels_BL.shape).sum(-1), counts, _no_margins(total, counts))
    slot_of = labelled.nonzero()[:, 0]
    correct = torch.zeros_like(counts, dtype=torch.int32).index_add_(0, slot_of, right.int())
    total = (per_token / counts[slot_of]).sum()
    return SlotLosses(total, correct, counts, _no_margins(total, counts))


def _no_margins(total: Tensor, counts: Tensor) -> Tensor:
    return torch.zeros(len(counts), dtype=total.dtype, device=total.device)
