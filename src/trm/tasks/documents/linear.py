"""The linear path: a table of n-gram weights, fitted by a convex solver.

Three ways to fit a table work on mail: a linear support vector machine, the same on features scaled by
naive-Bayes ratios, and complement naive Bayes. Each is linear in the bag, so their sum is one table. Which of
them are added is decided by cross-validation on the training set, where every document is scored by a table
that has not seen it. The same scores calibrate probabilities and train whatever is added to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from macbook_optimization.errors import LaptopError
from trm.arrays import Float32Array, FloatArray, IntArray
from trm.tasks.documents.bags import Bags

NUM_FOLDS = 5
SMOOTHING = 0.1  # added to the counts of naive Bayes
_SEED = 0  # of the solver, which shuffles


@dataclass(frozen=True, slots=True)
class Table:
    """Scores are bag @ weights + bias: one column per category."""

    weights: Float32Array  # (num_columns, num_categories)
    bias: Float32Array  # (num_categories,)

    def scores(self, bags: Bags) -> Float32Array:
        return bags.scores(self.weights, self.bias)

    def scaled(self, factor: float) -> Table:
        return Table((self.weights * factor).astype(np.float32), (self.bias * factor).astype(np.float32))


@dataclass(frozen=True, slots=True)
class LinearFit:
    """A table for new documents, and for the training set the scores of tables that had not seen them."""

    table: Table
    parts: tuple[str, ...]  # the names of the parts that were added
    unseen_scores: Float32Array  # (n, num_categories)

    @property
    def predicted(self) -> IntArray:
        predicted: IntArray = self.unseen_scores.argmax(1)
        return predicted


Fit = Callable[[Bags, IntArray, FloatArray, int], Table]


def fit_linear(
    bags: Bags, categories: IntArray, num_categories: int, weights: FloatArray, groups: IntArray
) -> LinearFit:
    """Fit every blend, and keep the one whose unseen scores are right most often, weighted by `weights`.

    A blend of more parts has to be better by more than one standard error of the difference to be kept.
    """
    folds = fold_of(groups)
    tables: dict[str, Table] = {}
    unseen: dict[str, Float32Array] = {}
    for name, fit in PARTS.items():
        table = fit(bags, categories, weights, num_categories)
        scores = np.zeros((len(bags), num_categories), dtype=np.float32)
        for fold in range(NUM_FOLDS):
            inside = np.flatnonzero(folds != fold)
            outside = np.flatnonzero(folds == fold)
            part = fit(bags.rows(inside), categories[inside], weights[inside], num_categories)
            scores[outside] = part.scores(bags.rows(outside))
        spread = max(float(scores.std()), 1e-6)
        tables[name] = table.scaled(1 / spread)
        unseen[name] = scores / spread
    chosen = _best_blend(unseen, categories, weights)
    total = Table(
        np.sum([tables[name].weights for name in chosen], axis=0),
        np.sum([tables[name].bias for name in chosen], axis=0),
    )
    return LinearFit(total, chosen, np.sum([unseen[name] for name in chosen], axis=0))


def fold_of(groups: IntArray) -> IntArray:
    """Return the fold of each row: the same for copies of a message, which are one group.

    A multiplicative hash spreads neighbours in a mailbox.
    """
    folds: IntArray = ((groups.astype(np.int64) * 2654435761 % 2**32) * NUM_FOLDS) >> 32
    return folds


def class_weights(categories: IntArray, num_categories: int, exponent: float) -> FloatArray:
    """Return a weight per example: (N / (C * n_c)) ** exponent, so rare categories count for more."""
    counts = np.maximum(np.bincount(categories, minlength=num_categories), 1)
    by_category = (len(categories) / (num_categories * counts)) ** exponent
    weights: FloatArray = by_category[categories]
    return weights


def _best_blend(
    unseen: dict[str, Float32Array], categories: IntArray, weights: FloatArray
) -> tuple[str, ...]:
    best = BLENDS[0]
    right = _right(unseen, best, categories)
    for blend in BLENDS[1:]:
        candidate = _right(unseen, blend, categories)
        gain = (candidate - right) * weights
        if gain.sum() > np.sqrt((gain**2).sum()):
            best = blend
            right = candidate
    return best


def _right(unseen: dict[str, Float32Array], blend: Sequence[str], categories: IntArray) -> FloatArray:
    scores = np.sum([unseen[name] for name in blend], axis=0)
    right: FloatArray = (scores.argmax(1) == categories).astype(np.float64)
    return right


def _fit_hinge(bags: Bags, categories: IntArray, weights: FloatArray, num_categories: int) -> Table:
    svm, sparse = _libraries()
    present = np.unique(categories)
    if len(present) < 2:  # nothing to tell apart: a fold of a small mailbox
        bias = np.full(num_categories, -1.0, dtype=np.float32)
        bias[present] = 0.0
        return Table(np.zeros((bags.num_columns, num_categories), dtype=np.float32), bias)
    shape = (len(bags), bags.num_columns)
    matrix = sparse.csr_matrix((bags.weights.astype(np.float64), bags.indices, bags.starts), shape=shape)
    solver = svm.LinearSVC(C=1.0, random_state=_SEED)
    solver.fit(matrix, categories, sample_weight=weights)
    table = np.zeros((bags.num_columns, num_categories), dtype=np.float32)
    bias = np.full(num_categories, -1.0, dtype=np.float32)  # of a category without examples
    if len(solver.classes_) == 2:
        coefficients = np.concatenate([-solver.coef_, solver.coef_]) / 2
        intercepts = np.concatenate([-solver.intercept_, solver.intercept_]) / 2
    else:
        coefficients, intercepts = solver.coef_, solver.intercept_
    table[:, solver.classes_] = coefficients.T
    bias[solver.classes_] = intercepts
    return Table(table, bias)


def _fit_ratio_hinge(bags: Bags, categories: IntArray, weights: FloatArray, num_categories: int) -> Table:
    """Fit a support vector machine per category on features scaled by their log ratio (NB-SVM)."""
    sums = _sums(bags, categories, weights, num_categories) + SMOOTHING
    total = sums.sum(1, keepdims=True)
    table = np.zeros((bags.num_columns, num_categories), dtype=np.float32)
    bias = np.full(num_categories, -1.0, dtype=np.float32)
    columns = range(1, 2) if num_categories == 2 else range(num_categories)
    for category in columns:
        inside = sums[:, category] / sums[:, category].sum()
        outside = (total[:, 0] - sums[:, category]) / (total[:, 0] - sums[:, category]).sum()
        ratio = np.log(inside / outside).astype(np.float32)
        scaled = Bags(bags.starts, bags.indices, bags.weights * ratio[bags.indices], bags.num_columns)
        is_category = (categories == category).astype(np.int64)
        if is_category.min() == is_category.max():
            continue
        fitted = _fit_hinge(scaled, is_category, weights, 2)
        table[:, category] = fitted.weights[:, 1] * ratio * 2
        bias[category] = fitted.bias[1] * 2
    if num_categories == 2:
        table[:, 1] /= 2
        table[:, 0] = -table[:, 1]
        bias[1] /= 2
        bias[0] = -bias[1]
    return Table(table, bias)


def _fit_complement_bayes(
    bags: Bags, categories: IntArray, weights: FloatArray, num_categories: int
) -> Table:
    """Fit complement naive Bayes: a category scores by how little its words occur in the others."""
    sums = _sums(bags, categories, weights, num_categories)
    complement = sums.sum(1, keepdims=True) - sums + SMOOTHING
    log_share = np.log(complement / complement.sum(0, keepdims=True))
    normed = log_share / np.abs(log_share).sum(0, keepdims=True)
    return Table((-normed).astype(np.float32), np.zeros(num_categories, dtype=np.float32))


def _sums(bags: Bags, categories: IntArray, weights: FloatArray, num_categories: int) -> FloatArray:
    """Return the weighted sum of every column per category."""
    rows = np.repeat(np.arange(len(bags)), bags.starts[1:] - bags.starts[:-1])
    flat = bags.indices * num_categories + categories[rows]
    size = bags.num_columns * num_categories
    sums = np.zeros(size)
    np.add.at(sums, flat, bags.weights * weights[rows])
    return sums.reshape(bags.num_columns, num_categories)


def _libraries() -> tuple[Any, Any]:
    try:
        import scipy.sparse
        import sklearn.svm
    except ModuleNotFoundError as error:
        raise LaptopError(
            f"The Python package {error.name} is missing; training on mail needs it.",
            hint="Install it: python -m pip install scikit-learn",
        ) from error
    return sklearn.svm, scipy.sparse


PARTS: dict[str, Fit] = {
    "hinge": _fit_hinge,
    "ratio_hinge": _fit_ratio_hinge,
    "complement_bayes": _fit_complement_bayes,
}
BLENDS: tuple[tuple[str, ...], ...] = (("hinge",), ("hinge", "ratio_hinge"), tuple(PARTS))
