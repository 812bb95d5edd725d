"""The charts of a report: series, limits, and the events of the run as marks.

Learning is drawn against steps, the machine against the time during which the run was running: a run that was
stopped for a night has no gap of a night.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from macbook_optimization.macos_readers import THERMAL_LEVELS
from macbook_optimization.terminal_text import one_line
from macbook_optimization.units import GIB
from trm.arrays import FloatArray
from trm.reports.event_groups import MARK_GROUPS, MarkGroup, group_of
from trm.reports.event_text import describe_event
from trm.reports.history import History
from trm.runs.events import STARTS
from trm.runs.metric import metric_label
from trm.runs.rows import Row, number

MAX_CHART_POINTS = 400
MAX_MARKS = 40  # of a group, in a chart
_MIN_TO_SMOOTH = 60  # points
_SMOOTHING = 25  # windows per curve
_LOG_RATIO = 50.0  # of the largest to the smallest value, from which the axis is logarithmic
_LARGEST = 1e30  # value that is drawn
_MIN_GAP_SECONDS = 120.0
_GAP_SPACINGS = 10.0  # a gap is this many times the usual distance of rows
_GAP_AT_START = 3.0  # likewise, where a start is known to have ended it; rows come once per second at most

Style = Literal["line", "points", "steps", "raw"]  # raw: the values of which the next series is an average


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    x: list[float]
    y: list[float]
    style: Style = "line"


@dataclass(frozen=True, slots=True)
class Limit:
    """A horizontal line."""

    name: str
    y: float


@dataclass(frozen=True, slots=True)
class Mark:
    """An event: a vertical line."""

    x: float
    group: MarkGroup
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    key: str  # unique in a report
    title: str
    x_label: str
    series: list[Series]
    limits: list[Limit] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    in_percent: bool = False  # values are shares of 1
    logarithmic: bool = False
    levels: tuple[str, ...] = ()  # names of the values 0, 1, 2, ...


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales with which the values of a run are compared."""

    primary_metric: str
    budget_bytes: float | None = None
    num_cores: int | None = None


def make_charts(history: History, scales: Scales) -> list[Chart]:
    """Return the charts for which the run has values."""
    steps = _StepMarks(history)
    clock = Clock(history)
    charts = [*_learning_charts(history, scales, steps.marks()), *_machine_charts(history, scales, clock)]
    return [chart for chart in charts if chart.series]


class _StepMarks:
    """Events at their steps. An event without a step is placed by its time."""

    def __init__(self, history: History) -> None:
        self.events = history.events
        known = [
            pair for pair in zip(history.train["time"], history.train["step"], strict=True) if _finite(pair)
        ]
        self.times = np.array([time for time, _ in known])
        self.steps = np.array([step for _, step in known])

    def marks(self) -> list[Mark]:
        return thin_marks([mark for event in self.events if (mark := self._mark(event)) is not None])

    def _mark(self, event: Row) -> Mark | None:
        step = number(event.get("step"))
        if not math.isfinite(step):
            step = self.step_at(number(event.get("time")))
        return _mark_at(step, event)

    def step_at(self, time: float) -> float:
        if not len(self.times) or not math.isfinite(time):
            return math.nan
        return float(np.interp(time, self.times, self.steps))


def _mark_at(x: float, event: Row) -> Mark | None:
    if not math.isfinite(x):
        return None
    return Mark(x, group_of(event), one_line(describe_event(event)))


def thin_marks(marks: Sequence[Mark]) -> list[Mark]:
    """Return at most `MAX_MARKS` of each group, evenly spread."""
    kept: list[Mark] = []
    for group in MARK_GROUPS:
        of_group = [mark for mark in marks if mark.group == group]
        stride = math.ceil(len(of_group) / MAX_MARKS) or 1
        kept += of_group[::stride]
    return kept


