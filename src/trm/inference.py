"""From a run to answers."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

from macbook_optimization.checkpoint_files import Checkpoint
from macbook_optimization.cpu_optimization import environment
from macbook_optimization.errors import DataError
from macbook_optimization.hardware_detection import HardwareDetector
from trm.backends.base import Answerer, load_backend
from trm.config import EvaluationConfig, RunConfig
from trm.runs import DEFAULT_PLAN, Plan, Run, check_compatible
from trm.tasks import load_task
from trm.tasks.base import IGNORE_LABEL, IntArray, Split, Task, TaskShape, open_split, shape_from


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The best checkpoint of a run, and what is known of it without loading torch."""

    config: RunConfig
    plan: Plan
    task: Task
    shape: TaskShape
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class Question:
    tokens: IntArray  # (L,)
    identifier: int = 0
    label: IntArray | None = None  # the right answer, where it is known


@dataclass(frozen=True, slots=True)
class Prediction:
    question: IntArray  # (L,)
    answers: IntArray  # (steps, L), the last one settled or at full depth
    confidence: float  # what the halting head believes of the last answer, 0 to 1
    problem: str | None  # the rule that the answer breaks


def open_model(path: Path) -> TrainedModel:
    run = Run(path)
    config = run.config
    checkpoint = run.checkpoints().best_or_newest()
    shape = shape_from(check_compatible(checkpoint, config).shape)
    return TrainedModel(config, run.plan or DEFAULT_PLAN, load_task(config.task), shape, checkpoint)


def load_answerer(model: TrainedModel) -> Answerer:
    """Takes the seconds that torch takes: ask what can be asked before it."""
    config = model.config
    threads = config.plan.threads or HardwareDetector().detect_cpu_specs().compute_threads  # of this machine
    os.environ.update(environment(threads))
    backend = load_backend()
    backend.prepare(threads=threads, deterministic=False)
    weights = model.checkpoint.load("ema" if config.training.ema else "weights")
    return backend.answerer(
        config.model_in(model.plan.precision), config.training, model.shape, weights, lanes=threads
    )


def predict(
    model: TrainedModel, answerer: Answerer, question: Question, thinking: EvaluationConfig
) -> Prediction:
    answers = answerer.answer(question.tokens[None], np.array([question.identifier]), thinking)
    steps = int(answers.steps[0])
    tokens = answers.tokens[:steps, 0].astype(np.int64)
    return Prediction(
        question=question.tokens,
        answers=tokens,
        confidence=(1 + math.tanh(answers.halt_logits[-1, 0] / 2)) / 2,
        problem=model.task.judge(question.tokens, tokens[-1], question.label),
    )


def open_test_set(model: TrainedModel, dataset: Path | None = None) -> Split:
    """The run's own test set, or another of the same shape."""
    path = dataset or model.config.data.path
    try:
        split = open_split(path, "test")
    except DataError as error:
        raise DataError(
            str(error), hint="Run this where the run was trained, or name a dataset with --data."
        ) from error
    if split.shape != model.shape:
        raise DataError(f"{path} does not fit the run: {split.shape} instead of {model.shape}")
    return split


def question_of_test_set(split: Split, number: int) -> Question:
    """Counted from 0."""
    if not 0 <= number < len(split):
        raise DataError(f"There is no test puzzle {number}; there are 0 to {len(split) - 1}")
    chosen = np.array([number])
    questions, labels = split.rows(chosen)
    known = (labels[0] != IGNORE_LABEL).any()
    return Question(questions[0], int(split.identifiers(chosen)[0]), labels[0] if known else None)


def describe(task: Task, prediction: Prediction, *, steps: bool, color: bool, width: int) -> str:
    """The answer for a person to read; with `steps`, every answer on the way to it."""
    answers = list(prediction.answers)
    pictures = [task.show(prediction.question, answers[-1], None, color)]
    if steps:
        pairs = zip([None, *answers], answers, strict=False)
        pictures = [
            f"step {i}{_what_changed(before, after)}\n" + task.show(prediction.question, after, before, color)
            for i, (before, after) in enumerate(pairs, start=1)
        ]
    verdict = task.solved if prediction.problem is None else f"not solved: {prediction.problem}"
    summary = f"{verdict} (after {len(answers)} steps)"
    legend = task.legend(steps, color)
    return f"{_side_by_side(pictures, width)}\n\n{summary}" + (f"\n{legend}" if legend else "")


def _what_changed(before: IntArray | None, after: IntArray) -> str:
    if before is None:
        return ""
    changes = int((before != after).sum())
    return f": {changes} changed" if changes else ": no change"


def _side_by_side(pictures: Sequence[str], width: int) -> str:
    """As many beside each other as the terminal has room for."""
    blocks = [picture.splitlines() for picture in pictures]
    widest = max(len(_plain(line)) for block in blocks for line in block) + 4
    per_row = max(1, width // widest)
    rows = []
    for start in range(0, len(blocks), per_row):
        lines = zip_longest(*blocks[start : start + per_row], fillvalue="")
        padded = ("".join(cell + " " * (widest - len(_plain(cell))) for cell in line) for line in lines)
        rows.append("\n".join(line.rstrip() for line in padded))
    return "\n\n".join(rows)


def _plain(text: str) -> str:
    return re.sub(r"\033\[[\d;]*m", "", text)
