"""The time that the same steps took in an earlier run of the same recipe on the same machine."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from macbook_optimization.errors import LaptopError
from macbook_optimization.units import MIB
from trm.config import RunConfig
from trm.plan import Plan
from trm.runs.directory import METRICS, RESOURCES, Run, is_run
from trm.runs.lost_rows import Place, repetition
from trm.runs.rows import MAX_RATE, Row, kind_of, number

MAX_BYTES = 8 * MIB  # of metrics that are read to find out: about four hours of training
MAX_RUNS = 20  # beside this one that are looked at, the newest first


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """The seconds that the steps of a run took."""

    name: str
    steps: list[int]  # last step of each row
    seconds: list[float]  # of all steps up to there, without evaluations and saves

    def seconds_of(self, first: int, last: int) -> float | None:
        """Return how long these steps took; None if the run did not take all of them."""
        begin, end = (self._seconds_until(step) for step in (first - 1, last))
        return None if begin is None or end is None else end - begin

    def _seconds_until(self, step: int) -> float | None:
        """Interpolate between the rows."""
        if not self.steps or not self.steps[0] <= step <= self.steps[-1]:
            return None
        place = bisect_left(self.steps, step)
        if self.steps[place] == step:
            return self.seconds[place]
        share = (step - self.steps[place - 1]) / (self.steps[place] - self.steps[place - 1])
        return self.seconds[place - 1] + share * (self.seconds[place] - self.seconds[place - 1])


def find_earlier_run(run: Run, config: RunConfig, plan: Plan | None, began: float) -> EarlierRun | None:
    """Return the newest run beside this one that learned the same, on the same machine and device.

    It ended before `began`, the time of the first row of this run.
    """
    if plan is None:
        return None
    try:
        machine = _machine_of(run)
        siblings = [] if machine is None else _siblings(run, began)
    except (LaptopError, OSError):  # a directory that cannot be read has nothing to compare with
        return None
    learned = config.what_is_learned()
    for other in siblings:
        try:
            other_plan = other.plan
            is_same = other.config.what_is_learned() == learned and _machine_of(other) == machine
            if is_same and other_plan is not None and other_plan.execution.device == plan.execution.device:
                return pace_of(other)
        except (LaptopError, OSError):  # not a run that can be read
            continue
    return None


def _siblings(run: Run, before: float) -> list[Run]:
    """Return the other runs of the directory that had ended and can be read quickly, the newest first."""
    newest_first = []
    for path in run.path.resolve().parent.iterdir():
        try:
            if path == run.path.resolve() or not is_run(path):
                continue
            if (path / METRICS).stat().st_size > MAX_BYTES:
                continue
            ended = number((Run(path).last_row() or {}).get("time"))
        except (LaptopError, OSError):
            continue
        if ended < before:
            newest_first.append((ended, path))
    return [Run(path) for _, path in sorted(newest_first, reverse=True)[:MAX_RUNS]]


def _machine_of(run: Run) -> tuple[int, float] | None:
    """Return the cores and the memory of the machine that a run recorded; None if it recorded none."""
    row = run.last_row(RESOURCES)
    cores = None if row is None else row.get("cpu_percent")
    if row is None or not isinstance(cores, list):
        return None
    return len(cores), number(row.get("total_bytes"))


def pace_of(run: Run) -> EarlierRun:
    """Read how long the steps of a run took, from its rows."""
    slots = run.config.training.effective_batch_size
    places: list[Place] = []
    seconds: list[float] = []
    for row in run.rows():
        if kind_of(row) != "train" or not _is_usable(row):
            continue
        repeats = repetition(places[-1], row) if places else None
        while repeats is not None and places and repeats.covers(places[-1]):
            places.pop()
            seconds.pop()
        num_steps = int(row["step"]) - int(places[-1].step) if places else 0
        before = seconds[-1] if seconds else 0.0
        places.append(Place.of(row))
        seconds.append(before + num_steps * slots / row["samples_per_second"])
    return EarlierRun(run.path.name, [int(place.step) for place in places], seconds)


def _is_usable(row: Row) -> bool:
    return number(row.get("step")) < math.inf and 0 < number(row.get("samples_per_second")) < MAX_RATE
