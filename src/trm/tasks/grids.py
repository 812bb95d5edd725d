"""Puzzles on a square grid: what Sudoku, mazes and a task of your own have in common.

A grid holds symbols, counted from 0; the token of symbol s is s + 1, and token 0 is padding, as in the public
code. A task says what its symbols look like, makes examples, and judges answers. The rest is here: datasets
whose halves share no example, files of puzzles, and grids that a person can type and read.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import lzma
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from macbook_optimization.errors import DataError
from trm.config import Count, CountOrZero, Section, parse_section
from trm.tasks.base import DatasetWriter, IntArray, Picture, Progress, TaskShape, Tile

Grids = NDArray[np.int8 | np.uint8]  # (examples, size, size) of symbols
Pairs = tuple[Grids, Grids]  # questions and their answers

_CHUNK = 1000
_FRUITLESS_CHUNKS = 20  # so many in a row without a new example: there are no more to be found
_QUESTION_NAMES = ("question", "puzzle", "quizzes", "quiz", "q")
_ANSWER_NAMES = ("answer", "solution", "solutions", "a")


class GridOptions(Section):
    """`data.build` of a recipe. A task may add options of its own."""

    size: Count = 9
    train: Count | None = None  # default 2,000; from a file, all that are not in the test set
    test: Count = 256
    seed: CountOrZero = 0
    file: Path | None = Field(None, alias="from")
    source: str | None = None  # of the file's rows, those with this `source`
    test_source: str | None = None  # test puzzles from these rows instead

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        if self.file is None and (self.source or self.test_source):
            raise ValueError("source and test_source choose rows of a file, so they need `from`")
        return self


class GridTask(ABC):
    """To be derived from: `name`, `symbols`, `generate` and `judge_grid` make a task."""

    name: str
    Options: type[GridOptions] = GridOptions
    num_draws: int = 0  # random numbers that one augmentation takes
    several_answers: bool = False  # whether other answers than the label can be right

    @abstractmethod
    def symbols(self, size: int) -> str:
        """One character for each symbol of a grid of this size."""

    @abstractmethod
    def generate(self, asked: Any, count: int, first: int) -> Pairs:
        """So many examples, by the options alone: each value of `first` gives others."""

    @abstractmethod
    def judge_grid(self, question: Grids, answer: Grids) -> str | None:
        """None if the answer (size, size) obeys the rules; otherwise the first rule that it breaks."""

    def fingerprints(self, questions: Grids, answers: Grids) -> NDArray[np.uint64]:
        """Equal for examples that must not be on both sides; by itself, for equal questions."""
        return np.array([_hash(question) for question in questions], dtype=np.uint64)

    def difficulties(self, questions: Grids, answers: Grids) -> IntArray:
        """For a curriculum: by itself, how many cells have to be found."""
        return np.asarray((questions != answers).sum((1, 2)))

    def transformed(self, questions: IntArray, answers: IntArray, draws: NDArray[np.float64]) -> Any:
        """A random symmetric copy of each example, as tokens (B, size, size). By itself there are none."""
        return questions, answers

    def problem_of(self, question: Grids) -> str | None:
        """Why this is no question, if it is none."""
        return None

    def solve(self, questions: Grids) -> tuple[Grids, list[str | None]]:
        """The answers to questions that came without one, and what is wrong with them."""
        raise DataError(
            f"The task {self.name} cannot find answers itself; the file needs a column for them",
            hint="Name the columns question and answer.",
        )

    # What a Task must do

    def shape(self, options: Mapping[str, Any]) -> TaskShape:
        return self._shape(parse_section(self.Options, options, "data.build").size)

    def _shape(self, size: int) -> TaskShape:
        num_tokens = len(self.symbols(size)) + 1
        return TaskShape(size * size, num_tokens, num_tokens, num_puzzle_identifiers=1)

    def build(self, options: Mapping[str, Any], directory: Path, progress: Progress) -> None:
        asked = parse_section(self.Options, options, "data.build")
        pairs = self._from_file(asked, progress) if asked.file else self.generated(asked, progress)
        shape = self._shape(asked.size)
        made_by = {"task": self.name, "options": asked.model_dump(mode="json", by_alias=True)}
        with DatasetWriter(directory, made_by) as writer:
            for name, (questions, answers) in pairs.items():
                split = writer.split(name, shape.seq_len, shape.vocab_size)
                rated = self.difficulties(questions, answers)
                split.add_examples(_tokens(questions), _tokens(answers), rated)

    def check(self, shape: TaskShape) -> None:
        size = self.size_of(shape.seq_len)
        expected = self._shape(size).vocab_size
        if (shape.vocab_size, shape.output_vocab_size) != (expected, expected):
            raise DataError(
                f"A {size}x{size} {self.name} has {expected} tokens; this set has {shape.vocab_size}"
            )

    def size_of(self, seq_len: int) -> int:
        size = math.isqrt(seq_len)
        if size * size != seq_len:
            raise DataError(f"{seq_len} cells are no square grid")
        return size

    def augment(
        self, inputs: IntArray, labels: IntArray, draws: NDArray[np.float64]
    ) -> tuple[IntArray, IntArray]:
        size = self.size_of(inputs.shape[1])
        questions, answers = (array.reshape(-1, size, size) for array in (inputs, labels))
        question, answer = self.transformed(questions, answers, draws)
        return question.reshape(inputs.shape), answer.reshape(labels.shape)

    def encode(self, text: str, shape: TaskShape) -> IntArray:
        grid = self.parse(text, self.size_of(shape.seq_len))
        return (grid.astype(np.int64) + 1).reshape(-1)

    def decode(self, tokens: IntArray) -> str:
        symbols = self.symbols(self.size_of(len(tokens)))
        return "".join(symbols[max(token - 1, 0)] for token in tokens)

    def parse(self, text: str, size: int) -> Grids:
        """A puzzle as people write it: one character a cell, row by row."""
        return self.checked(parse_cells("".join(text.split()), self.symbols(size), size))

    def checked(self, grid: Grids) -> Grids:
        if problem := self.problem_of(grid):
            raise DataError(f"The puzzle contradicts itself: {problem}")
        return grid

    def show(self, question: IntArray, answer: IntArray, before: IntArray | None, color: bool) -> str:
        size = self.size_of(len(question))
        symbols = self.symbols(size)
        cells = [
            self.cell(symbols, int(question[i]) - 1, int(answer[i]) - 1, _differs(before, answer, i), color)
            for i in range(size * size)
        ]
        return self.drawn([cells[i * size : (i + 1) * size] for i in range(size)])

    def cell(self, symbols: str, asked: int, answered: int, changed: bool, color: bool) -> str:
        """One cell of the picture; all are equally wide."""
        symbol = symbols[max(answered, 0)]
        if not changed:
            return f"{symbol} "
        return f"\033[32m{symbol}\033[0m " if color else f"{symbol}*"

    def drawn(self, rows: list[list[str]]) -> str:
        return "\n".join("".join(row) for row in rows)

    def legend(self, changes: bool, color: bool) -> str:
        return f"changes are {'green' if color else 'starred'}" if changes else ""

    def picture(self, question: IntArray, answer: IntArray, label: IntArray | None) -> Picture:
        size = self.size_of(len(question))
        known = label is not None and self.judge(question, answer) is not None
        wrong = np.zeros(len(answer), dtype=bool)
        if known and label is not None:
            wrong = (answer != label) & (label > 0)
        symbols = self.symbols(size)
        tiles = [
            self.tile(symbols, int(question[i]) - 1, int(answer[i]) - 1, bool(wrong[i]))
            for i in range(size * size)
        ]
        return Picture([tiles[i * size : (i + 1) * size] for i in range(size)], self.box(size))

    def tile(self, symbols: str, asked: int, answered: int, wrong: bool) -> Tile:
        same = asked == answered
        fill = (235, 235, 235) if same else (255, 255, 255)
        return Tile(fill, symbols[max(answered, 0)], (0, 0, 0) if same else (30, 80, 200), wrong)

    def box(self, size: int) -> tuple[int, int]:
        return 0, 0

    def right_answer(self, question: IntArray) -> IntArray | None:
        size = self.size_of(len(question))
        try:
            answers, problems = self.solve((question - 1).reshape(1, size, size).astype(np.int8))
        except DataError:  # it needs labels
            return None
        return None if problems[0] else answers[0].reshape(-1).astype(np.int64) + 1

    def judge(self, question: IntArray, answer: IntArray) -> str | None:
        size = self.size_of(len(question))
        asked, answered = ((tokens - 1).reshape(size, size).astype(np.int8) for tokens in (question, answer))
        return self.judge_grid(asked, answered)

    @property
    def headline(self) -> str:
        return "valid_accuracy" if self.several_answers else "exact_accuracy"

    def scorer(self, dataset: Path) -> Valid | None:
        return Valid(self.judge) if self.several_answers else None

    # Datasets

    def generated(self, asked: Any, progress: Progress) -> dict[str, Pairs]:
        wanted = {"train": asked.train or 2000, "test": asked.test}
        what = f"{asked.size}x{asked.size} examples"
        return self.distinct(lambda count, first: self.generate(asked, count, first), wanted, what, progress)

    def distinct(
        self, make: Callable[[int, int], Pairs], wanted: Mapping[str, int], what: str, progress: Progress
    ) -> dict[str, Pairs]:
        """The fingerprint alone decides between train and test, so no order of generation can mix them."""
        total = sum(wanted.values())
        kept: dict[str, dict[bytes, tuple[Grids, Grids]]] = {side: {} for side in wanted}
        fruitless = first = 0
        chunk = min(_CHUNK, max(total, 64))
        share = min(max(wanted.get("test", 0) / total, 0.05), 0.95)  # neither side waits for a rare one
        while True:
            questions, answers = make(chunk, first)
            first += chunk
            before = sum(map(len, kept.values()))
            marks = self.fingerprints(questions, answers) < np.uint64(share * 2**64)
            for question, answer, is_test in zip(questions, answers, marks, strict=True):
                side = ("test" if is_test else "train") if len(wanted) > 1 else next(iter(wanted))
                if len(kept[side]) < wanted[side]:
                    kept[side].setdefault(question.tobytes(), (question, answer))
            done = sum(map(len, kept.values()))
            progress(f"generating {what}", done, total)
            if done == total:
                return {side: _stacked(list(pairs.values())) for side, pairs in kept.items()}
            fruitless = fruitless + 1 if done == before else 0
            if fruitless == _FRUITLESS_CHUNKS:
                found = " and ".join(f"{len(pairs)} for {side}" for side, pairs in kept.items())
                raise DataError(
                    f"Only {found} of the {what} were found; "
                    f"{' and '.join(map(str, wanted.values()))} were asked for",
                    hint="Ask for fewer, easier ones, or a larger size.",
                )

    def _from_file(self, asked: GridOptions, progress: Progress) -> dict[str, Pairs]:
        assert asked.file is not None
        rows = read_rows(asked.file)
        order = np.random.Generator(np.random.Philox(asked.seed)).permutation(len(rows))
        ours = [rows[i] for i in order if asked.source in (None, rows[i].source)]
        others = (
            [rows[i] for i in order if asked.test_source == rows[i].source] if asked.test_source else None
        )
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
        train = self._verified(ours[:num_train], asked, progress)
        test = self._unlike(train, ours[num_train:] if others is None else others, asked, progress)
        return {"train": train, "test": test}

    def _unlike(self, train: Pairs, rows: list[Row], asked: GridOptions, progress: Progress) -> Pairs:
        """The first rows that are no copy of a training example."""
        seen = self.fingerprints(*train)
        kept: list[tuple[Grids, Grids]] = []
        chunk = min(_CHUNK, 2 * asked.test)  # few copies are expected, so mostly the first is enough
        for start in range(0, len(rows), chunk):
            pairs = self._verified(rows[start : start + chunk], asked, progress)
            new = ~np.isin(self.fingerprints(*pairs), seen)
            kept += list(zip(pairs[0][new], pairs[1][new], strict=True))
            if len(kept) >= asked.test:
                return _stacked(kept[: asked.test])
        raise DataError(
            f"Only {len(kept)} of the {len(rows)} test puzzles in {asked.file} differ from every training "
            f"puzzle; {asked.test} were asked for",
            hint="The others are symmetric copies of training puzzles.",
        )

    def _verified(self, rows: list[Row], asked: GridOptions, progress: Progress) -> Pairs:
        """Parsed, and with the answer that is stated, if it is right."""
        problems: list[str] = []
        rows = sorted(rows, key=lambda row: row.line)
        grids = [self._parsed(row, row.question, asked.size, problems) for row in rows]
        _raise_if(problems, asked)
        questions = np.stack([grid for grid in grids if grid is not None])
        parts: list[Grids] = []
        for start in range(0, len(rows), _CHUNK):
            progress("checking puzzles", start, len(rows))
            some = slice(start, start + _CHUNK)
            parts.append(self._answers(rows[some], questions[some], asked.size, problems))
        progress("checking puzzles", len(rows), len(rows))
        _raise_if(problems, asked)
        return questions, np.concatenate(parts)

    def _answers(self, rows: list[Row], questions: Grids, size: int, problems: list[str]) -> Grids:
        answers, wrong = self.solve(questions)
        for row, question, answer, problem in zip(rows, questions, answers, wrong, strict=True):
            if problem is not None:
                problems.append(f"line {row.line}: {problem}")
            elif row.answer is not None:
                stated = self._parsed(row, row.answer, size, problems, is_answer=True)
                if stated is not None and (stated != answer).any():
                    several = self.several_answers and self.judge_grid(question, stated) is None
                    if not several:
                        problems.append(f"line {row.line}: the stated answer is not the solution")
        return answers

    def _parsed(
        self, row: Row, text: str, size: int, problems: list[str], *, is_answer: bool = False
    ) -> Grids | None:
        try:
            return self.parse_answer(text, size) if is_answer else self.parse(text, size)
        except DataError as error:
            problems.append(f"line {row.line}: {error}")
            return None

    def parse_answer(self, text: str, size: int) -> Grids:
        return self.parse(text, size)


class Valid:
    """How many answers obey the rules, whether or not they are the label."""

    def __init__(self, judge: Callable[[IntArray, IntArray], str | None]) -> None:
        self.judge = judge
        self.valid: list[bool] = []

    def see(self, inputs: IntArray, identifiers: IntArray, answers: IntArray, beliefs: Any) -> None:
        self.valid += [self.judge(q, a) is None for q, a in zip(inputs, answers, strict=True)]

    def scores(self) -> dict[str, float]:
        return {"valid_accuracy": float(np.mean(self.valid))}


def parse_cells(cells: str, symbols: str, size: int) -> Grids:
    if len(cells) != size * size:
        raise DataError(
            f"A {size}x{size} puzzle has {size * size} cells; this one has {len(cells)}",
            hint="Write one character a cell, row by row.",
        )
    if wrong := sorted(set(cells) - set(symbols)):
        raise DataError(
            f"{', '.join(map(repr, wrong))} cannot stand in a {size}x{size} puzzle",
            hint=f"Use these characters: {' '.join(map(repr, symbols))}",
        )
    return np.array([symbols.index(cell) for cell in cells], dtype=np.int8).reshape(size, size)


def _hash(grid: Grids) -> int:
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(grid).tobytes(), digest_size=8).digest())


def _tokens(grids: Grids) -> NDArray[np.uint8]:
    return (grids.reshape(len(grids), -1) + 1).astype(np.uint8)


def _differs(before: IntArray | None, after: IntArray, cell: int) -> bool:
    return before is not None and bool(before[cell] != after[cell])


def _stacked(pairs: list[tuple[Grids, Grids]]) -> Pairs:
    questions, answers = zip(*pairs, strict=True)
    return np.stack(questions), np.stack(answers)


def _raise_if(problems: list[str], asked: GridOptions) -> None:
    if problems:
        more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
        shown = "\n  ".join(problems[:5]) + more
        raise DataError(
            f"{asked.file}: {shown}",
            hint=f"These are read as {asked.size}x{asked.size}; nothing was written.",
        )


# Files: CSV with a header, CSV without one, or one puzzle a line; plain, gzip or xz


@dataclass(frozen=True, slots=True)
class Row:
    line: int  # counted from 1, for messages
    question: str
    answer: str | None
    source: str | None


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
        return [Row(line, row[0], _cell(row, 1), None) for line, row in cells]
    question, answer = _column(header, _QUESTION_NAMES), _column(header, _ANSWER_NAMES)
    source = _column(header, ("source",))
    return [
        Row(line, _cell(row, question) or "", _cell(row, answer), _cell(row, source))
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
