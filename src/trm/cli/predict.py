"""`trm predict`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from macbook_optimization.errors import DataError
from macbook_optimization.output_files import GIF, PNG, OutputFile
from macbook_optimization.units import counted
from trm.cli.common import (
    PATH,
    OutputOption,
    echo,
    force_option,
    inference_options,
    inference_settings,
    json_option,
    set_environment,
    show,
    showing,
    warn_on,
)
from trm.cli.lines import Line, batches_of_lines
from trm.cli.sampling import NAMES, refuse_options, sampling_options, write_text

if TYPE_CHECKING:
    from trm.arrays import IntArray
    from trm.inference.predict import Prediction, TrainedModel
    from trm.tasks.base import Interactive, Question

CHUNK_BYTES = 1 << 16
MAX_QUESTION_BYTES = 1 << 24  # of a task whose questions have several lines


@click.command()
@click.argument("run", type=PATH)
@click.argument("puzzle", required=False)
@click.option("--example", type=int, help="Answer this example of the run's test set, counted from 0.")
@click.option("--data", "dataset", type=PATH, help="Dataset of --example [default: the run's own].")
@click.option("--steps", is_flag=True, help="Show how the answer changes from step to step.")
@click.option(
    "--png", type=OutputOption(PNG), help="Draw the answer to this file, with wrong cells framed in red."
)
@click.option(
    "--gif", type=OutputOption(GIF), help="Draw to this file how the answer forms, one frame per step."
)
@force_option
@click.option(
    "--depth", type=click.IntRange(min=1), help="Exact number of steps [default: until the answer converges]."
)
@inference_options
@sampling_options
@json_option
def predict(
    run: Path,
    puzzle: str | None,
    example: int | None,
    dataset: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Solve PUZZLE with the best checkpoint of RUN; - reads one puzzle per line from standard input.

    Write one character per cell, row by row, with . or 0 for blanks. Lines are answered as they arrive; those
    that are not a puzzle are reported by number, and the exit code is 1 at the end. A language model
    continues PUZZLE as text, which is printed as it is written.
    """
    if (puzzle is None) == (example is None):
        raise click.UsageError("Give a PUZZLE, - for standard input, or --example N.")
    with showing("Reading the run") as display:
        from trm.inference.predict import open_model
        from trm.tasks.base import Generative

        model = open_model(run, warn_on(display))
    sampling = {name: options.pop(name) for name in NAMES}
    if isinstance(model.task, Generative):
        refuse_options({"example": example, **options}, "is for puzzles; this model writes text")
        write_text(model, model.task, puzzle or "", dataset, sampling, as_json)
        return
    refuse_options(sampling, "is for models that write text")
    output = _Output(model, as_json, **{name: options.pop(name) for name in ("steps", "png", "gif")})
    _solve(model, _batches(model, puzzle, example, dataset), output, **options)


def _solve(
    model: TrainedModel,
    entries: Iterator[list[Entry]],
    output: _Output,
    *,
    depth: int | None,
    **options: Any,
) -> None:
    from trm.inference.predict import load_search, until_converged
    from trm.inference.predict import predict as predict_all

    recipe = model.config.inference
    settings = inference_settings(recipe, options, until_converged(recipe, depth))
    num_bad = 0
    num_questions = 0
    search = None
    for batch in entries:
        questions = [question for _, question in batch if not isinstance(question, DataError)]
        num_questions += len(questions)
        num_bad += len(batch) - len(questions)
        if output.is_drawn and num_questions > 1:
            raise click.UsageError("--png and --gif draw one puzzle; several were given.")
        if questions and search is None:  # as late as possible: this takes seconds
            execution = model.execution
            set_environment(execution.threads)
            with showing(f"Loading {execution.library}"):
                search = load_search(model, settings, execution)
        predictions = iter(()) if search is None else predict_all(model, search, questions)
        for line, question in batch:
            if isinstance(question, DataError):
                output.show_bad(line, question)
            else:
                output.show(line, question, next(predictions))
    if num_bad:
        raise DataError(f"{num_bad:,} of {counted(num_bad + num_questions, 'puzzle')} could not be read")
    if not num_questions:
        raise DataError("There was no puzzle on standard input")


Entry = tuple[int | None, "Question | DataError"]  # a line of standard input, and what is in it


def _batches(
    model: TrainedModel, puzzle: str | None, example: int | None, dataset: Path | None
) -> Iterator[list[Entry]]:
    """Yield the questions that are answered together. Only a bad line among others is not raised."""
    from trm.inference.predict import BATCH_SIZE, interactive, open_test_set, question_of_test_set

    task = interactive(model)
    if example is not None:
        yield [(None, question_of_test_set(open_test_set(model, dataset), example))]
    elif puzzle != "-":
        yield [(None, task.read(os.fsencode(puzzle or ""), model.data))]
    elif task.one_question_per_line:
        for lines in batches_of_lines(partial(os.read, sys.stdin.fileno(), CHUNK_BYTES), BATCH_SIZE):
            yield [(line.number, _read_line(task, model, line)) for line in lines]
    else:
        content = sys.stdin.buffer.read(MAX_QUESTION_BYTES + 1)
        if len(content) > MAX_QUESTION_BYTES:
            raise DataError(f"The puzzle on standard input is longer than {MAX_QUESTION_BYTES:,} bytes")
        if content.strip():
            yield [(None, task.read(content, model.data))]


def _read_line(task: Interactive, model: TrainedModel, line: Line) -> Question | DataError:
    try:
        line.check_length()
        return task.read(line.content, model.data)
    except DataError as error:
        return error


class _Output:
    """Shows answers and bad lines in the order of the input."""

    def __init__(
        self, model: TrainedModel, as_json: bool, steps: bool, png: OutputFile | None, gif: OutputFile | None
    ) -> None:
        self.model = model
        self.as_json = as_json
        self.steps = steps
        self.png = png
        self.gif = gif
        self.color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self.width = shutil.get_terminal_size().columns

    @property
    def is_drawn(self) -> bool:
        return bool(self.png or self.gif)

    def show(self, line: int | None, question: Question, prediction: Prediction) -> None:
        from trm.inference.predict import answer_of, describe, interactive

        if self.is_drawn:
            _draw(self.model, question, prediction.answers, self.png, self.gif)
        task = interactive(self.model)
        text = describe(task, prediction, steps=self.steps, color=self.color, width=self.width)
        facts = {**asdict(answer_of(task, prediction)), "checkpoint": self.model.checkpoint.path.name}
        show(facts if line is None else {"line": line, **facts}, self.as_json, text, styled=self.color)

    def show_bad(self, line: int | None, error: DataError) -> None:
        if self.as_json:
            show({"line": line, "error": str(error)}, True, "")
        else:
            echo(f"line {line}: {error}", err=True)


def _draw(
    model: TrainedModel,
    question: Question,
    answers: IntArray,
    png: OutputFile | None,
    gif: OutputFile | None,
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
