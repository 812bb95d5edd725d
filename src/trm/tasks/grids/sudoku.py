"""Sudoku as a task: puzzles that are generated or read from a file, their symmetries, and how they look.

Tokens are those of the reference implementation: 0 padding, 1 blank, d + 1 for digit d. Train and test never
share a puzzle, not even a symmetric copy: all copies have one fingerprint, and it decides the split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from pydantic import model_validator

from macbook_optimization.errors import DataError
from trm.arrays import BoolArray, FloatArray, IntArray, WordArray
from trm.config import Count
from trm.tasks.base import Tile
from trm.tasks.grids import sudoku_puzzles as puzzles
from trm.tasks.grids.examples import Grids, Pairs
from trm.tasks.grids.options import GridOptions
from trm.tasks.grids.task import GridTask
from trm.tasks.grids.view import BLUE, BOLD, GREEN, RESET, WHITE, style_of_changes

_GIVEN_FILL = (228, 228, 228)


class BuildOptions(GridOptions):
    size: Literal[4, 6, 9] = 9
    """Rows and columns of the grid: 4, 6 or 9."""
    difficulty: Literal["easy", "medium", "hard"] = "hard"
    """Named number of blanks of generated puzzles; `blanks` overrides it."""
    blanks: Count | None = None
    """Blanks per generated puzzle. The default depends on `difficulty`."""
    train_blanks: Count | None = None
    """Blanks per generated training puzzle. The default is the same as for test puzzles."""

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
    """One symmetry per puzzle: transpose, then reorder rows and columns, then rename digits."""

    transpose: BoolArray  # (n,)
    rows: IntArray  # (n, size)
    columns: IntArray  # (n, size)
    digits: IntArray  # (n, size + 2): the new token of every token

    def apply(self, grids: IntArray) -> IntArray:
        swapped = np.where(self.transpose[:, None, None], grids.transpose(0, 2, 1), grids)
        moved = np.take_along_axis(swapped, self.rows[:, :, None], axis=1)
        moved = np.take_along_axis(moved, self.columns[:, None, :], axis=2)
        flat = moved.reshape(len(moved), -1)
        renamed = np.take_along_axis(self.digits, np.maximum(flat, 0), axis=1)
        return np.where(flat < 0, flat, renamed).reshape(grids.shape)  # ignored labels stay ignored

    def inverse(self) -> Symmetry:
        rows = np.argsort(self.rows, axis=1)
        columns = np.argsort(self.columns, axis=1)
        transpose = self.transpose[:, None]
        return Symmetry(
            transpose=self.transpose,
            rows=np.where(transpose, columns, rows),
            columns=np.where(transpose, rows, columns),
            digits=np.argsort(self.digits, axis=1),
        )


def draw_symmetry(size: int, draws: FloatArray) -> Symmetry:
    """Return the symmetry that each row of numbers from [0, 1) selects; all are equally likely."""
    box_rows, box_columns = puzzles.BOX_SHAPES[size]
    # Every size takes the same 46 draws, so that their meaning does not depend on it.
    bands, rows_in_band, stacks, columns_in_stack, digits, flip = np.split(
        draws[:, : 5 * 9 + 1], [9, 18, 27, 36, 45], axis=1
    )
    names = np.argsort(digits[:, :size], axis=1) + 2
    fixed = np.broadcast_to(np.arange(2), (len(draws), 2))  # padding and blank
    return Symmetry(
        transpose=(flip[:, 0] < 0.5) & (box_rows == box_columns),
        rows=_block_order(bands[:, : size // box_rows], rows_in_band[:, :size], box_rows),
        columns=_block_order(stacks[:, : size // box_columns], columns_in_stack[:, :size], box_columns),
        digits=np.concatenate((fixed, names), axis=1),
    )


def _block_order(blocks: FloatArray, lines: FloatArray, block_size: int) -> IntArray:
    """Return an order of lines that keeps blocks together: by rank of the block, then by draw of the line."""
    ranks = np.argsort(np.argsort(blocks, axis=1), axis=1)
    return np.argsort(np.repeat(ranks, block_size, axis=1) + lines, axis=1)


class SudokuTask(GridTask[BuildOptions]):
    name = "sudoku"
    Options = BuildOptions
    num_draws = 46

    def symbols(self, size: int) -> str:
        return ".123456789"[: size + 1]

    def size_of(self, max_len: int) -> int:
        for size in puzzles.BOX_SHAPES:
            if size * size == max_len:
                return size
        raise DataError(f"A sequence of {max_len} cells is not a Sudoku of 4x4, 6x6 or 9x9")

    def box(self, size: int) -> tuple[int, int]:
        return puzzles.BOX_SHAPES[size]

    def generate(self, options: BuildOptions, count: int, first: int) -> Pairs:
        return puzzles.generate(options.size, options.num_blanks, count, options.seed, first=first)

    def split_counts(self, options: BuildOptions) -> list[tuple[BuildOptions, dict[str, int]]]:
        """Generate splits with different numbers of blanks separately.

        Copies of a puzzle have as many blanks as the puzzle, so such splits cannot share one.
        """
        train_blanks = options.train_blanks or options.num_blanks
        counts = {train_blanks: {"train": options.num_train}}
        counts.setdefault(options.num_blanks, {})["test"] = options.test
        return [(options.model_copy(update={"blanks": blanks}), each) for blanks, each in counts.items()]

    def description(self, options: BuildOptions) -> str:
        return f"{options.size}x{options.size} puzzles with {options.num_blanks} blanks"

    def fingerprints(self, questions: Grids, answers: Grids) -> WordArray:
        return puzzles.fingerprints(questions, answers)

    def transformed(
        self, questions: IntArray, answers: IntArray, draws: FloatArray
    ) -> tuple[IntArray, IntArray]:
        symmetry = draw_symmetry(questions.shape[1], draws)
        return symmetry.apply(questions), symmetry.apply(answers)

    def solve(self, questions: Grids) -> tuple[Grids, list[str | None]]:
        answers, counts = puzzles.solve(questions)
        problems = {0: "the puzzle has no solution", 1: None, 2: "the puzzle has more than one solution"}
        return answers, [problems[count] for count in counts.tolist()]

    def parse_grid(self, text: str, size: int) -> Grids:
        """Parse `.` or `0` as blanks; white space is ignored."""
        return super().parse_grid(text.replace("0", "."), size)

    def question_problem(self, question: Grids) -> str | None:
        return puzzles.contradiction(question)

    def verify_grid(self, question: Grids, answer: Grids) -> str | None:
        changed = (question > 0) & (question != answer)
        if changed.any():
            return f"the given digit at {_first_cell(changed)} was changed"
        empty = answer < 1
        if empty.any():
            return f"{_first_cell(empty)} is empty"
        return puzzles.contradiction(answer)

    def cell(self, symbols: str, given: int, answer: int, changed: bool, color: bool) -> str:
        symbol = symbols[max(answer, 0)]
        if given > 0 and given != answer:  # the answer changes a given digit
            return f"!{symbol} "
        if given > 0:
            return f" {BOLD}{symbol}{RESET} " if color else f"[{symbol}]"
        if changed:
            return f" {GREEN}{symbol}{RESET} " if color else f" {symbol}*"
        return f" {symbol} "

    def join_rows(self, rows: list[list[str]]) -> str:
        size = len(rows)
        box_rows, box_columns = puzzles.BOX_SHAPES[size]
        rule = "+".join(["-" * (3 * box_columns + 1)] * (size // box_columns))
        lines = []
        for number, row in enumerate(rows):
            if number and number % box_rows == 0:
                lines.append(rule)
            stacks = [row[start : start + box_columns] for start in range(0, size, box_columns)]
            lines.append(" |".join("".join(stack) for stack in stacks))
        return "\n".join(lines)

    def legend(self, shown: str, changes: bool, color: bool) -> str:
        parts = [f"given digits are {'bold' if color else 'in brackets'}"]
        if "!" in shown:
            parts.append("! precedes a digit that replaces a given one")
        if "." in shown:
            parts.append(". is a cell that the answer leaves empty")
        if changes:
            parts.append(f"changes are {style_of_changes(color)}")
        return "; ".join(parts)

    def tile(self, symbols: str, given: int, answer: int, wrong: bool) -> Tile:
        if given > 0:
            return Tile(_GIVEN_FILL, symbols[max(answer, 0)], wrong=wrong)
        text = symbols[answer] if answer > 0 else ""
        return Tile(WHITE, text, BLUE, wrong)


TASK = SudokuTask()


def _first_cell(cells: BoolArray) -> str:
    row, column = np.argwhere(cells)[0] + 1
    return f"row {row}, column {column}"
