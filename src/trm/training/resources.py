"""Reactions to the machine: memory pressure and busy cores here, heat and batteries in `power`.

Monitors run in threads and only take readings. Every reaction happens in the loop, at a step or micro-batch
boundary, and none of them changes what is learned, unless the recipe allows rows to be cut (`row_length`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import NamedTuple, Self

from macbook_optimization.errors import AllocationFailed
from macbook_optimization.keep_awake import KeepAwake
from macbook_optimization.memory_management import (
    MIB,
    Adjustment,
    MemoryManager,
    MemoryModel,
    MemoryMonitor,
    MemoryStats,
    PressureSettings,
    read_memory,
)
from macbook_optimization.resource_monitoring import CpuLoad, PowerMonitor, RunningClock
from macbook_optimization.throttling import TimedStep
from trm.backends.base import EXCHANGE, StepResult
from trm.config import RunConfig
from trm.plan import Plan
from trm.runs.events import (
    BatchGrown,
    BatchShrunk,
    DataMapped,
    GarbageCollectionStopped,
    ThreadsChanged,
)
from trm.training.log import RunLog
from trm.training.power import PowerControl
from trm.training.row_length import RowLength
from trm.training.state import TrainingState
from trm.training.throttling_watch import ThrottlingWatch


class HeldMemory(NamedTuple):
    """Memory of this process beside the arrays of its steps; some of it can be released."""

    driver_bytes: Callable[[], int]  # of a GPU
    release_caches: Callable[[], int]  # of a backend; returns how many bytes
    release_data: Callable[[], bool]  # that are in memory and could be read from the disk

    def read(self) -> MemoryStats:
        stats = read_memory()
        return replace(stats, process_bytes=stats.process_bytes + self.driver_bytes())


class MemoryControl:
    """The current micro-batch size: the plan's, or less while the machine has no room for it."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        log: RunLog,
        held: HeldMemory,
        row_length: RowLength | None = None,
    ) -> None:
        limits = config.limits
        self.row_length = row_length
        self.log = log
        self.held = held
        self.monitor = MemoryMonitor(read=held.read)
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
            relieve=self.held.release_caches,
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
        if adjustment.after < adjustment.before and self.held.release_data():
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
        # A different number of threads changes rounding; a compiled block is made for one number of them; MLX
        # has threads of its own.
        fixed = separate or self.deterministic or how.compiled_size is not None or how.backend == "mlx"
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
        held: HeldMemory,
        row_length: RowLength | None = None,
    ) -> None:
        self.memory = MemoryControl(config, plan, log, held, row_length)
        self.clock = RunningClock()
        self.awake = KeepAwake(log.message) if config.plan.keep_awake else None
        self.power = PowerControl(config, PowerMonitor(), log, self.clock, self.awake)
        self.threads = ThreadControl(config, plan, log)
        self.throttling = ThrottlingWatch(log)
        self._open = ExitStack()

    @property
    def training_seconds(self) -> float:
        """Seconds since the start, without pauses of the process and waits for mains power."""
        return self.clock.seconds - self.power.paused_seconds

    def watch_speed(self, state: TrainingState, took: StepTook) -> None:
        """Compare the step with earlier ones of equal work in the same configuration."""
        threads = self.threads.threads
        configuration = (
            state.plan.execution,
            threads,
            self.memory.manager.batch_size,
            state.max_length,
            state.stage,
            state.phase,
        )
        step = TimedStep(state.cycles, took.wall_seconds, took.cpu_seconds)
        self.throttling.after_step(state.step, step, configuration, threads)

    def __enter__(self) -> Self:
        for monitor in (self.memory.monitor, self.power.monitor, self.clock):
            self._open.enter_context(monitor)
        if self.awake is not None:
            self._open.enter_context(self.awake)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


@dataclass(frozen=True, slots=True)
class StepTook:
    """The duration of one step. All but the last field leave out the rests within it."""

    seconds: float  # without pauses of the process
    wall_seconds: float
    cpu_seconds: float  # of this process, on all cores
    rested_seconds: float

    def without_rests(self, result: StepResult) -> StepResult:
        """Return the result with the time of its rests taken off the computations that they were part of."""
        computing = {name: result.seconds.get(name, 0.0) for name in ("forward", "backward")}
        if not self.rested_seconds or not any(computing.values()):
            return result
        share = max(0.0, 1 - self.rested_seconds / sum(computing.values()))
        computing = {name: share * seconds for name, seconds in computing.items()}
        return replace(result, seconds={**result.seconds, **computing})

    def without_waiting(self, result: StepResult) -> StepTook:
        """Return what this rank's own computations took."""
        waited = result.seconds.get(EXCHANGE, 0.0)
        return replace(self, wall_seconds=max(self.wall_seconds - waited, 1e-9))


class OwnSpeed:
    """The speed of this machine on its own slots, since the first step of this start."""

    def __init__(self) -> None:
        self.slots = 0
        self.seconds = 0.0
        self.steps = 0

    def add(self, slots: int, seconds: float) -> None:
        self.steps += 1
        if self.steps > 1:  # the first step allocates and warms up
            self.slots += slots
            self.seconds += seconds

    @property
    def slots_per_second(self) -> float | None:
        return self.slots / self.seconds if self.slots else None


class Stopwatch:
    """Times one step, from its construction on."""

    def __init__(self, resources: Resources) -> None:
        self.resources = resources
        self.started = self._now()

    def _now(self) -> tuple[float, float, float, float]:
        rested = self.resources.power.duty.rested_seconds
        wall = time.monotonic() - rested
        return self.resources.clock.seconds - rested, wall, time.process_time(), rested

    def read(self) -> StepTook:
        seconds, *others = (now - then for now, then in zip(self._now(), self.started, strict=True))
        return StepTook(max(seconds, 1e-9), *others)
