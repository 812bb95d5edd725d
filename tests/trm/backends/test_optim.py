"""Optimizers against the NumPy reference, torch and the singular value decomposition."""

import numpy as np
import pytest
import torch
from reference import recursion
from tiny import make_batch, make_learner, training_config

from trm.backends.base import StepSettings
from trm.backends.formulas import STATE_COPIES
from trm.backends.pytorch.optim import OPTIMIZERS, orthogonalized


@pytest.mark.parametrize("optimizer", ["adamw", "adam_atan2"])
def test_the_optimizer_equals_the_reference(optimizer):
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=7), rng.normal(size=(5, 7))
    training = training_config(optimizer=optimizer, weight_decay=0.3, beta1=0.8, beta2=0.9)
    parameter = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
    adam = OPTIMIZERS[optimizer]({"p": parameter}, training)
    for step, gradient in enumerate(gradients, start=1):
        parameter.grad = torch.from_numpy(gradient)
        adam.update(step, 0.05)
    expected = recursion.adam(start, gradients, optimizer, 0.05, 0.3, 0.8, 0.9)
    np.testing.assert_allclose(parameter.detach(), expected, rtol=1e-10)


def test_adamw_equals_that_of_torch():
    training = training_config(optimizer="adamw", weight_decay=0.3)
    ours = torch.nn.Parameter(torch.linspace(-1, 1, 9))
    theirs = torch.nn.Parameter(ours.detach().clone())
    adam = OPTIMIZERS["adamw"]({"p": ours}, training)
    reference = torch.optim.AdamW([theirs], lr=0.05, betas=(0.9, 0.95), weight_decay=0.3)
    for step in range(1, 6):
        for parameter in (ours, theirs):
            parameter.grad = torch.sin(parameter.detach() * step)
        adam.update(step, 0.05)
        reference.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(8, 8), (6, 24), (24, 6)])
def test_muon_steps_are_nearly_orthogonal(shape):
    """Singular values are near one, and the singular vectors remain those of the gradient."""
    gradient = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalized(gradient)
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    assert torch.linalg.svdvals(found).sub(1).abs().max() < 0.4
    assert (left.T @ found @ right.T).diagonal().min() > 0.6


def test_muon_updates_the_matrices_of_the_block_and_adamw_the_rest():
    made = {
        name: make_learner(training=training_config(optimizer=name, weight_decay=0.0))
        for name in ("muon", "adamw")
    }
    before = {name: weight.clone() for name, weight in made["muon"].model.named_parameters()}
    for ours in made.values():
        ours.step(make_batch(seed=1), StepSettings(1, 2, 1e-2, 1e-2), lambda done: 6)
    for name, weight in made["muon"].parameters.items():
        moved = (weight - before[name]).detach()
        if name.startswith("L_level."):
            sizes = torch.linalg.svdvals(moved) / (1e-2 * 0.2 * max(moved.shape) ** 0.5)
            assert 0.5 < sizes.median() < 1.3, name
            assert f"{name}.exp_avg_sq" not in made["muon"].optimizer.moments
        else:
            torch.testing.assert_close(weight, made["adamw"].parameters[name], msg=name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_keeps_no_more_than_it_states(name):
    """Memory is planned by `STATE_COPIES`."""
    ours = make_learner(training=training_config(optimizer=name))
    weights = sum(parameter.numel() for parameter in ours.parameters.values())
    whole = [each for each in ours.optimizer.moments.values() if each.ndim > 1 or name != "adafactor"]
    moments = sum(moment.numel() for moment in whole)
    assert moments <= STATE_COPIES[name] * weights
