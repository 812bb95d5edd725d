"""Groups of events, so that a chart marks alike what is alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from trm.runs import events
from trm.runs.rows import Row

MarkGroup = Literal["start", "plan", "pause", "learning", "problem", "note"]
MARK_GROUPS: dict[MarkGroup, str] = {
    "start": "start, resume or stop",
    "plan": "change of plan",
    "pause": "heat or battery",
    "learning": "change of what is learned",
    "problem": "problem",
    "note": "anything else",
}
_EVENTS: Mapping[MarkGroup, tuple[type[events.Event], ...]] = {
    "start": (
        events.Resumed, events.Restarted, events.Extended, events.Imported, events.Initialised,
        events.Stopped, events.WorldFormed, events.Regrouping, events.LimitsSet,
    ),
    "plan": (
        events.PlanChosen, events.ThreadsChanged, events.CompileTried, events.BatchShrunk, events.BatchGrown,
        events.DataOpened, events.DataMapped, events.GarbageCollectionStopped,
    ),
    "pause": (
        events.CoolingBreak, events.LowBattery, events.DutyCycleChanged, events.TrainingPaused,
        events.TrainingContinued, events.ThrottlingInferred, events.ThrottlingOver,
    ),
    "learning": (
        events.LearningRateLowered, events.RowLengthChanged, events.StageChanged, events.PhaseBegan,
    ),
    "problem": (
        events.Crashed, events.Damaged, events.NotSaved, events.StepSkipped, events.RolledBack,
        events.MemoryGrows, events.Advised, events.MachineLost, events.WeightsDiffered, events.DeviceRejected,
    ),
    "note": (events.Profiled, events.SavedAgain),
}  # fmt: skip
GROUP_OF_EVENT: dict[str, MarkGroup] = {
    event.name: group for group, kinds in _EVENTS.items() for event in kinds
}


def group_of(event: Row) -> MarkGroup:
    """Return the group of an event; one of another version is a note."""
    return GROUP_OF_EVENT.get(str(event.get("event")), "note")
