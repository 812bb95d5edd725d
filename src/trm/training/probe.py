"""A few real steps in a child process: what they take of memory and time.

The child does what the trainer will do (the same imports, data, steps, an evaluation), with a few slots at a
time and growing cuts. Every size is told as soon as it is measured, so a child that dies has not measured in
vain. On Linux it is given no more address space than there is memory, so that a step that does not fit
fails at once instead of driving the machine into swap.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from macbook_optimization import progress_monitoring  # noqa: F401 - the trainer loads it, so it counts
from macbook_optimization.children import Tell
from macbook_optimization.errors import AllocationFailed, MemoryBudgetError
from macbook_optimization.memory_management import (
    MIB,
    MemoryModel,
    MemoryMonitor,
    line_through,
    peak_address_space,
    peak_bytes,
)
from macbook_optimization.training_config_adapter import Checkpointing
from trm.backends.base import StepSettings, load_backend
from trm.config import EvaluationConfig, RunConfig
from trm.runs import DEFAULT_PLAN
from trm.tasks import load_task
from trm.tasks.base import TaskShape, open_split
from trm.training.evaluation import EVALUATION_CUT
from trm.training.state import TrainingState

FIRST_SIZE = 4
SECONDS_FOR_A_SIZE = 8.0  # the further apart two sizes are, the better the line; this bounds it
SPREAD = 32  # and so does this
NEARLY_AS_FAST = 0.95
Way = tuple[int, int]  # threads, and lanes that share them
ROUNDS_FOR_WAYS, SECONDS_FOR_A_WAY, SECONDS_FOR_WAYS = 3, 0.2, 8.0
TRAINERS_OWN_BYTES = 10 * MIB  # display, log and checkpoints, by bench/memory_prediction.py


@dataclass(frozen=True, slots=True)
class Size:
    """What steps with this many examples at a time took."""

    micro_batch_size: int
    peak_bytes: int
    peak_address_space: int | None
    samples_per_second: float


def probe(
    config: Mapping[str, Any],
    precision: str,
    gradient_checkpointing: Checkpointing,
    ways: Sequence[Sequence[int]],
    budget_bytes: int,
    available_bytes: int,
    tell: Tell,
) -> dict[str, Any]:
    """Tells the sizes that a line is drawn through, and returns samples per second by size and by way, and
    whether there are as many sizes as are worth keeping.

    Memory is measured at two or three sizes only, before anything else: a process that has seen many sizes
    has a heap full of holes, and its peak says little about one that keeps to a single size.
    """
    recipe = RunConfig.model_validate(config)
    stepper = Stepper(recipe, precision, gradient_checkpointing, max((t, n) for t, n in ways))
    MemoryMonitor().start_monitoring()  # a thread takes address space; the trainer has this one too
    _limit_address_space(available_bytes)
    stepper.begin()
    empty, num_slots = peak_bytes(), recipe.training.effective_batch_size
    sizes: list[Size] = []
    try:
        size = 1
        while not sizes or size > sizes[-1].micro_batch_size:
            sizes.append(stepper.measure(size))
            tell(asdict(sizes[-1]))
            size = next_size(sizes, num_slots, empty, budget_bytes)
    except AllocationFailed:
        if not sizes:
            raise MemoryBudgetError("Not even one example fits.") from None
    whole = next_size(sizes, num_slots, empty, sys.maxsize) <= sizes[-1].micro_batch_size
    rates = {size.micro_batch_size: size.samples_per_second for size in sizes}
    with suppress(AllocationFailed):
        rates |= stepper.measure_between(sizes)
    by_way: dict[Way, float] = {}
    with suppress(AllocationFailed):
        best = max(rates.values())
        size = min(size for size, rate in rates.items() if rate >= NEARLY_AS_FAST * best)
        by_way = stepper.measure_ways(size, [(t, n) for t, n in ways if n <= size])
    return {"whole": whole, "rates": rates, "ways": [(*way, rate) for way, rate in by_way.items()]}


def next_size(sizes: Sequence[Size], num_slots: int, empty_bytes: int, budget_bytes: int) -> int:
    """After one example a few; then as many as time and memory allow, but twice as many even if that takes
    longer. Where even a few take long, one example outweighs what is fixed, and two are enough for a line."""
    last = sizes[-1]
    size = last.micro_batch_size
    by_time = int(last.samples_per_second * SECONDS_FOR_A_SIZE / Stepper.PASSES)
    if size == 1:
        return min(num_slots, FIRST_SIZE if by_time >= FIRST_SIZE else 2)
    if len(sizes) > 2 or size < FIRST_SIZE:
        return size
    per_example = max(1, last.peak_bytes - empty_bytes) / size
    fits = int((budget_bytes - empty_bytes) / per_example)
    return min(num_slots, fits, max(2 * size, min(by_time, SPREAD * size)))


def memory_line(sizes: Sequence[Size]) -> MemoryModel:
    """Through the two largest sizes: below four small examples, a step's fixed memory hides theirs."""
    return line_through([(s.micro_batch_size, s.peak_bytes + TRAINERS_OWN_BYTES) for s in sizes[-2:]])


