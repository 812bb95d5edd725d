"""ARC-AGI and ConceptARC: a few pairs of grids show a rule, and the answer applies it to one more grid.

Tokens are those of the reference implementation, on a canvas of 30 x 30: 0 outside, 1 where a grid ends,
c + 2 for colour c. The model receives a puzzle identifier, one per task and augmentation (colours renamed,
grids rotated or reflected). At test time the answers of all augmentations are mapped back and vote.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from macbook_optimization.errors import DataError
from macbook_optimization.json_types import parse_json
from macbook_optimization.units import MIB
from macbook_optimization.worker_pool import ordered
from trm.arrays import FloatArray, IntArray
from trm.batch import IGNORE_LABEL, Batch
from trm.config import Count, CountOrZero, Section, parse_section
from trm.tasks.base import DataSpec, GridLayout, Progress, Question, Scorer
from trm.tasks.dataset import Split
from trm.tasks.dataset_writer import DatasetWriter
from trm.tasks.grids.arc_puzzles import (
    FIRST_COLOUR,
    GRID_HINT,
    MAX_INPUT_MB,
    NUM_COLOURS,
    OUTSIDE,
    SIZE,
    ArcPuzzle,
    Augmentation,
    InputBudget,
    Pair,
    as_json,
    augmentations_of,
    canvas_of,
    crop,
    grid_of,
    overlap,
    overlap_error,
    read_puzzles,
)
from trm.tasks.grids.arc_view import ArcView
from trm.tasks.grids.arc_votes import PASS_AT_2, TEST_PUZZLES, Votes

Canvases: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # (augmentations, pairs, cells) each

_SPEC = DataSpec(
    max_len=SIZE * SIZE,
    vocab_size=NUM_COLOURS + FIRST_COLOUR,
    num_outputs=NUM_COLOURS + FIRST_COLOUR,
    layout=GridLayout(SIZE, SIZE),
)
_TRANSLATED_SHARE = 0.7  # of training examples


class BuildOptions(Section):
    """`data.build` of a recipe."""

    train: tuple[Path, ...] = ()
    """Files or directories of tasks whose demonstrations and tests are both used for training."""
    test: Annotated[tuple[Path, ...], Field(min_length=1)]
    """Files or directories of test tasks; their demonstrations are used for training."""
    augmentations: Annotated[CountOrZero, Field(le=10_000)] = 100
    """Most augmented copies per task; a task with small grids has fewer different ones."""
    seed: CountOrZero = 0
    """Seed of the augmentations."""
    overlap: Literal["refuse", "drop", "allow"] = "refuse"
    """Treatment of tasks in `train` that are also in `test`; `drop` removes them from training."""
    max_input_mb: Count = MAX_INPUT_MB
    """Most MiB to read from all files together."""


class ArcTask(ArcView):
    name = "arc"
    num_draws = 3
    primary_metric = PASS_AT_2
    verified = "answered, and not known to be wrong"
    one_question_per_line = True

    def check_options(self, options: Mapping[str, object]) -> None:
        parse_section(BuildOptions, options, "data.build")

    def spec(self, options: Mapping[str, object]) -> DataSpec:
        """Return the spec with an upper bound of identifiers, as small grids have fewer augmentations."""
        parsed = parse_section(BuildOptions, options, "data.build")
        num_puzzles = sum(map(len, _read_all(parsed)))
        return replace(_SPEC, num_puzzle_identifiers=1 + num_puzzles * (1 + parsed.augmentations))

    def least_spec(self) -> DataSpec:
        """Return the spec of any dataset with the fewest identifiers, as only the files say how many."""
        return _SPEC

    def complete(self, spec: DataSpec) -> DataSpec:
        expected = (_SPEC.max_len, _SPEC.vocab_size, _SPEC.num_outputs)
        if (spec.max_len, spec.vocab_size, spec.num_outputs) != expected:
            raise DataError(
                f"An ARC dataset has {_SPEC.max_len} cells and {_SPEC.vocab_size} tokens; this one has "
                f"{spec.max_len} cells, {spec.vocab_size} input tokens and {spec.num_outputs} outputs"
            )
        return replace(spec, layout=_SPEC.layout)

    def build(
        self, options: Mapping[str, object], directory: Path, progress: Progress, jobs: int = 1
    ) -> None:
        parsed = parse_section(BuildOptions, options, "data.build")
        augment = partial(_augmented, parsed.augmentations, parsed.seed)
        made_by = {"task": self.name, "options": parsed.model_dump(mode="json")}
        with DatasetWriter(directory, made_by) as writer:  # first, so that a bad path costs no time
            train_puzzles, test_puzzles = _select_puzzles(parsed)
            tagged = [(puzzle, False) for puzzle in train_puzzles]
            tagged += [(puzzle, True) for puzzle in test_puzzles]
            train = writer.split("train", _SPEC, ignore_label=0)
            test = writer.split("test", _SPEC, ignore_label=0)
            for number, puzzle in enumerate(ordered(augment, tagged, min(jobs, len(tagged)))):
                progress("augmenting tasks", number, len(tagged))
                identifiers = np.arange(len(writer.names), len(writer.names) + len(puzzle.names))
                writer.names += puzzle.names
                if puzzle.train is not None:
                    train.add_group(identifiers, *puzzle.train)
                if puzzle.test is not None:
                    test.add_group(identifiers, *puzzle.test)
            progress("augmenting tasks", len(tagged), len(tagged))
            writer.write_json(TEST_PUZZLES, {puzzle.name: as_json(puzzle) for puzzle in test_puzzles})

    def augment(self, batch: Batch, draws: FloatArray) -> Batch:
        """Move both grids of a pair by the same distance on their canvas, in seven of ten examples."""
        inputs = batch.inputs.copy()
        labels = batch.labels.copy()
        for row in np.flatnonzero(draws[:, 0] < _TRANSLATED_SHARE):
            question = batch.inputs[row].reshape(SIZE, SIZE)
            answer = batch.labels[row].reshape(SIZE, SIZE)
            room = SIZE - np.maximum(_extent(question), _extent(answer))
            down, right = (draws[row, 1:] * (room + 1)).astype(int)
            inputs[row] = _moved(question, down, right, OUTSIDE).reshape(-1)
            labels[row] = _moved(answer, down, right, IGNORE_LABEL).reshape(-1)
        return replace(batch, inputs=inputs, labels=labels)

    def scorer(self, split: Split) -> Scorer:
        return Votes(split)

    def read(self, source: bytes, spec: DataSpec) -> Question:
        """Parse a grid as JSON, or as rows of digits separated by white space."""
        text = source.decode("utf-8-sig", errors="replace")
        try:
            rows = parse_json(text) if text.lstrip().startswith("[") else [list(row) for row in text.split()]
        except ValueError as error:
            raise DataError(f"This is not a grid: {error}", hint=GRID_HINT) from error
        return Question(canvas_of(grid_of(rows, "this")).reshape(-1).astype(np.int64))

    def text(self, tokens: IntArray) -> str:
        return json.dumps(crop(tokens).tolist(), separators=(",", ":"))

    def verify(self, question: IntArray, answer: IntArray, label: IntArray | None = None) -> str | None:
        """Check that the answer is a grid. Whether it follows the rule, only the label can decide."""
        if not crop(answer).size:
            return "the answer is not a grid: its first cell has no colour"
        if label is not None and not np.array_equal(crop(answer), crop(label)):
            return "the author of the task has a different answer"
        return None

    def solution(self, question: IntArray) -> IntArray | None:
        return None


TASK = ArcTask()


def _read_all(options: BuildOptions) -> tuple[list[ArcPuzzle], list[ArcPuzzle]]:
    """Return the puzzles of `train` and those of `test`."""
    budget = InputBudget(options.max_input_mb * MIB)
    train = [puzzle for path in options.train for puzzle in read_puzzles(path, budget)]
    test = [puzzle for path in options.test for puzzle in read_puzzles(path, budget)]
    return train, test


def _select_puzzles(options: BuildOptions) -> tuple[list[ArcPuzzle], list[ArcPuzzle]]:
    """Return the puzzles for training and for testing, without those in both unless that is allowed."""
    train, test = _read_all(options)
    _require_different_names(test)
    if options.overlap == "allow":
        return train, test
    in_both = overlap(train, test)
    if in_both and options.overlap == "refuse":
        raise overlap_error(in_both, len(train))
    return [puzzle for puzzle in train if puzzle.name not in in_both], test


def _require_different_names(puzzles: list[ArcPuzzle]) -> None:
    """Votes and submissions identify a test task by its name."""
    counts = Counter(puzzle.name for puzzle in puzzles)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise DataError(f"Several test tasks are named {repeated[0]}", hint="Rename or remove all but one.")


@dataclass(frozen=True, slots=True)
class _AugmentedPuzzle:
    """A task in all its augmentations."""

    names: list[str]  # of the puzzle identifiers
    train: Canvases | None
    test: Canvases | None


def _augmented(num_augmentations: int, seed: int, tagged: tuple[ArcPuzzle, bool]) -> _AugmentedPuzzle:
    puzzle, is_tested = tagged
    augmentations = list(augmentations_of(puzzle, num_augmentations, seed))
    if is_tested:
        train_pairs = puzzle.demonstrations
        test_pairs = puzzle.tests
    else:
        train_pairs = tuple(pair for pair in puzzle.pairs() if pair[1] is not None)
        test_pairs = ()
    return _AugmentedPuzzle(
        names=[augmentation.name_of(puzzle.name) for augmentation in augmentations],
        train=_canvases(train_pairs, augmentations),
        test=_canvases(test_pairs, augmentations),
    )


def _canvases(pairs: tuple[Pair, ...], augmentations: list[Augmentation]) -> Canvases | None:
    if not pairs:
        return None
    shape = (len(augmentations), len(pairs), SIZE * SIZE)
    questions = [canvas_of(question, each) for each in augmentations for question, _ in pairs]
    answers = [canvas_of(answer, each) for each in augmentations for _, answer in pairs]
    return np.stack(questions).reshape(shape), np.stack(answers).reshape(shape)


def _extent(canvas: IntArray) -> tuple[int, int]:
    """Return the number of rows and columns up to the last coloured one."""
    coloured = canvas >= FIRST_COLOUR
    if not coloured.any():
        return 1, 1
    rows = np.flatnonzero(coloured.any(1))
    columns = np.flatnonzero(coloured.any(0))
    return int(rows[-1]) + 1, int(columns[-1]) + 1


def _moved(canvas: IntArray, down: int, right: int, outside: int) -> IntArray:
    moved = np.full_like(canvas, outside)
    moved[down:, right:] = canvas[: SIZE - down, : SIZE - right]
    return moved
