"""The arrays of a dataset as files: headers, checks, hashes, and reading a range of rows.

A split is a directory with `dataset.json` and one `.npy` file per field. All arrays are integers; the header
of each file is enough to check that the arrays belong together.
"""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, Literal

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from macbook_optimization.errors import DataError
from macbook_optimization.file_errors import hint_for, reason_of
from macbook_optimization.input_files import open_input, read_json
from macbook_optimization.units import MIB

BUILD_FILE = "build.json"  # how a dataset was built here, and the sha256 of its arrays
FIELDS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
OPTIONAL_FIELDS = ("lengths",)  # tokens per example, for tasks of variable length
REBUILD_HINT = "Build the dataset again, or copy it again."
# What NumPy raises for truncated or changed headers. Its header parser lets the last three through.
_BAD_HEADER = (ValueError, EOFError, LookupError, OverflowError, SyntaxError, TypeError, TokenError)
# By version of the format. Version 3 differs in the names of fields, which arrays of integers do not have.
_HEADER_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_SCAN_BYTES = 8 * MIB
MAX_JSON_BYTES = 256 * MIB  # of a file beside the arrays; the names of a million puzzle identifiers take 50


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """An array on disk, as described by its header."""

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int  # of the first row, in bytes
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
        """Read rows into memory.

        This is an ordinary read: pages of a memory map would count as memory of this process until the system
        reclaims them.
        """
        if self.fortran_order:  # a row is scattered over the file; this map is released immediately
            return np.array(self.mapped()[start:stop], order="C")
        shape = (stop - start, *self.shape[1:])
        try:
            with open_input(self.path) as file:
                file.seek(self.offset + start * self.row_bytes)
                values = np.fromfile(file, self.dtype, count=int(np.prod(shape)))
        except OSError as error:
            raise cannot_read(self.path, error) from error
        if values.size < np.prod(shape):  # the file had the right size when its header was read
            raise DataError(f"{self.path} was truncated while it was in use", hint=REBUILD_HINT)
        return values.reshape(shape)


def cannot_read(path: Path, error: OSError) -> DataError | MemoryError:
    """Return what to raise for a failed read: a trainer without memory resumes with a smaller plan."""
    if error.errno == errno.ENOMEM:
        return MemoryError(f"Cannot read {path}: {reason_of(error)}")
    return DataError(f"Cannot read {path}: {reason_of(error)}", hint=hint_for(error, REBUILD_HINT))


def _map(path: Path) -> np.memmap[Any, np.dtype[Any]]:
    """Map an array, which reads only its header. Unlike `np.load`, this can never unpickle anything."""
    try:
        with open_input(path) as file:
            read_header = _HEADER_READERS[npy.read_magic(file)]
            shape, fortran_order, dtype = read_header(file)
            if dtype.hasobject:
                raise ValueError("it holds Python objects")
            order: Literal["F", "C"] = "F" if fortran_order else "C"
            return np.memmap(file, dtype, "r", file.tell(), shape, order)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing", hint=REBUILD_HINT) from error
    except OSError as error:
        raise cannot_read(path, error) from error
    except _BAD_HEADER as error:
        raise DataError(f"{path} is truncated or not an array: {error}", hint=REBUILD_HINT) from error


def array_file(path: Path) -> ArrayFile:
    """Read the header of an array of integers."""
    array = _map(path)
    if array.dtype.kind not in "iu" or array.ndim == 0:
        raise DataError(
            f"{path} holds {array.ndim}-dimensional {array.dtype} instead of rows of integers",
            hint=REBUILD_HINT,
        )
    return ArrayFile(path, array.dtype, array.shape, array.offset, not array.flags.c_contiguous)


@dataclass(frozen=True, slots=True)
class Content:
    """The findings of a complete read of an array."""

    sha256: str  # of the values, independent of the file's name, header and memory order
    least: int
    most: int
    file_sha256: str  # of the file, as `digests` records it


