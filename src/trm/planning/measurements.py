"""What was measured about a recipe on this machine: memory and throughput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from macbook_optimization.json_types import JsonMapping, JsonObject
from macbook_optimization.memory_management import MIB, MemoryModel, line_through
from macbook_optimization.resource_monitoring import BUSY_PERCENT

TRAINER_BYTES = 10 * MIB  # display, log and checkpoints, measured by bench/memory_prediction.py


class Parallelism(NamedTuple):
    threads: int
    workers: int  # that share the threads


@dataclass(frozen=True, slots=True)
class SizeResult:
    """What steps with this micro-batch size took."""

    micro_batch_size: int
    peak_bytes: int
    peak_address_space: int | None
    samples_per_second: float


@dataclass(frozen=True, slots=True)
class Measurements:
    sizes: tuple[SizeResult, ...]  # through which the memory model is fitted
    by_size: dict[int, list[float]]  # samples per second, one reading per round
    by_parallelism: dict[Parallelism, float] = field(default_factory=dict)  # empty if there was no choice
    other_cpu_percent: float | None = None  # used by other programs meanwhile; None if not recorded
    is_repeated: bool = False  # other programs had disturbed the measurements before these

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs made the throughput unreliable. Memory does not depend on them."""
        return self.other_cpu_percent is not None and self.other_cpu_percent > BUSY_PERCENT

    @property
    def is_worth_repeating(self) -> bool:
        """Whether the next start should measure again: once only, as some machines are always busy."""
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


def memory_model(sizes: Sequence[SizeResult]) -> MemoryModel:
    """Fit through the two largest sizes: below four small examples, a step's fixed memory hides theirs."""
    return line_through([(each.micro_batch_size, each.peak_bytes + TRAINER_BYTES) for each in sizes[-2:]])


def address_space_model(sizes: Sequence[SizeResult]) -> MemoryModel | None:
    measured = [(each.micro_batch_size, each.peak_address_space) for each in sizes[-2:]]
    known = [(size, peak) for size, peak in measured if peak is not None]
    return line_through(known) if known else None
