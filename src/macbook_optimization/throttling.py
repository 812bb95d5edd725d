"""Throttling that is inferred from step times, for machines that do not report it.

Several Macs report a nominal thermal level while they are throttled. A slower processor shows in the time
of equal work: a step takes longer, and also more CPU time. More time without more CPU time means that the
process waited, for other programs, for memory or for a disk. Everything here is arithmetic on measurements;
the result is an inference and must be labelled as one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median

from macbook_optimization.resource_monitoring import BUSY_PERCENT, LoadReading

MIN_EARLIER_STEPS = 3  # with equal work, for a comparison
MIN_RECENT_STEPS = 5  # with a comparison
MIN_FACTOR = 1.25  # slower than this: single windows of an undisturbed run differ by less


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step. Steps with an equal value of `work` do the same amount of it, in the same configuration."""

    work: Hashable
    seconds: float  # that passed, without rests
    cpu_seconds: float  # of this process, on all cores together


@dataclass(frozen=True, slots=True)
class Slowdown:
    """The speed of recent steps beside earlier ones of equal work: 1.5 is half as much again."""

    by_time: float
    by_cpu_time: float
    num_steps: int  # recent ones that could be compared


def slowdown_at_equal_work(earlier: Sequence[TimedStep], recent: Sequence[TimedStep]) -> Slowdown | None:
    """Compare the medians of recent and earlier steps; None if too few of them do equal work."""
    by_work: dict[Hashable, list[TimedStep]] = defaultdict(list)
    for step in earlier:
        by_work[step.work].append(step)
    usual = {
        work: (median(step.seconds for step in steps), median(step.cpu_seconds for step in steps))
        for work, steps in by_work.items()
        if len(steps) >= MIN_EARLIER_STEPS
    }
    times: list[float] = []
    cpu_times: list[float] = []
    for step in recent:
        seconds, cpu_seconds = usual.get(step.work, (0.0, 0.0))
        if seconds > 0 and cpu_seconds > 0:
            times.append(step.seconds / seconds)
            cpu_times.append(step.cpu_seconds / cpu_seconds)
    if len(times) < MIN_RECENT_STEPS:
        return None
    return Slowdown(median(times), median(cpu_times), len(times))


def inferred_throttling(slowdown: Slowdown, load: LoadReading, threads: int) -> float | None:
    """Return by what factor the processor has become slower, if throttling is the likely cause.

    `load` is that of the recent steps, and `threads` the cores that this process would use. None if the
    factor is small, if the process waited rather than computed, or if other programs explain it.
    """
    if load.other_percent >= BUSY_PERCENT:
        return None
    free_cores = max(load.cores - load.other_cores, 0.5)
    by_others = max(1.0, threads / free_cores)
    factor = min(slowdown.by_time, slowdown.by_cpu_time) / by_others
    return factor if factor >= MIN_FACTOR else None
