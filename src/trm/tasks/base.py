"""What a task is, and the dataset layout that it is stored in.

A dataset is the directory that the public TRM code writes: `train/` and `test/`, each with `dataset.json`
and five arrays. Sets built there open here, and the other way round. It is written aside and renamed, so
it is complete or absent; what it holds is checked when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from macbook_optimization.dataset_files import (
    AGAIN,
    FIELDS,
    Content,
    array_file,
    check_digests,
    scan,
)
from macbook_optimization.dataset_management import DatasetManager
from macbook_optimization.dataset_rows import RowReader
from macbook_optimization.errors import DataError

DIFFICULTY = "all__difficulty.npy"  # beside the arrays of the public code, which does not read it
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


@dataclass(frozen=True, slots=True)
class Tile:
    """One cell of a picture."""

    fill: tuple[int, int, int]
    text: str = ""
    ink: tuple[int, int, int] = (0, 0, 0)
    wrong: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    tiles: list[list[Tile]]
    box: tuple[int, int] = (0, 0)  # a heavy line after so many rows and columns


class Task(Protocol):
    """Turns files into token arrays, and answers into something a person reads."""

    name: str
    num_draws: int  # random numbers that one augmentation takes

    def build(self, options: Mapping[str, Any], directory: Path, progress: Progress, jobs: int = 1) -> None:
        """By so many processes; the same set for any number of them."""
        ...

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raises `ConfigError` that says what is wrong with what `build` would be asked for."""
        ...

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

    def picture(self, question: IntArray, answer: IntArray, label: IntArray | None) -> Picture:
        """Cells that are not as the label has them are marked wrong, if the right answer is known."""
        ...

    def right_answer(self, question: IntArray) -> IntArray | None:
        """Where the task can find it by itself."""
        ...

    solved: str  # what can be said of an answer that `judge` finds nothing wrong with

    def judge(self, question: IntArray, answer: IntArray, label: IntArray | None = None) -> str | None:
        """None, or the first thing that is wrong. A task that has no rules to judge by goes by the label."""
        ...

    @property
    def headline(self) -> str:
        """The figure of an evaluation that decides which checkpoint is best."""
        ...

    def scorer(self, dataset: Path) -> Scorer | None:
        """For figures of its own, besides whether an answer is the label."""
        ...


class Scorer(Protocol):
    def see(
        self, inputs: IntArray, identifiers: IntArray, answers: IntArray, beliefs: NDArray[np.float32]
    ) -> None:
        """Questions and their last answers, each (B, L), and the halting head's logits."""
        ...

    def scores(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class Split:
    """One half of a dataset. Its arrays are maps, to look at; inputs and labels are read by row."""

    shape: TaskShape
    ignore_label: int | None
    inputs: NDArray[Any]
    labels: NDArray[Any]
    puzzle_identifiers: NDArray[Any]
    puzzle_indices: NDArray[Any]
    group_indices: NDArray[Any]
    directory: Path
    reader: RowReader
    digests: Mapping[str, str]  # of what the arrays hold, however it is stored

    def __len__(self) -> int:
        return len(self.reader)

    def rows(self, examples: IntArray) -> tuple[IntArray, IntArray]:
        inputs, labels = (rows.astype(np.int64) for rows in self.reader.take(examples))
        if self.ignore_label is not None:
            labels[labels == self.ignore_label] = IGNORE_LABEL
        return inputs, labels

    def difficulties(self) -> IntArray:
        """Of every example, as its task or its file rated it when the set was built."""
        file = self.directory / DIFFICULTY
        if not file.is_file():
            raise DataError(
                f"{self.directory} does not say how difficult its examples are",
                hint="training.curriculum needs a set that was built here, from grids.",
            )
        found = array_file(file).rows(0, len(self))
        return found.astype(np.int64)

    def identifiers(self, examples: IntArray) -> IntArray:
        puzzles = np.searchsorted(self.puzzle_indices, examples, side="right") - 1
        return self.puzzle_identifiers[puzzles].astype(np.int64)


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


def open_split(
    dataset: Path,
    name: str,
    *,
    manager: DatasetManager | None = None,
    trusted: Mapping[str, str] | None = None,
) -> Split:
    """Checks that the arrays are whole and belong together, which reads all of them once. Who has the digests
    of a process that did so may pass them. A manager chooses how rows are read; else they are mapped."""
    directory = dataset / name
    if not directory.is_dir():
        missing = f"There is no dataset at {dataset}"
        wrong = f"{dataset} is not a dataset: there is no {name}/ in it"
        raise DataError(wrong if dataset.is_dir() else missing, hint="Build one with: trm data build")
    metadata = _read_metadata(directory / "dataset.json")
    files = {field: array_file(directory / f"{metadata.sets[0]}__{field}.npy") for field in FIELDS}
    arrays = {field: file.mapped() for field, file in files.items()}
    problems = _problems(arrays, metadata.shape)
    if not problems and trusted is None:
        found = {field: scan(file) for field, file in files.items()}
        problems = _values_outside(found, metadata.shape)
        trusted = {field: content.sha256 for field, content in found.items()}
        trusted["ignored label"] = str(metadata.ignore_label_id)
        if not problems:
            check_digests(dataset, name)
    if problems:
        raise DataError(f"{directory}: {'; '.join(problems)}", hint=AGAIN)
    return Split(
        metadata.shape, metadata.ignore_label_id, **arrays,
        directory=directory,
        reader=RowReader(files, "mapped") if manager is None else manager.open_rows(files),
        digests=trusted or {},
    )  # fmt: skip


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
        elif array[0] != 0 or array[-1] != last or (array[1:] <= array[:-1]).any():
            found.append(f"{field} does not count up to {last}")
    return found


def _values_outside(found: Mapping[str, Content], shape: TaskShape) -> list[str]:
    limits = {
        "inputs": shape.vocab_size,
        "labels": shape.output_vocab_size,
        "puzzle_identifiers": shape.num_puzzle_identifiers,
    }
    return [
        f"{field} holds {found[field].least} to {found[field].most}; 0 to {limit - 1} exist"
        for field, limit in limits.items()
        if found[field].least < 0 or found[field].most >= limit
    ]


def fingerprint(split: Split) -> dict[str, str]:
    """Of what is learned from: the same for a copy of a dataset elsewhere."""
    return dict(split.digests)
