"""Mazes as a task: mark a shortest path from S to G between random walls.

Tokens are those of the reference implementation: 1 wall `#`, 2 open, 3 start `S`, 4 goal `G`, 5 path `o`. A
maze has many shortest paths and the label is one of them (see `labelled_paths`). Two metrics are therefore
reported: exact answers, which published results count, and valid ones, which are any shortest path.
"""

from __future__ import annotations

from typing import Annotated, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from macbook_optimization.units import counted
from trm.arrays import BoolArray, FloatArray, IntArray, WordArray
from trm.batch import IGNORE_LABEL
from trm.config import Count
from trm.tasks.base import Tile
from trm.tasks.grids import maze_puzzles as mazes
from trm.tasks.grids.examples import Grids, Pairs
from trm.tasks.grids.options import GridOptions
from trm.tasks.grids.task import GridTask, parse_cells
from trm.tasks.grids.view import BOLD, DIM, GREEN, RESET, WHITE, style_of_changes

WALL, OPEN, START, GOAL, PATH = range(5)
_FILLS = ((50, 50, 50), WHITE, (30, 140, 60), (200, 50, 50), (110, 160, 255))
_NUM_ORIENTATIONS = 8  # rotations and reflections of a square

PathLength: TypeAlias = Annotated[Count, Field(ge=2)]
Number = TypeVar("Number", bound=np.generic)


class BuildOptions(GridOptions):
    size: Annotated[Count, Field(ge=3, le=mazes.LARGEST)] = 10
    """Rows and columns of the maze, up to 40."""
    min_path: PathLength = 13
    """Least number of cells on the shortest path, start and goal included."""
    train_min_path: PathLength | None = None
    """The same for training mazes. The default is `min_path`."""

    @model_validator(mode="after")
    def _check_path(self) -> Self:
        if max(self.min_path, self.train_min_path or 0) > self.size**2:
            raise ValueError(f"min_path is more than the cells of a {self.size}x{self.size} maze")
        if self.file is not None and self.train_min_path:
            raise ValueError("train_min_path is for generated mazes, not for those `from` a file")
        return self


