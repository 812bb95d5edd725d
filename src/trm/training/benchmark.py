"""`trm bench`: how fast this machine trains.

Every repeat is a process of its own that loads PyTorch, builds a model of a profile's shape and takes real
steps on random tokens: a dataset would change none of the sizes. Repeats are outermost, so that whatever
disturbs the machine for a while disturbs all profiles alike.
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
from typing import Annotated, Any, Literal

import numpy as np
import psutil
from pydantic import Field

from macbook_optimization.children import ChildDied, Tell, run_in_child
from macbook_optimization.cpu_optimization import environment, time_products
from macbook_optimization.errors import AllocationFailed, MemoryBudgetError, RunError
from macbook_optimization.hardware_detection import HardwareSpecs
from macbook_optimization.memory_management import MIB, peak_bytes
from macbook_optimization.performance_reporting import available_cores
from macbook_optimization.resource_monitoring import BackgroundMonitor
from macbook_optimization.training_config_adapter import PROFILES, Profile, profile_for
from trm.backends.base import StepBatch, StepSettings, load_backend
from trm.config import Count, CountOrZero, ModelConfig, Positive, PositiveOrZero, Section, TrainingConfig
from trm.tasks.base import TaskShape
from trm.training.measuring import BUSY_PERCENT
from trm.training.watching import Display

MAX_REPEATS = 100
HERE = "here"
_VOCABULARY = 16  # about a Sudoku's; embedding and head are a small part of any step
_LEARNING_RATE = 1e-6
_PRODUCT = (1024, 1024, 1024)
_LOOK_SECONDS = 0.05
_CHILD_SECONDS = 1800

# Bounded, because reports are read from files, too.
Measured = Annotated[Positive, Field(ge=1e-9, le=1e18)]
Name = Annotated[str, Field(pattern="^[a-z0-9_]{1,20}$")]


class Work(Section):
    """What a repeat does; two results are comparable if this is the same."""

    hidden_size: Count
    num_heads: Count
    L_layers: Count
    H_cycles: Count
    L_cycles: Count
    expansion: Positive
    seq_len: Count
    micro_batch_size: Count
    timed_steps: Count
    threads: Count
    lanes: Count

    @property
    def model(self) -> ModelConfig:
        """Attention with rotary positions: the defaults of a recipe."""
        sizes = {name: value for name, value in self.model_dump().items() if name in ModelConfig.model_fields}
        return ModelConfig(**sizes)

    @property
    def shape(self) -> TaskShape:
        return TaskShape(self.seq_len, _VOCABULARY, _VOCABULARY, num_puzzle_identifiers=1)

    @property
    def training(self) -> TrainingConfig:
        return TrainingConfig(effective_batch_size=self.micro_batch_size)

    @property
    def operations_per_sample(self) -> int:
        return operations_per_sample(self.model, self.seq_len)


class Repeat(Section):
    """What one process measured. Memory and CPU use are of the timed steps, the peak of all of its life."""

    samples_per_second: Annotated[list[Measured], Field(min_length=1)]  # of each timed step
    resident_peak_bytes: CountOrZero
    resident_mean_bytes: CountOrZero
    cpu_percent: PositiveOrZero  # of the cores that this process may use
    product_rate: Measured  # operations per second of a large float32 product on the same threads
    start_seconds: Measured  # from the start of the process to the end of its first step
    first_of_command: bool  # no process before it has read PyTorch from the disk for us


class Results(Section):
    work: Work
    repeats: Annotated[list[Repeat], Field(min_length=1, max_length=MAX_REPEATS)]


class Report(Section):
    kind: Literal["trm bench"]
    schema_version: Literal[1]
    date: datetime
    machine: dict[str, str | int | float | None]
    versions: dict[str, str]
    busy_percent: float  # of all cores, by other programs, just before
    profiles: Annotated[dict[Name, Results], Field(min_length=1)]


def operations_per_sample(model: ModelConfig, seq_len: int, cycles: int | None = None) -> int:
    """Of the matrix products in one step of one example, a multiplication and an addition counted as two.

    A recursion with gradient counts three times: its backward pass multiplies twice as much, by the weights
    and by the activations. Embedding, head, normalisation and optimizer are left out.
    """
    D, L = model.hidden_size, model.prefix_len + seq_len
    if model.candidates:
        L, mixing = L * math.isqrt(L), 0
    elif model.mlp_t:
        mixing = 3 * L * model.inner_width(L) * D
    elif model.neighbourhood:
        mixing = model.neighbourhood**2 * L * D
    else:
        mixing = 4 * D * D * L + 2 * L * L * D
    network = 3 * D * model.inner_width(D) * L
    levels = 1 if model.variant == "transformer" else model.L_cycles + 1
    levels *= (cycles or model.cycles_per_step) - 1 + 3
    return 2 * (mixing + network) * model.num_layers * levels


def chosen_profiles(names: Sequence[str], total_memory: int) -> list[Profile]:
    """In the order that they were asked for, each once."""
    by_name = {profile.name: profile for profile in PROFILES}
    own = profile_for(total_memory)
    return list(dict.fromkeys(own if name == HERE else by_name[name] for name in names))


def measure(
    profiles: Sequence[Profile],
    repeats: int,
    hardware: HardwareSpecs,
    display: Display,
    timed_steps: int = 1,
) -> Report:
    busy = psutil.cpu_percent(interval=0.2)
    if busy > BUSY_PERCENT:
        display.message(busy_words(busy))
    work = {p.name: _work(p, hardware.cpu.compute_threads, timed_steps) for p in profiles}
    larger = [p for p in profiles if p.memory_gb > profile_for(hardware.memory.total_memory).memory_gb]
    for profile in larger:
        _check_memory(profile.name, work[profile.name], hardware.memory.available_memory)
    steps = 1 + timed_steps
    found: dict[str, list[Repeat]] = {name: [] for name in work}
    for done, (number, name) in enumerate(product(range(repeats), work)):
        what, total = f"repeat {number + 1} of {repeats}, {name}", repeats * len(work) * steps
        show = partial(_show, display, what, done * steps, total)
        show(0)
        found[name].append(_repeat(name, work[name], show, first_of_command=not larger and done == 0))
    return Report(
        kind="trm bench",
        schema_version=1,
        date=datetime.now(UTC).replace(microsecond=0),
        machine=_machine(hardware),
        versions=_versions(),
        busy_percent=busy,
        profiles={name: Results(work=work[name], repeats=found[name]) for name in work},
    )


def busy_words(percent: float) -> str:
    return f"Other programs used {percent:.0f} % of the CPU just before: training is faster without them."


def _show(display: Display, what: str, before: int, total: int, step: int) -> None:
    display.update("measuring", before + step, total, what)


def _work(profile: Profile, threads: int, timed_steps: int) -> Work:
    """The step has one micro-batch. As many lanes as divide both it and the threads: none is left over."""
    defaults = ModelConfig()
    return Work(
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
        lanes=math.gcd(threads, profile.batch_size),
    )


def _machine(hardware: HardwareSpecs) -> dict[str, str | int | float | None]:
    cpu, memory = hardware.cpu, hardware.memory
    facts = {"brand": cpu.brand, "architecture": cpu.architecture, "cores": cpu.cores, "quota": cpu.quota}
    return {**facts, "memory_bytes": memory.total_memory, "system": platform.system()}


def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "numpy", "macbook-trm")}
    return {"python": platform.python_version(), **packages}


def _check_memory(name: str, work: Work, available_bytes: int) -> None:
    """For a profile beyond the machine's own: swapping would measure the disk."""
    needed = _in_child("memory_needed", name, work)
    if needed > available_bytes:
        raise MemoryBudgetError(
            f"The {name} profile needs about {needed // MIB:,} MiB; {available_bytes // MIB:,} MiB are free.",
            hint="Close other programs, or measure a smaller profile.",
        )


