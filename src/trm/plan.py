"""Execution and plan: the settings with which this machine runs a recipe. They do not change what is learned.

`Execution` is what a backend needs to know; `Plan` adds the split of a step into micro-batches, and the
reason for every choice. A run directory stores its plan, so both are plain values below every other room.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from macbook_optimization.json_types import JsonMapping, JsonObject
from macbook_optimization.memory_management import MIB, MemoryModel
from macbook_optimization.training_config_adapter import Checkpointing
from macbook_optimization.units import counted

_EARLIER_NAMES = {"lanes": "workers", "settling": "provisional"}


@dataclass(frozen=True, slots=True)
class Execution:
    """The settings of a backend's computation."""

    threads: int = 1
    workers: int = 1  # worker threads that share `threads`; each takes examples through the whole model
    backend: str = "pytorch"
    device: str = "cpu"
    precision: str = "float32"
    gradient_checkpointing: Checkpointing = "none"
    allocator: str = "system"  # or "compact", which returns freed memory to the system immediately
    deterministic: bool = False
    optimizer_in_backward: bool = False  # update each weight as soon as its gradient is known
    compiled_size: int | None = None  # micro-batch size that one block is compiled for; None: not compiled

    @property
    def library(self) -> str:
        """The name under which people know the backend."""
        return {"pytorch": "PyTorch", "mlx": "MLX"}.get(self.backend, self.backend)


def useful_workers(threads: int, backend: str = "pytorch", device: str = "cpu") -> int:
    """Return as many workers as threads; one on macOS, where Accelerate uses threads of its own in each, and
    for other backends and devices, which compute one operation after the other."""
    on_cpu = (backend, device) == ("pytorch", "cpu")
    return threads if on_cpu and sys.platform != "darwin" else 1


_EXECUTION_FIELDS = tuple(each.name for each in fields(Execution))


@dataclass(frozen=True, slots=True)
class Plan:
    """An execution, the split of a step into micro-batches, and why."""

    execution: Execution
    micro_batch_size: int
    accumulation_steps: int
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    memory: MemoryModel | None = None  # measured
    samples_per_second: float | None = None  # measured
    other_cpu_percent: float | None = None  # used by other programs while that was measured
    reasons: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    provisional: bool = False  # to start with: auto-tuning during warm-up will replace it

    @classmethod
    def of(cls, execution: Execution, micro_batch_size: int, num_slots: int, **more: Any) -> Self:
        steps = math.ceil(num_slots / micro_batch_size)
        return cls(execution, micro_batch_size, steps, **more)

    def to_json(self) -> JsonObject:
        """Return one flat record, as in `plan.json`."""
        facts = asdict(self)
        return {**facts.pop("execution"), **facts}

    @classmethod
    def from_json(cls, facts: JsonMapping) -> Self:
        """Read a plan of this or an earlier version; unknown entries are ignored."""
        current = {_EARLIER_NAMES.get(name, name): value for name, value in facts.items()}
        execution = Execution(**{name: current[name] for name in _EXECUTION_FIELDS if name in current})
        names = {each.name for each in fields(cls)} - {"execution"}
        known = {name: current[name] for name in names if name in current}
        memory = known.get("memory")
        known["memory"] = MemoryModel(**memory) if memory else None
        known["warnings"] = tuple(known.get("warnings", ()))
        return cls(execution=execution, **known)

    def with_micro_batch(self, size: int, num_slots: int, reason: str) -> Self:
        """Return the same plan with another micro-batch size."""
        return replace(
            self,
            micro_batch_size=size,
            accumulation_steps=math.ceil(num_slots / size),
            predicted_peak_bytes=self.memory.peak_bytes(size) if self.memory else None,
            reasons={**self.reasons, "micro_batch_size": reason},
        )

    def with_execution(self, reasons: Mapping[str, str] | None = None, **changes: Any) -> Self:
        return replace(
            self, execution=replace(self.execution, **changes), reasons={**self.reasons, **(reasons or {})}
        )

    def explain(self) -> list[str]:
        """Return one line per choice that has a reason."""
        how = self.execution
        workers = f" in {how.workers} workers" if how.workers > 1 else ""
        shown = {
            "device": f"{how.backend} on {how.device}",
            "micro_batch_size": f"{self.accumulation_steps} x {self.micro_batch_size} examples",
            "threads": counted(how.threads, "thread") + workers,
            "precision": how.precision,
            "gradient_checkpointing": f"gradient checkpointing: {how.gradient_checkpointing}",
            "allocator": f"allocator: {how.allocator}",
            "memory": f"memory: about {(self.predicted_peak_bytes or 0) / MIB:,.0f} MiB",
        }
        return [f"{text} ({self.reasons[name]})" for name, text in shown.items() if name in self.reasons]


DEFAULT_PLAN = Plan(Execution(), micro_batch_size=32, accumulation_steps=1)  # of a run that was only imported
EVALUATION_FACTOR = 4  # micro-batches that inference computes at a time: without gradients, memory suffices
