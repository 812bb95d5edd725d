"""A comparison of two runs as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from macbook_optimization.terminal_text import align, one_line
from macbook_optimization.units import MIB, counted
from trm.reports.comparison import LOSS, Comparison, Point, RunCurves, Verdict
from trm.reports.differences import Difference
from trm.runs.metric import metric_label
from trm.tasks.metrics import smaller_is_better

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"  # for a terminal that has no others
_SPARK_COLUMNS = 40
_MAX_VALUE_LENGTH = 40
_GIB = 1024 * MIB


def describe_comparison(found: Comparison, blocks: str = BLOCKS) -> str:
    """Return what differs, the curves, and which run was better."""
    sections = [
        [f"A  {one_line(found.first.path)}", f"B  {one_line(found.second.path)}"],
        _section("Recipe", found.recipe),
        _section("Plan", found.plan),
        _section("Machine", found.machine),
        _curves(found, blocks),
        _table(found),
        _speed(found),
        _verdicts(found),
        [f"Note: {note}" for note in found.notes],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _section(title: str, differences: Sequence[Difference]) -> list[str]:
    if not differences:
        return [f"{title}: no difference"]
    rows = [["", "A", "B"]]
    rows += [[f"  {each.key}", _value(each.first), _value(each.second)] for each in differences]
    return [title, *align(rows)]


def _value(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}..."


def _curves(found: Comparison, blocks: str) -> list[str]:
    """Return a line per curve. All of them share one axis of steps, and both runs one scale."""
    last = max(found.first.step, found.second.step)
    lines = []
    curves = {LOSS: (found.first.losses, found.second.losses)}
    if found.metric not in (None, LOSS):
        curves[str(found.metric)] = (found.curves(found.first), found.curves(found.second))
    if found.metric is None:
        return []
    for name, pair in curves.items():
        values = [point.value for points in pair for point in points]
        if not values:
            continue
        scale = min(values), max(values)
        shown = f"{metric_label(name)}, {_number(name, scale[0])} to {_number(name, scale[1])}"
        for letter, points in zip("AB", pair, strict=True):
            lines.append([f"{letter}  {sparkline(points, last, scale, blocks)}|", shown])
            shown = ""
    return [f"Curves from step 0 to {last:,.0f}", *(f"{line}  {text}".rstrip() for line, text in lines)]


def sparkline(points: Sequence[Point], last: float, scale: tuple[float, float], blocks: str = BLOCKS) -> str:
    """Return the means of a curve in equal ranges of steps, as blocks, from its first to its last value."""
    columns: list[list[float]] = [[] for _ in range(_SPARK_COLUMNS)]
    for point in points:
        column = math.ceil(point.step / max(last, 1) * _SPARK_COLUMNS) - 1
        columns[min(max(column, 0), _SPARK_COLUMNS - 1)].append(point.value)
    low, high = scale
    height = (len(blocks) - 1) / (high - low) if high > low else 0.0
    last_column = max((number for number, each in enumerate(columns) if each), default=-1)
    line = ""
    for number, each in enumerate(columns):
        if each:
            line += blocks[round((fmean(each) - low) * height)]
        else:  # between two values, the first of them still holds
            line += (line[-1:] or " ") if number < last_column else " "
    return line


def _number(metric: str, value: float) -> str:
    return f"{value:.4g}" if smaller_is_better(metric) else f"{value:.1%}"


def _table(found: Comparison) -> list[str]:
    if not found.table or found.metric is None:
        return []
    label = metric_label(found.metric)
    has_metric = found.metric != LOSS
    rows = [["step", "loss A", "loss B", *([f"{label} A", f"{label} B"] if has_metric else [])]]
    for row in found.table:
        metrics = [_cell(found.metric, value) for value in row.metrics] if has_metric else []
        rows.append([f"{row.step:,}", *(_cell(LOSS, value) for value in row.losses), *metrics])
    return align(rows)


def _cell(metric: str, value: float | None) -> str:
    return "-" if value is None else _number(metric, value)


def _speed(found: Comparison) -> list[str]:
    rows = [["", "A", "B"]]
    runs = found.first, found.second
    facts = {
        "steps": [f"{run.step:,.0f}" for run in runs],
        "training time": [f"{run.seconds:,.1f} s" for run in runs],
        "samples per second": [_known(run.samples_per_second, "{:,.1f}") for run in runs],
        "time per step": [_known(run.step_seconds, "{:,.4g} s") for run in runs],
        "peak memory": [_memory(run) for run in runs],
    }
    return align([*rows, *([name, *cells] for name, cells in facts.items())])


def _known(value: float | None, form: str) -> str:
    return "not reported" if value is None else form.format(value)


def _memory(run: RunCurves) -> str:
    if run.peak_bytes is None:
        return "not reported"
    return f"{run.peak_bytes / MIB:,.0f} MiB" if run.peak_bytes < _GIB else f"{run.peak_bytes / _GIB:.2f} GiB"


def _verdicts(found: Comparison) -> list[str]:
    if found.metric is None:
        return []
    steps = found.at_equal_steps
    seconds = found.at_equal_time
    if steps is None and seconds is None:
        return ["Neither steps nor training times overlap where both have values, so none was better."]
    lines = []
    if steps is not None:
        lines.append(f"After the same {counted(round(steps.at), 'step')}: {_verdict(found, steps)}")
    else:
        lines.append("At equal steps, only one of them was evaluated.")
    if seconds is not None:
        lines.append(f"After the same {seconds.at:,.1f} s of training: {_verdict(found, seconds)}")
    else:
        lines.append("At equal training time, only one of them was evaluated.")
    return lines


def _verdict(found: Comparison, verdict: Verdict) -> str:
    metric = found.metric or LOSS
    values = f"{metric_label(metric)} {_number(metric, verdict.first)} and {_number(metric, verdict.second)}"
    if verdict.better is None:
        return f"the same, {values}."
    letter = {"first": "A", "second": "B"}[verdict.better]
    if verdict.is_clear is False:
        counts = dict.fromkeys([found.first.examples, found.second.examples])
        examples = " and ".join(map(str, counts))
        return f"{letter}, {values}; with {examples} examples, the difference may be chance."
    return f"{letter} was better, {values}."
