"""The user's plan settings on this machine: corrections, and the choices that remain."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from macbook_optimization.hardware_detection import HardwareSpecs
from macbook_optimization.json_types import JsonObject
from macbook_optimization.memory_management import Budget, memory_budget
from macbook_optimization.training_config_adapter import TrainingConfigAdapter
from trm.config import LimitSettings, PlanSettings, RunConfig
from trm.plan import useful_workers
from trm.planning.measurements import Parallelism


def corrected_settings(config: RunConfig, hardware: HardwareSpecs) -> tuple[RunConfig, tuple[str, ...]]:
    """Replace settings that cannot work here; return the recipe, and a warning for each replacement."""
    plan = config.plan
    limits = config.limits
    result = TrainingConfigAdapter(hardware).validate_configuration(
        {**plan.model_dump(), **limits.model_dump()}
    )
    corrections = dict(result.corrections)
    warnings = list(result.warnings)
    slots = config.training.effective_batch_size
    if plan.micro_batch_size is not None and plan.micro_batch_size > slots:
        corrections["micro_batch_size"] = slots
        warnings.append(f"micro_batch_size is {slots}, the whole effective batch")
    if plan.optimizer_in_backward:
        corrections["micro_batch_size"] = slots  # each micro-batch would be an update of its own
    if plan.allocator == "compact" and plan.backend == "pytorch" and sys.platform != "linux":
        corrections["allocator"] = "system"
        warnings.append("allocator is system: compact needs the GNU C library")
    most_threads = max(thread_choices(config, hardware))
    if plan.workers is not None and plan.workers > most_threads:
        corrections["workers"] = most_threads
        warnings.append(f"workers is {most_threads} instead of {plan.workers}: each needs a thread")
    if _is_elsewhere(plan):
        for name, value, why in _for_other_devices(config):
            corrections[name] = value
            warnings.append(f"{name} is {value}: {why}")
    if plan.compile and (config.training.deterministic or plan.gradient_checkpointing not in (None, "none")):
        corrections["compile"] = False
        warnings.append("compile is false: it excludes deterministic training and gradient checkpointing")
    if plan.compile and config.model.kind == "decoder":
        corrections["compile"] = False
        warnings.append("compile is false: only the block of a recursion is compiled")
    update = {
        "plan": PlanSettings.model_validate({**plan.model_dump(), **_of_section(plan, corrections)}),
        "limits": LimitSettings.model_validate({**limits.model_dump(), **_of_section(limits, corrections)}),
    }
    return config.model_copy(update=update), tuple(f"{_section_of(text)}.{text}" for text in warnings)


def _is_elsewhere(plan: PlanSettings) -> bool:
    return (plan.backend, plan.device) != ("pytorch", "cpu")


def _for_other_devices(config: RunConfig) -> Iterator[tuple[str, object, str]]:
    """Yield what replaces settings that are for PyTorch on the CPU only, and why."""
    plan = config.plan
    place = f"{plan.backend} on {plan.device}"
    if plan.workers is not None and plan.workers > 1:
        yield "workers", 1, f"{place} computes one operation after the other"
    if plan.backend != "pytorch":
        return
    if plan.compile:
        yield "compile", False, f"a block is compiled for the CPU, not for {plan.device}"
    if (plan.precision or config.model.forward_dtype) != "float32":
        yield "precision", "float32", f"{place} computes in float32 only"
    if plan.allocator == "compact":
        yield "allocator", "system", f"the memory of {plan.device} has an allocator of its own"


def _of_section(section: PlanSettings | LimitSettings, corrections: JsonObject) -> JsonObject:
    return {name: value for name, value in corrections.items() if name in type(section).model_fields}


def _section_of(warning: str) -> str:
    """A warning starts with the name of its key."""
    return "limits" if warning.split()[0] in LimitSettings.model_fields else "plan"


def budget_of(config: RunConfig, hardware: HardwareSpecs) -> Budget:
    limits = config.limits
    return memory_budget(hardware.memory, limits.memory_limit_mb, limits.memory_fraction)


def thread_choices(config: RunConfig, hardware: HardwareSpecs) -> list[int]:
    most = hardware.cpu.compute_threads
    by_hand = config.plan.threads
    # Accelerate ignores the setting; MLX and other devices have threads of their own.
    if by_hand or sys.platform == "darwin" or _is_elsewhere(config.plan):
        return [by_hand or most]
    return sorted({1, max(1, most // 2), most})


def parallelism_choices(config: RunConfig, hardware: HardwareSpecs) -> list[Parallelism]:
    """List what to compare: every number of threads, shared or one per worker."""
    workers = config.plan.workers
    found = {
        (threads, min(workers or each, threads))
        for threads in thread_choices(config, hardware)
        for each in (1, useful_workers(threads, config.plan.backend, config.plan.device))
    }
    return sorted(Parallelism(*each) for each in found)
