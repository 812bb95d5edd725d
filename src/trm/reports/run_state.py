"""Whether a run is being trained, has finished, was stopped, or died."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from macbook_optimization.input_files import open_descriptor
from macbook_optimization.terminal_text import one_line
from trm.config import RunConfig
from trm.reports.event_text import describe_event
from trm.reports.history import History, number
from trm.runs.directory import Run
from trm.runs.events import Stopped
from trm.runs.listing import is_done, primary_metric
from trm.runs.rows import Row

Name = Literal["new", "running", "finished", "stopped", "crashed"]


@dataclass(frozen=True, slots=True)
class RunState:
    name: Name
    text: str  # one sentence


def state_of(run: Run, config: RunConfig | None, history: History) -> RunState:
    """Return the state of a run. A run that has recorded its end is not running, even if its command is."""
    stop = _clean_stop(history)
    if stop is None and is_locked(run.path):
        return RunState("running", f"It is being trained now; the last row is of step {history.step:,}.")
    if stop is not None:
        return _stopped(run, config, stop)
    if not history.recent and not history.evaluations:
        return RunState("new", "No step of it has been recorded yet.")
    return RunState(
        "crashed",
        f"It ended without a last word after step {history.step:,}: the process was killed, or the machine "
        f"went down. `trm train {run.path}` resumes it from its newest checkpoint.",
    )


def _stopped(run: Run, config: RunConfig | None, stop: Row) -> RunState:
    reason = str(stop.get("reason"))
    text = f"It {one_line(describe_event(stop))}."
    checkpoints = run.checkpoints()
    best = primary_metric(checkpoints.best() or {})
    step = checkpoints.newest_step() or 0
    done = reason in ("target", "max_steps") if config is None else is_done(config, step, best)
    if done:
        return RunState("finished", text)
    return RunState("stopped", f"{text} `trm train {run.path}` resumes it.")


def _clean_stop(history: History) -> Row | None:
    """Return the event with which the last start ended, if nothing follows it."""
    events: Sequence[Row] = list(history.events)
    if not events or events[-1].get("event") != Stopped.name:
        return None
    stop = events[-1]
    return stop if not number(stop.get("step")) < history.step else None


def is_locked(path: Path) -> bool:
    """Return whether a trainer holds the lock of a run (see `only_trainer`). Nothing is created."""
    target = Path(os.path.realpath(path))
    try:
        descriptor = open_descriptor(target.with_name(f".{target.name}.lock"))
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        with suppress(OSError):
            os.close(descriptor)
    return False
