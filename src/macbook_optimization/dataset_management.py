"""Reading datasets that may be larger than memory.

A dataset is a directory with `train/` and `test/`, each holding `dataset.json` and five integer arrays. What
an array is follows from its header, so choosing a strategy costs no reading: small sets are loaded, larger
ones memory-mapped, and the largest streamed in chunks. All three give the same rows in the same order.
A megabyte is 2**20 bytes here, as everywhere where memory is counted.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
from numpy.lib import format as npy
from numpy.typing import NDArray

from macbook_optimization.dataset_files import (
    BUILD,
    ArrayFile,
    PuzzleIndex,
    SplitFiles,
    digests,
    open_files,
    read_headers,
)
from macbook_optimization.dataset_rows import RowReader
from macbook_optimization.durable_files import beside, make_directory, remove_directory, sync, write_synced
from macbook_optimization.errors import ConfigError, DataError

MIB = 2**20
Batch = dict[str, NDArray[Any]]  # inputs, labels, and the puzzle_identifiers of each example's puzzle
Chunks = Generator[Batch, None, None]
Progress = Callable[[str, int, int], None]  # what is being done, how much is done, of how much
Result = TypeVar("Result")

# Assumed, not measured: the other half of the available memory is for weights and activations.
_MEMORY_SHARE = 0.5
# Part of a cache's name, so that a change of what is written cannot meet an older cache.
_CACHE_SCHEMA = b"narrow arrays, 1"


@dataclass(frozen=True, slots=True)
class DatasetSettings:
    """Above `streaming_threshold_mb` a set is streamed; up to `cache_threshold_mb` it is kept in memory, if
    `enable_caching`; in between it is mapped. `auto_fallback_streaming` streams a smaller set, too, if this
    machine has not the memory for it; without it, such a set is mapped."""

    streaming_threshold_mb: float = 200.0
    cache_threshold_mb: float = 100.0
    chunk_size_mb: float = 50.0
    enable_caching: bool = True
    auto_fallback_streaming: bool = True
    force_streaming_mode: bool = False
    preprocessing_workers: int = 2

    def __post_init__(self) -> None:
        found = []
        for name in ("streaming_threshold_mb", "cache_threshold_mb"):
            if not getattr(self, name) >= 0:
                found.append(f"{name} is {getattr(self, name)}; it must not be negative")
        if not self.chunk_size_mb > 0:
            found.append(f"chunk_size_mb is {self.chunk_size_mb}; it must be above 0")
        if not self.preprocessing_workers >= 1:
            found.append(f"preprocessing_workers is {self.preprocessing_workers}; it must be at least 1")
        if found:
            raise ConfigError("\n".join(found))


@dataclass(frozen=True, slots=True)
class DatasetAnalysis:
    total_size_mb: float
    recommended_strategy: str  # "memory", "mapped" or "streaming"
    memory_utilization_percent: float  # the whole set as a share of the available memory
    num_examples: int
    reason: str

    def __getitem__(self, name: str) -> Any:
        """`analysis["total_size_mb"]` is documented beside the attribute."""
        return asdict(self)[name]


class StreamingDataset:
    """The examples of a split in their order, with at most two chunks in memory besides the puzzle index.

    While the consumer works on one chunk, a thread reads the next. The thread lives as long as the
    iteration: to its end, to an error, or until its generator is closed.
    """

    def __init__(self, files: SplitFiles, index: PuzzleIndex, rows_per_chunk: int) -> None:
        self.files, self.index, self.rows_per_chunk = files, index, rows_per_chunk

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[Batch]:
        """One example after the other. Each is a copy: a view would keep its whole chunk in memory."""
        with closing(self.chunks()) as chunks:
            for chunk in chunks:
                for row in range(len(chunk["inputs"])):
                    yield {field: np.array(array[row]) for field, array in chunk.items()}

    def chunks(self) -> Chunks:
        starts = range(0, len(self), self.rows_per_chunk)
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="chunk-reader") as reader:
            coming = reader.submit(self._read, starts[0])
            for start in (*starts[1:], None):
                chunk = coming.result()  # raises here what was raised there
                if start is not None:  # one chunk ahead and never more: that bounds the memory
                    coming = reader.submit(self._read, start)
                yield chunk
                del chunk  # or it would be a third one while we wait for the next

    def _read(self, start: int) -> Batch:
        stop = min(start + self.rows_per_chunk, len(self))
        batch = {field: self.files.arrays[field].rows(start, stop) for field in ("inputs", "labels")}
        return {**batch, "puzzle_identifiers": self.index.of_examples(start, stop)}


class BatchLoader:
    """Batches of a split in its order, as often as one likes; the last one may be short."""

    def __init__(
        self, chunks: Callable[[], Chunks], num_examples: int, batch_size: int, strategy: str
    ) -> None:
        self.num_examples, self.batch_size, self.strategy = num_examples, batch_size, strategy
        self._chunks = chunks  # whole batches each, but for the last one

    def __len__(self) -> int:
        return -(-self.num_examples // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Copies, so that a batch may be changed and kept whatever it was read from."""
        with closing(self._chunks()) as chunks:
            for chunk in chunks:
                for start in range(0, len(chunk["inputs"]), self.batch_size):
                    rows = slice(start, start + self.batch_size)
                    yield {field: np.array(array[rows]) for field, array in chunk.items()}


