"""A cached copy of a dataset in which every array has its narrowest integer type and C order.

The name of a cache is the hash of the dataset that it was made from, so it never has to be updated: a changed
dataset has another name. A directory under that name is complete.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from macbook_optimization.dataset_files import BUILD_FILE, MAX_JSON_BYTES, ArrayFile, digests, open_files
from macbook_optimization.durable_files import (
    make_directory,
    partial_path,
    remove_directory,
    sync,
    write_synced,
)
from macbook_optimization.errors import DataError
from macbook_optimization.input_files import open_input, read_input

Progress = Callable[[str, int, int], None]  # description, amount done, total
Result = TypeVar("Result")

# Part of a cache's name, so that a change of the format cannot meet an older cache.
_CACHE_SCHEMA = b"narrow arrays, 1"


@dataclass(frozen=True, slots=True)
class CacheSource:
    """The files of the dataset to be cached."""

    dataset: Path
    splits: Sequence[str]
    texts: Sequence[Path]  # files that are copied unchanged
    arrays: Sequence[ArrayFile]

    def content_hash(self) -> str:
        """Hash the names and the content of all files, but not the location of the dataset."""
        digest = hashlib.sha256(_CACHE_SCHEMA)
        for path in (*self.texts, *(array.path for array in self.arrays)):
            with open_input(path) as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"\n{path.relative_to(self.dataset).as_posix()} {content}".encode())
        return digest.hexdigest()


def open_source(dataset: Path) -> CacheSource:
    """Check the dataset and list its files."""
    splits = [split for split in ("train", "test") if (dataset / split).is_dir()] or ["train"]
    arrays = [array for split in splits for array in open_files(dataset, split).arrays.values()]
    texts = [dataset / split / "dataset.json" for split in splits]
    if (dataset / "identifiers.json").is_file():  # the names of the puzzles, which are optional
        texts.append(dataset / "identifiers.json")
    return CacheSource(dataset, splits, texts, arrays)


def find_or_write_cache(
    source: CacheSource, directory: Path, chunk_bytes: int, num_workers: int, progress: Progress
) -> Path:
    """Return the cache of a dataset in `directory`; write it if it is absent or incomplete."""
    cache = directory / source.content_hash()
    if cache.is_dir() and not _is_complete(cache, source.splits):
        remove_directory(cache)
    if not cache.is_dir():
        total = 2 * sum(array.num_bytes for array in source.arrays)  # `_narrowed` reads each array twice
        with ThreadPoolExecutor(num_workers, "preprocessing") as workers:
            _write_cache(cache, source, ChunkPool(workers, num_workers, chunk_bytes, progress, total))
    return cache


def _is_complete(cache: Path, splits: Sequence[str]) -> bool:
    try:
        for split in splits:
            open_files(cache, split)
    except DataError:
        return False
    return (cache / BUILD_FILE).is_file()


@dataclass(slots=True)
class ChunkPool:
    """Processes the chunks of arrays in several threads and returns the results in order.

    Only a few chunks are in memory at a time. Threads are sufficient: reading and NumPy release the GIL.
    """

    workers: ThreadPoolExecutor
    num_workers: int
    chunk_bytes: int
    progress: Progress
    total_bytes: int
    done_bytes: int = 0

    def map(self, function: Callable[[NDArray[Any]], Result], array: ArrayFile) -> Iterator[Result]:
        rows_per_chunk = max(self.chunk_bytes // array.row_bytes, 1)
        pending: deque[Future[Result]] = deque()
        for start in range(0, len(array), rows_per_chunk):
            stop = min(start + rows_per_chunk, len(array))
            pending.append(self.workers.submit(_apply, function, array, start, stop))
            if len(pending) > self.num_workers:
                yield self._next_result(pending, rows_per_chunk * array.row_bytes)
        while pending:
            yield self._next_result(pending, rows_per_chunk * array.row_bytes)

    def _next_result(self, pending: deque[Future[Result]], num_bytes: int) -> Result:
        result = pending.popleft().result()
        self.done_bytes += min(num_bytes, self.total_bytes - self.done_bytes)  # the last chunk may be shorter
        self.progress("preprocessing", self.done_bytes, self.total_bytes)
        return result


def _apply(function: Callable[[NDArray[Any]], Result], array: ArrayFile, start: int, stop: int) -> Result:
    return function(array.rows(start, stop))


def _write_cache(cache: Path, source: CacheSource, pool: ChunkPool) -> None:
    """Write under a temporary name and rename, so that the cache is complete or absent."""
    partial = partial_path(cache)
    try:
        for text in source.texts:
            _write(partial / text.relative_to(source.dataset), [read_input(text, MAX_JSON_BYTES)])
        for array in source.arrays:
            _write(partial / array.path.relative_to(source.dataset), _narrowed(array, pool))
        _write(partial / BUILD_FILE, [json.dumps({"sha256": digests(partial)}).encode()])
        partial.rename(cache)
        sync(cache.parent)
    except OSError:
        if not cache.is_dir():  # if it exists, another process has written the same content first
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(path: Path, parts: Iterable[bytes]) -> None:
    """Use ordinary writes: on a full disk, writing to a memory map would kill the process."""
    make_directory(path.parent)
    write_synced(path, parts)
    sync(path.parent)


def _narrowed(array: ArrayFile, pool: ChunkPool) -> Iterator[bytes]:
    """Yield the file of the array in its narrowest type, chunk by chunk. Reads the array twice."""
    ranges = list(pool.map(lambda chunk: (int(chunk.min()), int(chunk.max())), array))
    dtype = narrowest_dtype(min(low for low, _ in ranges), max(high for _, high in ranges))
    header = BytesIO()
    description = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": array.shape}
    npy.write_array_header_1_0(header, description)
    yield header.getvalue()
    yield from pool.map(lambda chunk: chunk.astype(dtype).tobytes(), array)


def narrowest_dtype(least: int, most: int) -> np.dtype[Any]:
    """Return the smallest integer type that holds both values."""
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        limits = np.iinfo(name)
        if limits.min <= least and most <= limits.max:
            return np.dtype(name)
    raise DataError(f"No integer type holds both {least} and {most}")
