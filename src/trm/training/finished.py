"""The decision whether a run has finished, from its files alone: without its data, a plan or a trainer.

Anything doubtful is left to the trainer, which reads the newest checkpoint and decides the same: a run that
was killed before its last evaluation, damaged checkpoints, or evaluations with other settings.
"""

from __future__ import annotations

from macbook_optimization.errors import RunError
from macbook_optimization.json_types import JsonMapping, JsonObject
from trm.config import RunConfig
from trm.runs.directory import EVENTS, Run
from trm.runs.events import EARLY_STOPPING, Stopped
from trm.runs.metric import primary_metric
from trm.runs.state import has_stopped_early, is_done, target_reached
from trm.training.loop import Outcome


def finished_outcome(run: Run, config: RunConfig) -> Outcome | None:
    """Return how a run ended if `config` leaves nothing of it to train."""
    stopped = _last_stop(run)
    best = run.checkpoints().best()
    if stopped is None or not _has_settings_of(run, best, config):
        return None
    metric = primary_metric(best or {})
    step = stopped["step"]
    stopped_early = has_stopped_early(config, step, stopped)
    if not (stopped_early or is_done(config, step, metric)):
        return None
    reason = "target" if target_reached(config, metric) else "max_steps"
    if stopped_early:
        reason = EARLY_STOPPING
    return Outcome(run.path, reason, step, stopped["seconds"], best, config.evaluation.target)


def _last_stop(run: Run) -> JsonObject | None:
    """Return the event of the last stop if it was the end of the run, and its checkpoints are intact."""
    checkpoints = run.checkpoints()
    try:
        stopped = run.last_row(EVENTS, lambda event: event.get("event") == Stopped.name) or {}
    except RunError:
        return None
    step = checkpoints.newest_step()
    is_end = stopped.get("reason") in ("target", "max_steps", EARLY_STOPPING) and stopped.get("step") == step
    if step is None or not is_end or not isinstance(stopped.get("seconds"), float):
        return None
    is_intact = checkpoints.is_intact(checkpoints.path(step).name) and checkpoints.best_problem() is None
    return stopped if is_intact else None


def _has_settings_of(run: Run, best: JsonMapping | None, config: RunConfig) -> bool:
    """Return whether the run learns what `config` says, and its best evaluation has the settings of it."""
    recorded = run.config
    same_settings = (config.data, config.evaluation, config.inference, config.training.early_stopping) == (
        recorded.data,
        recorded.evaluation,
        recorded.inference,
        recorded.training.early_stopping,
    )
    if not same_settings or config.what_is_learned() != recorded.what_is_learned():
        return False
    if best is None:  # a run without evaluations
        return True
    settings = {**config.inference.model_dump(), "examples": config.evaluation.examples}
    evaluated_with = best.get("evaluated_with")
    return isinstance(evaluated_with, dict) and settings.items() <= evaluated_with.items()
