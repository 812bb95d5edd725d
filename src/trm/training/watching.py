"""What a run shows and writes down while it goes on, and its answers to memory, heat and batteries."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import psutil

from macbook_optimization.errors import AllocationFailed, RunError
from macbook_optimization.memory_management import (
    MIB,
    Adjustment,
    MemoryManager,
    MemoryMonitor,
    PressureSettings,
)
from macbook_optimization.performance_reporting import MemoryLeakDetector
from macbook_optimization.resource_monitoring import PowerMonitor
from trm.backends.base import StepResult
from trm.config import PlanSettings, RunConfig
from trm.runs import Plan, Run


class Say(Protocol):
    def message(self, text: str) -> None: ...


class Display(Say, Protocol):
    def update(self, what: str, done: int, total: int, facts: str = "") -> None: ...


class SilentDisplay:
    def update(self, what: str, done: int, total: int, facts: str = "") -> None: ...
    def message(self, text: str) -> None: ...


class Journal:
    """A run's metrics and events. What a full disk refuses waits here for room; training does not wait."""

    def __init__(self, run: Run, display: Say) -> None:
        self.run, self.display = run, display
        self.waiting: deque[tuple[str, Mapping[str, Any]]] = deque(maxlen=10_000)
        self.warned = False

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        self.waiting.append((name, row))
        try:
            while self.waiting:
                self.run.append(*self.waiting[0])
                self.waiting.popleft()
            self.warned = False
        except RunError as error:
            self._warn(error)

    def event(self, what: str, **facts: Any) -> None:
        self.append("events.jsonl", {"time": time.time(), "event": what, **facts})

    def write(self, name: str, text: str) -> None:
        try:
            self.run.write(name, text)
        except RunError as error:
            self._warn(error)

    def _warn(self, error: RunError) -> None:
        if not self.warned:
            self.display.message(f"warning: {error}. Training goes on.")
        self.warned = True


def show_plan(display: Say, config: RunConfig, plan: Plan) -> None:
    """What was chosen and why, and how long it will take."""
    display.message("Plan: " + "\n      ".join(plan.explain()))
    if plan.samples_per_second is not None:
        seconds = config.training.effective_batch_size / plan.samples_per_second
        whole = seconds * config.training.max_steps
        display.message(
            f"A step takes about {_duration(seconds)} on quiet cores; all {config.training.max_steps} steps "
            f"would take {_duration(whole)}, evaluations aside."
        )


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds * 1000:.0f} ms"


class PowerWatch:
    """When to save because the machine may go off, and when to let it cool."""

    ONCE_IN_SECONDS = 60.0  # a pause of a few seconds, so rarely, costs little

    def __init__(self, settings: PlanSettings, monitor: PowerMonitor) -> None:
        self.settings, self.monitor = settings, monitor
        self.saved_at_percent = settings.low_battery_percent
        self.cooled_at: float | None = None

    def battery_fell(self) -> float | None:
        """The percentage, each time that it is low and has fallen by one."""
        power = self.monitor.power
        if power is None or not power.on_battery or power.battery_percent is None:
            self.saved_at_percent = self.settings.low_battery_percent
            return None
        percent = math.floor(power.battery_percent)  # some systems tell fractions
        if percent >= self.saved_at_percent:
            return None
        self.saved_at_percent = percent
        return percent

    def too_hot(self) -> str | None:
        """Why a pause is due, if it is."""
        thermal, now = self.monitor.thermal, time.monotonic()
        if not self.settings.enable_thermal_monitoring or thermal is None:
            return None
        if self.cooled_at is not None and now - self.cooled_at < self.ONCE_IN_SECONDS:
            return None
        limit = self.settings.thermal_throttle_threshold
        if limit is not None and thermal.temperature is not None and thermal.temperature > limit:
            reason = f"the processor is at {thermal.temperature:.0f} degrees, more than {limit:g}"
        elif limit is None and thermal.is_throttling:
            reason = "the system slows the processor down"
        else:
            self.cooled_at = None
            return None
        return reason

    def cool(self, check: Callable[[], None]) -> None:
        end = time.monotonic() + self.settings.cooling_delay_seconds
        while (left := end - time.monotonic()) > 0:
            check()
            time.sleep(min(0.2, left))
        self.cooled_at = time.monotonic()


