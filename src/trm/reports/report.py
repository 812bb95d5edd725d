"""The report of a run: one HTML page that contains everything it shows, or the same as Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path

from macbook_optimization.children import Send
from macbook_optimization.terminal_text import visible
from trm.reports.confusion import Confusion
from trm.reports.event_groups import MARK_GROUPS
from trm.reports.examples import Examples, find_examples, no_examples
from trm.reports.facts import Report, gather
from trm.reports.targets import MACHINES
from trm.reports.wording import CODE, duration
from trm.runs.directory import Run

FILE_NAME = "report.html"


def write_report(run: Run, examples: Examples | None = None) -> Path:
    """Write `report.html` in a run and return its path; raise `RunError` if it cannot be written.

    Without `examples` the page says how to get them: they need the backend, which takes seconds to load.
    """
    later = f"`trm report {run.path}` adds pictures of answers, for tasks that have them."
    run.write(FILE_NAME, as_html(gather(run, examples or no_examples(later))))
    return run.path / FILE_NAME


def write_in_child(run: str, with_examples: bool, send: Send) -> None:
    """Write the report of a run that has just been trained."""
    path = Path(run)
    write_report(Run(path), examples=find_examples(path) if with_examples else None)


def as_html(report: Report) -> str:
    """Return the page. Every text in it is escaped by the template."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape

    from trm.reports.charts import draw_chart

    environment = Environment(
        loader=PackageLoader("trm.reports", ""),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.filters["code"] = lambda text: Markup(
        CODE.sub(r"<code>\1</code>", str(escape(visible(text))))
    )
    template = environment.get_template("report.html.jinja")
    return template.render(
        report=report,
        charts=[(chart.title, Markup(draw_chart(chart))) for chart in report.charts],
        mark_groups=_shown_groups(report),
        heat=[] if report.confusion is None else _heat(report.confusion),
        examples=sorted(report.examples.shown, key=lambda example: not example.is_right),
        machines=MACHINES,
        duration=duration,
        zone=datetime.now().astimezone().strftime("UTC%z"),
        version=metadata.version("macbook-trm"),
    )


def _shown_groups(report: Report) -> list[tuple[str, str]]:
    shown = {mark.group for chart in report.charts for mark in chart.marks}
    return [(group, meaning) for group, meaning in MARK_GROUPS.items() if group in shown]


@dataclass(frozen=True, slots=True)
class _Cell:
    count: int
    kind: str  # a colour of the page: "right" or "wrong"
    shade: str


@dataclass(frozen=True, slots=True)
class _HeatRow:
    name: str
    cells: list[_Cell]


def _heat(confusion: Confusion) -> list[_HeatRow]:
    """Colour every cell by its share of the row, so that few errors are seen as well."""
    rows = []
    for place, (name, counts) in enumerate(zip(confusion.categories, confusion.counts, strict=True)):
        total = max(1, sum(counts))
        cells = [
            _Cell(
                count, "right" if answer == place else "wrong", f"{0.08 + 0.72 * (count / total) ** 0.5:.2f}"
            )
            for answer, count in enumerate(counts)
        ]
        rows.append(_HeatRow(name, cells))
    return rows
