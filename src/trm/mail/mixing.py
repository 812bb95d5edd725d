"""Add the two paths of a mail model: the log-probabilities of both, with a gate on the recursive one.

Gate, temperatures and the confidence from which on the linear path decides alone are chosen on messages that
neither path has been fitted to. A gate of 0 leaves the recursive path out, and is what a network gets that
does not help beyond the noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trm.arrays import FloatArray, IntArray
from trm.mail.calibration import fit_temperature, log_softmax, softmax

GATES = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Mixture:
    gate: float = 0.0  # weight of the recursive path
    recursive_temperature: float = 1.0
    temperature: float = 1.0  # of the sum
    certain: float = 0.0  # a linear confidence above this decides alone

    def added(self, recursive: FloatArray) -> FloatArray:
        """Return what the recursive path adds to the log-probabilities of the linear one."""
        return self.gate * log_softmax(recursive, self.recursive_temperature)

    def together(self, linear: FloatArray, recursive: FloatArray) -> FloatArray:
        """Return probabilities from the log-probabilities of both paths."""
        return softmax(linear + self.added(recursive), self.temperature)

    def needs_recursion(self, linear: FloatArray) -> IntArray:
        """Return the rows of linear probabilities about which the linear path does not decide alone."""
        if not self.gate:
            return np.zeros(0, dtype=np.int64)
        rows: IntArray = np.flatnonzero(linear.max(1) <= self.certain)
        return rows


def fit_mixture(
    linear: FloatArray, recursive: FloatArray, categories: IntArray, weights: FloatArray
) -> Mixture:
    """Choose the gate with the best log-likelihood, if it is better than without by a standard error."""
    recursive_temperature = fit_temperature(recursive, categories)
    alone = _losses(linear, categories) * weights
    best = Mixture(recursive_temperature=recursive_temperature)
    best_gain = 0.0
    for gate in GATES:
        candidate = Mixture(gate, recursive_temperature)
        total = linear + candidate.added(recursive)
        gains = alone - _losses(total, categories) * weights
        gain = float(gains.sum())
        if gain > best_gain and gain > float(np.sqrt((gains**2).sum())):
            best_gain = gain
            best = Mixture(gate, recursive_temperature, fit_temperature(total, categories))
    if not best.gate:
        return best
    certain = _certain(linear, best.together(linear, recursive))
    return Mixture(best.gate, best.recursive_temperature, best.temperature, certain)


def _losses(scores: FloatArray, categories: IntArray) -> FloatArray:
    """Return the loss of every row at the best temperature of all rows."""
    logarithms = log_softmax(scores, fit_temperature(scores, categories))
    losses: FloatArray = -logarithms[np.arange(len(categories)), categories]
    return losses


def _certain(linear: FloatArray, together: FloatArray) -> float:
    """Return the highest linear confidence in an answer that both paths together do not give."""
    differs = linear.argmax(1) != together.argmax(1)
    return float(np.exp(linear[differs].max(1)).max()) if differs.any() else 0.0
