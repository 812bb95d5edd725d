"""Rows of a run as numbers that can be compared: training at equal work, and the load of the machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from trm.backends.base import EXCHANGE
from trm.config import RunConfig
from trm.planning.warmup import BACKWARD_CYCLES
from trm.runs.rows import Row, memory_of, number
from trm.schedule import cycles_of_steps

Regime = tuple[object, ...]
T = TypeVar("T", "Sample", Row)


@dataclass(frozen=True, slots=True)
class Sample:
    """A training row, and the work in it."""

    time: float
    step: int
    num_steps: int  # since the row before
    seconds: float  # of these steps, without evaluations, saves and pauses
    work: float  # recursions of these steps, gradients included
    regime: Regime
    micro_batch_size: float
    loss: float
    grad_norm: float
    device_bytes: float  # that the driver of a GPU holds; 0 without one
    cpu_percent: float  # of one core
    spent: Mapping[str, float]

    @property
    def rate(self) -> float:
        """Recursions per second."""
        return self.work / self.seconds

    @property
    def is_mostly_steps(self) -> bool:
        """Return whether the row's CPU time is that of steps, not of an evaluation, a pause, or waiting for
        other machines."""
        is_steps = sum(self.spent.values()) < 1.2 * self.seconds
        return is_steps and self.spent.get(EXCHANGE, 0.0) < 0.2 * self.seconds


@dataclass(frozen=True, slots=True)
class Load:
    """Medians over a period of resource rows."""

    cores: int
    own_cores: float  # busy with the trainer
    other_cores: float  # busy with other programs
    memory_percent: float  # of the machine, in use
    rss_bytes: float  # of the trainer
    throttled_share: float | None  # of the rows; None if none of them reports it
    on_battery: bool

    @property
    def is_throttling(self) -> bool | None:
        return None if self.throttled_share is None else self.throttled_share >= 0.5


def sample_of(row: Row, first_step: int, regime: Regime, config: RunConfig) -> Sample:
    """Return the sample of a training row whose first step is known."""
    step = int(number(row.get("step")))
    num_steps = step - first_step + 1
    spent = row.get("spent")
    activities = spent if isinstance(spent, Mapping) else {}
    return Sample(
        time=number(row.get("time")),
        step=step,
        num_steps=num_steps,
        seconds=num_steps * config.training.effective_batch_size / number(row.get("samples_per_second")),
        work=work_of_steps(first_step, step, config),
        regime=regime,
        micro_batch_size=number(row.get("micro_batch_size")),
        loss=number(row.get("loss")),
        grad_norm=number(row.get("grad_norm")),
        device_bytes=memory_of(row) - number(row.get("rss_bytes")),
        cpu_percent=number(row.get("cpu_percent")),
        spent={str(name): number(seconds) for name, seconds in activities.items()},
    )


def work_of_steps(first: int, last: int, config: RunConfig) -> float:
    """Return the recursions of these steps; one with its gradient counts as several."""
    cycles = cycles_of_steps(range(first, last + 1), config.model, config.training, config.seed)
    return float(cycles.sum() + len(cycles) * BACKWARD_CYCLES)


def summarise(rows: Sequence[Row]) -> Load | None:
    """Return the medians of resource rows during which the trainer ran; None if there are none."""
    complete = [row for row in rows if _is_complete(row)]
    if not complete:
        return None
    own = [row["process_cpu_percent"] / 100 for row in complete]
    busy = [sum(row["cpu_percent"]) / 100 for row in complete]
    used = [100 * (1 - row["available_bytes"] / row["total_bytes"]) for row in complete]
    reported = [bool(row["is_throttling"]) for row in complete if row.get("is_throttling") is not None]
    return Load(
        cores=len(complete[-1]["cpu_percent"]),
        own_cores=median(own),
        other_cores=median(max(0.0, all_ - mine) for all_, mine in zip(busy, own, strict=True)),
        memory_percent=median(used),
        rss_bytes=median(row["rss_bytes"] for row in complete),
        throttled_share=sum(reported) / len(reported) if reported else None,
        on_battery=complete[-1].get("on_battery") is True,
    )


def _is_complete(row: Row) -> bool:
    """Return whether the trainer was running, and the file is not damaged here."""
    names = ("process_cpu_percent", "rss_bytes", "available_bytes", "total_bytes")
    cores = row.get("cpu_percent")
    has_cores = isinstance(cores, list) and all(number(core) >= 0 for core in cores) and bool(cores)
    return has_cores and all(number(row.get(name)) >= 0 for name in names) and row["total_bytes"] > 0


def last_rows(rows: Sequence[T] | deque[T], seconds: float, min_rows: int) -> list[T] | None:
    """Return the fewest rows at the end that span these seconds; None if all of them do not."""
    found: list[T] = []
    for row in reversed(rows):
        found.append(row)
        if len(found) >= min_rows and time_of(found[0]) - time_of(row) >= seconds:
            return found[::-1]
    return None


def time_of(row: Sample | Row) -> float:
    return row.time if isinstance(row, Sample) else number(row.get("time"))
