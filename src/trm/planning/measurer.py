"""Measurements of a recipe on this machine: from this process, from the cache, or by a probe."""

from __future__ import annotations

import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from macbook_optimization.children import ChildDied, run_in_child
from macbook_optimization.cpu_optimization import environment
from macbook_optimization.errors import AllocationFailed, MemoryBudgetError, RunError
from macbook_optimization.hardware_detection import HardwareSpecs
from macbook_optimization.json_types import JsonObject
from macbook_optimization.resource_monitoring import BUSY_PERCENT, other_cpu_percent
from trm.backends.base import Program
from trm.config import RunConfig
from trm.display import Display
from trm.plan import Execution
from trm.planning.cache import cache_directory, cache_key, mapped_mib, read_measurements, write_cached
from trm.planning.measurements import Measurements
from trm.planning.settings import budget_of, parallelism_choices
from trm.tasks.base import DataSpec

PROBE_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Measurer:
    config: RunConfig
    data: DataSpec
    hardware: HardwareSpecs
    display: Display
    known: dict[str, Measurements | None]  # measured by this process

    def measure(self, execution: Execution) -> Measurements | None:
        """Return what a step takes, or None if no size survived."""
        key = self._key(execution)
        if key not in self.known:
            self.known[key] = read_measurements(self.probe_file(execution)) or self._probe(execution)
        return self.known[key]

    def _probe(self, execution: Execution) -> Measurements | None:
        busy = other_cpu_percent() > BUSY_PERCENT
        later = " Other programs are busy, so it will be measured again at the next start." if busy else ""
        self.display.message(f"Measuring what a step takes on this machine.{later}")
        rows: list[JsonObject] = []
        found: JsonObject = {}
        try:
            found = self._run_probe(execution, rows)
        except (MemoryBudgetError, AllocationFailed):
            pass  # what was reported before is still valid
        except ChildDied as death:
            if not (death.may_be_out_of_memory or death.signal == signal.SIGILL):
                raise RunError(f"The probe of a step {death}.", hint="This is a bug.") from death
        if not rows:
            return None
        measured = Measurements.from_json({**found, "sizes": rows})
        # A limited address space hides the sizes beyond it.
        unlimited = budget_of(self.config, self.hardware).address_space_bytes is None
        if found.get("complete") and unlimited and not busy:
            write_cached(self.probe_file(execution), measured.to_json())
        return measured

    def _run_probe(self, execution: Execution, rows: list[JsonObject]) -> JsonObject:
        arguments = {
            "config": self.config.model_dump(mode="json"),
            "execution": asdict(execution),
            "choices": parallelism_choices(self.config, self.hardware),
            "budget_bytes": budget_of(self.config, self.hardware).resident_bytes,
            "available_bytes": self.hardware.memory.available_memory,
        }
        found: JsonObject = run_in_child(
            "trm.planning.probe:probe",
            arguments,
            on_row=rows.append,
            environment=environment(execution.threads, compact=execution.allocator == "compact"),
            timeout_seconds=PROBE_SECONDS,
        )
        return found

    def probe_file(self, execution: Execution) -> Path:
        return cache_directory() / "probes" / f"{self._key(execution)}.json"

    def warmup_file(self, execution: Execution) -> Path:
        """Where a run keeps what its first steps measured; they contain less about memory than a probe."""
        return self.probe_file(execution).with_suffix(".warmup.json")

    def _key(self, execution: Execution) -> str:
        return cache_key(
            Program.of(self.config, self.data),
            self.hardware,
            execution=asdict(execution),
            choices=parallelism_choices(self.config, self.hardware),
            mapped_mib=mapped_mib(self.config.data.path),
        )
