"""Charts as SVG for a page: drawn by matplotlib, with the colours and the font of the page.

Matplotlib draws in placeholder colours, which are replaced by CSS variables, so that one drawing serves the
light and the dark look. Identifiers get the name of the chart, because all charts share one page.
"""

from __future__ import annotations

import html
import io
import logging
import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from macbook_optimization.terminal_text import one_line
from trm.reports.curves import Chart, Mark, Series
from trm.reports.event_groups import MARK_GROUPS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_INCHES = 5.2
_HEIGHT_INCHES = 3.0
_LEFT = 0.14  # share of the width
_LEFT_WITH_NAMES = 0.2
_BOTTOM = 0.17  # share of the height
_BOTTOM_WITH_LEGEND = 0.27
_INK = "#010101"
_GRID = "#010102"
_SERIES = ("#010103", "#010104", "#010105")
_LIMIT = "#010106"
_MARKS = {group: f"#0102{place:02d}" for place, group in enumerate(MARK_GROUPS)}
_VARIABLES = {
    _INK: "currentColor",
    _GRID: "var(--grid)",
    **{color: f"var(--series-{place})" for place, color in enumerate(_SERIES)},
    _LIMIT: "var(--limit)",
    **{color: f"var(--mark-{group})" for group, color in _MARKS.items()},
}
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "trm",  # the same input gives the same file
    "text.parse_math": False,  # names come from files
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 10.0,
    "path.simplify": True,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _GRID,
    "xtick.color": _INK,
    "ytick.color": _INK,
}
_PROLOG = re.compile(r"^.*?(?=<svg )", flags=re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>", flags=re.DOTALL)
_SVG_TAG = re.compile(r"<svg [^>]*>")
_VIEW_BOX = re.compile(r'viewBox="[^"]*"')
_GROUP_ID = re.compile(r'<g id="([^"]*)">')
_REFERENCE = re.compile(r'(\bid="|url\(#|href="#)')
_FONT = re.compile(r"(font-family: |font: [^;\"]*?px )[^;\"]*")
_SPACE = re.compile(r"\n\s*")


def draw_chart(chart: Chart) -> str:
    """Return one `<svg>` element. Everything that comes from the run is escaped in it."""
    # Where its cache cannot be written, matplotlib uses a temporary one and gives advice on the console.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES))
        _draw(figure, chart)
        content = io.StringIO()
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(content, format="svg", metadata=metadata)
    return _for_page(content.getvalue(), chart)


def _draw(figure: Figure, chart: Chart) -> None:
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    figure.patch.set_visible(False)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for place, mark in enumerate(chart.marks):
        line = axes.axvline(
            mark.x, color=_MARKS[mark.group], linewidth=1.0, linestyle=(0, (3, 2)), zorder=1.5
        )
        line.set_gid(f"mark-{place}")
    num_drawn = 0
    for series in chart.series:
        _draw_series(axes, series, _SERIES[num_drawn % len(_SERIES)])
        num_drawn += series.style != "raw"  # its average has the same colour
    for limit in chart.limits:
        axes.axhline(limit.y, color=_LIMIT, linewidth=1.2, linestyle=(0, (6, 3)), label=one_line(limit.name))
    _set_scales(axes, chart)
    axes.set_xlabel(chart.x_label)
    has_legend = len(_named(chart.series)) + len(chart.limits) > 1
    bottom = _BOTTOM_WITH_LEGEND if has_legend else _BOTTOM
    left = _LEFT_WITH_NAMES if chart.levels else _LEFT
    figure.subplots_adjust(left=left, right=0.98, top=0.96, bottom=bottom)
    if has_legend:
        below = (0.45, -0.2)
        axes.legend(loc="upper center", bbox_to_anchor=below, ncols=2, frameon=False, fontsize=9, borderpad=0)


def _draw_series(axes: Axes, series: Series, color: str) -> None:
    is_faint = series.style == "raw"
    has_points = series.style == "points" and len(series.x) <= 60
    axes.plot(
        series.x,
        series.y,
        color=color,
        linewidth=0.8 if is_faint else 1.6,
        alpha=0.45 if is_faint else 1.0,
        marker="o" if has_points or len(series.x) == 1 else None,
        markersize=3.5,
        drawstyle="steps-post" if series.style == "steps" else "default",
        label="_nolegend_" if series.style == "raw" else one_line(series.name),
        zorder=2 if is_faint else 3,
    )


def _set_scales(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, place: _tick(value)))
    if chart.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=8))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif chart.levels:
        axes.set_yticks(range(len(chart.levels)), chart.levels)
        axes.set_ylim(-0.25, max(2.0, *(value for series in chart.series for value in series.y)) + 0.25)
        return
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
        _include_zero(axes, chart)
    if chart.in_percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{100 * value:.4g} %"))
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: _tick(value)))


def _include_zero(axes: Axes, chart: Chart) -> None:
    """Begin at zero where a curve is not far above it, and never show a span of nothing."""
    values = [value for series in chart.series for value in series.y] + [limit.y for limit in chart.limits]
    low, high = min(values), max(values)
    if 0 <= low <= 0.75 * high:
        axes.set_ylim(0, 1.05 * high)
    elif low == high:
        margin = abs(low) * 0.1 or 1.0
        axes.set_ylim(low - margin, high + margin)


def _tick(value: float) -> str:
    if value and (abs(value) < 1e-3 or abs(value) >= 1e7):
        return f"{value:.3g}"
    whole = math.isclose(value, round(value), abs_tol=1e-9)
    return f"{round(value):,}" if whole else f"{value:,.4g}"


def _for_page(svg: str, chart: Chart) -> str:
    """Return the element without what only a file needs, with the look of the page."""
    svg = _METADATA.sub("", _PROLOG.sub("", svg))
    box = _VIEW_BOX.search(svg)
    assert box is not None
    label = html.escape(_spoken(chart), quote=True)
    svg = _SVG_TAG.sub(f'<svg class="chart" {box[0]} role="img" aria-label="{label}">', svg, count=1)
    svg = _GROUP_ID.sub(lambda found: _group(found[1], chart.marks), svg)
    svg = _REFERENCE.sub(lambda found: f"{found[1]}{chart.key}-", svg)
    svg = _FONT.sub(lambda found: f"{found[1]}var(--font)", svg)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    return _SPACE.sub("\n", svg).strip()


def _group(name: str, marks: list[Mark]) -> str:
    """Return the opening tag of a group: a mark shows its event when the mouse is over it."""
    if not name.startswith("mark-"):
        return "<g>"
    mark = marks[int(name.removeprefix("mark-"))]
    return f"<g><title>{html.escape(one_line(mark.text))}</title>"


def _spoken(chart: Chart) -> str:
    shown = (
        f"{series.name} from {_tick(series.y[0])} to {_tick(series.y[-1])}" for series in _named(chart.series)
    )
    return one_line(f"{chart.title} by {chart.x_label}: {'; '.join(shown)}")


def _named(series: Iterable[Series]) -> list[Series]:
    return [each for each in series if each.style != "raw"]