class Clock:
    """Maps time to seconds during which the run was running, without the gaps between its starts."""

    def __init__(self, history: History) -> None:
        times = sorted(
            time for time in (*history.resources["time"], *history.train["time"]) if math.isfinite(time)
        )
        self.times: FloatArray = np.array(times, dtype=np.float64)
        self.elapsed: FloatArray = np.zeros(len(times))
        if len(times) > 1:
            spaces = np.diff(self.times)
            usual = float(np.median(spaces))
            longest = max(_MIN_GAP_SECONDS, _GAP_SPACINGS * usual)
            is_gap = spaces > longest
            is_gap[self._gaps_before_starts(history, spaces, _GAP_AT_START * max(1.0, usual))] = True
            self.elapsed[1:] = np.cumsum(np.where(is_gap, 0.0, spaces))

    def _gaps_before_starts(self, history: History, spaces: FloatArray, shortest: float) -> list[int]:
        """Return the widest space between each start and the last training row before it, where it is wide.

        The start itself is recorded seconds after its first sample of the machine: PyTorch is loaded first.
        """
        trained = np.array([time for time in history.train["time"] if math.isfinite(time)])
        starts = (number(event.get("time")) for event in history.events if event.get("event") in STARTS)
        found = []
        for start in filter(math.isfinite, starts):
            before = trained[trained <= start]
            begin = int(np.searchsorted(self.times, before[-1])) if len(before) else 0
            end = int(np.searchsorted(self.times, start))
            window = spaces[begin:end]
            if len(window) and window.max() > shortest:
                found.append(begin + int(window.argmax()))
        return found

    @property
    def total(self) -> float:
        return float(self.elapsed[-1]) if len(self.elapsed) else 0.0

    def at(self, times: Iterable[float]) -> FloatArray:
        wanted = np.array(list(times), dtype=np.float64)
        if not len(self.times):
            return np.full(len(wanted), math.nan)
        return np.asarray(np.interp(wanted, self.times, self.elapsed), dtype=np.float64)


def _learning_charts(history: History, scales: Scales, marks: list[Mark]) -> list[Chart]:
    train = history.train
    loss = _smoothed("loss", train["step"], train["loss"])
    norm = _smoothed("gradient norm", train["step"], train["grad_norm"])
    rate = _series("learning rate", train["step"], train["learning_rate"])
    speed = _smoothed("samples/s", train["step"], train["samples_per_second"])
    metric = _metric_series(history, scales.primary_metric)
    return [
        Chart("loss", "Loss", "step", loss, marks=marks, logarithmic=_is_wide(loss)),
        Chart("metric", metric_label(scales.primary_metric).capitalize(), "step", metric, marks=marks,
              in_percent=_are_shares(metric)),
        Chart("speed", "Throughput (samples/s)", "step", speed, marks=marks),
        Chart("gradient", "Gradient norm", "step", norm, marks=marks, logarithmic=_is_wide(norm)),
        Chart("rate", "Learning rate", "step", rate, marks=marks),
    ]  # fmt: skip


def _metric_series(history: History, name: str) -> list[Series]:
    steps = [number(row.get("step")) for row in history.evaluations]
    values = [number(row.get(name)) for row in history.evaluations]
    tested = _series("unseen examples", steps, values, "points")
    if not tested:
        return []
    train = history.train
    if not name.endswith("accuracy"):
        return tested
    trained = _smoothed("training batches", train["step"], train["train_exact_accuracy"])
    return [*tested, *trained[-1:]]


def _machine_charts(history: History, scales: Scales, clock: Clock) -> list[Chart]:
    """Draw the samples of the machine; of a run without them, what its training rows say."""
    resources = history.resources
    train = history.train
    if len(resources):
        seconds = clock.at(resources["time"])
        memory = resources["rss_bytes"]
        cpu = resources["process_cpu_percent"]
    else:
        has_times = bool(len(clock.times))
        seconds = clock.at(train["time"]) if has_times else np.array(train["seconds"], dtype=np.float64)
        memory = train["rss_bytes"]
        cpu = train["cpu_percent"]
    label, unit = _time_unit(max((each for each in seconds.tolist() if math.isfinite(each)), default=0.0))
    x = (seconds / unit).tolist()
    marks = _time_marks(history, clock, unit)
    resident = _series("trainer", x, [value / GIB for value in memory])
    peak = max((max(series.y) for series in resident), default=0.0)
    return [
        Chart("memory", _memory_title(scales), label, resident, _memory_limits(scales, peak), marks),
        Chart("cpu", _cpu_title(scales), label, _cpu_series(history, scales, x, cpu), [], marks),
        _heat(history, label, x, marks),
        Chart("clock", "Clock limit (%)", label, _of_resources(history, x, "speed_limit_percent"), [], marks),
        Chart("battery", "Battery (%)", label, _of_resources(history, x, "battery_percent"), [], marks),
        Chart("swap", "Swap in use (GiB)", label, _swap(history, x), [], marks),
    ]  # fmt: skip


