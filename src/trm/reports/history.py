"""A run in bounded memory: its curves, its last rows, its events, and where its time went.

A week of training has half a million rows. Curves are thinned evenly as they grow, by averaging neighbours,
so that a report and a live view cost the same for any length of run.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from macbook_optimization.json_types import JsonMapping
from trm.runs.directory import Run
from trm.runs.rows import Row

MAX_POINTS = 2000  # of a curve
NUM_RECENT = 600  # rows that are kept as they are: ten minutes
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
    "rss_bytes",
    "available_bytes",
    "swap_bytes",
    "temperature",
    "battery_percent",
    "speed_limit_percent",
)
NAN = math.nan


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

    def forget_from(self, name: str, value: float) -> None:
        """Remove the points at the end whose column `name` is not below this value."""
        self._pending.clear()
        while len(self) and not self.columns[name][-1] < value:
            for column in self.columns.values():
                column.pop()

    def _thin(self) -> None:
        self.stride *= 2
        for name, column in self.columns.items():
            pairs = zip(column[::2], column[1::2], strict=False)
            self.columns[name] = [_mean(pair) for pair in pairs]


@dataclass
class History:
    """What is known of a run from its rows. Rows are added in the order of their files."""

    train: Curves = field(default_factory=lambda: Curves(TRAIN_COLUMNS))
    resources: Curves = field(default_factory=lambda: Curves(RESOURCE_COLUMNS))
    recent: deque[Row] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))  # of training
    recent_resources: deque[Row] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    evaluations: list[Row] = field(default_factory=list)
    events: deque[Row] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    event_counts: Counter[str] = field(default_factory=Counter)
    spent: dict[str, float] = field(default_factory=dict)  # seconds by activity, over all starts

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            kind = row.get("kind")
            if kind == "train":
                self._add_training(row)
            elif kind == "eval":
                self._add_evaluation(row)
            elif kind == "resources":
                self._add_resources(row)
            elif kind == "event":
                self.events.append(row)
                self.event_counts[str(row.get("event"))] += 1

    def _add_training(self, row: Row) -> None:
        step = number(row.get("step"))
        if not math.isfinite(step):  # a damaged row
            return
        if self.recent and not number(self.recent[-1].get("step")) < step:  # resumed from before
            self.train.forget_from("step", step)
        self.recent.append(row)
        self.train.add(row)
        spent = row.get("spent")
        if isinstance(spent, Mapping):
            for name, value in spent.items():
                if math.isfinite(number(value)):
                    self.spent[str(name)] = self.spent.get(str(name), 0.0) + number(value)

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
            self.resources.add(row)

    @property
    def step(self) -> int:
        """The last step that a row reports."""
        steps = [number(rows[-1].get("step")) for rows in (self.recent, self.evaluations) if rows]
        known = [step for step in steps if math.isfinite(step)]
        return int(max(known, default=0))


def read_history(run: Run) -> History:
    """Read what a run has recorded until now."""
    history = History()
    follower = run.follow()
    while rows := follower.read():
        history.add(rows)
    return history


def number(value: object) -> float:
    """Return a number that a file claims, or NaN."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else NAN


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else NAN
