"""A recipe that is too large for this machine: what it needs, and which smaller ones would fit.

A smaller recipe learns something else, so it is never used silently: an error lists the alternatives, and
`--fit` takes the best one and prints each change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from macbook_optimization.children import ChildDied, run_in_child
from macbook_optimization.cpu_optimization import environment
from macbook_optimization.errors import MemoryBudgetError
from macbook_optimization.json_types import JsonObject
from macbook_optimization.memory_management import MIB, MemoryModel
from macbook_optimization.training_config_adapter import fitting_heads, scaled_learning_rate
from trm.config import RunConfig
from trm.planning.measurer import PROBE_SECONDS
from trm.planning.planner import Planner
from trm.planning.settings import thread_choices

HIDDEN_SIZES = (768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 16)
Smaller = tuple[list[str], RunConfig]  # the changes as overrides, and the recipe with them


def too_large(planner: Planner) -> MemoryBudgetError:
    try:
        (needed,) = estimate(planner, [planner.config])
        choices = smaller_recipes(planner)
    except ChildDied as death:
        return MemoryBudgetError(f"There is too little memory to load PyTorch: its process {death}.")
    alternatives = "; ".join(" ".join(changes) for changes, _ in choices[:3])
    smaller = f" Changes that should fit: {alternatives}." if choices else ""
    limit, reason = _limit(planner)
    amount = f"about {needed} MiB" if needed > limit else f"more than {limit} MiB"
    return MemoryBudgetError(
        f"This recipe needs {amount} even with one example at a time; {limit} MiB is allowed "
        f"({reason}).{smaller}",
        hint="Raise limits.memory_limit_mb, close other programs, or use --fit to train a smaller model.",
    )


def fitted(planner: Planner) -> Planner:
    """Return a planner for the recipe itself if it fits, otherwise for the best smaller one that does."""
    if planner.choose() is not None:
        return planner
    for changes, smaller in smaller_recipes(planner):
        candidate = replace(planner, config=smaller)
        if candidate.choose() is not None:
            planner.display.message("The recipe does not fit; --fit changes it:\n  " + "\n  ".join(changes))
            return candidate
    raise too_large(planner)


def _limit(planner: Planner) -> tuple[int, str]:
    """Return the limit in MiB, and what imposes it."""
    budget = planner.budget
    addresses = budget.address_space_bytes
    if addresses is not None and addresses < budget.resident_bytes:
        return addresses // MIB, "the address space of a process, ulimit -v"
    return budget.resident_bytes // MIB, budget.reason


def smaller_recipes(planner: Planner) -> list[Smaller]:
    """Return the smaller recipes that should fit, best first."""
    candidates = list(_candidates(planner.config))
    estimates = estimate(planner, [config for _, config in candidates])
    limit, _ = _limit(planner)
    return [c for c, needed in zip(candidates, estimates, strict=True) if needed <= limit]


def estimate(planner: Planner, configs: Sequence[RunConfig]) -> list[int]:
    """Return the MiB that each recipe needs at its smallest: estimated, not measured."""
    reported: JsonObject = {}
    execution = planner.execution(checkpointing=planner.config.plan.gradient_checkpointing or "all")
    arguments = {
        "recipes": [config.model_dump(mode="json") for config in configs],
        "data": asdict(planner.data),
        "execution": asdict(execution),
    }
    try:
        lines = run_in_child(
            "trm.planning.probe:estimate",
            arguments,
            on_row=reported.update,
            environment=environment(max(thread_choices(planner.config, planner.hardware))),
            timeout_seconds=PROBE_SECONDS,
        )
    except ChildDied:
        if "state" not in reported:
            raise
        lines = [{"fixed_bytes": state, "bytes_per_example": 0} for state in reported["state"]]
    by_addresses = planner.budget.address_space_bytes is not None and reported["address_space"] is not None
    process = reported["address_space"] if by_addresses else reported["process"]
    models = [MemoryModel(process + line["fixed_bytes"], line["bytes_per_example"]) for line in lines]
    return [math.ceil(model.needed_bytes() / MIB) for model in models]


def _candidates(config: RunConfig) -> Iterator[Smaller]:
    """List smaller models first, then smaller batches (whose slots carry latents) with a matching rate."""
    for batch in _batches(config):
        changes, training = _with_batch(config, batch)
        base = config.model_copy(update={"training": training})
        if changes:
            yield changes, base
        for hidden_size in HIDDEN_SIZES:
            if hidden_size < config.model.hidden_size:
                named, smaller = _with_hidden_size(base, hidden_size)
                yield changes + named, smaller


def _batches(config: RunConfig) -> list[int]:
    slots = config.training.effective_batch_size
    if config.training.supervision != "deep":
        return [slots]
    return [slots] + [slots // 2**halvings for halvings in range(1, 6) if slots // 2**halvings >= 8]


def _with_batch(config: RunConfig, batch: int) -> tuple[list[str], Any]:
    training = config.training
    if batch == training.effective_batch_size:
        return [], training
    scaled = scaled_learning_rate(training.learning_rate, training.effective_batch_size, batch)
    rate = float(f"{scaled:.2g}")
    changes = [f"training.effective_batch_size={batch}", f"training.learning_rate={rate:g}"]
    return changes, training.model_copy(update={"effective_batch_size": batch, "learning_rate": rate})


def _with_hidden_size(config: RunConfig, hidden_size: int) -> Smaller:
    model = config.model
    update = {
        "hidden_size": hidden_size,
        "num_heads": fitting_heads(hidden_size, model.num_heads),
        "puzzle_emb_ndim": min(model.puzzle_emb_ndim, hidden_size),
    }
    changed = {name: value for name, value in update.items() if value != getattr(model, name)}
    named = [f"model.{name}={value}" for name, value in changed.items()]
    return named, config.model_copy(update={"model": model.model_copy(update=changed)})
