"""The base class of tasks on a square grid: Sudoku, mazes, and tasks of your own.

A grid holds symbols, counted from 0. The token of symbol s is s + 1, and token 0 is padding, as in the
reference implementation. A task defines its symbols, generates examples, and verifies answers; datasets, text
and pictures follow from these.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Generic, cast

import numpy as np
from numpy.typing import NDArray

from macbook_optimization.errors import DataError
from trm.arrays import FloatArray, IntArray, WordArray
from trm.batch import Batch
from trm.config import parse_section
from trm.tasks.base import DataSpec, GridLayout, Progress, Question, Scorer
from trm.tasks.dataset import Split
from trm.tasks.dataset_writer import DatasetWriter
from trm.tasks.grids.examples import Grids, Pairs, generate_splits
from trm.tasks.grids.options import GridOptions, OptionsT
from trm.tasks.grids.puzzle_files import read_splits
from trm.tasks.grids.scoring import VALID, ValidAnswers
from trm.tasks.grids.view import GridView
from trm.tasks.metrics import EXACT, ExactMatch


class GridTask(GridView, Generic[OptionsT]):
    """Derive from this class: `name`, `symbols`, `generate` and `verify_grid` make a task."""

    name: str
    Options: type[OptionsT] = cast("type[OptionsT]", GridOptions)
    num_draws: int = 0  # random numbers per augmented example
    several_answers: bool = False  # whether answers other than the label can be right
    chunk_size: int = 1000  # examples that a worker generates at a time, in seconds rather than minutes
    verified: str = "solved: every rule holds"
    one_question_per_line: bool = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        defined = vars(cls)
        if "judge_grid" in defined and "verify_grid" not in defined:  # the name in earlier task files
            cls.verify_grid = defined["judge_grid"]  # type: ignore[method-assign]

    # What a task defines

    @abstractmethod
    def generate(self, options: OptionsT, count: int, first: int) -> Pairs:
        """Return `count` examples that depend on the arguments only; each `first` gives different ones."""

    @abstractmethod
    def verify_grid(self, question: Grids, answer: Grids) -> str | None:
        """Return the first rule that the answer (size, size) breaks, or None."""

    # What a task may define

    def fingerprints(self, questions: Grids, answers: Grids) -> WordArray:
        """Return a number per example, equal for examples that must not be in both splits.

        The default is a hash of the question.
        """
        return np.array([_hash(question) for question in questions], dtype=np.uint64)

    def difficulties(self, questions: Grids, answers: Grids) -> IntArray:
        """Rate each example, for a curriculum. The default is the number of cells to be found."""
        return np.asarray((questions != answers).sum((1, 2)))

    def transformed(
        self, questions: IntArray, answers: IntArray, draws: FloatArray
    ) -> tuple[IntArray, IntArray]:
        """Return a random symmetric copy of each example, as tokens (n, size, size). The default is none."""
        return questions, answers

    def question_problem(self, question: Grids) -> str | None:
        """Return why this grid is not a valid question, or None."""
        return None

    def split_counts(self, options: OptionsT) -> list[tuple[OptionsT, dict[str, int]]]:
        """Return the options to generate with, and how many examples they give to which split."""
        return [(options, {"train": options.num_train, "test": options.test})]

    def description(self, options: OptionsT) -> str:
        """Name what is generated, for progress and messages."""
        return f"{options.size}x{options.size} examples"

    def solve(self, questions: Grids) -> tuple[Grids, list[str | None]]:
        """Return the answers, and for each question why it has none, or None. The default has no solver."""
        raise DataError(f"The task {self.name} has no solver")

    def parse_grid(self, text: str, size: int) -> Grids:
        """Parse a question or an answer: one character per cell, row by row."""
        return parse_cells("".join(text.split()), self.symbols(size), size)

    # Datasets and training

    def check_options(self, options: Mapping[str, object]) -> None:
        parse_section(self.Options, options, "data.build")

    def spec(self, options: Mapping[str, object]) -> DataSpec:
        return self._spec(parse_section(self.Options, options, "data.build").size)

    def _spec(self, size: int) -> DataSpec:
        num_tokens = len(self.symbols(size)) + 1
        layout = GridLayout(size, size, self.box(size))
        return DataSpec(size * size, num_tokens, num_outputs=num_tokens, layout=layout)

    def complete(self, spec: DataSpec) -> DataSpec:
        size = self.size_of(spec.max_len)
        expected = self._spec(size)
        if (spec.vocab_size, spec.num_outputs) != (expected.vocab_size, expected.num_outputs):
            raise DataError(
                f"A {size}x{size} {self.name} has {expected.vocab_size} tokens; this dataset has "
                f"{spec.vocab_size} input tokens and {spec.num_outputs} outputs"
            )
        return replace(spec, layout=expected.layout)

    def build(
        self, options: Mapping[str, object], directory: Path, progress: Progress, jobs: int = 1
    ) -> None:
        parsed = parse_section(self.Options, options, "data.build")
        make_splits = generate_splits if parsed.file is None else read_splits
        made_by = {"task": self.name, "options": parsed.model_dump(mode="json", by_alias=True)}
        with DatasetWriter(directory, made_by) as writer:  # first, so that a bad path costs no time
            for name, examples in make_splits(self, parsed, progress, jobs).items():
                split = writer.split(name, self._spec(parsed.size), ignore_label=0)
                split.add_examples(
                    inputs=_flat_tokens(examples.questions),
                    labels=_flat_tokens(examples.answers),
                    difficulties=examples.difficulties,
                )

    def augment(self, batch: Batch, draws: FloatArray) -> Batch:
        size = self.size_of(batch.inputs.shape[1])
        questions = batch.inputs.reshape(-1, size, size)
        answers = batch.labels.reshape(-1, size, size)
        questions, answers = self.transformed(questions, answers, draws)
        return replace(
            batch,
            inputs=questions.reshape(batch.inputs.shape),
            labels=answers.reshape(batch.labels.shape),
        )

    @property
    def primary_metric(self) -> str:
        return VALID if self.several_answers else EXACT

    def scorer(self, split: Split) -> Scorer:
        return ValidAnswers(self.verify) if self.several_answers else ExactMatch()

    # Questions and answers

    def parse(self, text: str, size: int) -> Grids:
        """Parse a question, and check that it is a valid one."""
        grid = self.parse_grid(text, size)
        if problem := self.question_problem(grid):
            raise DataError(f"This is not a valid {self.name}: {problem}")
        return grid

    def read(self, source: bytes, spec: DataSpec) -> Question:
        text = source.decode("utf-8-sig", errors="replace")
        return Question(_tokens(self.parse(text, self.size_of(spec.max_len))))

    def text(self, tokens: IntArray) -> str:
        symbols = self.symbols(self.size_of(len(tokens)))
        return "".join(symbols[max(token - 1, 0)] for token in tokens)

    def verify(self, question: IntArray, answer: IntArray, label: IntArray | None = None) -> str | None:
        size = self.size_of(len(question))
        return self.verify_grid(_grid(question, size), _grid(answer, size))

    def solution(self, question: IntArray) -> IntArray | None:
        grid = _grid(question, self.size_of(len(question)))
        try:
            answers, problems = self.solve(grid[None])
        except DataError:  # there is no solver, or the question has no solution
            return None
        return None if problems[0] else _tokens(answers[0])

    @property
    def has_solver(self) -> bool:
        return type(self).solve is not GridTask.solve


def parse_cells(cells: str, symbols: str, size: int) -> Grids:
    """Return the grid with these cells, one character each, row by row."""
    if len(cells) != size * size:
        raise DataError(
            f"A {size}x{size} puzzle has {size * size} cells; this one has {len(cells)}",
            hint="Write one character per cell, row by row.",
        )
    if wrong := sorted(set(cells) - set(symbols)):
        raise DataError(
            f"{', '.join(map(repr, wrong))} is not allowed in a {size}x{size} puzzle",
            hint=f"Use these characters: {' '.join(map(repr, symbols))}",
        )
    return np.array([symbols.index(cell) for cell in cells], dtype=np.int8).reshape(size, size)


def _hash(grid: Grids) -> int:
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(grid).tobytes(), digest_size=8).digest())


def _flat_tokens(grids: Grids) -> NDArray[np.uint8]:
    return (grids.reshape(len(grids), -1) + 1).astype(np.uint8)


def _tokens(grid: Grids) -> IntArray:
    return grid.reshape(-1).astype(np.int64) + 1


def _grid(tokens: IntArray, size: int) -> Grids:
    return (tokens - 1).reshape(size, size).astype(np.int8)
