"""ARC tasks as their files have them: reading, turning and recolouring, and which ones are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from macbook_optimization.errors import DataError
from trm.tasks.base import IntArray

SIZE = 30
OUTSIDE, END, FIRST_COLOUR = 0, 1, 2
NUM_COLOURS = 10
_TRIES = 5  # for each augmentation that is asked for: small grids have few different ones
_MAX_FILE_BYTES = 64 * 2**20
HOW_TO_WRITE = "Write a grid as JSON, for example [[0,1],[2,3]], or as rows of digits."
_SEPARATOR = "|||"  # between a task's name, its turn and its colours, as the public code writes them
Grid = NDArray[np.uint8]
Pair = tuple[Grid, Grid | None]  # the answer to a test of a competition is not known


@dataclass(frozen=True, slots=True)
class ArcPuzzle:
    name: str
    demonstrations: tuple[Pair, ...]
    tests: tuple[Pair, ...]

    def pairs(self) -> tuple[Pair, ...]:
        return self.demonstrations + self.tests


@dataclass(frozen=True, slots=True)
class Augmentation:
    """Colours renamed (black stays), then the grid turned."""

    turn: int = 0
    colours: tuple[int, ...] = tuple(range(NUM_COLOURS))

    def apply(self, grid: Grid) -> Grid:
        return turned(np.array(self.colours, dtype=np.uint8)[grid], self.turn)

    def invert(self, grid: Grid) -> Grid:
        back = (0, 3, 2, 1, 4, 5, 6, 7)[self.turn]
        return np.argsort(self.colours).astype(np.uint8)[turned(grid, back)]

    def name_of(self, puzzle: str) -> str:
        if self == _AS_IT_IS:
            return puzzle
        return f"{puzzle}{_SEPARATOR}t{self.turn}{_SEPARATOR}{''.join(map(str, self.colours))}"

    @classmethod
    def of_name(cls, name: str) -> tuple[str, Augmentation]:
        """The puzzle, and how it was changed."""
        puzzle, *how = name.split(_SEPARATOR)
        if not how:
            return puzzle, cls()
        turn, colours = how
        return puzzle, cls(int(turn[1:]), tuple(map(int, colours)))


_AS_IT_IS = Augmentation()


def turned(grid: Grid, turn: int) -> Grid:
    """One of the eight ways to lay a grid down, numbered as in the public code."""
    if turn == 6:
        return grid.T
    if turn in (4, 5):
        return np.flip(grid, axis=1 if turn == 4 else 0)
    if turn == 7:
        return np.fliplr(np.rot90(grid))
    return np.rot90(grid, turn)


def crop(tokens: IntArray) -> Grid:
    """The largest rectangle of colours in the canvas's first corner; an answer may have holes, and what is
    beyond them does not count."""
    canvas = np.asarray(tokens).reshape(SIZE, SIZE)
    coloured = canvas >= FIRST_COLOUR
    if not coloured[0, 0]:
        return np.zeros((0, 0), dtype=np.uint8)
    widths = np.minimum.accumulate(np.where(coloured.all(1), SIZE, coloured.argmin(1)))
    areas = widths * np.arange(1, SIZE + 1)
    rows = int(areas.argmax()) + 1
    return (canvas[:rows, : int(widths[rows - 1])] - FIRST_COLOUR).astype(np.uint8)


def read_puzzles(path: Path) -> list[ArcPuzzle]:
    """A file of one task, a file of many with its solutions beside it, or a directory of such files."""
    files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
    files = [file for file in files if not file.stem.endswith("solutions")]
    if not files:
        raise DataError(f"There is no task in {path}", hint="Name a directory of ARC tasks, or a JSON file.")
    puzzles: list[ArcPuzzle] = []
    for file in files:
        content = _read_json(file)
        if not isinstance(content, dict):
            raise DataError(f"{file} is no ARC task: it is not a JSON object")
        if "train" in content and "test" in content:
            puzzles.append(puzzle_of(file.stem, content, str(file)))
            continue
        answers = file.with_name(file.name.replace("challenges", "solutions"))
        solutions = _read_json(answers) if answers != file and answers.is_file() else {}
        for name, task in content.items():
            puzzles.append(puzzle_of(name, task, str(file), solutions.get(name)))
    return puzzles


def _read_json(file: Path) -> Any:
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise DataError(f"{file} is larger than {_MAX_FILE_BYTES // 2**20} MB; an ARC file is not")
        return json.loads(file.read_bytes())
    except OSError as error:
        raise DataError(f"Cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not readable as JSON: {error}") from error


def puzzle_of(name: str, task: Any, where: str, solutions: Any = None) -> ArcPuzzle:
    if _SEPARATOR in name:
        raise DataError(f"{where}: a task cannot be called {name!r}")
    try:
        demonstrations = tuple(
            (grid_of(pair["input"], where), grid_of(pair["output"], where)) for pair in task["train"]
        )
        outputs = solutions or [pair.get("output") for pair in task["test"]]
        tests = tuple(
            (grid_of(pair["input"], where), None if output is None else grid_of(output, where))
            for pair, output in zip(task["test"], outputs, strict=True)
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{where}: task {name} is not written as ARC tasks are ({error!r})") from error
    return ArcPuzzle(name, demonstrations, tests)


def grid_of(rows: Any, where: str) -> Grid:
    try:
        grid = np.array([[int(cell) for cell in row] for row in rows], dtype=np.int64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: a grid is rows of equally many colours", hint=HOW_TO_WRITE) from error
    if grid.ndim != 2 or not 1 <= grid.shape[0] <= SIZE or not 1 <= grid.shape[1] <= SIZE:
        raise DataError(f"{where}: a grid has 1 to {SIZE} rows and columns", hint=HOW_TO_WRITE)
    if grid.min() < 0 or grid.max() >= NUM_COLOURS:
        raise DataError(f"{where}: colours are 0 to {NUM_COLOURS - 1}", hint=HOW_TO_WRITE)
    return grid.astype(np.uint8)


def augmentations_of(puzzle: ArcPuzzle, count: int, seed: int) -> Iterator[Augmentation]:
    """As it is, and up to `count` others that look different, by the seed and the task alone."""
    digest = hashlib.blake2b(puzzle.name.encode(), digest_size=8).digest()
    rng = np.random.Generator(np.random.Philox([seed, int.from_bytes(digest)]))
    seen = {_looks(puzzle, _AS_IT_IS)}
    yield _AS_IT_IS
    for _ in range(_TRIES * count):
        if len(seen) > count:
            return
        colours = 0, *(rng.permutation(NUM_COLOURS - 1) + 1).tolist()
        way = Augmentation(int(rng.integers(8)), colours)
        looks = _looks(puzzle, way)
        if looks not in seen:
            seen.add(looks)
            yield way


def _looks(puzzle: ArcPuzzle, way: Augmentation) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for pair in puzzle.pairs():
        for grid in pair:
            digest.update(b"?" if grid is None else key_of(way.apply(grid)))
    return digest.digest()


def canvas_of(grid: Grid | None, way: Augmentation = _AS_IT_IS) -> NDArray[np.uint8]:
    canvas = np.full((SIZE, SIZE), OUTSIDE, dtype=np.uint8)
    if grid is None:
        return canvas
    grid = way.apply(grid)
    rows, columns = grid.shape
    canvas[:rows, :columns] = grid + FIRST_COLOUR
    canvas[rows : rows + 1, :columns] = END
    canvas[:rows, columns : columns + 1] = END
    return canvas


def overlap(learned: list[ArcPuzzle], tested: list[ArcPuzzle]) -> dict[str, str]:
    """Of the tasks to learn from, those that are also asked about, by their name or by a pair of grids."""
    asked = {_pair_key(pair): puzzle.name for puzzle in tested for pair in puzzle.pairs()}
    asked_names = {puzzle.name for puzzle in tested}
    found = {}
    for puzzle in learned:
        same = [asked[key] for pair in puzzle.pairs() if (key := _pair_key(pair)) in asked]
        if same or puzzle.name in asked_names:
            found[puzzle.name] = same[0] if same else puzzle.name
    return found


def refusal(both: Mapping[str, str], num_learned: int) -> DataError:
    some = [f"{name} (as {other})" if other != name else name for name, other in list(both.items())[:5]]
    more = " and others" if len(both) > 5 else ""
    return DataError(
        f"{len(both)} of the {num_learned} tasks to learn from are also among those to be asked about: "
        f"{', '.join(some)}{more}",
        hint="Figures on tasks that were learned mean nothing. overlap: drop (--overlap drop) leaves them "
        "out of what is learned, and allow builds it all the same.",
    )


def _pair_key(pair: Pair) -> bytes:
    question, answer = pair
    return key_of(question) + (b"?" if answer is None else key_of(answer))


def key_of(grid: Grid) -> bytes:
    return bytes(grid.shape) + np.ascontiguousarray(grid).tobytes()


def as_json(puzzle: ArcPuzzle) -> dict[str, Any]:
    def pairs(some: tuple[Pair, ...]) -> list[dict[str, Any]]:
        return [
            {"input": question.tolist()} | ({} if answer is None else {"output": answer.tolist()})
            for question, answer in some
        ]

    return {"train": pairs(puzzle.demonstrations), "test": pairs(puzzle.tests)}
