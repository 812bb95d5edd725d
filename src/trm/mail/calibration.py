"""From scores to probabilities, and when to answer "unsure".

Scores of documents that the scoring model had not seen give one temperature, and a curve: how often the most
confident share of answers was wrong. An error budget is then a point on that curve.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trm.arrays import Float32Array, FloatArray, IntArray

_TEMPERATURES = np.geomspace(0.02, 20, 241)
_MAX_POINTS = 200  # of a stored curve


@dataclass(frozen=True, slots=True)
class ErrorCurve:
    """Answers with at least `confidences[i]` were wrong in a share of at most `errors[i]`."""

    confidences: tuple[float, ...]  # falling
    errors: tuple[float, ...]
    decided: tuple[float, ...]  # the share of answers that are at least so confident

    def threshold(self, max_error: float) -> float:
        """Return the lowest confidence that keeps the budget; above 1 if no confidence does."""
        kept = [c for c, error in zip(self.confidences, self.errors, strict=True) if error <= max_error]
        return min(kept) if kept else 1.01


def softmax(scores: Float32Array | FloatArray, temperature: float) -> FloatArray:
    probabilities: FloatArray = np.exp(log_softmax(scores, temperature))
    return probabilities


def log_softmax(scores: Float32Array | FloatArray, temperature: float) -> FloatArray:
    scaled = scores.astype(np.float64) / temperature
    scaled -= scaled.max(1, keepdims=True)
    logarithms: FloatArray = scaled - np.log(np.exp(scaled).sum(1, keepdims=True))
    return logarithms


def fit_temperature(scores: Float32Array | FloatArray, categories: IntArray) -> float:
    """Return the temperature with the best log-likelihood of the right categories.

    Scores without a mistake would be best at temperature 0, which promises that there will never be one. So
    the right category is taken to have the probability n / (n + 1), as if one more document had been wrong.
    """
    num_rows, num_categories = scores.shape
    wrong = 1 / (num_rows + 1)
    targets = np.full(scores.shape, wrong / (num_categories - 1))
    targets[np.arange(num_rows), categories] = 1 - wrong
    losses = [-(targets * log_softmax(scores, temperature)).sum() for temperature in _TEMPERATURES]
    return float(_TEMPERATURES[int(np.argmin(losses))])


def fit_error_curve(probabilities: FloatArray, categories: IntArray) -> ErrorCurve:
    """Rank unseen answers by confidence, and bound the error of every prefix.

    One error is added to those that were counted: with few documents, a prefix without any error does not
    mean that there will be none.
    """
    confidence = probabilities.max(1)
    wrong = probabilities.argmax(1) != categories
    order = np.argsort(-confidence, kind="stable")
    sorted_confidence = confidence[order]
    decided = np.arange(1, len(order) + 1)
    bound = (np.cumsum(wrong[order]) + 1) / (decided + 1)
    ends = np.flatnonzero(
        np.append(np.diff(sorted_confidence) < 0, True)
    )  # equal confidences belong together
    if len(ends) > _MAX_POINTS:
        ends = ends[np.unique(np.linspace(0, len(ends) - 1, _MAX_POINTS).astype(np.int64))]
    return ErrorCurve(
        tuple(sorted_confidence[ends].tolist()),
        tuple(bound[ends].tolist()),
        tuple((decided[ends] / len(order)).tolist()),
    )


def expected_calibration_error(probabilities: FloatArray, categories: IntArray, num_bins: int = 15) -> float:
    """Return the mean distance between confidence and accuracy over bins of confidence."""
    confidence = probabilities.max(1)
    right = probabilities.argmax(1) == categories
    bins = np.minimum((confidence * num_bins).astype(np.int64), num_bins - 1)
    gaps = np.abs(np.bincount(bins, right - confidence, minlength=num_bins))
    return float(gaps.sum() / max(1, len(confidence)))