class MemoryWatch:
    """The micro-batch of the moment: the plan's, or less while the machine has no room for it."""

    def __init__(
        self, config: RunConfig, plan: Plan, journal: Journal, display: Display, release: Callable[[], bool]
    ) -> None:
        settings = config.plan
        self.release = release  # what is held in memory for speed only
        self.monitor = MemoryMonitor()
        self.pressure = PressureSettings(
            # Another cut rounds otherwise, which deterministic training is not to do.
            dynamic=settings.dynamic_batch_sizing and not config.training.deterministic,
            shrink_above_percent=settings.memory_pressure_threshold,
            grow_below_percent=settings.memory_pressure_threshold - 10,
        )
        self.collect_every = settings.garbage_collection_frequency
        self.journal, self.display = journal, display
        self.follow(plan)

    def follow(self, plan: Plan) -> None:
        self.memory = MemoryManager(
            batch_size=plan.micro_batch_size,
            largest=plan.micro_batch_size,
            model=plan.memory,
            budget_bytes=plan.budget_bytes,
            settings=self.pressure,
        )

    def micro_batch_size(self, step: int) -> int:
        """After an answer to what the monitor has seen since the last cut."""
        stats, self.monitor.latest = self.monitor.latest, None
        if stats is not None and (adjustment := self.memory.react(stats)) is not None:
            self._tell(adjustment, step)
        return self.memory.batch_size

    def make_room(self, step: int) -> None:
        """After a failed allocation; raises if there is nothing smaller."""
        adjustment = self.memory.after_failed_allocation()
        if adjustment is None:
            raise AllocationFailed(torn=False)
        self._tell(adjustment, step)

    def _tell(self, adjustment: Adjustment, step: int) -> None:
        what = "shrunk" if adjustment.after < adjustment.before else "grown"
        if what == "shrunk" and self.release():
            self.journal.event("data mapped", step=step, reason=adjustment.reason)
            self.display.message(f"The dataset is no longer held in memory: {adjustment.reason}.")
        self.journal.event(f"batch {what}", step=step, **asdict(adjustment))
        self.display.message(
            f"The micro-batch is {adjustment.after} instead of {adjustment.before}: {adjustment.reason}."
        )

    def collect_garbage(self, step: int) -> None:
        """As often as the user asks for it, and as long as it returns something."""
        if self.collect_every is None or step % self.collect_every:
            return
        returned = self.memory.force_garbage_collection()
        if returned < MIB:
            self.collect_every = None
            self.journal.event("garbage collection returns nothing", step=step, returned_bytes=returned)


class ThreadWatch:
    """One thread instead of a team while other programs take its cores: a team waits at every product for
    the slowest of them. Lanes need no such answer, as they meet once a step."""

    EVERY_SECONDS = 5.0

    def __init__(
        self, config: RunConfig, plan: Plan, set_threads: Callable[[int], None], journal: Journal, say: Say
    ) -> None:
        # Another number of threads rounds otherwise, which deterministic training is not to do.
        lanes = 1 < plan.lanes <= plan.micro_batch_size
        self.team = 1 if lanes or config.training.deterministic else plan.threads
        self.threads = self.team
        self.set_threads, self.journal, self.say = set_threads, journal, say
        self.process, self.looked_at = psutil.Process(), time.monotonic()
        self.busy_cores()

    def busy_cores(self) -> tuple[float, float]:
        """All and ours, since the call before."""
        return psutil.cpu_percent() * (psutil.cpu_count() or 1) / 100, self.process.cpu_percent() / 100

    def look(self, step: int, compiled: bool) -> None:
        """Between two steps. A compiled level is made for the team, and any other number of threads would do
        without it; the child that compiled it may have been what took a core."""
        if compiled and self.threads != self.team:
            self._change(self.team, "the compiled level was made for them", step)
        if self.team == 1 or compiled or time.monotonic() - self.looked_at < self.EVERY_SECONDS:
            return
        self.looked_at = time.monotonic()
        (busy, ours), cores = self.busy_cores(), psutil.cpu_count() or 1
        others = max(0.0, busy - ours)
        if self.threads > 1 and cores - others < self.team - 0.5:
            self._change(1, f"other programs keep {others:.1f} of {cores} cores busy", step)
        elif self.threads == 1 and cores - others > self.team - 0.25:
            self._change(self.team, "the cores are free again", step)

    def _change(self, threads: int, reason: str, step: int) -> None:
        self.set_threads(threads)
        self.journal.event("threads", step=step, before=self.threads, after=threads, reason=reason)
        self.say.message(f"Threads: {threads} instead of {self.threads}, as {reason}.")
        self.threads = threads


class MetricsLog:
    """Averages over the steps since the last row, and writes a row about once a second."""

    def __init__(self, journal: Journal, every_seconds: float = 1.0) -> None:
        self.journal, self.every_seconds = journal, every_seconds
        self.process = psutil.Process()
        self.leaks = MemoryLeakDetector()
        self.process.cpu_percent()  # the first call only starts the measurement
        self.loss = self.samples_per_second = 0.0
        self.row: dict[str, Any] = {}
        self.results: list[StepResult] = []
        self.step_seconds = 0.0

    def add(
        self,
        step: int,
        result: StepResult,
        learning_rate: float,
        step_seconds: float,
        seconds: float,
        micro_batch_size: int,
    ) -> None:
        """`step_seconds` is this step's own; evaluations and saves do not count against the rate."""
        self.results.append(result)
        self.step_seconds += step_seconds
        self.loss = float(np.mean([r.loss for r in self.results]))
        self.samples_per_second = sum(len(r.exact) for r in self.results) / self.step_seconds
        self.row = {
            "step": step,
            "seconds": seconds,
            "loss": self.loss,
            "grad_norm": result.grad_norm,
            "samples_per_second": self.samples_per_second,
            "learning_rate": learning_rate,
            "micro_batch_size": micro_batch_size,
        }
        if self.step_seconds >= self.every_seconds:
            self.write()

    def write(self) -> None:
        if not self.results:
            return
        rss_bytes = self.process.memory_info().rss
        more = {
            "train_token_accuracy": float(np.mean([r.token_accuracy for r in self.results])),
            "train_exact_accuracy": float(np.mean([r.exact.mean() for r in self.results])),
            "rss_bytes": rss_bytes,
            "cpu_percent": self.process.cpu_percent(),
        }
        self.journal.append("metrics.jsonl", {**self.row, **more})
        leak = self.leaks.check_for_leaks(self.row["step"], rss_bytes)
        if leak is not None:
            self.journal.event("memory grows", **asdict(leak))
        self.results, self.step_seconds = [], 0.0
