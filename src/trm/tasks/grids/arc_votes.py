"""The score of ARC: all augmentations of a task vote on its answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from macbook_optimization.dataset_files import MAX_JSON_BYTES, REBUILD_HINT
from macbook_optimization.errors import DataError
from macbook_optimization.file_errors import hint_for, reason_of
from macbook_optimization.input_files import read_json
from macbook_optimization.units import counted
from trm.arrays import IntArray
from trm.batch import Batch
from trm.tasks.base import AnswerBatch, Metrics
from trm.tasks.dataset import Split
from trm.tasks.grids.arc_puzzles import ArcPuzzle, Augmentation, Grid, crop, key_of, puzzle_of
from trm.tasks.metrics import ExactMatch

PASS_AT_1 = "pass@1"
PASS_AT_2 = "pass@2"
TEST_PUZZLES = "test_puzzles.json"  # in an ARC dataset: the test tasks with their answers
_NO_GRID = [[0]]  # submitted for a test to which no answer is a grid; `unanswered` counts these tests
_BATCH_SIZE = 256  # examples that are read together

Attempts = dict[str, list[list[int]]]
Test = tuple[str, bytes]  # a task, and its question as identified by `key_of`


class Votes:
    """Counts the answers to a task over its augmentations, mapped back to the original task.

    The answer with the most votes is the first attempt. Among equals, the mean halt logit decides. An answer
    that is not a grid cannot be submitted, so it has no vote (in the reference implementation it has one).
    """

    needs_probabilities = False

    def __init__(self, split: Split) -> None:
        self.names, self.puzzles = _read_tasks(split)
        self.exact = ExactMatch()
        self.votes: dict[Test, dict[bytes, list[float]]] = {}  # test -> answer -> one halt logit per vote
        self.grids: dict[bytes, Grid] = {}

    def add(self, batch: Batch, answers: AnswerBatch) -> None:
        self.exact.add(batch, answers)
        for row, (test, augmentation) in enumerate(self._tests_in(batch)):
            votes = self.votes.setdefault(test, {})
            answer = augmentation.invert(crop(answers.tokens[row]))
            if answer.size:
                self.grids[key_of(answer)] = answer
                votes.setdefault(key_of(answer), []).append(float(answers.halt_logits[row]))

    def metrics(self) -> Metrics:
        """Return the mean over the evaluated tasks of the share of their evaluated tests that is solved."""
        return Metrics(
            {
                **self.exact.metrics().scalars,
                PASS_AT_1: self._pass_rate(attempts=1),
                PASS_AT_2: self._pass_rate(attempts=2),
            }
        )

    def require_all_tests(self, split: Split, limit: int | None) -> None:
        """Raise `DataError` if an evaluation of `limit` examples would leave a test without an answer."""
        places = self.first_places(split, split.evaluation_order())
        found = [place for place in places if place is not None]
        if len(found) < len(places):
            absent = len(places) - len(found)
            raise DataError(
                f"{split.directory} lacks {absent} of the {len(places)} tests of the competition",
                hint=REBUILD_HINT,
            )
        needed = max(found) + 1
        if limit is not None and limit < needed:
            uncovered = sum(place >= limit for place in found)
            raise DataError(
                f"With {counted(limit, 'example')}, {uncovered} of {counted(len(places), 'test')} would have "
                "no answer",
                hint=f"Use --examples {needed} or more, or omit it to let all {len(split)} examples vote.",
            )

    def first_places(self, split: Split, order: IntArray) -> list[int | None]:
        """Return the place in `order` of the first example of every test, or None if no example has it.

        No more examples are read than necessary.
        """
        found: dict[Test, int | None] = dict.fromkeys(self._all_tests())
        missing = len(found)
        for start in range(0, len(order), _BATCH_SIZE):
            batch = split.batch(order[start : start + _BATCH_SIZE])
            for place, (test, _) in enumerate(self._tests_in(batch), start):
                if test in found and found[test] is None:
                    found[test] = place
                    missing -= 1
            if not missing:
                break
        return list(found.values())

    def submission(self) -> dict[str, list[Attempts]]:
        """Return two attempts for every test of every task, in the format of the competition."""
        tests = self._all_tests()
        missing = [test for test in tests if test not in self.votes]
        if missing:
            raise DataError(
                f"{len(missing)} of {len(tests)} tests were not evaluated, so they have no answer",
                hint="Evaluate all examples.",
            )
        return {
            name: [self._attempts(name, question) for question, _ in puzzle.tests]
            for name, puzzle in self.puzzles.items()
        }

    def unanswered(self) -> int:
        return sum(not answers for answers in self.votes.values())

    def answered_once(self) -> int:
        return sum(len(answers) == 1 for answers in self.votes.values())

    def best(self, name: str, question: Grid, count: int) -> list[Grid]:
        """Return up to `count` answers to a question of a task, the best first."""
        votes = self.votes.get((name, key_of(question)), {})
        order = sorted(votes, key=lambda key: (len(votes[key]), float(np.mean(votes[key]))), reverse=True)
        return [self.grids[key] for key in order[:count]]

    def _all_tests(self) -> list[Test]:
        """Return every test once; a task may have the same question twice."""
        tests = [(name, key_of(grid)) for name, puzzle in self.puzzles.items() for grid, _ in puzzle.tests]
        return list(dict.fromkeys(tests))

    def _tests_in(self, batch: Batch) -> Iterator[tuple[Test, Augmentation]]:
        """Yield the test of each example, and the augmentation of its question."""
        for inputs, identifier in zip(batch.inputs, batch.puzzle_identifiers, strict=True):
            try:
                name, augmentation = Augmentation.from_name(self.names[identifier])
                question = augmentation.invert(crop(inputs))
            except (LookupError, ValueError, TypeError, AttributeError) as error:
                raise DataError(
                    f"Puzzle identifier {identifier} has no valid name in identifiers.json", hint=REBUILD_HINT
                ) from error
            yield (name, key_of(question)), augmentation

    def _attempts(self, name: str, question: Grid) -> Attempts:
        grids = [grid.tolist() for grid in self.best(name, question, 2)] or [_NO_GRID]
        return {"attempt_1": grids[0], "attempt_2": grids[-1]}

    def _pass_rate(self, attempts: int) -> float:
        shares = [self._share_solved(puzzle, attempts) for puzzle in self.puzzles.values()]
        evaluated = [share for share in shares if share is not None]
        return float(np.mean(evaluated)) if evaluated else 0.0

    def _share_solved(self, puzzle: ArcPuzzle, attempts: int) -> float | None:
        """Return the share among the tests that were asked; None if none was."""
        solved = [
            answer is not None
            and any(np.array_equal(grid, answer) for grid in self.best(puzzle.name, question, attempts))
            for question, answer in puzzle.tests
            if (puzzle.name, key_of(question)) in self.votes
        ]
        return sum(solved) / len(solved) if solved else None


def _read_tasks(split: Split) -> tuple[list[str], Mapping[str, ArcPuzzle]]:
    """Return the names of the puzzle identifiers, and the test tasks of a dataset."""
    dataset = split.directory.parent
    try:
        names = read_json(dataset / "identifiers.json", MAX_JSON_BYTES)
        tasks = read_json(dataset / TEST_PUZZLES, MAX_JSON_BYTES)
        puzzles = {name: puzzle_of(name, task, str(dataset)) for name, task in tasks.items()}
    except OSError as error:
        reason = f"{error.filename}: {reason_of(error)}"
        raise DataError(
            f"Cannot read the test tasks of {dataset}: {reason}", hint=hint_for(error, REBUILD_HINT)
        ) from error
    except (ValueError, AttributeError) as error:
        raise DataError(f"Cannot read the test tasks of {dataset}: {error}", hint=REBUILD_HINT) from error
    if not any(puzzle.tests for puzzle in puzzles.values()):
        raise DataError(f"{dataset / TEST_PUZZLES} has no test", hint=REBUILD_HINT)
    return names, puzzles
