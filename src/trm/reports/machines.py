"""The machines that trained a run together, and how long the others waited for each of them."""

from __future__ import annotations

from dataclasses import dataclass

from macbook_optimization.terminal_text import one_line
from trm.reports.history import History
from trm.runs.events import WorldFormed
from trm.runs.rows import Row


@dataclass(frozen=True, slots=True)
class MachineFacts:
    name: str
    slots: int | None  # in the newest group of machines; None if it is not among them
    waited_seconds: float  # in which all others waited for it


def machines_of(history: History) -> list[MachineFacts]:
    """Return the machines of a run; none if it has always been trained by one."""
    groups = [_slots_by_name(event) for event in history.events if event.get("event") == WorldFormed.name]
    names = [name for group in groups if len(group) > 1 for name in group]
    newest = groups[-1] if groups else {}
    return [
        MachineFacts(one_line(name), newest.get(name), history.waited_for.get(name, 0.0))
        for name in dict.fromkeys([*newest, *names, *history.waited_for])
        if names or history.waited_for
    ]


def _slots_by_name(event: Row) -> dict[str, int]:
    names, shares = event.get("machines"), event.get("shares")
    if not isinstance(names, list) or not isinstance(shares, list):
        return {}
    pairs = zip(names, shares, strict=False)
    return {str(name): share for name, share in pairs if isinstance(share, int)}