def memory_needed(work: dict[str, Any], tell: Tell) -> int:
    """The body of a child: worked out, not taken."""
    job, backend = Work.model_validate(work), load_backend()
    backend.warm_up()
    step = backend.estimate_memory(job.model, job.training, job.shape)
    return peak_bytes() + step.peak_bytes(job.micro_batch_size)


def _repeat(name: str, work: Work, show: Callable[[int], None], first_of_command: bool) -> Repeat:
    started = time.perf_counter()
    ends: list[float] = []

    def hear(step: int) -> None:
        ends.append(time.perf_counter())
        show(step)

    found = _in_child("take_steps", name, work, hear)
    return Repeat(**found, start_seconds=ends[0] - started, first_of_command=first_of_command)


def _in_child(function: str, name: str, work: Work, tell: Tell = lambda row: None) -> Any:
    try:
        return run_in_child(
            f"{__name__}:{function}", {"work": work.model_dump()}, tell=tell,
            environment=environment(work.threads), timeout_seconds=_CHILD_SECONDS,
        )  # fmt: skip
    except ChildDied as death:
        if death.of_memory:
            raise _does_not_fit(name) from death
        hint = "Measure a smaller profile." if death.timed_out else "This is a bug."
        raise RunError(f"The process that measured {name} {death}.", hint=hint) from death
    except (AllocationFailed, MemoryBudgetError) as error:
        raise _does_not_fit(name) from error


