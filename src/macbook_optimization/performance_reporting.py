"""How fast training is, what holds it back, and whether it gets worse.

The benchmark trains for real, in a child process; nothing here is a typical value. What watches a run only
reports: whoever asks decides what to do about it. A megabyte is 2**20 bytes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

from macbook_optimization.errors import ConfigError, DataError, LaptopError
from macbook_optimization.resource_monitoring import ResourceMonitor

MIB = 2**20
_NEVER = 2**31 - 1  # the largest number of steps that a recipe can say
_WATCH_SECONDS = 0.5  # one look took 2.5 ms of a core, measured on Linux
# The rate is counted per slot, so a benchmark of a model alone takes the slots of one micro-batch: with the
# paper's 768, a single step would outlast the benchmark.
_BENCHMARK_SLOTS = 32


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """`memory_efficiency` is the peak as a share of the memory that training may use: of the plan's budget
    or, without one, of what the machine had available at the start. Well below 100 there is room for larger
    micro-batches; above it there is too little for these."""

    samples_per_second: float  # median of the logged rows, the first quarter left out as warm-up
    memory_efficiency: float  # percent
    cpu_utilization: float  # percent of the cores available
    peak_memory_mb: float  # resident, of the training command and its children together
    steps: int
    seconds: float  # of training; starting up is not counted

    def __getitem__(self, name: str) -> float:
        """`results["samples_per_second"]` is documented beside the attribute."""
        value: float = asdict(self)[name]
        return value


class PerformanceBenchmark:
    """Trains in a temporary directory that is gone afterwards."""

    def run_full_benchmark(
        self, model_config: Mapping[str, Any], dataset_path: str | Path, duration_minutes: float
    ) -> BenchmarkResult:
        """`model_config` is a recipe's model section or a whole recipe. Evaluation is left out."""
        from trm.runs import Run  # the one exception to the direction of imports

        if not duration_minutes > 0:
            raise ConfigError(f"duration_minutes is {duration_minutes}; it must be above 0")
        recipe = _recipe(model_config, Path(dataset_path))
        available = psutil.virtual_memory().available
        with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
            directory = Path(name)
            (directory / "recipe.yaml").write_text(recipe, encoding="utf-8")
            peak = _train(directory, duration_minutes)
            plan = json.loads((directory / "run" / "plan.json").read_text(encoding="utf-8"))
            rows = Run(directory / "run").rows()
        return summarise_rows(rows, peak, plan.get("budget_bytes") or available, available_cores())


