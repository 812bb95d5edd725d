"""Recipe x this machine -> plan, by measurement.

If not even one example at a time fits, gradient checkpointing is tried, then a compact allocator;
after that the recipe itself is too large.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from macbook_optimization.cpu_optimization import BFLOAT16_GAIN, choose_precision
from macbook_optimization.hardware_detection import HardwareSpecs
from macbook_optimization.memory_management import MARGIN, MIB, Budget, memory_budget
from macbook_optimization.training_config_adapter import Checkpointing, TrainingConfigAdapter, plan_batches
from trm.config import PlanSettings, RunConfig
from trm.runs import Plan
from trm.tasks.base import TaskShape
from trm.training.benchmark import operations_per_sample
from trm.training.measuring import Measured, Question, keep_measurement, measure, read_measurement
from trm.training.probe import (
    FIRST_SIZE,
    NEARLY_AS_FAST,
    Way,
    address_line,
    memory_line,
    typical_cycles,
)
from trm.training.watching import Say

SHORT_STEP = 1e12  # operations: some ten seconds of an old laptop
AS_THE_RECIPE_SAYS = "as the recipe says; plan.precision=auto lets a measurement choose"
LARGE_ENOUGH = 32  # beyond this, larger micro-batches were never measured to be faster


@dataclass(frozen=True, slots=True)
class Planner:
    """What every part of planning needs to know."""

    config: RunConfig
    shape: TaskShape
    hardware: HardwareSpecs
    say: Say
    known: dict[str, Measured | None] = field(default_factory=dict)  # what this process has measured itself

    def choose(self) -> Plan | None:
        """None if the recipe does not fit into the budget, however it is carried out."""
        planner, warnings = self.corrected()
        plan = planner._by_hand() or planner._by_measurement()
        return replace(plan, warnings=warnings) if plan is not None else None

    def at_once(self) -> Plan | None:
        """A plan to begin with where nothing is known, and the first steps of the run can tell what is best;
        the one that those of an earlier run told; None where that is for a probe."""
        planner, warnings = self.corrected()
        if not planner._may_settle() or planner._question().file.exists():
            return None
        measured = read_measurement(planner._question().first_steps)
        plan = planner._to_begin_with() if measured is None else planner.settled(measured, keep=False)
        return replace(plan, warnings=warnings) if plan is not None else None

    def _may_settle(self) -> bool:
        """Where the user leaves it to us, memory has no limit to keep to, and a step does not take longer
        than a probe would."""
        settings, training = self.config.plan, self.config.training
        asked = settings.micro_batch_size or settings.memory_limit_mb or settings.compile
        usual = {
            "precision": (settings.precision or self.config.model.forward_dtype) == "float32",
            "gradient_checkpointing": settings.gradient_checkpointing in (None, "none"),
            "allocator": settings.allocator in (None, "system"),
            "address space": self.budget.address_space_bytes is None,
        }
        operations = operations_per_sample(self.config.model, self.shape.seq_len, typical_cycles(self.config))
        return (
            not (asked or training.deterministic)
            and all(usual.values())
            and operations * training.effective_batch_size <= SHORT_STEP
        )

    def _to_begin_with(self) -> Plan:
        threads, lanes = max(self.ways())
        slots = self.config.training.effective_batch_size
        size = min(lanes, slots)
        return Plan(
            micro_batch_size=size,
            accumulation_steps=math.ceil(slots / size),
            threads=threads,
            lanes=lanes,
            budget_bytes=self.budget.resident_bytes,
            settling=True,
        )

    def settled(self, measured: Measured, *, keep: bool) -> Plan | None:
        """From what the first steps of a run told; None if they fit no longer, so that less has to do."""
        if keep:
            keep_measurement(self._question().first_steps, measured.to_json())
        if self._most(measured) < 1:
            return None
        plan = self._plan(measured, "float32", "none", "system")
        memory = f"evaluations aside; {plan.reasons['memory']}"
        return replace(plan, reasons={**plan.reasons, "precision": AS_THE_RECIPE_SAYS, "memory": memory})

    def corrected(self) -> tuple[Self, tuple[str, ...]]:
        """Plan-level settings that cannot work here give way, with a warning."""
        settings = self.config.plan
        result = TrainingConfigAdapter(self.hardware).validate_configuration(settings.model_dump())
        corrections, warnings = dict(result.corrections), list(result.warnings)
        slots = self.config.training.effective_batch_size
        if settings.micro_batch_size is not None and settings.micro_batch_size > slots:
            corrections["micro_batch_size"] = slots
            warnings.append(f"micro_batch_size is {slots}, the whole effective batch")
        if settings.allocator == "compact" and sys.platform != "linux":
            corrections["allocator"] = "system"
            warnings.append("allocator is system: compact needs the GNU C library")
        corrected = PlanSettings.model_validate({**settings.model_dump(), **corrections})
        config = self.config.model_copy(update={"plan": corrected})
        return replace(self, config=config), tuple(f"plan.{text}" for text in warnings)

    @property
    def budget(self) -> Budget:
        settings = self.config.plan
        return memory_budget(self.hardware.memory, settings.memory_limit_mb, settings.memory_fraction)

    def _by_hand(self) -> Plan | None:
        """A plan without a probe, if the user has left nothing to measure."""
        settings, budget = self.config.plan, self.budget
        precision = settings.precision or self.config.model.forward_dtype
        open_questions = (
            settings.micro_batch_size is None
            or settings.threads is None
            or settings.memory_limit_mb is not None
            or budget.address_space_bytes is not None
            or precision != "float32"
        )
        if open_questions or settings.micro_batch_size is None or settings.threads is None:
            return None
        slots = self.config.training.effective_batch_size
        return Plan(
            micro_batch_size=settings.micro_batch_size,
            accumulation_steps=math.ceil(slots / settings.micro_batch_size),
            threads=settings.threads,
            lanes=max(self.ways())[1],
            precision=precision,
            gradient_checkpointing=settings.gradient_checkpointing or "none",
            allocator=settings.allocator or "system",
            budget_bytes=budget.resident_bytes,
            reasons={"micro_batch_size": "set by hand", "threads": "set by hand"},
        )

    def _by_measurement(self) -> Plan | None:
        tried = False
        for checkpointing, allocator in self._memory_savings():
            if tried:
                how = f"gradient checkpointing of {checkpointing} layers, {allocator} allocator"
                self.say.message(f"Too large; trying {how}.")
            tried = True
            precision, why = self._precision(checkpointing, allocator)
            measured = self.measure(precision, checkpointing, allocator)
            if measured is not None and self._most(measured) >= 1:
                plan = self._plan(measured, precision, checkpointing, allocator)
                return replace(plan, reasons={**plan.reasons, "precision": why})
            if measured is not None and self._state_is_too_large(measured):
                return None
        return None

    def _memory_savings(self) -> Iterator[tuple[Checkpointing, str]]:
        """From the fastest way to the smallest, within what the user has fixed."""
        settings = self.config.plan
        chosen, by_hand = settings.gradient_checkpointing, settings.allocator
        layers: list[Checkpointing] = ["none", "alternate", "all"] if chosen is None else [chosen]
        yield from ((each, by_hand or "system") for each in layers)
        if by_hand is None and sys.platform == "linux":
            yield layers[-1], "compact"

    def _state_is_too_large(self, measured: Measured) -> bool:
        """Then it is not the examples that do not fit, and computing layers twice does not help."""
        line = memory_line(measured.sizes)
        return len(measured.sizes) > 1 and line.fixed_bytes > self.budget.resident_bytes

    def _most(self, measured: Measured) -> int:
        """Examples at a time that fit the budget and, where there is a limit, the address space."""
        budget, addresses = self.budget, address_line(measured.sizes)
        survived = measured.sizes[-1]
        if len(measured.sizes) == 1 and self.config.training.effective_batch_size > 1:  # and more did not
            return survived.micro_batch_size if survived.peak_bytes <= budget.resident_bytes else 0
        most = memory_line(measured.sizes).largest_batch(budget.resident_bytes * (1 - MARGIN))
        if budget.address_space_bytes is not None and addresses is not None:
            # What was measured under this very limit needs no margin.
            limit = addresses.largest_batch(budget.address_space_bytes * (1 - MARGIN))
            most = min(most, max(survived.micro_batch_size, limit))
        return most

    def _plan(self, measured: Measured, precision: str, checkpointing: Checkpointing, allocator: str) -> Plan:
        settings, budget = self.config.plan, self.budget
        line = memory_line(measured.sizes)
        wanted, why = settings.micro_batch_size, "set by hand"
        if wanted is None:
            wanted, why = _fast_enough(measured.by_size, self.config.training.effective_batch_size)
        most = self._most(measured)
        if most < wanted:
            why = f"more do not fit into {budget.resident_bytes / MIB:,.0f} MiB: {budget.reason}"
        batches = plan_batches(
            self.config.training.effective_batch_size, line, budget.resident_bytes, min(most, wanted)
        )
        (threads, lanes), why_threads = self._way(measured)
        reasons = {
            "micro_batch_size": why,
            "threads": why_threads,
            "memory": f"measured; the budget is {budget.resident_bytes / MIB:,.0f} MiB, {budget.reason}",
        }
        if checkpointing != "none":
            by_hand = settings.gradient_checkpointing is not None
            reasons["gradient_checkpointing"] = "set by hand" if by_hand else "nothing less fits"
        if allocator != "system":
            reasons["allocator"] = "set by hand" if settings.allocator else "nothing less fits"
        return Plan(
            micro_batch_size=batches.micro_batch_size,
            accumulation_steps=batches.accumulation_steps,
            threads=threads,
            lanes=lanes,
            precision=precision,
            gradient_checkpointing=checkpointing,
            allocator=allocator,
            budget_bytes=budget.resident_bytes,
            predicted_peak_bytes=line.peak_bytes(batches.micro_batch_size),
            memory=line,
            samples_per_second=_rate(measured, batches.micro_batch_size, (threads, lanes)),
            reasons=reasons,
        )

    def _way(self, measured: Measured) -> tuple[Way, str]:
        if not measured.by_way:
            by_hand = self.config.plan.threads or self.config.plan.lanes
            return max(self.ways()), "set by hand" if by_hand else "all cores that compute at full speed"
        # Fewer threads leave more to the user, unless more are clearly faster.
        best = max(measured.by_way.values())
        fewest = min(
            threads for (threads, _), rate in measured.by_way.items() if rate >= NEARLY_AS_FAST * best
        )
        chosen = max(
            (way for way in measured.by_way if way[0] == fewest), key=lambda way: measured.by_way[way]
        )
        rates = ", ".join(
            f"{rate:.3g} samples/s with {threads}{f' in {lanes} lanes' if lanes > 1 else ''}"
            for (threads, lanes), rate in sorted(measured.by_way.items())
        )
        return chosen, f"measured {rates}"

    def ways(self) -> list[Way]:
        """Every number of threads, as one team and with a lane each."""
        lanes = self.config.plan.lanes
        if lanes is None and sys.platform == "darwin":  # Accelerate has threads of its own in every lane
            lanes = 1
        found = {(threads, lanes or each) for threads in self.thread_choices() for each in (1, threads)}
        return sorted({(threads, min(each, threads)) for threads, each in found})

    def thread_choices(self) -> list[int]:
        most = self.hardware.cpu.compute_threads
        by_hand = self.config.plan.threads
        if by_hand or sys.platform == "darwin":  # Accelerate would not follow, so there is nothing to compare
            return [by_hand or most]
        return sorted({1, max(1, most // 2), most})

    def _precision(self, checkpointing: Checkpointing, allocator: str) -> tuple[str, str]:
        """float32 unless the user or the recipe asks for less, and a measured step says that it pays."""
        asked = self.config.plan.precision or self.config.model.forward_dtype
        if asked == "float32":
            return asked, AS_THE_RECIPE_SAYS
        rates = {}
        for precision in ("float32", "bfloat16"):
            measured = self.measure(precision, checkpointing, allocator)
            if measured is not None:
                rates[precision] = max(measured.by_size.values())
        if asked == "bfloat16" and self.config.plan.precision == asked and asked in rates:
            return asked, "set by hand"
        chosen = choose_precision(rates)
        if "bfloat16" not in rates:
            return "float32", "no step in bfloat16 survived on this CPU"
        ratio = rates["bfloat16"] / rates.get("float32", math.inf)
        return chosen, f"a step in bfloat16 was {ratio:.2f} times as fast; {BFLOAT16_GAIN} is asked for"

    def measure(self, precision: str, checkpointing: Checkpointing, allocator: str) -> Measured | None:
        question = self._question(precision, checkpointing, allocator)
        # A limit hides the sizes beyond it.
        keep = self.budget.address_space_bytes is None
        key = question.key()
        if key not in self.known:
            self.known[key] = measure(question, self.budget.resident_bytes, self.say, keep)
        return self.known[key]

    def _question(
        self, precision: str = "float32", checkpointing: Checkpointing = "none", allocator: str = "system"
    ) -> Question:
        ways = tuple(self.ways())
        return Question(self.config, self.shape, self.hardware, precision, checkpointing, allocator, ways)


def _fast_enough(rates: Mapping[int, float], num_slots: int) -> tuple[int, str]:
    """The smallest size that is about as fast as any; beyond what was measured, as far as it may matter."""
    best = max(rates.values())
    chosen = min(size for size, rate in rates.items() if rate >= NEARLY_AS_FAST * best)
    if chosen == num_slots:
        return chosen, "the whole effective batch"
    if chosen < max(rates):
        return chosen, "larger ones are not faster, as measured"
    if 1 < chosen < FIRST_SIZE:  # a single example keeps the cores busy for long
        return chosen, "larger ones were not measured, because an example takes so long"
    return min(max(chosen, LARGE_ENOUGH), num_slots), f"faster with every size up to {chosen}, as measured"


def _rate(measured: Measured, micro_batch_size: int, way: Way) -> float:
    nearest = min(measured.by_size, key=lambda size: abs(size - micro_batch_size))
    return measured.by_way.get(way, measured.by_size[nearest])
