"""The look of ARC grids: as text in a terminal, and as a picture."""

from __future__ import annotations

import numpy as np

from trm.arrays import BoolArray, IntArray
from trm.tasks.base import Picture, Tile
from trm.tasks.grids.arc_puzzles import Grid, crop
from trm.tasks.grids.view import RESET, WHITE

_PALETTE = (
    (0, 0, 0), (0, 116, 217), (255, 65, 54), (46, 204, 64), (255, 220, 0),
    (170, 170, 170), (240, 18, 190), (255, 133, 27), (127, 219, 255), (135, 12, 37),
)  # fmt: skip
_TERMINAL_COLOURS = (16, 27, 196, 34, 226, 244, 201, 208, 45, 88)


class ArcView:
    """Renders answers; unlike other grids, they differ in size from their question."""

    def show(self, question: IntArray, answer: IntArray, before: IntArray | None, color: bool) -> str:
        grid = crop(answer)
        changed = _changes(grid, None if before is None else crop(before))
        lines = [
            "".join(
                _cell(colour, change, color)
                for colour, change in zip(row.tolist(), changes.tolist(), strict=True)
            )
            for row, changes in zip(grid, changed, strict=True)
        ]
        return "\n".join(lines) or "(an empty grid)"

    def legend(self, shown: str, changes: bool, color: bool) -> str:
        parts = [] if color else ["digits are colours"]
        if changes:
            parts.append("changes are starred")
        return "; ".join(parts)

    def picture(self, question: IntArray, answer: IntArray, label: IntArray | None) -> Picture:
        """Draw the answer. Cells that only the answer or only the label has are wrong, too."""
        grid = crop(answer)
        right = grid if label is None else crop(label)
        num_rows = max(1, grid.shape[0], right.shape[0])
        num_columns = max(1, grid.shape[1], right.shape[1])
        tiles = []
        for row in range(num_rows):
            cells = [(_colour_at(grid, row, c), _colour_at(right, row, c)) for c in range(num_columns)]
            tiles.append([_tile(ours, wrong=ours != theirs) for ours, theirs in cells])
        return Picture(tiles)


def _changes(grid: Grid, before: Grid | None) -> BoolArray:
    if before is None:
        return np.zeros(grid.shape, dtype=bool)
    if before.shape != grid.shape:
        return np.ones(grid.shape, dtype=bool)
    return np.asarray(before != grid)


def _cell(colour: int, changed: bool, color: bool) -> str:
    if color:
        return f"\033[48;5;{_TERMINAL_COLOURS[colour]}m{'* ' if changed else '  '}{RESET}"
    return f"{colour}{'*' if changed else ' '}"


def _colour_at(grid: Grid, row: int, column: int) -> int | None:
    if row >= grid.shape[0] or column >= grid.shape[1]:
        return None
    return int(grid[row, column])


def _tile(colour: int | None, wrong: bool) -> Tile:
    fill = WHITE if colour is None else _PALETTE[colour]
    return Tile(fill, wrong=wrong)
