"""One compact screen about a run: what `trm train` shows while it trains, and `trm watch` at any time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

import numpy as np

from macbook_optimization.json_types import JsonMapping, JsonObject
from macbook_optimization.progress_lines import ASCII_MARKS, draw_bar, fit_texts, shorten
from macbook_optimization.terminal_text import one_line
from macbook_optimization.units import GIB
from trm.config import RunConfig
from trm.plan import Plan
from trm.reports.eta import Eta, EtaEstimator
from trm.reports.event_text import describe_event
from trm.reports.history import History
from trm.runs.directory import Run
from trm.runs.events import LimitsSet, PlanChosen
from trm.runs.metric import metric_label
from trm.runs.rows import Row, memory_of, number
from trm.runs.state import RunState, state_of
from trm.tasks.metrics import goodness, shown_value

SPARK_COLUMNS = 16
NUM_EVENTS = 3
SILENT_SECONDS = 15.0  # without a row, after which a run is reported as silent
_SPARKS = "▁▂▃▄▅▆▇█"
_ASCII_SPARKS = "_.-=*#"
_BAR_COLUMNS = 20
_MAX_CORES_SHOWN = 8
_ROUTINE_EVENTS = (
    PlanChosen.name,
    LimitsSet.name,
    "data",
)  # shown elsewhere on the screen, or not worth a line


@dataclass
class RunView:
    """A run as its files describe it. `read` takes in what is new; `lines` formats it."""

    run: Run
    config: RunConfig
    metric: str  # the primary one
    num_examples: int | None = None  # per evaluation
    history: History = field(default_factory=History)
    plan: Plan | None = None
    eta: EtaEstimator = field(init=False)
    state: RunState = field(init=False)

    def __post_init__(self) -> None:
        self.eta = EtaEstimator(self.config, self.metric, self.num_examples)
        self.follower = self.run.follow()
        self.state = state_of(self.run, self.config, self.history.last)

    def read(self) -> None:
        """Take in what was written since the last call."""
        rows = list(self.follower.skim())
        self.history.add(rows)
        self.eta.add(rows)
        plans = [row for row in rows if row.get("event") == PlanChosen.name]
        if plans:
            self.plan = _read_plan(plans[-1]) or self.plan
        self.state = state_of(self.run, self.config, self.history.last)

    def summary(self) -> str:
        """Return what a plain line of progress says beside the numbers of the trainer."""
        eta = self.eta.estimate(time.time())
        return "" if eta is None else describe_eta(eta)

    def lines(self, columns: int, *, ascii_only: bool = False) -> list[str]:
        """Return the screen, or nothing before the first row."""
        if not self.history.recent and not self.history.evaluations:
            return []
        rows = (
            self._progress(columns, ascii_only),
            self._learning(ascii_only),
            self._speed(),
            self._machine(ascii_only),
            self._plan(),
        )
        lines = [line for cells in rows for line in fit_texts(cells, columns)]
        return [*lines, *(shorten(text, columns) for text in self._events())]

    def facts(self) -> JsonObject:
        """Return what the screen shows, for programs."""
        row = self.history.recent[-1] if self.history.recent else {}
        sample = self.history.recent_resources[-1] if self.history.recent_resources else {}
        evaluation = self.history.evaluations[-1] if self.history.evaluations else {}
        eta = self.eta.estimate(time.time()) if self.state.name == "running" else None
        return {
            "state": self.state.name,
            "reason": (self.state.stop or {}).get("reason"),
            "silent_seconds": self.silent_seconds(),
            "step": self.history.step,
            "last_step": self.config.training.last_step,
            "seconds": row.get("seconds"),
            "eta": None if eta is None else eta._asdict(),
            "loss": row.get("loss"),
            "learning_rate": row.get("learning_rate"),
            "samples_per_second": row.get("samples_per_second"),
            "primary_metric": self.metric,
            "value": evaluation.get(self.metric),
            "best": self._best(),
            "plan": None if self.plan is None else self.plan.to_json(),
            "resources": sample or None,
            "events": list(self.history.events)[-NUM_EVENTS:],
        }

    def described_state(self, now: float | None = None) -> str:
        """Return the state, and since when nothing was recorded if that is long."""
        name = self.state.name
        silent = self.silent_seconds(now)
        if silent is None or silent < SILENT_SECONDS or name not in ("running", "crashed"):
            return name
        return f"{name}, no sign of life for {describe_seconds(silent)}"

    def silent_seconds(self, now: float | None = None) -> float | None:
        """Return for how long nothing was recorded; None if nothing ever was."""
        last = self.last_time()
        return None if last is None else max(0.0, (time.time() if now is None else now) - last)

    def last_time(self) -> float | None:
        """Return when something was last recorded, in seconds since the epoch."""
        files = (self.history.recent, self.history.evaluations, self.history.events)
        times = [number(rows[-1].get("time")) for rows in (*files, self.history.recent_resources) if rows]
        return max((each for each in times if math.isfinite(each)), default=None)

    def _best(self) -> float | None:
        values = [number(row.get(self.metric)) for row in self.history.evaluations]
        known = (value for value in values if math.isfinite(value))
        return max(known, key=partial(goodness, self.metric), default=None)

    def _progress(self, columns: int, ascii_only: bool) -> list[str]:
        step, last = self.history.step, self.config.training.last_step
        bar = _bar(step / max(1, last), min(_BAR_COLUMNS, columns // 3), ascii_only)
        cells = [f"{bar} step {step:,} of {last:,}, {step / max(1, last):.0%}"]
        if self.history.recent:
            cells.append(f"{describe_seconds(number(self.history.recent[-1].get('seconds')))} of training")
        eta = self.eta.estimate(time.time())
        if eta is not None and self.state.name == "running":
            cells.append(describe_eta(eta))
        return cells

    def _learning(self, ascii_only: bool) -> list[str]:
        cells = []
        losses = self.history.train["loss"]
        if self.history.recent:
            loss = number(self.history.recent[-1].get("loss"))
            cells.append(f"loss {loss:.3f} {sparkline(losses, ascii_only=ascii_only)}".rstrip())
        values = [number(row.get(self.metric)) for row in self.history.evaluations]
        best = self._best()
        if best is not None:
            spark = sparkline(values, ascii_only=ascii_only)
            cells.append(
                f"{metric_label(self.metric)} {shown_value(self.metric, values[-1])} {spark}".rstrip()
            )
            cells.append(f"best {shown_value(self.metric, best)}")
        if self.history.recent:
            cells.append(f"learning rate {number(self.history.recent[-1].get('learning_rate')):.2g}")
        return cells

    def _speed(self) -> list[str]:
        if not self.history.recent:
            return []
        now = number(self.history.recent[-1].get("samples_per_second"))
        rates = [rate for rate in self.history.train["samples_per_second"] if math.isfinite(rate)]
        average = "" if not rates else f", {_rate(sum(rates) / len(rates))} on average"
        return [f"{_rate(now)} samples/s now{average}"]

    def _machine(self, ascii_only: bool) -> list[str]:
        if not self.history.recent_resources:
            return []
        row = self.history.recent_resources[-1]
        cells = [self._memory(row, ascii_only), _cores(row), _heat(row), _battery(row)]
        return [cell for cell in cells if cell]

    def _memory(self, row: Row, ascii_only: bool) -> str:
        newest = self.history.recent[-1] if self.history.recent else {}
        used = memory_of({**row, "device_bytes": newest.get("device_bytes")})
        if not math.isfinite(used):
            return ""
        budget = None if self.plan is None else self.plan.budget_bytes
        if not budget:
            return f"memory {used / GIB:.2f} GiB"
        bar = _bar(used / budget, _BAR_COLUMNS // 2, ascii_only)
        return f"memory {bar} {used / GIB:.2f} of {budget / GIB:.1f} GiB"

    def _plan(self) -> list[str]:
        if self.plan is None:
            return []
        how = self.plan.execution
        workers = f"{how.workers} workers, " if how.workers > 1 else ""
        threads = "1 thread" if how.threads == 1 else f"{how.threads} threads"
        batches = f"{self.plan.accumulation_steps} x {self.plan.micro_batch_size} examples"
        tuning = " (still tuning)" if self.plan.provisional else ""
        return [f"plan: {batches}, {workers}{threads}, {how.precision}{tuning}"]

    def _events(self) -> list[str]:
        shown = [row for row in self.history.events if row.get("event") not in _ROUTINE_EVENTS]
        return [f"{_clock_time(row)}  {one_line(describe_event(row))}" for row in shown[-NUM_EVENTS:]]


def describe_eta(eta: Eta) -> str:
    """Return "about 14 min left, at most 22 min"."""
    about, at_most = describe_seconds(eta.about_seconds), describe_seconds(eta.at_most_seconds)
    return f"about {about} left" + ("" if at_most == about else f", at most {at_most}")


def describe_seconds(seconds: float) -> str:
    """Return a duration in the largest unit that leaves at least two of it."""
    if not math.isfinite(seconds):
        return "an unknown time"
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}" if unit == "min" else f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def sparkline(values: Sequence[float], columns: int = SPARK_COLUMNS, *, ascii_only: bool = False) -> str:
    """Return a curve as one row of characters, each the mean of its part of the values."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return ""
    parts = np.array_split(np.asarray(known), min(columns, len(known)))
    means = [float(part.mean()) for part in parts]
    low, high = min(means), max(means)
    marks = _ASCII_SPARKS if ascii_only else _SPARKS
    top = len(marks) - 1
    return "".join(marks[round(top * (mean - low) / (high - low)) if high > low else 0] for mean in means)


