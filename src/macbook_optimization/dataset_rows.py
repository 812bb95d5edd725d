"""Rows of a dataset in any order, however large it is.

Training asks for a few rows all over the set at every step. A small set is held in memory. A larger one is
mapped: the system is asked for the next step's rows while this one computes, and what was looked at is given
back at once, because Linux maps up to megabytes around a row and counts them as ours. The largest are read
row by row: a thread reads what the next step will ask for, and rows that were used lately are kept within a
budget. All three give the same rows, so one may take another's place in the middle of a run.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from macbook_optimization.dataset_files import AGAIN, ArrayFile
from macbook_optimization.errors import DataError
from macbook_optimization.memory_management import return_freed_memory

IntArray = NDArray[np.int64]
Row = tuple[NDArray[Any], NDArray[Any]]  # of inputs and of labels

_ROWS = 64  # of a map that are looked at before it is given back


class RowReader:
    """Inputs and labels of a split; `strategy` is "memory", "mapped" or "streaming"."""

    def __init__(self, arrays: Mapping[str, ArrayFile], strategy: str, cache_bytes: int = 0) -> None:
        self.files, self.cache = (arrays["inputs"], arrays["labels"]), RowCache(cache_bytes)
        self.pool: ThreadPoolExecutor | None = None
        self.pending: Future[None] | None = None
        self.descriptors: tuple[int, ...] = ()
        self._use(strategy)

    def __len__(self) -> int:
        return len(self.files[0])

    def _use(self, strategy: str) -> None:
        self.strategy = strategy
        self.arrays: tuple[NDArray[Any], ...] = ()
        if strategy == "memory":
            self.arrays = tuple(file.rows(0, len(file)) for file in self.files)
        elif strategy == "mapped" or any(file.fortran_order for file in self.files):
            self.arrays = tuple(file.mapped() for file in self.files)
        else:
            self.descriptors = tuple(os.open(file.path, os.O_RDONLY) for file in self.files)
            self.pool = ThreadPoolExecutor(1, "read-ahead")

    def take(self, examples: IntArray) -> tuple[NDArray[Any], NDArray[Any]]:
        """Copies of these rows, (n, L) each."""
        if self.strategy == "memory":
            return self.arrays[0][examples], self.arrays[1][examples]
        if self.arrays:
            parts = [self._mapped(some) for some in np.array_split(examples, -(-len(examples) // _ROWS) or 1)]
            return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
        if self.pending is not None:
            self.pending.result()  # raises here what was raised there
            self.pending = None
        rows = [self._row(int(example)) for example in examples]
        return np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])

    @property
    def reads_ahead(self) -> bool:
        return self.strategy != "memory"

    def ahead(self, examples: IntArray) -> None:
        """These will be asked for next. Without it they come as well, only later."""
        if self.pool is not None and self.pending is None:
            self.pending = self.pool.submit(self._fill, examples)
        elif self.strategy == "mapped":
            for file, array in zip(self.files, self.arrays, strict=True):
                ask_for(array, file, examples)

    def fall_back(self) -> bool:
        """Gives the set's memory back when there is none to spare; False if there is nothing to give."""
        if self.strategy != "memory":
            return False
        self._use("mapped")
        return_freed_memory()
        return True

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()
            self.pool = None
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()

    def _mapped(self, examples: IntArray) -> tuple[NDArray[Any], NDArray[Any]]:
        found = self.arrays[0][examples], self.arrays[1][examples]
        for array in self.arrays:
            give_back(array)
        return found

    def _fill(self, examples: IntArray) -> None:
        for example in examples:
            self._row(int(example))

    def _row(self, example: int) -> Row:
        row = self.cache.get(example)
        if row is None:
            row = self._read(0, example), self._read(1, example)
            self.cache.put(example, row)
        return row

    def _read(self, which: int, example: int) -> NDArray[Any]:
        file = self.files[which]
        place = file.offset + example * file.row_bytes
        try:
            content = os.pread(self.descriptors[which], file.row_bytes, place)
        except OSError as error:
            raise DataError(f"Cannot read {file.path}: {error.strerror}") from error
        if len(content) < file.row_bytes:  # it was whole when its header was read
            raise DataError(f"{file.path} was truncated while it was in use", hint=AGAIN)
        return np.frombuffer(content, file.dtype)


def give_back(array: NDArray[Any]) -> None:
    """The pages of a map; the system keeps them as long as it has room, and they no longer count as ours."""
    if (pages := _pages_of(array)) is not None:
        pages.madvise(mmap.MADV_DONTNEED)


def ask_for(array: NDArray[Any], file: ArrayFile, examples: IntArray) -> None:
    """These rows of a map: the system begins to read them, and nobody waits."""
    if file.fortran_order or (pages := _pages_of(array)) is None:
        return
    first = file.offset % mmap.ALLOCATIONGRANULARITY + examples * file.row_bytes
    for start in first.tolist():
        page = start - start % mmap.PAGESIZE
        pages.madvise(mmap.MADV_WILLNEED, page, start + file.row_bytes - page)


def _pages_of(array: NDArray[Any]) -> mmap.mmap | None:
    base: Any = array
    while base is not None and not isinstance(base, mmap.mmap):
        base = getattr(base, "base", None)
    return base if hasattr(base, "madvise") else None


class RowCache:
    """The rows that were used last, as many as fit the budget. Two threads use it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.bytes = max_bytes, 0
        self.rows: OrderedDict[int, Row] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, example: int) -> Row | None:
        with self.lock:
            row = self.rows.get(example)
            if row is not None:
                self.rows.move_to_end(example)
            return row

    def put(self, example: int, row: Row) -> None:
        with self.lock:
            if example not in self.rows:
                self.bytes += _size(row)
            self.rows[example] = row
            while self.bytes > self.max_bytes and len(self.rows) > 1:
                _, oldest = self.rows.popitem(last=False)
                self.bytes -= _size(oldest)


def _size(row: Row) -> int:
    return row[0].nbytes + row[1].nbytes
