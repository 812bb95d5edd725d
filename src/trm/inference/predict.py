"""From a run to answers that a person reads."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np

from macbook_optimization.checkpoint_files import Checkpoint
from macbook_optimization.checkpoint_management import Warn, python_warning
from macbook_optimization.errors import DataError
from macbook_optimization.hardware_detection import HardwareDetector
from macbook_optimization.units import counted
from trm.arrays import IntArray
from trm.backends.base import Program, Weights, is_installed, load_backend, tensor_library
from trm.backends.bounds import check_inference
from trm.batch import IGNORE_LABEL, PAD_TOKEN, Batch
from trm.config import InferenceConfig, RunConfig
from trm.inference.search import Search
from trm.plan import DEFAULT_PLAN, Execution, Plan, useful_workers
from trm.runs.directory import Run
from trm.runs.saved_state import check_compatible
from trm.tasks.base import DataSpec, Interactive, Question, Task
from trm.tasks.dataset import Split, complete_spec, open_split
from trm.tasks.registry import load_task

BATCH_SIZE = 64  # questions that are answered together


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The best checkpoint of a run, and what is known of it without loading a backend."""

    config: RunConfig
    plan: Plan
    task: Task
    data: DataSpec
    checkpoint: Checkpoint

    @property
    def execution(self) -> Execution:
        """The execution on this machine: the run's precision, with all of this machine's threads."""
        trained_with = self.plan.execution
        return replace(execution_of(self.config, trained_with), precision=trained_with.precision)

    def weights(self) -> Weights:
        """Load the weights that are used for inference."""
        library = tensor_library(self.execution.backend)
        return self.checkpoint.load("ema" if self.config.training.ema else "weights", library)


@dataclass(frozen=True, slots=True)
class Prediction:
    question: IntArray  # (L,)
    answers: IntArray  # (steps, L); the last one converged, or is at full depth
    confidence: float  # of the halting head in the last answer, 0 to 1
    problem: str | None  # the first mistake in the last answer


@dataclass(frozen=True, slots=True)
class Answer:
    """A prediction as plain values, in the task's own notation."""

    question: str
    answer: str
    valid: bool  # whether it answers the question, by the rules of the task or the known label
    problem: str | None  # the first mistake
    steps: tuple[str, ...]  # the answer after each step, the last one included
    confidence: float  # of the halting head, 0 to 1


def answer_of(task: Interactive, prediction: Prediction) -> Answer:
    return Answer(
        question=task.text(prediction.question),
        answer=task.text(prediction.answers[-1]),
        valid=prediction.problem is None,
        problem=prediction.problem,
        steps=tuple(task.text(answer) for answer in prediction.answers),
        confidence=prediction.confidence,
    )


def open_model(path: Path, warn: Warn = python_warning) -> TrainedModel:
    """Open the best checkpoint of a run. If it cannot be used, another is, and `warn` receives the reason."""
    run = Run(path)
    config = run.config
    checkpoint = run.checkpoints().best_or_newest(warn)
    task = load_task(config.task)
    data = task.complete(check_compatible(checkpoint, config).data_spec())
    return TrainedModel(config, run.plan or DEFAULT_PLAN, task, data, checkpoint)


def execution_of(config: RunConfig, trained_with: Execution = DEFAULT_PLAN.execution) -> Execution:
    """Return how this machine applies the model of a recipe: with all of its threads, unless it says less.

    A run may be used where it was not trained: PyTorch applies it on the CPU, also where the backend of the
    run is missing. With `auto`, the backend is the one that it was trained with.
    """
    threads = config.plan.threads or HardwareDetector().detect_cpu_specs().compute_threads
    settings = config.plan
    backend = trained_with.backend if settings.backend == "auto" else settings.backend
    wanted = trained_with.device if settings.device == "auto" else settings.device
    device = "cpu"
    if not is_installed(backend):
        backend = "pytorch"
    if backend != "pytorch":
        here = load_backend(Execution(backend=backend)).devices()
        device = wanted if wanted in here else here[-1]
    workers = useful_workers(threads, backend)
    return Execution(threads=threads, workers=workers, backend=backend, device=device)


def load_search(model: TrainedModel, settings: InferenceConfig, execution: Execution | None = None) -> Search:
    """Load the weights. This takes the seconds that the backend takes to import: validate inputs first."""
    program = Program.of(model.config, model.data)
    check_inference(program, settings)
    return search_with(program, settings, execution or model.execution, model.weights)


def search_with(
    program: Program, settings: InferenceConfig, execution: Execution, weights: Callable[[], Weights]
) -> Search:
    backend = load_backend(execution)
    backend.prepare(execution)
    return Search(backend.predictor(program, execution, weights()), settings, program.data)


def until_converged(settings: InferenceConfig, depth: int | None) -> dict[str, int | None]:
    """Return depth settings for single predictions: exactly `depth` steps, or until the answer converges.

    Exactly means that no rule of the recipe stops earlier; an option of the command may.
    """
    if depth is not None:
        return {"depth": depth, "converged_after": None, "halt": False}
    return {"depth": 4 * settings.depth, "converged_after": settings.converged_after or 2}


