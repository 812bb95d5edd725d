"""A report as Markdown: the same facts as the page, with the ends of curves in place of charts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from macbook_optimization.terminal_text import one_line
from trm.reports.curves import Chart
from trm.reports.description import Fact
from trm.reports.facts import Report
from trm.reports.targets import MACHINES
from trm.reports.wording import CODE, duration, significant

TITLE = "# Report: "
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~$])")


def as_markdown(report: Report) -> str:
    sections = [
        [f"{TITLE}{escape(report.run)}", f"**{report.state.name}**: {prose(report.state.text)}"],
        _bullets(report.problems),
        [_facts(report.overview)],
        _advice(report),
        _curves(report.charts),
        _metrics(report),
        _confusion(report),
        _examples(report),
        _times(report),
        _machines(report),
        _resources(report),
        ["## What was trained", _facts(report.recipe)] if report.recipe else [],
        ["## On which machine", _facts(report.machine)] if report.machine else [],
        _plan(report),
        _events(report),
    ]
    return "\n\n".join(part for section in sections for part in section if part) + "\n"


def escape(text: str) -> str:
    """Return text for any place in Markdown: one line, in which no character has a meaning."""
    return _SPECIAL.sub(r"\\\1", one_line(text))


def prose(text: str) -> str:
    """Return one of our sentences: escaped, but commands between backticks stay code."""
    parts = CODE.split(one_line(text))  # text, code, text, ...
    return "".join(f"`{part}`" if place % 2 else escape(part) for place, part in enumerate(parts))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([escape(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _facts(facts: Sequence[Fact]) -> str:
    return _table(["", ""], [(fact.name, fact.value) for fact in facts]) if facts else ""


def _bullets(lines: Iterable[str]) -> list[str]:
    return ["\n".join(f"- {prose(line)}" for line in lines)]


def _advice(report: Report) -> list[str]:
    lines = []
    for each in report.findings:
        found = f"- **{escape(each.kind)}**: {prose(each.evidence)} **{prose(each.advice)}**"
        lines.append(f"{found} {prose(each.gain)}")
    return ["## Advice", "\n".join(lines) or "No problem was reported."]


def _curves(charts: Sequence[Chart]) -> list[str]:
    if not charts:
        return []
    rows = [
        (
            chart.title,
            series.name,
            *map(significant, (series.y[0], min(series.y), max(series.y), series.y[-1])),
        )
        for chart in charts
        for series in chart.series
        if series.style != "raw"
    ]
    return ["## Curves", _table(["curve", "", "first", "lowest", "highest", "last"], rows)]


def _metrics(report: Report) -> list[str]:
    result = report.result
    if result is None:
        return []
    best = "best" if result.best_step is None else f"best (step {result.best_step:,})"
    table = _table(["metric", best, f"last (step {result.last_step:,})"], result.rows)
    return ["## Metrics on unseen examples", table]


def _confusion(report: Report) -> list[str]:
    found = report.confusion
    if found is None:
        return []
    parts = ["## Which categories are confused", f"Of the evaluation at step {found.step:,}."]
    if found.is_small:
        rows = [
            (name, *(f"{count:,}" for count in counts))
            for name, counts in zip(found.categories, found.counts, strict=True)
        ]
        parts.append(_table(["", *map(escape, found.categories)], rows))
    worst = [(each.category, each.taken_for, f"{each.count:,}", f"{each.share:.1%}") for each in found.worst]
    if worst:
        parts.append(_table(["category", "taken for", "messages", "of the category"], worst))
    return parts


def _examples(report: Report) -> list[str]:
    found = report.examples
    parts = ["## Examples"]
    if found.num_tried:
        parts.append(f"{found.num_right} of the first {found.num_tried} test examples are answered right.")
        rows = [
            (str(each.number), "right" if each.is_right else "wrong", each.caption) for each in found.shown
        ]
        parts.append(_table(["example", "answer", ""], rows))
    return [*parts, prose(found.problem or "")]


def _times(report: Report) -> list[str]:
    rows = [(part.activity, duration(part.seconds), f"{part.share:.1%}") for part in report.time]
    table = _table(["activity", "time", "share"], rows) if rows else "The run did not record it."
    return ["## Where the time went", table]


def _machines(report: Report) -> list[str]:
    if not report.machines:
        return []
    rows = [
        (each.name, "" if each.slots is None else f"{each.slots:,}", duration(each.waited_seconds))
        for each in report.machines
    ]
    return ["## Machines", _table(["machine", "slots now", "all others waited for it"], rows)]


def _resources(report: Report) -> list[str]:
    place = report.resources.machine
    marked = [f"target, {name}{' (this machine)' if at == place else ''}" for at, name in enumerate(MACHINES)]
    rows = [(target.name, target.measured, *target.targets) for target in report.resources.targets]
    table = _table(["", "measured", *marked], rows)
    return ["## Resources and targets", table, _facts(report.resources.facts)]


def _plan(report: Report) -> list[str]:
    if not report.plan:
        return []
    rows = [(choice.name, choice.value, choice.reason) for choice in report.plan]
    warnings = [f"Warning: {text}" for text in report.plan_warnings]
    return ["## The plan and its reasons", _table(["", "choice", "reason"], rows), *_bullets(warnings)]


def _events(report: Report) -> list[str]:
    if not report.events:
        return []
    rows = [
        (event.when, "" if event.step is None else f"{event.step:,}", event.name, event.text)
        for event in report.events
    ]
    return ["## Events", _table(["time", "step", "event", ""], rows)]
