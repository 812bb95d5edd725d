"""ARC-AGI and ConceptARC: a few pairs of grids show a rule, and the answer applies it to one grid more.

Tokens are those of the public code, on a canvas of 30 x 30: 0 outside, 1 where a grid ends, c + 2 for colour
c. The model knows a task by its puzzle identifier: one for every task in every way that its colours are
renamed and its grids turned. At test time the answers of all these ways are turned back and vote.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from macbook_optimization.dataset_files import AGAIN
from macbook_optimization.errors import DataError
from macbook_optimization.worker_pool import ordered
from trm.config import CountOrZero, Section, parse_section
from trm.tasks.base import IGNORE_LABEL, DatasetWriter, IntArray, Picture, Progress, TaskShape, Tile

SIZE = 30
OUTSIDE, END, FIRST_COLOUR = 0, 1, 2
NUM_COLOURS = 10
_TRIES = 5  # for each augmentation that is asked for: small grids have few different ones
_MAX_FILE_BYTES = 64 * 2**20
_HOW_TO_WRITE = "Write a grid as JSON, for example [[0,1],[2,3]], or as rows of digits."
_PALETTE = (
    (0, 0, 0), (0, 116, 217), (255, 65, 54), (46, 204, 64), (255, 220, 0),
    (170, 170, 170), (240, 18, 190), (255, 133, 27), (127, 219, 255), (135, 12, 37),
)  # fmt: skip
_TERMINAL_COLOURS = (16, 27, 196, 34, 226, 244, 201, 208, 45, 88)
_SEPARATOR = "|||"  # between a task's name, its turn and its colours, as the public code writes them

Grid = NDArray[np.uint8]
Pair = tuple[Grid, Grid | None]  # the answer to a test of a competition is not known


class BuildOptions(Section):
    """`train` is learned from as a whole; of `test`, the demonstrations are, and the tests are asked."""

    train: tuple[Path, ...] = ()
    test: Annotated[tuple[Path, ...], Field(min_length=1)]
    augmentations: Annotated[CountOrZero, Field(le=10_000)] = 100
    seed: CountOrZero = 0
    # What becomes of tasks in `train` that are also in `test`; `drop` leaves them out of what is learned.
    overlap: Literal["refuse", "drop", "allow"] = "refuse"


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


class ArcTask:
    name = "arc"
    num_draws = 3
    headline = "pass@2"
    solved = "answered, and not known to be wrong"

    def check_options(self, options: Mapping[str, Any]) -> None:
        parse_section(BuildOptions, options, "data.build")

    def shape(self, options: Mapping[str, Any]) -> TaskShape:
        """Identifiers are an upper bound: small grids have fewer different augmentations."""
        asked = parse_section(BuildOptions, options, "data.build")
        puzzles = sum(len(read_puzzles(path)) for path in (*asked.train, *asked.test))
        return _shape(1 + puzzles * (1 + asked.augmentations))

    def build(self, options: Mapping[str, Any], directory: Path, progress: Progress, jobs: int = 1) -> None:
        asked = parse_section(BuildOptions, options, "data.build")
        learned = [puzzle for path in asked.train for puzzle in read_puzzles(path)]
        tested = [puzzle for path in asked.test for puzzle in read_puzzles(path)]
        if asked.overlap != "allow":
            both = _overlap(learned, tested)
            if both and asked.overlap == "refuse":
                raise _refusal(both, len(learned))
            learned = [puzzle for puzzle in learned if puzzle.name not in both]
        made_by = {"task": self.name, "options": asked.model_dump(mode="json")}
        with DatasetWriter(directory, made_by) as writer:
            names = writer.names
            train, test = (writer.split(name, SIZE * SIZE, NUM_COLOURS + 2) for name in ("train", "test"))
            puzzles = [(p, False) for p in learned] + [(p, True) for p in tested]
            vary = partial(_variants, asked.augmentations, asked.seed)
            for number, found in enumerate(ordered(vary, puzzles, min(jobs, len(puzzles)))):
                progress("turning and colouring", number, len(puzzles))
                identifiers = np.arange(len(names), len(names) + len(found.names))
                names += found.names
                for split, canvases in ((train, found.shown), (test, found.asked)):
                    if canvases is not None:
                        split.add_group(identifiers, *canvases)
            progress("turning and colouring", len(puzzles), len(puzzles))
            writer.write_json("test_puzzles.json", {puzzle.name: _as_json(puzzle) for puzzle in tested})

    def check(self, shape: TaskShape) -> None:
        if (shape.seq_len, shape.vocab_size, shape.output_vocab_size) != (SIZE * SIZE, 12, 12):
            raise DataError(f"An ARC set has 900 cells and 12 tokens; this one has {shape}")

    def augment(
        self, inputs: IntArray, labels: IntArray, draws: NDArray[np.float64]
    ) -> tuple[IntArray, IntArray]:
        """Both grids moved by as much on their canvas, in seven of ten examples."""
        moved = inputs.copy(), labels.copy()
        for i in np.flatnonzero(draws[:, 0] < 0.7):
            pair = [tokens[i].reshape(SIZE, SIZE) for tokens in (inputs, labels)]
            room = SIZE - np.max([_extent(canvas) for canvas in pair], axis=0)
            down, right = (draws[i, 1:] * (room + 1)).astype(int)
            for tokens, canvas, outside in zip(moved, pair, (OUTSIDE, IGNORE_LABEL), strict=True):
                there = np.full_like(canvas, outside)
                there[down:, right:] = canvas[: SIZE - down, : SIZE - right]
                tokens[i] = there.reshape(-1)
        return moved

    def encode(self, text: str, shape: TaskShape) -> IntArray:
        """A grid as JSON, or rows of digits separated by white space."""
        try:
            rows = json.loads(text) if text.lstrip().startswith("[") else [list(row) for row in text.split()]
        except (ValueError, RecursionError) as error:
            raise DataError(f"This is no grid: {error}", hint=_HOW_TO_WRITE) from error
        return _canvas(_grid(rows, "this")).reshape(-1).astype(np.int64)

    def decode(self, tokens: IntArray) -> str:
        return json.dumps(crop(tokens).tolist(), separators=(",", ":"))

    def show(self, question: IntArray, answer: IntArray, before: IntArray | None, color: bool) -> str:
        grid = crop(answer)
        last = None if before is None else crop(before)
        same_shape = last is not None and last.shape == grid.shape
        lines = []
        for r, row in enumerate(grid):
            cells = []
            for c, colour in enumerate(row.tolist()):
                changed = last is not None and (not same_shape or bool(last[r, c] != colour))
                if color:
                    cells.append(f"\033[48;5;{_TERMINAL_COLOURS[colour]}m{'* ' if changed else '  '}\033[0m")
                else:
                    cells.append(f"{colour}{'*' if changed else ' '}")
            lines.append("".join(cells))
        return "\n".join(lines) or "(an empty grid)"

    def legend(self, changes: bool, color: bool) -> str:
        return "changes are starred" if changes else ""

    def picture(self, question: IntArray, answer: IntArray, label: IntArray | None) -> Picture:
        """The answer; beyond the label's size, or where it is missing, cells are wrong, too."""
        grid = crop(answer)
        right = None if label is None else crop(label)
        shape = grid.shape if right is None else tuple(np.maximum(grid.shape, right.shape))
        tiles = []
        for r in range(max(1, shape[0])):
            row = []
            for c in range(max(1, shape[1])):
                ours, theirs = (_colour_at(each, r, c) for each in (grid, right))
                fill = (255, 255, 255) if ours is None else _PALETTE[ours]
                row.append(Tile(fill, wrong=right is not None and ours != theirs))
            tiles.append(row)
        return Picture(tiles)

    def right_answer(self, question: IntArray) -> IntArray | None:
        return None

    def judge(self, question: IntArray, answer: IntArray, label: IntArray | None = None) -> str | None:
        """Whether the rule was found, only the author of a task can tell; whether it is a grid, anybody."""
        if not crop(answer).size:
            return "the answer is no grid: its first cell has no colour"
        if label is not None and not np.array_equal(crop(answer), crop(label)):
            return "the author of the task has another answer"
        return None

    def scorer(self, dataset: Path) -> Votes:
        return Votes(dataset)


