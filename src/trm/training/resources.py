"""How a run reacts to the machine: memory pressure, heat, batteries and busy cores.

Monitors run in threads and only take readings. Every reaction happens in the loop, at a step or micro-batch
boundary, and none of them changes what is learned, unless the recipe allows rows to be cut (`row_length`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from types import TracebackType
from typing import Self

from macbook_optimization.errors import AllocationFailed
from macbook_optimization.memory_management import (
    MIB,
    Adjustment,
    MemoryManager,
    MemoryModel,
    MemoryMonitor,
    MemoryStats,
    PressureSettings,
)
from macbook_optimization.resource_monitoring import CpuLoad, PowerMonitor, RunningClock
from trm.config import LimitSettings, RunConfig
from trm.plan import Plan
from trm.runs.events import (
    BatchGrown,
    BatchShrunk,
    DataMapped,
    GarbageCollectionStopped,
    ThreadsChanged,
)
from trm.training.log import RunLog
from trm.training.row_length import RowLength


class MemoryControl:
    """The current micro-batch size: the plan's, or less while the machine has no room for it."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        log: RunLog,
        release: Callable[[], bool],
        row_length: RowLength | None = None,
    ) -> None:
        limits = config.limits
        self.row_length = row_length
        self.log = log
        self.release = release  # frees memory that is held for speed only
        self.monitor = MemoryMonitor()
        self.collect_every = limits.garbage_collection_frequency
        self.pressure = PressureSettings(
            # A different micro-batch size changes rounding, so it is fixed in deterministic mode.
            dynamic=limits.dynamic_batch_sizing and not config.training.deterministic,
            shrink_above_percent=limits.memory_pressure_threshold,
            grow_below_percent=limits.memory_pressure_threshold - 10,
        )
        self.apply(plan)

    def apply(self, plan: Plan) -> None:
        self.plan = plan
        self.manager = MemoryManager(
            batch_size=plan.micro_batch_size,
            largest=plan.micro_batch_size,
            model=self._memory_model(),
            budget_bytes=plan.budget_bytes,
            settings=self.pressure,
        )

    def _memory_model(self) -> MemoryModel | None:
        return self.plan.memory if self.row_length is None else self.row_length.scaled(self.plan.memory)

    @property
    def max_length(self) -> int | None:
        """Tokens to which rows are cut from the next step on; None if they never are."""
        return None if self.row_length is None else self.row_length.limit

    def resume(self, max_length: int | None) -> None:
        """Continue with the length of a checkpoint."""
        if self.row_length is not None:
            self.row_length.resume(max_length)
            self.manager.model = self._memory_model()

    def micro_batch_size(self, step: int) -> int:
        """Return the size for the next micro-batch, after a reaction to new readings."""
        stats = self.monitor.latest
        self.monitor.latest = None
        if stats is not None:
            self._react(stats, step)
        return self.manager.batch_size

    def _react(self, stats: MemoryStats, step: int) -> None:
        if (adjustment := self.manager.react(stats)) is not None:
            self._report(adjustment, step)
        if self.row_length is not None:
            self.row_length.react(self.manager, step)
            self.manager.model = self._memory_model()

    def make_room(self, step: int, *, may_cut_rows: bool = False) -> None:
        """Lower the size after a failed allocation; raise `AllocationFailed` if it is already 1.

        With `may_cut_rows`, single rows are cut before that, if the recipe allows it. Evaluations do not.
        """
        adjustment = self.manager.after_failed_allocation()
        if adjustment is not None:
            self._report(adjustment, step)
            return
        row_length = self.row_length if may_cut_rows else None
        if row_length is None or not row_length.cut("an allocation failed", step):
            raise AllocationFailed(torn=False)
        self.manager.model = self._memory_model()

    def _report(self, adjustment: Adjustment, step: int) -> None:
        if adjustment.after < adjustment.before and self.release():
            self.log.event(DataMapped(step, adjustment.reason))
            self.log.message(f"The dataset is no longer held in memory: {adjustment.reason}.")
        change = BatchShrunk if adjustment.after < adjustment.before else BatchGrown
        self.log.event(change(step=step, **asdict(adjustment)))
        self.log.message(
            f"The micro-batch size is {adjustment.after} instead of {adjustment.before}: {adjustment.reason}."
        )

    def collect_garbage(self, step: int) -> None:
        """Collect as often as the user requests, as long as it returns something."""
        if self.collect_every is None or step % self.collect_every:
            return
        returned = self.manager.force_garbage_collection()
        if returned < MIB:
            self.collect_every = None
            self.log.event(GarbageCollectionStopped(step, returned))


