"""Numbers and events in words, for everything that shows a run to a person."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from macbook_optimization.json_types import JsonMapping
from macbook_optimization.terminal_text import one_line
from macbook_optimization.units import GIB, MIB
from trm.reports.history import number

NOT_REPORTED = "not reported"
STOP_REASONS = {
    "target": "the target accuracy was reached",
    "max_steps": "the last step of the recipe was taken",
    "limit": "the time or step limit of the command was reached",
    "interrupted": "it was interrupted",
}
_MAX_FIELD_CHARACTERS = 300


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


def event_text(event: JsonMapping) -> str:
    """Return what an event says, in one line. Events of later versions are shown as their fields."""
    describe = _DESCRIPTIONS.get(str(event.get("event")), _fields)
    return one_line(describe(event))


def _fields(event: JsonMapping) -> str:
    shown = (
        f"{str(name).replace('_', ' ')} {_short(value)}"
        for name, value in event.items()
        if name not in ("event", "time", "step", "kind") and not isinstance(value, Mapping)
    )
    return ", ".join(shown)


def _short(value: object) -> str:
    if isinstance(value, float):
        return significant(value)
    text = str(value)
    return text if len(text) <= _MAX_FIELD_CHARACTERS else text[:_MAX_FIELD_CHARACTERS] + "..."


def _plan(event: JsonMapping) -> str:
    parts = (
        f"{_short(event.get('accumulation_steps'))} x {_short(event.get('micro_batch_size'))} examples",
        f"{_short(event.get('threads'))} threads in {_short(event.get('workers'))} workers",
        _short(event.get("precision", "")),
        "compiled" if event.get("compiled_size") else "",
        "provisional: the first steps are measured" if event.get("provisional") else "",
    )
    return ", ".join(part for part in parts if part)


def _resumed(event: JsonMapping) -> str:
    changes = event.get("changes")
    changed = ", ".join(map(_short, changes)) if isinstance(changes, list) and changes else ""
    return f"after step {_short(event.get('step', '?'))}" + (f" ({changed})" if changed else "")


def _stopped(event: JsonMapping) -> str:
    reason = str(event.get("reason"))
    seconds = number(event.get("seconds"))
    after = f" after {duration(seconds)} of training" if math.isfinite(seconds) else ""
    return STOP_REASONS.get(reason, reason) + after


def _micro_batch(event: JsonMapping) -> str:
    sizes = f"micro-batch size {_short(event.get('before', '?'))} to {_short(event.get('after', '?'))}"
    return f"{sizes}: {_short(event.get('reason', ''))}"


def _change(event: JsonMapping) -> str:
    return (
        f"{_short(event.get('before', '?'))} to {_short(event.get('after', '?'))}: "
        f"{_short(event.get('reason', ''))}"
    )


def _compiled(event: JsonMapping) -> str:
    gain = number(event.get("gain"))
    if math.isfinite(gain):
        return f"one block compiled, {gain:.2f} times as fast"
    return f"not compiled: {_short(event.get('problem'))}"


def _advice(event: JsonMapping) -> str:
    return f"{_short(event.get('diagnosis'))}: {_short(event.get('evidence'))} {_short(event.get('advice'))}"


def _rolled_back(event: JsonMapping) -> str:
    scale = number(event.get("learning_rate_scale"))
    lowered = f", learning rate at {scale:.3g} of its schedule" if math.isfinite(scale) else ""
    return f"to step {_short(event.get('to', '?'))}{lowered}"


def _learning_rate(event: JsonMapping) -> str:
    best = number(event.get("best"))
    text = f"to {significant(number(event.get('scale')))} of its schedule"
    return f"{text}; the best was {share(best)}" if math.isfinite(best) else text


def _cooling(event: JsonMapping) -> str:
    return f"{duration(number(event.get('seconds')))}: {_short(event.get('reason', ''))}"


def _growth(event: JsonMapping) -> str:
    growth = f"by {significant(number(event.get('mb_per_step')))} MiB per step"
    return f"{growth} from step {_short(event.get('first_step'))} to {_short(event.get('last_step'))}"


_DESCRIPTIONS: dict[str, Callable[[JsonMapping], str]] = {
    "plan": _plan,
    "resumed": _resumed,
    "stopped": _stopped,
    "restarted": lambda event: f"{_short(event.get('cause'))}",
    "extended": lambda event: f"to {_short(event.get('last_step'))} steps",
    "batch shrunk": _micro_batch,
    "batch grown": _micro_batch,
    "threads": _change,
    "row length": _change,
    "compiled": _compiled,
    "advice": _advice,
    "rolled back": _rolled_back,
    "learning rate lowered": _learning_rate,
    "cooling break": _cooling,
    "memory grows": _growth,
    "low battery": lambda event: f"{percent(number(event.get('percent')))} left; saved",
    "step skipped": lambda event: _short(event.get("cause")),
    "not saved": lambda event: _short(event.get("cause")),
    "curriculum": lambda event: (
        f"stage {_short(event.get('stage'))}: {share(number(event.get('share')))} of the data"
    ),
    "phase": lambda event: _short(event.get("phase")),
    "data": lambda event: f"read as: {_short(event.get('strategy'))}",
}
