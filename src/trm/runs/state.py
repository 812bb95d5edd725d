"""The state of a run: being trained, finished, stopped, or crashed. This is the one place that decides it.

A trainer holds the lock of its run for as long as it lives, however it ends, and its last event is
`stopped`. A run whose lock is free and whose last start has no such event has therefore crashed. How long ago
a row was written decides nothing: a step may take minutes.
"""

from __future__ import annotations

import fcntl
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from macbook_optimization.input_files import open_descriptor
from macbook_optimization.json_types import JsonMapping
from trm.config import RunConfig
from trm.runs.directory import EVENTS, Run
from trm.runs.events import EARLY_STOPPING, STARTS, PlanChosen, Regrouping, Stopped
from trm.runs.metric import primary_metric
from trm.runs.rows import Row, number
from trm.tasks.metrics import has_reached

Name = Literal["new", "running", "finished", "stopped early", "stopped", "crashed"]
ENDS: tuple[Name, ...] = ("finished", "stopped early")  # nothing is left to train
# Advice may still be recorded after `stopped`; these events begin or end a start.
_BOUNDARIES = (Stopped.name, Regrouping.name, PlanChosen.name, *STARTS)


class LastRecorded(NamedTuple):
    """The newest entries of a run's files, as far as its state depends on them."""

    boundary: Row | None = None  # the event that began or ended a start
    stop: Row | None = None  # the event `stopped`, possibly of an earlier start
    row: Row | None = None  # of training or of an evaluation

    def after_event(self, event: Row) -> LastRecorded:
        if not is_boundary(event):
            return self
        stop = event if is_stop(event) else self.stop
        return self._replace(boundary=event, stop=stop)

    @property
    def clean_stop(self) -> Row | None:
        """The event with which the last start ended; None if there is none, or training followed it."""
        if self.boundary is None or not is_stop(self.boundary):
            return None
        went_on = number(self.boundary.get("step")) < number((self.row or {}).get("step"))
        return None if went_on else self.boundary

    @property
    def regroups(self) -> bool:
        """Return whether the last start ended because a machine arrived or left."""
        return self.boundary is not None and self.boundary.get("event") == Regrouping.name


@dataclass(frozen=True, slots=True)
class RunState:
    name: Name
    step: int  # the last one that was reported
    seconds: float | None  # of training until then
    stop: Row | None  # the event with which the last start ended, if it did

    @property
    def has_ended(self) -> bool:
        return self.name in ENDS


def is_boundary(event: Row) -> bool:
    return event.get("event") in _BOUNDARIES


def is_stop(event: Row) -> bool:
    return event.get("event") == Stopped.name


def read_last(run: Run) -> LastRecorded:
    """Read the ends of a run's files; raise `RunError` if one cannot be read."""
    boundary = run.last_row(EVENTS, is_boundary)
    stop = boundary if boundary is None or is_stop(boundary) else run.last_row(EVENTS, is_stop)
    return LastRecorded(boundary, stop, run.last_row())


def state_of(run: Run, config: RunConfig | None, last: LastRecorded) -> RunState:
    """Return the state of a run of which `last` was recorded; `config` is None if it cannot be read."""
    stop = last.clean_stop
    step, seconds = _progress(run, last)
    return RunState(_name(run, config, last), step, seconds, stop)


def _name(run: Run, config: RunConfig | None, last: LastRecorded) -> Name:
    stop = last.clean_stop
    locked_at = locked_since(run.path)
    # A stop that is newer than the lock ended the start that holds it: its command still writes the report.
    if locked_at is not None and not (stop is not None and number(stop.get("time")) >= locked_at):
        return "running"
    end = end_of(run, config, last)
    if end is not None:
        return end
    if stop is not None:
        return "stopped"
    return "new" if last.row is None else "crashed"


def end_of(
    run: Run, config: RunConfig | None, last: LastRecorded
) -> Literal["finished", "stopped early"] | None:
    """Return how a run ended if nothing is left to train, whether or not it is locked."""
    stop = last.clean_stop
    if stop is None and last.boundary is not None:
        return None
    stop = stop or {}
    if config is None:
        if stop.get("reason") == EARLY_STOPPING:
            return "stopped early"
        return "finished" if stop.get("reason") in ("target", "max_steps") else None
    checkpoints = run.checkpoints()
    best = primary_metric(checkpoints.best() or {})
    step = number(stop.get("step"))
    saved = int(step) if math.isfinite(step) else checkpoints.newest_step() or 0
    if is_done(config, saved, best):
        return "finished"
    return "stopped early" if has_stopped_early(config, saved, stop) else None


def is_done(config: RunConfig, step: int, best: tuple[str, float] | None) -> bool:
    """Return whether a run has reached its target, by its best primary metric, or its last step."""
    return target_reached(config, best) or step >= config.training.last_step


def target_reached(config: RunConfig, best: tuple[str, float] | None) -> bool:
    return best is not None and has_reached(*best, config.evaluation.target)


def has_stopped_early(config: RunConfig, step: int, stopped: JsonMapping) -> bool:
    """Return whether early stopping ended a run at this step. `stopped` is the event of its last stop.

    `config` no longer ends there if it has no early stopping, or more steps were requested after it.
    """
    is_end = stopped.get("reason") == EARLY_STOPPING and stopped.get("step") == step
    return is_end and config.training.early_stopping is not None


def _progress(run: Run, last: LastRecorded) -> tuple[int, float | None]:
    """Return the last step that was reported, and the seconds of training that were reported with it."""
    known = [each for each in (last.row, last.stop) if each and math.isfinite(number(each.get("seconds")))]
    newest = max(known, key=lambda each: number(each["seconds"]), default=last.row or {})
    step = number(newest.get("step"))
    seconds = number(newest.get("seconds"))
    reported = int(step) if math.isfinite(step) else run.checkpoints().newest_step() or 0
    return reported, seconds if math.isfinite(seconds) else None


def is_locked(path: Path) -> bool:
    """Return whether a trainer holds the lock of a run (see `only_trainer`)."""
    return locked_since(path) is not None


def locked_since(path: Path) -> float | None:
    """Return when the trainer that holds the lock of a run got it; None if there is none."""
    target = Path(os.path.realpath(path))
    try:
        descriptor = open_descriptor(target.with_name(f".{target.name}.lock"))
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.fstat(descriptor).st_mtime
    except OSError:  # a file system without locks, where nothing is trained
        return None
    finally:
        with suppress(OSError):
            os.close(descriptor)
    return None
