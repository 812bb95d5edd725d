"""`trm predict`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from macbook_optimization.errors import DataError
from macbook_optimization.json_types import JsonObject
from trm.cli.common import PATH, inference_options, inference_settings, json_option, set_environment, show

if TYPE_CHECKING:
    from trm.arrays import IntArray
    from trm.inference.predict import Prediction, TrainedModel
    from trm.tasks.base import Interactive, Question


@click.command()
@click.argument("run", type=PATH)
@click.argument("puzzle", required=False)
@click.option("--example", type=int, help="Answer this example of the run's test set, counted from 0.")
@click.option("--data", "dataset", type=PATH, help="Dataset of --example [default: the run's own].")
@click.option("--steps", is_flag=True, help="Show how the answer changes from step to step.")
@click.option("--png", type=PATH, help="Draw the answer to this file, with wrong cells framed in red.")
@click.option("--gif", type=PATH, help="Draw to this file how the answer forms, one frame per step.")
@click.option(
    "--depth", type=click.IntRange(min=1), help="Exact number of steps [default: until the answer converges]."
)
@inference_options
@json_option
def predict(
    run: Path,
    puzzle: str | None,
    example: int | None,
    dataset: Path | None,
    steps: bool,
    png: Path | None,
    gif: Path | None,
    depth: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Solve PUZZLE with the best checkpoint of RUN; - reads one puzzle per line from standard input.

    Write one character per cell, row by row, with . or 0 for blanks.
    """
    from trm.inference.predict import describe, interactive, load_search, open_model, until_converged
    from trm.inference.predict import predict as predict_all

    if (puzzle is None) == (example is None):
        raise click.UsageError("Give a PUZZLE, - for standard input, or --example N.")
    model = open_model(run)
    task = interactive(model)
    questions = _questions(model, puzzle, example, dataset)
    if (png or gif) and len(questions) > 1:
        raise click.UsageError("--png and --gif draw one puzzle; several were given.")
    recipe = model.config.inference
    settings = inference_settings(recipe, options, until_converged(recipe, depth))
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = shutil.get_terminal_size().columns
    execution = model.execution
    set_environment(execution.threads)
    search = load_search(model, settings, execution)
    for question, prediction in zip(questions, predict_all(model, search, questions), strict=True):
        if png or gif:
            _draw(model, question, prediction.answers, png, gif)
        text = describe(task, prediction, steps=steps, color=color, width=width)
        show(_facts(task, prediction), as_json, text)


def _questions(
    model: TrainedModel, puzzle: str | None, example: int | None, dataset: Path | None
) -> list[Question]:
    from trm.inference.predict import interactive, open_test_set, question_of_test_set

    if example is not None:
        return [question_of_test_set(open_test_set(model, dataset), example)]
    task = interactive(model)
    sources = [(puzzle or "").encode()]
    if puzzle == "-":
        given = sys.stdin.buffer.read()
        sources = [line for line in given.splitlines() if line.strip()]
        if not task.one_question_per_line and given.strip():
            sources = [given]
        if not sources:
            raise DataError("There was no puzzle on standard input")
    return [_read(task, model, source, number) for number, source in enumerate(sources, start=1)]


def _read(task: Interactive, model: TrainedModel, source: bytes, number: int) -> Question:
    try:
        return task.read(source, model.data)
    except DataError as error:
        raise DataError(f"Puzzle {number}: {error}", hint=error.hint) from error


def _draw(
    model: TrainedModel, question: Question, answers: IntArray, png: Path | None, gif: Path | None
) -> None:
    from trm.tasks.base import Drawable
    from trm.tasks.grids.pictures import write_gif, write_png

    task = model.task
    if not isinstance(task, Drawable):
        raise DataError(f"The task {task.name} has no pictures", hint="Leave --png and --gif out.")
    label = task.solution(question.tokens) if question.label is None else question.label
    pictures = [task.picture(question.tokens, answer, label) for answer in answers]
    if png is not None:
        write_png(png, pictures[-1])
    if gif is not None:
        write_gif(gif, pictures)


def _facts(task: Interactive, prediction: Prediction) -> JsonObject:
    return {
        "question": task.text(prediction.question),
        "answer": task.text(prediction.answers[-1]),
        "valid": prediction.problem is None,
        "problem": prediction.problem,
        "steps": [task.text(answer) for answer in prediction.answers],
        "confidence": prediction.confidence,
    }