def _read_plan(row: JsonMapping) -> Plan | None:
    try:
        return Plan.from_json(row)
    except (ValueError, TypeError, AttributeError):
        return None


def _bar(share: float, columns: int, ascii_only: bool) -> str:
    return draw_bar(share, columns, *(ASCII_MARKS if ascii_only else ()))


def _rate(rate: float) -> str:
    return f"{rate:,.2f}" if rate < 10 else f"{rate:,.0f}"


def _cores(row: Row) -> str:
    given = row.get("cpu_percent")
    cores = [number(each) for each in given] if isinstance(given, list) else []
    if not cores:
        return ""
    if len(cores) > _MAX_CORES_SHOWN:
        return f"CPU {sum(cores) / len(cores):.0f} % of {len(cores)} cores"
    return f"CPU {' '.join(f'{core:.0f}' for core in cores)} %"


def _heat(row: Row) -> str:
    parts: Iterable[str] = (
        "throttled" if row.get("is_throttling") else "",
        _optional(row.get("temperature"), "{:.0f} °C"),
        str(row.get("thermal_level") or ""),
        _optional(row.get("speed_limit_percent"), "speed limit {:.0f} %"),
    )
    return f"heat: {', '.join(filter(None, parts)) or 'not reported'}"


def _battery(row: Row) -> str:
    percent = _optional(row.get("battery_percent"), "{:.0f} %")
    if not percent:
        return "battery: not reported"
    return f"battery {percent}, {'discharging' if row.get('on_battery') else 'on mains power'}"


def _optional(value: object, template: str) -> str:
    return template.format(number(value)) if math.isfinite(number(value)) else ""


def _clock_time(row: Row) -> str:
    try:
        return datetime.fromtimestamp(number(row.get("time"))).strftime("%H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "        "
