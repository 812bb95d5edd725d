"""Training throughput: a benchmark, its bottlenecks, and an explanation of slow training.

The benchmark runs real training in a child process; no number here is a typical value. Nothing here changes a
run: the caller decides what to do about a report. A megabyte is 2**20 bytes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypedDict, cast

import psutil

from macbook_optimization.dataset_files import BUILD_FILE, MAX_JSON_BYTES, cannot_read
from macbook_optimization.errors import ConfigError, DataError, LaptopError
from macbook_optimization.input_files import read_json
from macbook_optimization.json_types import JsonMapping, JsonObject
from macbook_optimization.performance_checks import Leak as Leak
from macbook_optimization.performance_checks import MemoryLeakDetector as MemoryLeakDetector
from macbook_optimization.performance_checks import PerformanceRegression as PerformanceRegression
from macbook_optimization.performance_checks import check_positive
from macbook_optimization.resource_monitoring import ResourceMonitor
from macbook_optimization.units import MIB as MIB

_UNLIMITED_STEPS = 2**31 - 1  # the largest number of steps that a recipe accepts
_SAMPLE_SECONDS = 0.5  # one sample took 2.5 ms of a core, measured on Linux
# Throughput is counted per slot, so a benchmark of a model alone uses the slots of one micro-batch: with the
# paper's 768, a single step would take longer than the benchmark.
_BENCHMARK_SLOTS = 32
_COOLING_ADVICE = "Improve the cooling of the machine, or run fewer programs at the same time."


class TrainRow(TypedDict):
    """The keys of a training row in metrics.jsonl that a benchmark needs."""

    step: int
    seconds: float
    samples_per_second: float
    rss_bytes: int
    cpu_percent: float  # of one core


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """Throughput and resource use of a benchmark.

    `memory_efficiency` is the peak as a share of the memory that training may use: the plan's budget or,
    without one, the memory available at the start. Well below 100 there is room for larger micro-batches;
    above 100 these are too large.
    """

    samples_per_second: float  # median of the logged rows, without the first quarter (warm-up)
    memory_efficiency: float  # percent
    cpu_utilization: float  # percent of the available cores
    peak_memory_mb: float  # resident, of the training command and its children together
    steps: int
    seconds: float  # of training, without start-up

    def __getitem__(self, name: str) -> float:
        """`results["samples_per_second"]` is documented in addition to the attribute."""
        value: float = asdict(self)[name]
        return value


class PerformanceBenchmark:
    """Measures training in a temporary directory, which is removed afterwards."""

    def run_full_benchmark(
        self, model_config: JsonMapping, dataset_path: str | Path, duration_minutes: float
    ) -> BenchmarkResult:
        """Train for this long, without evaluation, and return the measurements.

        `model_config` is the model section of a recipe, or a whole recipe.
        """
        from trm.runs.directory import Run  # the one exception to the direction of imports

        if not duration_minutes > 0:
            raise ConfigError(f"duration_minutes is {duration_minutes}; it must be above 0")
        recipe = _recipe(model_config, Path(dataset_path))
        available = psutil.virtual_memory().available
        with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
            directory = Path(name)
            (directory / "recipe.yaml").write_text(recipe, encoding="utf-8")
            peak = _train(directory, duration_minutes)
            plan = read_json(directory / "run" / "plan.json", MIB)
            rows = Run(directory / "run").rows()
        return summarise_rows(rows, peak, plan.get("budget_bytes") or available, available_cores())


def summarise_rows(
    rows: Sequence[JsonMapping], peak_bytes: int, budget_bytes: int, num_cores: int
) -> BenchmarkResult:
    """Summarise the metrics of a run; its peak is `peak_bytes` or the highest in a row if that is higher."""
    train_rows = [cast(TrainRow, row) for row in rows if _is_train_row(row)]
    if not train_rows:
        raise LaptopError(
            "The benchmark ended before its first step was finished", hint="Raise duration_minutes."
        )
    num_warm_up = min(-(-len(train_rows) // 4), len(train_rows) - 1)
    steady_rows = train_rows[num_warm_up:]
    peak_bytes = max(peak_bytes, *(row["rss_bytes"] for row in train_rows))
    return BenchmarkResult(
        samples_per_second=median(row["samples_per_second"] for row in steady_rows),
        memory_efficiency=100 * peak_bytes / budget_bytes,
        cpu_utilization=median(row["cpu_percent"] for row in steady_rows) / num_cores,
        peak_memory_mb=peak_bytes / MIB,
        steps=train_rows[-1]["step"],
        seconds=train_rows[-1]["seconds"],
    )


def _is_train_row(row: JsonMapping) -> bool:
    """Distinguish training from evaluation rows; rows of older runs have no "kind"."""
    if "kind" in row:
        return bool(row["kind"] == "train")
    return "samples_per_second" in row


def available_cores() -> int:
    """Return the cores that this process may use. A container can limit them; macOS has no such limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _recipe(model_config: JsonMapping, dataset: Path) -> str:
    """Return a recipe that trains on the dataset without an end and without evaluation."""
    from trm.config import RunConfig, parse_section

    path = dataset.resolve()
    is_whole_recipe = any(key in RunConfig.model_fields for key in model_config)
    if not is_whole_recipe:
        model_config = {"model": model_config, "training": {"effective_batch_size": _BENCHMARK_SLOTS}}
    tree = {"task": _task_of(path), "data": {"path": path}, **model_config}
    config = parse_section(RunConfig, tree, "the benchmark's recipe")
    changes: dict[str, JsonObject] = {
        "data": {"path": path, "build": None},
        "training": {"max_steps": _UNLIMITED_STEPS},
        "evaluation": {"every_steps": _UNLIMITED_STEPS, "target_accuracy": None},
    }
    sections = {name: getattr(config, name).model_copy(update=update) for name, update in changes.items()}
    return config.model_copy(update=sections).to_yaml()


