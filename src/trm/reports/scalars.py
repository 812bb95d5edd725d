"""The numbers of a run by tag, such as `train/loss`, for programs that log and show experiments.

Training and evaluation rows are at their steps. Samples of the machine are at the seconds since the first
one, because many of them fall into one step of a slow run. Of steps that were lost and repeated, the last
rows count.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from macbook_optimization.terminal_text import one_line
from trm.reports.event_text import describe_event
from trm.runs.directory import EVENTS, METRICS, RESOURCES, Run
from trm.runs.lost_rows import Place, repetition
from trm.runs.reading import Follower
from trm.runs.rows import Row, number

_NOT_SCALARS = ("kind", "time", "step", "seconds", "cpu_percent")  # of rows; CPU has one value per core
_MAX_STEP = 2.0**62


@dataclass(frozen=True, slots=True)
class Point:
    """The values that were recorded at one time, by tag."""

    time: float  # seconds since the epoch
    step: int
    scalars: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Text:
    time: float
    step: int
    tag: str
    text: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run as points. Of very many rows, they are a sample."""

    rows: list[Point]  # of training and evaluations, in the order in which they were written
    samples: list[Point]  # of the machine; a step is a second
    events: list[Text]


def read_recorded(run: Run) -> Recorded:
    """Read the numbers and events of a run; raise `OSError` if a file cannot be read."""
    rows = _Rows()
    for row in Follower((run.path / METRICS,)).skim():
        rows.add(row)
    samples = _Samples()
    for row in Follower((run.path / RESOURCES,)).skim():
        samples.add(row)
    events = [row for row in Follower((run.path / EVENTS,)).skim() if row["kind"] == "event"]
    base = _base_time(run, events, rows)
    points = [Point(each.time(base), each.step, each.scalars) for each in rows.entries]
    steps = _StepTimes(points)
    return Recorded(points, samples.points, [_text(event, steps, base) for event in events])


def _base_time(run: Run, events: list[Row], rows: _Rows) -> float:
    """Return when training began, for rows of earlier versions, which have seconds but no time."""
    times = [time for event in events if math.isfinite(time := number(event.get("time")))]
    if times:
        return min(times)
    try:
        modified = os.stat(run.path / METRICS).st_mtime
    except FileNotFoundError:
        return 0.0
    return modified - max((each.seconds for each in rows.entries), default=0.0)


@dataclass(slots=True)
class _Entry:
    """A row of training or of an evaluation."""

    kind: str
    step: int
    wall_time: float  # NaN if the row has none
    seconds: float
    scalars: dict[str, float]

    @property
    def place(self) -> Place:
        return Place(self.step, self.seconds)

    def time(self, base: float) -> float:
        return self.wall_time if math.isfinite(self.wall_time) else base + self.seconds


@dataclass
class _Rows:
    entries: list[_Entry] = field(default_factory=list)
    _last_trained: Place | None = None
    _last_evaluated: float = -1.0  # step

    def add(self, row: Row) -> None:
        kind = row["kind"]
        step = number(row.get("step"))
        if kind not in ("train", "eval") or not 0 <= step < _MAX_STEP:
            return
        if kind == "train":
            self._forget_lost(row)
        elif step <= self._last_evaluated:  # repeated after a crash
            self.entries = [each for each in self.entries if each.kind != kind or each.step < step]
        if kind == "eval":
            self._last_evaluated = step
        seconds = number(row.get("seconds"))
        self.entries.append(
            _Entry(
                kind=kind,
                step=int(step),
                wall_time=number(row.get("time")),
                seconds=seconds if math.isfinite(seconds) else 0.0,
                scalars=_scalars(kind, row),
            )
        )

    def _forget_lost(self, row: Row) -> None:
        """Remove the training rows that a crash has lost."""
        repeats = None if self._last_trained is None else repetition(self._last_trained, row)
        if repeats is not None:
            self.entries = [
                each for each in self.entries if each.kind != "train" or not repeats.covers(each.place)
            ]
        self._last_trained = Place.of(row)


class _StepTimes:
    """The steps of a run by the time when they were recorded."""

    def __init__(self, points: list[Point]) -> None:
        known = sorted((each.time, each.step) for each in points)
        self.times = [time for time, _ in known]
        self.steps = [step for _, step in known]

    def at(self, time: float) -> int:
        place = bisect_right(self.times, time)
        return self.steps[place - 1] if place else 0


def _scalars(kind: str, row: Row) -> dict[str, float]:
    """Return the numbers of a row by tag. NaN and Inf stay: they are results, too."""
    found = {f"{kind}/{name}": number(row[name]) for name in row if _is_scalar(name, row[name])}
    if kind == "train" and "cpu_percent" in row:
        found["train/cpu_percent"] = number(row["cpu_percent"])
    spent = row.get("spent")
    if isinstance(spent, Mapping):
        found.update({f"seconds/{name}": number(value) for name, value in spent.items()})
    return found


def _is_scalar(name: str, value: object) -> bool:
    return name not in _NOT_SCALARS and isinstance(value, int | float) and not isinstance(value, bool)


@dataclass
class _Samples:
    points: list[Point] = field(default_factory=list)
    _first: float = math.nan
    _last: float = -math.inf

    def add(self, row: Row) -> None:
        time = number(row.get("time"))
        if row["kind"] != "resources" or not self._last < time < _MAX_STEP:
            return
        self._last = time
        if math.isnan(self._first):
            self._first = time
        scalars = _scalars("resources", row)
        cores = row.get("cpu_percent")
        if isinstance(cores, list) and cores:
            mean = sum(number(core) for core in cores) / len(cores)
            scalars["resources/machine_cpu_percent"] = mean
        self.points.append(Point(time, round(time - self._first), scalars))


def _text(event: Row, steps: _StepTimes, base: float) -> Text:
    time = number(event.get("time"))
    time = time if math.isfinite(time) else base
    step = number(event.get("step"))
    place = int(step) if 0 <= step < _MAX_STEP else steps.at(time)
    return Text(time, place, f"events/{event.get('event')}", one_line(describe_event(event)))
