"""Scorers that any task may use."""

from __future__ import annotations

import math

import numpy as np

from trm.arrays import BoolArray, Float32Array, FloatArray, IntArray, IntegerArray
from trm.batch import IGNORE_LABEL, Batch, exact_rows
from trm.tasks.base import AnswerBatch, Metrics

EXACT = "exact_accuracy"
ACCURACY = "accuracy"
TOKENS = "token_accuracy"
LOSS = "test_loss"
PERPLEXITY = "perplexity"
_MAX_EXPONENT = 700.0  # beyond it, the exponential is not a number that fits
_SMALLER_IS_BETTER = ("loss", "perplexity", "error")  # ends of the names of such metrics


def smaller_is_better(metric: str) -> bool:
    """Return the direction of a metric, which its name says: the one definition for runs, reports and tuning.

    Reports read runs of tasks whose code is not there, so the direction cannot be an attribute of the task.
    """
    return metric.endswith(_SMALLER_IS_BETTER)


def gain(metric: str, value: float, reference: float) -> float:
    """Return by how much a value is better than another one; negative if it is worse."""
    return reference - value if smaller_is_better(metric) else value - reference


def goodness(metric: str, value: float) -> float:
    """Return a number that is larger for better values, to compare and sort by."""
    return -value if smaller_is_better(metric) else value


def has_reached(metric: str, value: float | None, target: float | None) -> bool:
    return value is not None and target is not None and gain(metric, value, target) >= 0


def shown_value(metric: str, value: float) -> str:
    """Return a value for people: a share as a percentage, a loss as a number."""
    return f"{value:.4f}" if smaller_is_better(metric) else f"{value:.1%}"


def exact_answers(tokens: IntegerArray, labels: IntArray) -> BoolArray:
    """Return which rows of (..., n, L) have every labelled position right."""
    labelled = labels != IGNORE_LABEL
    correct = ((tokens == labels) & labelled).sum(-1)
    exact: BoolArray = exact_rows(correct, np.broadcast_to(labelled.sum(-1), correct.shape))
    return exact


class ExactMatch:
    """Counts answers that equal their labels, and labelled positions that do."""

    needs_probabilities = False

    def __init__(self) -> None:
        self.examples = 0
        self.exact = 0
        self.correct_tokens = 0
        self.labelled_tokens = 0
        self.halting_agrees = 0

    def add(self, batch: Batch, answers: AnswerBatch) -> None:
        labelled = batch.labels != IGNORE_LABEL
        exact = exact_answers(answers.tokens, batch.labels)
        self.examples += len(batch)
        self.exact += int(exact.sum())
        self.correct_tokens += int(((answers.tokens == batch.labels) & labelled).sum())
        self.labelled_tokens += int(labelled.sum())
        self.halting_agrees += int(((answers.halt_logits >= 0) == exact).sum())

    def metrics(self) -> Metrics:
        examples = max(1, self.examples)
        return Metrics(
            {
                EXACT: self.exact / examples,
                TOKENS: self.correct_tokens / max(1, self.labelled_tokens),
                "halt_accuracy": self.halting_agrees / examples,
            }
        )


class TextLoss:
    """The mean loss per token of text, and perplexity: its exponential."""

    needs_probabilities = False

    def __init__(self) -> None:
        self.total = 0.0
        self.tokens = 0

    def add(self, batch: Batch, answers: AnswerBatch) -> None:
        assert answers.losses is not None
        self.total += float(answers.losses.sum())
        self.tokens += int((batch.labels != IGNORE_LABEL).sum())

    def metrics(self) -> Metrics:
        loss = self.total / max(1, self.tokens)
        return Metrics({LOSS: loss, PERPLEXITY: math.exp(min(loss, _MAX_EXPONENT))})


class Classification:
    """Counts how often each category was taken for which: one labelled position per example.

    With probabilities, it also keeps those of every example, in the order of evaluation.
    """

    def __init__(self, num_categories: int, *, needs_probabilities: bool = False) -> None:
        self.needs_probabilities = needs_probabilities
        self.confusion = np.zeros((num_categories, num_categories), dtype=np.int64)  # label, answer
        self.probabilities: list[Float32Array] = []  # (n, num_categories) per batch
        self.labels: list[IntArray] = []

    def add(self, batch: Batch, answers: AnswerBatch) -> None:
        rows, positions = np.nonzero(batch.labels != IGNORE_LABEL)
        labels = batch.labels[rows, positions]
        np.add.at(self.confusion, (labels, answers.tokens[rows, positions]), 1)
        if self.needs_probabilities and answers.probabilities is not None:
            self.probabilities.append(answers.probabilities[rows, positions])
            self.labels.append(labels)

    def metrics(self) -> Metrics:
        per_category = category_scores(self.confusion)
        return Metrics(
            {
                ACCURACY: float(np.trace(self.confusion) / max(1, self.confusion.sum())),
                "macro_f1": macro_f1(self.confusion),
            },
            {"categories": per_category.tolist(), "confusion": self.confusion.astype(float).tolist()},
        )


def confusion_matrix(labels: IntArray, predicted: IntArray, num_categories: int) -> IntArray:
    """Count how often each category (row) was taken for which (column)."""
    confusion = np.zeros((num_categories, num_categories), dtype=np.int64)
    np.add.at(confusion, (labels, predicted), 1)
    return confusion


def macro_f1(confusion: IntArray) -> float:
    """Return the mean F1 of the categories that have examples: one without any has no recall."""
    present = confusion.sum(1) > 0
    return float(category_scores(confusion)[present, 2].mean()) if present.any() else 0.0


def category_scores(confusion: IntArray) -> FloatArray:
    """Return precision, recall, F1 and number of examples per category; 0 where one is undefined."""
    right = np.diagonal(confusion).astype(np.float64)
    answered = confusion.sum(0)
    labelled = confusion.sum(1)
    precision = right / np.maximum(answered, 1)
    recall = right / np.maximum(labelled, 1)
    f1 = 2 * right / np.maximum(answered + labelled, 1)
    return np.stack([precision, recall, f1, labelled], axis=1)
