"""Summaries of runs and of their checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from macbook_optimization.checkpoint_files import open_checkpoint, step_of
from macbook_optimization.errors import ConfigError, LaptopError, RunError
from macbook_optimization.json_types import JsonMapping
from macbook_optimization.memory_management import MIB
from macbook_optimization.terminal_text import align
from trm.config import RunConfig
from trm.runs.directory import EVENTS, METRICS, Run, is_run
from trm.runs.events import EARLY_STOPPING, Stopped
from trm.runs.saved_state import check_compatible
from trm.tasks.metrics import has_reached, shown_value


@dataclass(frozen=True, slots=True)
class RunSummary:
    path: str
    task: str | None
    state: str  # "done", "stopped early", "unfinished", or "unreadable" if its recipe is
    step: int
    max_steps: int | None
    seconds: float | None
    primary_metric: str | None
    accuracy: float | None  # of the best checkpoint, by the primary metric
    problem: str | None  # why something above is unknown


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
    """Summarise the runs in a directory, or the one run that it is."""
    if is_run(root):
        return [summarise(Run(root))]
    if not root.is_dir():
        problem = f"{root} is not a directory" if root.exists() else f"There is no directory {root}"
        raise RunError(problem, hint="Name a directory of runs, or leave it out for ./runs.")
    return [summarise(Run(path)) for path in sorted(root.iterdir()) if is_run(path)]


def summarise(run: Run) -> RunSummary:
    checkpoints = run.checkpoints()
    best = primary_metric(checkpoints.best() or {})
    step = checkpoints.newest_step() or 0
    stopped, seconds, problem = _last_stop(run)
    try:
        config = run.config
    except (RunError, ConfigError) as error:
        task = max_steps = None
        state = "unreadable"
        problem = str(error)
    else:
        task = config.task
        max_steps = config.training.last_step
        state = "unfinished"
        if is_done(config, step, best):
            state = "done"
        elif has_stopped_early(config, step, stopped):
            state = "stopped early"
    return RunSummary(
        path=str(run.path),
        task=task,
        state=state,
        step=step,
        max_steps=max_steps,
        seconds=seconds,
        primary_metric=None if best is None else best[0],
        accuracy=None if best is None else best[1],
        problem=problem,
    )


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


def _last_stop(run: Run) -> tuple[JsonMapping, float | None, str | None]:
    """Return the event of the last stop, or an empty one, and the seconds of training, or None and why.

    `trm train` reports them when it ends. The last row of the metrics is newer while a run is trained, and
    after a crash.
    """
    metrics = run.path / METRICS
    try:
        stopped = run.last_row(EVENTS, lambda event: event.get("event") == Stopped.name)
        row = run.last_row()
        is_empty = row is None and (not metrics.exists() or metrics.stat().st_size == 0)
    except (RunError, OSError) as error:
        return {}, None, str(error)
    reported = [(source or {}).get("seconds") for source in (stopped, row)]
    known = [float(value) for value in reported if isinstance(value, int | float) and math.isfinite(value)]
    if known:
        return stopped or {}, max(known), None
    return stopped or {}, None, None if is_empty else f"{METRICS} has no row that can be read"


def describe_runs(runs: Sequence[RunSummary]) -> list[str]:
    """Return a line per run, in aligned columns."""
    return align([_cells(run) for run in runs])


def _cells(run: RunSummary) -> list[str]:
    return [
        run.path,
        run.task or "?",
        run.state,
        f"step {run.step}/{run.max_steps or '?'}",
        "" if run.seconds is None else f"{run.seconds:.0f} s",
        _best_value(run),
        "" if run.problem is None else f"({run.problem.splitlines()[0]})",
    ]


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
