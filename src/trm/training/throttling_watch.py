"""Throttling that the system may not report, inferred while a run trains.

The first undisturbed windows of steps are what later ones are compared with: the machine is coolest then.
Steps are compared at equal work only, that is at an equal number of recursions in an equal configuration.
The result is recorded and nothing reacts to it: a slower processor has other causes too, such as a power
saving mode, which resting would not remove.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable

from macbook_optimization.resource_monitoring import BUSY_PERCENT, CpuLoad, LoadReading
from macbook_optimization.throttling import (
    MIN_EARLIER_STEPS,
    MIN_FACTOR,
    Slowdown,
    TimedStep,
    inferred_throttling,
    slowdown_at_equal_work,
)
from trm.runs.events import ThrottlingInferred, ThrottlingOver
from trm.training.log import RunLog


class ThrottlingWatch:
    """Compares windows of steps. Throttling begins with the second slow window in a row.

    A window that cannot be compared, or during which other programs were busy, says nothing: it neither
    begins nor ends throttling.
    """

    WINDOW_SECONDS = 30.0
    MIN_STEPS = 20
    MAX_STEPS = 2000  # of a window that are kept

    def __init__(self, log: RunLog) -> None:
        self.log = log
        self.is_throttled = False
        self.load = CpuLoad()
        self._start(None)

    def _start(self, configuration: Hashable) -> None:
        """Forget the earlier steps: those that follow are compared among themselves."""
        self.configuration = configuration
        self.began_throttled = self.is_throttled  # so the earlier steps are the slow ones
        self.earlier: dict[Hashable, list[TimedStep]] = {}  # by work
        self.slow_windows = 0
        self._open_window()

    def _open_window(self) -> None:
        self.window: deque[TimedStep] = deque(maxlen=self.MAX_STEPS)
        self.opened_at = time.monotonic()
        self.load.read()

    def after_step(self, number: int, step: TimedStep, configuration: Hashable, threads: int) -> None:
        """Add a step; `threads` are the cores that it would use."""
        if configuration != self.configuration:
            self._start(configuration)
        self.window.append(step)
        is_long = time.monotonic() - self.opened_at >= self.WINDOW_SECONDS
        if is_long and len(self.window) >= self.MIN_STEPS:
            self._compare(number, self.load.read(), threads)
            self._open_window()

    def _compare(self, number: int, load: LoadReading, threads: int) -> None:
        if load.other_percent >= BUSY_PERCENT:
            return
        earlier = [step for steps in self.earlier.values() for step in steps]
        slowdown = slowdown_at_equal_work(earlier, self.window)
        if slowdown is not None:
            self._judge(number, slowdown, load, threads)
        if self.slow_windows == 0 and self.is_throttled == self.began_throttled:
            self._learn()

    def _judge(self, number: int, slowdown: Slowdown, load: LoadReading, threads: int) -> None:
        factor = inferred_throttling(slowdown, load, threads)
        if self.began_throttled:
            if max(slowdown.by_time, slowdown.by_cpu_time) <= 1 / MIN_FACTOR:
                self.is_throttled = False
                self.log.event(ThrottlingOver(number))
                self._start(self.configuration)
            return
        self.slow_windows = 0 if factor is None else self.slow_windows + 1
        if factor is not None and self.slow_windows == 2 and not self.is_throttled:
            self.is_throttled = True
            self.log.event(ThrottlingInferred(number, factor, _evidence(slowdown, load)))
        if factor is None and self.is_throttled:
            self.is_throttled = False
            self.log.event(ThrottlingOver(number))

    def _learn(self) -> None:
        """Keep the steps of the window whose work was seen too rarely before.

        Where steps are slow and depths many, a depth is seen once or twice in a window.
        """
        rare = {step.work for step in self.window if len(self.earlier.get(step.work, ())) < MIN_EARLIER_STEPS}
        for step in self.window:
            if step.work in rare:
                self.earlier.setdefault(step.work, []).append(step)


def _evidence(slowdown: Slowdown, load: LoadReading) -> str:
    return (
        f"{slowdown.num_steps} steps took {slowdown.by_time:.2f} times as long and "
        f"{slowdown.by_cpu_time:.2f} times the CPU time of earlier steps with equal work, while "
        f"other programs kept "
        f"{load.other_cores:.1f} of {load.cores} cores busy"
    )