TASK = ArcTask()


class Votes:
    """What every way of turning and colouring a task answered, turned back. The answer that most of them gave
    comes first; of equally many, the one that the halting head believes in more."""

    def __init__(self, dataset: Path) -> None:
        try:
            self.names = json.loads((dataset / "identifiers.json").read_bytes())
            asked = json.loads((dataset / "test_puzzles.json").read_bytes())
            self.puzzles = {name: _puzzle(name, task, str(dataset)) for name, task in asked.items()}
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise DataError(f"{dataset} does not say which tasks are asked: {error}", hint=AGAIN) from error
        self.votes: dict[tuple[str, bytes], dict[bytes, list[float]]] = {}
        self.grids: dict[bytes, Grid] = {}

    def see(self, inputs: IntArray, identifiers: IntArray, answers: IntArray, beliefs: Any) -> None:
        for tokens, identifier, answer, belief in zip(inputs, identifiers, answers, beliefs, strict=True):
            puzzle, way = Augmentation.of_name(self.names[identifier])
            question, given = way.invert(crop(tokens)), way.invert(crop(answer))
            self.grids[_key(given)] = given
            box = self.votes.setdefault((puzzle, _key(question)), {})
            box.setdefault(_key(given), []).append(float(belief))

    def best(self, puzzle: str, question: Grid, count: int) -> list[Grid]:
        box = self.votes.get((puzzle, _key(question)), {})
        order = sorted(box, key=lambda key: (len(box[key]), float(np.mean(box[key]))), reverse=True)
        return [self.grids[key] for key in order[:count]]

    def scores(self) -> dict[str, float]:
        """Over the tasks that were asked about at all: the share of their tests that an attempt solves."""
        seen = {puzzle for puzzle, _ in self.votes}
        puzzles = [puzzle for name, puzzle in self.puzzles.items() if name in seen]
        return {
            f"pass@{count}": float(np.mean([self._solved(puzzle, count) for puzzle in puzzles]))
            if puzzles
            else 0.0
            for count in (1, 2)
        }

    def _solved(self, puzzle: ArcPuzzle, count: int) -> float:
        right = [
            any(
                answer is not None and np.array_equal(attempt, answer)
                for attempt in self.best(puzzle.name, question, count)
            )
            for question, answer in puzzle.tests
        ]
        return float(np.mean(right)) if right else 0.0

    def submission(self) -> dict[str, list[dict[str, list[list[int]]]]]:
        """Two attempts for every test of every task, as the competition wants them."""
        found = {}
        for name, puzzle in self.puzzles.items():
            attempts = []
            for question, _ in puzzle.tests:
                grids = [grid.tolist() for grid in self.best(name, question, 2)] or [[[0]]]
                attempts.append({"attempt_1": grids[0], "attempt_2": grids[-1]})
            found[name] = attempts
        return found


