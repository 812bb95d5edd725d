"""Auto-tuning during warm-up: the first training steps try different micro-batch sizes and thread counts.

A recipe learns the same for every plan, so the steps that are measured are steps of the run itself, which
starts immediately with the smallest micro-batch. Larger ones are tried as far as the memory of the smaller
ones predicts that they fit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from macbook_optimization.errors import AllocationFailed
from macbook_optimization.memory_management import MARGIN, MemoryManager, peak_address_space, peak_bytes
from macbook_optimization.resource_monitoring import CpuLoad
from trm.plan import Plan
from trm.planning.measurements import Measurements, Parallelism, SizeResult, memory_model
from trm.planning.planner import Planner
from trm.planning.tuning import LARGE_ENOUGH, Trial, search
from trm.schedule import cycles_of_step, typical_cycles

TRIAL_SECONDS = 0.25
CLEARLY_SLOWER = 0.85
BACKWARD_CYCLES = 2  # a recursion with gradient takes as long as three without: two more than its own


@dataclass(frozen=True, slots=True)
class DoublingSizes:
    """The next micro-batch size to try: twice the last one, until two are slow or it should not fit."""

    first: int
    num_slots: int
    budget_bytes: int
    largest: int = LARGE_ENOUGH

    def __call__(self, sizes: Sequence[SizeResult]) -> int | None:
        if not sizes:
            return min(self.first, self.num_slots)
        last = sizes[-1]
        fast = CLEARLY_SLOWER * max(each.samples_per_second for each in sizes)
        if all(each.samples_per_second < fast for each in sizes[-2:]):  # a single one may be slow by chance
            return None
        size = min(2 * last.micro_batch_size, self.largest, self.num_slots)
        if len(sizes) == 1:  # at worst, all of the memory grows with the size
            predicted = last.peak_bytes * size // last.micro_batch_size
        else:
            predicted = memory_model(sizes).peak_bytes(size)
        fits = predicted <= self.budget_bytes * (1 - MARGIN)
        return size if fits and size > last.micro_batch_size else None


class WarmUp:
    """Called after each step until it returns a plan; `apply` puts a trial into effect."""

    def __init__(
        self,
        planner: Planner,
        provisional: Plan,
        apply: Callable[[int, Parallelism], None],
        *,
        cache: bool,
        read_peak: Callable[[], int] = peak_bytes,
    ) -> None:
        self.planner = planner
        self.config = planner.config
        self.provisional = provisional
        self.apply = apply
        self.cache = cache
        self.read_peak = read_peak  # memory as the backend counts it
        self.load = CpuLoad()
        choices = planner.choices()
        num_slots = self.config.training.effective_batch_size
        # A GPU should compute more examples at a time in hardly more time: assumed, not measured.
        largest = LARGE_ENOUGH if self.config.plan.device == "cpu" else num_slots
        self.sizes = DoublingSizes(max(choices).workers, num_slots, planner.budget.resident_bytes, largest)
        self.trials = search(choices, self.sizes)

    def begin(self) -> None:
        self._try(next(self.trials))

    def _try(self, trial: Trial) -> None:
        self.trial = trial
        self.rates: list[float] = []
        self.began = time.monotonic()
        self.apply(trial.micro_batch_size, trial.parallelism)

    def after_step(self, step: int, seconds: float, memory: MemoryManager) -> Plan | None:
        """Return the plan once it is known.

        A size that failed to allocate ends the search. While other programs leave no room for the size of the
        trial, nothing is measured.
        """
        size = self.trial.micro_batch_size
        if memory.largest != size:
            slots = self.config.training.effective_batch_size
            smaller = self.provisional.with_micro_batch(
                memory.batch_size, slots, "there was no room for more"
            )
            return replace(smaller, provisional=False)
        if memory.batch_size != size:
            self.rates = []
            self.began = time.monotonic()
            return None
        self.rates.append(self._samples_per_second(step, seconds))
        if time.monotonic() - self.began < TRIAL_SECONDS:
            return None
        result = SizeResult(size, self.read_peak(), peak_address_space(), max(self.rates))
        try:
            self._try(self.trials.send(result))
        except StopIteration as end:
            return self._finished(end.value)
        return None

    def _finished(self, measured: Measurements) -> Plan:
        """Cache what was measured, unless memory ended it."""
        complete = replace(self.sizes, budget_bytes=sys.maxsize)(measured.sizes) is None
        measured = replace(measured, other_cpu_percent=self.load.read().other_percent)
        plan = self.planner.tuned(measured, cache=self.cache and complete)
        if plan is None:
            raise AllocationFailed(torn=False)
        return plan

    def _samples_per_second(self, step: int, seconds: float) -> float:
        """Return the throughput of a step with the usual number of recursions, whatever this one had."""
        config = self.config
        cycles = cycles_of_step(step, config.model, config.training, config.seed)
        share = (cycles + BACKWARD_CYCLES) / (typical_cycles(config.model, config.training) + BACKWARD_CYCLES)
        return share * config.training.effective_batch_size / seconds
