"""Random access to the rows of a dataset of any size.

Training needs a few rows from all over the dataset per step. There are three strategies, which return the
same rows, so a run can switch from one to another:

- "memory": a small dataset is loaded completely.
- "mapped": a larger one is memory-mapped. The rows of the next step are prefetched during this one, and pages
  are released after use, because Linux maps up to megabytes around a row and counts them as process memory.
- "streaming": the largest are read row by row. A thread reads the rows of the next step, and recently used
  rows are cached within a budget.
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

from macbook_optimization.dataset_files import REBUILD_HINT, ArrayFile, cannot_read
from macbook_optimization.errors import DataError
from macbook_optimization.input_files import open_descriptor
from macbook_optimization.memory_readings import return_freed_memory

IntArray = NDArray[np.int64]
Row = tuple[NDArray[Any], NDArray[Any]]  # inputs and labels of one example

_ROWS_PER_RELEASE = 64  # rows read from a map before its pages are released


class RowReader:
    """Inputs and labels of a split; `strategy` is "memory", "mapped" or "streaming"."""

    def __init__(self, arrays: Mapping[str, ArrayFile], strategy: str, cache_bytes: int = 0) -> None:
        self.files = (arrays["inputs"], arrays["labels"])
        self.cache = RowCache(cache_bytes)
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
            for file in self.files:
                self.descriptors += (_open(file),)
            self.pool = ThreadPoolExecutor(1, "read-ahead")

    def take(self, examples: IntArray) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return copies of these rows, each of shape (n, L)."""
        if self.strategy == "memory":
            return self.arrays[0][examples], self.arrays[1][examples]
        if self.arrays:
            num_parts = max(1, -(-len(examples) // _ROWS_PER_RELEASE))
            parts = [self._take_mapped(part) for part in np.array_split(examples, num_parts)]
            return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
        if self.pending is not None:
            self.pending.result()  # raises the exceptions of the reading thread
            self.pending = None
        rows = [self._row(int(example)) for example in examples]
        return np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])

    @property
    def reads_ahead(self) -> bool:
        return self.strategy != "memory"

    def read_ahead(self, examples: IntArray) -> None:
        """Prefetch the rows of the next `take`. This is optional: it only makes that call faster."""
        if self.pool is not None and self.pending is None:
            self.pending = self.pool.submit(self._fill_cache, examples)
        elif self.strategy == "mapped":
            for file, array in zip(self.files, self.arrays, strict=True):
                prefetch_rows(array, file, examples)

    def release_memory(self) -> bool:
        """Release the memory of a loaded dataset by mapping it; return False if it is not loaded."""
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

    def _take_mapped(self, examples: IntArray) -> tuple[NDArray[Any], NDArray[Any]]:
        rows = self.arrays[0][examples], self.arrays[1][examples]
        for array in self.arrays:
            release_pages(array)
        return rows

    def _fill_cache(self, examples: IntArray) -> None:
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
        position = file.offset + example * file.row_bytes
        try:
            content = os.pread(self.descriptors[which], file.row_bytes, position)
        except OSError as error:
            raise cannot_read(file.path, error) from error
        if len(content) < file.row_bytes:  # the file had the right size when its header was read
            raise DataError(f"{file.path} was truncated while it was in use", hint=REBUILD_HINT)
        return np.frombuffer(content, file.dtype)


def _open(file: ArrayFile) -> int:
    try:
        return open_descriptor(file.path)
    except OSError as error:
        raise cannot_read(file.path, error) from error


def release_pages(array: NDArray[Any]) -> None:
    """Stop counting the pages of a map as memory of this process; the system may still cache them."""
    if (pages := _mmap_of(array)) is not None:
        pages.madvise(mmap.MADV_DONTNEED)


def prefetch_rows(array: NDArray[Any], file: ArrayFile, examples: IntArray) -> None:
    """Request these rows of a map: the system starts to read them, and the call returns immediately."""
    if file.fortran_order or (pages := _mmap_of(array)) is None:
        return
    # NumPy maps from the allocation boundary below the first row, so positions are relative to that.
    first_bytes = file.offset % mmap.ALLOCATIONGRANULARITY + examples * file.row_bytes
    for start in first_bytes.tolist():
        page = start - start % mmap.PAGESIZE
        pages.madvise(mmap.MADV_WILLNEED, page, start + file.row_bytes - page)


def _mmap_of(array: NDArray[Any]) -> mmap.mmap | None:
    base: Any = array
    while base is not None and not isinstance(base, mmap.mmap):
        base = getattr(base, "base", None)
    return base if hasattr(base, "madvise") else None


class RowCache:
    """The most recently used rows, up to a budget. It is shared by two threads."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
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
                self.bytes += _num_bytes(row)
            self.rows[example] = row
            while self.bytes > self.max_bytes and len(self.rows) > 1:
                _, oldest = self.rows.popitem(last=False)
                self.bytes -= _num_bytes(oldest)


def _num_bytes(row: Row) -> int:
    return row[0].nbytes + row[1].nbytes