def _task_of(dataset: Path) -> str:
    from trm.tasks.registry import REFERENCE_TASK

    path = dataset / BUILD_FILE
    if not path.is_file():  # built by the reference implementation, whose layout does not name the task
        return REFERENCE_TASK
    try:
        return str(read_json(path, MAX_JSON_BYTES).get("task", REFERENCE_TASK))
    except OSError as error:
        raise cannot_read(path, error) from error
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path} does not describe how the dataset was built: {error}") from error


def _train(directory: Path, minutes: float) -> int:
    """Run the training command and return its peak resident memory in bytes."""
    program = [sys.executable, "-P", "-c", "from trm.cli import main; main()"]
    arguments = ["train", directory / "recipe.yaml", "--run", directory / "run"]
    command = [*program, *map(str, arguments), "--max-minutes", str(minutes), "--json"]
    messages = directory / "messages"
    with (
        messages.open("w", encoding="utf-8") as stderr,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
        ) as child,
    ):
        try:
            peak = _sample_peak_memory(child)
        finally:
            child.terminate()  # has no effect unless we were interrupted: otherwise it has already ended
            child.wait()  # it may still be saving into the directory that will be removed
    if child.returncode:
        raise _failure(child.returncode, messages.read_text(encoding="utf-8", errors="replace"))
    return peak


def _sample_peak_memory(child: subprocess.Popen[bytes]) -> int:
    """Sample from outside: rows are logged between two steps, when much of the memory is free again."""
    peak = 0
    while True:
        try:
            child.wait(_SAMPLE_SECONDS)
            return peak
        except subprocess.TimeoutExpired:
            peak = max(peak, _resident_bytes(child.pid))


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and all its descendants."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # it ended after it was listed
                total += process.memory_info().rss
    return total


def _failure(code: int, messages: str) -> LaptopError:
    """Return the error of the training command, from its `error:` and `hint:` lines or its exit status."""
    found = re.search(r"^error: (.*?)(?:^hint: (.*?))?\Z", messages.strip(), re.MULTILINE | re.DOTALL)
    if found:
        return LaptopError(f"The benchmark could not train: {found[1].strip()}", hint=found[2])
    cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    last_line = messages.strip().splitlines()[-1:]
    return LaptopError(": ".join([f"The benchmark's training {cause}", *last_line]))


