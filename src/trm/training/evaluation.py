"""Evaluate a model on unseen examples, as often as the recipe says."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from macbook_optimization.errors import AllocationFailed
from trm.inference.search import Search
from trm.plan import EVALUATION_FACTOR
from trm.runs.rows import EvalRow
from trm.tasks.base import Metrics, Scorer
from trm.tasks.dataset import Split
from trm.tasks.metrics import exact_answers
from trm.training.log import RunLog
from trm.training.resources import MemoryControl
from trm.training.signals import StopRequest
from trm.training.state import TrainingState

_NOT_SHOWN = ("halt_accuracy",)  # beside the others, in a line


@dataclass(frozen=True, slots=True)
class Evaluation:
    examples: int
    metrics: Metrics  # from the task's scorer
    mean_steps: float
    accuracy_by_depth: list[float]  # exact accuracy after 1, 2, ... steps
    evaluation_seconds: float

    def row(self, step: int, seconds: float) -> EvalRow:
        return EvalRow(
            step=step,
            seconds=seconds,
            examples=self.examples,
            metrics=self.metrics.scalars,
            tables=self.metrics.tables,
            mean_steps=self.mean_steps,
            accuracy_by_depth=self.accuracy_by_depth,
            evaluation_seconds=self.evaluation_seconds,
        )

    def described(self) -> str:
        """Return the metrics in one line."""
        shown = ((name, value) for name, value in self.metrics.scalars.items() if name not in _NOT_SHOWN)
        return "  ".join(f"{name.removesuffix('_accuracy')} {value:6.1%}" for name, value in shown)


def evaluate(
    search: Search,
    split: Split,
    scorer: Scorer,
    batch_size: int,
    examples: int | None = None,
    after_batch: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Score the answers to a split, or to its first `examples`.

    `after_batch` receives how many examples are done and of how many, and may raise to stop.
    """
    started = time.monotonic()
    total = min(len(split), examples or len(split))
    exact_by_depth = np.zeros(search.settings.depth, dtype=np.int64)
    steps = 0
    for start in range(0, total, batch_size):
        batch = split.batch(np.arange(start, min(start + batch_size, total))).trimmed()
        answers = search.answer(batch, probabilities=scorer.needs_probabilities)
        exact_by_depth += exact_answers(answers.tokens, batch.labels).sum(-1)
        steps += int(answers.steps.sum())
        scorer.add(batch, answers.final())
        after_batch(start + len(batch), total)
    return Evaluation(
        examples=total,
        metrics=scorer.metrics(),
        mean_steps=steps / total,
        accuracy_by_depth=(exact_by_depth / total).tolist(),
        evaluation_seconds=time.monotonic() - started,
    )


@dataclass
class Evaluator:
    """Evaluates a run on its test split as often as the recipe says."""

    state: TrainingState
    memory: MemoryControl
    log: RunLog
    split: Split
    evaluated: int = 0  # the last step whose weights were evaluated

    def is_due(self) -> bool:
        """Checked before each step and not after it, so that an interrupted evaluation is repeated."""
        config = self.state.config
        step = self.state.step
        is_last = step >= config.training.max_steps
        return self.evaluated != step and (is_last or step % config.evaluation.every_steps == 0)

    def run(self, elapsed: Callable[[], float], stop: StopRequest) -> EvalRow:
        """Evaluate, record and show the result. `elapsed` returns the training time so far."""
        found = self._evaluate(stop)
        step = self.state.step
        seconds = elapsed()
        self.evaluated = step
        row = found.row(step, seconds)
        self.log.row(row)
        self.log.message(
            f"step {step:6d}  {seconds:6.1f} s  {found.described()}  on {found.examples} unseen examples"
        )
        return row

    def _evaluate(self, stop: StopRequest) -> Evaluation:
        """Evaluate; after a failed allocation, start again with a smaller batch."""

        def after_batch(done: int, total: int) -> None:
            self.log.display.update("evaluating", done, total)
            stop.check()

        config = self.state.config
        task = self.state.feed.task
        search = Search(self.state.learner.predictor(), config.inference, task.complete(self.split.spec))
        while True:
            size = EVALUATION_FACTOR * self.memory.manager.batch_size
            scorer = task.scorer(self.split)
            with suppress(AllocationFailed):
                limit = config.evaluation.examples
                return evaluate(search, self.split, scorer, size, limit, after_batch)
            self.memory.make_room(self.state.step)
