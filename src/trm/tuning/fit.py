"""A check that a candidate can be trained within the memory budget, before it is tried."""

from __future__ import annotations

from macbook_optimization.errors import MemoryBudgetError
from macbook_optimization.hardware_detection import HardwareDetector
from trm.backends.bounds import least_bytes, smallest_program, training_problem
from trm.config import RunConfig
from trm.display import Silent
from trm.planning.device_choice import REFERENCE, planner_at
from trm.planning.planner import PROCESS_BYTES, ROOMY, Planner
from trm.tasks.base import DataSpec


def why_it_does_not_fit(config: RunConfig, data: DataSpec) -> str | None:
    """Return why no plan could train the candidate within its budget, or None.

    Arithmetic decides where the budget is ample; an estimate, which takes two seconds, decides the rest.
    """
    program = smallest_program(config, data)
    if (problem := training_problem(program)) is not None:
        return str(problem)
    planner = Planner(config, data, HardwareDetector().detect(with_torch=False), Silent())
    planner = planner_at(planner, REFERENCE)  # whose memory is estimated, whatever `auto` will choose
    budget = planner.budget.resident_bytes
    if ROOMY * (PROCESS_BYTES + least_bytes(program)) < budget:
        return None
    try:
        need = planner.estimates().least
    except MemoryBudgetError as error:
        return str(error)
    if need.fits:
        return None
    return f"It needs about {need.mib} MiB, and {need.limit_mib} MiB is allowed ({need.reason})"
