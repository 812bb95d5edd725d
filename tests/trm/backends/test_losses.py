"""The loss of a slot: smoothed labels, and weights by category."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tiny import make_batch, make_learner, training_config

from trm.backends.base import StepSettings
from trm.backends.pytorch.losses import probabilities, token_losses

LOSSES = ["stablemax_cross_entropy", "softmax_cross_entropy"]


def step_of(batch, size=6, **training):
    ours = make_learner(training=training_config(halt_loss_weight=0.0, **training))
    result = ours.step(batch, StepSettings(1, 2, 0.0, 0.0), lambda done: size)
    return result, {name: parameter.grad.clone() for name, parameter in ours.parameters.items()}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_smoothed_labels_are_a_cross_entropy_with_a_spread_target(loss, smoothing):
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)) * 3
    labels = torch.tensor([0, 3, 1, 1, 2])
    target = (1 - smoothing) * torch.eye(4)[labels] + smoothing / 4
    expected = -(target * probabilities(logits, loss).log()).sum(-1)
    torch.testing.assert_close(token_losses(logits, labels, loss, smoothing), expected, rtol=0, atol=1e-12)


def test_label_smoothing_is_below_one():
    with pytest.raises(ValidationError, match="label_smoothing"):
        training_config(label_smoothing=1.0)


@pytest.mark.parametrize("size", [6, 4, 1])
def test_a_weight_scales_the_loss_of_its_slot_and_the_divisor_stays(size):
    """A weight of 2 equals the same example in two slots, each divided by the same number of slots."""
    batch = make_batch()
    weights = np.array([2.0, 0.0, 1.0, 0.5, 1.0, 3.0])
    weighted, gradients = step_of(replace(batch, weights=weights), size)
    alone = [step_of(batch[slot : slot + 1]) for slot in range(6)]  # divided by 6 slots, too
    expected = sum(weight * each.loss for weight, (each, _) in zip(weights, alone, strict=True))
    assert weighted.loss == pytest.approx(expected, rel=1e-5)
    for name, gradient in gradients.items():
        total = sum(weight * each[name] for weight, (_, each) in zip(weights, alone, strict=True))
        torch.testing.assert_close(gradient, total, rtol=1e-4, atol=1e-6, msg=name)


def test_weights_of_one_change_no_bit():
    batch = make_batch()
    plain, gradients = step_of(batch)
    weighted, others = step_of(replace(batch, weights=np.ones(6)))
    assert weighted.loss == plain.loss
    assert all(torch.equal(others[name], gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_may_have_its_own_label_smoothing(loss):
    batch = make_batch()
    expected, gradients = step_of(batch, loss=loss, label_smoothing=0.3)
    ours = make_learner(training=training_config(halt_loss_weight=0.0, loss=loss, label_smoothing=0.1))
    settings = StepSettings(1, 2, 0.0, 0.0, label_smoothing=0.3)
    assert ours.step(batch, settings, lambda done: 6).loss == expected.loss
    assert all(torch.equal(ours.parameters[name].grad, each) for name, each in gradients.items())