def summarise_rows(
    rows: Sequence[Mapping[str, Any]], peak_bytes: int, budget_bytes: int, num_cores: int
) -> BenchmarkResult:
    """Of a run's metrics; the peak is `peak_bytes` or the most that a row says, whichever is more."""
    rows = [row for row in rows if "samples_per_second" in row]  # the others are evaluations
    if not rows:
        raise LaptopError(
            "The benchmark ended before its first step was finished", hint="Raise duration_minutes."
        )
    steady = rows[min(-(-len(rows) // 4), len(rows) - 1) :]
    peak_bytes = max(peak_bytes, *(row["rss_bytes"] for row in rows))
    return BenchmarkResult(
        samples_per_second=median(row["samples_per_second"] for row in steady),
        memory_efficiency=100 * peak_bytes / budget_bytes,
        cpu_utilization=median(row["cpu_percent"] for row in steady) / num_cores,
        peak_memory_mb=peak_bytes / MIB,
        steps=rows[-1]["step"],
        seconds=rows[-1]["seconds"],
    )


def available_cores() -> int:
    """Those this process may use, which a container can limit; macOS has no such limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _recipe(model_config: Mapping[str, Any], dataset: Path) -> str:
    from trm.config import RunConfig, parse_section

    whole = any(key in RunConfig.model_fields for key in model_config)
    model_only = {"model": model_config, "training": {"effective_batch_size": _BENCHMARK_SLOTS}}
    path = dataset.resolve()
    tree = {"task": _task_of(path), "data": {"path": path}, **(model_config if whole else model_only)}
    config = parse_section(RunConfig, tree, "the benchmark's recipe")
    changes: dict[str, dict[str, Any]] = {
        "data": {"path": path, "build": None},
        "training": {"max_steps": _NEVER},
        "evaluation": {"every_steps": _NEVER, "target_accuracy": None},
    }
    sections = {name: getattr(config, name).model_copy(update=update) for name, update in changes.items()}
    return config.model_copy(update=sections).to_yaml()


def _task_of(dataset: Path) -> str:
    path = dataset / "build.json"
    if not path.is_file():  # built by the public code, whose layout does not name the task
        return "sudoku"
    try:
        return str(json.loads(path.read_bytes()).get("task", "sudoku"))
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path} does not tell how the dataset was built: {error}") from error


def _train(directory: Path, minutes: float) -> int:
    """The peak of resident memory, in bytes."""
    program = [sys.executable, "-P", "-c", "from trm.cli import main; main()"]
    arguments = ["train", directory / "recipe.yaml", "--run", directory / "run"]
    command = [*program, *map(str, arguments), "--max-minutes", str(minutes), "--json"]
    messages = directory / "messages"
    none = subprocess.DEVNULL
    with (
        messages.open("w", encoding="utf-8") as told,
        subprocess.Popen(command, stdin=none, stdout=none, stderr=told) as child,
    ):
        try:
            peak = _watch_memory(child)
        finally:
            child.terminate()  # it has ended by itself, unless we were interrupted
            child.wait()  # or it would still be saving into a directory that is being removed
    if child.returncode:
        raise _failure(child.returncode, messages.read_text(encoding="utf-8", errors="replace"))
    return peak


def _watch_memory(child: subprocess.Popen[bytes]) -> int:
    """Sampled from outside: between two steps, when rows are logged, much of the memory is free again."""
    peak = 0
    while True:
        try:
            child.wait(_WATCH_SECONDS)
            return peak
        except subprocess.TimeoutExpired:
            peak = max(peak, _resident_bytes(child.pid))


def _resident_bytes(pid: int) -> int:
    total = 0
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # it ended while we were looking
                total += process.memory_info().rss
    return total


def _failure(code: int, messages: str) -> LaptopError:
    found = re.search(r"^error: (.*?)(?:^hint: (.*?))?\Z", messages.strip(), re.MULTILINE | re.DOTALL)
    if found:
        return LaptopError(f"The benchmark could not train: {found[1].strip()}", hint=found[2])
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    last = messages.strip().splitlines()[-1:]
    return LaptopError(": ".join([f"The benchmark's training {how}", *last]))


def analyze_performance_bottlenecks(
    metrics: Mapping[str, Sequence[Any]], total_memory_mb: float | None = None, num_cores: int | None = None
) -> dict[str, Any]:
    """What holds training back; None for what `metrics` has no values of.

    `cpu_usage_percent` is of the whole machine; with `num_cores` it is of one core, as a run's metrics are,
    and may exceed 100. `total_memory_mb` is this machine's if it is not given.
    """
    most_memory = max(metrics.get("memory_usage_mb", ()), default=None)
    most_cpu = max(metrics.get("cpu_usage_percent", ()), default=None)
    events = metrics.get("thermal_throttling_events")
    total = psutil.virtual_memory().total / MIB if total_memory_mb is None else total_memory_mb
    found = {
        "memory_bottleneck": None if most_memory is None else bool(most_memory > 0.9 * total),
        "cpu_underutilization": None if most_cpu is None else bool(most_cpu / (num_cores or 1) < 70),
        "thermal_issues": None if events is None else len(events),
    }
    advice = {
        "memory_bottleneck": "Use smaller micro-batches, or stream the dataset.",
        "cpu_underutilization": "Use more threads or larger micro-batches.",
        "thermal_issues": "Let the machine cool better, or give it less to do at once.",
    }
    return {**found, "recommendations": [advice[name] for name, is_so in found.items() if is_so]}


@dataclass(frozen=True, slots=True)
class MachineLoad:
    memory_percent: float
    cpu_percent: float  # of all cores
    is_throttling: bool | None  # None where the system does not tell


@dataclass(frozen=True, slots=True)
class Issue:
    problem: str
    advice: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    severity: str  # "none"; "moderate" below 80 % of what was expected, "severe" below 50 %
    issues: tuple[Issue, ...]


def measure_load(seconds: float = 0.5) -> MachineLoad:
    return MachineLoad(
        memory_percent=psutil.virtual_memory().percent,
        cpu_percent=psutil.cpu_percent(interval=seconds),
        is_throttling=ResourceMonitor().get_thermal_state().is_throttling,
    )


def diagnose_slow_training(
    current_sps: float, expected_sps: float, load: MachineLoad | None = None
) -> Diagnosis:
    """Measures the machine now, which takes half a second, unless training is fast or `load` is given."""
    _check_positive("expected_sps", expected_sps)
    if current_sps >= 0.8 * expected_sps:
        return Diagnosis("none", ())
    load = load or measure_load()
    issues = []
    if load.memory_percent > 90:
        pressure = f"{load.memory_percent:.0f} % of the memory are in use"
        issues.append(
            Issue(pressure, "Close other programs, use smaller micro-batches, or stream the dataset.")
        )
    if load.cpu_percent < 50:
        idle = f"only {load.cpu_percent:.0f} % of the CPU are in use"
        issues.append(Issue(idle, "Use more threads, or check which math library torch was built with."))
    if load.is_throttling:
        hot = "the processor is slowed down because it is hot"
        issues.append(Issue(hot, "Let the machine cool better, or give it less to do at once."))
    return Diagnosis("severe" if current_sps < 0.5 * expected_sps else "moderate", tuple(issues))


@dataclass(frozen=True, slots=True)
class Leak:
    first_step: int
    last_step: int
    growth_mb: float
    mb_per_step: float
    suggestions: tuple[str, ...] = (
        "Keep numbers of a step, not tensors: a tensor keeps the graph that made it.",
        "Collect garbage more often.",
        "Continue from the last checkpoint: a new process starts with what it needs.",
    )


class MemoryLeakDetector:
    """Says when memory has grown steadily for two windows of steps.

    Two, because one may lie within a tooth of the saw that a garbage collection every `window` steps draws.
    They are cut into ten blocks. In a leak the median of every block lies above the one before, and by at
    least half of the average rise: a saw falls back, a warm-up flattens, and the medians of noise come in
    order once in ten factorial times. The price is silence about a leak beneath a saw that is steeper.
    """

    def __init__(self, window: int = 50, min_growth_mb: float = 10.0) -> None:
        if window < 5:
            raise ConfigError(f"window is {window}; it must be at least 5, one for each of its blocks")
        _check_positive("min_growth_mb", min_growth_mb)
        self.min_growth_mb = min_growth_mb
        self._block = window // 5
        self._history: deque[tuple[int, float]] = deque(maxlen=10 * self._block)

    def check_for_leaks(self, step: int, rss_bytes: int | None = None) -> Leak | None:
        """To be called once a step; without `rss_bytes` it measures this process. A leak is reported once,
        and again only if it goes on for as long as it took to find."""
        resident = psutil.Process().memory_info().rss if rss_bytes is None else rss_bytes
        self._history.append((step, resident / MIB))
        leak = self._find()
        if leak is not None:
            self._history.clear()
        return leak

    def _find(self) -> Leak | None:
        if len(self._history) < 10 * self._block:
            return None
        steps, resident_mb = zip(*self._history, strict=True)
        starts = range(0, len(resident_mb), self._block)
        medians = [median(resident_mb[start : start + self._block]) for start in starts]
        rises = [after - before for before, after in pairwise(medians)]
        if min(rises) < 0.5 * fmean(rises):
            return None
        growth_mb = medians[-1] - medians[0]
        if growth_mb < self.min_growth_mb:
            return None
        num_steps = steps[-self._block] - steps[0]  # from block to block, as the medians are
        return Leak(steps[0], steps[-1], growth_mb, growth_mb / max(num_steps, 1))


class PerformanceRegression:
    """Whether the average of the last `window` rates lies below `tolerance` times the baseline."""

    def __init__(self, baseline_sps: float, window: int = 20, tolerance: float = 0.8) -> None:
        _check_positive("baseline_sps", baseline_sps)
        _check_positive("window", window)
        self.baseline_sps, self.tolerance = baseline_sps, tolerance
        self._recent: deque[float] = deque(maxlen=window)

    def check_regression(self, current_sps: float) -> bool:
        self._recent.append(current_sps)
        average = self._average()
        return average is not None and average < self.tolerance * self.baseline_sps

    @property
    def degradation_percent(self) -> float | None:
        """None until the window is full; negative if training became faster."""
        average = self._average()
        return None if average is None else 100 * (1 - average / self.baseline_sps)

    def _average(self) -> float | None:
        return fmean(self._recent) if len(self._recent) == self._recent.maxlen else None


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} is {value}; it must be above 0")
