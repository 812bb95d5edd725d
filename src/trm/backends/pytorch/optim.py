"""Optimizers, sign descent for puzzle embeddings, and the moving average of the weights.

The state is plain named tensors and the step number, so that a checkpoint needs no pickle. A new optimizer is
a class and a row in `OPTIMIZERS`, here and in the MLX backend, and a row in `STATE_COPIES`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trm.backends.formulas import LEAST_SIZE, NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS, muon_scale
from trm.backends.pytorch.plain import widened
from trm.config import TrainingConfig

Named = Mapping[str, Tensor]


class Update(NamedTuple):
    """One update of one parameter."""

    name: str
    gradient: Tensor  # in at least float32
    step: int  # counted from 1
    learning_rate: float


class AdamW:
    """Decoupled weight decay, then Adam's step: m / (sqrt(v) + eps).

    A parameter or moment that is kept in bfloat16 is changed in float32 and rounded once.
    """

    def __init__(
        self, parameters: Named, training: TrainingConfig, undecayed: Collection[str] = frozenset()
    ) -> None:
        self.parameters = dict(parameters)
        self.training = training
        self.undecayed = undecayed  # names of parameters without weight decay
        self.moments = {
            f"{name}.{moment}": zeros
            for name, parameter in self.parameters.items()
            for moment, zeros in self.new_moments(name, parameter).items()
        }

    def new_moments(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        """Return the moments that are kept of a parameter, before the first step."""
        return {moment: self.zeros(parameter) for moment in ("exp_avg", "exp_avg_sq")}

    def zeros(self, like: Tensor) -> Tensor:
        dtype = torch.promote_types(like.dtype, torch.float32)
        if self.training.moments_dtype == "bfloat16":
            dtype = torch.bfloat16
        return torch.zeros_like(like, dtype=dtype)

    def update(self, step: int, learning_rate: float, gradients: Named | None = None) -> None:
        """Change every parameter that has a gradient, by default its own."""
        for name, parameter in self.parameters.items():
            gradient = parameter.grad if gradients is None else gradients.get(name)
            if gradient is not None:
                self.update_one(Update(name, gradient, step, learning_rate))

    @torch.no_grad()
    def update_one(self, update: Update) -> None:
        parameter = self.parameters[update.name]
        wide = widened(parameter)
        update = update._replace(gradient=update.gradient.to(wide.dtype))
        if update.name not in self.undecayed:
            wide.mul_(1 - update.learning_rate * self.training.weight_decay)
        self.change(wide, update)
        if wide is not parameter:
            parameter.copy_(wide)

    def change(self, parameter: Tensor, update: Update) -> None:
        direction, size = self.corrected_moments(update)
        parameter.addcdiv_(direction, size.add_(1e-8), value=-update.learning_rate)

    def first_moment(self, update: Update) -> Tensor:
        """Update the mean of the gradients, and return it."""
        kept = self.moments[f"{update.name}.exp_avg"]
        mean = widened(kept).lerp_(update.gradient, 1 - self.training.beta1)
        return _stored(kept, mean)

    def second_moment(self, update: Update) -> Tensor:
        """Update the mean of the squared gradients, and return it."""
        kept = self.moments[f"{update.name}.exp_avg_sq"]
        beta2 = self.training.beta2
        square = widened(kept).mul_(beta2).addcmul_(update.gradient, update.gradient, value=1 - beta2)
        return _stored(kept, square)

    def corrected_moments(self, update: Update) -> tuple[Tensor, Tensor]:
        """Update both moments, and return them without the bias of their start at zero."""
        mean = self.first_moment(update) / (1 - self.training.beta1**update.step)
        return mean, (self.second_moment(update) / (1 - self.training.beta2**update.step)).sqrt_()


def _stored(kept: Tensor, wide: Tensor) -> Tensor:
    if wide is not kept:
        kept.copy_(wide)
    return wide


class AdamAtan2(AdamW):
    """AdamW with atan2(m, sqrt(v)) in place of the quotient: it needs no eps, and no step exceeds pi/2
    learning rates."""

    def change(self, parameter: Tensor, update: Update) -> None:
        direction, size = self.corrected_moments(update)
        parameter.add_(torch.atan2(direction, size), alpha=-update.learning_rate)


class Muon(AdamW):
    """Orthogonalised momentum for the matrices of the recursive block; AdamW for embeddings and heads."""

    def new_moments(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        return {"exp_avg": self.zeros(parameter)} if _in_block(name) else super().new_moments(name, parameter)

    def change(self, parameter: Tensor, update: Update) -> None:
        if not _in_block(update.name):
            super().change(parameter, update)
            return
        ahead = torch.lerp(update.gradient, self.first_moment(update), self.training.beta1)
        parameter.add_(orthogonalized(ahead), alpha=-update.learning_rate * muon_scale(parameter.shape))


class Adafactor(AdamW):
    """The second moment of a matrix as the product of its rows' and its columns' means; no first moment.

    Shazeer & Stern, 2018: steps are relative to the size of the parameter, the decay of the moment grows with
    the step, and an update whose root mean square exceeds one is scaled down to it.
    """

    def new_moments(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        if parameter.ndim != 2:
            return {"exp_avg_sq": self.zeros(parameter)}
        return {"row": self.zeros(parameter[:, 0]), "column": self.zeros(parameter[0])}

    def change(self, parameter: Tensor, update: Update) -> None:
        step = self._scaled(update)
        step.div_(max(1.0, _root_mean_square(step)))
        size = max(LEAST_SIZE, _root_mean_square(parameter))
        parameter.add_(step, alpha=-update.learning_rate * size)

    def _scaled(self, update: Update) -> Tensor:
        """Return the gradient divided by the root of its second moment."""
        decay = update.step**-0.8
        squares = update.gradient.square().add_(1e-30)
        if squares.ndim != 2:
            return update.gradient * self._mean(f"{update.name}.exp_avg_sq", squares, decay).rsqrt()
        row = self._mean(f"{update.name}.row", squares.mean(1), decay)
        column = self._mean(f"{update.name}.column", squares.mean(0), decay)
        return update.gradient * (row / row.mean()).rsqrt()[:, None] * column.rsqrt()

    def _mean(self, name: str, squares: Tensor, decay: float) -> Tensor:
        kept = self.moments[name]
        return _stored(kept, widened(kept).lerp_(squares, decay))


def _root_mean_square(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x)) / math.sqrt(x.numel())


OPTIMIZERS: dict[str, type[AdamW]] = {
    "adamw": AdamW,
    "adam_atan2": AdamAtan2,
    "muon": Muon,
    "adafactor": Adafactor,
}


def _in_block(name: str) -> bool:
    return name.startswith("L_level.")


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return nearly the closest matrix whose singular values are all one, by Newton-Schulz steps."""
    a, b, c = NEWTON_SCHULZ
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = a * x + torch.addmm(gram, gram, gram, beta=b, alpha=c) @ x
    result: Tensor = x if wide is matrix else x.T
    return result


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], limit: float | None) -> float:
    """Clip the gradients that the parameters have, and return their norm."""
    return clip([each.grad for each in parameters if each.grad is not None], limit)


@torch.no_grad()
def clip(gradients: Sequence[Tensor], limit: float | None) -> float:
    """Clip as `clip_grad_norm_` does, and return the norm, in double precision.

    The sum of single precision depends on the number of threads, so that ranks which have the same gradients
    would not scale them alike.
    """
    # Not every device has double precision.
    norms = [torch.linalg.vector_norm(gradient.cpu(), dtype=torch.float64) for gradient in gradients]
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
