"""How much fits, and what to do when it no longer does.

Peak memory is a straight line in the batch: `fixed + per example * n`. The line is measured, in a child that
runs real steps; the largest batch under a budget follows from it. While training goes on, one controller
answers pressure: it shrinks the batch before the limit is reached and grows it back when it is calm again.
It never changes what is learned, because the effective batch is cut, not changed.
"""

from __future__ import annotations

import ctypes
import gc
import math
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from macbook_optimization import macos_readers as macos
from macbook_optimization.hardware_detection import (
    MemorySpecs,
    available_memory,
    linux_memory,
    macos_memory,
    on_macos,
)
from macbook_optimization.resource_monitoring import BackgroundMonitor

MIB = 2**20
MARGIN = 0.1  # kept free between a predicted peak and the budget: one step in many reads 4 % above the line


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Peak memory of a step, as a line in the number of examples that are computed at once."""

    fixed_bytes: int
    bytes_per_example: int

    def peak_bytes(self, batch_size: int) -> int:
        return self.fixed_bytes + batch_size * self.bytes_per_example

    def largest_batch(self, budget_bytes: float) -> int:
        """0 if not even one example fits."""
        return max(0, math.floor((budget_bytes - self.fixed_bytes) / max(1, self.bytes_per_example)))

    def needed_bytes(self) -> int:
        """The smallest budget in which one example fits, margin included."""
        return math.ceil(self.peak_bytes(1) / (1 - MARGIN))


def line_through(measured: Sequence[tuple[int, int]]) -> MemoryModel:
    """Least squares through (batch size, peak bytes), then raised until no measured peak lies above it."""
    if not measured:
        raise ValueError("a line needs at least one measured peak")
    count = len(measured)
    mean_n = sum(n for n, _ in measured) / count
    mean_peak = sum(peak for _, peak in measured) / count
    spread = sum((n - mean_n) ** 2 for n, _ in measured)
    together = sum((n - mean_n) * (peak - mean_peak) for n, peak in measured)
    slope = max(0.0, together / spread) if spread else 0.0
    fixed = max(peak - slope * n for n, peak in measured)
    return MemoryModel(math.ceil(fixed), math.ceil(slope))


@dataclass(frozen=True, slots=True)
class Budget:
    """What training may take: resident memory and, where the system limits it, address space."""

    resident_bytes: int
    address_space_bytes: int | None
    reason: str


def memory_budget(memory: MemorySpecs, limit_mb: float | None = None, fraction: float = 0.8) -> Budget:
    """`limit_mb` if it is given, otherwise a share of what is available now."""
    limited, _ = resource.getrlimit(resource.RLIMIT_AS)
    address_space = None if limited == resource.RLIM_INFINITY else limited
    if limit_mb is not None:
        return Budget(int(limit_mb * MIB), address_space, f"plan.memory_limit_mb is {limit_mb:g}")
    inside = f" inside {memory.limited_by}" if memory.limited_by else ""
    reason = f"{fraction:.0%} of the {memory.available_memory / MIB:,.0f} MiB available{inside}"
    return Budget(int(fraction * memory.available_memory), address_space, reason)


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """One look at the memory; a fact that the system does not tell is None."""

    total_memory: int
    available_memory: int
    process_bytes: int  # what this process really occupies
    swap_used: int | None
    stall_percent: float | None  # time that some process waited for memory, of the last 10 s (Linux PSI)
    pressure: str | None  # macOS: "normal", "warning" or "critical"

    @property
    def percent_used(self) -> float:
        return 100 * (1 - self.available_memory / self.total_memory)


def read_memory(root: Path = Path("/")) -> MemoryStats:
    """Cheap enough for once a second: on macOS `system_profiler` is not asked."""
    facts = macos.parse_sysctl(macos.run_tool(*macos.SYSCTL)) if on_macos() else {}
    specs = macos_memory(facts, None, available_memory()) if on_macos() else linux_memory(root)
    return MemoryStats(
        total_memory=specs.total_memory,
        available_memory=specs.available_memory,
        process_bytes=own_bytes(),
        swap_used=specs.swap_used,
        stall_percent=read_stall(root / "proc/pressure/memory"),
        pressure=macos.memory_pressure(facts),
    )


def own_bytes() -> int:
    """On macOS the unique set, without shared libraries. Compressed pages are in neither figure there."""
    process = psutil.Process()
    return int(process.memory_full_info().uss if on_macos() else process.memory_info().rss)


def peak_bytes() -> int:
    """The most this process ever occupied.

    Not `ru_maxrss` where it can be helped: on Linux that begins with the peak of the process that started
    this one, so a child of a large program would be taken for a large program.
    """
    known = _status_bytes("VmHWM")
    if known is not None:
        return known
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if on_macos() else peak * 1024


def peak_address_space() -> int | None:
    return _status_bytes("VmPeak")


def _status_bytes(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def read_stall(path: Path) -> float | None:
    """`some avg10` of a Linux pressure file."""
    try:
        words = path.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        return None
    try:
        return next((float(word[6:]) for word in words if word.startswith("avg10=")), None)
    except ValueError:
        return None


def return_freed_memory() -> int:
    """Collects garbage and gives freed heap back to the system; the bytes that it returned, measured.

    The macOS call is written from its documentation and has not been run on a Mac yet.
    """
    before = own_bytes()
    gc.collect()
    library = ctypes.CDLL(None)
    if on_macos():
        library.malloc_zone_pressure_relief(None, ctypes.c_size_t(0))
    elif hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
    return max(0, before - own_bytes())


class MemoryMonitor(BackgroundMonitor):
    """Callbacks hear the share in use, 0 to 1, when it is above the threshold."""

    def __init__(self, threshold: float = 0.85, read: Callable[[], MemoryStats] = read_memory) -> None:
        super().__init__()
        self.threshold, self.read = threshold, read
        self.callbacks: list[Callable[[float], None]] = []
        self.latest: MemoryStats | None = None

    def begin(self) -> None:
        self.look()

    def look(self) -> None:
        self.latest = stats = self.read()
        share = stats.percent_used / 100
        if share > self.threshold:
            for callback in self.callbacks:
                callback(share)


@dataclass(frozen=True, slots=True)
class PressureSettings:
    """When the controller acts. Percentages are of the memory in use on the whole machine."""

    dynamic: bool = True
    shrink_above_percent: float = 90.0
    grow_below_percent: float = 80.0
    stall_percent: float = 10.0
    swapped_bytes: int = 64 * MIB  # between two looks
    taken_share: float = 0.5  # of the memory that was available when the plan was made, gone to others
    smoothing: float = 0.5  # weight of the newest look in the moving average
    settle_seconds: float = 10.0  # after a shrink, before the next: stalls are an average over as long
    grow_after_seconds: float = 15.0  # of calm


@dataclass(frozen=True, slots=True)
class Adjustment:
    before: int
    after: int
    reason: str
    returned_bytes: int = 0


@dataclass(slots=True)
class MemoryManager:
    """The one controller of how many examples are computed at once.

    `largest` is what the plan wants; `model` and `budget_bytes`, if known, say how many fit.
    """

    batch_size: int = 1
    largest: int | None = None
    model: MemoryModel | None = None
    budget_bytes: int | None = None
    settings: PressureSettings = PressureSettings()
    clock: Callable[[], float] = time.monotonic
    read: Callable[[], MemoryStats] = read_memory
    collect: Callable[[], int] = return_freed_memory
    _available_at_start: int | None = field(default=None, init=False)
    _average_percent: float | None = field(default=None, init=False)
    _swapped_before: int | None = field(default=None, init=False)
    _calm_since: float | None = field(default=None, init=False)
    _shrunk_at: float = field(default=-math.inf, init=False)

    def calculate_optimal_batch_size(
        self,
        model_size_mb: float,
        available_memory_mb: float,
        safety_margin: float = 0.8,
        memory_model: MemoryModel | None = None,
    ) -> int:
        """The largest batch that fits into the safe share of the memory, and at least 1; starts from it.

        Without a measured line it follows the one that was measured for the paper's Sudoku model (27 MB of
        weights, float32): a process of 300 MB, weights five times over (gradient, two moments, average), and
        for every example four times the weights. A measured line is better.
        """
        size = model_size_mb * MIB
        line = memory_model or MemoryModel(300 * MIB + int(5 * size), max(1, int(4 * size)))
        self.batch_size = max(1, line.largest_batch(available_memory_mb * MIB * safety_margin))
        self.largest = self.batch_size
        return self.batch_size

    def monitor_memory_usage(self) -> MemoryStats:
        return self.read()

    def force_garbage_collection(self) -> int:
        """Bytes that went back to the system, as measured."""
        return self.collect()

    trigger_garbage_collection = force_garbage_collection

    def adjust_batch_size_dynamically(self, current_usage: float) -> int:
        """The batch for a machine with this share of its memory in use, as 0 to 1 or in percent."""
        percent = current_usage if current_usage > 1 else 100 * current_usage
        self._answer_usage(percent)
        return self.batch_size

    def react(self, stats: MemoryStats) -> Adjustment | None:
        """Asked between two cuts, with a new look at the machine; tells what it changed, if anything."""
        if not self.settings.dynamic:
            return None
        if self._available_at_start is None:
            self._available_at_start = stats.available_memory + stats.process_bytes
        fits = self._fits(stats)
        if fits < self.batch_size:
            room = (stats.available_memory + stats.process_bytes) / MIB
            return self.shrink(f"{room:,.0f} MiB are left for this process", max(1, fits))
        reason = self._pressure(stats)
        if reason is not None:
            return self.shrink(reason)
        taken = self._taken_by_others(stats)
        if taken > self.settings.taken_share:
            half = max(1, (self.largest or self.batch_size) // 2)
            why = f"other programs took {taken:.0%} of the memory that the plan counted on"
            return self.shrink(why, half)
        if taken > self.settings.taken_share / 2:
            self._calm_since = None
            return None
        # A Mac fills its memory as a matter of course, and says itself when that is too much.
        percent = stats.percent_used if stats.pressure is None else 0.0
        return self._answer_usage(percent, fits)

    def shrink(self, reason: str, to: int | None = None) -> Adjustment | None:
        """Halves the batch, or takes the given one; None if it cannot, or only just did."""
        self._calm_since = None
        after = max(1, self.batch_size // 2) if to is None else to
        soon = self.clock() - self._shrunk_at < self.settings.settle_seconds
        if after >= self.batch_size or (soon and to is None):
            return None
        return self._change(after, reason)

    def after_failed_allocation(self) -> Adjustment | None:
        """Half of what just failed, at once and for good; None if that was a single example."""
        if self.batch_size == 1:
            return None
        self.largest = self.batch_size // 2
        return self._change(self.largest, "an allocation failed")

    def _change(self, after: int, reason: str) -> Adjustment:
        before, self.batch_size = self.batch_size, after
        returned = 0
        if after < before:
            self._shrunk_at = self.clock()
            returned = self.force_garbage_collection()
        return Adjustment(before, after, reason, returned)

    def _fits(self, stats: MemoryStats) -> int:
        """By the measured line, with what the machine has left now; without one, whatever the plan says."""
        largest = self.largest or self.batch_size
        if self.model is None:
            return largest
        room = 0.9 * (stats.available_memory + stats.process_bytes)
        if self.budget_bytes is not None:
            room = min(room, self.budget_bytes)
        return min(largest, self.model.largest_batch(room))

    def _pressure(self, stats: MemoryStats) -> str | None:
        settings = self.settings
        swapped = self._swapped_since_last(stats)
        if stats.stall_percent is not None and stats.stall_percent > settings.stall_percent:
            return f"programs waited for memory {stats.stall_percent:.0f} % of the last 10 s"
        if stats.pressure in ("warning", "critical"):
            return f"macOS reports memory pressure: {stats.pressure}"
        if self.budget_bytes is not None and stats.process_bytes > self.budget_bytes:
            over = f"{stats.process_bytes / MIB:,.0f} of {self.budget_bytes / MIB:,.0f} MiB"
            return f"this process occupies {over}"
        if swapped > settings.swapped_bytes:
            return f"the system moved {swapped / MIB:,.0f} MiB to swap"
        return None

    def _swapped_since_last(self, stats: MemoryStats) -> int:
        now, before = stats.swap_used, self._swapped_before
        self._swapped_before = now
        return 0 if now is None or before is None else now - before

    def _taken_by_others(self, stats: MemoryStats) -> float:
        before = self._available_at_start or 1
        return 1 - (stats.available_memory + stats.process_bytes) / before

    def _answer_usage(self, percent: float, fits: int | None = None) -> Adjustment | None:
        weight = self.settings.smoothing if self._average_percent is not None else 1.0
        self._average_percent = weight * percent + (1 - weight) * (self._average_percent or 0.0)
        if self._average_percent > self.settings.shrink_above_percent:
            return self.shrink(f"{self._average_percent:.0f} % of the memory are in use")
        largest = self.largest or self.batch_size
        limit = largest if fits is None else min(largest, fits)
        if self._average_percent > self.settings.grow_below_percent or self.batch_size >= limit:
            self._calm_since = None
            return None
        if self._calm_since is None:
            self._calm_since = self.clock()
        if self.clock() - self._calm_since < self.settings.grow_after_seconds:
            return None
        self._calm_since = None
        return self._change(min(limit, 2 * self.batch_size), "the memory has been calm")


@dataclass(slots=True)
class AdaptiveSequenceLength:
    """For tasks whose examples have no fixed length: shorter under pressure, back when it is gone.

    Unlike the batch, a length decides what is learned, so only a task that asks for it is cut.
    """

    base_seq_len: int = 512
    min_seq_len: int = 128
    shrink_above_percent: float = 85.0
    grow_below_percent: float = 60.0
    current_seq_len: int = field(init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.min_seq_len <= self.base_seq_len:
            raise ValueError(f"min_seq_len {self.min_seq_len} is not between 1 and {self.base_seq_len}")
        self.current_seq_len = self.base_seq_len

    def adjust_for_memory_pressure(self, memory_usage_percent: float) -> int:
        if memory_usage_percent > self.shrink_above_percent:
            self.current_seq_len = max(self.min_seq_len, self.current_seq_len * 3 // 4)
        elif memory_usage_percent < self.grow_below_percent:
            grown = math.ceil(self.current_seq_len * 1.1)
            self.current_seq_len = min(self.base_seq_len, grown)
        return self.current_seq_len
