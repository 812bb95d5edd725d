"""Examples of a grid task, read from a file of puzzles and verified.

No test example is a copy of a training example. All problems of a file are reported by line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from macbook_optimization.errors import DataError
from macbook_optimization.units import MIB, counted
from macbook_optimization.worker_pool import ordered
from trm.tasks.base import Progress
from trm.tasks.grids.examples import Examples, Grids, examples_of, join
from trm.tasks.grids.options import GridOptions, OptionsT
from trm.tasks.grids.puzzle_rows import Row, read_rows

if TYPE_CHECKING:
    from trm.tasks.grids.task import GridTask

_ROWS_PER_CHUNK = 1000
_MAX_SHOWN_PROBLEMS = 5
_INT32 = np.iinfo(np.int32)
Value = TypeVar("Value")
Solution: TypeAlias = tuple[
    Grids | None, str | None
]  # a grid, or why there is none; neither without a solver


def read_splits(
    task: GridTask[OptionsT], options: OptionsT, progress: Progress, jobs: int
) -> dict[str, Examples]:
    train_rows, test_rows = _select(_rows_of(options), options)
    verify = partial(_verified, task, options, progress=progress, jobs=jobs)
    train = verify(train_rows)
    return {"train": train, "test": _without_copies(test_rows, train, options, verify)}


def _rows_of(options: GridOptions) -> list[Row]:
    if options.file is None:
        raise ValueError("read_splits needs options with a file")
    return read_rows(options.file, options.size**2, options.max_input_mb * MIB)


def _select(rows: Sequence[Row], options: GridOptions) -> tuple[list[Row], list[Row]]:
    """Return the training rows and the test rows, which may be more than are needed, in random order."""
    order = np.random.Generator(np.random.Philox(options.seed)).permutation(len(rows))
    shuffled = [rows[i] for i in order]
    own = [row for row in shuffled if options.source in (None, row.source)]
    if options.test_source:
        num_train = options.train or len(own)
        test = [row for row in shuffled if row.source == options.test_source]
        counts = f"{counted(len(own), 'puzzle')} for training and {len(test)} for testing"
    else:
        num_train = options.train or len(own) - options.test
        test = own[max(0, num_train) :]
        counts = counted(len(own), "puzzle")
    if num_train < 1 or num_train > len(own) or len(test) < options.test:
        raise _too_few(rows, options, counts)
    return own[:num_train], test


def _too_few(rows: Sequence[Row], options: GridOptions, counts: str) -> DataError:
    training = f"{options.train} for training" if options.train else "at least one for training"
    hint = "Request fewer with --train and --test."
    sources = sorted({row.source for row in rows if row.source})
    if sources:
        hint += f" Sources in the file: {', '.join(sources)}"
    return DataError(
        f"{options.file} has {counts}; {training} and {options.test} for testing were requested", hint=hint
    )


def _without_copies(
    rows: list[Row], train: Examples, options: GridOptions, verify: Callable[[list[Row]], Examples]
) -> Examples:
    """Return the first test examples that are not copies of a training example."""
    kept: list[Examples] = []
    num_kept = 0
    chunk_size = min(_ROWS_PER_CHUNK, 2 * options.test)  # copies are rare, so one chunk is usually enough
    for start in range(0, len(rows), chunk_size):
        examples = verify(rows[start : start + chunk_size])
        kept.append(examples[~np.isin(examples.fingerprints, train.fingerprints)])
        num_kept += len(kept[-1])
        if num_kept >= options.test:
            return join(kept)[: options.test]
    raise DataError(
        f"Only {num_kept} of the {len(rows)} test puzzles in {options.file} differ from every training "
        f"puzzle; {options.test} were requested",
        hint="The others are symmetric copies of training puzzles.",
    )


def _verified(
    task: GridTask[OptionsT], options: OptionsT, rows: list[Row], *, progress: Progress, jobs: int
) -> Examples:
    """Return rows as examples, in the order of the file, or raise `DataError` with their problems."""
    rows = sorted(rows, key=lambda row: row.line)
    chunks = [rows[start : start + _ROWS_PER_CHUNK] for start in range(0, len(rows), _ROWS_PER_CHUNK)]
    verify = partial(_verify_chunk, task, options.size)
    parts: list[Examples] = []
    problems: list[str] = []
    progress("verifying puzzles", 0, len(rows))
    for examples, found in ordered(verify, chunks, min(jobs, len(chunks))):
        problems += found
        if examples is not None:
            parts.append(examples)
        progress("verifying puzzles", sum(map(len, parts)), len(rows))
    if problems:
        shown = problems[:_MAX_SHOWN_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        raise DataError(
            f"{options.file}: " + "\n  ".join(shown),
            hint=f"The puzzles are read as {options.size}x{options.size}; nothing was written.",
        )
    return join(parts)


def _verify_chunk(task: GridTask[OptionsT], size: int, rows: list[Row]) -> tuple[Examples | None, list[str]]:
    """Return the examples of some rows, or None and their problems."""
    parsed, problems = _collect(rows, lambda i: task.parse(rows[i].question, size))
    ratings, rating_problems = _collect(rows, lambda i: _rating(rows[i]))
    problems += rating_problems
    if problems:
        return None, problems
    questions = np.stack(parsed)
    solutions = _solve(task, questions)
    answers, problems = _collect(rows, lambda i: _answer(task, rows[i], questions[i], solutions[i]))
    if problems:
        return None, problems
    examples = examples_of(task, questions, np.stack(answers))
    rated = [rating for rating in ratings if rating is not None]
    if len(rated) == len(rows):
        examples = replace(examples, difficulties=np.array(rated, dtype=np.int64))
    return examples, []


def _collect(rows: Sequence[Row], read: Callable[[int], Value]) -> tuple[list[Value], list[str]]:
    """Apply a function to the index of every row; return the results, and the problems by line."""
    results = []
    problems = []
    for i, row in enumerate(rows):
        try:
            results.append(read(i))
        except DataError as error:
            problems.append(f"line {row.line}: {error}")
    return results, problems


def _solve(task: GridTask[OptionsT], questions: Grids) -> list[Solution]:
    if not task.has_solver:
        return [(None, None)] * len(questions)
    answers, problems = task.solve(questions)
    return list(zip(answers, problems, strict=True))


def _answer(task: GridTask[OptionsT], row: Row, question: Grids, solved: Solution) -> Grids:
    """Return the solution, or the stated answer if the task has no solver; the two must not disagree."""
    solution, problem = solved
    if problem is not None:
        raise DataError(problem)
    if row.answer is None:
        if solution is None:
            raise DataError(f"the answer is missing, and the task {task.name} has no solver")
        return solution
    stated = task.parse_grid(row.answer, len(question))
    if solution is not None and (stated == solution).all():
        return solution
    if solution is not None and not task.several_answers:
        raise DataError("the stated answer is not the solution")
    if problem := task.verify_grid(question, stated):
        raise DataError(f"the stated answer is wrong: {problem}")
    return stated if solution is None else solution


def _rating(row: Row) -> int | None:
    if row.rating is None:
        return None
    try:
        return int(np.clip(float(row.rating), _INT32.min, _INT32.max))
    except ValueError as error:
        raise DataError(f"the rating {row.rating!r} is not a number") from error