class DatasetManager:
    """Chooses how a dataset is read on this machine. `available_memory` is in bytes; None asks the system
    each time."""

    def __init__(self, settings: DatasetSettings | None = None, available_memory: int | None = None) -> None:
        self.settings = settings or DatasetSettings()
        self.available_memory = available_memory

    def analyze_dataset_requirements(
        self, dataset_paths: str | Path | Sequence[str | Path], split: str = "train"
    ) -> DatasetAnalysis:
        """Of all the datasets together. Reads headers only."""
        paths = [dataset_paths] if isinstance(dataset_paths, str | Path) else dataset_paths
        if not paths:
            raise DataError("There is no dataset to analyze", hint="Give the path of at least one.")
        return self._analyze([read_headers(Path(path), split) for path in paths])

    def _analyze(self, splits: Sequence[SplitFiles]) -> DatasetAnalysis:
        return self._analysis(sum(files.num_bytes for files in splits), sum(map(len, splits)))

    def _analysis(self, num_bytes: int, num_examples: int) -> DatasetAnalysis:
        available = self.available_memory
        if available is None:
            available = psutil.virtual_memory().available
        strategy, reason = choose_strategy(num_bytes, available, self.settings)
        return DatasetAnalysis(
            total_size_mb=num_bytes / MIB,
            recommended_strategy=strategy,
            memory_utilization_percent=100 * num_bytes / max(available, 1),
            num_examples=num_examples,
            reason=reason,
        )

    def open_rows(self, files: Mapping[str, ArrayFile]) -> RowReader:
        """Rows in any order, as training needs them, by the strategy for this machine."""
        analysis = self._analysis(sum(file.num_bytes for file in files.values()), len(files["inputs"]))
        kept = int(self.settings.chunk_size_mb * MIB) if self.settings.enable_caching else MIB
        return RowReader(files, analysis.recommended_strategy, kept)

    def create_memory_efficient_dataloader(
        self, dataset_path: str | Path, batch_size: int, split: str = "train"
    ) -> BatchLoader:
        """Without worker processes: on macOS they cost more than they bring, and one thread that reads ahead
        is enough for rows that need no work."""
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}; it must be at least 1")
        files = open_files(Path(dataset_path), split)
        strategy = self._analyze([files]).recommended_strategy
        if strategy == "streaming":
            chunks = self._stream(files, batch_size).chunks
        else:
            chunks = _one_chunk(files, mapped=strategy == "mapped")
        return BatchLoader(chunks, len(files), batch_size, strategy)

    def implement_data_streaming(self, dataset_path: str | Path, split: str = "train") -> StreamingDataset:
        return self._stream(open_files(Path(dataset_path), split), whole=1)

    def _stream(self, files: SplitFiles, whole: int) -> StreamingDataset:
        """In chunks of `chunk_size_mb`, cut to a multiple of `whole` examples and at least one of it."""
        fitting = int(self.settings.chunk_size_mb * MIB) // files.bytes_per_example
        return StreamingDataset(files, files.puzzle_index(), max(fitting // whole, 1) * whole)

    def preprocess_and_cache(
        self,
        dataset_path: str | Path,
        cache_dir: str | Path,
        progress: Progress = lambda what, done, total: None,
    ) -> Path:
        """A copy of the dataset with every array in its narrowest type and in C order, ready to be mapped.

        Its name is the sha256 of what it was made from, so it never has to be brought up to date: a changed
        dataset has another name. What stands under that name is complete. Chunks are read and narrowed by
        `preprocessing_workers` threads, and `progress` hears how many bytes were gone through.
        """
        dataset = Path(dataset_path)
        present = [split for split in ("train", "test") if (dataset / split).is_dir()] or ["train"]
        arrays = [a for split in present for a in open_files(dataset, split).arrays.values()]
        texts = [dataset / split / "dataset.json" for split in present]
        if (dataset / "identifiers.json").is_file():  # the puzzles' names, which not every dataset has
            texts.append(dataset / "identifiers.json")
        chunk_bytes = int(self.settings.chunk_size_mb * MIB)
        total = 2 * sum(array.num_bytes for array in arrays)  # each is read twice
        try:
            cache = Path(cache_dir) / _content_hash(dataset, [*texts, *(array.path for array in arrays)])
            if cache.is_dir() and not _is_whole(cache, present):
                remove_directory(cache)  # it can be made again
            if not cache.is_dir():
                with ThreadPoolExecutor(self.settings.preprocessing_workers, "preprocessing") as workers:
                    chunks = Chunked(
                        workers, self.settings.preprocessing_workers, chunk_bytes, progress, total
                    )
                    _write_cache(cache, dataset, texts, arrays, chunks)
        except OSError as error:
            raise DataError(f"Cannot cache {dataset} in {cache_dir}: {error.strerror or error}") from error
        return cache


def choose_strategy(num_bytes: int, available: int, settings: DatasetSettings) -> tuple[str, str]:
    """The strategy, and why."""
    size = f"The dataset has {num_bytes / MIB:.1f} MB"
    if settings.force_streaming_mode:
        return "streaming", f"{size}; force_streaming_mode is set."
    if num_bytes > settings.streaming_threshold_mb * MIB:
        limit = f"streaming_threshold_mb = {settings.streaming_threshold_mb:g}"
        return "streaming", f"{size}, more than {limit}: chunks keep memory bounded."
    if num_bytes > _MEMORY_SHARE * available:
        scarce = f"{size}, more than half of the {available / MIB:.1f} MB of memory that are available"
        if settings.auto_fallback_streaming:
            return "streaming", f"{scarce}: chunks keep memory bounded."
        return "mapped", f"{scarce}, and auto_fallback_streaming is off: a map needs none of its own."
    if not settings.enable_caching:
        return "mapped", f"{size}, and enable_caching is off: rows are read from a map."
    if num_bytes > settings.cache_threshold_mb * MIB:
        limit = f"cache_threshold_mb = {settings.cache_threshold_mb:g}"
        return "mapped", f"{size}, more than {limit}: the system keeps in memory what is in use."
    return "memory", f"{size} and fits into memory with room to spare."


def _one_chunk(files: SplitFiles, mapped: bool) -> Callable[[], Chunks]:
    """The whole split, loaded or mapped once."""
    chunk = {"puzzle_identifiers": files.puzzle_index().of_examples(0, len(files))}
    for field in ("inputs", "labels"):
        array = files.arrays[field]
        chunk[field] = array.mapped() if mapped else array.rows(0, len(array))

    def chunks() -> Chunks:
        yield chunk

    return chunks


def _content_hash(dataset: Path, sources: Sequence[Path]) -> str:
    """Of the names and the bytes, and not of where the dataset lies."""
    digest = hashlib.sha256(_CACHE_SCHEMA)
    for path in sources:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"\n{path.relative_to(dataset).as_posix()} {content}".encode())
    return digest.hexdigest()


def _write_cache(
    cache: Path, dataset: Path, texts: Sequence[Path], arrays: Sequence[ArrayFile], chunks: Chunked
) -> None:
    partial = beside(cache)
    try:
        for text in texts:
            _write(partial / text.relative_to(dataset), [text.read_bytes()])
        for array in arrays:
            _write(partial / array.path.relative_to(dataset), _narrow_parts(array, chunks))
        _write(partial / BUILD, [json.dumps({"sha256": digests(partial)}).encode()])
        partial.rename(cache)
        sync(cache.parent)
    except OSError:
        if not cache.is_dir():  # otherwise somebody else was faster, with the same content
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_whole(cache: Path, splits: Sequence[str]) -> bool:
    try:
        for split in splits:
            open_files(cache, split)
    except DataError:
        return False
    return (cache / BUILD).is_file()


def _write(path: Path, parts: Iterable[bytes]) -> None:
    """Ordinary writes: a full disk would kill a process that writes to a map."""
    make_directory(path.parent)
    write_synced(path, parts)
    sync(path.parent)


@dataclass(slots=True)
class Chunked:
    """An array's chunks, worked on by several threads and handed out in order; few are in memory at a time.
    Threads are enough: reading and NumPy leave the interpreter to each other."""

    workers: ThreadPoolExecutor
    num_workers: int
    chunk_bytes: int
    progress: Progress
    total: int
    done: int = 0

    def map(self, work: Callable[[NDArray[Any]], Result], array: ArrayFile) -> Iterator[Result]:
        rows = max(self.chunk_bytes // array.row_bytes, 1)
        coming: deque[Future[Result]] = deque()
        for start in (*range(0, len(array), rows), *[None] * self.num_workers):
            if start is not None:
                coming.append(self.workers.submit(self._work, work, array, start, start + rows))
            if coming and (start is None or len(coming) > self.num_workers):
                yield coming.popleft().result()
                self.done += min(rows * array.row_bytes, self.total - self.done)
                self.progress("preprocessing", self.done, self.total)

    def _work(
        self, work: Callable[[NDArray[Any]], Result], array: ArrayFile, start: int, stop: int
    ) -> Result:
        return work(array.rows(start, min(stop, len(array))))


def _narrow_parts(array: ArrayFile, chunks: Chunked) -> Iterator[bytes]:
    """The array as a file in its narrowest type, chunk by chunk; reads it twice."""
    extremes = list(chunks.map(lambda part: (int(part.min()), int(part.max())), array))
    dtype = narrowest_dtype(min(low for low, _ in extremes), max(high for _, high in extremes))
    header = BytesIO()
    described = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": array.shape}
    npy.write_array_header_1_0(header, described)
    yield header.getvalue()
    yield from chunks.map(lambda part: part.astype(dtype).tobytes(), array)


def narrowest_dtype(least: int, most: int) -> np.dtype[Any]:
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        limits = np.iinfo(name)
        if limits.min <= least and most <= limits.max:
            return np.dtype(name)
    raise DataError(f"No integer type holds both {least} and {most}")
