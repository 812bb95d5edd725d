"""A run as TensorBoard event files, written after the fact: scalars of all rows, and events as text."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from macbook_optimization.durable_files import new_directory, remove_directory, write_synced
from macbook_optimization.errors import RunError
from macbook_optimization.file_errors import hint_for, reason_of
from trm.reports.scalars import Recorded, read_recorded
from trm.reports.tfevents import record, scalar_event, text_event, version_event
from trm.runs.directory import Run

DIRECTORY = "tensorboard"  # in the run
FILE_NAME = "events.out.tfevents.0000000000.trm"
_FILE = re.compile(r"events\.out\.tfevents\..*")
_OTHER_DIRECTORY = "Choose another directory."
_MAX_FLOAT32 = 3.4028234e38


@dataclass(frozen=True, slots=True)
class Written:
    directory: Path
    num_rows: int
    num_events: int


def write_event_files(run: Run, directory: Path | None = None) -> Written:
    """Write the event file of a run, in place of an earlier one. By default it is in the run itself."""
    target = directory or run.path / DIRECTORY
    _refuse_other_content(target)
    try:
        recorded = read_recorded(run)
        _replace(Path(os.path.realpath(target)), _records(recorded))
    except OSError as error:
        raise RunError(
            f"Cannot write the event files to {target}: {reason_of(error)}",
            hint=hint_for(error, _OTHER_DIRECTORY),
        ) from error
    return Written(target, len(recorded.rows), len(recorded.events))


def _refuse_other_content(target: Path) -> None:
    """Raise `RunError` unless there is nothing, or only what an earlier call wrote."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise RunError(f"{target} is not a directory", hint=_OTHER_DIRECTORY)
    others = sorted(path.name for path in target.iterdir() if not _FILE.fullmatch(path.name))
    if others:
        raise RunError(
            f"{target} has other files than TensorBoard's, such as {others[0]}", hint=_OTHER_DIRECTORY
        )


def _replace(target: Path, records: Iterable[bytes]) -> None:
    with new_directory(target) as partial:
        write_synced(partial / FILE_NAME, records)
        if target.exists():
            remove_directory(target)


def _records(recorded: Recorded) -> Iterator[bytes]:
    points = [*recorded.rows, *recorded.samples]
    yield record(version_event(min((point.time for point in points), default=0.0)))
    for point in points:
        scalars = {tag: _in_float32(value) for tag, value in point.scalars.items()}
        yield record(scalar_event(point.time, point.step, scalars))
    for event in recorded.events:
        yield record(text_event(event.time, event.step, event.tag, event.text))


def _in_float32(value: float) -> float:
    """Return the value, or Inf where float32 has no such number."""
    return math.copysign(math.inf, value) if abs(value) > _MAX_FLOAT32 else value
