"""An evaluation as one page: tables, confusion matrices as heat tables, and reliability diagrams."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from macbook_optimization.units import counted
from trm.mail.evaluation import Bin, ColumnResult, Evaluation
from trm.mail.page import page

_SIDE = 280.0  # of the square of a diagram, in pixels
_MARGIN = 42.0
_SMALL_ABOVE = 12  # categories


def as_html(title: str, evaluation: Evaluation) -> str:
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{counted(evaluation.messages, 'message')} in {len(evaluation.categories)} categories.</p>",
        _summary(evaluation.columns),
        _categories(evaluation),
    ]
    for column in evaluation.columns:
        body += [f"<h2>{html.escape(column.name)}</h2>", _matrix(column, evaluation.categories)]
        if column.reliability:
            body.append(_diagram(column.reliability))
    return page(title, "\n".join(body), _STYLE)


def _summary(columns: Iterable[ColumnResult]) -> str:
    heads = ("", "accuracy", "macro-F1", "decided", "wrong of the decided", "calibration error")
    rows = [
        (
            column.name,
            f"{column.accuracy:.1%}",
            f"{column.macro_f1:.3f}",
            *(
                "-" if value is None else f"{value:.1%}"
                for value in (column.decided, column.error_of_decided, column.calibration_error)
            ),
        )
        for column in columns
    ]
    return _table(heads, rows)


def _categories(evaluation: Evaluation) -> str:
    """Return precision, recall and F1 of every column, side by side."""
    spans = "".join(f'<th colspan="3">{html.escape(column.name)}</th>' for column in evaluation.columns)
    rows = []
    for place, name in enumerate(evaluation.categories):
        found = [column.categories[place] for column in evaluation.columns]
        scores = [f"{value:.3f}" for each in found for value in (each.precision, each.recall, each.f1)]
        rows.append((name, f"{found[0].number:,}", *scores))
    heads = ("category", "number", *("precision", "recall", "F1") * len(evaluation.columns))
    return _table(heads, rows, f'<tr><th colspan="2"></th>{spans}</tr>')


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], above: str = "") -> str:
    lines = ['<div class="wide"><table>', above, _row("th", heads), *(_row("td", row) for row in rows)]
    return "\n".join([*lines, "</table></div>"])


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _matrix(column: ColumnResult, categories: Sequence[str]) -> str:
    """Colour every cell by its share of the row: right answers green, wrong ones red."""
    small = " small" if len(categories) > _SMALL_ABOVE else ""
    heads = "".join(f"<th><span>{html.escape(name)}</span></th>" for name in categories)
    lines = [
        "<p>A row per category, a column per answer. The shade is the share of the row.</p>",
        f'<div class="wide"><table class="heat{small}">',
        f"<tr><td></td>{heads}</tr>",
    ]
    for place, (name, row) in enumerate(zip(categories, column.confusion, strict=True)):
        total = max(1, sum(row))
        cells = "".join(
            _heat_cell(count, count / total, is_right=answer == place) for answer, count in enumerate(row)
        )
        lines.append(f"<tr><th>{html.escape(name)}</th>{cells}</tr>")
    return "\n".join([*lines, "</table></div>"])


def _heat_cell(count: int, share: float, is_right: bool) -> str:
    if not count:
        return "<td>·</td>"
    colour = "34,170,119" if is_right else "204,85,68"
    shade = 0.08 + 0.72 * share**0.5  # few errors are to be seen as well
    return f'<td style="background:rgba({colour},{shade:.2f})" title="{share:.1%} of the row">{count:,}</td>'


def _diagram(bins: Sequence[Bin]) -> str:
    """Draw confidence against accuracy: points on the diagonal are calibrated, their area is the number."""
    most = max(each.number for each in bins)
    parts = [_axes(), _line(0, 0, 1, 1, "ideal")]
    path = " ".join(f"{_x(each.confidence):.1f},{_y(each.accuracy):.1f}" for each in bins)
    parts.append(f'<polyline class="curve" points="{path}"/>')
    for each in bins:
        radius = 3 + 9 * (each.number / most) ** 0.5
        means = f"{each.confidence:.1%} confident, {each.accuracy:.1%} right"
        parts.append(
            f'<circle class="bin" cx="{_x(each.confidence):.1f}" cy="{_y(each.accuracy):.1f}" '
            f'r="{radius:.1f}"><title>{counted(each.number, "message")}: {means}</title></circle>'
        )
    size = _SIDE + 2 * _MARGIN
    return (
        "<p>Reliability: how often answers of a confidence are right. Calibrated ones are on the diagonal; "
        "the area of a point is the number of messages.</p>\n"
        f'<svg viewBox="0 0 {size:.0f} {size:.0f}" width="{size:.0f}" role="img" '
        f'aria-label="reliability diagram">\n{chr(10).join(parts)}\n</svg>'
    )


def _axes() -> str:
    parts = [f'<rect class="frame" x="{_x(0):.1f}" y="{_y(1):.1f}" width="{_SIDE}" height="{_SIDE}"/>']
    for tick in (0, 0.25, 0.5, 0.75, 1):
        parts += [
            _line(tick, 0, tick, 1, "grid"),
            _line(0, tick, 1, tick, "grid"),
            _text(_x(tick), _y(0) + 18, f"{tick:.0%}", "middle"),
            _text(_x(0) - 6, _y(tick) + 4, f"{tick:.0%}", "end"),
        ]
    parts.append(_text(_x(0.5), _y(0) + 36, "confidence", "middle"))
    parts.append(_text(_x(0), _y(1) - 10, "share that is right", "start"))
    return "\n".join(parts)


def _line(x: float, y: float, other_x: float, other_y: float, kind: str) -> str:
    ends = f'x1="{_x(x):.1f}" y1="{_y(y):.1f}" x2="{_x(other_x):.1f}" y2="{_y(other_y):.1f}"'
    return f'<line class="{kind}" {ends}/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _x(share: float) -> float:
    return _MARGIN + _SIDE * share


def _y(share: float) -> float:
    return _MARGIN + _SIDE * (1 - share)


_STYLE = """
body { max-width: 60rem; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { border-top: 1px solid #8884; padding: .25rem .6rem; text-align: right; font-weight: 600; }
td { font-weight: normal; }
th[colspan] { text-align: center; }
td:first-child, th:first-child { text-align: left; }
td:first-child { min-width: 9rem; max-width: 20rem; overflow-wrap: anywhere; }
div.wide { overflow-x: auto; }
table.heat td, table.heat th { border: 1px solid #8884; text-align: center; }
table.heat td:first-child { min-width: 0; }
table.heat th:first-child { text-align: left; font-weight: normal; overflow-wrap: anywhere; }
table.heat tr:first-child span { writing-mode: vertical-rl; max-height: 12rem; overflow: hidden; }
table.heat.small { font-size: 11px; }
table.heat.small td { padding: .1rem .25rem; }
svg { max-width: 100%; }
svg text { font-size: 12px; fill: currentColor; }
svg .frame { fill: none; stroke: currentColor; }
svg .grid { stroke: #8884; }
svg .ideal { stroke: currentColor; stroke-dasharray: 4 4; }
svg .curve { fill: none; stroke: #27c; }
svg .bin { fill: #27c; fill-opacity: .55; stroke: #27c; }
"""
