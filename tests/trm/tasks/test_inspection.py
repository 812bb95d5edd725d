"""What is told about a dataset."""

import numpy as np
from tiny import sudoku_dataset

from trm.tasks.dataset_writer import DatasetWriter
from trm.tasks.inspection import examine, page


def quiet(what, done, total):
    pass


def test_a_set_that_was_built_here_has_no_copies(tmp_path):
    found = examine(sudoku_dataset(tmp_path / "set"), quiet)
    assert (found.task, found.seq_len, found.vocab_size, found.in_both) == ("sudoku", 16, 6, 0)
    assert {name: split.examples for name, split in found.splits.items()} == {"train": 40, "test": 12}
    assert {split.repeated for split in found.splits.values()} == {0}
    assert found.strategy == "memory"
    assert "0 test questions are also in the training half" in page(found)


def test_repeated_and_shared_examples_are_counted(tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.integers(1, 6, (50, 16), dtype=np.uint8)
    with DatasetWriter(tmp_path / "set", {"task": "mirror"}) as writer:
        writer.split("train", 16, 6).add_examples(rows[[*range(40), 3, 3, 7]], rows[[*range(40), 3, 3, 7]])
        writer.split("test", 16, 6).add_examples(rows[35:], rows[35:])
    found = examine(tmp_path / "set", quiet)
    assert found.splits["train"].repeated == 3
    assert found.in_both == 5


def test_the_same_question_of_two_puzzles_is_not_the_same(tmp_path):
    rows = np.ones((2, 1, 16), dtype=np.uint8)
    with DatasetWriter(tmp_path / "set", {"task": "arc"}) as writer:
        writer.names += ["one", "two"]
        for name in ("train", "test"):
            writer.split(name, 16, 6).add_group(np.array([1, 2]), rows, rows)
    found = examine(tmp_path / "set", quiet)
    assert found.splits["train"].repeated == 0
    assert found.num_puzzle_identifiers == 3
    assert found.in_both == 2
