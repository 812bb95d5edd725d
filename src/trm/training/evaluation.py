"""How well a model answers puzzles that it has never seen."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trm.backends.base import Answerer
from trm.config import EvaluationConfig
from trm.tasks.base import IGNORE_LABEL, Scorer, Split

EVALUATION_CUT = 4  # without gradients there is memory for at least so many micro-batches


@dataclass(frozen=True, slots=True)
class Evaluation:
    examples: int
    exact_accuracy: float  # every labelled position right
    token_accuracy: float
    halt_accuracy: float  # the halting head knows whether the answer is right
    mean_steps: float
    accuracy_by_depth: list[float]  # exact accuracy after 1, 2, ... steps
    scores: dict[str, float]  # the task's own figures
    evaluation_seconds: float

    def row(self) -> dict[str, Any]:
        """Flat, for metrics and --json."""
        facts = asdict(self)
        return {**facts.pop("scores"), **facts}

    def described(self) -> str:
        """The figures that a person looks at first."""
        scores = {"exact": self.exact_accuracy, **self.scores}
        return "  ".join(f"{name.removesuffix('_accuracy')} {value:6.1%}" for name, value in scores.items())


def evaluate(
    answerer: Answerer,
    split: Split,
    settings: EvaluationConfig,
    batch_size: int,
    after_chunk: Callable[[int, int], None] = lambda done, total: None,
    scorer: Scorer | None = None,
) -> Evaluation:
    """`after_chunk` hears how many examples are done, and may raise to stop."""
    started = time.monotonic()
    total = min(len(split), settings.examples or len(split))
    exact_by_depth = np.zeros(settings.depth, dtype=np.int64)
    right_tokens = tokens = knows = steps = 0
    for start in range(0, total, batch_size):
        examples = np.arange(start, min(start + batch_size, total))
        inputs, labels = split.rows(examples)
        identifiers = split.identifiers(examples)
        answers = answerer.answer(inputs, identifiers, settings)
        labelled = labels != IGNORE_LABEL
        right = (answers.tokens == labels) & labelled
        exact = (right.sum(-1) == labelled.sum(-1)) & labelled.any(-1)
        exact_by_depth += exact.sum(-1)
        right_tokens += int(right[-1].sum())
        tokens += int(labelled.sum())
        knows += int(((answers.halt_logits[-1] >= 0) == exact[-1]).sum())
        steps += int(answers.steps.sum())
        if scorer is not None:
            scorer.see(inputs, identifiers, answers.tokens[-1].astype(np.int64), answers.halt_logits[-1])
        after_chunk(int(examples[-1]) + 1, total)
    return Evaluation(
        examples=total,
        exact_accuracy=float(exact_by_depth[-1] / total),
        token_accuracy=right_tokens / max(1, tokens),
        halt_accuracy=knows / total,
        mean_steps=steps / total,
        accuracy_by_depth=(exact_by_depth / total).tolist(),
        scores=scorer.scores() if scorer is not None else {},
        evaluation_seconds=time.monotonic() - started,
    )
