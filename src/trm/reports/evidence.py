"""The recent past of a run, prepared for its diagnoses.

Training rows become samples that belong to a regime: a part of training with one plan and one stage of every
schedule. Speed and loss are compared within a regime only, because the recipe changes them between two.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from trm.config import RunConfig
from trm.plan import Plan
from trm.reports.history import NUM_RECENT, History
from trm.reports.samples import Load, Regime, Sample, last_rows, sample_of, summarise
from trm.reports.thresholds import Thresholds
from trm.runs import events
from trm.runs.rows import MAX_RATE, Row, number
from trm.runs.skimming import NUM_FIRST_ROWS
from trm.schedule import value_at

MAX_STEP = 2**53  # a larger one is damage
MAX_STEPS_PER_ROW = 100_000  # likewise
MAX_FIRST_STEPS = 100  # in the first row, or its loss is that of a model that has learned already
# Events after which a step may take another time, or the loss may be another one.
CHANGES = (
    *events.STARTS,
    events.PlanChosen.name,
    events.BatchShrunk.name,
    events.BatchGrown.name,
    events.ThreadsChanged.name,
    events.RowLengthChanged.name,
    events.DataMapped.name,
    events.RolledBack.name,
)
# The newest of these says how many threads compute; a plan and a start begin with those of the plan.
_DECIDES_THREADS = (*events.STARTS, events.PlanChosen.name, events.ThreadsChanged.name)


@dataclass
class Evidence:
    """The facts that are known of a run now. Rows before `since` (seconds since the epoch) are ignored."""

    config: RunConfig
    thresholds: Thresholds = field(default_factory=Thresholds)
    since: float = -math.inf
    metric: str | None = None  # name of the primary metric, where it is known
    history: History = field(default_factory=History)
    plan: Plan | None = None
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    baseline: list[Sample] = field(default_factory=list)  # the first ones of the regime
    _row: Row | None = None  # the newest of training
    _resource_row: Row | None = None
    _num_events: int = 0
    _changes: list[float] = field(default_factory=list)  # times
    _starts: list[float] = field(default_factory=list)
    _threads_changed: Row = field(default_factory=dict)  # the newest event that decides them
    _recent: dict[float, list[Sample] | None] = field(default_factory=dict)  # by seconds, of this update
    _loads: dict[float, Load | None] = field(default_factory=dict)  # likewise

    def update(self, history: History) -> bool:
        """Add the new rows of a history; return whether there are any."""
        self.history = history
        self._recent.clear()
        self._loads.clear()
        has_events = self._read_events()
        rows = _newer(history.recent, self._row)
        for row in rows:
            self._add(row)
            self._row = row
        newest = history.recent_resources[-1] if history.recent_resources else None
        has_news = has_events or bool(rows) or newest is not self._resource_row
        self._resource_row = newest
        return has_news

    def _read_events(self) -> bool:
        total = sum(self.history.event_counts.values())
        if total == self._num_events:
            return False
        self._num_events = total
        changes = [event for event in self.history.events if event.get("event") in CHANGES]
        self._changes = [number(event.get("time")) for event in changes]
        self._starts = [number(event.get("time")) for event in changes if event["event"] in events.STARTS]
        plans = [event for event in changes if event["event"] == events.PlanChosen.name]
        if plans:
            self.plan = _plan_of(plans[-1]) or self.plan
        self._threads_changed = next(
            (event for event in reversed(changes) if event["event"] in _DECIDES_THREADS), {}
        )
        return True

    def _add(self, row: Row) -> None:
        """Add a sample, unless the first step of the row is unknown, as in the first row of a start."""
        before = self._row
        time = number(row.get("time"))
        has_rate = 0 < number(row.get("samples_per_second")) < MAX_RATE
        if before is None or not (time > self.since and has_rate):
            return
        first_step = number(before.get("step")) + 1
        is_same_start = bisect(self._starts, time) == bisect(self._starts, number(before.get("time")))
        last_step = first_step + MAX_STEPS_PER_ROW
        if not (is_same_start and 1 <= first_step <= number(row.get("step")) < last_step < MAX_STEP):
            return
        sample = sample_of(row, int(first_step), self._regime(row), self.config)
        self.samples.append(sample)
        self._extend_baseline(sample)

    def _regime(self, row: Row) -> Regime:
        training = self.config.training
        step = int(number(row.get("step")))
        names = ("micro_batch_size", "max_length", "curriculum_stage", "phase")
        return (
            bisect(self._changes, number(row.get("time"))),
            value_at(training.depths, step),
            value_at(training.hints, step),
            *(row.get(name) for name in names),
        )

    def _extend_baseline(self, sample: Sample) -> None:
        if self.baseline and self.baseline[0].regime != sample.regime:
            self.baseline = []
        if not self.has_baseline:
            self.baseline.append(sample)

    @property
    def has_baseline(self) -> bool:
        limits = self.thresholds
        return last_rows(self.baseline, limits.slow_seconds, limits.min_rows) is not None

    @property
    def step(self) -> int:
        return self.samples[-1].step if self.samples else self.history.step

    @property
    def began(self) -> float:
        """The time of the first row of the run; NaN if it does not say."""
        first = self.history.first
        return number(first[0].get("time")) if first else math.nan

    @property
    def now(self) -> float:
        """The time of the newest row."""
        newest = [row for row in (self._row, self._resource_row) if row is not None]
        times = [number(row.get("time")) for row in newest]
        return max((time for time in times if math.isfinite(time)), default=-math.inf)

    @property
    def threads(self) -> int:
        """The number of cores that training needs: those of its plan."""
        return 1 if self.plan is None else self.plan.execution.threads

    @property
    def threads_in_use(self) -> int:
        """The number of threads that compute now: fewer than planned while other programs use the cores."""
        given = number(self._threads_changed.get("after"))
        return int(given) if 1 <= given < self.threads else self.threads

    @property
    def initial_loss(self) -> float | None:
        """The loss of the first rows; None if they are averages over many steps."""
        first = self.history.first
        if len(first) < NUM_FIRST_ROWS or not number(first[0].get("step")) <= MAX_FIRST_STEPS:
            return None
        initial = max(number(row.get("loss")) for row in first)
        return initial if 0 < initial < math.inf else None

    def recent_samples(self, seconds: float) -> list[Sample] | None:
        """Return the samples of the last seconds; None while there are too few of them."""
        if seconds not in self._recent:
            self._recent[seconds] = last_rows(self.samples, seconds, self.thresholds.min_rows)
        return self._recent[seconds]

    def comparable_samples(self, seconds: float) -> list[Sample] | None:
        """Return the samples of the last seconds if they follow the baseline of the same regime."""
        recent = self.recent_samples(seconds)
        if recent is None or not self.has_baseline:
            return None
        is_same = recent[0].regime == self.baseline[0].regime
        return recent if is_same and recent[0].time > self.baseline[-1].time else None

    @property
    def baseline_rate(self) -> float:
        return median(sample.rate for sample in self.baseline)

    @property
    def slowdown(self) -> float | None:
        """Return how many times as long steps take as at first; None if these cannot be compared.

        A state of the machine is reported once it lasted for half of the time that is looked at.
        """
        recent = self.comparable_samples(self.thresholds.machine_seconds / 2)
        return None if recent is None else self.baseline_rate / median(sample.rate for sample in recent)

    def recent_resources(self, seconds: float) -> list[Row] | None:
        """Return the resource rows of the last seconds; None while there are too few of them."""
        begin = max([self.since, *self._starts[-1:]])
        rows = [row for row in self.history.recent_resources if row["time"] > begin]
        return last_rows(rows, seconds, self.thresholds.min_rows)

    def load(self, seconds: float) -> Load | None:
        """Return the load in the last seconds; None if it was recorded for less time."""
        if seconds not in self._loads:
            rows = self.recent_resources(seconds)
            self._loads[seconds] = None if rows is None else summarise(rows)
        return self._loads[seconds]

    def recent_events(self, name: str) -> list[Row]:
        """Return the events of this name in this start of the trainer, as far back as the samples go."""
        is_full = len(self.samples) == self.samples.maxlen
        begin = self.samples[0].time if is_full else -math.inf
        return [each for each in self.events_since_start(name) if number(each.get("time")) >= begin]

    def events_since_start(self, *names: str) -> list[Row]:
        """Return the events of these names since the trainer was started last."""
        begin = max([self.since, *self._starts[-1:]])
        named = (event for event in self.history.events if event.get("event") in names)
        return [event for event in named if number(event.get("time")) >= begin]


def _newer(rows: Sequence[Row] | deque[Row], known: Row | None) -> list[Row]:
    """Return the rows that follow a known one: all of them if it is not among them any more."""
    new = []
    for row in reversed(rows):
        if row is known:
            break
        new.append(row)
    return new[::-1]


def _plan_of(event: Row) -> Plan | None:
    try:
        return Plan.from_json(event)
    except (TypeError, ValueError, AttributeError):  # damaged, or of a newer version
        return None
