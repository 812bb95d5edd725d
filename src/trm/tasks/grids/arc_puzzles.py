"""ARC tasks: reading their files, augmenting them, and finding tasks that are in two sets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from macbook_optimization.errors import DataError
from macbook_optimization.file_errors import hint_for, reason_of
from macbook_optimization.input_files import TooLargeError, read_input
from macbook_optimization.json_types import parse_json
from macbook_optimization.units import MIB
from trm.arrays import IntArray

SIZE = 30
OUTSIDE, END, FIRST_COLOUR = 0, 1, 2
NUM_COLOURS = 10
_DRAWS_PER_AUGMENTATION = 5  # small grids have few different augmentations, so a draw may give a known one
MAX_INPUT_MB = 256
_MAX_SHOWN_TASKS = 5
_SEPARATOR = "|||"  # between a task's name, transform and colours, as the reference implementation writes it
_UNKNOWN = b"?"  # in place of an answer, where grids are hashed
GRID_HINT = "Write a grid as JSON, for example [[0,1],[2,3]], or as rows of digits."
Grid: TypeAlias = NDArray[np.uint8]
Pair: TypeAlias = tuple[Grid, Grid | None]  # the answers to the tests of a competition are not known


@dataclass(frozen=True, slots=True)
class ArcPuzzle:
    name: str
    demonstrations: tuple[Pair, ...]
    tests: tuple[Pair, ...]

    def pairs(self) -> tuple[Pair, ...]:
        return self.demonstrations + self.tests


@dataclass(frozen=True, slots=True)
class Augmentation:
    """Rename the colours (black stays black), then rotate or reflect the grid."""

    transform: int = 0  # see `dihedral_transform`
    colours: tuple[int, ...] = tuple(range(NUM_COLOURS))

    def apply(self, grid: Grid) -> Grid:
        return dihedral_transform(np.array(self.colours, dtype=np.uint8)[grid], self.transform)

    def invert(self, grid: Grid) -> Grid:
        inverse = (0, 3, 2, 1, 4, 5, 6, 7)[self.transform]
        return np.argsort(self.colours).astype(np.uint8)[dihedral_transform(grid, inverse)]

    def name_of(self, puzzle: str) -> str:
        """Return the name of the puzzle identifier for a task with this augmentation."""
        if self == _IDENTITY:
            return puzzle
        return f"{puzzle}{_SEPARATOR}t{self.transform}{_SEPARATOR}{''.join(map(str, self.colours))}"

    @classmethod
    def from_name(cls, name: str) -> tuple[str, Augmentation]:
        """Return the task and the augmentation that a puzzle identifier is named after."""
        puzzle, *parts = name.split(_SEPARATOR)
        if not parts:
            return puzzle, cls()
        transform, colours = parts
        return puzzle, cls(int(transform[1:]), tuple(map(int, colours)))


_IDENTITY = Augmentation()


def dihedral_transform(grid: Grid, transform: int) -> Grid:
    """Apply one of the eight rotations and reflections, numbered as in the reference implementation."""
    if transform == 6:
        return grid.T
    if transform in (4, 5):
        return np.flip(grid, axis=1 if transform == 4 else 0)
    if transform == 7:
        return np.fliplr(np.rot90(grid))
    return np.rot90(grid, transform)


def crop(tokens: IntArray) -> Grid:
    """Return the largest rectangle of colours in the first corner of the canvas.

    An answer may have holes; what is beyond them is ignored.
    """
    canvas = np.asarray(tokens).reshape(SIZE, SIZE)
    coloured = canvas >= FIRST_COLOUR
    if not coloured[0, 0]:
        return np.zeros((0, 0), dtype=np.uint8)
    widths = np.minimum.accumulate(np.where(coloured.all(1), SIZE, coloured.argmin(1)))
    areas = widths * np.arange(1, SIZE + 1)
    num_rows = int(areas.argmax()) + 1
    num_columns = int(widths[num_rows - 1])
    return (canvas[:num_rows, :num_columns] - FIRST_COLOUR).astype(np.uint8)


@dataclass(slots=True)
class InputBudget:
    """Limits what is read from all files of a build together."""

    max_bytes: int = MAX_INPUT_MB * MIB
    num_bytes: int = 0

    def read(self, file: Path) -> bytes:
        try:
            content = read_input(file, self.max_bytes - self.num_bytes)
        except TooLargeError as error:
            raise DataError(
                f"The files up to {file} have more than {self.max_bytes // MIB:,} MiB",
                hint="Raise the limit with --max-input-mb, or data.build.max_input_mb in a recipe.",
            ) from error
        self.num_bytes += len(content)
        return content


def read_puzzles(path: Path, budget: InputBudget | None = None) -> list[ArcPuzzle]:
    """Read a file of one task, a file of many with its solutions beside it, or a directory of such files."""
    budget = budget or InputBudget()
    files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
    files = [file for file in files if not file.stem.endswith("solutions")]
    if not files:
        raise DataError(f"There is no task in {path}", hint="Name a directory of ARC tasks, or a JSON file.")
    return [puzzle for file in files for puzzle in _read_file(file, budget)]


def _read_file(file: Path, budget: InputBudget) -> list[ArcPuzzle]:
    content = _read_json(file, budget)
    if not isinstance(content, dict):
        raise DataError(f"{file} is not an ARC task: it is not a JSON object")
    if "train" in content and "test" in content:
        return [puzzle_of(file.stem, content, str(file))]
    solutions_file = file.with_name(file.name.replace("challenges", "solutions"))
    solutions = {}
    if solutions_file != file and solutions_file.is_file():
        solutions = _read_json(solutions_file, budget)
        if not isinstance(solutions, dict):
            raise DataError(f"{solutions_file} does not hold solutions: it is not a JSON object")
    return [puzzle_of(name, task, str(file), solutions.get(name)) for name, task in content.items()]


def _read_json(file: Path, budget: InputBudget) -> Any:
    try:
        return parse_json(budget.read(file))
    except OSError as error:
        hint = hint_for(error, "Name a directory of ARC tasks, or a JSON file.")
        raise DataError(f"Cannot read {file}: {reason_of(error)}", hint=hint) from error
    except MemoryError as error:
        raise DataError(f"{file} does not fit into memory", hint="Use a part of it.") from error
    except ValueError as error:
        raise DataError(f"{file} is not readable as JSON: {error}") from error


def puzzle_of(name: str, task: Any, where: str, solutions: Any = None) -> ArcPuzzle:
    """Convert the JSON of a task. `solutions` are the outputs of its tests, where they are stored apart."""
    if _SEPARATOR in name:
        raise DataError(f"{where}: the name {name!r} of a task must not contain {_SEPARATOR}")
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
        raise DataError(f"{where}: task {name} does not have the format of ARC tasks ({error!r})") from error
    return ArcPuzzle(name, demonstrations, tests)


def grid_of(rows: Any, where: str) -> Grid:
    try:
        grid = np.array([[int(cell) for cell in row] for row in rows], dtype=np.int64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: a grid has rows of equally many colours", hint=GRID_HINT) from error
    if grid.ndim != 2 or not 1 <= grid.shape[0] <= SIZE or not 1 <= grid.shape[1] <= SIZE:
        raise DataError(f"{where}: a grid has 1 to {SIZE} rows and columns", hint=GRID_HINT)
    if grid.min() < 0 or grid.max() >= NUM_COLOURS:
        raise DataError(f"{where}: colours are 0 to {NUM_COLOURS - 1}", hint=GRID_HINT)
    return grid.astype(np.uint8)


def augmentations_of(puzzle: ArcPuzzle, count: int, seed: int) -> Iterator[Augmentation]:
    """Yield the identity and up to `count` augmentations with different results.

    They depend on the seed and on the task's name and grids only.
    """
    digest = hashlib.blake2b(puzzle.name.encode(), digest_size=8).digest()
    rng = np.random.Generator(np.random.Philox([seed, int.from_bytes(digest)]))
    seen = {_digest(puzzle, _IDENTITY)}
    yield _IDENTITY
    for _ in range(_DRAWS_PER_AUGMENTATION * count):
        if len(seen) > count:
            return
        colours = 0, *(rng.permutation(NUM_COLOURS - 1) + 1).tolist()
        augmentation = Augmentation(int(rng.integers(8)), colours)
        result = _digest(puzzle, augmentation)
        if result not in seen:
            seen.add(result)
            yield augmentation


def _digest(puzzle: ArcPuzzle, augmentation: Augmentation) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for pair in puzzle.pairs():
        for grid in pair:
            digest.update(_UNKNOWN if grid is None else key_of(augmentation.apply(grid)))
    return digest.digest()


def canvas_of(grid: Grid | None, augmentation: Augmentation = _IDENTITY) -> NDArray[np.uint8]:
    canvas = np.full((SIZE, SIZE), OUTSIDE, dtype=np.uint8)
    if grid is None:
        return canvas
    grid = augmentation.apply(grid)
    num_rows, num_columns = grid.shape
    canvas[:num_rows, :num_columns] = grid + FIRST_COLOUR
    canvas[num_rows : num_rows + 1, :num_columns] = END
    canvas[:num_rows, num_columns : num_columns + 1] = END
    return canvas


def overlap(train: list[ArcPuzzle], test: list[ArcPuzzle]) -> dict[str, str]:
    """Return the training tasks that share a name or a pair of grids with a test task: name -> test name."""
    names_by_pair = {_pair_key(pair): puzzle.name for puzzle in test for pair in puzzle.pairs()}
    test_names = {puzzle.name for puzzle in test}
    found = {}
    for puzzle in train:
        same = [names_by_pair[key] for pair in puzzle.pairs() if (key := _pair_key(pair)) in names_by_pair]
        if same:
            found[puzzle.name] = same[0]
        elif puzzle.name in test_names:
            found[puzzle.name] = puzzle.name
    return found


def overlap_error(in_both: Mapping[str, str], num_train: int) -> DataError:
    shown = [
        name if name == test_name else f"{name} (as {test_name})" for name, test_name in in_both.items()
    ][:_MAX_SHOWN_TASKS]
    if len(in_both) > len(shown):
        shown.append(f"and {len(in_both) - len(shown)} more")
    return DataError(
        f"{len(in_both)} of the {num_train} training tasks are also test tasks: {', '.join(shown)}",
        hint="Scores on tasks that were trained on mean nothing. overlap: drop (--overlap drop) removes them "
        "from training, and allow builds the dataset regardless.",
    )


def _pair_key(pair: Pair) -> bytes:
    question, answer = pair
    return key_of(question) + (_UNKNOWN if answer is None else key_of(answer))


def key_of(grid: Grid) -> bytes:
    """Return bytes that identify a grid, its shape included."""
    return bytes(grid.shape) + np.ascontiguousarray(grid).tobytes()


def as_json(puzzle: ArcPuzzle) -> dict[str, list[dict[str, list[list[int]]]]]:
    return {
        "train": [_pair_as_json(pair) for pair in puzzle.demonstrations],
        "test": [_pair_as_json(pair) for pair in puzzle.tests],
    }


def _pair_as_json(pair: Pair) -> dict[str, list[list[int]]]:
    question, answer = pair
    if answer is None:
        return {"input": question.tolist()}
    return {"input": question.tolist(), "output": answer.tolist()}
