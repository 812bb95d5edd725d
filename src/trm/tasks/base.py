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

from macbook_optimization.errors import DataError

IGNORE_LABEL = -100  # the public code's mark for a position without a label
FIELDS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")

IntArray = NDArray[np.int64]
Progress = Callable[[str, int, int], None]  # what is being done, how many are done, of how many


@dataclass(frozen=True, slots=True)
class TaskShape:
    """What the model has to know about a dataset."""

    seq_len: int
    vocab_size: int
    output_vocab_size: int
    num_puzzle_identifiers: int


class Task(Protocol):
    """Turns files into token arrays, and answers into something a person reads."""

    name: str
    num_draws: int  # random numbers that one augmentation takes

    def build(self, options: Mapping[str, Any], directory: Path, progress: Progress) -> None: ...

    def shape(self, options: Mapping[str, Any]) -> TaskShape:
        """Of the dataset that `build` would make."""
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
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        for name, split in splits.items():
            (partial / name).mkdir(parents=True)
            _write_split(partial / name, split)
        _write_json(partial / "identifiers.json", ["<blank>"])
        files = {str(path.relative_to(partial)): _sha256(path) for path in sorted(partial.rglob("*.npy"))}
        _write_json(partial / "build.json", {**made_by, "sha256": files})
        partial.rename(directory)
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


def open_split(dataset: Path, name: str) -> Split:
    """Maps the arrays, and checks that they are whole and belong together."""
    directory = dataset / name
    if not directory.is_dir():
        raise DataError(
            f"{dataset} is not a dataset: there is no {name}/ in it"
            if dataset.is_dir()
            else f"There is no dataset at {dataset}",
            hint="Build one with: trm data build",
        )
    metadata = _read_metadata(directory / "dataset.json")
    if len(metadata["sets"]) != 1:
        raise DataError(f"{directory / 'dataset.json'} lists {len(metadata['sets'])} sets; one is supported")
    arrays = {field: _map_array(directory / f"{metadata['sets'][0]}__{field}.npy") for field in FIELDS}
    shape = TaskShape(
        seq_len=metadata["seq_len"],
        vocab_size=metadata["vocab_size"],
        output_vocab_size=metadata.get("output_vocab_size", metadata["vocab_size"]),
        num_puzzle_identifiers=metadata["num_puzzle_identifiers"],
    )
    for problem in _problems(arrays, shape):
        raise DataError(f"{directory}: {problem}", hint="Build the dataset again, or copy it again.")
    indices = {field: np.array(arrays[field], dtype=np.int64) for field in FIELDS[2:]}
    return Split(shape, metadata["ignore_label_id"], arrays["inputs"], arrays["labels"], **indices)


def _read_metadata(path: Path) -> dict[str, Any]:
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}", hint="Build the dataset again.") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}", hint="Build the dataset again.") from error
    needed = {"seq_len", "vocab_size", "num_puzzle_identifiers", "ignore_label_id", "sets"}
    missing = sorted(needed - set(metadata if isinstance(metadata, dict) else ()))
    if missing:
        raise DataError(f"{path} lacks {', '.join(missing)}", hint="Build the dataset again.")
    return dict(metadata)


def _map_array(path: Path) -> NDArray[Any]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing", hint="Build the dataset again, or copy it again.") from error
    except (OSError, ValueError, EOFError) as error:  # a header cut short is a ValueError, too
        raise DataError(
            f"{path} is truncated or not an array: {error}", hint="Build the dataset again, or copy it again."
        ) from error
    if array.dtype.kind not in "iu":
        raise DataError(f"{path} holds {array.dtype} instead of integers")
    return np.asarray(array)


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
    if int(arrays["puzzle_identifiers"].max()) >= shape.num_puzzle_identifiers:
        found.append(f"a puzzle identifier is not below {shape.num_puzzle_identifiers}")
    sample = slice(0, 10_000)  # all of a small set; a large one is not read through at every start
    for field, limit in (("inputs", shape.vocab_size), ("labels", shape.output_vocab_size)):
        rows = arrays[field][sample]
        if int(rows.min()) < 0 or int(rows.max()) >= limit:
            found.append(
                f"{field} holds tokens {int(rows.min())} to {int(rows.max())}; 0 to {limit - 1} exist"
            )
    return found


def fingerprint(split: Split) -> str:
    """Of what is learned from: the same for a copy of a dataset elsewhere."""
    digest = hashlib.sha256(repr(asdict(split.shape)).encode())
    for field in FIELDS:
        digest.update(np.ascontiguousarray(getattr(split, field)).data)
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
