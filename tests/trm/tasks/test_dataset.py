"""A dataset directory is what it should be, or an error names the file."""

import json
import os
import shutil

import numpy as np
import pytest

from macbook_optimization.dataset_files import FIELDS
from macbook_optimization.errors import DataError
from trm.batch import IGNORE_LABEL
from trm.tasks.dataset import open_split


@pytest.fixture
def dataset(sudoku_dataset, tmp_path):
    return sudoku_dataset(tmp_path / "set", 20, 5)


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_file_is_named(dataset, field):
    (dataset / "train" / f"all__{field}.npy").unlink()
    with pytest.raises(DataError, match=f"all__{field}.npy is missing"):
        open_split(dataset, "train")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_file_is_named(dataset, field, keep):
    path = dataset / "train" / f"all__{field}.npy"
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)
    with pytest.raises(DataError, match=f"all__{field}.npy is truncated"):
        open_split(dataset, "train")


def test_an_array_of_objects_is_not_loaded(dataset):
    """Objects in .npy files are pickles."""
    np.save(dataset / "train" / "all__inputs.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"all__inputs\.npy"):
        open_split(dataset, "train")


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("inputs", lambda a: a[:-1], "labels has shape"),
        ("labels", lambda a: a[:, :-1], "labels has shape"),
        ("inputs", lambda a: a + 20, "inputs holds 21 to"),
        ("puzzle_identifiers", lambda a: a - 1, "puzzle_identifiers holds -1"),
        ("inputs", lambda a: np.array(3), "0-dimensional"),
        ("puzzle_indices", lambda a: a[:-1], "puzzle_indices has shape"),
        ("group_indices", lambda a: a * 0, "group_indices does not count up"),
        ("puzzle_identifiers", lambda a: a + 7, "puzzle_identifiers holds 7 to 7; 0 to 0 exist"),
        ("inputs", lambda a: a.astype(np.float32), "float32 instead of rows of integers"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(dataset, field, change, message):
    path = dataset / "train" / f"all__{field}.npy"
    np.save(path, change(np.load(path)))
    with pytest.raises(DataError, match=message):
        open_split(dataset, "train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Invalid JSON"),
        ("{}", "ignore_label_id: Field required"),
        ("[]", "valid dictionary|object"),
        ('{"seq_len": "16"}', "seq_len: Input should be a valid integer"),
        ('{"sets": null}', "sets: Input should be a valid"),
        ('{"vocab_size": 0}', "vocab_size: Input should be greater"),
    ],
)
def test_wrong_metadata_is_refused(dataset, content, message):
    (dataset / "train" / "dataset.json").write_text(content)
    with pytest.raises(DataError, match=message):
        open_split(dataset, "train")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("total_groups", -1, "total_groups: Input should be greater than or equal to 1, not -1"),
        ("total_puzzles", -1, "total_puzzles: Input should be greater than or equal to 1, not -1"),
        ("mean_puzzle_examples", -0.5, r"mean_puzzle_examples: Input should be greater than 0, not -0\.5"),
        ("mean_puzzle_examples", float("nan"), "mean_puzzle_examples: Input should be a finite number"),
        ("pad_id", 99, "pad_id: Input should be 0, .* not 99"),
        ("blank_identifier_id", 7, "blank_identifier_id: Input should be 0, .* not 7"),
        ("num_puzzle_identifiers", 10**11, "num_puzzle_identifiers: .* 2147483647, not 100000000000"),
        ("vocab_size", 10**9, "vocab_size: .* 1048576, not 1000000000"),
        ("output_vocab_size", 10**9, "output_vocab_size: .* 1048576, not 1000000000"),
        ("ignore_label_id", 10**30, "ignore_label_id: .* 2147483647"),
        ("sets", ["../../x"], r"sets: '\.\./\.\./x' is not the name of a set"),
        ("sets", ["/etc/x"], "sets: '/etc/x' is not the name of a set"),
        ("sets", ["a\\b"], "is not the name of a set"),
        (
            "sets",
            [
                "..",
            ],
            r"sets: '\.\.' is not the name of a set",
        ),
    ],
)
def test_metadata_that_cannot_be_true_is_refused(dataset, key, value, message):
    file = dataset / "train" / "dataset.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(DataError, match=message):
        open_split(dataset, "train")


