"""Evaluate a model on unseen examples, as often as the recipe says."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from macbook_optimization.errors import AllocationFailed
from macbook_optimization.json_types import JsonObject
from macbook_optimization.units import counted
from trm.arrays import IntArray
from trm.backends.base import LanguageModel
from trm.batch import Batch
from trm.config import RunConfig
from trm.inference.search import Search
from trm.plan import EVALUATION_FACTOR
from trm.runs.rows import EvalRow
from trm.tasks.base import AnswerBatch, Generative, Metrics, Scorer
from trm.tasks.dataset import Split
from trm.tasks.metrics import exact_answers, shown_value
from trm.training.log import RunLog
from trm.training.resources import MemoryControl
from trm.training.shared_search import SharedLosses, SharedSearch, Sharing
from trm.training.state import TrainingState

_NOT_SHOWN = ("halt_accuracy",)  # beside the others, in a line


@dataclass(frozen=True, slots=True)
class Evaluation:
    examples: int
    metrics: Metrics  # from the task's scorer
    mean_steps: float
    accuracy_by_depth: list[float]  # exact accuracy after 1, 2, ... steps
    evaluation_seconds: float
    tasks_evaluated: int | None = None  # None where every example is a task of its own
    tasks_total: int | None = None

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
            tasks_evaluated=self.tasks_evaluated,
            tasks_total=self.tasks_total,
        )

    @property
    def coverage(self) -> str:
        """Return ", N of M tasks" where several examples belong to one task."""
        if self.tasks_total is None:
            return ""
        return f", {self.tasks_evaluated:,} of {counted(self.tasks_total, 'task')}"

    def described(self) -> str:
        """Return the metrics in one line."""
        shown = ((name, value) for name, value in self.metrics.scalars.items() if name not in _NOT_SHOWN)
        return "  ".join(
            f"{name.removesuffix('_accuracy')} {shown_value(name, value):>6}" for name, value in shown
        )


def evaluate(
    search: Search | SharedSearch,
    split: Split,
    scorer: Scorer,
    batch_size: int,
    limit: int | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, facts: None,
) -> Evaluation:
    """Score the answers to a split, or to `limit` of its examples, spread evenly over its groups.

    `progress` receives how many examples are done, of how many, and the inference step of the current batch;
    it may raise to stop.
    """
    started = time.monotonic()
    examples = _ordered(split, split.evaluation_order()[:limit])
    total = len(examples)
    depth = search.settings.depth
    exact_by_depth = np.zeros(depth, dtype=np.int64)
    steps = 0
    for start in range(0, total, batch_size):

        def after_step(attempt: int, step: int, done: int = start) -> None:
            progress(done, total, f"step {step}/{depth}" + (f" of retry {attempt}" if attempt else ""))

        batch = split.batch(examples[start : start + batch_size]).trimmed()
        answers = search.answer(batch, probabilities=scorer.needs_probabilities, after_step=after_step)
        exact_by_depth += exact_answers(answers.tokens, batch.labels).sum(-1)
        steps += int(answers.steps.sum())
        scorer.add(batch, answers.final())
        progress(start + len(batch), total, "")
    has_groups = split.num_groups < len(split)
    return Evaluation(
        examples=total,
        metrics=scorer.metrics(),
        mean_steps=steps / total,
        accuracy_by_depth=(exact_by_depth / total).tolist(),
        evaluation_seconds=time.monotonic() - started,
        tasks_evaluated=len(np.unique(split.groups(examples))) if has_groups else None,
        tasks_total=split.num_groups if has_groups else None,
    )


def evaluate_text(
    model: LanguageModel | SharedLosses,
    split: Split,
    scorer: Scorer,
    batch_size: int,
    limit: int | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, facts: None,
) -> Evaluation:
    """Score the predictions of a split, or of `limit` windows that are spread evenly over it.

    `progress` receives how many windows are done, of how many, and nothing else; it may raise to stop.
    """
    started = time.monotonic()
    total = min(limit or len(split), len(split))
    windows = np.linspace(0, len(split) - 1, total).astype(np.int64)
    for start in range(0, total, batch_size):
        batch = split.batch(windows[start : start + batch_size])
        scorer.add(batch, _answers(model, batch))
        progress(start + len(batch), total, "")
    return Evaluation(
        examples=total,
        metrics=scorer.metrics(),
        mean_steps=1.0,
        accuracy_by_depth=[],
        evaluation_seconds=time.monotonic() - started,
    )


def _answers(model: LanguageModel | SharedLosses, batch: Batch) -> AnswerBatch:
    count = len(batch)
    return AnswerBatch(
        tokens=batch.inputs,
        halt_logits=np.zeros(count, dtype=np.float32),
        steps=np.ones(count, dtype=np.int64),
        losses=model.token_losses(batch),
    )


def evaluation_settings(config: RunConfig, split: Split) -> JsonObject:
    """Return what decides an evaluation: only metrics with the same settings are comparable.

    Earlier versions took the first examples of a split. If groups make this a different choice, the
    settings say so.
    """
    limit = config.evaluation.examples
    settings = {**config.inference.model_dump(), "examples": limit, "data": dict(split.digests)}
    if limit is not None and (split.evaluation_order()[:limit] >= limit).any():
        settings["spread_over_tasks"] = True
    return settings


def _ordered(split: Split, examples: IntArray) -> IntArray:
    """Return examples in the order of their file, or the longest first: little of a batch is then padding."""
    in_file = np.sort(examples)
    if split.lengths is None:
        return in_file
    return in_file[np.argsort(-split.lengths[in_file].astype(np.int64), kind="stable")]


class Checks(NamedTuple):
    """Callbacks of an evaluation; both may raise to stop it."""

    within: Callable[[], None]  # after every inference step, on this rank; may also rest
    together: Callable[[], None]  # before every batch, on all ranks


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
        every = config.evaluation.every_steps
        if every is None or self.evaluated == step:
            return False
        return step >= config.training.last_step or step % every == 0

    def run(self, elapsed: Callable[[], float], checks: Checks) -> EvalRow:
        """Evaluate, record and show the result, which is that of the writer on every rank. `elapsed` returns
        the training time so far."""
        with self.log.timed("evaluation"):
            found = self._evaluate(checks)
        step = self.state.step
        seconds = elapsed()
        self.evaluated = step
        row = EvalRow(**self.state.world.broadcast(asdict(found.row(step, seconds))))
        self.log.row(row)
        self.log.message(
            f"step {step:6d}  {seconds:6.1f} s  {found.described()}  "
            f"on {counted(found.examples, 'unseen example')}{found.coverage}"
        )
        return row

    def _evaluate(self, checks: Checks) -> Evaluation:
        """Evaluate; after a failed allocation, start again with a smaller batch."""

        def progress(done: int, total: int, facts: str) -> None:
            self.log.display.update("evaluating", done, total, facts)
            checks.within()

        config = self.state.config
        task = self.state.feed.task
        sharing = None
        if self.state.world.size > 1:
            sharing = Sharing(self.state.world, self._batch_size, self._make_room, checks.together)
        while True:
            size = self._batch_size() if sharing is None else sharing.agreed_size()
            how = _How(task.scorer(self.split), size, config.evaluation.examples, progress)
            with suppress(AllocationFailed):
                if isinstance(task, Generative):
                    return evaluate_text(self._language_model(sharing), self.split, *how)
                return evaluate(self._search(sharing), self.split, *how)
            self._make_room()

    def _language_model(self, sharing: Sharing | None) -> LanguageModel | SharedLosses:
        model = self.state.learner.language_model()
        return model if sharing is None else SharedLosses(model, sharing)

    def _search(self, sharing: Sharing | None) -> Search | SharedSearch:
        data = self.state.feed.task.complete(self.split.spec)
        search = Search(self.state.learner.predictor(), self.state.config.inference, data)
        return search if sharing is None else SharedSearch(search, sharing)

    def _batch_size(self) -> int:
        return EVALUATION_FACTOR * self.memory.manager.batch_size

    def _make_room(self) -> None:
        self.memory.make_room(self.state.step)


class _How(NamedTuple):
    """Arguments of both kinds of evaluation."""

    scorer: Scorer
    batch_size: int
    limit: int | None
    progress: Callable[[int, int, str], None]
