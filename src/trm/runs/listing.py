"""Summaries of runs and of their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from macbook_optimization.checkpoint_files import open_checkpoint, step_of
from macbook_optimization.errors import ConfigError, LaptopError, RunError
from macbook_optimization.json_types import JsonMapping
from macbook_optimization.memory_management import MIB
from trm.runs.directory import Run
from trm.runs.saved_state import check_compatible


@dataclass(frozen=True, slots=True)
class RunSummary:
    path: str
    task: str | None
    state: str  # "done", "unfinished", or "unreadable" if its recipe is
    step: int
    max_steps: int | None
    seconds: float | None
    primary_metric: str | None
    accuracy: float | None  # of the best checkpoint, by the primary metric


def primary_metric(best: JsonMapping) -> tuple[str, float] | None:
    """Return the metric by which a checkpoint is the best, and its value. Earlier versions called it headline
    and did not always store it."""
    name = best.get("primary_metric") or best.get("headline") or "exact_accuracy"
    value = best.get(name)
    return (name, float(value)) if isinstance(value, int | float) else None


def metric_label(name: str | None) -> str:
    """Return the name of a metric for people: `exact_accuracy` becomes "exact accuracy"."""
    return (name or "").replace("_", " ")


def list_runs(root: Path) -> list[RunSummary]:
    return [summarise(Run(path.parent)) for path in sorted(root.glob("*/recipe.yaml"))]


def summarise(run: Run) -> RunSummary:
    last = run.last_row() or {}
    checkpoints = run.checkpoints()
    metric, accuracy = primary_metric(checkpoints.best() or {}) or (None, None)
    step = checkpoints.newest_step() or 0
    try:
        config = run.config
    except (RunError, ConfigError):
        task = max_steps = target = None
        state = "unreadable"
    else:
        task = config.task
        max_steps = config.training.max_steps
        target = config.evaluation.target_accuracy
        reached = target is not None and accuracy is not None and accuracy >= target
        state = "done" if reached or step >= max_steps else "unfinished"
    return RunSummary(
        path=str(run.path),
        task=task,
        state=state,
        step=step,
        max_steps=max_steps,
        seconds=last.get("seconds"),
        primary_metric=metric,
        accuracy=accuracy,
    )


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    name: str
    bytes: int
    damage: str | None


@dataclass(frozen=True, slots=True)
class Verification:
    path: str
    checkpoints: list[CheckpointSummary]  # newest first
    resumes_from: int | None  # step
    best: str | None  # name of the checkpoint that is used for inference
    problem: str | None  # why nothing can be resumed although there is an intact checkpoint


def verify(path: Path, progress: Callable[[str, int, int], None]) -> Verification:
    run = Run(path)
    config = run.config
    manager = run.checkpoints()
    total = len(list(manager.directory.glob("*step-*"))) if manager.directory.is_dir() else 0
    found: list[CheckpointSummary] = []
    for each in manager.examine():
        found.append(CheckpointSummary(each.path.name, each.num_bytes, each.damage))
        progress("verifying", len(found), total)
    in_place = (each for each in found if each.name.startswith("step-"))
    intact = next((each for each in in_place if each.damage is None), None)
    problem = None
    if intact is not None:
        try:
            check_compatible(open_checkpoint(manager.directory / intact.name), config)
        except LaptopError as error:
            problem = str(error)
    best = manager.best()
    return Verification(
        path=str(path),
        checkpoints=found,
        resumes_from=None if intact is None or problem else step_of(Path(intact.name)),
        best=best["checkpoint"] if best else None,
        problem=problem,
    )


def describe_verification(found: Verification) -> str:
    lines = [
        f"{each.name}  {each.bytes / MIB:.1f} MiB  {each.damage or 'intact'}"
        + ("  (the best)" if each.name == found.best else "")
        for each in found.checkpoints
    ]
    if found.problem:
        lines.append(f"`trm train` would refuse: {found.problem}")
    elif found.resumes_from is not None:
        lines.append(f"`trm train` would resume after step {found.resumes_from}.")
    elif found.checkpoints:
        lines.append(
            "No checkpoint is intact: `trm train` would refuse, `trm train --fresh` start a new run."
        )
    else:
        lines.append(f"{found.path} has no checkpoint yet: `trm train` would start at step 1.")
    return "\n".join(lines)
