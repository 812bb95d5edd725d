"""The process that waits for the trainer: it samples, draws the live view, diagnoses and writes the report.

It reads the run's files as any other process could, so nothing here can slow or break a training step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np

from macbook_optimization.background_monitor import BackgroundMonitor
from macbook_optimization.children import ChildDied, run_in_child
from macbook_optimization.errors import LaptopError, RunError
from macbook_optimization.file_errors import hint_for, reason_of
from trm.config import RunConfig
from trm.display import Display
from trm.reports.diagnosis import Watchdog
from trm.reports.sampling import SampleFile, Sampler
from trm.reports.view import RunView
from trm.runs.directory import Run
from trm.runs.events import Advised
from trm.runs.metric import stored_metric
from trm.tasks.metrics import EXACT
from trm.tasks.registry import TASK_NAMES, load_task
from trm.training.loop import Limits, Outcome
from trm.training.preparation import Job
from trm.training.supervisor import supervise

INTERVAL_SECONDS = 1.0
DIAGNOSIS_SAMPLES = 5  # between two diagnoses
EXAMPLES_AFTER_SECONDS = 60.0  # of training: drawing answers takes several seconds
REPORT_TIMEOUT_SECONDS = 120.0


class RunMonitor(BackgroundMonitor):
    """Samples the machine and reads the run once per second, and shows it on a display.

    What the system refuses, for example because too many files are open, costs the samples of that time.
    """

    MAX_FAILURES = 10  # in a row, after which it is said

    def __init__(self, run: Run, config: RunConfig, display: Display) -> None:
        super().__init__()
        self.view = view_of(run, config)
        self.display = display
        self.sampler = Sampler()
        self.file = SampleFile(run)
        self.watchdog = Watchdog(run, config)
        self._samples_taken = 0
        self._lock = threading.Lock()  # the display formats in its own thread
        self._formatted: tuple[tuple[int, bool], list[str]] | None = None

    def trainer_started(self, pid: int) -> None:
        self.sampler.watch(pid)

    def begin(self) -> None:
        self.sampler.begin()

    def sample(self) -> None:
        """Take a sample, read and diagnose: each of them even if another one fails."""
        parts = [self._take_sample, self._read]
        self._samples_taken += 1
        if self._samples_taken % DIAGNOSIS_SAMPLES == 0:
            parts.append(self._diagnose)
        errors = []
        for part in parts:
            try:
                part()
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def failed(self, error: OSError, times: int) -> None:
        if times == self.MAX_FAILURES:
            self.display.message(
                f"Monitoring fails ({reason_of(error)}): samples or suggestions may be missing. "
                f"Training continues. {hint_for(error, '')}".rstrip()
            )

    def _take_sample(self) -> None:
        self.file.append(self.sampler.sample())

    def _read(self) -> None:
        with self._lock:
            self.view.read()
            self._formatted = None

    def _diagnose(self) -> None:
        """Record and show each problem once, in one line."""
        for found in self.watchdog.update(self.view.history):
            with suppress(RunError):  # a full disk
                advice = Advised(found.step, found.kind, found.evidence, found.advice, found.gain)
                self.view.run.record(advice)
            self.display.message(found.in_words())

    def lines(self, columns: int, *, ascii_only: bool) -> list[str]:
        """Return the view; it is formatted again only after it was brought up to date."""
        how = (columns, ascii_only)
        with self._lock:
            if self._formatted is None or self._formatted[0] != how:
                self._formatted = (how, self.view.lines(columns, ascii_only=ascii_only))
            return self._formatted[1]

    def summary(self) -> str:
        with self._lock:
            return self.view.summary()


def train_monitored(job: Job, limits: Limits, lock: int | None = None) -> Outcome:
    """Train to the end under supervision, and monitor the run meanwhile."""
    with _monitored(job) as watched:
        outcome = supervise(watched, limits, lock)
    if job.config.plan.report and outcome.reason != "interrupted":
        _write_report(job, outcome)
    return outcome


def _write_report(job: Job, outcome: Outcome) -> None:
    """Write the report in a child process: whatever happens to it, training has ended well."""
    display = job.planner.display
    display.status("Writing the report")
    arguments = {"run": str(job.run.path), "with_examples": outcome.seconds >= EXAMPLES_AFTER_SECONDS}
    problem: object = "interrupted"
    try:
        run_in_child("trm.reports.report:write_in_child", arguments, timeout_seconds=REPORT_TIMEOUT_SECONDS)
        return
    except (ChildDied, LaptopError) as error:
        problem = error
    except KeyboardInterrupt:
        pass
    display.message(f"The report was not written ({problem}); `trm report {job.run.path}` writes it.")


@contextmanager
def _monitored(job: Job) -> Iterator[Job]:
    display = job.planner.display
    monitor = RunMonitor(job.run, job.config, display)
    monitor.start_monitoring(INTERVAL_SECONDS)
    display.panel(monitor, "training")
    try:
        yield replace(job, on_start=monitor.trainer_started)
    finally:
        display.panel(None)
        monitor.stop_monitoring()


def view_of(run: Run, config: RunConfig) -> RunView:
    return RunView(run, config, _primary_metric(run, config), _num_examples(config), plan=run.plan)


def _primary_metric(run: Run, config: RunConfig) -> str:
    """Return the metric by which checkpoints are compared. A user's own task is not imported to find out."""
    stored = stored_metric(run.checkpoints().best() or {})
    return stored or (load_task(config.task).primary_metric if config.task in TASK_NAMES else EXACT)


def _num_examples(config: RunConfig) -> int | None:
    """Return how many examples an evaluation takes, if the dataset is here."""
    total = None
    with suppress(OSError, ValueError):
        labels = np.load(config.data.path / "test" / "all__labels.npy", mmap_mode="r", allow_pickle=False)
        total = len(labels)
    limits = [number for number in (total, config.evaluation.examples) if number is not None]
    return min(limits, default=None)
