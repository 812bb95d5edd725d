"""A few real steps in a child process: what they take of memory and time.

The child does what the trainer will do (the same imports, data, steps, an evaluation) with a few slots at a
time and growing micro-batches. Every size is reported as soon as it is measured, so a child that dies has not
measured in vain. On Linux it gets no more address space than there is memory, so that a step that does not
fit fails immediately instead of driving the machine into swap.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from macbook_optimization import progress_monitoring  # noqa: F401 - the trainer loads it, so it counts
from macbook_optimization.children import Send
from macbook_optimization.errors import AllocationFailed, MemoryBudgetError
from macbook_optimization.json_types import JsonMapping, JsonObject
from macbook_optimization.memory_management import MemoryMonitor, peak_address_space
from macbook_optimization.resource_monitoring import CpuLoad
from trm.backends.base import Program, SingleProcess, StepSettings, load_backend
from trm.config import RunConfig
from trm.feed import Feed
from trm.plan import EVALUATION_FACTOR, Execution
from trm.planning.measurements import Measurements, Parallelism, SizeResult
from trm.planning.row_widths import row_widths
from trm.planning.tuning import Trial, search
from trm.schedule import typical_cycles
from trm.slots import Slots
from trm.tasks.dataset import open_split
from trm.tasks.registry import load_task

FIRST_SIZE = 4
SIZE_SECONDS = 8.0  # the further apart two sizes are, the better the memory model; this bounds it
SIZE_RATIO = 32  # and so does this
RATE_SECONDS = 0.2  # per reading of a throughput
CONFIRM_SECONDS = 10.0  # for measuring fast sizes again
PARALLELISM_SECONDS = 8.0


def probe(
    config: JsonMapping,
    execution: JsonMapping,
    choices: Sequence[Sequence[int]],
    budget_bytes: int,
    available_bytes: int,
    send: Send,
) -> JsonObject:
    """Report sizes as they are measured; return all measurements, and whether they are complete.

    Memory is measured at two or three sizes only, before anything else: a process that has seen many sizes
    has a fragmented heap, and its peak says little about one that keeps to a single size.
    """
    recipe = RunConfig.model_validate(config)
    pairs = [Parallelism(*each) for each in choices]
    stepper = Stepper(recipe, replace(Execution(**execution), **max(pairs)._asdict()))
    MemoryMonitor().start_monitoring()  # a thread takes address space; the trainer has this one too
    _limit_address_space(available_bytes)
    load = CpuLoad()
    stepper.begin()
    rule = ProbeSizes(recipe.training.effective_batch_size, stepper.peak_bytes(), budget_bytes)
    measured = _Driver(stepper, rule, send).run(pairs)
    if not measured.sizes:
        raise MemoryBudgetError("Not even one example fits.")
    unlimited = replace(rule, budget_bytes=sys.maxsize)
    return {
        **measured.to_json(),
        "complete": unlimited(measured.sizes) is None,
        "other_cpu_percent": load.read().other_percent,
    }


@dataclass(frozen=True, slots=True)
class ProbeSizes:
    """The next micro-batch size to measure.

    One example first, then a few; then as many as time and memory allow, but twice as many even if that takes
    longer. Where even a few take long, one example outweighs what is fixed, and two are enough for a line.
    """

    num_slots: int
    empty_bytes: int  # of the process before its first step
    budget_bytes: int

    def __call__(self, sizes: Sequence[SizeResult]) -> int | None:
        if not sizes:
            return 1
        last = sizes[-1]
        if self.exceeded_by(last):
            return None
        following = self._following(sizes, last)
        return following if following > last.micro_batch_size else None

    def exceeded_by(self, size: SizeResult) -> bool:
        """Return whether this one example is too much already, so that nothing else is worth measuring."""
        return size.micro_batch_size == 1 and size.peak_bytes > self.budget_bytes

    def _following(self, sizes: Sequence[SizeResult], last: SizeResult) -> int:
        size = last.micro_batch_size
        by_time = int(last.samples_per_second * SIZE_SECONDS / Stepper.PASSES)
        if size == 1:
            return min(self.num_slots, FIRST_SIZE if by_time >= FIRST_SIZE else 2)
        if len(sizes) > 2 or size < FIRST_SIZE:
            return size
        per_example = max(1, last.peak_bytes - self.empty_bytes) / size
        fitting = int((self.budget_bytes - self.empty_bytes) / per_example)
        return min(self.num_slots, fitting, max(2 * size, min(by_time, SIZE_RATIO * size)))


class _Driver:
    """Runs the search with a stepper, within limits of time."""

    def __init__(self, stepper: Stepper, rule: ProbeSizes, send: Send) -> None:
        self.stepper = stepper
        self.rule = rule
        self.send = send
        self.is_too_large = False
        self.phase_began: dict[str, float] = {}

    def run(self, choices: Sequence[Parallelism]) -> Measurements:
        trials = search(choices, self.rule)
        try:
            trial = next(trials)
            while True:
                trial = trials.send(self._measure(trial))
        except StopIteration as end:
            measured: Measurements = end.value
            return measured

    def _measure(self, trial: Trial) -> SizeResult | None:
        began = self.phase_began.setdefault(trial.phase, time.monotonic())
        limits = {"confirm": CONFIRM_SECONDS, "parallelism": PARALLELISM_SECONDS}
        if self.is_too_large or time.monotonic() - began > limits.get(trial.phase, float("inf")):
            return None
        try:
            if trial.phase == "sizes":
                result = self.stepper.measure(trial.micro_batch_size)
                self.send(asdict(result))
                self.is_too_large = self.rule.exceeded_by(result)
                return result
            self.stepper.use(trial.parallelism)
            rate = self.stepper.best_rate(trial.micro_batch_size)
        except AllocationFailed:
            return None
        return self.stepper.result(trial.micro_batch_size, rate)


def _limit_address_space(more_bytes: int) -> None:
    now = peak_address_space()
    if sys.platform != "linux" or now is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = now + more_bytes
    if soft == resource.RLIM_INFINITY or wanted < soft:
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


class Stepper:
    """A trainer of the recipe that computes only the first few slots of each step."""

    PASSES = 3  # how often `measure` computes its examples

    def __init__(self, config: RunConfig, execution: Execution) -> None:
        self.config = config
        self.execution = execution
        self.backend = load_backend(execution)
        self.backend.prepare(execution)
        # Whoever starts a probe has verified the data.
        self.train, self.test = (
            open_split(config.data.path, name, verified={}) for name in ("train", "test")
        )
        self.step = 0

    def begin(self) -> None:
        config = self.config
        task = load_task(config.task)
        program = Program.of(config, task.complete(self.train.spec))
        num_slots = program.num_slots
        self.learner = self.backend.learner(program, self.execution, SingleProcess(num_slots))
        batch = Feed(config, task, self.train).batch(Slots.new(num_slots).refilled(), step=1)
        widths = row_widths(config)  # the first rows, which are computed, are the longest of a step
        self.batch = batch if widths is None else replace(batch, lengths=np.array(widths))

    def use(self, parallelism: Parallelism) -> None:
        self.execution = replace(self.execution, **parallelism._asdict())
        self.learner.reconfigure(self.execution)

    def compile_for(self, size: int | None) -> None:
        self.execution = replace(self.execution, compiled_size=size)
        self.learner.reconfigure(self.execution)

    def seconds_per_slot(self, size: int, micro_batches: int = 1) -> float:
        """Take one step of this many micro-batches."""
        self.step += 1
        cycles = typical_cycles(self.config.model, self.config.training)
        settings = StepSettings(self.step, cycles, 1e-6, 1e-6)
        batch = self.batch[: size * micro_batches]
        started = time.perf_counter()
        self.learner.step(batch, settings, lambda done: size)
        return (time.perf_counter() - started) / len(batch)

    def measure(self, size: int) -> SizeResult:
        """Take a step of two micro-batches and one of one: a single step under-reads the peak by a tenth."""
        self.seconds_per_slot(size, micro_batches=2)
        result = self.result(size, 1 / self.seconds_per_slot(size))
        if self.config.evaluation.every_steps is None:
            return result
        self._evaluate(EVALUATION_FACTOR * size)
        return replace(self.result(size, result.samples_per_second), step_bytes=result.peak_bytes)

    def result(self, size: int, samples_per_second: float) -> SizeResult:
        return SizeResult(size, self.peak_bytes(), peak_address_space(), samples_per_second)

    def peak_bytes(self) -> int:
        return self.backend.peak_bytes(self.execution)

    def best_rate(self, size: int) -> float:
        """Return the best throughput after a first step, in which threads start, unless that takes long."""
        started = time.monotonic()
        seconds = [self.seconds_per_slot(size)]
        while time.monotonic() - started < RATE_SECONDS or len(seconds) < 2:
            seconds.append(self.seconds_per_slot(size))
        return 1 / min(seconds)

    def _evaluate(self, count: int) -> None:
        """Take two inference steps: during the second, the latents of the first are still there.

        An evaluation begins with the longest rows.
        """
        longest = np.arange(len(self.test))
        if self.test.lengths is not None:
            longest = np.argsort(-self.test.lengths.astype(np.int64))
        batch = self.test.batch(np.resize(longest, count)).trimmed()
        if self.config.model.kind == "decoder":
            self.learner.language_model().token_losses(batch)
            return
        predictor = self.learner.predictor()
        predictor.begin(batch)
        for _ in range(2):
            predictor.advance(np.arange(count), batch.inputs)
