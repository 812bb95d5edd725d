"""The dataset layout on disk, which is the reference implementation's.

A dataset is a directory with `train/` and `test/`, each with `dataset.json` and five arrays; a dataset whose
examples differ in length has a sixth, `all__lengths.npy`. Datasets built by the reference implementation open
here, and the other way round. The content is verified when a split is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from macbook_optimization.dataset_files import (
    FIELDS,
    REBUILD_HINT,
    ArrayFile,
    Content,
    array_file,
    check_digests,
    scan,
)
from macbook_optimization.dataset_management import DatasetManager
from macbook_optimization.dataset_rows import RowReader
from macbook_optimization.errors import DataError
from trm.arrays import IntArray, IntegerArray
from trm.batch import IGNORE_LABEL, Batch
from trm.tasks.base import DataSpec

DIFFICULTY = "all__difficulty.npy"  # beside the arrays of the reference implementation, which ignores it
SPLITS = ("train", "test")


@dataclass(frozen=True, slots=True)
class Split:
    """One split of a dataset. Its arrays are memory-mapped; inputs and labels are read through `reader`."""

    spec: DataSpec
    ignore_label: int | None
    inputs: IntegerArray
    labels: IntegerArray
    puzzle_identifiers: IntegerArray
    puzzle_indices: IntegerArray
    group_indices: IntegerArray
    lengths: IntegerArray | None
    directory: Path
    reader: RowReader
    digests: Mapping[str, str]  # sha256 of each array's content, however it is stored

    def __len__(self) -> int:
        return len(self.reader)

    def batch(self, examples: IntArray, identifiers: IntArray | None = None) -> Batch:
        """Return these examples at full width, each in a slot of its own."""
        inputs, labels = (rows.astype(np.int64) for rows in self.reader.take(examples))
        if self.ignore_label is not None:
            labels[labels == self.ignore_label] = IGNORE_LABEL
        batch = Batch(
            slots=np.arange(len(examples)),
            inputs=inputs,
            labels=labels,
            puzzle_identifiers=self.identifiers(examples) if identifiers is None else identifiers,
            fresh=np.ones(len(examples), dtype=bool),
            lengths=None if self.lengths is None else self.lengths[examples].astype(np.int64),
        )
        if batch.padding is not None:
            labels[batch.padding] = IGNORE_LABEL
        return batch

    def difficulties(self) -> IntArray:
        """Return the difficulty of every example, as rated when the dataset was built."""
        file = self.directory / DIFFICULTY
        if not file.is_file():
            raise DataError(
                f"{self.directory} has no difficulty ratings",
                hint="training.curriculum needs a dataset that was built here, from grids.",
            )
        return array_file(file).rows(0, len(self)).astype(np.int64)

    def identifiers(self, examples: IntArray) -> IntArray:
        puzzles = np.searchsorted(self.puzzle_indices, examples, side="right") - 1
        return self.puzzle_identifiers[puzzles].astype(np.int64)


class Metadata(BaseModel):
    """What `dataset.json` must contain; other entries are ignored."""

    model_config = ConfigDict(strict=True)
    seq_len: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    output_vocab_size: int | None = Field(None, ge=1)
    num_puzzle_identifiers: int = Field(ge=1)
    ignore_label_id: int | None
    class_names: list[str] = []
    sets: list[str] = Field(min_length=1, max_length=1)

    @property
    def spec(self) -> DataSpec:
        return DataSpec(
            max_len=self.seq_len,
            vocab_size=self.vocab_size,
            num_outputs=self.output_vocab_size or self.vocab_size,
            num_puzzle_identifiers=self.num_puzzle_identifiers,
            class_names=tuple(self.class_names),
        )


def open_split(
    dataset: Path,
    name: str,
    *,
    manager: DatasetManager | None = None,
    verified: Mapping[str, str] | None = None,
) -> Split:
    """Open a split and verify that its arrays are intact and fit together, which reads each of them once.

    Pass `verified` digests to skip this when another process has already verified the files. A manager
    chooses how rows are read; without one they are memory-mapped.
    """
    directory = dataset / name
    if not directory.is_dir():
        missing = f"There is no dataset at {dataset}"
        wrong = f"{dataset} is not a dataset: it has no directory {name}/"
        raise DataError(
            wrong if dataset.is_dir() else missing, hint=f"Build one: trm data build TASK --out {dataset}"
        )
    metadata = _read_metadata(directory / "dataset.json")
    files = _array_files(directory, metadata.sets[0])
    arrays = {field: file.mapped() for field, file in files.items()}
    problems = _shape_problems(arrays, metadata.spec)
    digests = verified
    if not problems and digests is None:
        contents = {field: scan(file) for field, file in files.items()}
        problems = _value_problems(contents, metadata)
        digests = {field: content.sha256 for field, content in contents.items()}
        digests["ignored label"] = str(metadata.ignore_label_id)
        if not problems:
            computed = {files[field].path.name: each.file_sha256 for field, each in contents.items()}
            check_digests(dataset, name, computed)
    if problems:
        raise DataError(f"{directory}: {'; '.join(problems)}", hint=REBUILD_HINT)
    lengths = arrays.pop("lengths", None)
    return Split(
        metadata.spec,
        metadata.ignore_label_id,
        **arrays,
        lengths=lengths,
        directory=directory,
        reader=RowReader(files, "mapped") if manager is None else manager.open_rows(files),
        digests=digests or {},
    )


def _array_files(directory: Path, set_name: str) -> dict[str, ArrayFile]:
    files = {field: array_file(directory / f"{set_name}__{field}.npy") for field in FIELDS}
    lengths = directory / f"{set_name}__lengths.npy"
    if lengths.exists():
        files["lengths"] = array_file(lengths)
    return files


def _read_metadata(path: Path) -> Metadata:
    try:
        return Metadata.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}", hint=REBUILD_HINT) from error
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}".removeprefix(": ")
            for problem in error.errors()
        )
        raise DataError(f"{path} does not describe a dataset: {problems}", hint=REBUILD_HINT) from error


def _shape_problems(arrays: Mapping[str, IntegerArray], spec: DataSpec) -> list[str]:
    examples = len(arrays["inputs"])
    puzzles = len(arrays["puzzle_identifiers"])
    found = []
    for field in ("inputs", "labels"):
        if arrays[field].shape != (examples, spec.max_len):
            found.append(f"{field} has shape {arrays[field].shape}; expected {(examples, spec.max_len)}")
    if not examples:
        found.append("there are no examples")
    if "lengths" in arrays and arrays["lengths"].shape != (examples,):
        found.append(f"lengths has shape {arrays['lengths'].shape}; expected {(examples,)}")
    for field, last, length in (
        ("puzzle_indices", examples, puzzles + 1),
        ("group_indices", puzzles, None),
    ):
        array = arrays[field]
        if array.ndim != 1 or len(array) < 2 or (length is not None and len(array) != length):
            found.append(f"{field} has shape {array.shape}")
        elif array[0] != 0 or array[-1] != last or (array[1:] <= array[:-1]).any():
            found.append(f"{field} does not count up to {last}")
    return found


def _value_problems(contents: Mapping[str, Content], metadata: Metadata) -> list[str]:
    spec = metadata.spec
    ranges = {
        "inputs": (0, spec.vocab_size - 1),
        "labels": (0, spec.num_outputs - 1),
        "puzzle_identifiers": (0, spec.num_puzzle_identifiers - 1),
        "lengths": (1, spec.max_len),
    }
    if metadata.ignore_label_id is not None:  # it may lie outside of the outputs
        least, most = ranges["labels"]
        ranges["labels"] = min(least, metadata.ignore_label_id), max(most, metadata.ignore_label_id)
    return [
        f"{field} holds {contents[field].least} to {contents[field].most}; {least} to {most} exist"
        for field, (least, most) in ranges.items()
        if field in contents and (contents[field].least < least or contents[field].most > most)
    ]
