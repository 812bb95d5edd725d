"""Numbers in words, for everything that shows a run to a person."""

from __future__ import annotations

import math
import re

from macbook_optimization.units import GIB, MIB

NOT_REPORTED = "not reported"
CODE = re.compile(r"`([^`]+)`")  # a command in a sentence


def duration(seconds: float) -> str:
    """Return "850 ms", "12.3 s", "4 min 05 s", "2 h 05 min" or "3 d 4 h"."""
    if not math.isfinite(seconds):
        return NOT_REPORTED
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def size(num_bytes: float | None) -> str:
    if num_bytes is None or not math.isfinite(num_bytes):
        return NOT_REPORTED
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"


def significant(value: float) -> str:
    """Return a number with about three digits, and thousands separated."""
    if not math.isfinite(value):
        return NOT_REPORTED
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(value: float) -> str:
    """Return a value in percent, from one that is in percent already."""
    return f"{value:.0f} %" if math.isfinite(value) else NOT_REPORTED


def share(value: float) -> str:
    """Return a share of 1 in percent, as accuracies are shown."""
    return f"{value:.1%}" if math.isfinite(value) else NOT_REPORTED
