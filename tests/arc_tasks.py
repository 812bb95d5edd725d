"""Small ARC tasks as the files that people have, and the datasets built from them."""

import json
from pathlib import Path

import numpy as np

from trm.tasks.grids.arc import TASK


def write_tasks(file: Path, num_tests: list[int]) -> Path:
    """Write a file of tasks with this many tests each. An answer is its question with two colours swapped."""
    rng = np.random.default_rng(0)

    def pair():
        question = rng.integers(0, 10, (3, 4))
        answer = np.where(question == 1, 2, np.where(question == 2, 1, question))
        return {"input": question.tolist(), "output": answer.tolist()}

    tasks = {
        f"task{number:02d}": {"train": [pair()], "test": [pair() for _ in range(count)]}
        for number, count in enumerate(num_tests)
    }
    file.write_text(json.dumps(tasks))
    return file


def arc_dataset(directory: Path, num_tests: list[int], augmentations: int) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    file = write_tasks(directory / "tasks.json", num_tests)
    options = {"test": [str(file)], "augmentations": augmentations}
    TASK.build(options, directory / "set", lambda what, done, total: None)
    return directory / "set"
