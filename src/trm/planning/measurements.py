"""Measurements of a recipe on this machine: memory and throughput.

Memory grows with the positions that are computed at a time. Where all rows are full, these are proportional
to the micro-batch size, and one straight line describes steps and evaluations. Where rows differ in length,
steps begin with the longest, so that twice the size is less than twice the positions. Evaluations have a line
of their own then: all rows of their batches are as wide as the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from macbook_optimization.json_types import JsonMapping, JsonObject
from macbook_optimization.memory_management import MIB, MemoryModel, line_through
from macbook_optimization.resource_monitoring import BUSY_PERCENT
from trm.planning.row_widths import computed_positions

TRAINER_BYTES = 10 * MIB  # display, log and checkpoints, measured by bench/memory_prediction.py


class Parallelism(NamedTuple):
    threads: int
    workers: int  # that share the threads


@dataclass(frozen=True, slots=True)
class SizeResult:
    """Measurements of the steps with this micro-batch size."""

    micro_batch_size: int
    peak_bytes: int
    peak_address_space: int | None
    samples_per_second: float
    step_bytes: int | None = None  # the peak of the steps alone; None if evaluations were not measured


@dataclass(frozen=True, slots=True)
class Measurements:
    sizes: tuple[SizeResult, ...]  # through which the memory model is fitted
    by_size: dict[int, list[float]]  # samples per second, one reading per round
    by_parallelism: dict[Parallelism, float] = field(default_factory=dict)  # empty if there was no choice
    other_cpu_percent: float | None = None  # used by other programs meanwhile; None if not recorded
    is_repeated: bool = False  # other programs had disturbed the measurements before these
    row_widths: tuple[int, ...] | None = None  # of a step, if rows differ; this and the next are not stored
    workers: int = 1  # with which memory was measured

    @property
    def is_disturbed(self) -> bool:
        """Return whether other programs made the throughput unreliable. Memory does not depend on them."""
        return self.other_cpu_percent is not None and self.other_cpu_percent > BUSY_PERCENT

    @property
    def is_worth_repeating(self) -> bool:
        """Return whether the next start should measure again: once only, as some machines are always busy."""
        return self.is_disturbed and not self.is_repeated

    def to_json(self) -> JsonObject:
        return {
            "sizes": [asdict(size) for size in self.sizes],
            "by_size": self.by_size,
            "by_parallelism": [(*key, rate) for key, rate in self.by_parallelism.items()],
            "other_cpu_percent": self.other_cpu_percent,
            "is_repeated": self.is_repeated,
        }

    @classmethod
    def from_json(cls, facts: JsonMapping) -> Measurements:
        """JSON has string keys. Missing parts are those that a probe did not reach before it died."""
        sizes = tuple(SizeResult(**row) for row in facts["sizes"])
        rates = facts.get("by_size") or {size.micro_batch_size: [size.samples_per_second] for size in sizes}
        return cls(
            sizes,
            {int(size): [float(rate) for rate in readings] for size, readings in rates.items()},
            {Parallelism(*pair): float(rate) for *pair, rate in facts.get("by_parallelism", ())},
            facts.get("other_cpu_percent"),
            bool(facts.get("is_repeated")),
        )

    @property
    def best_rate(self) -> float:
        return max(max(readings) for readings in self.by_size.values())


@dataclass(frozen=True, slots=True)
class RunMemory:
    """The peak memory of a run as a function of its micro-batch size."""

    steps: MemoryModel  # per position that is computed at a time or, without `row_widths`, per example
    evaluations: MemoryModel | None = None  # per example of a micro-batch; None if they have no own line
    row_widths: tuple[int, ...] | None = None
    workers: int = 1

    @classmethod
    def of(cls, measured: Measurements, workers: int) -> RunMemory:
        """Fit what was measured, for a plan with this many workers."""
        widths = measured.row_widths
        if widths is None:
            return cls(memory_model(measured.sizes))
        evaluated = measured.sizes[-1].step_bytes is not None
        points = [
            (
                computed_positions(widths, each.micro_batch_size, measured.workers),
                (each.step_bytes or each.peak_bytes) + TRAINER_BYTES,
            )
            for each in measured.sizes[-2:]
        ]
        evaluations = memory_model(measured.sizes) if evaluated else None
        return cls(line_through(points), evaluations, widths, workers)

    def peak_bytes(self, size: int) -> int:
        if self.row_widths is None:
            return self.steps.peak_bytes(size)
        peak = self.steps.peak_bytes(computed_positions(self.row_widths, size, self.workers))
        return peak if self.evaluations is None else max(peak, self.evaluations.peak_bytes(size))

    def largest_batch(self, budget_bytes: float) -> int:
        """Return the largest size up to which all fit; 0 if not even one example does."""
        if self.row_widths is None:
            return self.steps.largest_batch(budget_bytes)
        sizes = range(1, len(self.row_widths) + 1)
        return next((size - 1 for size in sizes if self.peak_bytes(size) > budget_bytes), sizes[-1])

    def line(self, size: int) -> MemoryModel:
        """Return a line from one example to this size, for a run that shrinks its micro-batch."""
        if self.row_widths is None:
            return self.steps
        return line_through([(each, self.peak_bytes(each)) for each in {1, max(1, size)}])


def memory_model(sizes: Sequence[SizeResult]) -> MemoryModel:
    """Fit through the two largest sizes: below four small examples, a step's fixed memory hides theirs."""
    return line_through([(each.micro_batch_size, each.peak_bytes + TRAINER_BYTES) for each in sizes[-2:]])


def address_space_model(sizes: Sequence[SizeResult]) -> MemoryModel | None:
    measured = [(each.micro_batch_size, each.peak_address_space) for each in sizes[-2:]]
    known = [(size, peak) for size, peak in measured if peak is not None]
    return line_through(known) if known else None
