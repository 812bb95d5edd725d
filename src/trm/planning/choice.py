"""From measurements to a plan: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from macbook_optimization.memory_management import MARGIN, MIB, Budget
from macbook_optimization.training_config_adapter import plan_batches
from trm.config import RunConfig
from trm.plan import Execution, Plan
from trm.planning.measurements import (
    Measurements,
    Parallelism,
    RunMemory,
    SizeResult,
    address_space_model,
)
from trm.planning.probe import FIRST_SIZE
from trm.planning.tuning import LARGE_ENOUGH, NEARLY_AS_FAST, best_size, spread

BY_HAND = "set by hand"


def make_plan(
    config: RunConfig,
    budget: Budget,
    measured: Measurements,
    execution: Execution,
    choices: Sequence[Parallelism],
) -> Plan:
    """Choose micro-batch size and parallelism for an execution that is otherwise decided."""
    num_slots = config.training.effective_batch_size
    parallelism, why_threads = choose_parallelism(config, measured, choices)
    memory = RunMemory.of(measured, parallelism.workers)
    wanted, why_size = config.plan.micro_batch_size, BY_HAND
    if wanted is None:
        wanted, why_size = fast_enough(measured.by_size, measured.sizes, num_slots)
    most = largest_fitting(measured, budget, num_slots, parallelism.workers)
    if most < wanted:
        why_size = f"a larger one does not fit into {budget.resident_bytes / MIB:,.0f} MiB: {budget.reason}"
    at_most = min(most, wanted)
    batches = plan_batches(num_slots, memory.line(at_most), budget.resident_bytes, at_most)
    size = batches.micro_batch_size
    return Plan(
        execution=replace(execution, **parallelism._asdict()),
        micro_batch_size=size,
        accumulation_steps=batches.accumulation_steps,
        budget_bytes=budget.resident_bytes,
        predicted_peak_bytes=memory.peak_bytes(size),
        memory=memory.line(size),
        samples_per_second=_throughput(measured, size, parallelism),
        other_cpu_percent=measured.other_cpu_percent,
        reasons={
            "micro_batch_size": why_size,
            "threads": why_threads,
            "memory": f"measured; the budget is {budget.resident_bytes / MIB:,.0f} MiB, {budget.reason}",
            **_savings_reasons(config, execution),
        },
    )


def _savings_reasons(config: RunConfig, execution: Execution) -> dict[str, str]:
    reasons = {}
    if execution.gradient_checkpointing != "none":
        by_hand = config.plan.gradient_checkpointing is not None
        reasons["gradient_checkpointing"] = BY_HAND if by_hand else "needed to fit the memory budget"
    if execution.allocator != "system":
        reasons["allocator"] = BY_HAND if config.plan.allocator else "needed to fit the memory budget"
    return reasons


def largest_fitting(measured: Measurements, budget: Budget, num_slots: int, workers: int) -> int:
    """Return how many examples at a time fit the budget and, where it is limited, the address space."""
    largest = measured.sizes[-1]
    most = RunMemory.of(measured, workers).largest_batch(budget.resident_bytes * (1 - MARGIN))
    if len(measured.sizes) == 1 and num_slots > 1:  # and more did not fit
        return min(most, largest.micro_batch_size)
    addresses = address_space_model(measured.sizes)
    if budget.address_space_bytes is not None and addresses is not None:
        # What was measured under this very limit needs no margin.
        limit = addresses.largest_batch(budget.address_space_bytes * (1 - MARGIN))
        most = min(most, max(largest.micro_batch_size, limit))
    return most


def fast_enough(
    rates: Mapping[int, Sequence[float]], sizes: Sequence[SizeResult], num_slots: int
) -> tuple[int, str]:
    """Return the size to use, and why: the smallest that is about as fast as any, memory permitting."""
    chosen = best_size(rates, sizes)
    if chosen == num_slots:
        return chosen, "the whole effective batch"
    if chosen < max(rates):
        noise = spread(rates)
        within = f" beyond the measured spread of {noise:.0%}" if noise > 1 - NEARLY_AS_FAST else ""
        return chosen, f"larger ones are not faster{within}, as measured"
    if 1 < chosen < FIRST_SIZE:  # a single example keeps the cores busy for long
        return chosen, "larger ones were not measured, because one example takes long"
    return min(max(chosen, LARGE_ENOUGH), num_slots), f"faster with every size up to {chosen}, as measured"


def choose_parallelism(
    config: RunConfig, measured: Measurements, choices: Sequence[Parallelism]
) -> tuple[Parallelism, str]:
    """Prefer fewer threads, which leave more to the user, unless more are clearly faster."""
    rates = measured.by_parallelism
    if not rates:
        by_hand = config.plan.threads or config.plan.workers
        return max(choices), BY_HAND if by_hand else "all cores that compute at full speed"
    best = max(rates.values())
    fewest = min(each.threads for each, rate in rates.items() if rate >= NEARLY_AS_FAST * best)
    chosen = max((each for each in rates if each.threads == fewest), key=lambda each: rates[each])
    readings = ", ".join(
        f"{rate:.3g} samples/s with {_described(each)}" for each, rate in sorted(rates.items())
    )
    return chosen, f"measured {readings}"


def _described(parallelism: Parallelism) -> str:
    workers = f" in {parallelism.workers} workers" if parallelism.workers > 1 else ""
    return f"{parallelism.threads}{workers}"


def _throughput(measured: Measurements, micro_batch_size: int, parallelism: Parallelism) -> float:
    nearest = min(measured.by_size, key=lambda size: abs(size - micro_batch_size))
    return measured.by_parallelism.get(parallelism, max(measured.by_size[nearest]))
