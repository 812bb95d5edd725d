"""A comparison of this machine's training speed with that of an earlier `trm bench`.

Two measurements of one machine always differ a little. `judge` decides which differences count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from macbook_optimization.resource_monitoring import BUSY_PERCENT
from macbook_optimization.units import GIB
from trm.machine.benchmark_records import Report, Results

RULE = (
    "Faster or slower: the medians differ by at least 3 %, and so clear a difference would occur by\n"
    "chance at most once in 20 comparisons (Mann-Whitney rank test)."
)
MIN_CHANGE = 0.03
MAX_P_VALUE = 0.05
MACHINE_CHANGE = 0.1  # of the matrix product rate, which no change of this program can move


@dataclass(frozen=True, slots=True)
class Verdict:
    verdict: str  # "faster", "slower", "no difference beyond the noise" or "too few repeats to decide"
    ratio: float  # median samples per second, now divided by before
    p_value: float


@dataclass(frozen=True, slots=True)
class Comparison:
    file: str
    date: str
    verdicts: Mapping[str, Verdict]  # by profile
    warnings: tuple[str, ...]  # conditions that differ


def compare(now: Report, before: Report, file: Path) -> Comparison:
    """Compare the profiles that both reports have; `file` is where the earlier one was read."""
    shared = [name for name in now.profiles if name in before.profiles]
    verdicts = {}
    warnings = _changed_conditions(now, before)
    for name in shared:
        ours = now.profiles[name]
        theirs = before.profiles[name]
        verdicts[name] = judge(rates_per_repeat(ours), rates_per_repeat(theirs))
        warnings += _changed_workload(name, ours, theirs)
    return Comparison(str(file), f"{before.date:%Y-%m-%d %H:%M}", verdicts, tuple(warnings))


def rates_per_repeat(results: Results) -> list[float]:
    """Return one throughput per repeat, because steps of one process are not independent."""
    return [median(repeat.samples_per_second) for repeat in results.repeats]


def judge(now: Sequence[float], before: Sequence[float]) -> Verdict:
    """Apply `RULE` to two lists of throughputs.

    Quartiles that do not overlap would be a simpler rule, but with five repeats each they are apart by chance
    in one comparison of five (20,000 simulated ones).
    """
    ratio = median(now) / median(before)
    p_value = mann_whitney_p_value(now, before)
    least_p_value = 2 / math.comb(len(now) + len(before), len(now))
    if least_p_value > MAX_P_VALUE:
        verdict = "too few repeats to decide"
    elif p_value > MAX_P_VALUE or max(ratio, 1 / ratio) < 1 + MIN_CHANGE:
        verdict = "no difference beyond the noise"
    else:
        verdict = "faster" if ratio > 1 else "slower"
    return Verdict(verdict, ratio, p_value)


def mann_whitney_p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the exact two-sided p-value: the share of all orders that are at least as lopsided."""
    wins = sum((a > b) + (a == b) / 2 for a in first for b in second)
    fewer = math.floor(min(wins, len(first) * len(second) - wins))
    counts = _orders_by_wins(len(first), len(second))
    return min(1.0, 2 * sum(counts[: fewer + 1]) / sum(counts))


def _orders_by_wins(m: int, n: int) -> list[int]:
    """Return how many orders of m and n values have 0, 1, ... wins of the first in the m x n pairs.

    These are the coefficients of the Gaussian binomial, the product of (1 - q^(n+i)) / (1 - q^i) for i from 1
    to m. Each pass multiplies by one numerator, then divides by one denominator.
    """
    counts = [1] + [0] * (m * n)
    for i in range(1, m + 1):
        for wins in range(m * n, n + i - 1, -1):
            counts[wins] -= counts[wins - n - i]
        for wins in range(i, m * n + 1):
            counts[wins] += counts[wins - i]
    return counts


def _changed_conditions(now: Report, before: Report) -> list[str]:
    ours = _conditions(now)
    theirs = _conditions(before)
    changed = [
        f"{key} is {ours[key]!a} now and was {theirs[key]!a}" for key in ours if ours[key] != theirs[key]
    ]
    if before.busy_percent > BUSY_PERCENT:
        changed.append(f"other programs used {before.busy_percent:.0f} % of the CPU at that time")
    return changed


def _conditions(report: Report) -> dict[str, str | int | float | None]:
    machine = report.machine
    found: dict[str, str | int | float | None] = {
        f"the machine's {key}": machine.get(key)
        for key in ("brand", "architecture", "cores", "quota", "system")
    }
    # A kernel update changes the last digits of the memory size.
    found["the machine's memory in GiB"] = round(float(machine.get("memory_bytes") or 0) / GIB)
    for package in ("torch", "numpy", "python"):
        found[f"the version of {package}"] = report.versions.get(package)
    return found


def _changed_workload(name: str, now: Results, before: Results) -> list[str]:
    ours = now.work.model_dump()
    theirs = before.work.model_dump()
    changed = [
        f"{name}: {key} is {ours[key]} now and was {theirs[key]}" for key in ours if ours[key] != theirs[key]
    ]
    ratio = _median_product_rate(now) / _median_product_rate(before)
    if max(ratio, 1 / ratio) > 1 + MACHINE_CHANGE:
        changed.append(
            f"{name}: a plain matrix product is {ratio:.2f} times as fast as before, so the machine itself "
            "changed (other programs, heat, power)"
        )
    return changed


def _median_product_rate(results: Results) -> float:
    return median(repeat.product_rate for repeat in results.repeats)