def test_metadata_that_gives_a_key_twice_is_refused(dataset):
    file = dataset / "train" / "dataset.json"
    file.write_text(file.read_text().replace("{", '{"vocab_size": 8,', 1))
    with pytest.raises(DataError, match="the key 'vocab_size' is given twice"):
        open_split(dataset, "train")


def test_metadata_of_the_reference_implementation_opens(dataset):
    """As `PuzzleDatasetMetadata` writes it, with its order and types, and without keys of our own."""
    metadata = {
        "pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0, "vocab_size": 6, "seq_len": 16,
        "num_puzzle_identifiers": 1, "total_groups": 20, "mean_puzzle_examples": 1, "total_puzzles": 20,
        "sets": ["all"],
    }  # fmt: skip
    (dataset / "train" / "dataset.json").write_text(json.dumps(metadata))
    assert open_split(dataset, "train").spec.num_outputs == 6
    del metadata["total_puzzles"], metadata["mean_puzzle_examples"]
    (dataset / "train" / "dataset.json").write_text(json.dumps(metadata))
    assert len(open_split(dataset, "train")) == 20


def test_a_directory_that_is_not_a_dataset_is_refused(tmp_path):
    with pytest.raises(DataError, match="There is no dataset"):
        open_split(tmp_path / "nowhere", "train")
    with pytest.raises(DataError, match="it has no directory train/"):
        open_split(tmp_path, "train")


def test_a_dataset_with_groups_of_copies_opens(dataset):
    """The reference implementation writes it like this with augmentation: several puzzles per group, int64,
    and ignored labels."""
    directory = dataset / "train"
    (dataset / "build.json").unlink()  # which only datasets that were built here have
    for field in ("inputs", "labels"):
        path = directory / f"all__{field}.npy"
        np.save(path, np.load(path).astype(np.int64))
    labels = np.load(directory / "all__labels.npy")
    labels[:, 3] = 0
    np.save(directory / "all__labels.npy", labels)
    np.save(directory / "all__group_indices.npy", np.arange(0, 21, 4, dtype=np.int32))
    split = open_split(dataset, "train")
    found = split.batch(np.array([2, 5])).labels
    assert (found[:, 3] == IGNORE_LABEL).all()
    assert (found[:, :3] > 0).all()


def test_a_copy_elsewhere_has_the_same_digests_and_a_changed_dataset_has_others(dataset, tmp_path):
    copy = shutil.copytree(dataset, tmp_path / "copy")
    original = open_split(dataset, "train").digests
    assert open_split(copy, "train").digests == original
    labels = np.load(copy / "train" / "all__labels.npy")
    labels[0, 0] = 3 if labels[0, 0] != 3 else 4
    np.save(copy / "train" / "all__labels.npy", labels)
    with pytest.raises(DataError, match=r"train/all__labels.npy is not what was built") as refused:
        open_split(copy, "train")
    assert "build.json" in refused.value.hint
    (copy / "build.json").unlink()
    changed = open_split(copy, "train").digests
    assert [field for field in changed if changed[field] != original[field]] == ["labels"]
    description = dataset / "train" / "dataset.json"
    description.write_text(description.read_text().replace('"ignore_label_id": 0', '"ignore_label_id": 3'))
    assert open_split(dataset, "train").digests != original


def test_metadata_holds_what_the_reference_implementation_reads(dataset):
    metadata = json.loads((dataset / "train" / "dataset.json").read_text())
    assert metadata["pad_id"] == metadata["ignore_label_id"] == metadata["blank_identifier_id"] == 0
    assert (metadata["vocab_size"], metadata["seq_len"], metadata["num_puzzle_identifiers"]) == (6, 16, 1)
    assert (metadata["total_groups"], metadata["total_puzzles"], metadata["sets"]) == (20, 20, ["all"])
