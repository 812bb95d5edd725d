"""Problems of learning: an unstable loss, a plateau, and memory that is never returned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, linear_regression, median, pstdev

from macbook_optimization.units import counted
from trm.reports.evidence import Evidence
from trm.reports.finding import UNKNOWN_GAIN, Finding
from trm.reports.samples import Sample
from trm.runs.events import Imported, MemoryGrows, RolledBack, StepSkipped
from trm.runs.metric import metric_label
from trm.runs.rows import Row, number
from trm.tasks.metrics import goodness, shown_value, smaller_is_better

UNSTABLE = "unstable training"
PLATEAU = "plateau"
LEAK = "memory leak"
MAX_LOSS = 1e9  # above, a row is damaged: such steps are skipped


def instability(evidence: Evidence) -> Finding | None:
    """The loss is NaN, varies wildly, or rises."""
    evidence_text = _non_finite(evidence) or _loss_problem(evidence)
    if evidence_text is None:
        return None
    training = evidence.config.training
    clipping = "" if training.max_grad_norm is not None else ", or set training.max_grad_norm=1.0"
    return Finding(
        UNSTABLE,
        evidence.step,
        evidence_text,
        f"Start a new run with a lower training.learning_rate (now {training.learning_rate:g}) or more "
        f"training.warmup_steps{clipping}.",
    )


def _non_finite(evidence: Evidence) -> str | None:
    rolled_back = evidence.recent_events(RolledBack.name)
    skipped = evidence.recent_events(StepSkipped.name)
    if rolled_back:
        last = rolled_back[-1]
        return (
            f"The loss was NaN or Inf at step {last.get('step')}, and training returned to step "
            f"{last.get('to')} with {last.get('learning_rate_scale')} of the learning rate."
        )
    if len(skipped) >= evidence.thresholds.skipped_steps:
        return f"{len(skipped)} steps were skipped because their loss was NaN or Inf."
    return None


@dataclass(frozen=True, slots=True)
class LossStatistics:
    """The loss in a period of one regime."""

    level: float  # median
    lowest: float  # median of the best period of the same length
    half_ratio: float  # of the medians of its second half and its first
    deviation: float  # standard deviation around the trend, in the quieter half: one spike does not count
    trend: float  # rise of a line through the whole period
    grad_norm: float  # median

    def described(self) -> str:
        return (
            f"standard deviation {self.deviation:.3g}, trend {self.trend:+.3g}, gradient norm "
            f"{self.grad_norm:.3g}"
        )


def loss_statistics(recent: Sequence[Sample], before: Sequence[Sample]) -> LossStatistics:
    """Summarise the recent samples; `before` are earlier ones of their regime."""
    losses = [sample.loss for sample in recent]
    half = len(losses) // 2
    first_half = median(losses[:half])
    periods = [before[begin : begin + len(recent)] for begin in range(0, len(before), len(recent))]
    levels = [median(sample.loss for sample in period) for period in periods if len(period) == len(recent)]
    return LossStatistics(
        level=median(losses),
        lowest=min([median(losses), *levels]),
        half_ratio=median(losses[half:]) / first_half if first_half > 0 else math.nan,
        deviation=min(_deviation(losses[:half]), _deviation(losses[half:])),
        trend=len(losses) * linear_regression(range(len(losses)), losses).slope,
        grad_norm=median(sample.grad_norm for sample in recent),
    )


def _deviation(losses: Sequence[float]) -> float:
    """Return the standard deviation around a linear trend."""
    places = range(len(losses))
    slope, start = linear_regression(places, losses)
    return pstdev([loss - start - slope * place for place, loss in zip(places, losses, strict=True)])


def _loss_problem(evidence: Evidence) -> str | None:
    recent = evidence.recent_samples(evidence.thresholds.loss_seconds)
    if recent is None or recent[0].regime != recent[-1].regime:
        return None
    before = [sample for sample in evidence.samples if sample.regime == recent[0].regime]
    before = [sample for sample in before if sample.time < recent[0].time]
    if not all(abs(sample.loss) < MAX_LOSS for sample in (*recent, *before)):
        return None
    found = loss_statistics(recent, before)
    problem = _described_problem(evidence, found)
    if problem is None:
        return None
    seconds = recent[-1].time - recent[0].time
    return f"{problem} ({found.described()}, in the last {seconds:.0f} s)."


def _described_problem(evidence: Evidence, found: LossStatistics) -> str | None:
    limits = evidence.thresholds
    initial = evidence.initial_loss
    if found.deviation > limits.loss_deviation:
        return f"The loss varies around {found.level:.3g}"
    if initial is None:
        return None
    is_falling = found.half_ratio < limits.falling_ratio
    if found.deviation > limits.loss_swing * initial and not is_falling:
        return f"The loss varies around {found.level:.3g} and does not fall"
    if found.level > limits.diverged_ratio * initial:
        return f"The loss is {found.level:.3g}, above the {initial:.3g} of the first steps"
    if found.level > max(limits.loss_rise * found.lowest, limits.risen_share * initial):
        return f"The loss rose from {found.lowest:.3g} to {found.level:.3g}"
    if found.level > limits.stuck_ratio * initial and not is_falling and _should_have_learned(evidence):
        return f"The loss is {found.level:.3g} after {initial:.3g} in the first steps: nothing is learned"
    return None


def _should_have_learned(evidence: Evidence) -> bool:
    """Return whether enough steps have passed since random weights and the warm-up."""
    training = evidence.config.training
    is_new = training.initial_weights is None and not evidence.history.event_counts[Imported.name]
    return is_new and evidence.step > training.warmup_steps + evidence.thresholds.stuck_steps


def plateau(evidence: Evidence) -> Finding | None:
    """The primary metric has not improved for many evaluations, and neither does the training loss."""
    limits = evidence.thresholds
    name = evidence.metric
    rows = evidence.history.evaluations
    if name is None:
        return None
    values = [number(row.get(name)) for row in rows]
    known = [value for value in values if math.isfinite(value)]
    if not known or len(known) < len(values):
        return None
    best = max(known, key=partial(goodness, name))
    best_row = rows[known.index(best)]
    waited = len(rows) - 1 - known.index(best)
    steps = evidence.step - int(number(best_row.get("step")))
    last_step = evidence.config.training.last_step
    if (
        waited < limits.plateau_evaluations
        or steps < limits.plateau_share * last_step
        or (best >= limits.solved and not smaller_is_better(name))
    ):
        return None
    ratio = _loss_ratio(evidence, best_row)
    if ratio is None or ratio < limits.plateau_loss_ratio:
        return None
    return Finding(
        PLATEAU,
        evidence.step,
        f"{metric_label(name).capitalize()} has not improved on {shown_value(name, best)} for {waited} "
        f"evaluations since step {best_row.get('step')}, and the training loss no longer falls "
        f"({ratio:.2f} of the first half of that time in the second).",
        _plateau_advice(evidence),
        _saved_by_stopping(evidence),
    )


def _saved_by_stopping(evidence: Evidence) -> str:
    last_step = evidence.config.training.last_step
    left = last_step - evidence.step
    if left <= 0:
        return UNKNOWN_GAIN
    return f"Stopping now saves {left:,} of {counted(last_step, 'step')}."


def _loss_ratio(evidence: Evidence, since: Row) -> float | None:
    """Return the training loss of the second half of the steps since an evaluation, relative to the first."""
    curve = evidence.history.train
    begin = number(since.get("step"))
    if _schedule_changed(evidence, begin):
        return None
    points = zip(curve["step"], curve["loss"], strict=True)
    losses = [loss for step, loss in points if step > begin and math.isfinite(loss)]
    half = len(losses) // 2
    if half < evidence.thresholds.min_rows:
        return None
    first = fmean(losses[:half])
    return fmean(losses[-half:]) / first if first > 0 else None


def _schedule_changed(evidence: Evidence, since: float) -> bool:
    """Return whether the recipe changed the task of the model after this step: losses are not comparable."""
    training = evidence.config.training
    starts = (*training.depths, *training.hints, *training.phase_starts)
    return any(since < start < evidence.step for start in starts)


def _plateau_advice(evidence: Evidence) -> str:
    if evidence.config.training.plateau is None:
        return (
            "Stop with Ctrl-C, which keeps the best checkpoint, or resume with training.early_stopping; in a "
            "new run, training.plateau would lower the learning rate when this happens."
        )
    return "Stop with Ctrl-C, which keeps the best checkpoint, or try a larger model (model.hidden_size)."


def memory_leak(evidence: Evidence) -> Finding | None:
    """The trainer measured that its memory grows steadily. It reads its memory at every step."""
    events = evidence.events_since_start(MemoryGrows.name)
    if not events:
        return None
    leak = events[-1]
    if not number(leak.get("growth_mb")) > 0:  # damaged
        return None
    low, high = (number(leak.get(name)) for name in ("mb_per_step_low", "mb_per_step_high"))
    interval = f" (95 % confidence: {low:.3g} to {high:.3g})" if math.isfinite(low + high) else ""
    return Finding(
        LEAK,
        evidence.step,
        f"The memory of the trainer grew by {number(leak.get('growth_mb')):,.0f} MB from step "
        f"{leak.get('first_step')} to {leak.get('last_step')}: {number(leak.get('mb_per_step')):.3g} MB per "
        f"step{interval}.",
        "Check that the task's own code (`task`) keeps no arrays from step to step; stopping with Ctrl-C and "
        "resuming returns the memory.",
    )
