"""`trm bench`: how fast this machine trains.

Each repeat is a new process that loads PyTorch, builds a model with the sizes of a profile and takes real
steps on random tokens. A dataset would change none of these sizes. Repeats are the outer loop, so a
disturbance that lasts a while affects all profiles alike.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import product
from statistics import fmean
from typing import Any, TypedDict

import numpy as np
import psutil

from macbook_optimization.background_monitor import BackgroundMonitor
from macbook_optimization.children import ChildDied, Send, run_in_child
from macbook_optimization.cpu_optimization import environment, time_products
from macbook_optimization.errors import AllocationFailed, MemoryBudgetError, RunError
from macbook_optimization.hardware_detection import HardwareSpecs
from macbook_optimization.json_types import JsonMapping
from macbook_optimization.memory_management import peak_bytes
from macbook_optimization.performance_reporting import available_cores
from macbook_optimization.resource_monitoring import other_cpu_percent
from macbook_optimization.training_config_adapter import PROFILES, Profile, profile_for
from macbook_optimization.units import MIB
from trm.backends.base import SingleProcess, StepSettings, load_backend
from trm.batch import Batch
from trm.config import ModelConfig
from trm.display import Display
from trm.machine.benchmark_records import SCHEMA_VERSION, Repeat, Report, Results, Workload
from trm.machine.text import load_warning
from trm.planning.cache import versions
from trm.tasks.base import DataSpec

THIS_MACHINE = "here"  # in the place of a profile's name
_LEARNING_RATE = 1e-6
_PRODUCT_SHAPE = (1024, 1024, 1024)
_MEMORY_SAMPLE_SECONDS = 0.05
_CHILD_TIMEOUT_SECONDS = 1800
_TRY_SMALLER = "Close other programs, or measure a smaller profile."


def select_profiles(names: Sequence[str], total_memory: int) -> list[Profile]:
    """Return profiles in the order of their names, each once; "here" is the one for this much memory."""
    by_name = {profile.name: profile for profile in PROFILES}
    by_name[THIS_MACHINE] = profile_for(total_memory)
    return list(dict.fromkeys(by_name[name] for name in names))


def measure(
    profiles: Sequence[Profile],
    repeats: int,
    hardware: HardwareSpecs,
    display: Display,
    timed_steps: int = 1,
) -> Report:
    """Measure every profile this many times. Raises `MemoryBudgetError` if one does not fit into memory."""
    busy_percent = other_cpu_percent()
    if warning := load_warning(busy_percent):
        display.message(warning)
    threads = hardware.cpu.compute_threads
    workloads = {profile.name: workload_of(profile, threads, timed_steps) for profile in profiles}
    own = profile_for(hardware.memory.total_memory)
    larger = [profile.name for profile in profiles if profile.memory_gb > own.memory_gb]
    for name in larger:
        _check_memory(name, workloads[name], hardware.memory.available_memory)
    steps = 1 + timed_steps
    total = repeats * len(workloads) * steps
    measured: dict[str, list[Repeat]] = {name: [] for name in workloads}
    for done, (number, name) in enumerate(product(range(repeats), workloads)):
        show = partial(
            _show_progress, display, f"repeat {number + 1} of {repeats}, {name}", done * steps, total
        )
        show(0)
        first = done == 0 and not larger  # checking the memory has loaded PyTorch already
        measured[name].append(_repeat(name, workloads[name], show, first_of_command=first))
    return Report(
        kind="trm bench",
        schema_version=SCHEMA_VERSION,
        date=datetime.now(UTC).replace(microsecond=0),
        machine=_describe_machine(hardware),
        versions={**versions(), "macbook-trm": version("macbook-trm")},
        busy_percent=busy_percent,
        profiles={name: Results(work=workloads[name], repeats=measured[name]) for name in workloads},
    )


def _show_progress(display: Display, what: str, done_before: int, total: int, step: int) -> None:
    display.update("measuring", done_before + step, total, what)


def workload_of(profile: Profile, threads: int, timed_steps: int) -> Workload:
    """Return the steps that measure a profile.

    A step is one micro-batch. The number of workers divides both it and the threads, so none is idle.
    """
    defaults = ModelConfig()
    return Workload(
        hidden_size=profile.hidden_size,
        num_heads=profile.num_heads,
        L_layers=profile.L_layers,
        H_cycles=defaults.H_cycles,
        L_cycles=defaults.L_cycles,
        expansion=profile.expansion,
        seq_len=profile.max_sequence_length,
        micro_batch_size=profile.batch_size,
        timed_steps=timed_steps,
        threads=threads,
        workers=math.gcd(threads, profile.batch_size),
    )


def _describe_machine(hardware: HardwareSpecs) -> dict[str, str | int | float | None]:
    cpu = hardware.cpu
    return {
        "brand": cpu.brand,
        "architecture": cpu.architecture,
        "cores": cpu.cores,
        "quota": cpu.quota,
        "memory_bytes": hardware.memory.total_memory,
        "system": platform.system(),
    }


def _check_memory(name: str, workload: Workload, available_bytes: int) -> None:
    """Refuse a profile for larger machines if it would swap, which would measure the disk."""
    needed: int = _run_in_child("estimate_peak_bytes", name, workload)
    if needed > available_bytes:
        raise MemoryBudgetError(
            f"The {name} profile needs about {needed // MIB:,} MiB; {available_bytes // MIB:,} MiB is free.",
            hint=_TRY_SMALLER,
        )


def _repeat(name: str, workload: Workload, show: Callable[[int], None], *, first_of_command: bool) -> Repeat:
    started = time.perf_counter()
    step_ends: list[float] = []

    def after_step(step: int) -> None:
        step_ends.append(time.perf_counter())
        show(step)

    measured: StepMeasurements = _run_in_child("take_steps", name, workload, after_step)
    return Repeat(**measured, start_seconds=step_ends[0] - started, first_of_command=first_of_command)


def _run_in_child(function: str, name: str, workload: Workload, on_row: Send = lambda row: None) -> Any:
    try:
        return run_in_child(
            f"{__name__}:{function}",
            {"workload": workload.model_dump()},
            on_row=on_row,
            environment=environment(workload.threads),
            timeout_seconds=_CHILD_TIMEOUT_SECONDS,
        )
    except ChildDied as death:
        if death.may_be_out_of_memory:
            raise _does_not_fit(name) from death
        hint = "Measure a smaller profile." if death.timed_out else "This is a bug."
        raise RunError(f"The process that measured {name} {death}.", hint=hint) from death
    except (AllocationFailed, MemoryBudgetError) as error:
        raise _does_not_fit(name) from error


def _does_not_fit(name: str) -> MemoryBudgetError:
    return MemoryBudgetError(f"The {name} profile does not fit into the free memory.", hint=_TRY_SMALLER)


def estimate_peak_bytes(workload: JsonMapping, send: Send) -> int:
    """Estimate the peak of a repeat without allocating it. Runs in a child process."""
    work = Workload.model_validate(workload)
    backend = load_backend(work.execution)
    backend.warm_up()
    step = backend.estimate(work.program, work.execution)
    return peak_bytes() + step.peak_bytes(work.micro_batch_size)


class StepMeasurements(TypedDict):
    """The result of a child; the fields are those of `Repeat`."""

    samples_per_second: list[float]
    resident_peak_bytes: int
    resident_mean_bytes: int
    cpu_percent: float
    product_rate: float


def take_steps(workload: JsonMapping, send: Send) -> StepMeasurements:
    """Measure some steps. Runs in a child process.

    The first step starts threads and allocates memory, so it is not timed.
    """
    work = Workload.model_validate(workload)
    program = work.program
    size = work.micro_batch_size
    backend = load_backend(work.execution)
    backend.prepare(work.execution)
    learner = backend.learner(program, work.execution, SingleProcess(program.num_slots))
    batch = random_batch(size, program.data)

    def seconds_of_step(number: int) -> float:
        settings = StepSettings(number, program.model.cycles_per_step, _LEARNING_RATE, _LEARNING_RATE)
        started = time.perf_counter()
        learner.step(batch, settings, lambda done: size)
        seconds = time.perf_counter() - started
        send(number)
        return seconds

    seconds_of_step(1)
    with _ResidentMemory() as resident:
        cpu_started = time.process_time()
        started = time.perf_counter()
        seconds = [seconds_of_step(2 + number) for number in range(work.timed_steps)]
        elapsed = time.perf_counter() - started
        cpu_seconds = time.process_time() - cpu_started
    return {
        "samples_per_second": [size / each for each in seconds],
        "resident_peak_bytes": peak_bytes(),
        "resident_mean_bytes": round(fmean(resident.samples)),
        "cpu_percent": 100 * cpu_seconds / elapsed / available_cores(),
        "product_rate": time_products("float32", [work.threads], _PRODUCT_SHAPE)[work.threads],
    }


def random_batch(num_slots: int, data: DataSpec) -> Batch:
    """Return the same random tokens and labels for every call. No input is padding."""
    generator = np.random.default_rng(0)
    shape = (num_slots, data.max_len)
    return Batch(
        slots=np.arange(num_slots),
        inputs=generator.integers(1, data.vocab_size, shape),
        labels=generator.integers(1, data.num_outputs, shape),
        puzzle_identifiers=np.zeros(num_slots, dtype=np.int64),
        fresh=np.ones(num_slots, dtype=bool),
    )


class _ResidentMemory(BackgroundMonitor):
    """Samples the resident memory of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[int] = []

    def start_monitoring(self, interval: float = _MEMORY_SAMPLE_SECONDS) -> None:
        self.sample()
        super().start_monitoring(interval)

    def sample(self) -> None:
        self.samples.append(psutil.Process().memory_info().rss)
