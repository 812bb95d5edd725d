"""A run's use of the machine, beside the targets of the performance guide for 8, 16 and 32 GB."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from macbook_optimization.json_types import JsonMapping
from macbook_optimization.training_config_adapter import PROFILES, profile_for
from macbook_optimization.units import counted
from trm.reports.curves import Scales
from trm.reports.description import Fact, num_cores, total_memory
from trm.reports.history import History
from trm.reports.wording import NOT_REPORTED, duration, percent, significant, size
from trm.runs.rows import number
from trm.tasks.metrics import smaller_is_better

MACHINES = ("8 GB", "16 GB", "32 GB or more")  # the profiles
# From the performance guide, for MacBooks. They depend on model and data, so they are shown, not judged.
_TARGETS = {
    "samples per second": ("10-20", "20-40", "40-80"),
    "peak memory": ("below 6 GB", "below 12 GB", "below 24 GB"),
    "CPU": ("70-85 %", "80-90 %", "85-95 %"),
    "time to 95 %": ("2-4 h", "1-3 h", "0.5-2 h"),
    "steps to 95 %": ("8,000-12,000", "5,000-8,000", "3,000-5,000"),
}
_CONVERGED = 0.95


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    targets: tuple[str, ...]  # of `MACHINES`
    measured: str


@dataclass(frozen=True, slots=True)
class ResourceSummary:
    machine: int | None  # place of this machine among `MACHINES`; None if its memory is not known
    targets: list[Target]
    facts: list[Fact]


def summarise_resources(history: History, hardware: JsonMapping, scales: Scales) -> ResourceSummary:
    step, seconds = _convergence(history, scales.primary_metric)
    speed = _finite(history.train["samples_per_second"])
    cpu = _cpu_percent(history, scales.num_cores)
    measured = {
        "samples per second": f"{significant(float(np.median(speed)))} (median)" if speed else NOT_REPORTED,
        "peak memory": size(history.peak_bytes),
        "CPU": NOT_REPORTED if cpu is None else f"{cpu:.0f} % (mean)",
        "time to 95 %": "not reached" if seconds is None else duration(seconds),
        "steps to 95 %": "not reached" if step is None else f"{step:,}",
    }
    targets = [Target(name, values, measured[name]) for name, values in _TARGETS.items()]
    total = total_memory(hardware)
    place = None if total is None else PROFILES.index(profile_for(total))
    return ResourceSummary(place, targets, _facts(history, scales))


def _facts(history: History, scales: Scales) -> list[Fact]:
    resources = history.resources
    memory = _finite(resources["rss_bytes"]) or _finite(history.train["rss_bytes"])
    available = _finite(resources["available_bytes"])
    swap = _finite(resources["swap_bytes"])
    heat = _finite(resources["temperature"])
    battery = _finite(resources["battery_percent"])
    budget = scales.budget_bytes
    breaks = [event for event in history.events if event.get("event") == "cooling break"]
    facts = {
        "memory of the trainer, mean": size(float(np.mean(memory))) if memory else NOT_REPORTED,
        "memory budget": size(budget),
        "least memory available": size(min(available)) if available else NOT_REPORTED,
        "swap in use, at most": _swap(swap),
        "CPU of other programs": _others(history),
        "temperature, at most": f"{max(heat):.0f} °C" if heat else NOT_REPORTED,
        "thermal level": _levels(history),
        "battery": f"{percent(battery[0])} to {percent(battery[-1])}" if battery else NOT_REPORTED,
        "cooling breaks": _breaks(history.event_counts["cooling break"], breaks),
    }
    return [Fact(name, value) for name, value in facts.items()]


def _cpu_percent(history: History, cores: int | None) -> float | None:
    used = _finite(history.resources["process_cpu_percent"]) or _finite(history.train["cpu_percent"])
    return float(np.mean(used)) / cores if used and cores else None


def _swap(used: Sequence[float]) -> str:
    if not used:
        return NOT_REPORTED
    return size(max(used)) if max(used) > 0 else "none"


def _others(history: History) -> str:
    """Compare the whole machine with the trainer, sample by sample."""
    cores = _sampled_cores(history)
    columns = (history.resources["machine_cpu_percent"], history.resources["process_cpu_percent"])
    pairs = [pair for pair in zip(*columns, strict=True) if all(map(math.isfinite, pair))]
    if not cores or not pairs:
        return NOT_REPORTED
    rest = [max(0.0, machine - own / cores) for machine, own in pairs]
    return f"{percent(float(np.mean(rest)))} (mean)"


def _levels(history: History) -> str:
    total = history.thermal_levels.total()
    if not total:
        return NOT_REPORTED
    return ", ".join(f"{level} {num / total:.0%}" for level, num in history.thermal_levels.most_common())


def _breaks(count: int, shown: Sequence[JsonMapping]) -> str:
    if not count:
        return "none"
    seconds = sum(_finite([number(event.get("seconds")) for event in shown]))
    return f"{counted(count, 'break')}, {duration(seconds)} in total"


def _convergence(history: History, metric: str) -> tuple[int | None, float | None]:
    """Return the step and the seconds of the first evaluation at 95 %."""
    for row in history.evaluations:
        if not smaller_is_better(metric) and number(row.get(metric)) >= _CONVERGED:
            seconds = number(row.get("seconds"))
            return int(row["step"]), seconds if math.isfinite(seconds) else None
    return None, None


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def scales_of(history: History, hardware: JsonMapping, metric: str, budget_bytes: object) -> Scales:
    budget = number(budget_bytes)
    cores = num_cores(hardware)
    return Scales(metric, budget if math.isfinite(budget) else None, cores or _sampled_cores(history))


def _sampled_cores(history: History) -> int | None:
    used = history.recent_resources[-1].get("cpu_percent") if history.recent_resources else None
    return len(used) or None if isinstance(used, list) else None
