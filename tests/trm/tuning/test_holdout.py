"""Data to choose on: held-out training examples, and never the test split where that is possible."""

import json

import numpy as np
import pytest
from arc_tasks import arc_dataset
from tiny import Recorder, sudoku_dataset
from tiny_mail import email_dataset

from trm.batch import PAD_TOKEN
from trm.tasks.base import DataSpec
from trm.tasks.dataset import open_split
from trm.tasks.dataset_writer import DatasetWriter
from trm.tuning.holdout import choosing_data


def rows(split):
    return {bytes(np.asarray(row, dtype=np.int64)) for row in split.inputs}


def splits(dataset):
    return [open_split(dataset, name) for name in ("train", "test")]


@pytest.fixture
def sudoku(tmp_path):
    return sudoku_dataset(tmp_path / "set", train=60, test=12)


def test_a_tenth_of_the_training_split_is_held_out(sudoku, tmp_path):
    found = choosing_data(sudoku, tmp_path / "data", 0, Recorder())
    train, test = splits(found.path)
    whole = open_split(sudoku, "train")
    assert (len(train), len(test)) == (54, 6)
    assert rows(train) | rows(test) == rows(whole)
    assert not rows(train) & rows(test)
    assert not rows(test) & rows(open_split(sudoku, "test"))
    assert sorted([*train.difficulties(), *test.difficulties()]) == sorted(whole.difficulties())
    assert found.description == "6 held-out training examples; the test split is not used"


def test_no_more_is_held_out_than_the_test_split_has(tmp_path):
    sudoku = sudoku_dataset(tmp_path / "set", train=250, test=4, size=6)
    found = choosing_data(sudoku, tmp_path / "data", 0, Recorder())
    assert len(open_split(found.path, "test")) == 25, "64 are never too many"


def test_what_is_held_out_is_written_once_and_depends_on_the_seed(sudoku, tmp_path):
    first = choosing_data(sudoku, tmp_path / "data", 0, Recorder())
    written = (first.path / "build.json").stat().st_mtime_ns
    assert choosing_data(sudoku, tmp_path / "data", 0, Recorder()) == first
    assert (first.path / "build.json").stat().st_mtime_ns == written
    other = choosing_data(sudoku, tmp_path / "other", 1, Recorder())
    assert rows(open_split(other.path, "test")) != rows(open_split(first.path, "test"))


def test_mail_keeps_its_lengths_its_categories_and_its_vocabulary(tmp_path):
    mail = email_dataset(tmp_path / "set")
    found = choosing_data(mail, tmp_path / "data", 0, Recorder())
    train, test = splits(found.path)
    assert len(train) + len(test) == 120
    assert train.spec.class_names == open_split(mail, "train").spec.class_names
    for split in (train, test):
        for row, length in zip(split.inputs, split.lengths, strict=True):
            assert (row[:length] != PAD_TOKEN).all()
            assert (row[length:] == PAD_TOKEN).all()
    assert (found.path / "tokenizer.json").read_bytes() == (mail / "tokenizer.json").read_bytes()


def test_copies_of_one_puzzle_stay_together(tmp_path):
    """In datasets of the reference implementation, a group is a puzzle with its augmentations."""
    spec = DataSpec(max_len=3, vocab_size=40, num_outputs=40)
    with DatasetWriter(tmp_path / "set", {}) as writer:
        for name, groups in (("train", range(20)), ("test", range(20, 22))):
            split = writer.split(name, spec, 0)
            for group in groups:
                tokens = np.full((4, 1, 3), group + 1)
                split.add_group(np.zeros(4, dtype=np.int64), tokens, tokens)
    found = choosing_data(tmp_path / "set", tmp_path / "data", 0, Recorder())
    train, test = splits(found.path)
    assert (train.num_groups, test.num_groups) == (18, 2)
    assert (len(train), len(test)) == (72, 8)
    assert not rows(train) & rows(test)


def test_a_dataset_with_puzzle_identifiers_is_evaluated_on_its_test_split_with_a_warning(tmp_path):
    arc = arc_dataset(tmp_path, [1, 1, 1], augmentations=2)
    display = Recorder()
    found = choosing_data(arc, tmp_path / "data", 0, display)
    assert found.path == arc
    assert "examples of the test split" in found.description
    assert any(message.startswith("warning: candidates are evaluated") for message in display.messages)
    assert not (tmp_path / "data").exists()


def test_a_held_out_dataset_says_what_it_was_made_from(sudoku, tmp_path):
    found = choosing_data(sudoku, tmp_path / "data", 0, Recorder())
    made = json.loads((found.path / "build.json").read_text())
    assert (made["from"], made["held_out_groups"]) == (str(sudoku), 6)