def interactive(model: TrainedModel) -> Interactive:
    if not isinstance(model.task, Interactive):
        raise DataError(f"The task {model.task.name} has no questions that can be typed or shown")
    return model.task


def predict(model: TrainedModel, search: Search, questions: Sequence[Question]) -> Iterator[Prediction]:
    """Answer questions in batches, in their order; the answers do not depend on how they are batched."""
    task = interactive(model)
    for start in range(0, len(questions), BATCH_SIZE):
        chunk = questions[start : start + BATCH_SIZE]
        answers = search.answer(batch_of(chunk, model.data.max_len))
        for row, question in enumerate(chunk):
            steps = int(answers.steps[row])
            tokens = answers.tokens[:steps, row, : len(question.tokens)].astype(np.int64)
            yield Prediction(
                question=question.tokens,
                answers=tokens,
                confidence=(1 + math.tanh(answers.halt_logits[-1, row] / 2)) / 2,
                problem=task.verify(question.tokens, tokens[-1], question.label),
            )


def batch_of(questions: Sequence[Question], max_len: int) -> Batch:
    """Return questions as a batch; those that are shorter than the longest possible one are padded."""
    lengths = np.array([len(question.tokens) for question in questions], dtype=np.int64)
    inputs = np.full((len(questions), max_len), PAD_TOKEN, dtype=np.int64)
    for row, question in enumerate(questions):
        inputs[row, : len(question.tokens)] = question.tokens
    batch = Batch(
        slots=np.arange(len(inputs)),
        inputs=inputs,
        labels=np.full_like(inputs, IGNORE_LABEL),
        puzzle_identifiers=np.array([question.identifier for question in questions], dtype=np.int64),
        fresh=np.ones(len(inputs), dtype=bool),
        lengths=None if (lengths == max_len).all() else lengths,
    )
    return batch.trimmed()


def open_test_set(model: TrainedModel, dataset: Path | None = None) -> Split:
    """Open the run's own test split, or another with the same spec."""
    path = dataset or model.config.data.path
    try:
        split = open_split(path, "test")
    except DataError as error:
        if path.is_dir():  # the error has a hint of its own
            raise
        raise DataError(
            str(error), hint="Run this where the run was trained, or name a dataset with --data."
        ) from error
    if complete_spec(model.task, split) != model.data:
        raise DataError(f"{path} does not fit the run: {_sizes(split.spec)} instead of {_sizes(model.data)}")
    return split


def _sizes(spec: DataSpec) -> str:
    classes = f" ({', '.join(spec.class_names)})" if spec.class_names else ""
    return (
        f"{counted(spec.max_len, 'position')}, {counted(spec.vocab_size, 'token')}, "
        f"{counted(spec.num_outputs, 'output')}{classes} and "
        f"{counted(spec.num_puzzle_identifiers, 'puzzle identifier')}"
    )


def question_of_test_set(split: Split, number: int) -> Question:
    """Return a test example, counted from 0."""
    if not 0 <= number < len(split):
        raise DataError(f"There is no test example {number}; there are 0 to {len(split) - 1}")
    batch = split.batch(np.array([number]))
    length = batch.inputs.shape[1] if batch.lengths is None else int(batch.lengths[0])
    label = batch.labels[0, :length]
    known = (label != IGNORE_LABEL).any()
    identifier = int(batch.puzzle_identifiers[0])
    return Question(batch.inputs[0, :length], identifier, label if known else None)


def describe(task: Interactive, prediction: Prediction, *, steps: bool, color: bool, width: int) -> str:
    """Render the answer for a person to read; with `steps`, every answer on the way to it."""
    answers = list(prediction.answers)
    shown = [task.show(prediction.question, answers[-1], None, color)]
    pictures = shown
    if steps:
        pairs = list(zip([None, *answers], answers, strict=False))
        shown = [task.show(prediction.question, after, before, color) for before, after in pairs]
        pictures = [
            f"step {i}{_what_changed(*pair)}\n{picture}"
            for i, (pair, picture) in enumerate(zip(pairs, shown, strict=True), start=1)
        ]
    verdict = task.verified if prediction.problem is None else f"not solved: {prediction.problem}"
    summary = f"{verdict} (after {counted(len(answers), 'step')})"
    legend = task.legend("\n".join(shown), steps, color)
    return f"{_side_by_side(pictures, width)}\n\n{summary}" + (f"\n{legend}" if legend else "")


def _what_changed(before: IntArray | None, after: IntArray) -> str:
    if before is None:
        return ""
    changes = int((before != after).sum())
    return f": {changes} changed" if changes else ": no change"


def _side_by_side(pictures: Sequence[str], width: int) -> str:
    """Arrange as many pictures per row as the terminal has room for."""
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
