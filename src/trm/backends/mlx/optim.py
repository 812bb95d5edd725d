"""Optimizers, sign descent for puzzle embeddings, and the moving average of the weights.

Names and formulas of the moments are those of the PyTorch backend, so checkpoints are interchangeable. Arrays
are not changed but replaced: until all new ones are computed, the step has not happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from trm.backends.base import StepSettings
from trm.backends.formulas import LEAST_SIZE, NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS, muon_scale
from trm.backends.mlx.layers import Weights, widened
from trm.config import TrainingConfig


@dataclass
class Update:
    """One update of one parameter; `moments` are replaced by the new ones."""

    name: str
    gradient: mx.array  # in float32
    step: int  # counted from 1
    learning_rate: float
    moments: dict[str, mx.array]


class AdamW:
    """Decoupled weight decay, then Adam's step: m / (sqrt(v) + eps).

    A parameter or moment that is kept in bfloat16 is changed in float32 and rounded once.
    """

    def __init__(self, training: TrainingConfig, undecayed: frozenset[str]) -> None:
        self.training = training
        self.undecayed = undecayed  # names of parameters without weight decay
        self.moments_dtype = mx.bfloat16 if training.moments_dtype == "bfloat16" else mx.float32

    def all_moments(self, parameters: Weights) -> dict[str, mx.array]:
        """Return the moments before the first step."""
        return {
            f"{name}.{moment}": mx.zeros(shape, dtype=self.moments_dtype)
            for name, parameter in parameters.items()
            for moment, shape in self.shapes(name, parameter).items()
        }

    def shapes(self, name: str, parameter: mx.array) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the moments that are kept of a parameter."""
        return dict.fromkeys(("exp_avg", "exp_avg_sq"), parameter.shape)

    def updated(
        self, weights: Weights, moments: Weights, gradients: Weights, settings: StepSettings
    ) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
        """Return weights and moments after a step; what has no gradient stays."""
        weights, moments = dict(weights), dict(moments)
        for name, gradient in gradients.items():
            own = {moment: moments[f"{name}.{moment}"] for moment in self.shapes(name, gradient)}
            update = Update(name, gradient, settings.step, settings.learning_rate, own)
            weights[name] = self.update(weights[name], update)
            moments |= {f"{name}.{moment}": each for moment, each in own.items()}
        return weights, moments

    def update(self, parameter: mx.array, update: Update) -> mx.array:
        """Return the new parameter, and replace the moments in the update."""
        wide = widened(parameter)
        if update.name not in self.undecayed:
            wide = wide * (1 - update.learning_rate * self.training.weight_decay)
        return self.change(wide, update).astype(parameter.dtype)

    def change(self, parameter: mx.array, update: Update) -> mx.array:
        direction, size = self.corrected_moments(update)
        return parameter - update.learning_rate * (direction / (size + 1e-8))

    def first_moment(self, update: Update) -> mx.array:
        """Update the mean of the gradients, and return it."""
        mean = lerp(widened(update.moments["exp_avg"]), update.gradient, 1 - self.training.beta1)
        return self.keep(update, "exp_avg", mean)

    def second_moment(self, update: Update) -> mx.array:
        """Update the mean of the squared gradients, and return it."""
        beta2 = self.training.beta2
        square = widened(update.moments["exp_avg_sq"]) * beta2 + (1 - beta2) * update.gradient.square()
        return self.keep(update, "exp_avg_sq", square)

    def corrected_moments(self, update: Update) -> tuple[mx.array, mx.array]:
        """Update both moments, and return them without the bias of their start at zero."""
        mean = self.first_moment(update) / (1 - self.training.beta1**update.step)
        return mean, mx.sqrt(self.second_moment(update) / (1 - self.training.beta2**update.step))

    def keep(self, update: Update, moment: str, wide: mx.array) -> mx.array:
        update.moments[moment] = wide.astype(self.moments_dtype)
        return wide


class AdamAtan2(AdamW):
    """AdamW with atan2(m, sqrt(v)) in place of the quotient: it needs no eps, and no step exceeds pi/2
    learning rates."""

    def change(self, parameter: mx.array, update: Update) -> mx.array:
        return parameter - update.learning_rate * mx.arctan2(*self.corrected_moments(update))


