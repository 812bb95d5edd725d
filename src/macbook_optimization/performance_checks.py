"""Checks on a training run while it runs: a memory leak, or a drop in throughput.

Both only report. The caller decides what to do about it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, linear_regression, median

import psutil

from macbook_optimization.errors import ConfigError
from macbook_optimization.units import MIB

_NUM_BLOCKS = 10  # of the history of the leak detector, which is two windows long
_T_QUANTILE = 2.306  # 97.5 % of Student's t with 8 degrees of freedom: a line through 10 blocks


@dataclass(frozen=True, slots=True)
class Leak:
    first_step: int
    last_step: int
    growth_mb: float
    mb_per_step: float
    mb_per_step_low: float  # 95 % confidence interval of a line through the blocks
    mb_per_step_high: float
    suggestions: tuple[str, ...] = (
        "Keep the numbers of a step, not its tensors: a tensor keeps the graph that produced it.",
        "Collect garbage more often.",
        "Resume from the last checkpoint: a new process starts with only the memory it needs.",
    )


class MemoryLeakDetector:
    """Reports memory that has grown steadily for two windows of steps.

    Two windows, because a garbage collection every `window` steps gives a sawtooth, and one window may lie
    within a single tooth. The steps are divided into ten blocks. In a leak, the median of every block is
    above the one before, by at least half of the average rise: a sawtooth falls back, a warm-up flattens,
    and the medians of pure noise are in ascending order once in 10! cases. The price is that a slow leak
    under a steeper sawtooth is not found.
    """

    def __init__(self, window: int = 50, min_growth_mb: float = 10.0) -> None:
        if window < 5:
            raise ConfigError(f"window is {window}; it must be at least 5, one step for each of its blocks")
        check_positive("min_growth_mb", min_growth_mb)
        self.min_growth_mb = min_growth_mb
        self._block_size = 2 * window // _NUM_BLOCKS
        self._history: deque[tuple[int, float]] = deque(maxlen=_NUM_BLOCKS * self._block_size)
        self._num_new = 0  # readings since the history was examined

    def check_for_leaks(self, step: int, rss_bytes: int | None = None) -> Leak | None:
        """Record the memory of one step and return a leak if there is one. Call this once per step.

        Without `rss_bytes` it measures this process. The history is examined when a block is complete. A leak
        is reported once, and again only if it continues for as long as it took to find.
        """
        resident_bytes = psutil.Process().memory_info().rss if rss_bytes is None else rss_bytes
        self._history.append((step, resident_bytes / MIB))
        self._num_new += 1
        if len(self._history) < _NUM_BLOCKS * self._block_size or self._num_new < self._block_size:
            return None
        self._num_new = 0
        leak = self._find()
        if leak is not None:
            self._history.clear()
        return leak

    def _find(self) -> Leak | None:
        steps, resident_mb = zip(*self._history, strict=True)
        starts = range(0, len(resident_mb), self._block_size)
        medians = [median(resident_mb[start : start + self._block_size]) for start in starts]
        rises = [after - before for before, after in pairwise(medians)]
        growth_mb = medians[-1] - medians[0]
        if min(rises) < 0.5 * fmean(rises) or growth_mb < self.min_growth_mb:
            return None
        centres = [fmean(steps[start : start + self._block_size]) for start in starts]
        low, high = _slope_interval(centres, medians)
        num_steps = steps[-self._block_size] - steps[0]  # from the first block to the last, like the medians
        return Leak(steps[0], steps[-1], growth_mb, growth_mb / max(num_steps, 1), low, high)


def _slope_interval(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the slope of a line through one point per block."""
    if xs[0] == xs[-1]:  # the caller does not count steps
        return -math.inf, math.inf
    slope, start = linear_regression(xs, ys)
    residual = sum((y - start - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    spread = sum((x - fmean(xs)) ** 2 for x in xs)
    margin = _T_QUANTILE * math.sqrt(residual / (len(xs) - 2) / spread)
    return slope - margin, slope + margin


class PerformanceRegression:
    """Compares the average of the last `window` rates with `tolerance` times the baseline."""

    def __init__(self, baseline_sps: float, window: int = 20, tolerance: float = 0.8) -> None:
        check_positive("baseline_sps", baseline_sps)
        check_positive("window", window)
        self.baseline_sps = baseline_sps
        self.tolerance = tolerance
        self._recent: deque[float] = deque(maxlen=window)

    def check_regression(self, current_sps: float) -> bool:
        """Record a rate and return whether throughput has dropped."""
        self._recent.append(current_sps)
        average = self._average()
        return average is not None and average < self.tolerance * self.baseline_sps

    @property
    def degradation_percent(self) -> float | None:
        """The drop against the baseline; None until the window is full, negative if training got faster."""
        average = self._average()
        return None if average is None else 100 * (1 - average / self.baseline_sps)

    def _average(self) -> float | None:
        return fmean(self._recent) if len(self._recent) == self._recent.maxlen else None


def check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} is {value}; it must be above 0")
