"""The facts that `trm data info` reports."""

import numpy as np

from trm.tasks.base import DataSpec
from trm.tasks.dataset_writer import DatasetWriter
from trm.tasks.inspection import format_facts, inspect_dataset

SPEC = DataSpec(16, 6, 6)


def quiet(what, done, total):
    pass


def test_a_dataset_that_was_built_here_has_no_copies(sudoku_dataset, tmp_path):
    found = inspect_dataset(sudoku_dataset(tmp_path / "set"), quiet)
    assert (found.task, found.max_len, found.vocab_size, found.in_both) == ("sudoku", 16, 6, 0)
    assert {name: split.examples for name, split in found.splits.items()} == {"train": 40, "test": 12}
    assert {split.repeated for split in found.splits.values()} == {0}
    assert found.strategy == "memory"
    assert "0 test questions are also in the training split" in format_facts(found)


def test_repeated_and_shared_examples_are_counted(tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.integers(1, 6, (50, 16), dtype=np.uint8)
    with DatasetWriter(tmp_path / "set", {"task": "mirror"}) as writer:
        writer.split("train", SPEC, 0).add_examples(rows[[*range(40), 3, 3, 7]], rows[[*range(40), 3, 3, 7]])
        writer.split("test", SPEC, 0).add_examples(rows[35:], rows[35:])
    found = inspect_dataset(tmp_path / "set", quiet)
    assert found.splits["train"].repeated == 3
    assert found.in_both == 5


def test_the_same_question_of_two_puzzles_is_not_the_same(tmp_path):
    rows = np.ones((2, 1, 16), dtype=np.uint8)
    with DatasetWriter(tmp_path / "set", {"task": "arc"}) as writer:
        writer.names += ["one", "two"]
        for name in ("train", "test"):
            writer.split(name, SPEC, 0).add_group(np.array([1, 2]), rows, rows)
    found = inspect_dataset(tmp_path / "set", quiet)
    assert found.splits["train"].repeated == 0
    assert found.num_puzzle_identifiers == 3
    assert found.in_both == 2


def test_a_classifier_has_its_number_of_outputs_in_the_text(tmp_path):
    rows = np.ones((3, 16), dtype=np.int64)
    with DatasetWriter(tmp_path / "set", {"task": "email"}) as writer:
        writer.split("train", DataSpec(16, 300, 2), 0).add_examples(rows, rows)
    found = inspect_dataset(tmp_path / "set", quiet)
    assert (found.vocab_size, found.num_outputs) == (300, 2)
    assert "300 tokens, 2 outputs, 1 puzzle identifier\n" in format_facts(found)