class PowerControl:
    """When to save because the machine may switch off, and when to let it cool."""

    PAUSE_INTERVAL_SECONDS = 60.0  # a pause of a few seconds per minute costs little

    def __init__(self, limits: LimitSettings, monitor: PowerMonitor) -> None:
        self.limits = limits
        self.monitor = monitor
        self.saved_at_percent = limits.low_battery_percent
        self.cooled_at: float | None = None

    def battery_fell(self) -> float | None:
        """Return the percentage each time the battery is low and has fallen by one."""
        power = self.monitor.power
        if power is None or not power.on_battery or power.battery_percent is None:
            self.saved_at_percent = self.limits.low_battery_percent
            return None
        percent = math.floor(power.battery_percent)  # some systems report fractions
        if percent >= self.saved_at_percent:
            return None
        self.saved_at_percent = percent
        return percent

    def too_hot(self) -> str | None:
        """Return why a pause is due, if one is."""
        thermal = self.monitor.thermal
        now = time.monotonic()
        if not self.limits.enable_thermal_monitoring or thermal is None:
            return None
        if self.cooled_at is not None and now - self.cooled_at < self.PAUSE_INTERVAL_SECONDS:
            return None
        limit = self.limits.thermal_throttle_threshold
        if limit is not None and thermal.temperature is not None and thermal.temperature > limit:
            return f"the processor is at {thermal.temperature:.0f} °C, above {limit:g}"
        if limit is None and thermal.is_throttling:
            return "the system throttles the processor"
        self.cooled_at = None
        return None

    def cool(self, check: Callable[[], None]) -> None:
        end = time.monotonic() + self.limits.cooling_delay_seconds
        while (left := end - time.monotonic()) > 0:
            check()
            time.sleep(min(0.2, left))
        self.cooled_at = time.monotonic()


class ThreadControl:
    """Falls back to one thread while other processes occupy the cores.

    Threads that share every product wait for the slowest of them each time. Workers need no such reaction, as
    they meet once per step.
    """

    INTERVAL_SECONDS = 5.0

    def __init__(self, config: RunConfig, plan: Plan, log: RunLog) -> None:
        self.deterministic = config.training.deterministic
        self.log = log
        self.load = CpuLoad()
        self.checked_at = time.monotonic()
        self.threads = plan.execution.threads
        self.apply(plan)

    def apply(self, plan: Plan) -> None:
        how = plan.execution
        separate = 1 < how.workers <= plan.micro_batch_size
        # A different number of threads changes rounding; a compiled block is made for one number of them.
        fixed = separate or self.deterministic or how.compiled_size is not None
        self.pool = 1 if fixed else how.threads  # threads that share every product
        self.threads = how.threads

    def restart(self) -> None:
        """Measure the load anew, because the steps until now used other numbers of threads."""
        self.load = CpuLoad()
        self.checked_at = time.monotonic()

    def after_step(self, step: int) -> int | None:
        """Return a new number of threads, if it should change."""
        if self.pool == 1 or time.monotonic() - self.checked_at < self.INTERVAL_SECONDS:
            return None
        self.checked_at = time.monotonic()
        load = self.load.read()
        free = load.cores - load.other_cores
        if self.threads > 1 and free < self.pool - 0.5:
            reason = f"other programs keep {load.other_cores:.1f} of {load.cores} cores busy"
            return self._change(1, reason, step)
        if self.threads == 1 and free > self.pool - 0.25:
            return self._change(self.pool, "the cores are free again", step)
        return None

    def _change(self, threads: int, reason: str, step: int) -> int:
        self.log.event(ThreadsChanged(step, self.threads, threads, reason))
        self.log.message(f"Threads: {threads} instead of {self.threads}, as {reason}.")
        self.threads = threads
        return threads


class Resources:
    """Memory, power and threads behind one object; its monitors run while it is open."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        log: RunLog,
        release: Callable[[], bool],
        row_length: RowLength | None = None,
    ) -> None:
        self.memory = MemoryControl(config, plan, log, release, row_length)
        self.power = PowerControl(config.limits, PowerMonitor())
        self.threads = ThreadControl(config, plan, log)
        self.clock = RunningClock()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        for monitor in (self.memory.monitor, self.power.monitor, self.clock):
            self._open.enter_context(monitor)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
