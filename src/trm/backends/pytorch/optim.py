"""Optimizers, sign descent for puzzle embeddings, and the moving average of the weights.

The state is plain named tensors and the step number, so that a checkpoint needs no pickle. A new optimizer is
a class here with `state_copies`, the number of tensors of the weights' size that it keeps, and a row in
`OPTIMIZERS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from trm.config import TrainingConfig

Named = Mapping[str, Tensor]


class AdamW:
    """Decoupled weight decay, then Adam's step: m / (sqrt(v) + eps)."""

    state_copies = 2

    def __init__(self, parameters: Named, training: TrainingConfig) -> None:
        self.parameters = dict(parameters)
        self.training = training
        self.moments = {
            f"{name}.{moment}": torch.zeros_like(parameter)
            for name, parameter in self.parameters.items()
            for moment in self.moments_of(name)
        }

    def moments_of(self, name: str) -> tuple[str, ...]:
        """Return which moments are kept of a parameter."""
        return ("exp_avg", "exp_avg_sq")

    @torch.no_grad()
    def update(self, step: int, learning_rate: float) -> None:
        """Change every parameter that has a gradient. `step` counts from 1, for all of them alike."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            mean = self.moments[f"{name}.exp_avg"].lerp_(parameter.grad, 1 - self.training.beta1)
            parameter.mul_(1 - learning_rate * self.training.weight_decay)
            self.change(name, parameter, mean, step, learning_rate)

    def change(self, name: str, parameter: Tensor, mean: Tensor, step: int, learning_rate: float) -> None:
        direction, size = self.corrected_moments(name, parameter, mean, step)
        parameter.addcdiv_(direction, size.add_(1e-8), value=-learning_rate)

    def corrected_moments(
        self, name: str, parameter: Tensor, mean: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """Update the second moment, and return both without the bias of their start at zero."""
        beta1 = self.training.beta1
        beta2 = self.training.beta2
        assert parameter.grad is not None
        square = self.moments[f"{name}.exp_avg_sq"]
        square.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
        return mean / (1 - beta1**step), (square / (1 - beta2**step)).sqrt()


class AdamAtan2(AdamW):
    """AdamW with atan2(m, sqrt(v)) in place of the quotient: it needs no eps, and no step exceeds pi/2
    learning rates."""

    def change(self, name: str, parameter: Tensor, mean: Tensor, step: int, learning_rate: float) -> None:
        direction, size = self.corrected_moments(name, parameter, mean, step)
        parameter.add_(torch.atan2(direction, size), alpha=-learning_rate)


class Muon(AdamW):
    """Orthogonalised momentum for the matrices of the recursive block; AdamW for embeddings and heads."""

    state_copies = 2  # at most: the block's matrices need one

    def moments_of(self, name: str) -> tuple[str, ...]:
        return ("exp_avg",) if _in_block(name) else super().moments_of(name)

    def change(self, name: str, parameter: Tensor, mean: Tensor, step: int, learning_rate: float) -> None:
        if not _in_block(name):
            super().change(name, parameter, mean, step, learning_rate)
            return
        assert parameter.grad is not None
        ahead = torch.lerp(parameter.grad, mean, self.training.beta1)
        parameter.add_(orthogonalized(ahead), alpha=-learning_rate * muon_scale(parameter))


OPTIMIZERS: dict[str, type[AdamW]] = {"adamw": AdamW, "adam_atan2": AdamAtan2, "muon": Muon}


def _in_block(name: str) -> bool:
    return name.startswith("L_level.")


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return nearly the closest matrix whose singular values are all one, by five Newton-Schulz steps."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315) @ x
    result: Tensor = x if wide is matrix else x.T
    return result


def muon_scale(matrix: Tensor) -> float:
    """Scale a step to about the size of Adam's, so that one learning rate and decay serve both."""
    return 0.2 * math.sqrt(max(matrix.shape))


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], limit: float | None) -> float:
    """Clip as `clip_grad_norm_` does, and return the norm, in double precision.

    The sum of single precision depends on the number of threads, so that ranks which have the same gradients
    would not scale them alike.
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    norm = float(torch.linalg.vector_norm(torch.stack(norms)))
    if limit is not None and (scale := limit / (norm + 1e-6)) < 1:
        for gradient in gradients:
            gradient.mul_(scale)
    return norm


@torch.no_grad()
def sign_descent(rows: Tensor, gradient: Tensor, learning_rate: float, weight_decay: float) -> Tensor:
    """Return new values of the puzzle embedding rows that took part in a step.

    Adam on a row that occurs once in a thousand steps is nearly this.
    """
    return rows * (1 - learning_rate * weight_decay) - learning_rate * gradient.sign()


@torch.no_grad()
def average_into(averages: Named, parameters: Named, rate: float) -> None:
    for name, average in averages.items():
        average.lerp_(parameters[name], 1 - rate)
