"""Scorers that any task may use."""

from __future__ import annotations

import numpy as np

from trm.arrays import BoolArray, IntArray, IntegerArray
from trm.batch import IGNORE_LABEL, Batch, exact_rows
from trm.tasks.base import AnswerBatch, Metrics

EXACT = "exact_accuracy"


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
                "token_accuracy": self.correct_tokens / max(1, self.labelled_tokens),
                "halt_accuracy": self.halting_agrees / examples,
            }
        )
