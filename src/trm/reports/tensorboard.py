"""A run as TensorBoard event files, written after the fact: scalars of all rows, and events as text.

Training and evaluation rows are at their steps. Samples of the machine are at the seconds since the first
one, because many of them fall into one step of a slow run. Of steps that were lost and repeated, the last
rows count.
"""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from macbook_optimization.durable_files import new_directory, remove_directory, write_synced
from macbook_optimization.errors import RunError
from macbook_optimization.file_errors import hint_for, reason_of
from trm.reports.event_text import describe_event
from trm.reports.history import number
from trm.reports.tfevents import record, scalar_event, text_event, version_event
from trm.runs.directory import EVENTS, METRICS, RESOURCES, Run
from trm.runs.reading import Follower
from trm.runs.rows import Row

DIRECTORY = "tensorboard"  # in the run
FILE_NAME = "events.out.tfevents.0000000000.trm"
_FILE = re.compile(r"events\.out\.tfevents\..*")
_NOT_SCALARS = ("kind", "time", "step", "seconds", "cpu_percent")  # of rows; CPU has one value per core
_OTHER_DIRECTORY = "Choose another directory."
_MAX_STEP = 2.0**62


@dataclass(frozen=True, slots=True)
class Written:
    directory: Path
    num_rows: int
    num_events: int


def write_event_files(run: Run, directory: Path | None = None) -> Written:
    """Write the event file of a run, in place of an earlier one. By default it is in the run itself."""
    target = directory or run.path / DIRECTORY
    _refuse_other_content(target)
    try:
        records, written = _records(run, target)
        _replace(Path(os.path.realpath(target)), records)
    except OSError as error:
        raise RunError(
            f"Cannot write the event files to {target}: {reason_of(error)}",
            hint=hint_for(error, _OTHER_DIRECTORY),
        ) from error
    return written


def _refuse_other_content(target: Path) -> None:
    """Raise `RunError` unless there is nothing, or only what an earlier call wrote."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise RunError(f"{target} is not a directory", hint=_OTHER_DIRECTORY)
    others = sorted(path.name for path in target.iterdir() if not _FILE.fullmatch(path.name))
    if others:
        raise RunError(
            f"{target} has other files than TensorBoard's, such as {others[0]}", hint=_OTHER_DIRECTORY
        )


def _replace(target: Path, records: Iterable[bytes]) -> None:
    with new_directory(target) as partial:
        write_synced(partial / FILE_NAME, records)
        if target.exists():
            remove_directory(target)


def _records(run: Run, target: Path) -> tuple[list[bytes], Written]:
    rows = _Rows()
    for row in Follower((run.path / METRICS,)).skim():
        rows.add(row)
    resources = _Samples()
    for row in Follower((run.path / RESOURCES,)).skim():
        resources.add(row)
    events = [row for row in Follower((run.path / EVENTS,)).skim() if row["kind"] == "event"]
    base = _base_time(run, events, rows)
    begin = min((entry.time(base) for entry in rows.entries), default=base)
    records = [record(version_event(begin))]
    records += [record(scalar_event(each.time(base), each.step, each.scalars)) for each in rows.entries]
    records += [record(each) for each in resources.messages]
    steps = _StepTimes(rows, base)
    records += [record(_text(event, steps, base)) for event in events]
    return records, Written(target, len(rows.entries), len(events))


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

    def time(self, base: float) -> float:
        return self.wall_time if math.isfinite(self.wall_time) else base + self.seconds


@dataclass
class _Rows:
    entries: list[_Entry] = field(default_factory=list)
    _last: dict[str, int] = field(default_factory=dict)  # step by kind

    def add(self, row: Row) -> None:
        kind = row["kind"]
        step = number(row.get("step"))
        if kind not in ("train", "eval") or not 0 <= step < _MAX_STEP:
            return
        if step <= self._last.get(kind, -1):  # resumed from before
            self.entries = [each for each in self.entries if each.kind != kind or each.step < step]
        self._last[kind] = int(step)
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


class _StepTimes:
    """Which step was recorded last before a time."""

    def __init__(self, rows: _Rows, base: float) -> None:
        known = sorted((each.time(base), each.step) for each in rows.entries)
        self.times = [time for time, _ in known]
        self.steps = [step for _, step in known]

    def at(self, time: float) -> int:
        place = bisect_right(self.times, time)
        return self.steps[place - 1] if place else 0


def _scalars(kind: str, row: Row) -> dict[str, float]:
    """Return the numbers of a row by tag; NaN and Inf stay, as TensorBoard shows them as such."""
    found = {f"{kind}/{name}": number(row[name]) for name in row if _is_scalar(name, row[name])}
    if kind == "train" and "cpu_percent" in row:
        found["train/cpu_percent"] = number(row["cpu_percent"])
    spent = row.get("spent")
    if isinstance(spent, Mapping):
        found.update({f"seconds/{name}": number(value) for name, value in spent.items()})
    return {tag: _in_float32(value) for tag, value in found.items()}


def _is_scalar(name: str, value: object) -> bool:
    return name not in _NOT_SCALARS and isinstance(value, int | float) and not isinstance(value, bool)


def _in_float32(value: float) -> float:
    """Return the value, or Inf where float32 has no such number."""
    return math.copysign(math.inf, value) if abs(value) > 3.4028234e38 else value


@dataclass
class _Samples:
    """Samples of the machine, encoded as they are read."""

    messages: list[bytes] = field(default_factory=list)
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
            scalars["resources/machine_cpu_percent"] = _in_float32(mean)
        self.messages.append(scalar_event(time, round(time - self._first), scalars))


def _text(event: Row, steps: _StepTimes, base: float) -> bytes:
    time = number(event.get("time"))
    time = time if math.isfinite(time) else base
    step = number(event.get("step"))
    place = int(step) if 0 <= step < _MAX_STEP else steps.at(time)
    return text_event(time, place, f"events/{event.get('event')}", describe_event(event))
