"""Recipe x this machine -> plan, by measurement.

A child probes the real step; what it measured is kept in a cache, so that a second start does not probe
again. If not even one example at a time fits, gradient checkpointing is tried, then a compact allocator;
after that the recipe itself is too large, and the error lists smaller ones that fit.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from macbook_optimization.children import ChildDied, run_in_child
from macbook_optimization.cpu_optimization import BFLOAT16_GAIN, choose_precision, environment
from macbook_optimization.errors import MemoryBudgetError
from macbook_optimization.hardware_detection import HardwareSpecs
from macbook_optimization.memory_management import MARGIN, MIB, Budget, MemoryModel, memory_budget
from macbook_optimization.training_config_adapter import (
    Checkpointing,
    TrainingConfigAdapter,
    fitting_heads,
    plan_batches,
    scaled_learning_rate,
)
from trm.config import PlanSettings, RunConfig
from trm.runs import Plan
from trm.tasks.base import TaskShape
from trm.training.probe import Size, address_line, memory_line

PROBE_SECONDS = 600
LARGE_ENOUGH = 32  # beyond this, larger micro-batches were never measured to be faster
NEARLY_AS_FAST = 0.95
LESS_MEMORY: tuple[tuple[Checkpointing, str], ...] = (
    ("none", "system"), ("alternate", "system"), ("all", "system"), ("all", "compact"),
)  # fmt: skip
SMALLER_HIDDEN_SIZES = (768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 16)


class Say(Protocol):
    def message(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Measured:
    sizes: tuple[Size, ...]  # that the line is drawn through
    by_size: dict[int, float]  # samples per second
    by_threads: dict[int, float]  # the same; empty if there was only one choice


@dataclass(frozen=True, slots=True)
class Planner:
    """What every part of planning needs to know."""

    config: RunConfig
    shape: TaskShape
    hardware: HardwareSpecs
    say: Say

    def choose(self) -> Plan:
        config, warnings = self._correct()
        planner = replace(self, config=config)
        plan = planner._by_hand() or planner._by_measurement()
        return replace(plan, warnings=warnings)

    def _correct(self) -> tuple[RunConfig, tuple[str, ...]]:
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
        return self.config.model_copy(update={"plan": corrected}), tuple(f"plan.{text}" for text in warnings)

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
            precision=precision,
            gradient_checkpointing=settings.gradient_checkpointing or "none",
            allocator=settings.allocator or "system",
            budget_bytes=budget.resident_bytes,
            reasons={"micro_batch_size": "set by hand", "threads": "set by hand"},
        )

    def _by_measurement(self) -> Plan:
        tried = False
        for checkpointing, allocator in self._memory_savings():
            if tried:
                self.say.message(f"Too large; trying gradient checkpointing {checkpointing}.")
            tried = True
            precision, why = self._precision(checkpointing, allocator)
            measured = self.measure(precision, checkpointing, allocator)
            if measured is not None and self._fits(measured):
                plan = self._plan(measured, precision, checkpointing, allocator)
                return replace(plan, reasons={**plan.reasons, "precision": why})
        raise self._too_large()

    def _memory_savings(self) -> Iterator[tuple[Checkpointing, str]]:
        """From the fastest way to the smallest, within what the user has fixed."""
        settings = self.config.plan
        for checkpointing, allocator in LESS_MEMORY:
            if allocator == "compact" and sys.platform != "linux":
                continue
            if settings.gradient_checkpointing not in (None, checkpointing):
                continue
            if settings.allocator not in (None, allocator) and checkpointing != "none":
                continue
            yield checkpointing, settings.allocator or allocator

    def _fits(self, measured: Measured) -> bool:
        return self._most(measured) >= 1

    def _most(self, measured: Measured) -> int:
        """Examples at a time that fit the budget and, where there is a limit, the address space."""
        budget, addresses = self.budget, address_line(measured.sizes)
        most = memory_line(measured.sizes).largest_batch(budget.resident_bytes * (1 - MARGIN))
        if budget.address_space_bytes is not None and addresses is not None:
            # The smallest size that was measured under this very limit needs no margin.
            known = measured.sizes[0].micro_batch_size
            most = min(most, max(known, addresses.largest_batch(budget.address_space_bytes * (1 - MARGIN))))
        return most

    def _plan(self, measured: Measured, precision: str, checkpointing: Checkpointing, allocator: str) -> Plan:
        settings, budget = self.config.plan, self.budget
        line = memory_line(measured.sizes)
        wanted, why = settings.micro_batch_size, "set by hand"
        if wanted is None:
            wanted = _fast_enough(measured.by_size, self.config.training.effective_batch_size)
            why = "larger ones are not faster, as measured"
        most = self._most(measured)
        if most < wanted:
            why = f"more do not fit into {budget.resident_bytes / MIB:,.0f} MiB: {budget.reason}"
        batches = plan_batches(
            self.config.training.effective_batch_size, line, budget.resident_bytes, min(most, wanted)
        )
        threads, why_threads = self._threads(measured)
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
            precision=precision,
            gradient_checkpointing=checkpointing,
            allocator=allocator,
            budget_bytes=budget.resident_bytes,
            predicted_peak_bytes=line.peak_bytes(batches.micro_batch_size),
            memory=line,
            samples_per_second=_rate(measured, batches.micro_batch_size, threads),
            reasons=reasons,
        )

    def _threads(self, measured: Measured) -> tuple[int, str]:
        if self.config.plan.threads is not None:
            return self.config.plan.threads, "set by hand"
        if not measured.by_threads:
            return 1, "this machine computes with one"
        # Fewer threads leave more to the user, unless more are clearly faster.
        best = max(measured.by_threads.values())
        chosen = min(t for t, rate in measured.by_threads.items() if rate >= NEARLY_AS_FAST * best)
        rates = ", ".join(f"{rate:.3g} samples/s with {t}" for t, rate in sorted(measured.by_threads.items()))
        return chosen, f"measured {rates}"

    def _thread_choices(self) -> list[int]:
        most = self.hardware.cpu.compute_threads
        by_hand = self.config.plan.threads
        return [by_hand] if by_hand else sorted({1, max(1, most // 2), most})

    def _precision(self, checkpointing: Checkpointing, allocator: str) -> tuple[str, str]:
        """float32 unless the user or the recipe asks for less, and a measured step says that it pays."""
        asked = self.config.plan.precision or self.config.model.forward_dtype
        if asked == "float32":
            return asked, "as the recipe says; plan.precision=auto lets a measurement choose"
        rates = {}
        for precision in ("float32", "bfloat16"):
            measured = self.measure(precision, checkpointing, allocator)
            if measured is not None:
                rates[precision] = max(measured.by_size.values())
        if asked == "bfloat16" and self.config.plan.precision == asked and asked in rates:
            return asked, "set by hand"
        chosen = choose_precision(rates)
        if "bfloat16" not in rates:
            return "float32", "a step in bfloat16 does not survive on this CPU"
        ratio = rates["bfloat16"] / rates.get("float32", math.inf)
        return chosen, f"a step in bfloat16 was {ratio:.2f} times as fast; {BFLOAT16_GAIN} is asked for"

    def measure(self, precision: str, checkpointing: Checkpointing, allocator: str) -> Measured | None:
        """From the cache or by a probe; None if no size survived."""
        arguments = {
            "config": self.config.model_dump(mode="json"),
            "precision": precision,
            "gradient_checkpointing": checkpointing,
            "threads": self._thread_choices(),
            "budget_bytes": self.hardware.memory.available_memory,
        }
        file = cache_directory() / "probes" / f"{self._key(precision, checkpointing, allocator)}.json"
        known = _read(file)
        if known is not None:
            return known
        self.say.message("Measuring what a step takes on this machine (kept for the next start).")
        rows: list[dict[str, Any]] = []
        found: dict[str, Any] = {}
        try:
            found = run_in_child(
                "trm.training.probe:probe", arguments, tell=rows.append,
                environment=environment(max(self._thread_choices()), compact=allocator == "compact"),
                timeout_seconds=PROBE_SECONDS,
            )  # fmt: skip
        except (ChildDied, MemoryBudgetError):
            if not rows:
                return None
        measured = _measured(rows, found)
        if self.budget.address_space_bytes is None:  # a limit hides the sizes beyond it
            _write(file, measured)
        return measured

    def _key(self, precision: str, checkpointing: Checkpointing, allocator: str) -> str:
        """Everything that memory and speed depend on."""
        config, cpu = self.config, self.hardware.cpu
        facts = {
            "model": config.model.model_dump(mode="json"),
            "training": config.training.model_dump(mode="json", exclude={"learning_rate", "max_steps"}),
            "examples": config.evaluation.depth,
            "shape": asdict(self.shape),
            "how": [precision, checkpointing, allocator, self._thread_choices()],
            "machine": [cpu.brand, cpu.architecture, cpu.cores, cpu.quota, self.hardware.memory.total_memory],
            "versions": [version(name) for name in ("torch", "numpy", "macbook-trm")] + [sys.version],
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]

    def estimate(self, configs: Sequence[RunConfig]) -> list[tuple[int, MemoryModel]]:
        """MiB needed, and the line, of each recipe at its smallest: worked out, not measured."""
        found = run_in_child(
            "trm.training.probe:estimate",
            {
                "recipes": [config.model_dump(mode="json") for config in configs],
                "shape": asdict(self.shape),
                "gradient_checkpointing": self.config.plan.gradient_checkpointing or "all",
            },
            environment=environment(1),
            timeout_seconds=PROBE_SECONDS,
        )
        needed = []
        for row in found:
            line = MemoryModel(**row["line"])
            by_addresses = self.budget.address_space_bytes is not None and row["address_space"] is not None
            process = row["address_space"] if by_addresses else row["process"]
            whole = MemoryModel(process + line.fixed_bytes, line.bytes_per_example)
            needed.append((math.ceil(whole.needed_bytes() / MIB), whole))
        return needed

    def _limit_mb(self) -> int:
        budget = self.budget
        limits = [budget.resident_bytes, budget.address_space_bytes or budget.resident_bytes]
        return min(limits) // MIB

    def _too_large(self) -> MemoryBudgetError:
        try:
            ((needed, _),) = self.estimate([self.config])
            choices = self.smaller_recipes()
        except ChildDied as death:
            return MemoryBudgetError(
                f"There is too little memory to load PyTorch: a process that only does that {death}.",
                hint=f"The limit here is {self._limit_mb()} MiB; PyTorch alone needs about 800 MiB.",
            )
        alternatives = "; ".join(" ".join(change) for change, _ in choices[:3])
        smaller = f" Recipes that fit: {alternatives}." if choices else ""
        return MemoryBudgetError(
            f"This recipe needs about {needed} MiB even with one example at a time, and "
            f"{self._limit_mb()} MiB are allowed ({self.budget.reason}).{smaller}",
            hint="Close other programs, allow more with plan.memory_limit_mb=..., or take a smaller recipe "
            "with --fit.",
        )

    def smaller_recipes(self) -> list[tuple[list[str], RunConfig]]:
        """Recipes that should fit, best first, each with its changes as overrides."""
        candidates = list(self._candidates())
        estimates = self.estimate([config for _, config in candidates])
        return [
            candidate
            for candidate, (needed, _) in zip(candidates, estimates, strict=True)
            if needed <= self._limit_mb()
        ]

    def _candidates(self) -> Iterator[tuple[list[str], RunConfig]]:
        """A smaller model first; then smaller batches, whose slots carry latents, with their own rate."""
        config = self.config
        slots = config.training.effective_batch_size
        batches = [slots]
        while config.training.supervision == "deep" and batches[-1] > 16 and len(batches) < 6:
            batches.append(batches[-1] // 2)
        for batch in batches:
            training = config.training
            changes = []
            if batch != slots:
                rate = float(f"{scaled_learning_rate(training.learning_rate, slots, batch):.2g}")
                training = training.model_copy(update={"effective_batch_size": batch, "learning_rate": rate})
                changes = [f"training.effective_batch_size={batch}", f"training.learning_rate={rate:g}"]
                yield changes, config.model_copy(update={"training": training})
            for hidden_size in SMALLER_HIDDEN_SIZES:
                if hidden_size < config.model.hidden_size:
                    heads = fitting_heads(hidden_size, config.model.num_heads)
                    update = {"hidden_size": hidden_size, "num_heads": heads}
                    if config.model.puzzle_emb_ndim:
                        update["puzzle_emb_ndim"] = min(config.model.puzzle_emb_ndim, hidden_size)
                    named = [
                        f"model.{name}={value}"
                        for name, value in update.items()
                        if value != getattr(config.model, name)
                    ]
                    model = config.model.model_copy(update=update)
                    yield changes + named, config.model_copy(update={"training": training, "model": model})


def _fast_enough(rates: Mapping[int, float], num_slots: int) -> int:
    """The smallest size that is about as fast as any; beyond what was measured, as far as it may matter."""
    best = max(rates.values())
    chosen = min(size for size, rate in rates.items() if rate >= NEARLY_AS_FAST * best)
    if chosen == max(rates):
        chosen = max(chosen, LARGE_ENOUGH)
    return min(chosen, num_slots)


def _rate(measured: Measured, micro_batch_size: int, threads: int) -> float:
    nearest = min(measured.by_size, key=lambda size: abs(size - micro_batch_size))
    return measured.by_threads.get(threads, measured.by_size[nearest])


def cache_directory() -> Path:
    """Where measurements are kept; deleting it costs a few seconds."""
    if "TRM_CACHE_DIR" in os.environ:
        return Path(os.environ["TRM_CACHE_DIR"])
    default = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME", default)) / "macbook-trm"


def _read(file: Path) -> Measured | None:
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        return _measured(facts["sizes"], {"rates": facts["by_size"], "threads": facts["by_threads"]})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _measured(rows: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> Measured:
    """From JSON, whose keys are strings. A probe that died before its end has told its sizes only."""
    sizes = tuple(Size(**row) for row in rows)
    rates = found.get("rates") or {size.micro_batch_size: size.samples_per_second for size in sizes}
    return Measured(
        sizes,
        {int(size): rate for size, rate in rates.items()},
        {int(count): rate for count, rate in found.get("threads", {}).items()},
    )


def _write(file: Path, measured: Measured) -> None:
    """A cache that cannot be written only means measuring again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(asdict(measured)), encoding="utf-8")
        partial.replace(file)
    except OSError:
        return
