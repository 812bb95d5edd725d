"""The number of examples that fit into memory, and reactions when memory becomes short.

Peak memory is linear in the micro-batch size: `fixed + per example * n`. The two coefficients are measured
in a child process that runs real steps, and the largest micro-batch within a budget follows from them. During
training, one controller reacts to memory pressure: it shrinks the micro-batch before the limit is reached and
grows it back afterwards. This never changes what is learned, because the effective batch stays the same; it
is only split differently.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from macbook_optimization.adaptive_length import AdaptiveSequenceLength as AdaptiveSequenceLength
from macbook_optimization.errors import ConfigError
from macbook_optimization.hardware_detection import MemorySpecs
from macbook_optimization.memory_readings import MemoryMonitor as MemoryMonitor
from macbook_optimization.memory_readings import MemoryStats as MemoryStats
from macbook_optimization.memory_readings import own_bytes as own_bytes
from macbook_optimization.memory_readings import peak_address_space as peak_address_space
from macbook_optimization.memory_readings import peak_bytes as peak_bytes
from macbook_optimization.memory_readings import read_memory as read_memory
from macbook_optimization.memory_readings import read_stall as read_stall
from macbook_optimization.memory_readings import return_freed_memory as return_freed_memory
from macbook_optimization.units import MIB as MIB

# Share of the budget kept free above a predicted peak: a few steps measure 4 % above the fitted line.
MARGIN = 0.1
WORTH_RELEASING_BYTES = 64 * MIB  # less of it relieves nothing
# Share of the memory left on the machine that a running process may plan with. Assumed, not measured.
_USABLE_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Peak memory of a step as a linear function of the number of examples in a micro-batch."""

    fixed_bytes: int
    bytes_per_example: int

    def peak_bytes(self, batch_size: int) -> int:
        return self.fixed_bytes + batch_size * self.bytes_per_example

    def largest_batch(self, budget_bytes: float) -> int:
        """Return the largest batch within the budget; 0 if not even one example fits."""
        return max(0, math.floor((budget_bytes - self.fixed_bytes) / max(1, self.bytes_per_example)))

    def needed_bytes(self) -> int:
        """Return the smallest budget in which one example fits, margin included."""
        return math.ceil(self.peak_bytes(1) / (1 - MARGIN))


def line_through(measured: Sequence[tuple[int, int]]) -> MemoryModel:
    """Fit a line to (batch size, peak bytes) by least squares, then raise it above every measured peak."""
    if not measured:
        raise ValueError("a line needs at least one measured peak")
    count = len(measured)
    mean_size = sum(size for size, _ in measured) / count
    mean_peak = sum(peak for _, peak in measured) / count
    variance = sum((size - mean_size) ** 2 for size, _ in measured)
    covariance = sum((size - mean_size) * (peak - mean_peak) for size, peak in measured)
    slope = max(0.0, covariance / variance) if variance else 0.0
    fixed = max(peak - slope * size for size, peak in measured)
    return MemoryModel(math.ceil(fixed), math.ceil(slope))


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory that training may use: resident memory and, where the system limits it, address space."""

    resident_bytes: int
    address_space_bytes: int | None
    reason: str


def memory_budget(memory: MemorySpecs, limit_mb: float | None = None, fraction: float = 0.8) -> Budget:
    """Return `limit_mb` as a budget if it is given, else a fraction of the memory available now."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    address_space = None if limit == resource.RLIM_INFINITY else limit
    if limit_mb is not None:
        return Budget(int(limit_mb * MIB), address_space, f"limits.memory_limit_mb is {limit_mb:g}")
    inside = f" inside {memory.limited_by}" if memory.limited_by else ""
    reason = f"{fraction:.0%} of the {memory.available_memory / MIB:,.0f} MiB available{inside}"
    return Budget(int(fraction * memory.available_memory), address_space, reason)


@dataclass(frozen=True, slots=True)
class PressureSettings:
    """Thresholds of the controller. Percentages refer to the memory in use on the whole machine."""

    dynamic: bool = True
    shrink_above_percent: float = 90.0
    grow_below_percent: float = 80.0
    stall_percent: float = 10.0
    swapped_bytes: int = 64 * MIB  # between two samples
    taken_share: float = 0.5  # of the memory available at the start, now used by other programs
    smoothing: float = 0.5  # weight of the newest sample in the moving average
    settle_seconds: float = 10.0  # between two shrinks: the stall percentage is an average over as long
    grow_after_seconds: float = 15.0  # without pressure


@dataclass(frozen=True, slots=True)
class Adjustment:
    """A change of the micro-batch size."""

    before: int
    after: int
    reason: str
    returned_bytes: int = 0  # released by the garbage collection that follows a shrink


