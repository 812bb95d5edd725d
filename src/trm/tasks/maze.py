"""Mazes as a task: the shortest path from S to G between random walls.

Tokens are those of the public code: 1 wall `#`, 2 open, 3 start `S`, 4 goal `G`, 5 path `o`. A maze has many
shortest paths, and the label is one of them (see `labelled_paths`), so an answer is judged twice: whether it
is the label, as published figures have it, and whether it is any of the shortest paths.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from macbook_optimization.errors import DataError
from trm.config import Count
from trm.tasks import maze_puzzles as mazes
from trm.tasks.base import IGNORE_LABEL, IntArray, Tile
from trm.tasks.grids import GridOptions, Grids, GridTask, Pairs, parse_cells

WALL, OPEN, START, GOAL, PATH = range(5)
_FILLS = ((50, 50, 50), (255, 255, 255), (30, 140, 60), (200, 50, 50), (110, 160, 255))


class BuildOptions(GridOptions):
    size: Annotated[Count, Field(ge=3, le=mazes.LARGEST)] = 10
    min_path: Annotated[Count, Field(ge=2)] = 13  # cells of the shortest path, both ends counted
    train_min_path: Annotated[Count, Field(ge=2)] | None = None  # of training mazes, if they are to be easier

    @model_validator(mode="after")
    def _check_path(self) -> Self:
        if max(self.min_path, self.train_min_path or 0) > self.size**2:
            raise ValueError(f"min_path is more than a {self.size}x{self.size} maze has cells")
        if self.file is not None and self.train_min_path:
            raise ValueError("train_min_path is for generated mazes, not for those `from` a file")
        return self


class MazeTask(GridTask):
    name = "maze"
    Options = BuildOptions
    num_draws = 1
    several_answers = True
    chunk = 50

    def symbols(self, size: int) -> str:
        return "#.SGo"

    def generate(self, asked: BuildOptions, count: int, first: int) -> Pairs:
        seed = [asked.seed, first]
        walls, starts, goals = mazes.generate(asked.size, asked.min_path - 1, count, seed)
        questions = np.where(walls, WALL, OPEN).astype(np.int8)
        each = np.arange(count)
        questions[each, starts[:, 0], starts[:, 1]] = START
        questions[each, goals[:, 0], goals[:, 1]] = GOAL
        return questions, _with_path(questions, mazes.labelled_paths(walls, starts, goals))

    def kinds(self, asked: BuildOptions) -> list[tuple[BuildOptions, dict[str, int]]]:
        if asked.train_min_path in (None, asked.min_path):
            return super().kinds(asked)
        train = asked.model_copy(update={"min_path": asked.train_min_path})
        return [(train, {"train": asked.train or 2000}), (asked, {"test": asked.test})]

    def fingerprints(self, questions: Grids, answers: Grids) -> NDArray[np.uint64]:
        """Equal for all rotations and reflections of a maze: a sum that wraps, as uniform as its parts."""
        every = [super(MazeTask, self).fingerprints(_turned(questions, turn), answers) for turn in range(8)]
        return np.asarray(np.add.reduce(every))

    def transformed(
        self, questions: IntArray, answers: IntArray, draws: NDArray[np.float64]
    ) -> tuple[IntArray, IntArray]:
        """Rotated or reflected. The path is looked for again: which one is the label depends on the order of
        directions, which turns along."""
        turns = (draws[:, 0] * 8).astype(np.int64)
        moved = questions.copy()
        for turn in range(1, 8):
            moved[turns == turn] = _turned(questions[turns == turn], turn)
        grids = (moved - 1).astype(np.int8)
        labels = _with_path(grids, mazes.labelled_paths(*_places(grids))).astype(np.int64) + 1
        return moved, np.where((answers == IGNORE_LABEL).all((1, 2), keepdims=True), IGNORE_LABEL, labels)

    def problem_of(self, question: Grids) -> str | None:
        for symbol, name in ((START, "S"), (GOAL, "G")):
            if (count := int((question == symbol).sum())) != 1:
                return f"there are {count} {name}; a maze has one"
        if (question == PATH).any():
            return "a question has no path yet"
        walls, starts, goals = _places(question[None])
        if mazes.distances(walls, starts)[0, goals[0, 0], goals[0, 1]] < 0:
            return "no way leads from S to G"
        return None

    def solve(self, questions: Grids) -> tuple[Grids, list[str | None]]:
        return _with_path(questions, mazes.labelled_paths(*_places(questions))), [None] * len(questions)

    def parse(self, text: str, size: int) -> Grids:
        """`#` walls, `.` or a space where it is open; in one line, or one line a row."""
        return self.checked(self.parse_answer(text, size))

    def parse_answer(self, text: str, size: int) -> Grids:
        lines = text.strip("\r\n").splitlines()
        if len(lines) > 1:  # editors cut the spaces at the end of a line
            text = "".join(line.ljust(size) for line in lines)
        elif lines:
            text = lines[0]
        return parse_cells(text.replace(" ", "."), self.symbols(size), size)

    def checked(self, grid: Grids) -> Grids:
        if problem := self.problem_of(grid):
            raise DataError(f"This is no maze: {problem}")
        return grid

    def judge_grid(self, question: Grids, answer: Grids) -> str | None:
        kept = (question == answer) | ((question == OPEN) & (answer == PATH))
        if not kept.all():
            row, column = np.argwhere(~kept)[0] + 1
            return f"the maze was changed at row {row}, column {column}"
        places, on_path = _places(question[None]), (answer == PATH)[None]
        if mazes.is_shortest_path(*places, on_path)[0]:
            return None
        walls, starts, goals = places
        shortest = int(mazes.distances(walls, starts)[0, goals[0, 0], goals[0, 1]]) - 1
        if int(on_path.sum()) != shortest:
            return f"{int(on_path.sum())} cells are marked; a shortest path has {shortest}"
        return "the marked cells do not lead from S to G"

    def cell(self, symbols: str, asked: int, answered: int, changed: bool, color: bool) -> str:
        symbol = symbols[max(answered, 0)].replace(".", " ")
        if asked != answered and not (asked == OPEN and answered == PATH):
            return "! "
        if not color:
            return f"{symbol}*" if changed else f"{symbol} "
        style = "\033[2m" if answered == WALL else "\033[32m" if changed else "\033[1m"
        return f"{style}{symbol}\033[0m "

    def tile(self, symbols: str, asked: int, answered: int, wrong: bool) -> Tile:
        text = {START: "S", GOAL: "G"}.get(answered, "")
        return Tile(_FILLS[max(answered, 0)], text, (255, 255, 255), wrong)

    def legend(self, changes: bool, color: bool) -> str:
        changed = f"; changes are {'green' if color else 'starred'}" if changes else ""
        return f"o is the path from S to G{changed}"


TASK = MazeTask()


def _places(grids: Grids) -> tuple[NDArray[np.bool_], IntArray, IntArray]:
    """Walls, and the cells of start and goal."""
    size = grids.shape[2]
    flat = grids.reshape(len(grids), -1)
    starts, goals = (np.stack(np.divmod((flat == mark).argmax(1), size), 1) for mark in (START, GOAL))
    return grids == WALL, starts, goals


def _with_path(questions: Grids, on_path: NDArray[np.bool_]) -> Grids:
    return np.where(on_path, np.int8(PATH), questions)


def _turned(grids: NDArray[Any], turn: int) -> NDArray[Any]:
    """One of the eight ways to lay a square down."""
    turned = np.rot90(grids, turn % 4, axes=(1, 2))
    return turned if turn < 4 else turned[:, :, ::-1]
