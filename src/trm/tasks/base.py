"""What a task is, and the dataset layout that it is stored in.

A dataset is the directory that the public TRM code writes: `train/` and `test/`, each with `dataset.json`
and five arrays. Sets built there open here, and the other way round. It is written aside and renamed, so
it is complete or absent; what it holds is checked when it is opened.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from macbook_optimization.dataset_files import AGAIN, BUILD, FIELDS, array_file, check_digests, digests
from macbook_optimization.durable_files import sync
from macbook_optimization.errors import DataError

IGNORE_LABEL = -100  # the public code's mark for a position without a label

IntArray = NDArray[np.int64]
Progress = Callable[[str, int, int], None]  # what is being done, how many are done, of how many


@dataclass(frozen=True, slots=True)
class TaskShape:
    """What the model has to know about a dataset."""

    seq_len: int
    vocab_size: int
    output_vocab_size: int
    num_puzzle_identifiers: int


def shape_from(values: Mapping[str, int]) -> TaskShape:
    try:
        return TaskShape(**values)
    except TypeError as error:
        raise DataError(f"{dict(values)} is not the shape of a dataset") from error


class Task(Protocol):
    """Turns files into token arrays, and answers into something a person reads."""

    name: str
    num_draws: int  # random numbers that one augmentation takes

    def build(self, options: Mapping[str, Any], directory: Path, progress: Progress) -> None: ...

    def shape(self, options: Mapping[str, Any]) -> TaskShape:
        """Of the dataset that `build` would make."""
        ...

    def check(self, shape: TaskShape) -> None:
        """Raises `DataError` if a dataset of this shape cannot be one of this task."""
        ...

    def augment(
        self, inputs: IntArray, labels: IntArray, draws: NDArray[np.float64]
    ) -> tuple[IntArray, IntArray]:
        """A random symmetric copy of each row, decided by its row of draws from [0, 1)."""
        ...

    def encode(self, text: str, shape: TaskShape) -> IntArray:
        """Tokens (L,) of a question that a person typed; `DataError` says what is wrong with it."""
        ...

    def decode(self, tokens: IntArray) -> str:
        """One line of text, as `encode` reads it."""
        ...

    def show(self, question: IntArray, answer: IntArray, before: IntArray | None, color: bool) -> str:
        """The answer as text, what was given marked, and what changed since `before`."""
        ...

    def legend(self, changes: bool, color: bool) -> str:
        """How to read what `show` draws."""
        ...

    def judge(self, question: IntArray, answer: IntArray) -> str | None:
        """None if the answer obeys the rules; otherwise the first rule that it breaks."""
        ...


@dataclass(frozen=True, slots=True)
class Split:
    """One half of a dataset. Inputs and labels are memory-mapped and read by row."""

    shape: TaskShape
    ignore_label: int | None
    inputs: NDArray[Any]
    labels: NDArray[Any]
    puzzle_identifiers: IntArray
    puzzle_indices: IntArray
    group_indices: IntArray

    def __len__(self) -> int:
        return len(self.inputs)

    def rows(self, examples: IntArray) -> tuple[IntArray, IntArray]:
        inputs = self.inputs[examples].astype(np.int64)
        labels = self.labels[examples].astype(np.int64)
        if self.ignore_label is not None:
            labels[labels == self.ignore_label] = IGNORE_LABEL
        return inputs, labels

    def identifiers(self, examples: IntArray) -> IntArray:
        puzzles = np.searchsorted(self.puzzle_indices, examples, side="right") - 1
        return self.puzzle_identifiers[puzzles]


@dataclass(frozen=True, slots=True)
class SplitArrays:
    """A split about to be written: one example a puzzle, one puzzle a group."""

    inputs: NDArray[np.uint8]
    labels: NDArray[np.uint8]
    shape: TaskShape


def write_dataset(directory: Path, splits: Mapping[str, SplitArrays], made_by: Mapping[str, Any]) -> None:
    directory = directory.resolve()
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        for name, split in splits.items():
            (partial / name).mkdir(parents=True)
            _write_split(partial / name, split)
        _write_json(partial / "identifiers.json", ["<blank>"])
        _write_json(partial / BUILD, {**made_by, "sha256": digests(partial)})
        for path in (*partial.rglob("*"), partial):
            sync(path)
        partial.rename(directory)
        sync(directory.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise DataError(f"Cannot write the dataset to {directory}: {error.strerror or error}") from error


def _write_split(directory: Path, split: SplitArrays) -> None:
    count = len(split.inputs)
    ends = np.arange(count + 1, dtype=np.int32)
    arrays: dict[str, NDArray[Any]] = {
        "inputs": split.inputs,
        "labels": split.labels,
        "puzzle_identifiers": np.zeros(count, dtype=np.int32),
        "puzzle_indices": ends,
        "group_indices": ends,
    }
    for field, array in arrays.items():
        np.save(directory / f"all__{field}.npy", array)
    metadata = {
        **asdict(split.shape),
        "pad_id": 0,
        "ignore_label_id": 0,
        "blank_identifier_id": 0,
        "total_groups": count,
        "mean_puzzle_examples": 1.0,
        "total_puzzles": count,
        "sets": ["all"],
    }
    _write_json(directory / "dataset.json", metadata)


class Metadata(BaseModel):
    """What `dataset.json` must say; the public code writes more, which is not needed."""

    model_config = ConfigDict(strict=True)
    seq_len: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    output_vocab_size: int | None = Field(None, ge=1)
    num_puzzle_identifiers: int = Field(ge=1)
    ignore_label_id: int | None
    sets: list[str] = Field(min_length=1, max_length=1)

    @property
    def shape(self) -> TaskShape:
        output_vocab_size = self.output_vocab_size or self.vocab_size
        return TaskShape(self.seq_len, self.vocab_size, output_vocab_size, self.num_puzzle_identifiers)


def open_split(dataset: Path, name: str) -> Split:
    """Maps the arrays, and checks that they are whole and belong together."""
    directory = dataset / name
    if not directory.is_dir():
        missing = f"There is no dataset at {dataset}"
        wrong = f"{dataset} is not a dataset: there is no {name}/ in it"
        raise DataError(wrong if dataset.is_dir() else missing, hint="Build one with: trm data build")
    metadata = _read_metadata(directory / "dataset.json")
    arrays = {field: array_file(directory / f"{metadata.sets[0]}__{field}.npy").mapped() for field in FIELDS}
    problems = _problems(arrays, metadata.shape)
    if problems:
        raise DataError(f"{directory}: {'; '.join(problems)}", hint=AGAIN)
    check_digests(dataset, name)
    indices = {field: np.array(arrays[field], dtype=np.int64) for field in FIELDS[2:]}
    return Split(metadata.shape, metadata.ignore_label_id, arrays["inputs"], arrays["labels"], **indices)


def _read_metadata(path: Path) -> Metadata:
    try:
        return Metadata.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}", hint=AGAIN) from error
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}".removeprefix(": ")
            for problem in error.errors()
        )
        raise DataError(f"{path} does not describe a dataset: {problems}", hint=AGAIN) from error


def _problems(arrays: Mapping[str, NDArray[Any]], shape: TaskShape) -> list[str]:
    examples, puzzles = len(arrays["inputs"]), len(arrays["puzzle_identifiers"])
    found = []
    for field in ("inputs", "labels"):
        if arrays[field].shape != (examples, shape.seq_len):
            found.append(f"{field} has shape {arrays[field].shape}; expected {(examples, shape.seq_len)}")
    if not examples:
        found.append("there are no examples")
    for field, last, length in (
        ("puzzle_indices", examples, puzzles + 1),
        ("group_indices", puzzles, None),
    ):
        array = arrays[field]
        if array.ndim != 1 or len(array) < 2 or (length is not None and len(array) != length):
            found.append(f"{field} has shape {array.shape}")
        elif array[0] != 0 or array[-1] != last or (np.diff(array.astype(np.int64)) < 1).any():
            found.append(f"{field} does not count up to {last}")
    if found:
        return found
    for field, limit in (
        ("inputs", shape.vocab_size),
        ("labels", shape.output_vocab_size),
        ("puzzle_identifiers", shape.num_puzzle_identifiers),
    ):
        least, most = int(arrays[field].min()), int(arrays[field].max())
        if least < 0 or most >= limit:
            found.append(f"{field} holds {least} to {most}; 0 to {limit - 1} exist")
    return found


def fingerprint(split: Split) -> dict[str, str]:
    """Of what is learned from: the same for a copy of a dataset elsewhere."""
    arrays = {field: np.ascontiguousarray(getattr(split, field)) for field in FIELDS}
    digests = {field: hashlib.sha256(array.data).hexdigest() for field, array in arrays.items()}
    return {**digests, "ignored label": str(split.ignore_label)}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
