"""The format of numbers and warnings in `trm doctor` and `trm bench`."""

from __future__ import annotations

import math

from macbook_optimization.resource_monitoring import BUSY_PERCENT

NOT_REPORTED = "not reported"


def significant(value: float, digits: int = 3) -> str:
    """Return a number with this many significant digits, never rounding digits before the decimal point."""
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


def load_warning(other_percent: float) -> str | None:
    """Return a warning if other programs were busy just before a measurement."""
    if other_percent <= BUSY_PERCENT:
        return None
    return (
        f"Other programs used {other_percent:.0f} % of the CPU just before: training is faster without them."
    )
