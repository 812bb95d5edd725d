"""Events in words, as a reader of a run sees them. Rows come from a file, so any field may be missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from macbook_optimization.units import counted
from trm.reports.wording import duration
from trm.runs.events import (
    Advised,
    BatchGrown,
    BatchShrunk,
    CompileTried,
    CoolingBreak,
    Crashed,
    Damaged,
    DataMapped,
    DataOpened,
    DeviceRejected,
    DutyCycleChanged,
    Extended,
    GarbageCollectionStopped,
    Imported,
    Initialised,
    LearningRateLowered,
    LimitsSet,
    LowBattery,
    MachineLost,
    MemoryGrows,
    NotSaved,
    PhaseBegan,
    PlanChosen,
    Profiled,
    Regrouping,
    Restarted,
    Resumed,
    RolledBack,
    RowLengthChanged,
    SavedAgain,
    StageChanged,
    StepSkipped,
    Stopped,
    ThreadsChanged,
    ThrottlingInferred,
    ThrottlingOver,
    TrainingContinued,
    TrainingPaused,
    WeightsDiffered,
    WorldFormed,
)
from trm.runs.rows import Row

_REASONS = {
    "target": "the target is reached",
    "max_steps": "all steps are taken",
    "limit": "a limit of this start is reached",
    "interrupted": "interrupted",
}
_TEMPLATES: Mapping[str, str] = {
    Resumed.name: "resumed after step {step}",
    Regrouping.name: "a machine arrives or leaves after step {step}",
    Restarted.name: "the trainer {cause}; it started again",
    Extended.name: "extended to step {last_step}",
    Imported.name: "weights imported from {file}",
    Initialised.name: "{description}",
    Damaged.name: "checkpoint {checkpoint} is damaged and was set aside",
    NotSaved.name: "step {step} is not saved: {cause}",
    SavedAgain.name: "step {step} is saved",
    StepSkipped.name: "step {step} skipped: {cause}",
    RolledBack.name: "rolled back from step {step} to {to}, learning rate times {learning_rate_scale:g}",
    LearningRateLowered.name: "learning rate lowered to {scale:.3g} of its schedule",
    BatchShrunk.name: "micro-batch {after} instead of {before}: {reason}",
    BatchGrown.name: "micro-batch {after} instead of {before}: {reason}",
    RowLengthChanged.name: "rows cut to {after} instead of {before} tokens: {reason}",
    Profiled.name: "{steps} steps profiled; the result is in profile/",
    DataOpened.name: "dataset: {strategy}",
    DataMapped.name: "the dataset is no longer held in memory: {reason}",
    StageChanged.name: "curriculum stage {stage}: the easiest {share:.0%} of the examples",
    PhaseBegan.name: "phase {phase}",
    GarbageCollectionStopped.name: "garbage collection returned nothing and was switched off",
    MemoryGrows.name: "memory grows by {mb_per_step:.2f} MiB per step: possibly a leak",
    ThreadsChanged.name: "threads: {after} instead of {before}, as {reason}",
    CoolingBreak.name: "cooling break of {seconds:g} s: {reason}",
    LowBattery.name: "battery at {percent:.0f} %; saved",
    DutyCycleChanged.name: "training computes {after:.0%} of the time instead of {before:.0%}: {reason}",
    TrainingPaused.name: "training waits: {reason}",
    ThrottlingInferred.name: "the processor seems {factor:.2f} times as slow as at the start (inferred)",
    ThrottlingOver.name: "steps take as long again as before the inferred throttling",
    WeightsDiffered.name: "step {step}: weights differed between machines; those of the host are used",
}
_DESCRIBED: Mapping[str, Callable[[Row], str]] = {
    DeviceRejected.name: lambda row: _describe_rejection(row),
    Stopped.name: lambda row: (
        f"stopped after step {row['step']}: {_REASONS.get(row['reason'], row['reason'])}"
    ),
    PlanChosen.name: lambda row: (
        f"plan: {row['accumulation_steps']} x {row['micro_batch_size']} examples, "
        f"{counted(row['threads'], 'thread')}"
    ),
    Crashed.name: lambda row: (
        f"the start before crashed after step {row['reported_step']}; resumed from step {row['step']}, "
        f"{counted(row['repeated_steps'], 'step')} repeated"
    ),
    WorldFormed.name: lambda row: f"machines: {', '.join(row['machines'])}",
    LimitsSet.name: lambda row: _describe_limits(row),
    MachineLost.name: lambda row: f"lost {', '.join(row['machines']) or 'a machine'}: {row['cause']}",
    CompileTried.name: lambda row: _describe_compilation(row),
    Advised.name: lambda row: (
        f"{row['diagnosis']}: {row['evidence']} {row['advice']} {row.get('gain') or ''}".rstrip()
    ),
    TrainingContinued.name: lambda row: f"training continues after {duration(row['waited_seconds'])}",
}
WITH_TEXT = frozenset({*_TEMPLATES, *_DESCRIBED})  # names of events


def describe_event(row: Row) -> str:
    """Return what happened; an unknown or damaged event is shown by its name."""
    name = str(row.get("event"))
    try:
        if name in _DESCRIBED:
            return _DESCRIBED[name](row)
        return _TEMPLATES[name].format(**row)
    except (KeyError, ValueError, TypeError, IndexError, OverflowError):
        return name


def _describe_rejection(row: Row) -> str:
    where = "" if row["tensor"] is None else f"{row['tensor']}: "
    return f"{row['backend']} on {row['device']} is not used: {where}{row['problem']}"


def _describe_limits(row: Row) -> str:
    step, seconds = row["max_step"], row["max_seconds"]
    limits = [
        "" if step is None else f"at step {step:,}",
        "" if seconds is None else f"after {duration(seconds)}",
    ]
    return f"this start ends {' or '.join(filter(None, limits))} at the latest"


def _describe_compilation(row: Row) -> str:
    if row["problem"]:
        return "compiling failed; training continues without it"
    gain = row["gain"]
    return "compiled block tried" if gain is None else f"compiled block tried: {gain:.2f} times as fast"
