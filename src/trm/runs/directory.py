"""A run directory: recipe, plan, metrics, events and checkpoints of one training.

Everything else about a run follows from these files, so a run that was killed, copied or renamed is still a
run. Metrics and events are appended line by line; an incomplete last line is ignored when they are read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psutil

from macbook_optimization.checkpoint_management import CheckpointManager
from macbook_optimization.durable_files import exclusive_lock, make_directory, replace_file
from macbook_optimization.errors import RunError
from macbook_optimization.json_types import JsonMapping
from trm.config import RunConfig, config_from_text, differences
from trm.plan import Plan
from trm.runs.events import Event
from trm.runs.reading import Follower, read_last_row, read_rows
from trm.runs.rows import Row

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
_WRITABLE = "Free some disk space, or make the directory writable."


@dataclass(frozen=True, slots=True)
class Run:
    path: Path

    @property
    def config(self) -> RunConfig:
        recipe = self.path / "recipe.yaml"
        try:
            return config_from_text(recipe.read_text(encoding="utf-8"), str(recipe))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", error)
            raise RunError(
                f"{self.path} is not a run: {recipe.name} cannot be read ({reason})",
                hint="`trm runs` lists the existing runs.",
            ) from error

    @property
    def plan(self) -> Plan | None:
        """The plan of the last start, if it can be read."""
        try:
            return Plan.from_json(json.loads((self.path / "plan.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def checkpoints(self, keep: int = 3, keep_every_hours: float | None = None) -> CheckpointManager:
        return CheckpointManager(self.path, keep, keep_every_hours)

    def write(self, name: str, text: str) -> None:
        try:
            replace_file(self.path / name, text.encode())
        except OSError as error:
            raise RunError(f"Cannot write {self.path / name}: {error.strerror}", _WRITABLE) from error

    def append(self, name: str, row: JsonMapping) -> None:
        try:
            with (self.path / name).open("ab+") as file:
                torn = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
                file.write(b"\n" * torn + json.dumps(row).encode() + b"\n")
        except OSError as error:
            raise RunError(f"Cannot write {self.path / name}: {error.strerror}", _WRITABLE) from error

    def record(self, event: Event) -> None:
        self.append(EVENTS, event.to_row())

    def rows(self, name: str = METRICS) -> list[Row]:
        return read_rows(self.path / name)

    def last_row(self, name: str = METRICS) -> Row | None:
        """Return the last complete row without reading the whole file."""
        return read_last_row(self.path / name)

    def follow(self) -> Follower:
        """Return a reader of new rows and events, for any process that watches this run."""
        return Follower((self.path / METRICS, self.path / EVENTS))


def open_run(path: Path, config: RunConfig) -> Run:
    """Return a new run, or the existing one if it learns the same. Nothing is written before `begin`."""
    run = Run(path)
    if (path / "recipe.yaml").exists():
        refuse_if_different(config.what_is_learned(), run.config.what_is_learned(), path)
    elif (path / "checkpoints").is_dir():
        raise RunError(
            f"{path} has checkpoints, but its recipe.yaml is missing",
            hint="Restore it (each checkpoint's state.json contains what it learned), or use another --run.",
        )
    elif not _is_free(path):
        raise RunError(f"{path} is not empty and not a run", hint="Use another --run directory.")
    return run


def _is_free(path: Path) -> bool:
    """Whether there is nothing, or only what remains of a start that was killed before it wrote a recipe."""
    return not path.is_dir() or all(file.name.endswith(".partial") for file in path.iterdir())


def refuse_if_different(ours: JsonMapping, theirs: JsonMapping, path: Path) -> None:
    different = differences(ours, theirs)
    if different:
        other_data = any(line.startswith(("spec.", "fingerprint.")) for line in different)
        what = "other data" if other_data else "another recipe"
        raise RunError(
            f"{path} holds a run of {what}:\n  " + "\n  ".join(different),
            hint="Use another --run directory, or --fresh to set that run aside and start a new one; "
            "`trm checkpoint import` starts a new run from its weights.",
        )


def begin(run: Run, config: RunConfig) -> None:
    """Make a directory a run. The recipe of an existing run is rewritten only if its settings changed."""
    try:
        make_directory(run.path)
    except OSError as error:
        raise RunError(f"Cannot create the run directory {run.path}: {error.strerror}", _WRITABLE) from error
    recipe = run.path / "recipe.yaml"
    text = config.to_yaml()
    if not recipe.exists() or recipe.read_text(encoding="utf-8") != text:
        run.write(recipe.name, text)


@contextmanager
def only_trainer(path: Path) -> Iterator[int]:
    """Lock the run for one trainer.

    The lock file is beside the run, which may not exist yet or may be set aside. Its descriptor is inherited
    by the trainer's process, so the lock is held as long as any process writes.
    """
    path = path.resolve()
    with ExitStack() as stack:
        try:
            make_directory(path.parent)
            held = stack.enter_context(exclusive_lock(path.with_name(f".{path.name}.lock")))
        except OSError as error:
            what = f"write beside {path}" if path.exists() else f"create the run directory {path}"
            raise RunError(f"Cannot {what}: {error.strerror}", hint=_WRITABLE) from error
        if isinstance(held, str):
            raise _in_use(path, held)
        yield held


def _in_use(path: Path, holder: str) -> RunError:
    """The holder writes its PID a moment after it got the lock, so the file may still be empty."""
    known = holder.isdigit() and psutil.pid_exists(int(holder))
    stop = f"stop it with `kill {holder}` (it saves)" if known else "wait a little if it was just killed"
    return RunError(
        f"{path} is being trained by another process{f', PID {holder}' if known else ''}",
        hint=f"Wait for it, {stop}, or use another --run directory.",
    )


def set_aside(path: Path) -> Path | None:
    """Rename an existing run to make room for a new one. Return its new path, or None if there was none."""
    path = path.resolve()
    if not path.exists() or (path.is_dir() and _is_free(path)):
        return None
    if not (path / "recipe.yaml").exists():
        raise RunError(f"{path} is not a run, so it stays where it is", hint="Use another --run directory.")
    number = next(n for n in count(1) if not path.with_name(f"{path.name}.{n}").exists())
    try:
        return path.rename(path.with_name(f"{path.name}.{number}"))
    except OSError as error:
        raise RunError(f"Cannot set {path} aside: {error.strerror}") from error
