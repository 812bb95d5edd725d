"""Recipe x this machine -> plan, by measurement.

If not even one example at a time fits, gradient checkpointing is tried, then a compact allocator; after that
the recipe itself is too large.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from macbook_optimization.cpu_optimization import BFLOAT16_GAIN, choose_precision
from macbook_optimization.hardware_detection import HardwareSpecs
from macbook_optimization.memory_management import MIB, Budget
from macbook_optimization.training_config_adapter import Checkpointing
from trm.backends.bounds import least_bytes, smallest_program
from trm.backends.sizes import flops_per_sample
from trm.config import RunConfig
from trm.display import Display
from trm.plan import Execution, Plan
from trm.planning.cache import keep_measurements
from trm.planning.choice import BY_HAND, largest_fitting, make_plan
from trm.planning.estimates import Estimates, estimate_recipe
from trm.planning.measurements import Measurements, Parallelism
from trm.planning.measurer import Measurer
from trm.planning.settings import budget_of, corrected_settings, parallelism_choices
from trm.schedule import typical_cycles
from trm.tasks.base import DataSpec

SHORT_STEP_FLOPS = 1e12  # some ten seconds of an old laptop
PROCESS_BYTES = 200 * MIB  # of a trainer that has loaded PyTorch and computed nothing; 230 MiB were measured
# A recipe is not estimated first if the budget is this many times the least that any plan needs. What one
# example really needed was at most 1.6 times as much in nine recipes (docs/lab/memory.md).
ROOMY = 4
ALLOCATOR_GAIN = 1.1  # a compact allocator saves 4 % (docs/lab/training-step.md)
RECIPE_PRECISION = "as the recipe says; plan.precision=auto lets a measurement choose"


@dataclass(frozen=True, slots=True)
class Planner:
    """The recipe, the data and the machine that a plan is for."""

    config: RunConfig
    data: DataSpec
    hardware: HardwareSpecs
    display: Display
    subject: str = ""  # which recipe this is, where several are measured one after the other
    known: dict[str, Measurements | None] = field(default_factory=dict)  # measured by this process
    estimated: dict[str, Estimates] = field(default_factory=dict)  # likewise

    def choose(self) -> Plan | None:
        """Return a measured plan, or None if the recipe does not fit into the budget in any configuration."""
        planner, warnings = self.corrected()
        plan = planner._by_hand() or planner._by_measurement()
        return replace(plan, warnings=warnings) if plan is not None else None

    def without_probe(self) -> Plan | None:
        """Return a plan that needs no probe, or None if this recipe needs one.

        It is cached from an earlier warm-up, or provisional: the first steps of the run will tune it.
        """
        planner, warnings = self.corrected()
        if not planner._may_tune_during_warmup() or planner.measurer.has_measured(planner.execution()):
            return None
        measured = planner.measurer.measured_in_warmup(planner.execution())
        plan = planner._provisional() if measured is None else planner.tuned(measured, cache=False)
        return replace(plan, warnings=warnings) if plan is not None else None

    def _may_tune_during_warmup(self) -> bool:
        """Return whether the user fixed nothing, memory is not limited, and a step is not longer than a
        probe."""
        plan = self.config.plan
        training = self.config.training
        fixed = plan.micro_batch_size or self.config.limits.memory_limit_mb or plan.compile
        usual = (
            (plan.precision or self.config.model.forward_dtype) == "float32",
            plan.gradient_checkpointing in (None, "none"),
            plan.allocator in (None, "system"),
            self.budget.address_space_bytes is None,
        )
        flops = flops_per_sample(self.config.model, self.data, typical_cycles(self.config.model, training))
        return (
            not (fixed or training.deterministic)
            and all(usual)
            and flops * training.effective_batch_size <= SHORT_STEP_FLOPS
        )

    def _provisional(self) -> Plan:
        num_slots = self.config.training.effective_batch_size
        widest = max(self.choices())
        return Plan.of(
            self.execution(parallelism=widest),
            min(widest.workers, num_slots),
            num_slots,
            budget_bytes=self.budget.resident_bytes,
            provisional=True,
        )

    def tuned(self, measured: Measurements, *, cache: bool) -> Plan | None:
        """Return the plan that follows from a warm-up; None if it no longer fits and needs a probe."""
        if cache:
            keep_measurements(self.warmup_file(), measured)
        if self._most(measured) < 1:
            return None
        plan = make_plan(self.config, self.budget, measured, self.execution(), self.choices())
        memory = f"evaluations excluded; {plan.reasons['memory']}"
        return replace(plan, reasons={**plan.reasons, "precision": RECIPE_PRECISION, "memory": memory})

    def corrected(self) -> tuple[Self, tuple[str, ...]]:
        """Replace plan settings that cannot work here, with a warning for each."""
        config, warnings = corrected_settings(self.config, self.hardware)
        return replace(self, config=config), warnings

    @property
    def budget(self) -> Budget:
        return budget_of(self.config, self.hardware)

    def choices(self) -> list[Parallelism]:
        return parallelism_choices(self.config, self.hardware)

    @property
    def measurer(self) -> Measurer:
        return Measurer(self.config, self.data, self.hardware, self.display, self.known, self.subject)

    def warmup_file(self) -> Path:
        return self.measurer.warmup_file(self.execution())

    def execution(
        self,
        precision: str = "float32",
        checkpointing: Checkpointing = "none",
        allocator: str = "system",
        parallelism: Parallelism | None = None,
    ) -> Execution:
        settings = self.config.plan
        how = parallelism or max(self.choices())
        return Execution(
            threads=how.threads,
            workers=how.workers,
            backend=settings.backend,
            device=settings.device,
            precision=precision,
            gradient_checkpointing=checkpointing,
            allocator=allocator,
            deterministic=self.config.training.deterministic,
            optimizer_in_backward=settings.optimizer_in_backward,
        )

    def _by_hand(self) -> Plan | None:
        """Return a plan without a probe if the user has left nothing to measure."""
        settings = self.config.plan
        precision = settings.precision or self.config.model.forward_dtype
        is_fixed = precision == "float32" or settings.precision == "bfloat16"
        if settings.micro_batch_size is None or settings.threads is None or not is_fixed:
            return None
        limited = self.config.limits.memory_limit_mb is not None
        if limited or self.budget.address_space_bytes is not None:
            return None
        execution = self.execution(
            precision, settings.gradient_checkpointing or "none", settings.allocator or "system"
        )
        return Plan.of(
            execution,
            settings.micro_batch_size,
            self.config.training.effective_batch_size,
            budget_bytes=self.budget.resident_bytes,
            reasons={"micro_batch_size": BY_HAND, "threads": BY_HAND},
        )

    def _by_measurement(self) -> Plan | None:
        for checkpointing, allocator in self._memory_savings():
            if self._is_clearly_too_large(checkpointing, allocator):
                continue
            precision, why = self._precision(checkpointing, allocator)
            execution = self.execution(precision, checkpointing, allocator)
            measured = self.measurer.measure(execution)
            if measured is not None and self._most(measured) >= 1:
                plan = make_plan(self.config, self.budget, measured, execution, self.choices())
                return replace(plan, reasons={**plan.reasons, "precision": why})
            if measured is not None and self._no_saving_suffices(measured, checkpointing):
                return None
        return None

    def estimates(self) -> Estimates:
        """Estimate what the recipe needs at its smallest, once."""
        key = self.config.model_dump_json()
        if key not in self.estimated:
            levels = list(dict.fromkeys(level for level, _ in self._memory_savings()))
            execution = self.execution()
            self.estimated[key] = estimate_recipe(self.config, self.data, self.budget, execution, levels)
        return self.estimated[key]

    def _is_clearly_too_large(self, checkpointing: Checkpointing, allocator: str) -> bool:
        """Return whether a measurement is not worth its time."""
        execution = self.execution(checkpointing=checkpointing, allocator=allocator)
        if self.measurer.probe_file(execution).exists():
            return False
        least = PROCESS_BYTES + least_bytes(smallest_program(self.config, self.data))
        if ROOMY * least < self.budget.resident_bytes and self.budget.address_space_bytes is None:
            return False
        return self.estimates().by_checkpointing[checkpointing].is_clearly_too_large

    def _memory_savings(self) -> Iterator[tuple[Checkpointing, str]]:
        """List configurations from the fastest to the smallest, within what the user has fixed."""
        settings = self.config.plan
        chosen = settings.gradient_checkpointing
        layers: list[Checkpointing] = ["none", "alternate", "all"] if chosen is None else [chosen]
        yield from ((each, settings.allocator or "system") for each in layers)
        if settings.allocator is None and sys.platform == "linux":
            yield layers[-1], "compact"

    def _no_saving_suffices(self, measured: Measurements, checkpointing: Checkpointing) -> bool:
        """Return whether one example would not fit even with all that gradient checkpointing should save."""
        estimates = self.estimates()
        saved = (estimates.by_checkpointing[checkpointing].mib - estimates.least.mib) * MIB
        return measured.sizes[0].peak_bytes - saved > ALLOCATOR_GAIN * self.budget.resident_bytes

    def _most(self, measured: Measurements) -> int:
        workers = max(self.choices()).workers
        return largest_fitting(measured, self.budget, self.config.training.effective_batch_size, workers)

    def _precision(self, checkpointing: Checkpointing, allocator: str) -> tuple[str, str]:
        """Return float32, unless less is requested and a measured step is faster with it."""
        requested = self.config.plan.precision or self.config.model.forward_dtype
        if requested == "float32":
            return requested, RECIPE_PRECISION
        rates = {}
        by_hand = self.config.plan.precision == "bfloat16"
        for precision in ("bfloat16",) if by_hand else ("float32", "bfloat16"):
            measured = self.measurer.measure(self.execution(precision, checkpointing, allocator))
            if measured is not None:
                rates[precision] = measured.best_rate
        if by_hand and requested in rates:
            return requested, BY_HAND
        if "bfloat16" not in rates:
            return "float32", "no step in bfloat16 survived on this CPU"
        ratio = rates["bfloat16"] / rates.get("float32", math.inf)
        why = f"a step in bfloat16 was {ratio:.2f} times as fast; {BFLOAT16_GAIN} is required"
        return choose_precision(rates), why
