"""Puzzles on a square grid: what Sudoku, mazes and a task of your own have in common.

A grid holds symbols, counted from 0; the token of symbol s is s + 1, and token 0 is padding, as in the public
code. A task says what its symbols look like, makes examples, and judges answers. The rest is here, and in
`grid_sets`: datasets whose halves share no example, and grids that a person can type and read.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from macbook_optimization.errors import DataError
from trm.config import Count, CountOrZero, Section, parse_section
from trm.tasks.base import IntArray, Picture, Progress, TaskShape, Tile
from trm.tasks.dataset_writer import DatasetWriter
from trm.tasks.grid_sets import from_file, generated

Grids = NDArray[np.int8 | np.uint8]  # (examples, size, size) of symbols
Pairs = tuple[Grids, Grids]  # questions and their answers


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
    solved: str = "solved: every rule holds"
    several_answers: bool = False  # whether other answers than the label can be right
    chunk: int = 1000  # examples that are made at a time: about a second's work, or several

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

    def kinds(self, asked: Any) -> list[tuple[Any, dict[str, int]]]:
        """Options, and how many examples by them for each half."""
        return [(asked, {"train": asked.train or 2000, "test": asked.test})]

    def described(self, asked: Any) -> str:
        """What is made, for progress and messages."""
        return f"{asked.size}x{asked.size} examples"

    def solve(self, questions: Grids) -> tuple[Grids, list[str | None]]:
        """The answers to questions that came without one, and what is wrong with them."""
        raise DataError(
            f"The task {self.name} cannot find answers itself; the file needs a column for them",
            hint="Name the columns question and answer.",
        )

    # What a Task must do

    def check_options(self, options: Mapping[str, Any]) -> None:
        parse_section(self.Options, options, "data.build")

    def shape(self, options: Mapping[str, Any]) -> TaskShape:
        return self._shape(parse_section(self.Options, options, "data.build").size)

    def _shape(self, size: int) -> TaskShape:
        num_tokens = len(self.symbols(size)) + 1
        return TaskShape(size * size, num_tokens, num_tokens, num_puzzle_identifiers=1)

    def build(self, options: Mapping[str, Any], directory: Path, progress: Progress, jobs: int = 1) -> None:
        asked = parse_section(self.Options, options, "data.build")
        halves = (from_file if asked.file else generated)(self, asked, progress, jobs)
        shape = self._shape(asked.size)
        made_by = {"task": self.name, "options": asked.model_dump(mode="json", by_alias=True)}
        with DatasetWriter(directory, made_by) as writer:
            for name, examples in halves.items():
                split = writer.split(name, shape.seq_len, shape.vocab_size)
                tokens = _tokens(examples.questions), _tokens(examples.answers)
                split.add_examples(*tokens, examples.difficulties)

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

    def parse_answer(self, text: str, size: int) -> Grids:
        return self.parse(text, size)

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

    def judge(self, question: IntArray, answer: IntArray, label: IntArray | None = None) -> str | None:
        size = self.size_of(len(question))
        asked, answered = ((tokens - 1).reshape(size, size).astype(np.int8) for tokens in (question, answer))
        return self.judge_grid(asked, answered)

    @property
    def headline(self) -> str:
        return "valid_accuracy" if self.several_answers else "exact_accuracy"

    def scorer(self, dataset: Path) -> Valid | None:
        return Valid(self.judge) if self.several_answers else None


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
