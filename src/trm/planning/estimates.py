"""The memory that a recipe needs at its smallest, estimated in a child process that allocates none of it.

An estimate takes two seconds, most of them for loading the backend; measurements take five to fifteen, for
each way of saving memory. So what is clearly too large is refused by its estimate, and measurements decide
the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from macbook_optimization.children import ChildDied, Send, run_in_child
from macbook_optimization.cpu_optimization import environment
from macbook_optimization.errors import MemoryBudgetError
from macbook_optimization.json_types import JsonMapping, JsonObject
from macbook_optimization.memory_management import MIB, Budget, MemoryModel, MemoryMonitor, peak_address_space
from macbook_optimization.training_config_adapter import Checkpointing
from trm.backends.base import Program, load_backend
from trm.backends.bounds import in_smallest_precision, smallest_program, training_problem
from trm.config import AnyModelConfig, RunConfig
from trm.plan import Execution
from trm.planning.smaller import Smaller, smaller_recipes
from trm.tasks.base import DataSpec, GridLayout

ESTIMATE_SECONDS = 120
# Estimates were between 0.63 and 1.16 times the memory that one example really needed (docs/lab/memory.md).
CLEARLY_TOO_LARGE = 1.4  # times the limit: does not fit
CLEARLY_SMALL = 0.6  # times the limit: fits


@dataclass(frozen=True, slots=True)
class Need:
    """The needs of one example at a time, of the kind of memory that is scarcest in proportion."""

    mib: int
    limit_mib: int
    reason: str  # for the limit

    @property
    def fits(self) -> bool:
        return self.mib <= self.limit_mib

    @property
    def clearly_fits(self) -> bool:
        return self.mib <= CLEARLY_SMALL * self.limit_mib

    @property
    def is_clearly_too_large(self) -> bool:
        return self.mib > CLEARLY_TOO_LARGE * self.limit_mib


@dataclass(frozen=True, slots=True)
class Estimates:
    by_checkpointing: dict[Checkpointing, Need]
    smaller: tuple[Smaller, ...] = ()  # that should fit, best first; none if the recipe itself clearly does

    @property
    def least(self) -> Need:
        return min(self.by_checkpointing.values(), key=lambda need: need.mib / max(1, need.limit_mib))


def estimate_recipe(
    config: RunConfig, data: DataSpec, budget: Budget, execution: Execution, levels: Sequence[Checkpointing]
) -> Estimates:
    """Estimate a recipe with these levels of checkpointing and, unless it clearly fits, smaller ones."""
    candidates = [
        smaller
        for smaller in smaller_recipes(config)
        if training_problem(smallest_program(smaller[1], data)) is None
    ]
    reported: JsonObject = {}
    arguments = {
        "recipe": in_smallest_precision(config).model_dump(mode="json"),
        "smaller": [in_smallest_precision(each).model_dump(mode="json") for _, each in candidates],
        "data": asdict(data),
        "executions": [asdict(replace(execution, gradient_checkpointing=level)) for level in levels],
        "budget": asdict(budget),
    }
    try:
        run_in_child(
            f"{__name__}:estimate",
            arguments,
            on_row=reported.update,
            environment=environment(execution.threads),
            timeout_seconds=ESTIMATE_SECONDS,
        )
    except ChildDied as death:
        if "state" not in reported:
            raise MemoryBudgetError(
                f"There is too little memory to load PyTorch: its process {death}."
            ) from death
    # A process that died while it estimated steps has reported at least what every step keeps.
    lines = reported.get("own") or [{"fixed_bytes": reported["state"], "bytes_per_example": 0}] * len(levels)
    own = {
        level: need(MemoryModel(**line), reported["process"], budget)
        for level, line in zip(levels, lines, strict=True)
    }
    return Estimates(own, tuple(candidates[number] for number in reported.get("fitting", ())))


def need(model: MemoryModel, process: JsonMapping, budget: Budget) -> Need:
    """Compare what a step adds to an empty process with resident memory and, if limited, address space."""

    def mib(empty_bytes: int) -> int:
        whole = MemoryModel(empty_bytes + model.fixed_bytes, model.bytes_per_example)
        return math.ceil(whole.needed_bytes() / MIB)

    needs = [Need(mib(process["resident"]), budget.resident_bytes // MIB, budget.reason)]
    if budget.address_space_bytes is not None and process["address_space"] is not None:
        limit = budget.address_space_bytes // MIB
        reason = "the address space of a process, ulimit -v"
        needs.append(Need(mib(process["address_space"]), limit, reason))
    return max(needs, key=lambda each: each.mib / max(1, each.limit_mib))


def estimate(
    recipe: JsonMapping,
    smaller: Sequence[JsonMapping],
    data: JsonMapping,
    executions: Sequence[JsonMapping],
    budget: JsonMapping,
    send: Send,
) -> None:
    """Report the memory of an empty process, and what a step of the recipe adds. The child's body.

    What the recipe keeps is reported first: the rest takes some memory itself, which may not be there.
    """
    hows = [Execution(**each) for each in executions]
    limits = Budget(**budget)
    backend = load_backend(hows[0])
    MemoryMonitor().start_monitoring()
    backend.warm_up()
    process = {"resident": backend.peak_bytes(hows[0]), "address_space": peak_address_space()}
    spec = spec_from_json(data)
    program = Program.of(RunConfig.model_validate(recipe), spec)
    send({"process": process, "state": backend.state_bytes(program)})
    own = [backend.estimate(program, how) for how in hows]
    send({"own": [asdict(each) for each in own]})
    if any(need(each, process, limits).clearly_fits for each in own):
        return
    programs = [Program.of(RunConfig.model_validate(tree), spec) for tree in smaller]
    per_example: dict[AnyModelConfig, int] = {}  # many recipes differ in their batch only
    fitting = []
    for number, each in enumerate(programs):
        if each.model not in per_example:
            per_example[each.model] = backend.estimate(each, hows[-1]).bytes_per_example
        line = MemoryModel(backend.state_bytes(each), per_example[each.model])
        if need(line, process, limits).fits:
            fitting.append(number)
    send({"fitting": fitting})


def spec_from_json(facts: JsonMapping) -> DataSpec:
    """Rebuild what `asdict` made of a spec."""
    layout = facts.get("layout")
    grid = None
    if layout is not None:
        box = layout["box"]
        grid = GridLayout(layout["rows"], layout["columns"], tuple(box) if box else None)
    return DataSpec(**{**facts, "layout": grid, "class_names": tuple(facts.get("class_names", ()))})
