"""A run directory: recipe, plan, metrics, events and checkpoints of one training.

Everything else about a run follows from these files, so a run that was killed, copied or renamed is still
a run. Metrics and events are appended line by line; a torn last line is ignored when they are read.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from macbook_optimization.checkpoint_management import Checkpoint, CheckpointManager
from macbook_optimization.errors import ConfigError, RunError
from macbook_optimization.training_config_adapter import TrainingParams
from trm.config import RunConfig, config_from_text, differences

Plan = TrainingParams
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

    def checkpoints(self, keep: int = 3) -> CheckpointManager:
        return CheckpointManager(self.path, keep)

    def write(self, name: str, text: str) -> None:
        partial = self.path / f".{name}.partial"
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(self.path / name)
        except OSError as error:
            raise RunError(f"Cannot write {self.path / name}: {error.strerror}") from error

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        try:
            with (self.path / name).open("ab+") as file:
                torn = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
                file.write(b"\n" * torn + json.dumps(row).encode() + b"\n")
        except OSError as error:
            raise RunError(f"Cannot write {self.path / name}: {error.strerror}") from error

    def event(self, what: str, **facts: Any) -> None:
        self.append("events.jsonl", {"time": time.time(), "event": what, **facts})

    def rows(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        try:
            lines = (self.path / name).read_text(encoding="utf-8").splitlines()
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
    elif path.is_dir() and any(path.iterdir()):
        raise RunError(f"{path} is not empty and not a run", hint="Use another --run directory.")
    return run


def check_recipe(config: RunConfig, checkpoint: Checkpoint) -> None:
    """A recipe edited by hand, or a checkpoint copied from another run, would load as something else."""
    _refuse_if_different(config.what_is_learned(), checkpoint.metadata["recipe"], checkpoint.path)


def _refuse_if_different(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: Path) -> None:
    different = differences(ours, theirs)
    if different:
        raise RunError(
            f"{path} holds a run of another recipe:\n  " + "\n  ".join(different),
            hint="Use another --run directory, or --fresh to set that run aside and start anew.",
        )


def begin(run: Run, config: RunConfig, plan: Plan) -> None:
    """The plan also goes into the events: they are the history of how this run was carried out."""
    try:
        run.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"Cannot create the run directory {run.path}: {error.strerror}") from error
    run.write("recipe.yaml", config.to_yaml())
    run.write("plan.json", json.dumps(plan.to_json(), indent=2))
    run.event("plan", **plan.to_json())


def set_aside(path: Path) -> Path | None:
    """Gives way to a fresh run, without losing the old one."""
    path = path.resolve()
    if not path.exists():
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


def list_runs(root: Path) -> list[RunSummary]:
    return [summarise(Run(path.parent)) for path in sorted(root.glob("*/recipe.yaml"))]


def summarise(run: Run) -> RunSummary:
    rows = run.rows()
    seconds = rows[-1].get("seconds") if rows else None
    checkpoints = run.checkpoints()
    accuracy = (checkpoints.best() or {}).get("exact_accuracy")
    step = checkpoints.newest_step() or 0
    try:
        config = run.config
    except (RunError, ConfigError):
        return RunSummary(str(run.path), None, "unreadable", step, None, seconds, accuracy)
    target = config.evaluation.target_accuracy
    reached = target is not None and accuracy is not None and accuracy >= target
    return RunSummary(
        path=str(run.path),
        task=config.task,
        state="done" if reached or step >= config.training.max_steps else "unfinished",
        step=step,
        max_steps=config.training.max_steps,
        seconds=seconds,
        exact_accuracy=accuracy,
    )