def _colour_at(grid: Grid | None, row: int, column: int) -> int | None:
    inside = grid is not None and row < grid.shape[0] and column < grid.shape[1]
    return int(grid[row, column]) if inside and grid is not None else None


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
            puzzles.append(_puzzle(file.stem, content, str(file)))
            continue
        answers = file.with_name(file.name.replace("challenges", "solutions"))
        solutions = _read_json(answers) if answers != file and answers.is_file() else {}
        for name, task in content.items():
            puzzles.append(_puzzle(name, task, str(file), solutions.get(name)))
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


def _puzzle(name: str, task: Any, where: str, solutions: Any = None) -> ArcPuzzle:
    if _SEPARATOR in name:
        raise DataError(f"{where}: a task cannot be called {name!r}")
    try:
        demonstrations = tuple(
            (_grid(pair["input"], where), _grid(pair["output"], where)) for pair in task["train"]
        )
        outputs = solutions or [pair.get("output") for pair in task["test"]]
        tests = tuple(
            (_grid(pair["input"], where), None if output is None else _grid(output, where))
            for pair, output in zip(task["test"], outputs, strict=True)
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{where}: task {name} is not written as ARC tasks are ({error!r})") from error
    return ArcPuzzle(name, demonstrations, tests)


def _grid(rows: Any, where: str) -> Grid:
    try:
        grid = np.array([[int(cell) for cell in row] for row in rows], dtype=np.int64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: a grid is rows of equally many colours", hint=_HOW_TO_WRITE) from error
    if grid.ndim != 2 or not 1 <= grid.shape[0] <= SIZE or not 1 <= grid.shape[1] <= SIZE:
        raise DataError(f"{where}: a grid has 1 to {SIZE} rows and columns", hint=_HOW_TO_WRITE)
    if grid.min() < 0 or grid.max() >= NUM_COLOURS:
        raise DataError(f"{where}: colours are 0 to {NUM_COLOURS - 1}", hint=_HOW_TO_WRITE)
    return grid.astype(np.uint8)


def _augmentations(puzzle: ArcPuzzle, count: int, seed: int) -> Iterator[Augmentation]:
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


@dataclass(frozen=True, slots=True)
class _Variants:
    """A task in all its ways: canvases of questions and answers, (ways, pairs, cells) each."""

    names: list[str]
    shown: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None
    asked: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None


def _variants(augmentations: int, seed: int, what: tuple[ArcPuzzle, bool]) -> _Variants:
    puzzle, is_tested = what
    ways = list(_augmentations(puzzle, augmentations, seed))
    shown = puzzle.demonstrations if is_tested else _answered(puzzle.pairs())
    asked = puzzle.tests if is_tested else ()
    return _Variants(
        [way.name_of(puzzle.name) for way in ways],
        _canvases(shown, ways) if shown else None,
        _canvases(asked, ways) if asked else None,
    )


def _looks(puzzle: ArcPuzzle, way: Augmentation) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for pair in puzzle.pairs():
        for grid in pair:
            digest.update(b"?" if grid is None else _key(way.apply(grid)))
    return digest.digest()


def _canvases(
    pairs: tuple[Pair, ...], ways: list[Augmentation]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    questions, answers = (
        np.stack([_canvas(pair[side], way) for way in ways for pair in pairs]).reshape(
            len(ways), len(pairs), -1
        )
        for side in (0, 1)
    )
    return questions, answers


def _canvas(grid: Grid | None, way: Augmentation = _AS_IT_IS) -> NDArray[np.uint8]:
    canvas = np.full((SIZE, SIZE), OUTSIDE, dtype=np.uint8)
    if grid is None:
        return canvas
    grid = way.apply(grid)
    rows, columns = grid.shape
    canvas[:rows, :columns] = grid + FIRST_COLOUR
    canvas[rows : rows + 1, :columns] = END
    canvas[:rows, columns : columns + 1] = END
    return canvas


def _extent(canvas: IntArray) -> tuple[int, int]:
    """Rows and columns up to the last coloured one."""
    rows, columns = (np.flatnonzero((canvas >= FIRST_COLOUR).any(axis)) for axis in (1, 0))
    return (int(rows[-1]) + 1, int(columns[-1]) + 1) if len(rows) else (1, 1)


def _answered(pairs: tuple[Pair, ...]) -> tuple[Pair, ...]:
    return tuple(pair for pair in pairs if pair[1] is not None)


def _overlap(learned: list[ArcPuzzle], tested: list[ArcPuzzle]) -> dict[str, str]:
    """Of the tasks to learn from, those that are also asked about, by their name or by a pair of grids."""
    asked = {_pair_key(pair): puzzle.name for puzzle in tested for pair in puzzle.pairs()}
    asked_names = {puzzle.name for puzzle in tested}
    found = {}
    for puzzle in learned:
        same = [asked[key] for pair in puzzle.pairs() if (key := _pair_key(pair)) in asked]
        if same or puzzle.name in asked_names:
            found[puzzle.name] = same[0] if same else puzzle.name
    return found


def _refusal(both: Mapping[str, str], num_learned: int) -> DataError:
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
    return _key(question) + (b"?" if answer is None else _key(answer))


def _key(grid: Grid) -> bytes:
    return bytes(grid.shape) + np.ascontiguousarray(grid).tobytes()


def _as_json(puzzle: ArcPuzzle) -> dict[str, Any]:
    def pairs(some: tuple[Pair, ...]) -> list[dict[str, Any]]:
        return [
            {"input": question.tolist()} | ({} if answer is None else {"output": answer.tolist()})
            for question, answer in some
        ]

    return {"train": pairs(puzzle.demonstrations), "test": pairs(puzzle.tests)}


def _shape(num_identifiers: int) -> TaskShape:
    return TaskShape(SIZE * SIZE, NUM_COLOURS + 2, NUM_COLOURS + 2, num_identifiers)
