"""The primary metric of a run: its value at the best checkpoint, and its name for people."""

from __future__ import annotations

from macbook_optimization.json_types import JsonMapping
from trm.tasks.metrics import ACCURACY, EXACT

USUAL_METRICS = (EXACT, ACCURACY)  # of runs without a best checkpoint, the most usual one first


def stored_metric(best: JsonMapping) -> str | None:
    """Return the metric by which a checkpoint is the best. Earlier versions called it headline and did not
    always store it."""
    name = best.get("primary_metric") or best.get("headline")
    return name if isinstance(name, str) else None


def primary_metric(best: JsonMapping) -> tuple[str, float] | None:
    """Return the metric by which a checkpoint is the best, and its value."""
    name = stored_metric(best) or EXACT
    value = best.get(name)
    return (name, float(value)) if isinstance(value, int | float) else None


def metric_label(name: str | None) -> str:
    """Return the name of a metric for people: `exact_accuracy` becomes "exact accuracy"."""
    return (name or "").replace("_", " ")
