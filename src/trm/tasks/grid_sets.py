"""Where a grid task's examples come from: made until there are enough, or read from a file of puzzles.

No example is in both halves of a set, nor a copy of one as far as the task knows copies. Whatever the number
of jobs, the same examples come out.
"""

from __future__ import annotations

import csv
import gzip
import lzma
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from numpy.typing import NDArray

from macbook_optimization.errors import DataError
from macbook_optimization.worker_pool import ordered
from trm.tasks.base import IntArray, Progress

if TYPE_CHECKING:
    from trm.tasks.grids import GridOptions, Grids, GridTask

_CHUNK = 1000  # rows of a file
_FRUITLESS_CHUNKS = 20  # so many in a row without a new example: there are no more to be found
_QUESTION_NAMES = ("question", "puzzle", "quizzes", "quiz", "q")
_ANSWER_NAMES = ("answer", "solution", "solutions", "a")


@dataclass(frozen=True, slots=True)
class Examples:
    questions: Grids
    answers: Grids
    marks: NDArray[np.uint64]  # fingerprints
    difficulties: IntArray

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, some: Any) -> Examples:
        return Examples(self.questions[some], self.answers[some], self.marks[some], self.difficulties[some])


def joined(parts: Sequence[Examples]) -> Examples:
    fields = ("questions", "answers", "marks", "difficulties")
    return Examples(*(np.concatenate([getattr(part, field) for part in parts]) for field in fields))


def _examples(task: GridTask, questions: Grids, answers: Grids) -> Examples:
    marks, difficulties = task.fingerprints(questions, answers), task.difficulties(questions, answers)
    return Examples(questions, answers, marks, difficulties)


# Made


def generated(task: GridTask, asked: GridOptions, progress: Progress, jobs: int) -> dict[str, Examples]:
    halves: dict[str, Examples] = {}
    for options, wanted in task.kinds(asked):
        taken = joined(list(halves.values())).marks if halves else np.zeros(0, dtype=np.uint64)
        halves |= _distinct(task, options, wanted, taken, progress, jobs)
    return halves


def _distinct(
    task: GridTask,
    asked: GridOptions,
    wanted: Mapping[str, int],
    taken: NDArray[np.uint64],
    progress: Progress,
    jobs: int,
) -> dict[str, Examples]:
    """The fingerprint alone decides between train and test, so no order of generation can mix them. What
    `taken` has is in a half that was made by other options."""
    total, what = sum(wanted.values()), task.described(asked)
    chunk = min(task.chunk, max(total, 64))
    share = min(max(wanted.get("test", 0) / total, 0.05), 0.95)  # neither side waits for a rare one
    kept = {side: _Half(number) for side, number in wanted.items()}
    fruitless = done = 0
    jobs = min(jobs, math.ceil(total / chunk))
    with closing(ordered(partial(_made, task, asked, chunk), count(0, chunk), jobs)) as chunks:
        for every in chunks:
            made = every[~np.isin(every.marks, taken)]
            is_test = made.marks < np.uint64(share * 2**64)
            for side, half in kept.items():
                half.take(made[is_test == (side == "test")] if len(wanted) > 1 else made)
            before, done = done, sum(map(len, kept.values()))
            progress(f"generating {what}", done, total)
            if done == total:
                return {side: joined(half.parts) for side, half in kept.items()}
            fruitless = fruitless + 1 if done == before else 0
            if fruitless == _FRUITLESS_CHUNKS:
                break
    found = " and ".join(f"{len(half)} for {side}" for side, half in kept.items())
    raise DataError(
        f"Only {found} of the {what} were found; {' and '.join(map(str, wanted.values()))} were asked for",
        hint="Ask for fewer, easier ones, or a larger size.",
    )


def _made(task: GridTask, asked: GridOptions, number: int, first: int) -> Examples:
    return _examples(task, *task.generate(asked, number, first))


class _Half:
    """Examples with different questions, up to a number."""

    def __init__(self, number: int) -> None:
        self.number, self.parts, self.seen = number, list[Examples](), set[bytes]()

    def __len__(self) -> int:
        return len(self.seen)

    def take(self, made: Examples) -> None:
        new = []
        for i, question in enumerate(made.questions):
            if len(self) < self.number and (content := question.tobytes()) not in self.seen:
                self.seen.add(content)
                new.append(i)
        self.parts.append(made[new])


# Read: CSV with a header, CSV without one, or one puzzle a line; plain, gzip or xz


@dataclass(frozen=True, slots=True)
class Row:
    line: int  # counted from 1, for messages
    question: str
    answer: str | None
    source: str | None
    rating: str | None


def from_file(task: GridTask, asked: GridOptions, progress: Progress, jobs: int) -> dict[str, Examples]:
    assert asked.file is not None
    rows = read_rows(asked.file)
    order = np.random.Generator(np.random.Philox(asked.seed)).permutation(len(rows))
    ours = [rows[i] for i in order if asked.source in (None, rows[i].source)]
    others = [rows[i] for i in order if asked.test_source == rows[i].source] if asked.test_source else None
    num_train = asked.train or len(ours) - (asked.test if others is None else 0)
    num_test_rows = len(ours) - num_train if others is None else len(others)
    if num_train < 1 or num_train > len(ours) or num_test_rows < asked.test:
        wanted = f"{asked.train} for training" if asked.train else "at least one for training"
        sources = sorted({row.source for row in rows if row.source})
        raise DataError(
            f"{asked.file} has {len(ours)} puzzles"
            + ("" if others is None else f" for training and {len(others)} for testing")
            + f"; {wanted} and {asked.test} for testing were asked for",
            hint="Ask for fewer with --train and --test."
            + (f" Sources in the file: {', '.join(sources)}" if sources else ""),
        )
    check = partial(_verified, task, asked, progress=progress, jobs=jobs)
    train = check(ours[:num_train])
    return {
        "train": train,
        "test": _unlike(train, ours[num_train:] if others is None else others, asked, check),
    }


