"""Write a dataset: complete or absent, and never more in memory than one group of examples.

Arrays go to disk as they arrive. Tokens and labels use the smallest integer type that holds the vocabulary,
and a value outside of it is an error, never a silent wrap-around.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.lib import format as npy

from macbook_optimization.dataset_files import BUILD_FILE, digests
from macbook_optimization.durable_files import new_directory, sync
from macbook_optimization.errors import DataError
from macbook_optimization.file_errors import hint_for, reason_of
from macbook_optimization.json_types import JsonMapping
from macbook_optimization.output_files import check_new_directory
from trm.arrays import IntArray, IntegerArray
from trm.batch import PAD_TOKEN
from trm.tasks.base import DataSpec
from trm.tasks.dataset import DIFFICULTY


class DatasetWriter:
    """Writes to a temporary directory and renames it on success; removes it on failure."""

    def __init__(self, directory: Path, made_by: JsonMapping) -> None:
        self.directory = directory
        self.made_by = made_by
        self.stack = ExitStack()
        self.splits: list[SplitWriter] = []
        self.names = ["<blank>"]  # of the puzzle identifiers

    def __enter__(self) -> Self:
        check_new_directory(self.directory)
        with self._reported():
            self.partial = self.stack.enter_context(new_directory(self.directory.absolute()))
        return self

    def split(self, name: str, spec: DataSpec, ignore_label: int | None) -> SplitWriter:
        """Start a split. Labels equal to `ignore_label` are positions without a label.

        0 is the reference implementation's choice, where no output is 0; a classifier, which has a class 0,
        passes `IGNORE_LABEL`.
        """
        with self._reported():
            self.splits.append(SplitWriter(self.partial / name, spec, ignore_label))
        return self.splits[-1]

    def write_json(self, name: str, value: Any) -> None:
        with self._reported():
            _write_json(self.partial / name, value)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._reported(), self.stack:  # the directory is renamed or removed when the stack is closed
            try:
                if error is not None:
                    raise error
                self._finish()
            finally:
                for split in self.splits:
                    split.close()

    def _finish(self) -> None:
        for split in self.splits:
            split.finish(len(self.names))
        _write_json(self.partial / "identifiers.json", self.names)
        _write_json(self.partial / BUILD_FILE, {**self.made_by, "sha256": digests(self.partial)})
        for path in (*self.partial.rglob("*"), self.partial):
            sync(path)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> DataError:
        return DataError(
            f"Cannot write the dataset to {self.directory}: {reason_of(error)}",
            hint=hint_for(error, "Choose another path."),
        )


class SplitWriter:
    """One split. A group is used once per epoch; it has puzzles, and a puzzle has examples with one
    identifier."""

    def __init__(self, directory: Path, spec: DataSpec, ignore_label: int | None) -> None:
        directory.mkdir()
        self.directory = directory
        self.spec = spec
        self.ignore_label = ignore_label
        labels = [0, spec.num_outputs - 1] + ([] if ignore_label is None else [ignore_label])
        self.ranges = {"inputs": (0, spec.vocab_size - 1), "labels": (min(labels), max(labels))}
        self.dtypes = {name: smallest_dtype(*ends) for name, ends in self.ranges.items()}
        self.files = {name: (directory / f"all__{name}.npy").open("wb") for name in self.ranges}
        for name, file in self.files.items():
            file.write(self._header(name, 0))
        self.examples_of_puzzle: list[IntArray] = []
        self.puzzles_of_group: list[IntArray] = []
        self.identifiers: list[IntArray] = []
        self.difficulties: list[IntArray] = []
        self.lengths: list[IntArray] = []

    def _header(self, name: str, num_rows: int) -> bytes:
        """Return a header whose length does not depend on the number of rows, so it can be rewritten."""
        header = BytesIO()
        descr = npy.dtype_to_descr(self.dtypes[name])
        described = {"descr": descr, "fortran_order": False, "shape": (num_rows, self.spec.max_len)}
        npy.write_array_header_1_0(header, described)
        return header.getvalue()

    def add_group(
        self,
        identifiers: IntArray,
        inputs: IntegerArray,
        labels: IntegerArray,
        lengths: IntArray | None = None,
    ) -> None:
        """Add puzzles with the same number of examples each: (puzzles, examples, positions)."""
        puzzles, examples, _ = inputs.shape
        self._add_lengths(lengths)
        self._write(inputs, labels)
        self.identifiers.append(identifiers)
        self.examples_of_puzzle.append(np.full(puzzles, examples))
        self.puzzles_of_group.append(np.array([puzzles]))

    def add_examples(
        self,
        inputs: IntegerArray,
        labels: IntegerArray,
        difficulties: IntArray | None = None,
        lengths: IntArray | None = None,
    ) -> None:
        """Add examples, each a puzzle and a group of its own, without an identifier."""
        if difficulties is not None:
            self.difficulties.append(difficulties)
        self._add_lengths(lengths)
        self._write(inputs, labels)
        ones = np.broadcast_to(np.int64(1), len(inputs))  # takes no memory: there may be millions
        self.identifiers.append(np.broadcast_to(np.int64(0), len(inputs)))
        self.examples_of_puzzle.append(ones)
        self.puzzles_of_group.append(ones)

    def _add_lengths(self, lengths: IntArray | None) -> None:
        if lengths is None:
            return
        if lengths.min(initial=1) < 1 or lengths.max(initial=1) > self.spec.max_len:
            raise DataError(f"Lengths must be between 1 and {self.spec.max_len}")
        self.lengths.append(lengths.reshape(-1))

    def _write(self, inputs: IntegerArray, labels: IntegerArray) -> None:
        if inputs.shape != labels.shape or inputs.shape[-1] != self.spec.max_len:
            raise DataError(
                f"inputs have shape {inputs.shape} and labels {labels.shape}; the last dimension must be "
                f"{self.spec.max_len}, with IGNORE_LABEL where there is no label"
            )
        for name, array in (("inputs", inputs), ("labels", labels)):
            least, most = self.ranges[name]
            if array.size and (array.min() < least or array.max() > most):
                raise DataError(
                    f"{name} hold {array.min()} to {array.max()}; this dataset has {least} to {most}"
                )
            self.files[name].write(np.ascontiguousarray(array, dtype=self.dtypes[name]).tobytes())

    def finish(self, num_identifiers: int) -> None:
        examples = _joined(self.examples_of_puzzle)
        puzzles = _joined(self.puzzles_of_group)
        total = int(examples.sum())
        for name, file in self.files.items():
            file.seek(0)
            file.write(self._header(name, total))
            file.close()
        self._save("all__puzzle_identifiers.npy", _joined(self.identifiers))
        self._save("all__puzzle_indices.npy", _cumulative(examples))
        self._save("all__group_indices.npy", _cumulative(puzzles))
        if self.difficulties:
            self._save(DIFFICULTY, _joined(self.difficulties))
        if self.lengths:
            if len(lengths := _joined(self.lengths)) != total:
                raise DataError(f"{len(lengths)} of {total} examples have a length; all or none must")
            self._save("all__lengths.npy", lengths)
        metadata = {
            "seq_len": self.spec.max_len,
            "vocab_size": self.spec.vocab_size,
            "output_vocab_size": self.spec.num_outputs,
            "num_puzzle_identifiers": num_identifiers,
            "pad_id": PAD_TOKEN,
            "ignore_label_id": self.ignore_label,
            "blank_identifier_id": 0,
            "total_groups": len(puzzles),
            "mean_puzzle_examples": total / max(1, len(examples)),
            "total_puzzles": len(examples),
            "sets": ["all"],
        }
        if self.spec.class_names:
            metadata["class_names"] = list(self.spec.class_names)
        _write_json(self.directory / "dataset.json", metadata)

    def _save(self, name: str, array: IntArray) -> None:
        limits = np.iinfo(np.int32)
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise DataError(f"{name} holds {array.min()} to {array.max()}, which does not fit 32 bits")
        np.save(self.directory / name, array.astype(np.int32))

    def close(self) -> None:
        """Close the files of a split that failed; `finish` closes those of a complete one."""
        for file in self.files.values():
            with suppress(OSError):  # on a full disk, the rest of the buffer cannot be written either
                file.close()


def smallest_dtype(least: int, most: int) -> np.dtype[np.integer]:
    """Return the smallest integer type that holds both ends; the reference implementation reads any."""
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32"):
        limits = np.iinfo(name)
        if limits.min <= least and most <= limits.max:
            return np.dtype(name)
    return np.dtype("int64")


def _joined(parts: list[IntArray]) -> IntArray:
    return np.concatenate([*parts, np.zeros(0, dtype=np.int64)])


def _cumulative(counts: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
