"""The steps that a start lost when it crashed: those after its newest checkpoint."""

from __future__ import annotations

import math

from macbook_optimization.errors import RunError
from macbook_optimization.units import counted
from trm.runs.directory import Run
from trm.runs.events import Crashed
from trm.runs.rows import number
from trm.runs.state import read_last


def find_crash(run: Run, step: int) -> Crashed | None:
    """Return what is to be recorded if the last start crashed; `step` is that of the checkpoint, or 0."""
    try:
        last = read_last(run)
    except RunError:
        return None
    reported = number((last.row or {}).get("step"))
    ended = last.clean_stop is not None or last.regroups
    if last.boundary is None or ended or not math.isfinite(reported):
        return None
    return Crashed(step, int(reported), max(0, int(reported) - step))


def describe_crash(crash: Crashed) -> str:
    repeated = crash.repeated_steps
    lost = f"{counted(repeated, 'step')} will be repeated" if repeated else "no step is lost"
    return f"The last start crashed after step {crash.reported_step}: {lost}."
