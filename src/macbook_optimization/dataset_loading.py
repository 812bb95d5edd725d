"""Iterate over the examples of a split in order: batches, or a stream of chunks with bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from macbook_optimization.dataset_files import PuzzleIndex, SplitFiles

# One array per field, one row per example: inputs, labels, puzzle_identifiers, and lengths if there are any.
Batch = dict[str, NDArray[Any]]
Chunks = Generator[Batch, None, None]


class StreamingDataset:
    """The examples of a split in order, with at most two chunks in memory besides the puzzle index.

    While the consumer works on one chunk, a thread reads the next. The thread lives as long as the iteration:
    until its end, an error, or the closing of its generator.
    """

    def __init__(self, files: SplitFiles, index: PuzzleIndex, rows_per_chunk: int) -> None:
        self.files = files
        self.index = index
        self.rows_per_chunk = rows_per_chunk

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[Batch]:
        """Yield one example at a time. Each is a copy: a view would keep its whole chunk in memory."""
        with closing(self.chunks()) as chunks:
            for chunk in chunks:
                for row in range(len(chunk["inputs"])):
                    yield {field: np.array(array[row]) for field, array in chunk.items()}

    def chunks(self) -> Chunks:
        starts = range(0, len(self), self.rows_per_chunk)
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="chunk-reader") as reader:
            pending = reader.submit(self._read, starts[0])
            for next_start in (*starts[1:], None):
                chunk = pending.result()  # raises the exceptions of the reading thread
                if next_start is not None:  # only one chunk ahead: that bounds the memory
                    pending = reader.submit(self._read, next_start)
                yield chunk
                del chunk  # without this there would be three chunks while we wait for the next

    def _read(self, start: int) -> Batch:
        stop = min(start + self.rows_per_chunk, len(self))
        chunk = {field: self.files.arrays[field].rows(start, stop) for field in self.files.example_fields}
        chunk["puzzle_identifiers"] = self.index.of_examples(start, stop)
        return chunk


class BatchLoader:
    """The batches of a split in order, for any number of passes. The last batch may be shorter."""

    def __init__(
        self, chunks: Callable[[], Chunks], num_examples: int, batch_size: int, strategy: str
    ) -> None:
        self.num_examples = num_examples
        self.batch_size = batch_size
        self.strategy = strategy
        self._chunks = chunks  # each is a multiple of the batch size, except the last

    def __len__(self) -> int:
        return -(-self.num_examples // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Yield copies, so that a batch may be changed and kept whatever it was read from."""
        with closing(self._chunks()) as chunks:
            for chunk in chunks:
                for start in range(0, len(chunk["inputs"]), self.batch_size):
                    rows = slice(start, start + self.batch_size)
                    yield {field: np.array(array[rows]) for field, array in chunk.items()}


def single_chunk(files: SplitFiles, mapped: bool) -> Callable[[], Chunks]:
    """Load or map a whole split once, and return a function that yields it as one chunk."""
    chunk: Batch = {"puzzle_identifiers": files.puzzle_index().of_examples(0, len(files))}
    for field in files.example_fields:
        array = files.arrays[field]
        chunk[field] = array.mapped() if mapped else array.rows(0, len(array))

    def chunks() -> Chunks:
        yield chunk

    return chunks