def _unlike(
    train: Examples, rows: list[Row], asked: GridOptions, check: Callable[[list[Row]], Examples]
) -> Examples:
    """The first rows that are no copy of a training example."""
    kept: list[Examples] = []
    chunk = min(_CHUNK, 2 * asked.test)  # few copies are expected, so mostly the first is enough
    for start in range(0, len(rows), chunk):
        examples = check(rows[start : start + chunk])
        kept.append(examples[~np.isin(examples.marks, train.marks)])
        if sum(map(len, kept)) >= asked.test:
            return joined(kept)[: asked.test]
    raise DataError(
        f"Only {sum(map(len, kept))} of the {len(rows)} test puzzles in {asked.file} differ from every "
        f"training puzzle; {asked.test} were asked for",
        hint="The others are symmetric copies of training puzzles.",
    )


def _verified(
    task: GridTask, asked: GridOptions, rows: list[Row], *, progress: Progress, jobs: int
) -> Examples:
    """Parsed, and with the answer that is stated, if it is right."""
    rows = sorted(rows, key=lambda row: row.line)
    chunks = [rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK)]
    parts: list[Examples] = []
    problems: list[str] = []
    progress("checking puzzles", 0, len(rows))
    for examples, wrong in ordered(partial(_checked, task, asked.size), chunks, min(jobs, len(chunks))):
        problems += wrong
        if examples is not None:
            parts.append(examples)
        progress("checking puzzles", sum(map(len, parts)), len(rows))
    if problems:
        more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
        shown = "\n  ".join(problems[:5]) + more
        raise DataError(
            f"{asked.file}: {shown}",
            hint=f"These are read as {asked.size}x{asked.size}; nothing was written.",
        )
    return joined(parts)


def _checked(task: GridTask, size: int, rows: list[Row]) -> tuple[Examples | None, list[str]]:
    """The examples, or what is wrong with them."""
    problems: list[str] = []
    parsed = [_parsed(task.parse, row, row.question, size, problems) for row in rows]
    ratings = [_rating(row, problems) for row in rows]
    if problems:
        return None, problems
    questions = np.stack([grid for grid in parsed if grid is not None])
    answers, wrong = task.solve(questions)
    for row, question, answer, problem in zip(rows, questions, answers, wrong, strict=True):
        if problem is not None:
            problems.append(f"line {row.line}: {problem}")
        elif row.answer is not None:
            stated = _parsed(task.parse_answer, row, row.answer, size, problems)
            if stated is not None and (stated != answer).any():
                several = task.several_answers and task.judge_grid(question, stated) is None
                if not several:
                    problems.append(f"line {row.line}: the stated answer is not the solution")
    if problems:
        return None, problems
    examples = _examples(task, questions, answers)
    rated = [rating for rating in ratings if rating is not None]
    if len(rated) == len(rows):
        examples = replace(examples, difficulties=np.array(rated, dtype=np.int64))
    return examples, []


def _parsed(
    parse: Callable[[str, int], Grids], row: Row, text: str, size: int, problems: list[str]
) -> Grids | None:
    try:
        return parse(text, size)
    except DataError as error:
        problems.append(f"line {row.line}: {error}")
        return None


def _rating(row: Row, problems: list[str]) -> int | None:
    if row.rating is None:
        return None
    try:
        return int(np.clip(float(row.rating), -(2**31), 2**31 - 1))
    except ValueError:
        problems.append(f"line {row.line}: the rating {row.rating!r} is no number")
        return None


def read_rows(path: Path) -> list[Row]:
    try:
        with _open_text(path) as file:
            reader = csv.reader(file)
            cells = [(reader.line_num, row) for row in reader if any(row)]
    except FileNotFoundError as error:
        raise DataError(f"There is no puzzle file {path}", hint="Name one with --from FILE.") from error
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a file of puzzles: {error}") from error
    if not cells:
        raise DataError(f"{path} is empty")
    header = [cell.strip().lower() for cell in cells[0][1]]
    if not set(header) & set(_QUESTION_NAMES):
        return [Row(line, row[0], _cell(row, 1), None, None) for line, row in cells]
    question, answer, source, rating = (
        _column(header, names) for names in (_QUESTION_NAMES, _ANSWER_NAMES, ("source",), ("rating",))
    )
    return [
        Row(line, _cell(row, question) or "", _cell(row, answer), _cell(row, source), _cell(row, rating))
        for line, row in cells[1:]
    ]


def _open_text(path: Path) -> TextIO:
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8-sig", newline="")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")  # spreadsheets write a byte order mark


def _column(header: Sequence[str], names: Sequence[str]) -> int | None:
    return next((header.index(name) for name in names if name in header), None)


def _cell(row: Sequence[str], column: int | None) -> str | None:
    return row[column] or None if column is not None and column < len(row) else None
