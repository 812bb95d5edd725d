"""A run directory: recipe, plan, metrics, events and checkpoints of one training.

Everything else about a run follows from these files, so a run that was killed, copied or renamed is still
a run. Metrics and events are appended line by line; a torn last line is ignored when they are read.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from macbook_optimization.checkpoint_files import Checkpoint, open_checkpoint, step_of
from macbook_optimization.checkpoint_management import CheckpointManager
from macbook_optimization.durable_files import exclusive_lock, make_directory, replace_file
from macbook_optimization.errors import CheckpointError, ConfigError, LaptopError, RunError
from macbook_optimization.training_config_adapter import TrainingParams
from trm.config import CountOrZero, PositiveOrZero, RunConfig, config_from_text, differences

Plan = TrainingParams
_WRITABLE = "Free some disk space, or make the directory writable."
DEFAULT_PLAN = Plan(micro_batch_size=32, accumulation_steps=1, threads=1)  # of a run that was only imported


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
                hint="`trm runs` lists the runs there are.",
            ) from error

    @property
    def plan(self) -> Plan | None:
        """The plan of the last start, if there is a readable one."""
        try:
            return Plan.from_json(json.loads((self.path / "plan.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def checkpoints(self, keep: int = 3, keep_every_hours: float | None = None) -> CheckpointManager:
        return CheckpointManager(self.path, keep, keep_every_hours)

    def write(self, name: str, text: str) -> None:
        try:
            replace_file(self.path / name, text.encode())
        except OSError as error:
            raise RunError(f"Cannot write {self.path / name}: {error.strerror}", _WRITABLE) from error

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        try:
            with (self.path / name).open("ab+") as file:
                torn = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
                file.write(b"\n" * torn + json.dumps(row).encode() + b"\n")
        except OSError as error:
            raise RunError(f"Cannot write {self.path / name}: {error.strerror}", _WRITABLE) from error

    def event(self, what: str, **facts: Any) -> None:
        self.append("events.jsonl", {"time": time.time(), "event": what, **facts})

    def rows(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        try:
            lines = (self.path / name).read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        return [row for line in lines if (row := _parse_line(line)) is not None]


def _parse_line(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def open_run(path: Path, config: RunConfig) -> Run:
    """A new run, or the one that lies there if it learns the same. Nothing is written before `begin`."""
    run = Run(path)
    if (path / "recipe.yaml").exists():
        _refuse_if_different(config.what_is_learned(), run.config.what_is_learned(), path)
    elif (path / "checkpoints").is_dir():
        raise RunError(
            f"{path} has checkpoints, but its recipe.yaml is gone",
            hint="Put it back (each checkpoint's state.json tells what it learned), or use another --run.",
        )
    elif not _is_free(path):
        raise RunError(f"{path} is not empty and not a run", hint="Use another --run directory.")
    return run


class SavedState(BaseModel):
    """What a checkpoint says beside its tensors. What decides the weights from here on is compared when
    it is resumed; `plan` and `versions` may change, and are noted when they do."""

    model_config = ConfigDict(frozen=True)
    recipe: dict[str, Any]
    shape: dict[str, int]
    data: dict[str, str] | None  # fingerprints; None in a run that only imported its weights
    slots: dict[str, list[Annotated[int, Field(ge=-1, lt=2**62)]]]
    curriculum: dict[Literal["stage", "exact", "seen"], CountOrZero] = {}
    seconds: PositiveOrZero = 0.0  # of training, over all starts
    evaluated: CountOrZero = 0  # the last step whose weights were evaluated
    best: dict[str, Any] | None = None  # the best evaluation so far, this one's included
    skipped_in_a_row: CountOrZero = 0
    learning_rate_scale: Annotated[float, Field(gt=0, le=1)] = 1.0
    rolled_back_from: CountOrZero | None = None
    plan: dict[str, Any] | None = None
    versions: dict[str, str] = {}


def read_state(checkpoint: Checkpoint) -> SavedState:
    try:
        return SavedState.model_validate(checkpoint.metadata)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
        raise CheckpointError(f"{checkpoint.path}/state.json makes no sense: {problems}") from error


def _is_free(path: Path) -> bool:
    """Nothing is there, or only what a start left that was killed before it had written its recipe."""
    return not path.is_dir() or all(file.name.endswith(".partial") for file in path.iterdir())


def check_compatible(
    checkpoint: Checkpoint,
    config: RunConfig,
    shape: Mapping[str, int] | None = None,
    data: Mapping[str, str] | None = None,
) -> SavedState:
    """A recipe edited by hand, data that changed, or a checkpoint copied from another run would load as
    something else. Every difference is listed."""
    state = read_state(checkpoint)
    ours, theirs = config.what_is_learned(), RunConfig.with_defaults(state.recipe)
    if shape is not None:
        ours["shape"], theirs["shape"] = shape, state.shape
    if data is not None and state.data is not None:
        ours["fingerprint"] = {name: value[:12] for name, value in data.items()}
        theirs["fingerprint"] = {name: value[:12] for name, value in state.data.items()}
    _refuse_if_different(ours, theirs, checkpoint.path)
    return state


def _refuse_if_different(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: Path) -> None:
    different = differences(ours, theirs)
    if different:
        other_data = any(line.startswith(("shape.", "fingerprint.")) for line in different)
        what = "other data" if other_data else "another recipe"
        raise RunError(
            f"{path} holds a run of {what}:\n  " + "\n  ".join(different),
            hint="Use another --run directory, or --fresh to set that run aside and start anew; "
            "`trm checkpoint import` starts a new run from its weights.",
        )


def begin(run: Run, config: RunConfig) -> None:
    """Makes a directory a run. A run that goes on is written to only if the recipe's plan has changed."""
    try:
        make_directory(run.path)
    except OSError as error:
        raise RunError(f"Cannot create the run directory {run.path}: {error.strerror}", _WRITABLE) from error
    recipe, text = run.path / "recipe.yaml", config.to_yaml()
    if not recipe.exists() or recipe.read_text(encoding="utf-8") != text:
        run.write(recipe.name, text)


