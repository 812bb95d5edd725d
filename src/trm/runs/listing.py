"""Summaries of runs and of their checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from macbook_optimization.checkpoint_files import open_checkpoint, step_of
from macbook_optimization.errors import ConfigError, LaptopError, RunError
from macbook_optimization.memory_management import MIB
from macbook_optimization.terminal_text import align
from trm.runs.directory import METRICS, Run, is_run
from trm.runs.metric import metric_label, primary_metric
from trm.runs.rows import number
from trm.runs.saved_state import check_compatible
from trm.runs.state import LastRecorded, Name, read_last, state_of
from trm.tasks.metrics import shown_value


@dataclass(frozen=True, slots=True)
class RunSummary:
    path: str
    task: str | None
    state: Name
    step: int  # the last one that was reported, to which the seconds belong
    saved_step: int | None  # of the newest checkpoint
    max_steps: int | None
    seconds: float | None
    primary_metric: str | None
    accuracy: float | None  # of the best checkpoint, by the primary metric
    problem: str | None  # why something above is unknown


def list_runs(root: Path) -> list[RunSummary]:
    """Summarise the runs in a directory, or the one run that it is."""
    if is_run(root):
        return [summarise(Run(root))]
    if not root.is_dir():
        problem = f"{root} is not a directory" if root.exists() else f"There is no directory {root}"
        raise RunError(problem, hint="Name a directory of runs, or leave it out for ./runs.")
    return [summarise(Run(path)) for path in sorted(root.iterdir()) if is_run(path)]


def summarise(run: Run) -> RunSummary:
    checkpoints = run.checkpoints()
    metric, accuracy = primary_metric(checkpoints.best() or {}) or (None, None)
    last, problem = _last_recorded(run)
    config = None
    try:
        config = run.config
    except (RunError, ConfigError) as error:
        problem = str(error)
    state = state_of(run, config, last)
    return RunSummary(
        path=str(run.path),
        task=None if config is None else config.task,
        state=state.name,
        step=state.step,
        saved_step=checkpoints.newest_step(),
        max_steps=None if config is None else config.training.last_step,
        seconds=state.seconds,
        primary_metric=metric,
        accuracy=accuracy,
        problem=problem,
    )


def _last_recorded(run: Run) -> tuple[LastRecorded, str | None]:
    """Return the ends of a run's files, and why nothing is known of its training time, if so."""
    metrics = run.path / METRICS
    try:
        last = read_last(run)
        is_empty = not metrics.exists() or metrics.stat().st_size == 0
    except (RunError, OSError) as error:
        return LastRecorded(), str(error)
    has_seconds = any(math.isfinite(number((each or {}).get("seconds"))) for each in (last.row, last.stop))
    is_damaged = not is_empty and not has_seconds
    return last, f"{METRICS} has no row that can be read" if is_damaged else None


def describe_runs(runs: Sequence[RunSummary]) -> list[str]:
    """Return a line per run, in aligned columns."""
    return align([_cells(run) for run in runs])


def _cells(run: RunSummary) -> list[str]:
    return [
        run.path,
        run.task or "?",
        run.state,
        f"step {run.step}/{run.max_steps or '?'}" + _loss(run),
        "" if run.seconds is None else f"{run.seconds:.0f} s",
        _best_value(run),
        "" if run.problem is None else f"({run.problem.splitlines()[0]})",
    ]


def _loss(run: RunSummary) -> str:
    """Say what a crashed run resumes from, if that is not its last step."""
    is_lost = run.state == "crashed" and run.saved_step != run.step
    return f" (saved: {run.saved_step or 0})" if is_lost else ""


def _best_value(run: RunSummary) -> str:
    if run.primary_metric is None or run.accuracy is None:
        return ""
    return f"{metric_label(run.primary_metric)} {shown_value(run.primary_metric, run.accuracy)}"


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
    best_problem: str | None  # why the newest intact one is used instead
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
        best_problem=manager.best_problem(),
        problem=problem,
    )


def describe_verification(found: Verification) -> str:
    lines = [
        f"{each.name}  {each.bytes / MIB:.1f} MiB  {each.damage or 'intact'}"
        + ("  (the best)" if each.name == found.best else "")
        for each in found.checkpoints
    ]
    if found.best_problem:
        lines.append(f"{found.best_problem}; the newest intact checkpoint is used for predictions.")
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