def address_line(sizes: Sequence[Size]) -> MemoryModel | None:
    measured = [(s.micro_batch_size, s.peak_address_space) for s in sizes[-2:]]
    known = [(n, peak) for n, peak in measured if peak is not None]
    return line_through(known) if known else None


def _limit_address_space(more_bytes: int) -> None:
    now = peak_address_space()
    if sys.platform != "linux" or now is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = now + more_bytes
    if soft == resource.RLIM_INFINITY or wanted < soft:
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def typical_cycles(config: RunConfig) -> int:
    """Recursions of most steps of a run, as many as half of them have when they are drawn."""
    if config.training.supervision == "deep":
        return config.model.cycles_per_step
    return (1 + max(config.training.depths.values())) // 2


class Stepper:
    """A trainer of the recipe, of whose steps only the first few slots are computed."""

    PASSES = 3  # how often `measure` computes its examples

    def __init__(self, config: RunConfig, precision: str, checkpointing: Checkpointing, way: Way) -> None:
        self.config, self.precision, self.checkpointing = config, precision, checkpointing
        self.backend = load_backend()
        self.threads, self.lanes = way
        self.backend.prepare(threads=self.threads, deterministic=config.training.deterministic)
        path = config.data.path  # checked by who starts a probe
        self.splits = tuple(open_split(path, name, trusted={}) for name in ("train", "test"))
        self.step = 0

    def begin(self) -> None:
        config, train = self.config, self.splits[0]
        make_learner = partial(
            self.backend.learner, config.model_in(self.precision), config.training, train.shape, config.seed,
            self.checkpointing, self.lanes,
        )  # fmt: skip
        state = TrainingState(config, DEFAULT_PLAN, load_task(config.task), train, make_learner)
        self.learner = state.learner
        self.batch = state.batch(state.slots.refilled(), step=1)

    def some_slots(self, size: int, cuts: int) -> float:
        """Seconds for a step of so many cuts."""
        self.step += 1
        cycles = typical_cycles(self.config)
        settings = StepSettings(self.step, cycles, learning_rate=1e-6, puzzle_emb_lr=1e-6)
        batch = self.batch.first(size * cuts)
        started = time.perf_counter()
        self.learner.step(batch, settings, lambda done: size)
        return (time.perf_counter() - started) / len(batch.inputs)

    def measure(self, size: int) -> Size:
        """Two cuts in a step, then one: a single step under-reads the steady peak by a tenth."""
        self.some_slots(size, cuts=2)
        seconds = self.some_slots(size, cuts=1)
        self._evaluate(EVALUATION_CUT * size)
        return Size(size, peak_bytes(), peak_address_space(), 1 / seconds)

    def _evaluate(self, count: int) -> None:
        """Twice: while the second answer forms, the latents of the first are still there."""
        test = self.splits[1]
        examples = np.arange(count) % len(test)
        inputs, _ = test.rows(examples)
        self.learner.answerer().answer(inputs, test.identifiers(examples), EvaluationConfig(depth=2))

    def measure_between(self, sizes: Sequence[Size]) -> dict[int, float]:
        """Samples per second of the sizes between the two, by doubling."""
        size, rates = 2 * FIRST_SIZE, {}
        while size < sizes[-1].micro_batch_size:
            self.some_slots(size, cuts=1)
            rates[size] = 1 / self.some_slots(size, cuts=1)
            size *= 2
        return rates

    def measure_ways(self, size: int, ways: Sequence[Way]) -> dict[Way, float]:
        """The best of several, interleaved: noise only ever makes a step slower."""
        best: dict[Way, float] = {}
        started = time.monotonic()
        for _ in range(ROUNDS_FOR_WAYS if len(ways) > 1 else 0):
            if best and time.monotonic() - started > SECONDS_FOR_WAYS:
                break
            for threads, lanes in ways:
                self.backend.prepare(threads=threads, deterministic=self.config.training.deterministic)
                self.learner.set_lanes(lanes)
                best[threads, lanes] = max(best.get((threads, lanes), 0.0), self._best_rate(size))
        return best

    def _best_rate(self, size: int) -> float:
        """After a first step, in which threads start, unless that one already took the time."""
        started = time.monotonic()
        seconds = [self.some_slots(size, cuts=1)]
        while time.monotonic() - started < SECONDS_FOR_A_WAY:
            seconds.append(self.some_slots(size, cuts=1))
        return 1 / min(seconds)


def estimate(
    recipes: Sequence[Mapping[str, Any]],
    shape: Mapping[str, int],
    gradient_checkpointing: Checkpointing,
    tell: Tell,
) -> list[dict[str, Any]]:
    """For each recipe the memory that its process should need, without taking it.

    The empty process is measured. What the recipes keep is told first: the rest takes some memory itself,
    and may not get it.
    """
    backend = load_backend()
    MemoryMonitor().start_monitoring()
    backend.warm_up()
    tell({"process": peak_bytes(), "address_space": peak_address_space()})
    configs = [RunConfig.model_validate(tree) for tree in recipes]
    task_shape = TaskShape(**shape)
    tell({"state": [backend.state_bytes(config.model, config.training, task_shape) for config in configs]})
    return [
        asdict(backend.estimate_memory(config.model, config.training, task_shape, gradient_checkpointing))
        for config in configs
    ]
