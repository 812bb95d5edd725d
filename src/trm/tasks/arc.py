"""ARC-AGI and ConceptARC: a few pairs of grids show a rule, and the answer applies it to one grid more.

Tokens are those of the public code, on a canvas of 30 x 30: 0 outside, 1 where a grid ends, c + 2 for colour
c. The model knows a task by its puzzle identifier: one for every task in every way that its colours are
renamed and its grids turned. At test time the answers of all these ways are turned back and vote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from trm.tasks.arc_puzzles import (
    FIRST_COLOUR,
    HOW_TO_WRITE,
    NUM_COLOURS,
    OUTSIDE,
    SIZE,
    ArcPuzzle,
    Augmentation,
    Grid,
    Pair,
    as_json,
    augmentations_of,
    canvas_of,
    crop,
    grid_of,
    key_of,
    overlap,
    puzzle_of,
    read_puzzles,
    refusal,
)
from trm.tasks.base import IGNORE_LABEL, IntArray, Picture, Progress, TaskShape, Tile
from trm.tasks.dataset_writer import DatasetWriter

_PALETTE = (
    (0, 0, 0), (0, 116, 217), (255, 65, 54), (46, 204, 64), (255, 220, 0),
    (170, 170, 170), (240, 18, 190), (255, 133, 27), (127, 219, 255), (135, 12, 37),
)  # fmt: skip
_TERMINAL_COLOURS = (16, 27, 196, 34, 226, 244, 201, 208, 45, 88)


class BuildOptions(Section):
    """`train` is learned from as a whole; of `test`, the demonstrations are, and the tests are asked."""

    train: tuple[Path, ...] = ()
    test: Annotated[tuple[Path, ...], Field(min_length=1)]
    augmentations: Annotated[CountOrZero, Field(le=10_000)] = 100
    seed: CountOrZero = 0
    # What becomes of tasks in `train` that are also in `test`; `drop` leaves them out of what is learned.
    overlap: Literal["refuse", "drop", "allow"] = "refuse"


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
            both = overlap(learned, tested)
            if both and asked.overlap == "refuse":
                raise refusal(both, len(learned))
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
            writer.write_json("test_puzzles.json", {puzzle.name: as_json(puzzle) for puzzle in tested})

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
            raise DataError(f"This is no grid: {error}", hint=HOW_TO_WRITE) from error
        return canvas_of(grid_of(rows, "this")).reshape(-1).astype(np.int64)

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
            self.puzzles = {name: puzzle_of(name, task, str(dataset)) for name, task in asked.items()}
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise DataError(f"{dataset} does not say which tasks are asked: {error}", hint=AGAIN) from error
        self.votes: dict[tuple[str, bytes], dict[bytes, list[float]]] = {}
        self.grids: dict[bytes, Grid] = {}

    def see(self, inputs: IntArray, identifiers: IntArray, answers: IntArray, beliefs: Any) -> None:
        for tokens, identifier, answer, belief in zip(inputs, identifiers, answers, beliefs, strict=True):
            puzzle, way = Augmentation.of_name(self.names[identifier])
            question, given = way.invert(crop(tokens)), way.invert(crop(answer))
            self.grids[key_of(given)] = given
            box = self.votes.setdefault((puzzle, key_of(question)), {})
            box.setdefault(key_of(given), []).append(float(belief))

    def best(self, puzzle: str, question: Grid, count: int) -> list[Grid]:
        box = self.votes.get((puzzle, key_of(question)), {})
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


@dataclass(frozen=True, slots=True)
class _Variants:
    """A task in all its ways: canvases of questions and answers, (ways, pairs, cells) each."""

    names: list[str]
    shown: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None
    asked: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None


def _variants(augmentations: int, seed: int, what: tuple[ArcPuzzle, bool]) -> _Variants:
    puzzle, is_tested = what
    ways = list(augmentations_of(puzzle, augmentations, seed))
    shown = puzzle.demonstrations if is_tested else _answered(puzzle.pairs())
    asked = puzzle.tests if is_tested else ()
    return _Variants(
        [way.name_of(puzzle.name) for way in ways],
        _canvases(shown, ways) if shown else None,
        _canvases(asked, ways) if asked else None,
    )


def _canvases(
    pairs: tuple[Pair, ...], ways: list[Augmentation]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    questions, answers = (
        np.stack([canvas_of(pair[side], way) for way in ways for pair in pairs]).reshape(
            len(ways), len(pairs), -1
        )
        for side in (0, 1)
    )
    return questions, answers


def _extent(canvas: IntArray) -> tuple[int, int]:
    """Rows and columns up to the last coloured one."""
    rows, columns = (np.flatnonzero((canvas >= FIRST_COLOUR).any(axis)) for axis in (1, 0))
    return (int(rows[-1]) + 1, int(columns[-1]) + 1) if len(rows) else (1, 1)


def _answered(pairs: tuple[Pair, ...]) -> tuple[Pair, ...]:
    return tuple(pair for pair in pairs if pair[1] is not None)


def _shape(num_identifiers: int) -> TaskShape:
    return TaskShape(SIZE * SIZE, NUM_COLOURS + 2, NUM_COLOURS + 2, num_identifiers)