def _does_not_fit(name: str) -> MemoryBudgetError:
    return MemoryBudgetError(
        f"The {name} profile does not fit into the memory that is free.",
        hint="Close other programs, or measure a smaller profile.",
    )


def take_steps(work: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """The body of the child. The first step starts threads and takes memory, and is not timed."""
    job, backend = Work.model_validate(work), load_backend()
    backend.prepare(threads=job.threads, deterministic=False)
    learner = backend.learner(job.model, job.training, job.shape, 0, "none", job.lanes)
    batch = random_batch(job.micro_batch_size, job.shape)

    def seconds_of_step(number: int) -> float:
        settings = StepSettings(number, job.model.cycles_per_step, _LEARNING_RATE, _LEARNING_RATE)
        started = time.perf_counter()
        learner.step(batch, settings, lambda done: job.micro_batch_size)
        seconds = time.perf_counter() - started
        tell(number)
        return seconds

    seconds_of_step(1)
    with _ResidentMonitor() as resident:
        cpu_before, before = time.process_time(), time.perf_counter()
        seconds = [seconds_of_step(2 + number) for number in range(job.timed_steps)]
        cpu_seconds, elapsed = time.process_time() - cpu_before, time.perf_counter() - before
    return {
        "samples_per_second": [job.micro_batch_size / each for each in seconds],
        "resident_peak_bytes": peak_bytes(),
        "resident_mean_bytes": round(fmean(resident.seen)),
        "cpu_percent": 100 * cpu_seconds / elapsed / available_cores(),
        "product_rate": time_products("float32", [job.threads], _PRODUCT)[job.threads],
    }


def random_batch(slots: int, shape: TaskShape) -> StepBatch:
    tokens = np.random.default_rng(0).integers(1, shape.vocab_size, (2, slots, shape.seq_len))
    zeros = np.zeros(slots, dtype=np.int64)
    return StepBatch(tokens[0], tokens[1], zeros, fresh=np.ones(slots, dtype=bool))


class _ResidentMonitor(BackgroundMonitor):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def start_monitoring(self, interval: float = _LOOK_SECONDS) -> None:
        self.look()
        super().start_monitoring(interval)

    def look(self) -> None:
        self.seen.append(psutil.Process().memory_info().rss)
