"""The arrays of a dataset as files: their headers, their checks, and reading a few rows of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from macbook_optimization.errors import DataError

BUILD = "build.json"  # in a set that was built here: how, and the sha256 of its arrays
FIELDS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
# What NumPy raises for headers cut short or with a byte changed; the last three pass through its parser.
_BAD_HEADER = (ValueError, EOFError, OverflowError, SyntaxError, TypeError, TokenError)
_SCAN_BYTES = 8 * 2**20
AGAIN = "Build the dataset again, or copy it again."


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """An array on disk, as its header describes it."""

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int  # of the first row
    fortran_order: bool

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape[1:]))

    @property
    def num_bytes(self) -> int:
        return len(self) * self.row_bytes

    def mapped(self) -> NDArray[Any]:
        return np.asarray(_map(self.path))

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """By an ordinary read: pages of a map would count as ours until the system wants them back."""
        if self.fortran_order:  # its rows lie scattered; this map is let go at once
            return np.array(self.mapped()[start:stop], order="C")
        shape = (stop - start, *self.shape[1:])
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset + start * self.row_bytes)
                values = np.fromfile(file, self.dtype, count=int(np.prod(shape)))
        except OSError as error:
            raise DataError(f"Cannot read {self.path}: {error.strerror or error}", hint=AGAIN) from error
        if values.size < np.prod(shape):  # it was whole when its header was read
            raise DataError(f"{self.path} was truncated while it was in use", hint=AGAIN)
        return values.reshape(shape)


def _map(path: Path) -> np.memmap[Any, np.dtype[Any]]:
    """Reads the header only. Unlike `np.load` it cannot unpickle, whatever the file holds."""
    try:
        return npy.open_memmap(path, mode="r")
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing", hint=AGAIN) from error
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}", hint=AGAIN) from error
    except _BAD_HEADER as error:
        raise DataError(f"{path} is truncated or not an array: {error}", hint=AGAIN) from error


def array_file(path: Path) -> ArrayFile:
    array = _map(path)
    if array.dtype.kind not in "iu" or array.ndim == 0:
        wrong = f"{path} holds {array.ndim}-dimensional {array.dtype} instead of rows of integers"
        raise DataError(wrong, hint=AGAIN)
    return ArrayFile(path, array.dtype, array.shape, array.offset, not array.flags.c_contiguous)


@dataclass(frozen=True, slots=True)
class Content:
    """Of an array, whatever its file is called and how its header is written."""

    sha256: str
    least: int
    most: int


def scan(file: ArrayFile) -> Content:
    """Reads it once, a few megabytes at a time."""
    rows = max(1, _SCAN_BYTES // max(1, file.row_bytes))
    digest = hashlib.sha256()
    extremes = []
    for start in range(0, len(file), rows):
        part = file.rows(start, min(start + rows, len(file)))
        digest.update(part.data)
        extremes.append((int(part.min()), int(part.max())))
    return Content(
        digest.hexdigest(),
        least=min((low for low, _ in extremes), default=0),
        most=max((high for _, high in extremes), default=0),
    )


@dataclass(frozen=True, slots=True)
class PuzzleIndex:
    """Which puzzle an example belongs to. It stays in memory: a few bytes a puzzle."""

    identifiers: NDArray[Any]
    indices: NDArray[np.int64]  # puzzle p has the examples from indices[p] up to indices[p + 1]

    def of_examples(self, start: int, stop: int) -> NDArray[Any]:
        return self.identifiers[np.searchsorted(self.indices, np.arange(start, stop), side="right") - 1]


@dataclass(frozen=True, slots=True)
class SplitFiles:
    """One half of a dataset, as its headers describe it; the lengths fit each other."""

    directory: Path
    arrays: Mapping[str, ArrayFile]

    def __len__(self) -> int:
        return len(self.arrays["inputs"])

    @property
    def num_bytes(self) -> int:
        return sum(array.num_bytes for array in self.arrays.values())

    @property
    def bytes_per_example(self) -> int:
        fields = ("inputs", "labels", "puzzle_identifiers")
        return sum(self.arrays[field].row_bytes for field in fields)

    def puzzle_index(self) -> PuzzleIndex:
        files = (self.arrays["puzzle_identifiers"], self.arrays["puzzle_indices"])
        identifiers, indices = (file.rows(0, len(file)) for file in files)
        counts_up = indices[0] == 0 and indices[-1] == len(self) and (indices[1:] >= indices[:-1]).all()
        if not counts_up:
            raise DataError(f"{files[1].path} does not count up from 0 to {len(self)}", hint=AGAIN)
        return PuzzleIndex(identifiers, indices.astype(np.int64))


def open_files(dataset: Path, split: str) -> SplitFiles:
    """To be read from: a set that says what its arrays were is read once to see that they still are."""
    files = read_headers(dataset, split)
    check_digests(dataset, split)
    return files


def read_headers(dataset: Path, split: str) -> SplitFiles:
    directory = dataset / split
    if not directory.is_dir():
        missing = f"There is no dataset at {dataset}"
        wrong = f"{dataset} is not a dataset: there is no {split}/ in it"
        raise DataError(wrong if dataset.is_dir() else missing)
    if not (directory / "dataset.json").is_file():
        raise DataError(f"{directory / 'dataset.json'} is missing", hint=AGAIN)
    arrays = {field: array_file(directory / f"all__{field}.npy") for field in FIELDS}
    if problems := _length_problems(arrays):
        raise DataError(f"{directory}: {'; '.join(problems)}", hint=AGAIN)
    return SplitFiles(directory, arrays)


def digests(dataset: Path) -> dict[str, str]:
    return {path.relative_to(dataset).as_posix(): _sha256(path) for path in sorted(dataset.rglob("*.npy"))}


def check_digests(dataset: Path, split: str) -> None:
    """Of a set that says what it was."""
    try:
        files = json.loads((dataset / BUILD).read_bytes())["sha256"]
        ours = re.compile(rf"{re.escape(split)}/\w+\.npy")  # never a path out of the dataset
        expected = {dataset / file: digest for file, digest in files.items() if ours.fullmatch(file)}
        changed = [path for path, digest in expected.items() if _sha256(path) != digest]
    except FileNotFoundError as error:
        if Path(error.filename).name == BUILD:
            return
        raise DataError(f"{error.filename} is missing", hint=AGAIN) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{dataset / BUILD} cannot be read: {error}", hint=AGAIN) from error
    if changed:
        raise DataError(
            f"{changed[0]} is not what was built: it is truncated or has been changed",
            hint=f"{AGAIN} If the change was yours, remove {dataset / BUILD}.",
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _length_problems(arrays: Mapping[str, ArrayFile]) -> list[str]:
    found = [f"{array.path.name} is empty" for array in arrays.values() if 0 in array.shape]
    for field, other, more in (("labels", "inputs", 0), ("puzzle_indices", "puzzle_identifiers", 1)):
        if len(arrays[field]) != len(arrays[other]) + more:
            expected = f"{len(arrays[other]) + more} to fit all__{other}.npy"
            found.append(f"all__{field}.npy has {len(arrays[field])} rows instead of {expected}")
    for field in FIELDS[2:]:
        if len(arrays[field].shape) != 1:
            found.append(f"all__{field}.npy has shape {arrays[field].shape} instead of one number a row")
    return found
