"""The records and the output of a run: metric rows, events, files and messages.

Nothing here may stop training. Rows that a full disk refuses wait in memory until there is room.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import numpy as np
import psutil

from macbook_optimization.errors import RunError
from macbook_optimization.json_types import JsonMapping
from trm.backends.base import StepResult
from trm.config import PhaseConfig, RunConfig
from trm.display import Display
from trm.plan import Plan
from trm.runs.directory import EVENTS, METRICS, Run
from trm.runs.events import Event, MemoryGrows, PhaseBegan, PlanChosen, StageChanged
from trm.runs.rows import EvalRow, TrainRow
from trm.training.leaks import LeakWatch
from trm.training.state import Stage

ROW_SECONDS = 1.0  # of training per row
FIRST_ROW_STEPS = 50  # at most: the loss before anything is learned is what diagnoses compare with


@dataclass
class RunLog:
    """Writes a run's metrics and events, and shows messages and progress."""

    run: Run
    display: Display
    writes: bool = True  # False on a machine that has no run directory: it only shows messages
    spent: dict[str, float] = field(default_factory=dict)  # seconds by activity, since the last row
    waited_for: dict[str, float] = field(default_factory=dict)  # likewise, seconds by machine
    _waiting: deque[tuple[str, JsonMapping]] = field(default_factory=lambda: deque(maxlen=10_000))
    _warned: bool = False

    def message(self, text: str) -> None:
        self.display.message(text)

    @contextmanager
    def timed(self, activity: str) -> Iterator[None]:
        """Count the time inside as spent on this activity, except for what is counted as another one."""
        started = time.monotonic() - sum(self.spent.values())
        try:
            yield
        finally:
            self.count({activity: time.monotonic() - sum(self.spent.values()) - started})

    def count(self, seconds: Mapping[str, float]) -> None:
        """Add seconds that were spent on activities."""
        for activity, more in seconds.items():
            self.spent[activity] = self.spent.get(activity, 0.0) + more

    def count_waiting(self, machine: str, seconds: float) -> None:
        """Add seconds in which all other machines waited for this one."""
        self.waited_for[machine] = self.waited_for.get(machine, 0.0) + seconds

    def event(self, event: Event) -> None:
        self._append(EVENTS, event.to_row())

    def row(self, row: TrainRow | EvalRow) -> None:
        self._append(METRICS, row.to_json())

    def plan(self, plan: Plan) -> None:
        """Record the plan: the file has the newest one, the events have the history."""
        self.write("plan.json", json.dumps(plan.to_json(), indent=2))
        self.event(PlanChosen(plan.to_json()))

    def write(self, name: str, text: str) -> None:
        if not self.writes:
            return
        try:
            self.run.write(name, text)
        except RunError as error:
            self._warn(error)

    def _append(self, name: str, row: JsonMapping) -> None:
        if not self.writes:
            return
        self._waiting.append((name, row))
        try:
            while self._waiting:
                self.run.append(*self._waiting[0])
                self._waiting.popleft()
            self._warned = False
        except RunError as error:
            self._warn(error)

    def _warn(self, error: RunError) -> None:
        if not self._warned:
            self.message(f"warning: {error}. Training continues.")
        self._warned = True


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The circumstances of a step. Evaluations and saves do not count against the throughput."""

    step: int
    step_seconds: float  # of this step
    total_seconds: float  # of training so far
    learning_rate: float
    micro_batch_size: int
    cycles: int  # recursions
    phase: PhaseConfig | None = None
    max_length: int | None = None


class StepMetrics:
    """Averages over the steps since the last row, written about once per second, at first after fewer steps.

    `stage` and `phase` are those at which the run begins or resumes; only changes of them are reported.
    `driver_bytes` reads what the driver of a GPU holds.
    """

    def __init__(
        self,
        log: RunLog,
        stage: Stage | None = None,
        phase: PhaseConfig | None = None,
        leaks: LeakWatch | None = None,
        driver_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self.log = log
        self.stage = stage
        self.phase = phase
        self.driver_bytes = driver_bytes
        self.process = psutil.Process()
        self.process.cpu_percent()  # the first call only starts the measurement
        self.leaks = leaks or LeakWatch()
        self.results: list[StepResult] = []
        self.by_cycles: dict[int, tuple[int, float]] = {}  # steps and their seconds
        self.timing: StepTiming | None = None
        self.step_seconds = 0.0
        self.loss = 0.0
        self.samples_per_second = 0.0

    def add(self, result: StepResult, timing: StepTiming, stage: Stage | None = None) -> None:
        self._report_phase(timing)
        self.results.append(result)
        self.timing = timing
        self.step_seconds += timing.step_seconds
        steps, seconds = self.by_cycles.get(timing.cycles, (0, 0.0))
        self.by_cycles[timing.cycles] = (steps + 1, seconds + timing.step_seconds)
        self.log.count(result.seconds)
        self.loss = float(np.mean([each.loss for each in self.results]))
        self.samples_per_second = sum(len(each.exact) for each in self.results) / self.step_seconds
        if stage is not None and stage != self.stage:
            self.log.event(StageChanged(timing.step, stage.number, stage.share))
            self.log.message(f"{stage.described()} from step {timing.step + 1} on.")
        self.stage = stage
        leak = self.leaks.after_step(timing.step)
        if leak is not None:
            self.log.event(MemoryGrows(asdict(leak)))
        if self.step_seconds >= ROW_SECONDS or timing.step == FIRST_ROW_STEPS:
            self.write()

    def _report_phase(self, timing: StepTiming) -> None:
        phase = timing.phase
        if phase is not None and phase != self.phase:
            self.log.event(PhaseBegan(timing.step, phase.name, phase.learning_rate_factor))
            share = f"{phase.learning_rate_factor:.0%} of the learning rate"
            self.log.message(f"Phase {phase.name} from step {timing.step} on: {share}.")
        self.phase = phase

    def speed(self) -> str:
        digits = 2 if self.samples_per_second < 10 else 0
        return f"{self.samples_per_second:.{digits}f} samples/s"

    def write(self) -> None:
        if not self.results or self.timing is None:
            return
        row = TrainRow(
            step=self.timing.step,
            seconds=self.timing.total_seconds,
            loss=self.loss,
            grad_norm=self.results[-1].grad_norm,
            samples_per_second=self.samples_per_second,
            learning_rate=self.timing.learning_rate,
            micro_batch_size=self.timing.micro_batch_size,
            train_token_accuracy=float(np.mean([each.token_accuracy for each in self.results])),
            train_exact_accuracy=float(np.mean([each.exact.mean() for each in self.results])),
            rss_bytes=self.process.memory_info().rss,
            cpu_percent=self.process.cpu_percent(),
            curriculum_stage=None if self.stage is None else self.stage.number,
            phase=None if self.timing.phase is None else self.timing.phase.name,
            max_length=self.timing.max_length,
            spent=_rounded(self.log.spent),
            waited_for=_rounded(self.log.waited_for) or None,
            by_cycles=self._by_cycles(),
            num_steps=len(self.results),
            device_bytes=self.driver_bytes() or None,
        )
        self.log.spent.clear()
        self.log.waited_for.clear()
        self.log.row(row)
        self.results = []
        self.by_cycles = {}
        self.step_seconds = 0.0

    def _by_cycles(self) -> dict[str, tuple[int, float]] | None:
        if len(self.by_cycles) < 2:
            return None
        found = sorted(self.by_cycles.items())
        return {str(cycles): (steps, round(seconds, 6)) for cycles, (steps, seconds) in found}


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in seconds.items()}


def show_plan(display: Display, config: RunConfig, plan: Plan) -> None:
    """Show what was chosen and why, and how long training will take."""
    display.message("Plan: " + "\n      ".join(plan.explain()))
    if plan.samples_per_second is not None:
        seconds = config.training.effective_batch_size / plan.samples_per_second
        steps = config.training.last_step
        whole = "the one step" if steps == 1 else f"all {steps:,} steps"
        load = plan.other_cpu_percent
        meanwhile = "" if load is None else f" (measured while other programs used {load:.0f} % of the CPU)"
        display.message(
            f"A step takes about {_duration(seconds)}{meanwhile}; {whole} would take "
            f"{_duration(seconds * steps)}, evaluations excluded."
        )


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds * 1000:.0f} ms"
