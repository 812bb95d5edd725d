"""Slow training: waiting for data, and steps that became slower at equal work."""

from __future__ import annotations

from collections.abc import Sequence

from macbook_optimization.performance_reporting import (
    MachineLoad,
    PerformanceRegression,
    diagnose_slow_training,
)
from trm.reports.earlier_runs import EarlierRun
from trm.reports.evidence import Evidence
from trm.reports.finding import Finding
from trm.reports.samples import Sample

DATA = "data starvation"
REGRESSION = "regression"
SLOWER_RUN = "slower than an earlier run"
_STEP_PARTS = ("data", "forward", "backward", "optimizer")


def data_starvation(evidence: Evidence) -> Finding | None:
    """A large part of each step is spent waiting for its examples."""
    limits = evidence.thresholds
    samples = evidence.recent_samples(limits.machine_seconds)
    if samples is None:
        return None
    half = len(samples) // 2
    if not all(_data_share(part) >= limits.data_share for part in (samples[:half], samples[half:])):
        return None
    share = _data_share(samples)
    return Finding(
        DATA,
        evidence.step,
        f"{share:.0%} of the time of a step was spent reading and augmenting its examples, in the last "
        f"{samples[-1].time - samples[0].time:.0f} s.",
        _data_advice(evidence),
        f"Up to {1 / (1 - share):.1f} times as fast.",
    )


def _data_share(samples: Sequence[Sample]) -> float:
    spent = {part: sum(sample.spent.get(part, 0.0) for sample in samples) for part in _STEP_PARTS}
    total = sum(spent.values())
    return spent["data"] / total if total > 0 else 0.0


def _data_advice(evidence: Evidence) -> str:
    strategies = [event.get("strategy") for event in evidence.history.events if event.get("event") == "data"]
    if strategies[-1:] == ["streaming"]:
        return (
            "Raise data.loading.streaming_threshold_mb or data.loading.chunk_size_mb, or move the dataset to "
            "an internal disk."
        )
    if strategies[-1:] == ["mapped"]:
        return "Raise data.loading.cache_threshold_mb, or move the dataset to an internal disk."
    return "Simplify the task's `augment`, or train without it in a new run (data.augment=false)."


def slower_steps(evidence: Evidence) -> Finding | None:
    """Steps became slower than the first ones of the same regime, at equal work."""
    limits = evidence.thresholds
    recent = evidence.comparable_samples(limits.slow_seconds)
    if recent is None or _is_on_battery(evidence):
        return None
    rates = [sample.rate for sample in recent]
    percent = _drop_percent(rates, evidence.baseline_rate, limits.slow_rows_share)
    if percent is None:
        return None
    issues = diagnose_slow_training(1 - percent / 100, 1.0, _machine_load(evidence)).issues
    causes = "; ".join(issue.problem for issue in issues) or "nothing that was measured explains it"
    return Finding(
        REGRESSION,
        evidence.step,
        f"Steps take {_times(percent)} as long as in the first {limits.slow_seconds:.0f} s with the same "
        f"plan and work, for {recent[-1].time - recent[0].time:.0f} s now: {causes}.",
        issues[0].advice if issues else "Run `trm doctor`, which measures what this machine can do now.",
        f"Up to {_times(percent)} as fast.",
    )


def _times(percent: float) -> str:
    """Return the factor that a drop of the speed means."""
    return f"{100 / (100 - percent):.1f} times"


def _drop_percent(rates: Sequence[float], baseline: float, slow_rows_share: float) -> float | None:
    """Return by how much rates dropped; None unless their average and most of them did."""
    if not rates:
        return None
    regression = PerformanceRegression(baseline, window=len(rates))
    has_dropped = [regression.check_regression(rate) for rate in rates][-1]
    num_slow = sum(rate < regression.tolerance * baseline for rate in rates)
    is_lasting = num_slow >= slow_rows_share * len(rates)
    return regression.degradation_percent if has_dropped and is_lasting else None


def _is_on_battery(evidence: Evidence) -> bool:
    """Return whether the machine is on battery, where slower steps are its own choice."""
    load = evidence.load(evidence.thresholds.machine_seconds)
    return load is not None and load.on_battery


def _machine_load(evidence: Evidence) -> MachineLoad:
    """Return the load of the recent rows; what is not known explains nothing.

    The cores are those of the threads that compute: others are idle because the plan leaves them free, and
    beside a GPU these are, too.
    """
    load = evidence.load(evidence.thresholds.slow_seconds)
    if load is None:
        return MachineLoad(memory_percent=0.0, cpu_percent=100.0, is_throttling=None)
    is_on_cpu = evidence.plan is not None and evidence.plan.execution.device == "cpu"
    cpu_percent = 100 * load.own_cores / evidence.threads_in_use if is_on_cpu else 100.0
    return MachineLoad(load.memory_percent, cpu_percent, load.is_throttling)


def slower_run(evidence: Evidence, earlier: EarlierRun | None) -> Finding | None:
    """The recent steps took longer than the same steps of an earlier run with the same recipe."""
    limits = evidence.thresholds
    recent = evidence.recent_samples(limits.slow_seconds)
    load = evidence.load(limits.slow_seconds)
    if earlier is None or recent is None or load is None or _is_on_battery(evidence):
        return None
    expected = [earlier.seconds_of(sample.step - sample.num_steps + 1, sample.step) for sample in recent]
    if any(seconds is None for seconds in expected):
        return None
    ratios = [then / sample.seconds for sample, then in zip(recent, expected, strict=True) if then]
    percent = _drop_percent(ratios, 1.0, limits.slow_rows_share)
    if percent is None:
        return None
    issues = diagnose_slow_training(1 - percent / 100, 1.0, _machine_load(evidence)).issues
    causes = "".join(f"; {issue.problem}" for issue in issues)
    return Finding(
        SLOWER_RUN,
        evidence.step,
        f"The last {recent[-1].step - recent[0].step} steps took {_times(percent)} as long "
        f"as in {earlier.name}, an earlier run of this recipe on this machine{causes}.",
        issues[0].advice if issues else "Compare the plans: `trm runs --compare` shows what differs.",
        f"Up to {_times(percent)} as fast.",
    )
