"""Problems of the machine: memory, swap, idle cores, other programs, and heat that the system reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from macbook_optimization.performance_reporting import analyze_performance_bottlenecks
from macbook_optimization.resource_monitoring import BUSY_PERCENT
from macbook_optimization.units import MIB
from trm.reports.evidence import Evidence
from trm.reports.finding import Finding, gain_in_speed
from trm.reports.other_programs import Programs
from trm.reports.samples import Load, Sample
from trm.runs.events import BatchShrunk, ThrottlingInferred, ThrottlingOver
from trm.runs.rows import number

MEMORY = "memory bottleneck"
CPU = "CPU under-use"
SWAP = "swap"
CONTENTION = "contention"
THROTTLING = "throttling"
COOLING_ADVICE = (
    "Improve the cooling of the machine, or set plan.threads to fewer cores, which keeps it cooler."
)
NAMED_SHARE = 0.2  # of the load by other programs, from which on a program is named as a cause


def memory_bottleneck(evidence: Evidence) -> Finding | None:
    """The trainer is near its budget, or memory pressure keeps its micro-batches small."""
    shrunk = _shrunk_batch(evidence)
    if shrunk is not None:
        return shrunk
    budget = None if evidence.plan is None else evidence.plan.budget_bytes
    load = evidence.load(evidence.thresholds.machine_seconds)
    if not budget or load is None:
        return None
    used = load.rss_bytes + (evidence.samples[-1].device_bytes if evidence.samples else 0.0)
    used_mb = used / MIB
    found = analyze_performance_bottlenecks({"memory_usage_mb": [used_mb]}, total_memory_mb=budget / MIB)
    if not found["memory_bottleneck"]:
        return None
    return Finding(
        MEMORY,
        evidence.step,
        f"The trainer uses {used_mb:,.0f} MiB, {used / budget:.0%} of its memory budget of "
        f"{budget / MIB:,.0f} MiB.",
        "Close other programs and resume, raise limits.memory_limit_mb or limits.memory_fraction, or set "
        "plan.gradient_checkpointing=alternate.",
    )


def _shrunk_batch(evidence: Evidence) -> Finding | None:
    limits = evidence.thresholds
    samples = evidence.recent_samples(limits.machine_seconds)
    events = evidence.events_since_start(BatchShrunk.name)
    if samples is None or evidence.plan is None or not events:
        return None
    planned = evidence.plan.micro_batch_size
    largest = max(sample.micro_batch_size for sample in samples)
    if not largest < planned:
        return None
    return Finding(
        MEMORY,
        evidence.step,
        f"Since step {events[-1].get('step')} the micro-batch size is {largest:.0f} instead of {planned}: "
        f"{events[-1].get('reason')}.",
        "Close other programs, or start with fewer examples at a time (plan.micro_batch_size) or a smaller "
        "model (trm train --fit).",
        gain_in_speed(_slowdown_since_size(evidence, planned, samples)),
    )


def _slowdown_since_size(evidence: Evidence, planned: int, recent: Sequence[Sample]) -> float | None:
    """Return how many times as long steps take as with the planned micro-batches; None without such steps."""
    before = [sample.rate for sample in evidence.samples if sample.micro_batch_size == planned]
    if len(before) < evidence.thresholds.min_rows:
        return None
    return median(before) / median(sample.rate for sample in recent)


def swapping(evidence: Evidence) -> Finding | None:
    """The system keeps moving memory to disk."""
    limits = evidence.thresholds
    rows = evidence.recent_resources(limits.machine_seconds)
    if rows is None:
        return None
    used = [number(row.get("swap_bytes")) for row in rows]
    rises = [after - before for before, after in pairwise(used) if after > before]
    grown = used[-1] - used[0]
    if len(rises) < limits.swapping_rows or not grown >= limits.swapped_bytes:
        return None
    seconds = rows[-1]["time"] - rows[0]["time"]
    return Finding(
        SWAP,
        evidence.step,
        f"Swap grew by {grown / MIB:,.0f} MiB in {seconds:.0f} s, to {used[-1] / MIB:,.0f} MiB.",
        "Close other programs, or lower limits.memory_fraction so that the next start plans smaller "
        "micro-batches.",
        gain_in_speed(evidence.slowdown),
    )


def cpu_underuse(evidence: Evidence) -> Finding | None:
    """The threads that compute are idle for much of the time, and no other program is the cause.

    Rows from before the last change, such as a fall back to one thread, do not count.
    """
    plan = evidence.plan
    samples = evidence.recent_samples(evidence.thresholds.machine_seconds)
    if samples is None or plan is None or plan.execution.device != "cpu":
        return None
    same = [sample for sample in samples if sample.regime == samples[-1].regime]
    percents = [sample.cpu_percent for sample in same if sample.is_mostly_steps]
    if len(percents) < evidence.thresholds.min_rows:
        return None
    threads = evidence.threads_in_use
    found = analyze_performance_bottlenecks({"cpu_usage_percent": percents}, num_cores=threads)
    if not found["cpu_underutilization"]:
        return None
    busy_cores = max(percents) / 100
    return Finding(
        CPU,
        evidence.step,
        f"Training kept at most {busy_cores:.1f} of the {threads} cores that it may use busy.",
        "Leave plan.threads, plan.workers and plan.micro_batch_size to auto-tuning (null), or raise "
        "training.effective_batch_size in a new run.",
        gain_in_speed(threads / max(0.1, busy_cores)),
    )


def taken_cores(load: Load, threads: int) -> float:
    """Return how many of the cores that training needs are busy with other programs."""
    return load.other_cores - (load.cores - threads)


def contention(evidence: Evidence, programs: Programs | None = None) -> Finding | None:
    """Other programs use cores that training needs. What `programs` lists as our own does not count."""
    load = evidence.load(evidence.thresholds.machine_seconds)
    if load is None:
        return None
    if programs is not None:
        own_helpers = max(0.0, programs.own_cores - load.own_cores)  # such as a compiler in the background
        load = replace(load, other_cores=max(0.0, load.other_cores - own_helpers))
    threads = evidence.threads
    taken = taken_cores(load, threads)
    if taken <= BUSY_PERCENT / 100 * threads:
        return None
    return Finding(
        CONTENTION,
        evidence.step,
        f"Other programs keep {load.other_cores:.1f} of {load.cores} cores busy{_named(load, programs)}; "
        f"training needs {threads} and gets {load.own_cores:.1f}.",
        _remedy(load, threads),
        gain_in_speed(threads / max(0.1, threads - taken)),
    )


def _remedy(load: Load, threads: int) -> str:
    free = max(1, int(load.cores - load.other_cores))
    return f"Close other programs, or set plan.threads={free}." if free < threads else "Close other programs."


def _named(load: Load, programs: Programs | None) -> str:
    """Name the busiest program, if it is more than a small part of the load."""
    if programs is None or programs.busiest is None:
        return ""
    if programs.busiest.cores < NAMED_SHARE * load.other_cores:
        return ", none of them visible from here"
    return f", most of all {programs.busiest.name} with {programs.busiest.cores:.1f}"


def reported_throttling(evidence: Evidence) -> Finding | None:
    """The system says that it throttles the processor."""
    rows = evidence.recent_resources(evidence.thresholds.machine_seconds)
    load = evidence.load(evidence.thresholds.machine_seconds)
    if rows is None or load is None or not load.is_throttling:
        return None
    times = [row["time"] for row in rows if row.get("is_throttling")]
    if not analyze_performance_bottlenecks({"thermal_throttling_events": times})["thermal_issues"]:
        return None
    return Finding(
        THROTTLING,
        evidence.step,
        f"The system reports that it throttled the processor in {len(times)} of the last {len(rows)} "
        f"samples{_heat(rows[-1])}.",
        COOLING_ADVICE,
        gain_in_speed(evidence.slowdown),
    )


def inferred_throttling(evidence: Evidence) -> Finding | None:
    """The trainer inferred from the time of its steps that the processor is throttled."""
    load = evidence.load(evidence.thresholds.machine_seconds)
    events = evidence.events_since_start(ThrottlingInferred.name, ThrottlingOver.name)
    if not events or events[-1]["event"] == ThrottlingOver.name:
        return None
    if load is not None and load.is_throttling is not None:  # the system says which
        return None
    return Finding(
        THROTTLING,
        evidence.step,
        f"The processor is probably throttled (inferred, the system does not report it): "
        f"{events[-1].get('evidence')}.",
        COOLING_ADVICE,
        gain_in_speed(number(events[-1].get("factor"))),
    )


def _heat(row: dict[str, object]) -> str:
    temperature = number(row.get("temperature"))
    speed = number(row.get("speed_limit_percent"))
    facts = []
    if temperature > 0:
        facts.append(f"{temperature:.0f} °C")
    if speed > 0:
        facts.append(f"speed limit {speed:.0f} %")
    return f" ({', '.join(facts)})" if facts else ""
