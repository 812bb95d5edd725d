"""Answers of the best checkpoint as pictures, some right and some wrong.

This needs the backend, which takes seconds to load and may run out of memory, so a child process does it
within a time limit. It sends each picture as soon as it has one; after the limit, there are those drawn so
far.
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from macbook_optimization.children import ChildDied, Send, run_in_child
from macbook_optimization.cpu_optimization import environment
from macbook_optimization.errors import DataError, LaptopError
from macbook_optimization.hardware_detection import HardwareDetector
from macbook_optimization.units import counted

if TYPE_CHECKING:
    from trm.inference.predict import Prediction, TrainedModel
    from trm.tasks.base import Drawable, Question

MAX_PER_KIND = 3
TIMEOUT_SECONDS = 60.0
_MAX_QUESTIONS = 128
_BATCH_SIZE = 8
_SIDE_PIXELS = 320


@dataclass(frozen=True, slots=True)
class Example:
    number: int  # in the test set, counted from 0
    is_right: bool
    caption: str
    png: str  # base64


@dataclass(frozen=True, slots=True)
class Examples:
    shown: list[Example]
    num_right: int
    num_tried: int
    problem: str | None = None  # why there are none, or not all


def no_examples(reason: str) -> Examples:
    return Examples([], 0, 0, reason)


def find_examples(run: Path, timeout_seconds: float = TIMEOUT_SECONDS) -> Examples:
    """Answer test examples until there are enough right and wrong ones. Failures are part of the result."""
    rows: list[dict[str, Any]] = []
    problem = None
    try:
        run_in_child(
            f"{__name__}:draw_examples",
            {"run": os.fspath(run)},
            on_row=rows.append,
            environment=environment(HardwareDetector().detect_cpu_specs().compute_threads),
            timeout_seconds=timeout_seconds,
        )
    except ChildDied as death:
        limit = f"stopped after the limit of {timeout_seconds:.0f} s"
        problem = f"Drawing examples {limit if death.timed_out else death}."
    except LaptopError as error:
        problem = f"{str(error).rstrip('.')}."
    shown = [Example(**row["example"]) for row in rows if row["example"] is not None]
    return Examples(shown, sum(row["right"] for row in rows), len(rows), problem)


def draw_examples(run: str, send: Send) -> None:
    """Send one row per answer in a child process, with a picture while fewer of its kind have one."""
    from trm.inference.predict import load_search, open_model, open_test_set, predict, question_of_test_set

    model = open_model(Path(run), warn=lambda text: None)
    task = _drawable(model)
    split = open_test_set(model)
    settings = model.config.inference.model_copy(update={"retries": 0, "guesses": 0})
    search = load_search(model, settings)
    num_shown = {True: 0, False: 0}
    for begin in range(0, min(len(split), _MAX_QUESTIONS), _BATCH_SIZE):
        if min(num_shown.values()) >= MAX_PER_KIND:
            return
        numbers = range(begin, min(begin + _BATCH_SIZE, len(split)))
        questions = [question_of_test_set(split, number) for number in numbers]
        answers = predict(model, search, questions)
        for number, question, prediction in zip(numbers, questions, answers, strict=True):
            is_right = prediction.problem is None
            num_shown[is_right] += 1
            example = None
            if num_shown[is_right] <= MAX_PER_KIND:
                example = _example(task, number, question, prediction)
            send({"right": is_right, "example": example})


def _drawable(model: TrainedModel) -> Drawable:
    from trm.tasks.base import Drawable

    if not isinstance(model.task, Drawable):
        raise DataError(f"The task {model.task.name} has no pictures")
    return model.task


def _example(task: Drawable, number: int, question: Question, prediction: Prediction) -> dict[str, Any]:
    label = task.solution(question.tokens) if question.label is None else question.label
    return {
        "number": number,
        "is_right": prediction.problem is None,
        "caption": prediction.problem or f"right after {counted(len(prediction.answers), 'step')}",
        "png": _png(task, question, prediction, label),
    }


def _png(task: Drawable, question: Question, prediction: Prediction, label: Any) -> str:
    from trm.tasks.grids.pictures import draw

    image = draw(task.picture(question.tokens, prediction.answers[-1], label))
    image.thumbnail((_SIDE_PIXELS, _SIDE_PIXELS))
    content = BytesIO()
    image.quantize(64).save(content, "PNG", optimize=True)
    return base64.b64encode(content.getvalue()).decode("ascii")