class Bottlenecks(TypedDict):
    """The limits of training speed; None for what was not measured."""

    memory_bottleneck: bool | None
    cpu_underutilization: bool | None
    thermal_issues: int | None  # number of throttling events
    recommendations: list[str]


def analyze_performance_bottlenecks(
    metrics: Mapping[str, Sequence[Any]], total_memory_mb: float | None = None, num_cores: int | None = None
) -> Bottlenecks:
    """Find what limits training, from lists of values.

    `cpu_usage_percent` refers to the whole machine or, with `num_cores`, to one core, as in the metrics of a
    run. `total_memory_mb` is the memory of this machine by default.
    """
    peak_memory_mb = max(metrics.get("memory_usage_mb", ()), default=None)
    peak_cpu_percent = max(metrics.get("cpu_usage_percent", ()), default=None)
    events = metrics.get("thermal_throttling_events")
    if total_memory_mb is None:
        total_memory_mb = psutil.virtual_memory().total / MIB
    is_memory_short = None if peak_memory_mb is None else bool(peak_memory_mb > 0.9 * total_memory_mb)
    is_cpu_idle = None if peak_cpu_percent is None else bool(peak_cpu_percent / (num_cores or 1) < 70)
    num_events = None if events is None else len(events)
    recommendations = []
    if is_memory_short:
        recommendations.append("Use smaller micro-batches, or stream the dataset.")
    if is_cpu_idle:
        recommendations.append("Use more threads or larger micro-batches.")
    if num_events:
        recommendations.append(_COOLING_ADVICE)
    return {
        "memory_bottleneck": is_memory_short,
        "cpu_underutilization": is_cpu_idle,
        "thermal_issues": num_events,
        "recommendations": recommendations,
    }


@dataclass(frozen=True, slots=True)
class MachineLoad:
    memory_percent: float
    cpu_percent: float  # of the cores that training may use
    is_throttling: bool | None  # None where the system does not report it


@dataclass(frozen=True, slots=True)
class Issue:
    problem: str
    advice: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    severity: str  # "none"; "moderate" below 80 % of the expected rate, "severe" below 50 %
    issues: tuple[Issue, ...]


def measure_load(seconds: float = 0.5) -> MachineLoad:
    """Measure the load of the whole machine, this process included, during this many seconds."""
    monitor = ResourceMonitor()
    monitor.get_thermal_state()  # a counter of throttling is compared with its next reading
    return MachineLoad(
        memory_percent=psutil.virtual_memory().percent,
        cpu_percent=psutil.cpu_percent(interval=seconds),
        is_throttling=monitor.get_thermal_state().is_throttling,
    )


def diagnose_slow_training(
    current_sps: float, expected_sps: float, load: MachineLoad | None = None
) -> Diagnosis:
    """Explain slow training by the load of the machine, which takes half a second to measure if not given."""
    check_positive("expected_sps", expected_sps)
    if current_sps >= 0.8 * expected_sps:
        return Diagnosis("none", ())
    load = load or measure_load()
    issues = []
    if load.memory_percent > 90:
        problem = f"{load.memory_percent:.0f} % of memory is in use"
        issues.append(
            Issue(problem, "Close other programs, use smaller micro-batches, or stream the dataset.")
        )
    if load.cpu_percent < 50:
        problem = f"only {load.cpu_percent:.0f} % of the CPU that training may use is busy"
        advice = (
            "Try another number of threads or larger micro-batches, or check which math library torch was "
            "built with."
        )
        issues.append(Issue(problem, advice))
    if load.is_throttling:
        issues.append(Issue("the processor is throttled because it is too hot", _COOLING_ADVICE))
    return Diagnosis("severe" if current_sps < 0.5 * expected_sps else "moderate", tuple(issues))
