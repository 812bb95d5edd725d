"""Every event that a run records, with its fields.

Events go to `events.jsonl`, one JSON object per line: `time`, `event` (the name below) and the fields.
Readers of a run (monitor, report, diagnosis) rely on this list.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import ClassVar

from macbook_optimization.json_types import JsonObject

EARLY_STOPPING = "early stopping"  # as a reason of `Stopped`


@dataclass(frozen=True, slots=True)
class Event:
    name: ClassVar[str]

    def to_row(self) -> JsonObject:
        return {"time": time.time(), "event": self.name, **asdict(self)}


@dataclass(frozen=True, slots=True)
class PlanChosen(Event):
    """A plan is in use from here on; the fields are those of the plan."""

    name = "plan"
    plan: JsonObject

    def to_row(self) -> JsonObject:
        return {"time": time.time(), "event": self.name, **self.plan}


@dataclass(frozen=True, slots=True)
class DeviceRejected(Event):
    """A backend or device failed the check before the run, so this start uses the CPU or another one."""

    name = "device rejected"
    backend: str
    device: str
    problem: str
    tensor: str | None  # the first one that differs from the CPU, if it is a single one


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    name = "resumed"
    step: int
    changes: list[str]  # what differs from when the checkpoint was written


@dataclass(frozen=True, slots=True)
class Crashed(Event):
    """The start before this one ended without `stopped`; recorded by the start that found out."""

    name = "crashed"
    step: int  # of the checkpoint from which training continues; 0 without one
    reported_step: int  # the last one that the crashed start reported
    repeated_steps: int


@dataclass(frozen=True, slots=True)
class Stopped(Event):
    name = "stopped"
    reason: str  # "target", "max_steps", "early stopping", "limit" or "interrupted"
    step: int
    seconds: float  # of training, over all starts of the run
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Restarted(Event):
    """The supervisor started the trainer again."""

    name = "restarted"
    cause: str
    micro_batch_size: int


@dataclass(frozen=True, slots=True)
class WorldFormed(Event):
    """Machines train together from here on; one machine alone is a world, too."""

    name = "machines"
    step: int
    machines: list[str]  # by rank; the first holds the run
    shares: list[int]  # slots of each
    efficiency: float | None  # predicted, from the time of a message; None if speeds are unknown


@dataclass(frozen=True, slots=True)
class Regrouping(Event):
    """A start ended in order, because a machine arrives or leaves; the next one follows."""

    name = "regrouping"
    step: int


@dataclass(frozen=True, slots=True)
class MachineLost(Event):
    name = "machine lost"
    machines: list[str]
    cause: str


@dataclass(frozen=True, slots=True)
class WeightsDiffered(Event):
    """The weights of the machines were not the same to the last bit; all continue with those of the run."""

    name = "weights differed"
    step: int


@dataclass(frozen=True, slots=True)
class Extended(Event):
    """More steps were requested after the run had finished."""

    name = "extended"
    step: int
    last_step: int  # from here on


@dataclass(frozen=True, slots=True)
class Imported(Event):
    name = "imported"
    file: str


@dataclass(frozen=True, slots=True)
class Initialised(Event):
    """A new run started from more than random weights."""

    name = "initialised"
    description: str


@dataclass(frozen=True, slots=True)
class Damaged(Event):
    """A checkpoint was damaged and set aside."""

    name = "damaged"
    checkpoint: str


@dataclass(frozen=True, slots=True)
class NotSaved(Event):
    name = "not saved"
    step: int
    cause: str


@dataclass(frozen=True, slots=True)
class SavedAgain(Event):
    """The first successful save after one that failed."""

    name = "saved again"
    step: int


@dataclass(frozen=True, slots=True)
class StepSkipped(Event):
    """The loss or the gradient was NaN or Inf."""

    name = "step skipped"
    step: int
    cause: str


@dataclass(frozen=True, slots=True)
class RolledBack(Event):
    name = "rolled back"
    step: int
    to: int
    learning_rate_scale: float


@dataclass(frozen=True, slots=True)
class LearningRateLowered(Event):
    """The primary metric did not improve for `training.plateau.patience` evaluations."""

    name = "learning rate lowered"
    step: int
    scale: float  # of the scheduled learning rate, from here on
    best: float  # value of the primary metric


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
class RowLengthChanged(Event):
    """Rows are cut to another number of tokens, which changes what is learned: memory is short, or no
    longer."""

    name = "row length"
    step: int
    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class DataOpened(Event):
    """How the training split is read from here on: "memory", "mapped" or "streaming"."""

    name = "data"
    step: int
    strategy: str


@dataclass(frozen=True, slots=True)
class StageChanged(Event):
    """The curriculum's stage, when the run begins and after each change."""

    name = "curriculum"
    step: int
    stage: int
    share: float  # of the training examples, the easiest ones, from which new examples are taken


@dataclass(frozen=True, slots=True)
class PhaseBegan(Event):
    """The first step of a phase of training."""

    name = "phase"
    step: int
    phase: str
    learning_rate_factor: float


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
class Advised(Event):
    """A diagnosis of the running training; each kind is recorded once until its cause has gone."""

    name = "advice"
    step: int
    diagnosis: str  # its kind, such as "contention"
    evidence: str  # what was measured
    advice: str  # what to change


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


STARTS = (Crashed.name, Resumed.name, Restarted.name)  # with which a start of an existing run begins
