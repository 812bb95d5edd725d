"""The same learner in two backends, for tests that compare them."""

import numpy as np
import torch
from tiny import SPEC, make_learner, training_config

from trm.backends.base import load_backend
from trm.backends.pytorch.step_tensors import StepTensors
from trm.plan import Execution


def randomized(learner):
    """Draw the weights of a PyTorch learner that are zero in a new model."""
    generator = torch.Generator().manual_seed(1)
    model = learner.model
    with torch.no_grad():
        model.q_head.weight.normal_(0, 0.5, generator=generator)
        model.q_head.bias.normal_(0, 0.5, generator=generator)
        if model.config.puzzle_emb_ndim:
            model.puzzle_emb.weights.normal_(0, 0.5, generator=generator)
    return learner


def in_mlx(learner, **execution):
    """Return a learner in MLX with the state of one in PyTorch, and the same program."""
    how = Execution(**{"backend": "mlx", "precision": learner.execution.precision, **execution})
    ours = load_backend(how).learner(learner.program, how, learner.world)
    ours.load_state(learner.state())
    return ours


def twins(model=None, training=None, spec=SPEC, **execution):
    """Return a learner in PyTorch, and one in MLX that starts from its state."""
    theirs = randomized(make_learner(model, training or training_config(), spec, seed=3, **execution))
    return theirs, in_mlx(theirs, **execution)


def puzzle_row_gradient(learner, batch, settings):
    """Return the gradient of a PyTorch learner for the puzzle embeddings that take part in a step.

    An update takes only its sign, so the state does not show its size.
    """
    tensors = StepTensors.of(learner, batch, None)
    losses, _ = learner.model.losses(tensors.take(slice(0, len(batch))), settings, learner.training)
    return torch.autograd.grad(losses.total / learner.program.num_slots, tensors.rows)[0]


def numbers(tensor):
    """Return a tensor of either backend in NumPy, in float64."""
    if isinstance(tensor, torch.Tensor):
        return tensor.detach().double().numpy()
    import mlx.core as mx

    return np.array(tensor.astype(mx.float32)).astype(np.float64)


def assert_same_state(ours, theirs, relative, absolute=0.0):
    """Compare every tensor; the difference is relative to the largest number of the tensor."""
    found, expected = ours.state(), theirs.state()
    assert found.keys() == expected.keys()
    for group, tensors in expected.items():
        assert found[group].keys() == tensors.keys()
        for name, tensor in tensors.items():
            wanted = numbers(tensor)
            bound = absolute + relative * np.abs(wanted).max(initial=0)
            worst = np.abs(numbers(found[group][name]) - wanted).max(initial=0)
            assert worst <= bound, f"{group} {name}: {worst:.1e} exceeds {bound:.1e}"
