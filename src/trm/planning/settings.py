"""What the user's plan settings mean on this machine: corrections, and the choices that remain."""

from __future__ import annotations

import sys

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
    if plan.allocator == "compact" and sys.platform != "linux":
        corrections["allocator"] = "system"
        warnings.append("allocator is system: compact needs the GNU C library")
    most_threads = max(thread_choices(config, hardware))
    if plan.workers is not None and plan.workers > most_threads:
        corrections["workers"] = most_threads
        warnings.append(f"workers is {most_threads} instead of {plan.workers}: each needs a thread")
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
    if by_hand or sys.platform == "darwin":  # Accelerate ignores the setting: there is nothing to compare
        return [by_hand or most]
    return sorted({1, max(1, most // 2), most})


def parallelism_choices(config: RunConfig, hardware: HardwareSpecs) -> list[Parallelism]:
    """List what to compare: every number of threads, shared or one per worker."""
    workers = config.plan.workers
    found = {
        (threads, min(workers or each, threads))
        for threads in thread_choices(config, hardware)
        for each in (1, useful_workers(threads))
    }
    return sorted(Parallelism(*each) for each in found)
