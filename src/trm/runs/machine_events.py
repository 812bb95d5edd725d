"""Events of the machine: how a run fits into its memory, its cores, its heat and its power.

None of them changes what is learned. `runs.events` lists them with all others.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from macbook_optimization.json_types import JsonObject
from trm.runs.event import Event


@dataclass(frozen=True, slots=True)
class MicroBatchChanged(Event):
    """The fields of both changes of the micro-batch size."""

    step: int
    before: int
    after: int
    reason: str
    returned_bytes: int


@dataclass(frozen=True, slots=True)
class BatchShrunk(MicroBatchChanged):
    """Memory pressure or a failed allocation lowered the micro-batch size."""

    name = "batch shrunk"


@dataclass(frozen=True, slots=True)
class BatchGrown(MicroBatchChanged):
    """The memory pressure is over."""

    name = "batch grown"


@dataclass(frozen=True, slots=True)
class DataMapped(Event):
    """The dataset is no longer held in memory."""

    name = "data mapped"
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class GarbageCollectionStopped(Event):
    """A requested garbage collection returned nothing, so there will be no more."""

    name = "garbage collection returns nothing"
    step: int
    returned_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryGrows(Event):
    """The resident memory grew steadily: possibly a leak."""

    name = "memory grows"
    leak: JsonObject

    def to_row(self) -> JsonObject:
        return {"time": time.time(), "event": self.name, **self.leak}


@dataclass(frozen=True, slots=True)
class ThreadsChanged(Event):
    name = "threads"
    step: int
    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class CompileTried(Event):
    name = "compiled"
    step: int
    gain: float | None  # measured speed relative to the uncompiled block
    problem: str | None


@dataclass(frozen=True, slots=True)
class Profiled(Event):
    """A few steps were recorded; the result is in the run's directory `profile`."""

    name = "profiled"
    step: int  # the last of them
    steps: int
    step_seconds: float  # mean time of a recorded step
    step_seconds_before: float  # likewise without the recording


@dataclass(frozen=True, slots=True)
class CoolingBreak(Event):
    name = "cooling break"
    reason: str
    seconds: float
    step: int


@dataclass(frozen=True, slots=True)
class LowBattery(Event):
    name = "low battery"
    percent: float
    step: int


@dataclass(frozen=True, slots=True)
class DutyCycleChanged(Event):
    """Training computes for another share of the time and sleeps for the rest; 1 is full speed, with which
    every start begins."""

    name = "duty cycle"
    step: int
    before: float
    after: float
    reason: str


@dataclass(frozen=True, slots=True)
class TrainingPaused(Event):
    """Training waits, until `continued` or `stopped`; this is not training time."""

    name = "paused"
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class TrainingContinued(Event):
    """The cause of the pause has gone."""

    name = "continued"
    step: int
    waited_seconds: float


@dataclass(frozen=True, slots=True)
class ThrottlingInferred(Event):
    """Steps became slower at equal work, and other programs do not explain it. No sensor reported this."""

    name = "throttling inferred"
    step: int
    factor: float  # by which the processor seems to be slower than at the start
    evidence: str


@dataclass(frozen=True, slots=True)
class ThrottlingOver(Event):
    """Steps take as long again as before the inferred throttling."""

    name = "throttling over"
    step: int