def _size_in_bytes(name: str, megabytes: float | None, size: float | None) -> float:
    """Return a size that was given under one of its two names."""
    if (megabytes is None) == (size is None):
        given = "missing" if size is None else "given twice"
        raise ConfigError(
            f"{name} is {given}", hint=f"Give either {name}_mb, in megabytes, or {name}, in bytes."
        )
    value, key = (size, name) if megabytes is None else (megabytes, f"{name}_mb")
    if value is None or not 0 < value < math.inf:  # which NaN is not
        raise ConfigError(
            f"{key} is {value}; it must be above 0 and finite",
            hint="HardwareDetector().detect_memory_specs() reports the memory of this machine, in bytes.",
        )
    return value if megabytes is None else value * MIB


@dataclass(slots=True)
class MemoryManager:
    """The controller of the micro-batch size: how many examples are computed together.

    `largest` is the size that the plan chose. `model` and `budget_bytes`, if known, limit what fits.
    """

    batch_size: int = 1
    largest: int | None = None
    model: MemoryModel | None = None
    budget_bytes: int | None = None
    settings: PressureSettings = PressureSettings()
    clock: Callable[[], float] = time.monotonic
    read: Callable[[], MemoryStats] = read_memory
    collect: Callable[[], int] = return_freed_memory
    relieve: Callable[[], int] = lambda: 0  # releases memory that is kept for speed; returns how many bytes
    average_percent: float | None = field(default=None, init=False)  # moving average of memory in use
    unrelieved: str | None = field(default=None, init=False)  # pressure in spite of a single example
    _available_at_start: int | None = field(default=None, init=False)
    _swap_before: int | None = field(default=None, init=False)
    _calm_since: float | None = field(default=None, init=False)
    _shrunk_at: float = field(default=-math.inf, init=False)
    _relieved_at: float = field(default=-math.inf, init=False)

    def calculate_optimal_batch_size(
        self,
        model_size_mb: float | None = None,
        available_memory_mb: float | None = None,
        safety_margin: float = 0.8,
        memory_model: MemoryModel | None = None,
        *,
        model_size: float | None = None,
        available_memory: float | None = None,
    ) -> int:
        """Return the largest batch that fits into the safe share of memory, at least 1, and start from it.

        `model_size` and `available_memory` are the same sizes in bytes, as `MemorySpecs` has them. Pass a
        measured `memory_model` if there is one. The default was measured for the paper's Sudoku model
        (27 MB of weights, float32): 300 MB for the process, five times the weights (weights, gradient, two
        moments, EMA), and four times the weights per example.
        """
        weights = _size_in_bytes("model_size", model_size_mb, model_size)
        available = _size_in_bytes("available_memory", available_memory_mb, available_memory)
        if available < MIB:
            raise ConfigError(
                f"available_memory is {available:g} bytes; it must be at least {MIB:,}",
                hint="Give megabytes as available_memory_mb.",
            )
        if not 0 < safety_margin <= 1:
            raise ConfigError(
                f"safety_margin is {safety_margin}; it must be above 0 and at most 1",
                hint="It is the share of the memory to use; 0.8 is the default.",
            )
        model = memory_model or MemoryModel(300 * MIB + int(5 * weights), max(1, int(4 * weights)))
        self.batch_size = max(1, model.largest_batch(available * safety_margin))
        self.largest = self.batch_size
        return self.batch_size

    def monitor_memory_usage(self) -> MemoryStats:
        return self.read()

    def force_garbage_collection(self) -> int:
        """Return the number of bytes that went back to the system, as measured."""
        return self.collect()

    trigger_garbage_collection = force_garbage_collection

    def adjust_batch_size_dynamically(self, current_usage: float) -> int:
        """Return the batch size for this memory usage of the machine, from 0 to 1 or in percent."""
        if not 0 <= current_usage <= 100:
            raise ConfigError(
                f"current_usage is {current_usage}; it must be from 0 to 1, or a percentage up to 100",
                hint="monitor_memory_usage().percent_used is the usage of this machine.",
            )
        percent = current_usage if current_usage > 1 else 100 * current_usage
        self._react_to_usage(percent)
        return self.batch_size

    def react(self, stats: MemoryStats) -> Adjustment | None:
        """Adjust the batch size to a new sample, between two micro-batches; None if nothing changes."""
        if not self.settings.dynamic:
            return None
        self.unrelieved = None
        if self._available_at_start is None:
            self._available_at_start = _obtainable(stats)
        largest_fitting = self._largest_fitting(stats)
        if largest_fitting < self.batch_size:
            reason = f"only {_obtainable(stats) / MIB:,.0f} MiB is left for this process"
            return self.shrink(reason, max(1, largest_fitting))
        pressure = self._pressure(stats)
        if pressure is not None:
            return self.shrink(pressure)
        taken = 1 - _obtainable(stats) / (self._available_at_start or 1)
        if taken > self.settings.taken_share and self.batch_size > 1:
            reason = f"other programs took {taken:.0%} of the memory that the plan counted on"
            return self.shrink(reason, max(1, (self.largest or self.batch_size) // 2))
        if taken > self.settings.taken_share / 2:  # too much to grow
            largest_fitting = min(largest_fitting, self.batch_size)
        # macOS keeps memory full by design and reports pressure itself, so its usage means nothing.
        percent = stats.percent_used if stats.pressure is None else 0.0
        return self._react_to_usage(percent, largest_fitting)

    def shrink(self, reason: str, to: int | None = None) -> Adjustment | None:
        """Halve the batch or use the given size; None if that is not smaller, or too soon to halve again.

        Memory that is kept for speed is released first, and the batch shrinks if that was not enough.
        """
        self._calm_since = None
        if self._was_relieved():
            return None
        after = max(1, self.batch_size // 2) if to is None else to
        is_too_soon = self.clock() - self._shrunk_at < self.settings.settle_seconds
        if self.batch_size == 1 and not is_too_soon:
            self.unrelieved = reason
        if after >= self.batch_size or (is_too_soon and to is None):
            return None
        return self._change(after, reason)

    def _was_relieved(self) -> bool:
        now = self.clock()
        if now - self._relieved_at < self.settings.settle_seconds or self.relieve() < WORTH_RELEASING_BYTES:
            return False
        self._relieved_at = now
        return True

    def after_failed_allocation(self) -> Adjustment | None:
        """Halve the size that failed, immediately and permanently; None if it was a single example."""
        self.relieve()
        if self.batch_size == 1:
            return None
        self.largest = self.batch_size // 2
        return self._change(self.largest, "an allocation failed")

    def _change(self, after: int, reason: str) -> Adjustment:
        before = self.batch_size
        self.batch_size = after
        returned = 0
        if after < before:
            self._shrunk_at = self.clock()
            returned = self.force_garbage_collection()
        return Adjustment(before, after, reason, returned)

    def _largest_fitting(self, stats: MemoryStats) -> int:
        """Return the largest batch that fits now; without a memory model, the size that the plan chose."""
        largest = self.largest or self.batch_size
        if self.model is None:
            return largest
        usable = _USABLE_SHARE * _obtainable(stats)
        if self.budget_bytes is not None:
            usable = min(usable, self.budget_bytes)
        return min(largest, self.model.largest_batch(usable))

    def _pressure(self, stats: MemoryStats) -> str | None:
        """Describe the pressure that the system reports, or return None."""
        newly_swapped = self._newly_swapped(stats)
        if stats.stall_percent is not None and stats.stall_percent > self.settings.stall_percent:
            return f"programs waited for memory during {stats.stall_percent:.0f} % of the last 10 s"
        if stats.pressure in ("warning", "critical"):
            return f"macOS reports memory pressure: {stats.pressure}"
        if self.budget_bytes is not None and stats.process_bytes > self.budget_bytes:
            used = f"{stats.process_bytes / MIB:,.0f} of {self.budget_bytes / MIB:,.0f} MiB"
            return f"this process uses {used}"
        if newly_swapped > self.settings.swapped_bytes:
            return f"the system moved {newly_swapped / MIB:,.0f} MiB to swap"
        return None

    def _newly_swapped(self, stats: MemoryStats) -> int:
        """Return the growth of swap since the previous sample: swap that is merely full is not pressure."""
        before = self._swap_before
        self._swap_before = stats.swap_used
        if stats.swap_used is None or before is None:
            return 0
        return stats.swap_used - before

    def _react_to_usage(self, percent: float, largest_fitting: int | None = None) -> Adjustment | None:
        """Shrink or grow by the moving average of memory usage, so that one spike changes nothing."""
        weight = self.settings.smoothing if self.average_percent is not None else 1.0
        self.average_percent = weight * percent + (1 - weight) * (self.average_percent or 0.0)
        if self.average_percent > self.settings.shrink_above_percent:
            return self.shrink(f"{self.average_percent:.0f} % of memory is in use")
        largest = self.largest or self.batch_size
        limit = largest if largest_fitting is None else min(largest, largest_fitting)
        if self.average_percent > self.settings.grow_below_percent or self.batch_size >= limit:
            self._calm_since = None
            return None
        if self._calm_since is None:
            self._calm_since = self.clock()
        if self.clock() - self._calm_since < self.settings.grow_after_seconds:
            return None
        self._calm_since = None
        return self._change(min(limit, 2 * self.batch_size), "memory pressure is over")


def _obtainable(stats: MemoryStats) -> int:
    """Return the memory that this process has or could still get."""
    return stats.available_memory + stats.process_bytes
