"""The scorer of tasks in which several answers to one question are right."""

from __future__ import annotations

from collections.abc import Callable

from trm.arrays import IntArray
from trm.batch import Batch
from trm.tasks.base import AnswerBatch, Metrics
from trm.tasks.metrics import ExactMatch

VALID = "valid_accuracy"


class ValidAnswers:
    """Counts answers that obey the rules, beside those that equal the label."""

    needs_probabilities = False

    def __init__(self, verify: Callable[[IntArray, IntArray], str | None]) -> None:
        self.verify = verify
        self.exact = ExactMatch()
        self.num_valid = 0

    def add(self, batch: Batch, answers: AnswerBatch) -> None:
        self.exact.add(batch, answers)
        for question, answer in zip(batch.inputs, answers.tokens, strict=True):
            self.num_valid += self.verify(question, answer) is None

    def metrics(self) -> Metrics:
        share = self.num_valid / max(1, self.exact.examples)
        return Metrics({**self.exact.metrics().scalars, VALID: share})