class Muon(AdamW):
    """Orthogonalised momentum for the matrices of the recursive block; AdamW for embeddings and heads."""

    def shapes(self, name: str, parameter: mx.array) -> dict[str, tuple[int, ...]]:
        return {"exp_avg": parameter.shape} if _in_block(name) else super().shapes(name, parameter)

    def change(self, parameter: mx.array, update: Update) -> mx.array:
        if not _in_block(update.name):
            return super().change(parameter, update)
        ahead = lerp(update.gradient, self.first_moment(update), self.training.beta1)
        rate = update.learning_rate * muon_scale(parameter.shape)
        return parameter - rate * orthogonalized(ahead)


class Adafactor(AdamW):
    """The second moment of a matrix as the product of its rows' and its columns' means; no first moment
    (Shazeer & Stern, 2018)."""

    def shapes(self, name: str, parameter: mx.array) -> dict[str, tuple[int, ...]]:
        if parameter.ndim != 2:
            return {"exp_avg_sq": parameter.shape}
        return {"row": parameter.shape[:1], "column": parameter.shape[1:]}

    def change(self, parameter: mx.array, update: Update) -> mx.array:
        step = self._scaled(update)
        step = step / mx.maximum(1.0, _root_mean_square(step))
        size = mx.maximum(LEAST_SIZE, _root_mean_square(parameter))
        return parameter - update.learning_rate * size * step

    def _scaled(self, update: Update) -> mx.array:
        """Return the gradient divided by the root of its second moment."""
        decay = update.step**-0.8
        squares = update.gradient.square() + 1e-30
        if squares.ndim != 2:
            return update.gradient * mx.rsqrt(self._mean(update, "exp_avg_sq", squares, decay))
        row = self._mean(update, "row", squares.mean(1), decay)
        column = self._mean(update, "column", squares.mean(0), decay)
        return update.gradient * mx.rsqrt(row / row.mean())[:, None] * mx.rsqrt(column)

    def _mean(self, update: Update, moment: str, squares: mx.array, decay: float) -> mx.array:
        return self.keep(update, moment, lerp(widened(update.moments[moment]), squares, decay))


OPTIMIZERS: dict[str, type[AdamW]] = {
    "adamw": AdamW,
    "adam_atan2": AdamAtan2,
    "muon": Muon,
    "adafactor": Adafactor,
}


def _in_block(name: str) -> bool:
    return name.startswith("L_level.")


def _root_mean_square(x: mx.array) -> mx.array:
    return mx.sqrt(x.square().mean())


def lerp(start: mx.array, end: mx.array, share: float) -> mx.array:
    """Interpolate in the form that is exact at the nearer end, as torch does."""
    if share < 0.5:
        return start + share * (end - start)
    return end - (1 - share) * (end - start)


def orthogonalized(matrix: mx.array) -> mx.array:
    """Return nearly the closest matrix whose singular values are all one, by Newton-Schulz steps."""
    a, b, c = NEWTON_SCHULZ
    is_wide = matrix.shape[0] <= matrix.shape[1]
    wide = matrix if is_wide else matrix.T
    x = wide / (mx.linalg.norm(wide) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = a * x + mx.addmm(gram, gram, gram, alpha=c, beta=b) @ x
    return x if is_wide else x.T


def global_norm(gradients: Weights) -> float:
    """Return the norm of all gradients; those of single arrays are added in double precision."""
    norms = mx.stack([mx.linalg.norm(each.reshape(-1)) for each in gradients.values()])
    return float(np.linalg.norm(np.array(norms).astype(np.float64)))


def clipped(gradients: Weights, norm: float, limit: float | None) -> Weights:
    """Scale gradients of this norm down to the limit, if there is one."""
    if limit is None or limit / (norm + 1e-6) >= 1:
        return gradients
    return {name: each * (limit / (norm + 1e-6)) for name, each in gradients.items()}


def sign_descent(rows: mx.array, gradient: mx.array, learning_rate: float, weight_decay: float) -> mx.array:
    """Return new values of the puzzle embedding rows that took part in a step.

    Adam on a row that occurs once in a thousand steps is nearly this.
    """
    return rows * (1 - learning_rate * weight_decay) - learning_rate * mx.sign(gradient)


def averaged(averages: Mapping[str, mx.array], parameters: Weights, rate: float) -> dict[str, mx.array]:
    """Return the moving averages after a step; what is not among the parameters stays."""
    return {
        name: lerp(average, parameters[name], 1 - rate) if name in parameters else average
        for name, average in averages.items()
    }
