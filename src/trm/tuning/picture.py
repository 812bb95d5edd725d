"""A search as a picture: its history, what mattered, and every candidate along each key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

from trm.runs.metric import metric_label
from trm.tasks.metrics import goodness, smaller_is_better
from trm.tuning.facts import Facts
from trm.tuning.space import LEARNING_RATE
from trm.tuning.study import Study, TrialSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COMPLETE, _GIVEN_UP, _START = "#1f6fb4", "#b0b0b0", "#d95f02"


def draw(trials: Sequence[TrialSummary], study: Study, facts: Facts) -> bytes:
    """Return the picture as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(study.start)
    figure = Figure(figsize=(4 * len(names), 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2 * len(names))
    label = metric_label(facts.metric)
    evaluated = [trial for trial in trials if trial.evaluation is not None]
    _history(figure.add_subplot(grid[0, : len(names) + 1]), evaluated, facts, study)
    _importances(figure.add_subplot(grid[0, len(names) + 1 :]), study.importances())
    for number, name in enumerate(names):
        axes = figure.add_subplot(grid[1, 2 * number : 2 * number + 2])
        _slice(axes, name, evaluated, facts, study)
        axes.set_ylabel(label if number == 0 else "")
    figure.suptitle(f"{facts.directory}: {facts.seconds:.0f} s per candidate, {facts.data.description}")
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=100)
    return picture.getvalue()


def _history(axes: Axes, trials: Sequence[TrialSummary], facts: Facts, study: Study) -> None:
    from matplotlib.ticker import MaxNLocator

    best_so_far: list[float] = []
    for trial in trials:
        value = _value(trial, facts)
        known = [*([value] if trial.state == "complete" else []), *best_so_far[-1:]]
        best_so_far.append(max(known, key=partial(goodness, facts.metric), default=math.nan))
        axes.plot(trial.number, value, "o", **_style(trial, study))
    axes.step([trial.number for trial in trials], best_so_far, where="post", color=_COMPLETE)
    for color, name in ((_START, "start"), (_COMPLETE, "complete"), (_GIVEN_UP, "given up early")):
        axes.plot([], [], "o", color=color, label=name)
    axes.legend(loc="best", frameon=False)
    axes.set_title("History; the line is the best so far")
    axes.set(xlabel="candidate", ylabel=metric_label(facts.metric))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _format_values(axes, facts.metric)


def _importances(axes: Axes, importances: dict[str, float]) -> None:
    axes.set_title("Importance (PED-ANOVA)")
    if not importances:
        axes.text(0.5, 0.5, "too few candidates", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    ordered = sorted(importances.items(), key=lambda each: each[1])
    axes.barh([metric_label(name) for name, _ in ordered], [share for _, share in ordered], color=_COMPLETE)
    axes.set_xlim(0, 1)


def _slice(axes: Axes, name: str, trials: Sequence[TrialSummary], facts: Facts, study: Study) -> None:
    from matplotlib.ticker import NullLocator

    for trial in trials:
        axes.plot(trial.values[name], _value(trial, facts), "o", **_style(trial, study))
    axes.set_xlabel(metric_label(name))
    axes.set_xscale("log")
    if name != LEARNING_RATE:
        choices = study.space.choices[name]
        axes.set_xticks(choices, labels=[f"{each:g}" for each in choices])
        axes.xaxis.set_minor_locator(NullLocator())
    _format_values(axes, facts.metric)


def _format_values(axes: Axes, metric: str) -> None:
    from matplotlib.ticker import PercentFormatter

    if not smaller_is_better(metric):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.3)


def _value(trial: TrialSummary, facts: Facts) -> float:
    return float((trial.evaluation or {})[facts.metric])


def _style(trial: TrialSummary, study: Study) -> dict[str, Any]:
    if dict(trial.values) == study.start:
        return {"color": _START, "zorder": 3}
    return {"color": _COMPLETE if trial.state == "complete" else _GIVEN_UP}
