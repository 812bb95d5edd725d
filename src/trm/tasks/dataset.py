"""The dataset layout on disk, which is the reference implementation's.

A dataset is a directory with `train/` and `test/`, each with `dataset.json` and five arrays; a dataset whose
examples differ in length has a sixth, `all__lengths.npy`. Datasets built by the reference implementation open
here, and the other way round. The content is verified when a split is opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from macbook_optimization.dataset_files import (
    FIELDS,
    MAX_JSON_BYTES,
    REBUILD_HINT,
    ArrayFile,
    Content,
    array_file,
    cannot_read,
    check_digests,
    scan,
)
from macbook_optimization.dataset_management import DatasetManager
from macbook_optimization.dataset_rows import RowReader
from macbook_optimization.errors import DataError
from macbook_optimization.input_files import read_json
from trm.arrays import IntArray, IntegerArray
from trm.batch import IGNORE_LABEL, PAD_TOKEN, Batch
from trm.tasks.base import DataSpec, Task

DIFFICULTY = "all__difficulty.npy"  # beside the arrays of the reference implementation, which ignores it
SPLITS = ("train", "test")
_BLANK_IDENTIFIER = 0  # of a question without a puzzle identifier, as in the reference implementation
_MAX_COUNT = 2**31 - 1  # the arrays of indices and identifiers hold 32-bit integers
_MAX_TOKENS = 2**20  # four times the largest vocabularies in use; each token has an embedding
_SET_NAME = re.compile(r"\w[\w.-]{0,99}")  # begins a file name, so it must not lead to another directory

CountInFile = Annotated[int, Field(ge=1, le=_MAX_COUNT)]


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

    @property
    def num_groups(self) -> int:
        """Independent questions: an ARC task with all its tests and augmentations is one group."""
        return len(self.group_indices) - 1

    def groups(self, examples: IntArray) -> IntArray:
        """Return the group of each example."""
        starts = self.puzzle_indices[self.group_indices]
        return np.asarray(np.searchsorted(starts, examples, side="right") - 1)

    def evaluation_order(self) -> IntArray:
        """Return all examples in the order in which a limited evaluation takes them.

        The first example of every group comes first, then the other examples of each group's first puzzle,
        then the second puzzles in the same way. The first N therefore cover as many groups as possible, and
        all tests of an ARC task have equally many augmentations that vote. If every group is a single
        example, this is the order of the split.
        """
        examples = np.arange(len(self))
        puzzles = np.searchsorted(self.puzzle_indices, examples, side="right") - 1
        groups = np.searchsorted(self.group_indices, puzzles, side="right") - 1
        place_in_puzzle = examples - self.puzzle_indices[puzzles]
        place_in_group = puzzles - self.group_indices[groups]
        return np.lexsort((groups, place_in_puzzle, place_in_group))  # the last key is the most significant

    def difficulties(self) -> IntArray:
        """Return the difficulty of every example, as rated when the dataset was built."""
        file = self.directory / DIFFICULTY
        if not file.is_file():
            raise DataError(
                f"{self.directory} has no difficulty ratings",
                hint="training.curriculum needs them; `trm data build` writes them for puzzles and mail.",
            )
        return array_file(file).rows(0, len(self)).astype(np.int64)

    def identifiers(self, examples: IntArray) -> IntArray:
        puzzles = np.searchsorted(self.puzzle_indices, examples, side="right") - 1
        return self.puzzle_identifiers[puzzles].astype(np.int64)


class Metadata(BaseModel):
    """The required entries of `dataset.json`; others are ignored."""

    model_config = ConfigDict(strict=True)
    seq_len: CountInFile
    vocab_size: int = Field(ge=1, le=_MAX_TOKENS)
    output_vocab_size: int | None = Field(None, ge=1, le=_MAX_TOKENS)
    num_puzzle_identifiers: CountInFile
    pad_id: int = PAD_TOKEN
    ignore_label_id: int | None = Field(ge=-_MAX_COUNT, le=_MAX_COUNT)
    blank_identifier_id: int = _BLANK_IDENTIFIER
    total_groups: CountInFile | None = None
    total_puzzles: CountInFile | None = None
    mean_puzzle_examples: float | None = Field(None, gt=0, allow_inf_nan=False)
    class_names: list[str] = []
    sets: list[str] = Field(min_length=1, max_length=1)

    @field_validator("pad_id", "blank_identifier_id")
    @classmethod
    def _check_zero(cls, value: int) -> int:
        """Check that 0 is padding and the blank identifier, as it is in what this program adds to a batch."""
        if value != 0:
            raise ValueError(
                f"Input should be 0, as in every dataset of the reference implementation, not {value}"
            )
        return value

    @field_validator("sets")
    @classmethod
    def _check_names(cls, names: list[str]) -> list[str]:
        for name in names:
            if not _SET_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is not the name of a set: letters, digits, _, . and - are allowed"
                )
        return names

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


def complete_spec(task: Task, split: Split) -> DataSpec:
    """Return the spec of a split with what its task adds; raise `DataError` if it belongs to another task."""
    try:
        return task.complete(split.spec)
    except DataError as error:
        raise DataError(
            f"{split.directory.parent} is not a dataset of the task {task.name}: {error}",
            hint=error.hint or "Name a dataset of this task: data.path in a recipe, --data of a command.",
        ) from error


def read_spec(dataset: Path, name: str = "train") -> DataSpec:
    """Return the spec of a split without reading its arrays."""
    return _read_metadata(dataset / name / "dataset.json").spec


def _array_files(directory: Path, set_name: str) -> dict[str, ArrayFile]:
    files = {field: array_file(directory / f"{set_name}__{field}.npy") for field in FIELDS}
    lengths = directory / f"{set_name}__lengths.npy"
    if lengths.exists():
        files["lengths"] = array_file(lengths)
    return files


def _read_metadata(path: Path) -> Metadata:
    try:
        return Metadata.model_validate(read_json(path, MAX_JSON_BYTES))
    except OSError as error:
        raise cannot_read(path, error) from error
    except ValidationError as error:
        problems = "; ".join(map(_describe, error.errors()))
    except ValueError as error:
        problems = f"Invalid JSON: {error}"
    raise DataError(f"{path} does not describe a dataset: {problems}", hint=REBUILD_HINT)


def _describe(problem: ErrorDetails) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"].startswith(("greater", "less")):
        message += f", not {problem['input']}"
    return f"{'.'.join(map(str, problem['loc']))}: {message}".removeprefix(": ")


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
