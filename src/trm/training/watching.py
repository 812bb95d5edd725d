"""What a run shows and writes down while it goes on, and its answer to memory pressure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import psutil

from macbook_optimization.errors import AllocationFailed
from macbook_optimization.memory_management import (
    MIB,
    Adjustment,
    MemoryManager,
    MemoryMonitor,
    PressureSettings,
)
from macbook_optimization.performance_reporting import MemoryLeakDetector
from trm.backends.base import StepResult
from trm.config import PlanSettings
from trm.runs import Plan, Run


class Display(Protocol):
    def update(self, what: str, done: int, total: int, facts: str = "") -> None: ...
    def message(self, text: str) -> None: ...


class SilentDisplay:
    def update(self, what: str, done: int, total: int, facts: str = "") -> None: ...
    def message(self, text: str) -> None: ...


class MemoryWatch:
    """The micro-batch of the moment: the plan's, or less while the machine has no room for it."""

    def __init__(self, settings: PlanSettings, plan: Plan, run: Run, display: Display) -> None:
        self.monitor = MemoryMonitor()
        self.memory = MemoryManager(
            batch_size=plan.micro_batch_size,
            largest=plan.micro_batch_size,
            model=plan.memory,
            budget_bytes=plan.budget_bytes,
            settings=PressureSettings(
                dynamic=settings.dynamic_batch_sizing,
                shrink_above_percent=settings.memory_pressure_threshold,
                grow_below_percent=settings.memory_pressure_threshold - 10,
            ),
        )
        self.collect_every = settings.garbage_collection_frequency
        self.run, self.display = run, display

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
        self.run.event(f"batch {what}", step=step, **asdict(adjustment))
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
            self.run.event("garbage collection returns nothing", step=step, returned_bytes=returned)


class MetricsLog:
    """Averages over the steps since the last row, and writes a row about once a second."""

    def __init__(self, run: Run, every_seconds: float = 1.0) -> None:
        self.run, self.every_seconds = run, every_seconds
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
        self.run.append("metrics.jsonl", {**self.row, **more})
        leak = self.leaks.check_for_leaks(self.row["step"], rss_bytes)
        if leak is not None:
            self.run.event("memory grows", **asdict(leak))
        self.results, self.step_seconds = [], 0.0
