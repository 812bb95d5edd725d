"""Measurements of a recipe on this machine: from this process, from the cache, or by a probe."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from macbook_optimization.children import ChildDied, run_in_child
from macbook_optimization.cpu_optimization import environment
from macbook_optimization.errors import AllocationFailed, ConfigError, MemoryBudgetError, RunError
from macbook_optimization.hardware_detection import HardwareSpecs
from macbook_optimization.json_types import JsonObject
from trm.backends.base import Program
from trm.config import RunConfig
from trm.display import Display
from trm.plan import Execution
from trm.planning.cache import cache_directory, cache_key, keep_measurements, mapped_mib, read_measurements
from trm.planning.measurements import Measurements, Parallelism
from trm.planning.row_widths import row_widths
from trm.planning.settings import budget_of, parallelism_choices
from trm.tasks.base import DataSpec

PROBE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Measurer:
    config: RunConfig
    data: DataSpec
    hardware: HardwareSpecs
    display: Display
    known: dict[str, Measurements | None]  # measured by this process
    subject: str = ""  # which of several recipes this is

    def measure(self, execution: Execution, timeout_seconds: float = PROBE_SECONDS) -> Measurements | None:
        """Return what a step takes, or None if no size survived."""
        key = self._key(execution)
        if key not in self.known:
            earlier = read_measurements(self.probe_file(execution))
            if earlier is not None and earlier.is_worth_repeating:
                self.display.message(f"Measuring once more: {_disturbed(earlier)}.")
                earlier = None
            measured = earlier or self._probe(execution, timeout_seconds)
            self.known[key] = measured and replace(
                measured, row_widths=row_widths(self.config), workers=max(self._choices()).workers
            )
        return self.known[key]

    def has_measured(self, execution: Execution) -> bool:
        """Return whether a probe is cached that need not be repeated."""
        measured = read_measurements(self.probe_file(execution))
        return measured is not None and not measured.is_worth_repeating

    def measured_in_warmup(self, execution: Execution) -> Measurements | None:
        """Return what the first steps of an earlier run measured, unless they are worth repeating."""
        measured = read_measurements(self.warmup_file(execution))
        if measured is not None and measured.is_worth_repeating:
            self.display.message(f"Tuning once more: {_disturbed(measured)}.")
            return None
        return measured

    def _probe(self, execution: Execution, timeout_seconds: float) -> Measurements | None:
        details = "; ".join(filter(None, (self.subject, *_savings(execution))))
        which = f" ({details})" if details else ""
        self.display.message(f"Measuring what a step takes on this machine{which}.")
        rows: list[JsonObject] = []
        found: JsonObject = {}
        try:
            found = self._run_probe(execution, rows, timeout_seconds)
        except (MemoryBudgetError, AllocationFailed):
            pass  # what was reported before is still valid
        except ChildDied as death:
            if death.timed_out and not rows:
                raise ConfigError(
                    f"One example takes more than {timeout_seconds / 60:.2g} minutes on this machine",
                    hint="Lower model.hidden_size, model.H_cycles, model.L_cycles or training.depths.",
                ) from death
            if not (death.timed_out or death.may_be_out_of_memory or death.signal == signal.SIGILL):
                raise RunError(f"The probe of a step {death}.", hint="This is a bug.") from death
        if not rows:
            return None
        measured = Measurements.from_json({**found, "sizes": rows})
        # A limited address space hides the sizes beyond it.
        unlimited = budget_of(self.config, self.hardware).address_space_bytes is None
        if found.get("complete") and unlimited:
            keep_measurements(self.probe_file(execution), measured)
        return measured

    def _run_probe(self, execution: Execution, rows: list[JsonObject], timeout_seconds: float) -> JsonObject:
        arguments = {
            "config": self.config.model_dump(mode="json"),
            "execution": asdict(execution),
            "choices": self._choices(),
            "budget_bytes": budget_of(self.config, self.hardware).resident_bytes,
            "available_bytes": self.hardware.memory.available_memory,
        }
        found: JsonObject = run_in_child(
            "trm.planning.probe:probe",
            arguments,
            on_row=rows.append,
            environment=environment(execution.threads, compact=execution.allocator == "compact"),
            timeout_seconds=timeout_seconds,
        )
        return found

    def _choices(self) -> list[Parallelism]:
        return parallelism_choices(self.config, self.hardware)

    def probe_file(self, execution: Execution) -> Path:
        return cache_directory() / "probes" / f"{self._key(execution)}.json"

    def warmup_file(self, execution: Execution) -> Path:
        """Return the file for what a run's first steps measured; they say less about memory than a probe."""
        return self.probe_file(execution).with_suffix(".warmup.json")

    def _key(self, execution: Execution) -> str:
        return cache_key(
            Program.of(self.config, self.data),
            self.hardware,
            execution.backend,
            execution=asdict(execution),
            choices=self._choices(),
            row_widths=row_widths(self.config),
            evaluates=self.config.evaluation.every_steps is not None,
            mapped_mib=mapped_mib(self.config.data.path),
        )


def _disturbed(measured: Measurements) -> str:
    return (
        "the earlier measurement was made while other programs used "
        f"{measured.other_cpu_percent:.0f} % of the CPU"
    )


def _savings(execution: Execution) -> Iterator[str]:
    """Describe what differs from the usual execution."""
    if execution.precision != "float32":
        yield f"in {execution.precision}"
    if execution.gradient_checkpointing != "none":
        layers = "every layer" if execution.gradient_checkpointing == "all" else "every other layer"
        yield f"{layers} recomputed in the backward pass"
    if execution.allocator != "system":
        yield f"{execution.allocator} allocator"
