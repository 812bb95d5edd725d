"""A run in bounded memory: its curves, its last rows, its events, and where its time went.

A week of training has half a million rows. Curves are thinned evenly as they grow, by averaging neighbours,
so that a report and a live view cost the same for any length of run.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from macbook_optimization.json_types import JsonMapping
from macbook_optimization.macos_readers import THERMAL_LEVELS
from trm.runs.directory import Run
from trm.runs.lost_rows import Place, Repetition, repetition, seconds_of
from trm.runs.rows import NAN, Row, memory_of, number
from trm.runs.skimming import NUM_FIRST_ROWS
from trm.runs.state import LastRecorded

MAX_POINTS = 2000  # of a curve
NUM_RECENT = 600  # rows that are kept as they are: ten minutes
MAX_LOST = 3600  # rows that a crash may lose: an hour, where a checkpoint is written every minute
MAX_EVENTS = 2000
TRAIN_COLUMNS = (
    "step",
    "seconds",
    "time",
    "loss",
    "grad_norm",
    "samples_per_second",
    "learning_rate",
    "micro_batch_size",
    "train_token_accuracy",
    "train_exact_accuracy",
    "rss_bytes",
    "cpu_percent",
)
RESOURCE_COLUMNS = (
    "time",
    "process_cpu_percent",
    "machine_cpu_percent",  # mean of the cores
    "rss_bytes",
    "available_bytes",
    "swap_bytes",
    "temperature",
    "thermal_level",  # its place among `THERMAL_LEVELS`
    "battery_percent",
    "speed_limit_percent",
)


@dataclass
class Curves:
    """Columns of equal length. What a row does not report is NaN."""

    names: Sequence[str]
    max_points: int = MAX_POINTS
    columns: dict[str, list[float]] = field(init=False)
    stride: int = 1  # rows per point
    _pending: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.columns = {name: [] for name in self.names}

    def __len__(self) -> int:
        return len(self.columns[self.names[0]])

    def __getitem__(self, name: str) -> list[float]:
        return self.columns[name]

    def add(self, row: JsonMapping) -> None:
        self._pending.append([number(row.get(name)) for name in self.names])
        if len(self._pending) < self.stride:
            return
        for name, values in zip(self.names, zip(*self._pending, strict=True), strict=True):
            self.columns[name].append(_mean(values))
        self._pending.clear()
        if len(self) >= self.max_points:
            self._thin()

    def forget_end(self, is_lost: Callable[[Mapping[str, float]], bool]) -> None:
        """Remove the points at the end, as far as they are lost."""
        self._pending.clear()
        while len(self) and is_lost({name: column[-1] for name, column in self.columns.items()}):
            for column in self.columns.values():
                column.pop()

    def _thin(self) -> None:
        self.stride *= 2
        for name, column in self.columns.items():
            pairs = zip(column[::2], column[1::2], strict=False)
            self.columns[name] = [_mean(pair) for pair in pairs]


@dataclass
class History:
    """The facts of a run from its rows. Rows are added in the order of their files."""

    train: Curves = field(default_factory=lambda: Curves(TRAIN_COLUMNS))
    resources: Curves = field(default_factory=lambda: Curves(RESOURCE_COLUMNS))
    first: list[Row] = field(default_factory=list)  # of training; curves average theirs in a long run
    recent: deque[Row] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))  # of training
    recent_resources: deque[Row] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    evaluations: list[Row] = field(default_factory=list)
    events: deque[Row] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    event_counts: Counter[str] = field(default_factory=Counter)
    spent: dict[str, float] = field(default_factory=dict)  # seconds by activity; repeated steps count once
    waited_for: dict[str, float] = field(default_factory=dict)  # seconds by machine, with repeated steps
    repeated_seconds: float = 0.0  # of steps that a crash lost
    _counted: deque[Row] = field(default_factory=lambda: deque(maxlen=MAX_LOST))  # rows in `spent`
    thermal_levels: Counter[str] = field(default_factory=Counter)  # resource rows by level, on macOS
    peak_bytes: float = NAN  # the most memory that the trainer reported, in any start
    last: LastRecorded = field(default_factory=LastRecorded)

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            kind = row.get("kind")
            self.peak_bytes = _largest(self.peak_bytes, memory_of(row), row.get("peak_bytes"))
            if kind in ("train", "eval"):
                self.last = self.last._replace(row=row)
            if kind == "train":
                self._add_training(row)
            elif kind == "eval":
                self._add_evaluation(row)
            elif kind == "resources":
                self._add_resources(row)
            elif kind == "event":
                self.events.append(row)
                self.event_counts[str(row.get("event"))] += 1
                self.last = self.last.after_event(row)

    def _add_training(self, row: Row) -> None:
        step = number(row.get("step"))
        if not math.isfinite(step):  # a damaged row
            return
        repeats = repetition(Place.of(self.recent[-1]), row) if self.recent else None
        if repeats is not None:
            self.train.forget_end(lambda point: repeats.covers(Place(point["step"], point["seconds"])))
            self._count_as_repeated(repeats)
        if len(self.first) < NUM_FIRST_ROWS:
            self.first.append(row)
        self.recent.append(row)
        self.train.add(row)
        self._add_spent(row, sign=1)
        for machine, seconds in seconds_of(row, "waited_for").items():
            self.waited_for[machine] = self.waited_for.get(machine, 0.0) + seconds
        self._counted.append(row)

    def _count_as_repeated(self, repeats: Repetition) -> None:
        """Take back the time of rows that a crash lost."""
        while self._counted and repeats.covers(Place.of(self._counted[-1])):
            lost = self._counted.pop()
            self._add_spent(lost, sign=-1)
            self.repeated_seconds += sum(seconds_of(lost, "spent").values())

    def _add_spent(self, row: Row, *, sign: int) -> None:
        for name, value in seconds_of(row, "spent").items():
            self.spent[name] = max(0.0, self.spent.get(name, 0.0) + sign * value)

    def _add_evaluation(self, row: Row) -> None:
        step = number(row.get("step"))
        if not math.isfinite(step):
            return
        while self.evaluations and not number(self.evaluations[-1].get("step")) < step:
            self.evaluations.pop()
        self.evaluations.append(row)
        if len(self.evaluations) > 2 * MAX_POINTS:
            self.evaluations = self.evaluations[::2]

    def _add_resources(self, row: Row) -> None:
        """A file that was thinned is read again from its start, so rows that are not newer are known."""
        if self.recent_resources and not self.recent_resources[-1]["time"] < number(row.get("time")):
            return
        if math.isfinite(number(row.get("time"))):
            self.recent_resources.append(row)
            cores = row.get("cpu_percent")
            machine = _mean([number(core) for core in cores]) if isinstance(cores, list) else NAN
            level = row.get("thermal_level")
            place = THERMAL_LEVELS.index(level) if level in THERMAL_LEVELS else None
            self.resources.add({**row, "machine_cpu_percent": machine, "thermal_level": place})
            if isinstance(level, str):
                self.thermal_levels[level] += 1

    @property
    def step(self) -> int:
        """The last step that a row reports."""
        steps = [number(rows[-1].get("step")) for rows in (self.recent, self.evaluations) if rows]
        known = [step for step in steps if math.isfinite(step)]
        return int(max(known, default=0))


def read_history(run: Run) -> History:
    """Read what a run has recorded until now. Of very many training rows, a sample is read."""
    history = History()
    history.add(run.follow().skim())
    return history


def _largest(known: float, *claimed: object) -> float:
    values = [value for value in (known, *map(number, claimed)) if math.isfinite(value)]
    return max(values, default=NAN)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else NAN
