"""Data to choose on: a part of the training split takes the place of the test split.

Candidates that were chosen on the test split would look better there than they are. Whole groups are held
out, so that copies of one puzzle stay together. A dataset with puzzle identifiers cannot be split like this:
each identifier has an embedding, which only its own training examples train.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from macbook_optimization.dataset_files import BUILD_FILE
from macbook_optimization.units import MIB
from trm.arrays import IntArray
from trm.display import Display
from trm.tasks.base import DataSpec
from trm.tasks.dataset import DIFFICULTY, Split, open_split
from trm.tasks.dataset_writer import DatasetWriter, SplitWriter

SHARE = 0.1  # of the training groups, and at most as many examples as the test split has
_LEAST_HELD_OUT = 64  # unless the tenth is fewer
_MAX_BYTES = 2048 * MIB  # of a copy
_ROWS_AT_A_TIME = 4096
_NOT_COPIED = (BUILD_FILE, "identifiers.json")  # the writer makes them


@dataclass(frozen=True, slots=True)
class ChoosingData:
    """The dataset on which candidates are trained and evaluated."""

    path: Path
    spec: DataSpec  # as its files have it
    description: str  # what they are evaluated on


def choosing_data(dataset: Path, directory: Path, seed: int, display: Display) -> ChoosingData:
    """Return the dataset with held-out training examples in place of the test split, written once."""
    train = open_split(dataset, "train")
    test = open_split(dataset, "test")
    reason = _why_not(train)
    if reason is not None:
        display.message(f"warning: candidates are evaluated on the test split: {reason}.")
        return ChoosingData(dataset, train.spec, f"{len(test)} examples of the test split, as {reason}")
    if not directory.exists():
        display.status("Holding out training examples")
        _write(train, _held_out(train, len(test), seed), directory)
    held_out = len(open_split(directory, "test"))
    description = f"{held_out} held-out training examples; the test split is not used"
    return ChoosingData(directory, train.spec, description)


def _why_not(train: Split) -> str | None:
    if train.spec.num_puzzle_identifiers > 1:
        return "the dataset has puzzle identifiers, whose training examples cannot be held out"
    if train.num_groups < 2:
        return "the training split is a single group"
    sizes = np.diff(train.puzzle_indices)
    if (sizes != sizes[0]).any():
        return "its puzzles have different numbers of examples"
    num_bytes = sum(array.nbytes for array in (train.inputs, train.labels))
    if num_bytes > _MAX_BYTES:
        return f"a copy of the training split would take {num_bytes / MIB:,.0f} MiB"
    return None


def _held_out(train: Split, num_test: int, seed: int) -> IntArray:
    """Return groups, drawn at random: the last of a file may be of one kind."""
    most = max(num_test, _LEAST_HELD_OUT) * train.num_groups / len(train)
    count = max(1, min(round(SHARE * train.num_groups), round(most)))
    drawn = np.random.default_rng(seed).permutation(train.num_groups)[:count]
    return np.sort(drawn)


def _write(train: Split, held_out: IntArray, directory: Path) -> None:
    dataset = train.directory.parent
    kept = np.setdiff1d(np.arange(train.num_groups), held_out)
    made_by = {"made_by": "trm tune", "from": str(dataset), "held_out_groups": len(held_out)}
    with DatasetWriter(directory, made_by) as writer:
        for file in dataset.iterdir():  # such as a vocabulary
            if file.is_file() and file.name not in _NOT_COPIED:
                shutil.copyfile(file, writer.partial / file.name)
        for name, groups in (("train", kept), ("test", held_out)):
            _copy_groups(train, groups, writer.split(name, train.spec, train.ignore_label))


def _copy_groups(train: Split, groups: IntArray, writer: SplitWriter) -> None:
    if train.num_groups < len(train):
        for group in groups:
            _copy_group(train, int(group), writer)
        return
    has_difficulty = (train.directory / DIFFICULTY).is_file()
    difficulties = train.difficulties() if has_difficulty else None
    for rows in _parts(groups):
        writer.add_examples(
            train.inputs[rows],
            train.labels[rows],
            None if difficulties is None else difficulties[rows],
            None if train.lengths is None else train.lengths[rows].astype(np.int64),
        )


def _copy_group(train: Split, group: int, writer: SplitWriter) -> None:
    """Copy the puzzles of a group, which have equally many examples each."""
    first, last = (int(each) for each in train.group_indices[group : group + 2])
    rows = np.arange(train.puzzle_indices[first], train.puzzle_indices[last])
    lengths = None if train.lengths is None else train.lengths[rows].astype(np.int64)
    shape = (last - first, len(rows) // (last - first), train.spec.max_len)
    writer.add_group(
        np.zeros(last - first, dtype=np.int64),
        np.asarray(train.inputs[rows]).reshape(shape),
        np.asarray(train.labels[rows]).reshape(shape),
        lengths,
    )


def _parts(rows: IntArray) -> Iterator[IntArray]:
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        yield rows[start : start + _ROWS_AT_A_TIME]
