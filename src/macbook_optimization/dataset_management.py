"""Read datasets that may be larger than memory.

A dataset is a directory with `train/` and `test/`, each holding `dataset.json` and integer arrays. The
headers of the arrays are enough to choose a strategy: small datasets are loaded, larger ones memory-mapped,
and the largest streamed in chunks. All three give the same rows in the same order. A megabyte is 2**20 bytes
here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from macbook_optimization.dataset_cache import Progress as Progress
from macbook_optimization.dataset_cache import find_or_write_cache, open_source
from macbook_optimization.dataset_cache import narrowest_dtype as narrowest_dtype
from macbook_optimization.dataset_files import ArrayFile, SplitFiles, open_files, read_headers
from macbook_optimization.dataset_loading import Batch as Batch
from macbook_optimization.dataset_loading import BatchLoader as BatchLoader
from macbook_optimization.dataset_loading import StreamingDataset as StreamingDataset
from macbook_optimization.dataset_loading import single_chunk
from macbook_optimization.dataset_rows import RowReader
from macbook_optimization.errors import ConfigError, DataError
from macbook_optimization.file_errors import hint_for, reason_of
from macbook_optimization.units import MIB as MIB

# Assumed, not measured: the rest of the available memory is for weights and activations.
_MAX_SHARE_OF_MEMORY = 0.5


@dataclass(frozen=True, slots=True)
class DatasetSettings:
    """Thresholds between the strategies.

    A dataset above `streaming_threshold_mb` is streamed. Up to `cache_threshold_mb` it is held in memory if
    `enable_caching` is set. In between it is mapped. With `auto_fallback_streaming`, a smaller dataset is
    also streamed if this machine lacks the memory for it; without, it is mapped.
    """

    streaming_threshold_mb: float = 200.0
    cache_threshold_mb: float = 100.0
    chunk_size_mb: float = 50.0
    enable_caching: bool = True
    auto_fallback_streaming: bool = True
    force_streaming_mode: bool = False
    preprocessing_workers: int = 2

    def __post_init__(self) -> None:
        problems = []
        for name in ("streaming_threshold_mb", "cache_threshold_mb"):
            if not getattr(self, name) >= 0:
                problems.append(f"{name} is {getattr(self, name)}; it must not be negative")
        if not self.chunk_size_mb > 0:
            problems.append(f"chunk_size_mb is {self.chunk_size_mb}; it must be above 0")
        if not self.preprocessing_workers >= 1:
            problems.append(f"preprocessing_workers is {self.preprocessing_workers}; it must be at least 1")
        if problems:
            raise ConfigError("\n".join(problems))

    @property
    def chunk_bytes(self) -> int:
        return int(self.chunk_size_mb * MIB)


@dataclass(frozen=True, slots=True)
class DatasetAnalysis:
    total_size_mb: float
    recommended_strategy: str  # "memory", "mapped" or "streaming"
    memory_utilization_percent: float  # the whole dataset as a share of the available memory
    num_examples: int
    reason: str

    def __getitem__(self, name: str) -> Any:
        """`analysis["total_size_mb"]` is documented in addition to the attribute."""
        return asdict(self)[name]


class DatasetManager:
    """Chooses how a dataset is read on this machine.

    `available_memory` is in bytes; None means the memory that is available at each call.
    """

    def __init__(self, settings: DatasetSettings | None = None, available_memory: int | None = None) -> None:
        self.settings = settings or DatasetSettings()
        self.available_memory = available_memory

    def analyze_dataset_requirements(
        self, dataset_paths: str | Path | Sequence[str | Path], split: str = "train"
    ) -> DatasetAnalysis:
        """Analyze all these datasets together. Reads only headers."""
        paths = [dataset_paths] if isinstance(dataset_paths, str | Path) else dataset_paths
        if not paths:
            raise DataError("There is no dataset to analyze", hint="Pass the path of at least one.")
        splits = [read_headers(Path(path), split) for path in paths]
        return self._analyze(sum(files.num_bytes for files in splits), sum(map(len, splits)))

    def _analyze(self, num_bytes: int, num_examples: int) -> DatasetAnalysis:
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
        """Open rows for random access, as training needs them, with the strategy for this machine."""
        analysis = self._analyze(sum(file.num_bytes for file in files.values()), len(files["inputs"]))
        cache_bytes = self.settings.chunk_bytes if self.settings.enable_caching else MIB
        return RowReader(files, analysis.recommended_strategy, cache_bytes)

    def create_memory_efficient_dataloader(
        self, dataset_path: str | Path, batch_size: int, split: str = "train"
    ) -> BatchLoader:
        """Return a loader of batches in order.

        It uses no worker processes: on macOS they cost more than they save, and one thread that reads ahead
        is enough for rows that need no processing.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}; it must be at least 1")
        files = open_files(Path(dataset_path), split)
        strategy = self._analyze(files.num_bytes, len(files)).recommended_strategy
        if strategy == "streaming":
            chunks = self._stream(files, batch_size).chunks
        else:
            chunks = single_chunk(files, mapped=strategy == "mapped")
        return BatchLoader(chunks, len(files), batch_size, strategy)

    def implement_data_streaming(self, dataset_path: str | Path, split: str = "train") -> StreamingDataset:
        """Return the examples of a split as a stream with bounded memory."""
        return self._stream(open_files(Path(dataset_path), split), multiple=1)

    def _stream(self, files: SplitFiles, multiple: int) -> StreamingDataset:
        """Stream in chunks of about `chunk_size_mb`, each a multiple of `multiple` examples."""
        num_rows = self.settings.chunk_bytes // files.bytes_per_example
        rows_per_chunk = max(num_rows // multiple, 1) * multiple
        return StreamingDataset(files, files.puzzle_index(), rows_per_chunk)

    def preprocess_and_cache(
        self,
        dataset_path: str | Path,
        cache_dir: str | Path,
        progress: Progress = lambda what, done, total: None,
    ) -> Path:
        """Return a copy of the dataset with arrays in their narrowest type and C order, ready to be mapped.

        An existing cache of the same content is reused. `preprocessing_workers` threads read and convert
        chunks; `progress` receives the number of bytes processed so far.
        """
        dataset = Path(dataset_path)
        source = open_source(dataset)
        settings = self.settings
        try:
            return find_or_write_cache(
                source, Path(cache_dir), settings.chunk_bytes, settings.preprocessing_workers, progress
            )
        except OSError as error:
            raise DataError(
                f"Cannot cache {dataset} in {cache_dir}: {reason_of(error)}", hint=hint_for(error)
            ) from error


def choose_strategy(num_bytes: int, available: int, settings: DatasetSettings) -> tuple[str, str]:
    """Return the strategy for a dataset of this size, and the reason."""
    size = f"The dataset has {num_bytes / MIB:.1f} MB"
    if settings.force_streaming_mode:
        return "streaming", f"{size}; force_streaming_mode is set."
    if num_bytes > settings.streaming_threshold_mb * MIB:
        limit = f"streaming_threshold_mb = {settings.streaming_threshold_mb:g}"
        return "streaming", f"{size}, more than {limit}: chunks keep memory bounded."
    if num_bytes > _MAX_SHARE_OF_MEMORY * available:
        scarce = f"{size}, more than half of the {available / MIB:.1f} MB of available memory"
        if settings.auto_fallback_streaming:
            return "streaming", f"{scarce}: chunks keep memory bounded."
        return "mapped", f"{scarce}, and auto_fallback_streaming is off: a map needs no memory of its own."
    if not settings.enable_caching:
        return "mapped", f"{size}, and enable_caching is off: rows are read from a map."
    if num_bytes > settings.cache_threshold_mb * MIB:
        limit = f"cache_threshold_mb = {settings.cache_threshold_mb:g}"
        return "mapped", f"{size}, more than {limit}: the system caches the rows in use."
    return "memory", f"{size} and fits into memory."
