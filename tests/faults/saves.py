"""Checkpoints in which every number depends on the step, so that a mixture of two is noticed."""

import torch

from macbook_optimization.checkpoint_management import CheckpointManager

SIZE = 5_000


def tensors(step):
    values = torch.arange(SIZE, dtype=torch.float32) + step
    return {
        "weights": {"a": values, "b": values[:7].reshape(7, 1) * 2},
        "ema": {"a": values + 0.5},
        "optimizer": {"a.exp_avg": values * 3, "count": torch.tensor([step])},
        "latents": {"latents": values.to(torch.bfloat16)},
    }


def save(manager, step):
    return manager.save(step, tensors(step), {"seconds": float(step)})


def manager_with(run, *steps, keep=2):
    manager = CheckpointManager(run, keep=keep)
    for step in steps:
        save(manager, step)
    return manager


def holds(checkpoint):
    """Return whether every tensor is the one of the checkpoint's step."""
    found, expected = checkpoint.load_all(), tensors(checkpoint.step)
    return found.keys() == expected.keys() and all(
        torch.equal(found[group][name], tensor)
        for group, named in expected.items()
        for name, tensor in named.items()
    )