def scan(file: ArrayFile) -> Content:
    """Read an array once, a few megabytes at a time, for its range of values and both hashes.

    An array in Fortran order is read a second time: the order of its values differs from that of its bytes.
    """
    rows_per_chunk = max(1, _SCAN_BYTES // max(1, file.row_bytes))
    value_digest = hashlib.sha256()
    file_digest = hashlib.sha256()
    lows: list[int] = []
    highs: list[int] = []
    try:
        with open_input(file.path) as stream:
            file_digest.update(stream.read(file.offset))
            for start in range(0, len(file), rows_per_chunk):
                chunk = file.rows(start, min(start + rows_per_chunk, len(file)))
                value_digest.update(chunk.data)
                file_digest.update(chunk.data)
                lows.append(int(chunk.min()))
                highs.append(int(chunk.max()))
            stream.seek(file.offset + file.num_bytes)
            while rest := stream.read(_SCAN_BYTES):  # NumPy ignores bytes after the last row
                file_digest.update(rest)
        file_sha256 = _sha256(file.path) if file.fortran_order else file_digest.hexdigest()
    except OSError as error:
        raise cannot_read(file.path, error) from error
    return Content(
        value_digest.hexdigest(),
        least=min(lows, default=0),
        most=max(highs, default=0),
        file_sha256=file_sha256,
    )


@dataclass(frozen=True, slots=True)
class PuzzleIndex:
    """The puzzle that each example belongs to. It is held in memory: a few bytes per puzzle."""

    identifiers: NDArray[Any]
    indices: NDArray[np.int64]  # puzzle p has the examples from indices[p] up to indices[p + 1]

    def of_examples(self, start: int, stop: int) -> NDArray[Any]:
        puzzles = np.searchsorted(self.indices, np.arange(start, stop), side="right") - 1
        return self.identifiers[puzzles]


@dataclass(frozen=True, slots=True)
class SplitFiles:
    """The files of one split, as described by their headers, whose lengths have been checked."""

    directory: Path
    arrays: Mapping[str, ArrayFile]

    def __len__(self) -> int:
        return len(self.arrays["inputs"])

    @property
    def num_bytes(self) -> int:
        return sum(array.num_bytes for array in self.arrays.values())

    @property
    def example_fields(self) -> tuple[str, ...]:
        """The arrays with one row per example."""
        return ("inputs", "labels", *(field for field in OPTIONAL_FIELDS if field in self.arrays))

    @property
    def bytes_per_example(self) -> int:
        fields = (*self.example_fields, "puzzle_identifiers")
        return sum(self.arrays[field].row_bytes for field in fields)

    def puzzle_index(self) -> PuzzleIndex:
        identifier_file = self.arrays["puzzle_identifiers"]
        index_file = self.arrays["puzzle_indices"]
        identifiers = identifier_file.rows(0, len(identifier_file))
        indices = index_file.rows(0, len(index_file))
        covers_all = indices[0] == 0 and indices[-1] == len(self)
        if not covers_all or (indices[1:] < indices[:-1]).any():
            raise DataError(f"{index_file.path} does not count up from 0 to {len(self)}", hint=REBUILD_HINT)
        return PuzzleIndex(identifiers, indices.astype(np.int64))


def open_files(dataset: Path, split: str) -> SplitFiles:
    """Check a split and return its files. A dataset with recorded hashes is read once to verify them."""
    files = read_headers(dataset, split)
    check_digests(dataset, split)
    return files


def read_headers(dataset: Path, split: str) -> SplitFiles:
    """Return the files of a split after checking that their headers fit together."""
    directory = dataset / split
    if not dataset.is_dir():
        raise DataError(f"There is no dataset at {dataset}")
    if not directory.is_dir():
        raise DataError(f"{dataset} is not a dataset: there is no {split}/ in it")
    if not (directory / "dataset.json").is_file():
        raise DataError(f"{directory / 'dataset.json'} is missing", hint=REBUILD_HINT)
    present = [field for field in OPTIONAL_FIELDS if (directory / f"all__{field}.npy").exists()]
    arrays = {field: array_file(directory / f"all__{field}.npy") for field in (*FIELDS, *present)}
    if problems := _shape_problems(arrays):
        raise DataError(f"{directory}: {'; '.join(problems)}", hint=REBUILD_HINT)
    return SplitFiles(directory, arrays)


def _shape_problems(arrays: Mapping[str, ArrayFile]) -> list[str]:
    problems = [f"{array.path.name} is empty" for array in arrays.values() if 0 in array.shape]
    # Puzzle p ends where puzzle p + 1 starts, so there is one index more than there are puzzles.
    expected_rows = {
        "labels": ("inputs", len(arrays["inputs"])),
        "puzzle_indices": ("puzzle_identifiers", len(arrays["puzzle_identifiers"]) + 1),
        "lengths": ("inputs", len(arrays["inputs"])),
    }
    for field, (other, num_rows) in expected_rows.items():
        if field in arrays and len(arrays[field]) != num_rows:
            found = len(arrays[field])
            problems.append(
                f"all__{field}.npy has {found} rows instead of {num_rows} to fit all__{other}.npy"
            )
    for field, array in arrays.items():
        if field not in ("inputs", "labels") and len(array.shape) != 1:
            problems.append(f"all__{field}.npy has shape {array.shape} instead of one number per row")
    return problems


def digests(dataset: Path) -> dict[str, str]:
    """Return the sha256 of every array file, by its path relative to the dataset."""
    return {path.relative_to(dataset).as_posix(): _sha256(path) for path in sorted(dataset.rglob("*.npy"))}


def check_digests(dataset: Path, split: str, computed: Mapping[str, str] | None = None) -> None:
    """Compare the files of a split with the hashes recorded when it was built, if any were.

    `computed` holds hashes that are already known, by file name ("all__inputs.npy"), for instance
    `Content.file_sha256`. Only files that are missing from it are read.
    """
    known = computed or {}
    try:
        recorded = read_json(dataset / BUILD_FILE, MAX_JSON_BYTES)["sha256"]
        in_split = re.compile(rf"{re.escape(split)}/\w+\.npy")  # never a path out of the dataset
        expected = {dataset / file: digest for file, digest in recorded.items() if in_split.fullmatch(file)}
        changed = [
            path for path, digest in expected.items() if (known.get(path.name) or _sha256(path)) != digest
        ]
    except FileNotFoundError as error:
        if Path(error.filename).name == BUILD_FILE:
            return
        raise DataError(f"{error.filename} is missing", hint=REBUILD_HINT) from error
    except OSError as error:
        raise cannot_read(Path(error.filename or dataset / BUILD_FILE), error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{dataset / BUILD_FILE} cannot be read: {error}", hint=REBUILD_HINT) from error
    if changed:
        raise DataError(
            f"{changed[0]} is not what was built: it is truncated or has been changed",
            hint=f"{REBUILD_HINT} If you changed it on purpose, remove {dataset / BUILD_FILE}.",
        )


def _sha256(path: Path) -> str:
    with open_input(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
