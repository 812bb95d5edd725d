"""Two runs beside each other: what differs between them, and which one was better.

The better run is the one whose best evaluation up to the same step, and up to the same training time, has the
higher primary metric. Where a run has no evaluations, the training loss decides. Runs of different tasks are
compared by speed and memory only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Literal, NamedTuple

from macbook_optimization.errors import RunError
from macbook_optimization.json_types import JsonObject
from trm.config import RunConfig
from trm.reports.differences import Difference, differences, machine_facts, plan_facts
from trm.reports.history import History, read_history
from trm.runs.directory import Run
from trm.runs.metric import USUAL_METRICS, primary_metric
from trm.runs.rows import EvalRow, number
from trm.tasks.metrics import LOSS as TEST_LOSS
from trm.tasks.metrics import gain, goodness, smaller_is_better

LOSS = "loss"
NUM_ROWS = 8  # of the table
_LOSS_WINDOW = 0.1  # the loss at a step is the mean over this share of the steps before it
_SAME_TIME = 1.01  # times this, two times count as equal: clocks of two runs never agree exactly
_CLEAR = 2.0  # standard errors, beyond which two accuracies differ
_NO_METRICS = {each.name for each in fields(EvalRow)} | {"time"}  # of the row of an evaluation

Side = Literal["first", "second"]


class Point(NamedTuple):
    """One value of a curve."""

    step: float
    seconds: float  # of training
    value: float


@dataclass(frozen=True, slots=True)
class RunCurves:
    """The facts of a run that are compared. What it did not record is None or empty."""

    path: str
    task: str
    batch_size: int
    step: float
    seconds: float
    losses: list[Point]
    evaluations: dict[str, list[Point]]  # by metric
    examples: int | None  # of the last evaluation
    samples_per_second: float | None  # median over the rows
    step_seconds: float | None  # mean
    peak_bytes: int | None  # over all starts

    @property
    def is_empty(self) -> bool:
        return not self.losses and not any(self.evaluations.values())


@dataclass(frozen=True, slots=True)
class Verdict:
    """A comparison of both runs at one point: which was better."""

    at: float  # a step, or seconds of training
    first: float
    second: float
    better: Side | None  # None: the same
    is_clear: bool | None  # beyond what the number of examples explains; None where this is unknown


@dataclass(frozen=True, slots=True)
class TableRow:
    """Both runs after the same number of steps. None where nothing was recorded until then.

    A loss is the mean over the rows of a tenth of the steps before: that of a single row is noisy.
    """

    step: int
    losses: tuple[float | None, float | None]
    metrics: tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Comparison:
    first: RunCurves
    second: RunCurves
    recipe: list[Difference]
    plan: list[Difference]
    machine: list[Difference]
    metric: str | None  # by which they are compared; None for different tasks
    at_equal_steps: Verdict | None
    at_equal_time: Verdict | None
    table: list[TableRow]
    notes: list[str]

    def to_json(self) -> JsonObject:
        return asdict(self)

    def curves(self, run: RunCurves) -> list[Point]:
        """Return the curve of a run by which it is compared."""
        if self.metric is None:
            return []
        return run.losses if self.metric == LOSS else run.evaluations.get(self.metric, [])


def compare_runs(first: Path, second: Path) -> Comparison:
    """Compare two runs; raise `RunError` where one has recorded nothing."""
    runs = Run(first), Run(second)
    configs = runs[0].config, runs[1].config
    curves = tuple(_read_curves(run, config) for run, config in zip(runs, configs, strict=True))
    for run in curves:
        if run.is_empty:
            raise RunError(
                f"{run.path} has no row of metrics that can be read, so there is nothing to compare",
                hint="Train it for at least one step: trm train.",
            )
    a, b = curves
    metric, notes = _choose_metric(a, b, runs, configs)
    found = Comparison(
        first=a,
        second=b,
        recipe=differences(*(config.model_dump(mode="json") for config in configs)),
        plan=differences(*map(plan_facts, runs)),
        machine=differences(*map(machine_facts, runs)),
        metric=metric,
        at_equal_steps=None if metric is None else verdict(a, b, metric, "step"),
        at_equal_time=None if metric is None else verdict(a, b, metric, "seconds"),
        table=_table(a, b, metric),
        notes=notes,
    )
    return found


def _read_curves(run: Run, config: RunConfig) -> RunCurves:
    history = read_history(run)
    losses = _points(history.train["step"], history.train["seconds"], history.train["loss"])
    evaluations = _evaluations(history)
    every_point = [*losses, *(point for points in evaluations.values() for point in points)]
    rates = [rate for rate in history.train["samples_per_second"] if math.isfinite(rate)]
    seconds = max((point.seconds for point in every_point), default=0.0)
    step = max((point.step for point in every_point), default=0.0)
    counts = [count for row in history.evaluations if isinstance(count := row.get("examples"), int)]
    return RunCurves(
        path=str(run.path),
        task=config.task,
        batch_size=config.training.effective_batch_size,
        step=step,
        seconds=seconds,
        losses=losses,
        evaluations=evaluations,
        examples=counts[-1] if counts else None,
        samples_per_second=median(rates) if rates else None,
        step_seconds=seconds / step if step else None,
        peak_bytes=int(history.peak_bytes) if math.isfinite(history.peak_bytes) else None,
    )


def _points(steps: Sequence[float], seconds: Sequence[float], values: Sequence[float]) -> list[Point]:
    points = (Point(*each) for each in zip(steps, seconds, values, strict=True))
    return [point for point in points if all(map(math.isfinite, point))]


def _evaluations(history: History) -> dict[str, list[Point]]:
    """Return the curve of every metric: a share from 0 to 1, or a loss.

    The time of a point is that before its evaluation, when training had reached these weights.
    """
    found: dict[str, list[Point]] = {}
    for row in history.evaluations:
        step = number(row.get("step"))
        evaluating = number(row.get("evaluation_seconds"))
        seconds = number(row.get("seconds")) - (evaluating if math.isfinite(evaluating) else 0.0)
        for name, value in row.items():
            if name in _NO_METRICS:
                continue
            point = Point(step, seconds, number(value))
            if all(map(math.isfinite, point)) and (smaller_is_better(str(name)) or 0 <= point.value <= 1):
                found.setdefault(str(name), []).append(point)
    return found


def _choose_metric(
    a: RunCurves, b: RunCurves, runs: tuple[Run, Run], configs: tuple[RunConfig, RunConfig]
) -> tuple[str | None, list[str]]:
    """Return by what the runs can be compared, and what a reader should know about it."""
    if a.task != b.task:
        return None, [f"The tasks differ ({a.task} and {b.task}), so neither metrics nor losses compare."]
    best = (primary_metric(run.checkpoints().best() or {}) for run in runs)
    candidates = [*(each[0] for each in best if each is not None), *USUAL_METRICS, TEST_LOSS]
    for name in candidates:
        if a.evaluations.get(name) and b.evaluations.get(name):
            return name, _notes_on_evaluations(a, b, configs)
    missing = [run.path for run in (a, b) if not any(run.evaluations.get(name) for name in candidates)]
    without = f"No evaluation of {' and '.join(missing)}" if missing else "No common metric"
    if configs[0].training.loss != configs[1].training.loss:
        return None, [f"{without}, and the losses are of different kinds."]
    if not (a.losses and b.losses):
        return None, [f"{without}, and not both have training rows."]
    return LOSS, [f"{without}: the training loss decides, which says nothing about unseen examples."]


def _notes_on_evaluations(a: RunCurves, b: RunCurves, configs: tuple[RunConfig, RunConfig]) -> list[str]:
    notes = []
    first, second = configs
    if (first.data.path, first.data.build) != (second.data.path, second.data.build):
        notes.append("The datasets have different paths or options, so the test examples may differ.")
    if a.examples != b.examples:
        notes.append(f"Evaluated on {a.examples} and {b.examples} examples.")
    if first.inference != second.inference:
        notes.append("The inference settings differ.")
    if a.batch_size != b.batch_size:
        notes.append(f"A step has {a.batch_size} and {b.batch_size} examples.")
    return notes


def verdict(a: RunCurves, b: RunCurves, metric: str, axis: Literal["step", "seconds"]) -> Verdict | None:
    """Compare the runs at the last point that both have reached; None if one has no value until then."""
    curves = [run.losses if metric == LOSS else run.evaluations[metric] for run in (a, b)]
    at = min(getattr(a, axis), getattr(b, axis))
    until = at * _SAME_TIME if axis == "seconds" else at
    values = [_value_until(curve, metric, axis, until) for curve in curves]
    first, second = values
    if first is None or second is None:
        return None
    better: Side | None = None
    if first != second:
        better = "first" if gain(metric, first, second) > 0 else "second"
    is_clear = (
        None if smaller_is_better(metric) else differ_clearly((first, a.examples), (second, b.examples))
    )
    return Verdict(at, first, second, better, is_clear)


def _value_until(curve: Sequence[Point], metric: str, axis: str, at: float) -> float | None:
    """Return the best evaluation until then, as the best checkpoint is what is used; or the recent loss."""
    until = [point for point in curve if getattr(point, axis) <= at]
    if not until:
        return None
    if metric != LOSS:
        return max((point.value for point in until), key=partial(goodness, metric))
    begin = getattr(until[-1], axis) - _LOSS_WINDOW * at
    return fmean(point.value for point in until if getattr(point, axis) >= begin)


def differ_clearly(first: tuple[float, int | None], second: tuple[float, int | None]) -> bool | None:
    """Return whether two shares differ by more than two standard errors of their examples."""
    variance = 0.0
    for share, examples in (first, second):
        if not examples:
            return None
        variance += share * (1 - share) / examples
    return abs(first[0] - second[0]) > _CLEAR * math.sqrt(variance)


def _table(a: RunCurves, b: RunCurves, metric: str | None) -> list[TableRow]:
    if metric is None:
        return []
    last = min(a.step, b.step)
    evaluated = [
        {point.step for point in run.evaluations.get(metric, []) if point.step <= last} for run in (a, b)
    ]
    common = sorted(evaluated[0] & evaluated[1])
    steps = _thinned(common) if len(common) > 1 else [last * (i + 1) / NUM_ROWS for i in range(NUM_ROWS)]
    whole = dict.fromkeys(round(step) for step in steps if step >= 1)
    return [
        TableRow(
            step,
            losses=(_value_until(a.losses, LOSS, "step", step), _value_until(b.losses, LOSS, "step", step)),
            metrics=(_metric_at(a, metric, step), _metric_at(b, metric, step)),
        )
        for step in whole
    ]


def _thinned(steps: Sequence[float]) -> list[float]:
    if len(steps) <= NUM_ROWS:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (NUM_ROWS - 1))] for i in range(NUM_ROWS)]


def _metric_at(run: RunCurves, metric: str, step: int) -> float | None:
    if metric == LOSS:
        return None
    until = [point for point in run.evaluations.get(metric, []) if point.step <= step]
    return until[-1].value if until else None