def _heat(history: History, label: str, x: Sequence[float], marks: list[Mark]) -> Chart:
    """Draw degrees or, where only levels are reported, as on a Mac, those; of several samples, their mean."""
    temperature = _of_resources(history, x, "temperature")
    if temperature or not len(history.resources):
        return Chart("heat", "Temperature (°C)", label, temperature, [], marks)
    levels = _series("thermal level", x, history.resources["thermal_level"], "steps")
    title = f"Thermal level (0 {THERMAL_LEVELS[0]} to {len(THERMAL_LEVELS) - 1} {THERMAL_LEVELS[-1]})"
    return Chart("heat", title, label, levels, [], marks, levels=THERMAL_LEVELS)


def _of_resources(history: History, x: Sequence[float], name: str) -> list[Series]:
    return _series(name.replace("_", " "), x, history.resources[name]) if len(history.resources) else []


def _swap(history: History, x: Sequence[float]) -> list[Series]:
    """Return nothing where no memory was swapped."""
    used = [value / GIB for value in history.resources["swap_bytes"]]
    has_changed = any(value > 0 for value in used)
    return _series("swap", x, used) if has_changed else []


def _memory_title(scales: Scales) -> str:
    budget = "" if scales.budget_bytes is None else f", of a budget of {scales.budget_bytes / GIB:.1f}"
    return f"Memory (GiB{budget})"


def _memory_limits(scales: Scales, peak_gib: float) -> list[Limit]:
    """Return the budget; far above the curve, it would flatten it."""
    if scales.budget_bytes is None:
        return []
    budget = scales.budget_bytes / GIB
    return [Limit("budget", budget)] if budget <= 4 * peak_gib else []


def _cpu_title(scales: Scales) -> str:
    return "CPU (% of one core)" if scales.num_cores is None else f"CPU (% of all {scales.num_cores} cores)"


def _cpu_series(history: History, scales: Scales, x: Sequence[float], cpu: Sequence[float]) -> list[Series]:
    cores = scales.num_cores or 1
    own = _smoothed("trainer", x, [value / cores for value in cpu])
    if not len(history.resources) or scales.num_cores is None:
        return own
    return [*own, *_smoothed("all programs", x, history.resources["machine_cpu_percent"])[-1:]]


def _time_unit(total_seconds: float) -> tuple[str, float]:
    for name, seconds in (("hours", 3600.0), ("minutes", 60.0)):
        if total_seconds >= 3 * seconds:
            return f"{name} of running", seconds
    return "seconds of running", 1.0


def _time_marks(history: History, clock: Clock, unit: float) -> list[Mark]:
    events = list(history.events)
    places = clock.at(number(event.get("time")) for event in events) / unit
    found = (_mark_at(float(x), event) for x, event in zip(places, events, strict=True))
    return thin_marks([mark for mark in found if mark is not None])


def _series(name: str, x: Sequence[float], y: Sequence[float], style: Style = "line") -> list[Series]:
    """Return one series of the finite points, or none. Neighbours of long series are averaged."""
    points = [pair for pair in zip(x, y, strict=True) if _finite(pair)]
    if not points:
        return []
    stride = math.ceil(len(points) / MAX_CHART_POINTS)
    groups = [points[start : start + stride] for start in range(0, len(points), stride)]
    means = [tuple(sum(column) / len(group) for column in zip(*group, strict=True)) for group in groups]
    return [Series(name, [_rounded(x) for x, _ in means], [_rounded(y) for _, y in means], style)]


def _smoothed(name: str, x: Sequence[float], y: Sequence[float]) -> list[Series]:
    """Return the values, and a moving average where there are many: faint and strong."""
    found = _series(name, x, y)
    if not found or len(found[0].x) < _MIN_TO_SMOOTH:
        return found
    raw = found[0]
    half = max(1, len(raw.y) // _SMOOTHING // 2)
    windows = [raw.y[max(0, i - half) : i + half + 1] for i in range(len(raw.y))]
    means = [_rounded(sum(window) / len(window)) for window in windows]
    return [Series(name, raw.x, raw.y, "raw"), Series(name, raw.x, means)]


def _finite(values: Iterable[float]) -> bool:
    """Return whether all values can be drawn; far beyond any measurement, axes overflow."""
    return all(abs(value) <= _LARGEST for value in values)


def _rounded(value: float) -> float:
    """Return what a chart can show: six digits."""
    return float(f"{value:.6g}")


def _is_wide(series: Sequence[Series]) -> bool:
    values = [value for each in series for value in each.y]
    return bool(values) and min(values) > 0 and max(values) > _LOG_RATIO * min(values)


def _are_shares(series: Sequence[Series]) -> bool:
    return all(0 <= value <= 1 for each in series for value in each.y)
