"""Adam in its two forms, Muon, sign descent for puzzle embeddings, and the running average of the weights.

The state is plain named tensors and the step number, so that a checkpoint needs no pickle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from trm.config import TrainingConfig

Named = Mapping[str, Tensor]


class Adam:
    """Decoupled weight decay, then Adam's step. `adamw` divides m by sqrt(v) + eps; `adam_atan2` takes
    atan2(m, sqrt(v)), which needs no eps and never moves a weight by more than pi/2 learning rates."""

    def __init__(self, parameters: Named, training: TrainingConfig) -> None:
        self.parameters = dict(parameters)
        self.training = training
        self.moments = {
            f"{name}.{moment}": torch.zeros_like(parameter)
            for name, parameter in self.parameters.items()
            for moment in (("exp_avg",) if self._is_rotated(name) else ("exp_avg", "exp_avg_sq"))
        }

    def _is_rotated(self, name: str) -> bool:
        """Muon is for the matrices between hidden states; the vocabulary's rows stay with Adam."""
        return self.training.optimizer == "muon" and name.startswith("L_level.")

    @torch.no_grad()
    def update(self, step: int, learning_rate: float) -> None:
        """`step` counts from 1 and is the same for every parameter."""
        beta1, beta2 = self.training.beta1, self.training.beta2
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if gradient is None:
                continue
            mean = self.moments[f"{name}.exp_avg"].lerp_(gradient, 1 - beta1)
            parameter.mul_(1 - learning_rate * self.training.weight_decay)
            if self._is_rotated(name):
                ahead = torch.lerp(gradient, mean, beta1)
                parameter.add_(orthogonalized(ahead), alpha=-learning_rate * muon_scale(parameter))
                continue
            square = self.moments[f"{name}.exp_avg_sq"]
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            direction, size = mean / (1 - beta1**step), (square / (1 - beta2**step)).sqrt()
            if self.training.optimizer == "adam_atan2":
                parameter.add_(torch.atan2(direction, size), alpha=-learning_rate)
            else:
                parameter.addcdiv_(direction, size.add_(1e-8), value=-learning_rate)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Nearly the closest matrix whose singular values are all one, by five Newton-Schulz steps."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315) @ x
    result: Tensor = x if wide is matrix else x.T
    return result


def muon_scale(matrix: Tensor) -> float:
    """Gives its step about the size of Adam's, so that one learning rate and decay serve both."""
    return 0.2 * math.sqrt(max(matrix.shape))


@torch.no_grad()
def sign_descent(rows: Tensor, gradient: Tensor, learning_rate: float, weight_decay: float) -> Tensor:
    """New values of the puzzle embedding rows that took part in a step. Adam on a row that is seen once
    in a thousand steps is nearly this."""
    return rows * (1 - learning_rate * weight_decay) - learning_rate * gradient.sign()


@torch.no_grad()
def average_into(averages: Named, parameters: Named, rate: float) -> None:
    for name, average in averages.items():
        average.lerp_(parameters[name], 1 - rate)
