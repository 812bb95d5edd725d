"""A run directory: recipe, plan, metrics, events and checkpoints of one training.

Everything else about a run follows from these files, so a run that was killed, copied or renamed is still a
run. Metrics and events are appended line by line; an incomplete last line is ignored when they are read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psutil

from macbook_optimization.checkpoint_management import CheckpointManager
from macbook_optimization.durable_files import exclusive_lock, make_directory, new_directory, replace_file
from macbook_optimization.errors import RunError
from macbook_optimization.file_errors import SHORTAGES, dangling_link, hint_for, reason_of
from macbook_optimization.input_files import open_descriptor, read_input, read_json
from macbook_optimization.json_types import JsonMapping
from macbook_optimization.units import MIB
from trm.config import RunConfig, config_from_text, differences
from trm.plan import Plan
from trm.runs.events import Event
from trm.runs.reading import Follower, read_last_row, read_rows
from trm.runs.rows import Row

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
RESOURCES = "resources.jsonl"
DATASET = "dataset"  # of a run that has a dataset of its own
MAIL = "mail"  # of a run that is a part of a mail model: the rest of it
JOIN_TOKEN = "join_token"  # of a run that listens: what machines that join must name
PREPARED = (DATASET, MAIL, JOIN_TOKEN)  # may exist before the run begins
_MAX_BYTES = MIB  # of a recipe or a plan
_OTHER_RUN = "Use another --run directory."
_LENGTH_KEYS = ("training.max_steps ", "training.extensions.")


@dataclass(frozen=True, slots=True)
class Run:
    path: Path

    @property
    def config(self) -> RunConfig:
        recipe = self.path / "recipe.yaml"
        try:
            text = read_input(recipe, _MAX_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise self._not_a_run(error) from error
        return config_from_text(text, str(recipe))

    def _not_a_run(self, error: OSError | UnicodeDecodeError) -> RunError:
        reason = getattr(error, "strerror", error)
        if isinstance(error, OSError) and error.errno in SHORTAGES:
            return _failure(f"read {self.path / 'recipe.yaml'}", error)
        return RunError(
            f"{self.path} is not a run: recipe.yaml cannot be read ({reason})",
            hint="`trm runs` lists the existing runs.",
        )

    @property
    def plan(self) -> Plan | None:
        """The plan of the last start, if it can be read."""
        try:
            return Plan.from_json(read_json(self.path / "plan.json", _MAX_BYTES))
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def checkpoints(self, keep: int = 3, keep_every_hours: float | None = None) -> CheckpointManager:
        return CheckpointManager(self.path, keep, keep_every_hours)

    def write(self, name: str, text: str) -> None:
        try:
            replace_file(self.path / name, text.encode())
        except OSError as error:
            raise _failure(f"write {self.path / name}", error) from error

    def append(self, name: str, row: JsonMapping) -> None:
        try:
            with open(self.path / name, "ab+", opener=_open_to_append) as file:
                torn = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
                file.write(b"\n" * torn + json.dumps(row).encode() + b"\n")
        except OSError as error:
            raise _failure(f"write {self.path / name}", error) from error

    def record(self, event: Event) -> None:
        self.append(EVENTS, event.to_row())

    def rows(self, name: str = METRICS) -> list[Row]:
        with self._read(name):
            return read_rows(self.path / name)

    def last_row(self, name: str = METRICS, accept: Callable[[Row], bool] = lambda row: True) -> Row | None:
        """Return the last complete row that `accept` returns true for, without reading the whole file."""
        with self._read(name):
            return read_last_row(self.path / name, accept)

    @contextmanager
    def _read(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _failure(f"read {self.path / name}", error) from error

    def follow(self) -> Follower:
        """Return a reader of new rows and events, for any process that watches this run."""
        return Follower(tuple(self.path / name for name in (METRICS, EVENTS, RESOURCES)))


def _open_to_append(path: str, flags: int) -> int:
    """Open a regular file or create one: a pipe in its place would block."""
    return open_descriptor(path, flags) if os.path.lexists(path) else os.open(path, flags, 0o666)


def _failure(what: str, error: OSError) -> RunError:
    return RunError(f"Cannot {what}: {reason_of(error)}", hint=hint_for(error, _OTHER_RUN))


def check_path(path: Path) -> Path:
    """Return the absolute path of a run behind symbolic links; raise `RunError` if none can be there."""
    if (problem := dangling_link(path)) is not None:
        raise RunError(
            f"{path} is {problem}",
            hint="Create the directory that it names, remove the link, or use another --run directory.",
        )
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file, not a run directory", hint=_OTHER_RUN)
    return Path(os.path.realpath(path))


def is_run(path: Path) -> bool:
    """Return whether there is a recipe that we may see: `Path.exists` raises if we may not."""
    return os.path.exists(path / "recipe.yaml")


def open_run(path: Path, config: RunConfig) -> Run:
    """Return a new run, or the existing one if it learns the same. Nothing is written before `begin`."""
    check_path(path)
    run = Run(path)
    if is_run(path):
        refuse_if_different(config.what_is_learned(), run.config.what_is_learned(), path, can_extend=True)
    elif (path / "checkpoints").is_dir():
        raise RunError(
            f"{path} has checkpoints, but its recipe.yaml is missing",
            hint="Restore it (each checkpoint's state.json contains what it learned), or use another --run.",
        )
    elif not is_free(path):
        raise RunError(f"{path} is not empty and not a run", hint=_OTHER_RUN)
    return run


def is_free(path: Path) -> bool:
    """Return whether there is nothing but what a start leaves that was killed before it wrote a recipe."""
    if not path.is_dir():
        return True
    return all(file.name in PREPARED or file.name.endswith(".partial") for file in path.iterdir())


def refuse_if_different(
    ours: JsonMapping, theirs: JsonMapping, path: Path, *, can_extend: bool = False
) -> None:
    """Raise `RunError` with every difference. `can_extend`: `path` is a run that may get more steps."""
    different = differences(ours, theirs)
    if not different:
        return
    other_data = any(line.startswith(("spec.", "fingerprint.")) for line in different)
    what = "other data" if other_data else "another recipe"
    hint = (
        "Use another --run directory, or --fresh to set that run aside and start a new one; "
        "`trm checkpoint import` starts a new run from its weights."
    )
    if can_extend and all(line.startswith(_LENGTH_KEYS) for line in different):
        hint = (
            f"`trm train {path}` resumes it with its own recipe; after its last step, "
            f"`trm train {path} --more-steps N` trains it longer."
        )
    raise RunError(f"{path} holds a run of {what}:\n  " + "\n  ".join(different), hint=hint)


def begin(run: Run, config: RunConfig) -> None:
    """Make a directory a run. The recipe of an existing run is rewritten only if its settings changed."""
    make_run_directory(run)
    recipe = run.path / "recipe.yaml"
    text = config.to_yaml()
    if not recipe.exists() or recipe.read_text(encoding="utf-8") != text:
        run.write(recipe.name, text)


def make_run_directory(run: Run) -> None:
    try:
        make_directory(run.path)
    except OSError as error:
        raise _failure(f"create the run directory {run.path}", error) from error


@contextmanager
def new_run(path: Path, config: RunConfig) -> Iterator[Run]:
    """Yield a new run that is at `path` when everything in it is written. After an error, nothing is left."""
    try:
        with new_directory(path) as partial:
            run = Run(partial)
            begin(run, config)
            yield run
            if path.is_dir() and is_free(path):
                for leftover in path.iterdir():
                    leftover.unlink()
    except OSError as error:
        raise _failure(f"create the run directory {path}", error) from error


@contextmanager
def only_trainer(path: Path) -> Iterator[int]:
    """Lock the run for one trainer.

    The lock file is beside the run, which may not exist yet or may be set aside. Its descriptor is inherited
    by the trainer's process, so the lock is held as long as any process writes.
    """
    path = check_path(path)
    with ExitStack() as stack:
        try:
            make_directory(path.parent)
            held = stack.enter_context(exclusive_lock(path.with_name(f".{path.name}.lock")))
        except OSError as error:
            what = f"write beside {path}" if path.exists() else f"create the run directory {path}"
            raise _failure(what, error) from error
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
    """Rename an existing run to make room for a new one. Return its new path, or None if there was none.

    A symbolic link stays: the run that it leads to is renamed, and the link leads to a new directory.
    """
    target = check_path(path)
    if not target.exists() or is_free(target):
        return None
    if not is_run(target):
        raise RunError(f"{path} is not a run, so it stays where it is", hint=_OTHER_RUN)
    number = next(n for n in count(1) if not os.path.lexists(target.with_name(f"{target.name}.{n}")))
    aside = target.with_name(f"{target.name}.{number}")
    try:
        os.rename(target, aside)
        if path.is_symlink():
            make_directory(target)
    except OSError as error:
        raise _failure(f"set {path} aside", error) from error
    return aside
