"""The score of ARC: all augmentations of a task vote on its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from macbook_optimization.dataset_files import REBUILD_HINT
from macbook_optimization.errors import DataError
from trm.batch import Batch
from trm.tasks.base import AnswerBatch, Metrics
from trm.tasks.grids.arc_puzzles import ArcPuzzle, Augmentation, Grid, crop, key_of, puzzle_of
from trm.tasks.metrics import ExactMatch

PASS_AT_1 = "pass@1"
PASS_AT_2 = "pass@2"
TEST_PUZZLES = "test_puzzles.json"  # in an ARC dataset: the test tasks with their answers
_NO_ANSWER = [[0]]  # submitted for a test without any answer

Attempts = dict[str, list[list[int]]]


class Votes:
    """Counts the answers to a task over its augmentations, mapped back to the original task.

    The answer with the most votes is the first attempt. Among equals, the mean halt logit decides.
    """

    needs_probabilities = False

    def __init__(self, dataset: Path) -> None:
        self.names, self.puzzles = _read_tasks(dataset)
        self.exact = ExactMatch()
        # (task, question) -> answer -> one halt logit per vote; grids are identified by `key_of`
        self.votes: dict[tuple[str, bytes], dict[bytes, list[float]]] = {}
        self.grids: dict[bytes, Grid] = {}

    def add(self, batch: Batch, answers: AnswerBatch) -> None:
        self.exact.add(batch, answers)
        for row in range(len(batch)):
            name, augmentation = Augmentation.from_name(self.names[batch.puzzle_identifiers[row]])
            question = augmentation.invert(crop(batch.inputs[row]))
            answer = augmentation.invert(crop(answers.tokens[row]))
            self.grids[key_of(answer)] = answer
            votes = self.votes.setdefault((name, key_of(question)), {})
            votes.setdefault(key_of(answer), []).append(float(answers.halt_logits[row]))

    def metrics(self) -> Metrics:
        """Return the scores over the tasks with at least one answer: the share of tests that are solved."""
        answered = {name for name, _ in self.votes}
        puzzles = [puzzle for name, puzzle in self.puzzles.items() if name in answered]
        return Metrics(
            {
                **self.exact.metrics().scalars,
                PASS_AT_1: self._pass_rate(puzzles, attempts=1),
                PASS_AT_2: self._pass_rate(puzzles, attempts=2),
            }
        )

    def submission(self) -> dict[str, list[Attempts]]:
        """Return two attempts for every test of every task, in the format of the competition."""
        return {
            name: [self._attempts(name, question) for question, _ in puzzle.tests]
            for name, puzzle in self.puzzles.items()
        }

    def _attempts(self, name: str, question: Grid) -> Attempts:
        grids = [grid.tolist() for grid in self.best(name, question, 2)] or [_NO_ANSWER]
        return {"attempt_1": grids[0], "attempt_2": grids[-1]}

    def best(self, name: str, question: Grid, count: int) -> list[Grid]:
        """Return up to `count` answers to a question of a task, the best first."""
        votes = self.votes.get((name, key_of(question)), {})
        order = sorted(votes, key=lambda key: (len(votes[key]), float(np.mean(votes[key]))), reverse=True)
        return [self.grids[key] for key in order[:count]]

    def _pass_rate(self, puzzles: list[ArcPuzzle], attempts: int) -> float:
        if not puzzles:
            return 0.0
        return float(np.mean([self._share_solved(puzzle, attempts) for puzzle in puzzles]))

    def _share_solved(self, puzzle: ArcPuzzle, attempts: int) -> float:
        if not puzzle.tests:
            return 0.0
        solved = 0
        for question, answer in puzzle.tests:
            candidates = self.best(puzzle.name, question, attempts)
            solved += answer is not None and any(np.array_equal(grid, answer) for grid in candidates)
        return solved / len(puzzle.tests)


def _read_tasks(dataset: Path) -> tuple[list[str], Mapping[str, ArcPuzzle]]:
    """Return the names of the puzzle identifiers, and the test tasks of a dataset."""
    try:
        names = json.loads((dataset / "identifiers.json").read_bytes())
        tasks = json.loads((dataset / TEST_PUZZLES).read_bytes())
        return names, {name: puzzle_of(name, task, str(dataset)) for name, task in tasks.items()}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"Cannot read the test tasks of {dataset}: {error}", hint=REBUILD_HINT) from error