class MazeTask(GridTask[BuildOptions]):
    name = "maze"
    Options = BuildOptions
    num_draws = 1
    several_answers = True
    chunk_size = 50

    def symbols(self, size: int) -> str:
        return "#.SGo"

    def generate(self, options: BuildOptions, count: int, first: int) -> Pairs:
        walls, starts, goals = mazes.generate(
            options.size, options.min_path - 1, count, [options.seed, first]
        )
        questions = np.where(walls, WALL, OPEN).astype(np.int8)
        each = np.arange(count)
        questions[each, starts[:, 0], starts[:, 1]] = START
        questions[each, goals[:, 0], goals[:, 1]] = GOAL
        return questions, _with_path(questions, mazes.labelled_paths(walls, starts, goals))

    def split_counts(self, options: BuildOptions) -> list[tuple[BuildOptions, dict[str, int]]]:
        if options.train_min_path in (None, options.min_path):
            return super().split_counts(options)
        train_options = options.model_copy(update={"min_path": options.train_min_path})
        return [(train_options, {"train": options.num_train}), (options, {"test": options.test})]

    def fingerprints(self, questions: Grids, answers: Grids) -> WordArray:
        """Return a number per maze that no rotation or reflection changes.

        It is the wrapping sum of the hashes of all eight, which is as uniform as each of them.
        """
        hashes = [
            super(MazeTask, self).fingerprints(_oriented(questions, orientation), answers)
            for orientation in range(_NUM_ORIENTATIONS)
        ]
        return np.asarray(np.add.reduce(hashes))

    def transformed(
        self, questions: IntArray, answers: IntArray, draws: FloatArray
    ) -> tuple[IntArray, IntArray]:
        """Rotate or reflect each maze.

        The path is searched again: which of the shortest paths is the label depends on an order of
        directions, which does not rotate with the maze.
        """
        orientations = (draws[:, 0] * _NUM_ORIENTATIONS).astype(np.int64)
        moved = questions.copy()
        for orientation in range(1, _NUM_ORIENTATIONS):
            chosen = orientations == orientation
            moved[chosen] = _oriented(questions[chosen], orientation)
        grids = (moved - 1).astype(np.int8)
        labels = _with_path(grids, mazes.labelled_paths(*_parts(grids))).astype(np.int64) + 1
        unlabelled = (answers == IGNORE_LABEL).all((1, 2), keepdims=True)
        return moved, np.where(unlabelled, IGNORE_LABEL, labels)

    def question_problem(self, question: Grids) -> str | None:
        for symbol, name in ((START, "S"), (GOAL, "G")):
            count = int((question == symbol).sum())
            if count != 1:
                return f"there are {count} {name}; a maze has one"
        if (question == PATH).any():
            return "a path is already marked"
        if _shortest_distance(question) < 0:
            return "no path leads from S to G"
        return None

    def solve(self, questions: Grids) -> tuple[Grids, list[str | None]]:
        on_path = mazes.labelled_paths(*_parts(questions))
        return _with_path(questions, on_path), [None] * len(questions)

    def parse_grid(self, text: str, size: int) -> Grids:
        """Parse `#` as walls and `.` or a space as open cells, in one line or with one line per row."""
        lines = text.strip("\r\n").splitlines()
        if len(lines) > 1:  # editors remove the spaces at the end of a line
            text = "".join(line.ljust(size) for line in lines)
        elif lines:
            text = lines[0]
        return parse_cells(text.replace(" ", "."), self.symbols(size), size)

    def verify_grid(self, question: Grids, answer: Grids) -> str | None:
        unchanged = (question == answer) | ((question == OPEN) & (answer == PATH))
        if not unchanged.all():
            row, column = np.argwhere(~unchanged)[0] + 1
            return f"the maze was changed at row {row}, column {column}"
        on_path = answer == PATH
        if mazes.is_shortest_path(*_parts(question[None]), on_path[None])[0]:
            return None
        num_marked = int(on_path.sum())
        num_needed = _shortest_distance(question) - 1
        if num_marked != num_needed:
            are = "is" if num_marked == 1 else "are"
            return f"{counted(num_marked, 'cell')} {are} marked; a shortest path has {num_needed}"
        return "the marked cells do not lead from S to G"

    def cell(self, symbols: str, given: int, answer: int, changed: bool, color: bool) -> str:
        symbol = symbols[max(answer, 0)].replace(".", " ")
        if given != answer and not (given == OPEN and answer == PATH):
            return "! "
        if not color:
            return f"{symbol}*" if changed else f"{symbol} "
        if answer == WALL:
            return f"{DIM}{symbol}{RESET} "
        style = GREEN if changed else BOLD
        return f"{style}{symbol}{RESET} "

    def legend(self, shown: str, changes: bool, color: bool) -> str:
        parts = ["# is a wall", "o is the path from S to G"]
        if "!" in shown:
            parts.append("! is a cell where the answer changes the maze")
        if changes:
            parts.append(f"changes are {style_of_changes(color)}")
        return "; ".join(parts)

    def tile(self, symbols: str, given: int, answer: int, wrong: bool) -> Tile:
        text = {START: "S", GOAL: "G"}.get(answer, "")
        return Tile(_FILLS[max(answer, 0)], text, WHITE, wrong)


TASK = MazeTask()


def _parts(grids: Grids) -> tuple[BoolArray, IntArray, IntArray]:
    """Return the walls (n, size, size), and the cells (n, 2) of start and goal."""
    return grids == WALL, _cell_of(grids, START), _cell_of(grids, GOAL)


def _cell_of(grids: Grids, symbol: int) -> IntArray:
    """Return row and column of the first cell of each grid that holds the symbol."""
    positions = (grids == symbol).reshape(len(grids), -1).argmax(1)
    return np.stack(np.divmod(positions, grids.shape[2]), 1)


def _shortest_distance(question: Grids) -> int:
    """Return the moves from start to goal of one maze, or -1 if no path leads there."""
    walls, starts, goals = _parts(question[None])
    return int(mazes.distances(walls, starts)[0, goals[0, 0], goals[0, 1]])


def _with_path(questions: Grids, on_path: BoolArray) -> Grids:
    return np.where(on_path, np.int8(PATH), questions)


def _oriented(grids: NDArray[Number], orientation: int) -> NDArray[Number]:
    """Return grids (n, size, size) in one of the eight orientations of a square."""
    rotated = np.rot90(grids, orientation % 4, axes=(1, 2))
    return rotated if orientation < 4 else rotated[:, :, ::-1]