@contextmanager
def only_trainer(path: Path) -> Iterator[int]:
    """Holds the run for one trainer. The lock lies beside the run, which may not exist yet or be set aside;
    its descriptor is for the trainer's process to inherit, so that it holds as long as anybody writes."""
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
    """The holder has written its number a moment after it got the lock, so it may not be there yet."""
    known = holder.isdigit() and psutil.pid_exists(int(holder))
    stop = f"stop it with `kill {holder}` (it saves)" if known else "wait a little if it was just killed"
    return RunError(
        f"{path} is being trained by another process{f', number {holder}' if known else ''}",
        hint=f"Wait for it, {stop}, or use another --run directory.",
    )


def set_aside(path: Path) -> Path | None:
    """Gives way to a fresh run, without losing the old one."""
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


@dataclass(frozen=True, slots=True)
class RunSummary:
    path: str
    task: str | None
    state: str  # "done", "unfinished", or "unreadable" if its recipe is
    step: int
    max_steps: int | None
    seconds: float | None
    exact_accuracy: float | None
    accuracy: float | None  # by the task's own headline: exact, valid or pass@2


def headline(best: Mapping[str, Any]) -> float | None:
    """The figure by which it is the best."""
    return best.get(best.get("headline", "exact_accuracy"))


def list_runs(root: Path) -> list[RunSummary]:
    return [summarise(Run(path.parent)) for path in sorted(root.glob("*/recipe.yaml"))]


def summarise(run: Run) -> RunSummary:
    rows = run.rows()
    seconds = rows[-1].get("seconds") if rows else None
    checkpoints = run.checkpoints()
    best = checkpoints.best() or {}
    exact, accuracy = best.get("exact_accuracy"), headline(best)
    step = checkpoints.newest_step() or 0
    try:
        config = run.config
    except (RunError, ConfigError):
        return RunSummary(str(run.path), None, "unreadable", step, None, seconds, exact, accuracy)
    target = config.evaluation.target_accuracy
    reached = target is not None and accuracy is not None and accuracy >= target
    return RunSummary(
        path=str(run.path),
        task=config.task,
        state="done" if reached or step >= config.training.max_steps else "unfinished",
        step=step,
        max_steps=config.training.max_steps,
        seconds=seconds,
        exact_accuracy=exact,
        accuracy=accuracy,
    )


@dataclass(frozen=True, slots=True)
class Verification:
    path: str
    checkpoints: list[dict[str, Any]]  # newest first: name, step, bytes, damage or None
    resumes_from: int | None  # step
    best: str | None  # the name of the checkpoint that answers
    problem: str | None  # why nothing can be resumed, although there is a good checkpoint


def verify(path: Path, progress: Callable[[str, int, int], None]) -> Verification:
    run = Run(path)
    config, manager = run.config, run.checkpoints()
    total = len(list(manager.directory.glob("*step-*"))) if manager.directory.is_dir() else 0
    found: list[dict[str, Any]] = []
    for each in manager.examine():
        found.append({"name": each.path.name, "bytes": each.num_bytes, "damage": each.damage})
        progress("verifying", len(found), total)
    standing = (each for each in found if each["name"].startswith("step-"))
    good = next((each for each in standing if each["damage"] is None), None)
    problem = None
    if good is not None:
        try:
            check_compatible(open_checkpoint(manager.directory / good["name"]), config)
        except LaptopError as error:
            problem = str(error)
    best = manager.best()
    return Verification(
        path=str(path),
        checkpoints=found,
        resumes_from=None if good is None or problem else step_of(Path(good["name"])),
        best=best["checkpoint"] if best else None,
        problem=problem,
    )


def verdict(found: Verification) -> str:
    lines = [
        f"{each['name']}  {each['bytes'] / 2**20:.1f} MiB  {each['damage'] or 'good'}"
        + ("  (the best)" if each["name"] == found.best else "")
        for each in found.checkpoints
    ]
    if found.problem:
        lines.append(f"`trm train` would refuse: {found.problem}")
    elif found.resumes_from is not None:
        lines.append(f"`trm train` would go on after step {found.resumes_from}.")
    elif found.checkpoints:
        lines.append("No checkpoint is good: `trm train` would refuse, `trm train --fresh` start anew.")
    else:
        lines.append(f"{found.path} has no checkpoint yet: `trm train` would start at the beginning.")
    return "\n".join(lines)
