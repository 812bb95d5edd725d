"""Datasets in the making: whole or absent, and never larger in memory than one group of examples."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from macbook_optimization.dataset_files import BUILD, digests
from macbook_optimization.durable_files import beside, sync
from macbook_optimization.errors import DataError
from trm.tasks.base import DIFFICULTY, IntArray


class DatasetWriter:
    """A dataset in the making. It lies aside until it is whole, and is gone if it never becomes so; arrays go
    to the disk as they come, so a large set takes no more memory than one group of it."""

    def __init__(self, directory: Path, made_by: Mapping[str, Any]) -> None:
        self.directory, self.made_by = directory.resolve(), made_by
        self.partial = beside(self.directory)
        self.splits: list[SplitWriter] = []
        self.names = ["<blank>"]  # of the puzzle identifiers

    def __enter__(self) -> Self:
        with self._reported():
            self.partial.mkdir(parents=True)
        return self

    def split(self, name: str, seq_len: int, vocab_size: int) -> SplitWriter:
        with self._reported():
            self.splits.append(SplitWriter(self.partial / name, seq_len, vocab_size))
        return self.splits[-1]

    def write_json(self, name: str, value: Any) -> None:
        with self._reported():
            _write_json(self.partial / name, value)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                with self._reported():
                    self._finish()
            elif isinstance(error, OSError):
                raise self._failed(error) from error
        finally:
            for split in self.splits:
                split.close()
            shutil.rmtree(self.partial, ignore_errors=True)

    def _finish(self) -> None:
        for split in self.splits:
            split.finish(len(self.names))
        _write_json(self.partial / "identifiers.json", self.names)
        _write_json(self.partial / BUILD, {**self.made_by, "sha256": digests(self.partial)})
        for path in (*self.partial.rglob("*"), self.partial):
            sync(path)
        self.partial.rename(self.directory)
        sync(self.directory.parent)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> DataError:
        return DataError(f"Cannot write the dataset to {self.directory}: {error.strerror or error}")


class SplitWriter:
    """One half of it. Groups are passed through once an epoch; a group is some puzzles, and a puzzle is some
    examples with one identifier."""

    def __init__(self, directory: Path, seq_len: int, vocab_size: int) -> None:
        directory.mkdir()
        self.directory, self.seq_len, self.vocab_size = directory, seq_len, vocab_size
        self.files = {name: (directory / f"all__{name}.npy").open("wb") for name in ("inputs", "labels")}
        for file in self.files.values():
            file.write(self._header(0))
        self.examples_of_puzzle: list[NDArray[np.int64]] = []
        self.puzzles_of_group: list[NDArray[np.int64]] = []
        self.identifiers: list[NDArray[np.int64]] = []
        self.difficulties: list[IntArray] = []

    def _header(self, num_rows: int) -> bytes:
        """As long for any number of rows, so that it can be written again when that is known."""
        header = BytesIO()
        described = {"descr": "|u1", "fortran_order": False, "shape": (num_rows, self.seq_len)}
        npy.write_array_header_1_0(header, described)
        return header.getvalue()

    def add_group(
        self, identifiers: NDArray[np.int64], inputs: NDArray[np.uint8], labels: NDArray[np.uint8]
    ) -> None:
        """Puzzles with equally many examples each: (puzzles, examples, cells)."""
        puzzles, examples, _ = inputs.shape
        self._write(inputs, labels)
        self.identifiers.append(identifiers)
        self.examples_of_puzzle.append(np.full(puzzles, examples))
        self.puzzles_of_group.append(np.array([puzzles]))

    def add_examples(
        self, inputs: NDArray[np.uint8], labels: NDArray[np.uint8], difficulties: IntArray | None = None
    ) -> None:
        """Each a puzzle and a group of its own, without an identifier."""
        if difficulties is not None:
            self.difficulties.append(difficulties)
        self._write(inputs, labels)
        self.identifiers.append(np.zeros(len(inputs), dtype=np.int64))
        self.examples_of_puzzle.append(np.ones(len(inputs), dtype=np.int64))
        self.puzzles_of_group.append(np.ones(len(inputs), dtype=np.int64))

    def _write(self, inputs: NDArray[np.uint8], labels: NDArray[np.uint8]) -> None:
        for name, array in (("inputs", inputs), ("labels", labels)):
            self.files[name].write(np.ascontiguousarray(array, dtype=np.uint8).tobytes())

    def finish(self, num_identifiers: int) -> None:
        examples, puzzles, identifiers = (
            np.concatenate([*parts, np.zeros(0, dtype=np.int64)])
            for parts in (self.examples_of_puzzle, self.puzzles_of_group, self.identifiers)
        )
        total = int(examples.sum())
        for file in self.files.values():
            file.seek(0)
            file.write(self._header(total))
        self.close()
        for name, array in (
            ("puzzle_identifiers", identifiers),
            ("puzzle_indices", np.cumsum([0, *examples])),
            ("group_indices", np.cumsum([0, *puzzles])),
        ):
            np.save(self.directory / f"all__{name}.npy", array.astype(np.int32))
        if self.difficulties:
            np.save(self.directory / DIFFICULTY, np.concatenate(self.difficulties).astype(np.int32))
        metadata = {
            "seq_len": self.seq_len,
            "vocab_size": self.vocab_size,
            "output_vocab_size": self.vocab_size,
            "num_puzzle_identifiers": num_identifiers,
            "pad_id": 0,
            "ignore_label_id": 0,
            "blank_identifier_id": 0,
            "total_groups": len(puzzles),
            "mean_puzzle_examples": total / max(1, len(examples)),
            "total_puzzles": len(examples),
            "sets": ["all"],
        }
        _write_json(self.directory / "dataset.json", metadata)

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
