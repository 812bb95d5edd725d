"""The look of a grid: as text in a terminal, and as a picture.

`GridView` is the rendering part of `GridTask`. A task changes its look by overriding `cell` (text) and `tile`
(picture). Both receive symbols, which are counted from 0: the token of symbol s is s + 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from macbook_optimization.errors import DataError
from trm.arrays import BoolArray, IntArray
from trm.tasks.base import Color, Picture, Tile

GREEN = "\033[32m"
BOLD = "\033[1m"
DIM = "\033[2m"
RESET = "\033[0m"

BLACK: Color = (0, 0, 0)
WHITE: Color = (255, 255, 255)
GREY: Color = (235, 235, 235)
BLUE: Color = (30, 80, 200)

Cell = TypeVar("Cell")


class GridView(ABC):
    """Renders questions and answers of a square grid."""

    @abstractmethod
    def symbols(self, size: int) -> str:
        """Return one character per symbol of a grid of this size."""

    @abstractmethod
    def verify(self, question: IntArray, answer: IntArray, label: IntArray | None = None) -> str | None:
        """Return the first mistake of the answer, or None."""

    def size_of(self, max_len: int) -> int:
        """Return the rows (and columns) of a grid with this many cells."""
        size = math.isqrt(max_len)
        if size * size != max_len:
            raise DataError(f"A sequence of {max_len} cells is not a square grid")
        return size

    def box(self, size: int) -> tuple[int, int] | None:
        """Return the rows and columns of a box; None for a grid without boxes, which is the default."""
        return None

    # As text

    def show(self, question: IntArray, answer: IntArray, before: IntArray | None, color: bool) -> str:
        size = self.size_of(len(question))
        symbols = self.symbols(size)
        changed = np.zeros(len(answer), dtype=bool) if before is None else before != answer
        cells = [
            self.cell(symbols, int(question[i]) - 1, int(answer[i]) - 1, bool(changed[i]), color)
            for i in range(size * size)
        ]
        return self.join_rows(_rows_of(cells, size))

    def cell(self, symbols: str, given: int, answer: int, changed: bool, color: bool) -> str:
        """Render one cell, from its symbol in the question and in the answer. All cells have one width."""
        symbol = symbols[max(answer, 0)]
        if not changed:
            return f"{symbol} "
        return f"{GREEN}{symbol}{RESET} " if color else f"{symbol}*"

    def join_rows(self, rows: list[list[str]]) -> str:
        return "\n".join("".join(row) for row in rows)

    def legend(self, shown: str, changes: bool, color: bool) -> str:
        return f"changes are {style_of_changes(color)}" if changes else ""

    # As a picture

    def picture(self, question: IntArray, answer: IntArray, label: IntArray | None) -> Picture:
        size = self.size_of(len(question))
        symbols = self.symbols(size)
        wrong = self._wrong_cells(question, answer, label)
        tiles = [
            self.tile(symbols, int(question[i]) - 1, int(answer[i]) - 1, bool(wrong[i]))
            for i in range(size * size)
        ]
        return Picture(_rows_of(tiles, size), self.box(size) or (0, 0))

    def tile(self, symbols: str, given: int, answer: int, wrong: bool) -> Tile:
        """Draw one cell, from its symbol in the question and in the answer."""
        symbol = symbols[max(answer, 0)]
        if given == answer:
            return Tile(GREY, symbol, BLACK, wrong)
        return Tile(WHITE, symbol, BLUE, wrong)

    def _wrong_cells(self, question: IntArray, answer: IntArray, label: IntArray | None) -> BoolArray:
        """Return which cells differ from the label. An answer that obeys the rules has no wrong cells."""
        if label is None or self.verify(question, answer) is None:
            return np.zeros(len(answer), dtype=bool)
        return np.asarray((answer != label) & (label > 0))


def style_of_changes(color: bool) -> str:
    return "green" if color else "starred"


def _rows_of(cells: Sequence[Cell], size: int) -> list[list[Cell]]:
    return [list(cells[start : start + size]) for start in range(0, size * size, size)]
