"""Sudoku as a task: puzzles generated or read from a file, their symmetries, and grids a person can read.

Tokens are those of the public code: 0 padding, 1 blank, d + 1 for digit d. Train and test never share a
puzzle, not even a symmetric copy: `fingerprints` are equal for all copies of a puzzle, and decide the side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from macbook_optimization.errors import DataError
from trm.config import Count
from trm.tasks import sudoku_puzzles as puzzles
from trm.tasks.base import IntArray, Tile
from trm.tasks.grids import GridOptions, Grids, GridTask, Pairs


class BuildOptions(GridOptions):
    size: Literal[4, 6, 9] = 9
    difficulty: Literal["easy", "medium", "hard"] = "hard"
    blanks: Count | None = None  # instead of a named difficulty
    train_blanks: Count | None = None  # of training puzzles, if they are to be harder or easier

    @model_validator(mode="after")
    def _check_blanks(self) -> Self:
        if self.file is not None and self.train_blanks:
            raise ValueError("train_blanks is for generated puzzles, not for those `from` a file")
        return self

    @property
    def num_blanks(self) -> int:
        return self.blanks or puzzles.BLANKS[self.size][self.difficulty]


@dataclass(frozen=True, slots=True)
class Symmetry:
    """One symmetry a puzzle: transpose, then take rows and columns in this order, then rename digits."""

    transpose: NDArray[np.bool_]  # (B,)
    rows: IntArray  # (B, n)
    columns: IntArray  # (B, n)
    digits: IntArray  # (B, n + 2): the new token of every token

    def apply(self, grids: IntArray) -> IntArray:
        swapped = np.where(self.transpose[:, None, None], grids.transpose(0, 2, 1), grids)
        moved = np.take_along_axis(swapped, self.rows[:, :, None], axis=1)
        moved = np.take_along_axis(moved, self.columns[:, None, :], axis=2)
        flat = moved.reshape(len(moved), -1)
        renamed = np.take_along_axis(self.digits, np.maximum(flat, 0), axis=1)
        return np.where(flat < 0, flat, renamed).reshape(grids.shape)  # ignored labels stay ignored

    def inverse(self) -> Symmetry:
        rows, columns = np.argsort(self.rows, axis=1), np.argsort(self.columns, axis=1)
        across = self.transpose[:, None]
        return Symmetry(
            transpose=self.transpose,
            rows=np.where(across, columns, rows),
            columns=np.where(across, rows, columns),
            digits=np.argsort(self.digits, axis=1),
        )


def draw_symmetry(size: int, draws: NDArray[np.float64]) -> Symmetry:
    """The symmetry that a row of numbers from [0, 1) stands for; every one is equally likely."""
    box_rows, box_columns = puzzles.BOX_SHAPES[size]
    bands, in_band, stacks, in_stack, digits, flip = np.split(
        draws[:, : 5 * 9 + 1], [9, 18, 27, 36, 45], axis=1
    )
    names = np.argsort(digits[:, :size], axis=1) + 2
    fixed = np.broadcast_to(np.arange(2), (len(draws), 2))
    return Symmetry(
        transpose=(flip[:, 0] < 0.5) & (box_rows == box_columns),
        rows=_block_order(bands[:, : size // box_rows], in_band[:, :size], box_rows),
        columns=_block_order(stacks[:, : size // box_columns], in_stack[:, :size], box_columns),
        digits=np.concatenate((fixed, names), axis=1),
    )


def _block_order(blocks: NDArray[np.float64], lines: NDArray[np.float64], block_size: int) -> IntArray:
    """Lines in an order that keeps blocks together: by the block's rank, and inside it by the line's draw."""
    ranks = np.argsort(np.argsort(blocks, axis=1), axis=1)
    return np.argsort(np.repeat(ranks, block_size, axis=1) + lines, axis=1)


class SudokuTask(GridTask):
    name = "sudoku"
    Options = BuildOptions
    num_draws = 46

    def symbols(self, size: int) -> str:
        return ".123456789"[: size + 1]

    def size_of(self, seq_len: int) -> int:
        for size in puzzles.BOX_SHAPES:
            if size * size == seq_len:
                return size
        raise DataError(f"{seq_len} cells are not a Sudoku of a size known here (4x4, 6x6 or 9x9)")

    def generate(self, asked: BuildOptions, count: int, first: int) -> Pairs:
        return puzzles.generate(asked.size, asked.num_blanks, count, asked.seed, first=first)

    def kinds(self, asked: BuildOptions) -> list[tuple[BuildOptions, dict[str, int]]]:
        """Copies of a puzzle have as many blanks as it: others do not have to be told apart."""
        wanted = {asked.train_blanks or asked.num_blanks: {"train": asked.train or 2000}}
        wanted.setdefault(asked.num_blanks, {})["test"] = asked.test
        return [(asked.model_copy(update={"blanks": blanks}), sides) for blanks, sides in wanted.items()]

    def described(self, asked: BuildOptions) -> str:
        return f"puzzles of size {asked.size} with {asked.num_blanks} blanks"

    def fingerprints(self, questions: Grids, answers: Grids) -> NDArray[np.uint64]:
        return puzzles.fingerprints(questions, answers)

    def transformed(
        self, questions: IntArray, answers: IntArray, draws: NDArray[np.float64]
    ) -> tuple[IntArray, IntArray]:
        symmetry = draw_symmetry(questions.shape[1], draws)
        return symmetry.apply(questions), symmetry.apply(answers)

    def solve(self, questions: Grids) -> tuple[Grids, list[str | None]]:
        answers, counts = puzzles.solve(questions)
        number = {0: "no", 2: "more than one"}
        return answers, [
            None if count == 1 else f"the puzzle has {number[count]} solution" for count in counts.tolist()
        ]

    def parse(self, text: str, size: int) -> Grids:
        """`.` or `0` for blanks, white space ignored."""
        return super().parse(text.replace("0", "."), size)

    def problem_of(self, question: Grids) -> str | None:
        return puzzles.contradiction(question)

    def cell(self, symbols: str, asked: int, answered: int, changed: bool, color: bool) -> str:
        symbol = symbols[max(answered, 0)]
        if asked > 0 and asked != answered:  # an answer that does not even keep what was given
            return f"!{symbol} "
        if color:
            style = "\033[1m" if asked > 0 else "\033[32m" if changed else ""
            return f" {style}{symbol}\033[0m " if style else f" {symbol} "
        return f"[{symbol}]" if asked > 0 else f" {symbol}*" if changed else f" {symbol} "

    def drawn(self, rows: list[list[str]]) -> str:
        size = len(rows)
        box_rows, box_columns = puzzles.BOX_SHAPES[size]
        rule = "+".join(["-" * (3 * box_columns + 1)] * (size // box_columns))
        lines = []
        for i, row in enumerate(rows):
            if i and i % box_rows == 0:
                lines.append(rule)
            stacks = [row[i : i + box_columns] for i in range(0, size, box_columns)]
            lines.append(" |".join("".join(stack) for stack in stacks))
        return "\n".join(lines)

    def tile(self, symbols: str, asked: int, answered: int, wrong: bool) -> Tile:
        if asked > 0:
            return Tile((228, 228, 228), symbols[max(answered, 0)], wrong=wrong)
        text = symbols[answered] if answered > 0 else ""
        return Tile((255, 255, 255), text, (30, 80, 200), wrong)

    def box(self, size: int) -> tuple[int, int]:
        return puzzles.BOX_SHAPES[size]

    def legend(self, changes: bool, color: bool) -> str:
        given, changed = ("bold", "green") if color else ("in brackets", "starred")
        return f"given digits are {given}" + (f", changes {changed}" if changes else "")

    def judge_grid(self, question: Grids, answer: Grids) -> str | None:
        for problem, cells in (
            ("the given digit at {} was changed", (question > 0) & (question != answer)),
            ("{} is empty", answer < 1),
        ):
            if cells.any():
                row, column = np.argwhere(cells)[0] + 1
                return problem.format(f"row {row}, column {column}")
        return puzzles.contradiction(answer)


TASK = SudokuTask()
