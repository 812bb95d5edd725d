"""The first steps of a run that this machine has not measured yet: each is carried out in another way.

A recipe learns the same however a step is cut and whichever cores compute it. So what is measured are steps
of the run itself, which begins at once, with the smallest cut that there is; larger ones are tried as far as
the memory of the smaller ones promises that they fit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import psutil

from macbook_optimization.errors import AllocationFailed
from macbook_optimization.memory_management import MARGIN, MemoryManager, peak_address_space, peak_bytes
from trm.runs import Plan
from trm.training.measuring import BUSY_PERCENT, Measured
from trm.training.planning import LARGE_ENOUGH, Planner
from trm.training.probe import NEARLY_AS_FAST, Size, Way, memory_line, typical_cycles
from trm.training.schedule import cycles_of_step

SECONDS_FOR_A_TRIAL = 0.25
ROUNDS_FOR_WAYS = 2
CLEARLY_SLOWER = 0.85
BACKWARD = 2  # a recursion with gradient takes as long as three without, so two more than its own

Trials = Generator[tuple[int, Way], Size, Measured]  # asks for a size and a way, is told what they took


def trials(ways: Sequence[Way], num_slots: int, budget_bytes: int) -> Trials:
    """Growing sizes on all cores, then the other ways with the best size. Knows no clock and no process."""
    widest = max(ways)
    size, sizes = min(widest[1], num_slots), list[Size]()
    while not sizes or size > sizes[-1].micro_batch_size:
        sizes.append((yield size, widest))
        size = _next_size(sizes, num_slots, budget_bytes)
    rates = {each.micro_batch_size: each.samples_per_second for each in sizes}
    best = min(size for size, rate in rates.items() if rate >= NEARLY_AS_FAST * max(rates.values()))
    by_way: dict[Way, float] = {}
    possible = [way for way in ways if way[1] <= best]
    for _ in range(ROUNDS_FOR_WAYS if len(possible) > 1 else 0):  # the best of several, as noise only slows
        for way in possible:
            found = yield best, way
            by_way[way] = max(by_way.get(way, 0.0), found.samples_per_second)
    return Measured(tuple(sizes), rates, by_way)


def _next_size(sizes: Sequence[Size], num_slots: int, budget_bytes: int) -> int:
    """The same again, if there is nothing larger to try."""
    last = sizes[-1]
    if last.samples_per_second < CLEARLY_SLOWER * max(each.samples_per_second for each in sizes):
        return last.micro_batch_size
    size = min(2 * last.micro_batch_size, LARGE_ENOUGH, num_slots)
    if len(sizes) == 1:  # all of it grows with the size, at the worst
        promised = last.peak_bytes * size // last.micro_batch_size
    else:
        promised = memory_line(sizes).peak_bytes(size)
    return size if promised <= budget_bytes * (1 - MARGIN) else last.micro_batch_size


class Settling:
    """Asked after each step, until it has a plan; `apply` carries out a size and a way."""

    def __init__(
        self, planner: Planner, begun: Plan, apply: Callable[[int, Way], None], *, keep: bool
    ) -> None:
        self.config = config = planner.config
        self.planner, self.begun, self.apply, self.keep = planner, begun, apply, keep
        slots, budget = config.training.effective_batch_size, planner.budget.resident_bytes
        self.trials = trials(planner.ways(), slots, budget)
        self.process = psutil.Process()

    def begin(self) -> None:
        self.others_percent()
        self._try(next(self.trials))

    def _try(self, trial: tuple[int, Way]) -> None:
        self.trial, self.rates, self.began = trial, list[float](), time.monotonic()
        self.apply(*trial)

    def others_percent(self) -> float:
        """Of all cores, that other programs took since the call before."""
        return psutil.cpu_percent() - self.process.cpu_percent() / (psutil.cpu_count() or 1)

    def after_step(self, step: int, seconds: float, memory: MemoryManager) -> Plan | None:
        """The plan, once there is one. A size that could not be had ends the trials; while other programs
        leave no room for it, nothing is measured."""
        size, slots = self.trial[0], self.config.training.effective_batch_size
        if memory.largest != size:
            smaller = self.begun.cut_to(memory.batch_size, slots, "there was no room for more")
            return replace(smaller, settling=False)
        if memory.batch_size != size:
            self.rates, self.began = [], time.monotonic()
            return None
        self.rates.append(self._samples_per_second(step, seconds))
        if time.monotonic() - self.began < SECONDS_FOR_A_TRIAL:
            return None
        try:
            self._try(self.trials.send(Size(size, peak_bytes(), peak_address_space(), max(self.rates))))
        except StopIteration as end:
            return self._settled(end.value)
        return None

    def _settled(self, measured: Measured) -> Plan:
        """What was measured beside other programs, or ended where memory did, is not worth keeping."""
        slots = self.config.training.effective_batch_size
        whole = _next_size(measured.sizes, slots, sys.maxsize) == measured.sizes[-1].micro_batch_size
        quiet = self.others_percent() <= BUSY_PERCENT
        plan = self.planner.settled(measured, keep=self.keep and whole and quiet)
        if plan is None:
            raise AllocationFailed(torn=False)
        return plan

    def _samples_per_second(self, step: int, seconds: float) -> float:
        """Of a step with the usual number of recursions, whatever this one had."""
        config = self.config
        cycles = cycles_of_step(step, config.model, config.training, config.seed)
        share = (cycles + BACKWARD) / (typical_cycles(config) + BACKWARD)
        return share * config.training.effective_batch_size / seconds
