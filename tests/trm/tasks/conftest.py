"""A small real dataset for the tests of tasks."""

from pathlib import Path

import pytest

from trm.tasks.grids.sudoku import TASK


@pytest.fixture
def sudoku_dataset():
    """Return a function that builds a dataset of easy puzzles."""

    def build(directory: Path, train: int = 40, test: int = 12, size: int = 4) -> Path:
        options = {"size": size, "difficulty": "easy", "train": train, "test": test}
        TASK.build(options, directory, lambda what, done, total: None)
        return directory

    return build
