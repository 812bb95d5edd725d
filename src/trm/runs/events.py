"""Every event that a run records, with its fields; those of the machine are in `machine_events`.

Events go to `events.jsonl`, one JSON object per line: `time`, `event` (the name below) and the fields.
Readers of a run (monitor, report, diagnosis) rely on this list.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from macbook_optimization.json_types import JsonObject
from trm.runs.event import Event as Event
from trm.runs.machine_events import (
    BatchGrown as BatchGrown,
)
from trm.runs.machine_events import (
    BatchShrunk as BatchShrunk,
)
from trm.runs.machine_events import (
    CompileTried as CompileTried,
)
from trm.runs.machine_events import (
    CoolingBreak as CoolingBreak,
)
from trm.runs.machine_events import (
    DataMapped as DataMapped,
)
from trm.runs.machine_events import (
    DutyCycleChanged as DutyCycleChanged,
)
from trm.runs.machine_events import (
    GarbageCollectionStopped as GarbageCollectionStopped,
)
from trm.runs.machine_events import (
    LowBattery as LowBattery,
)
from trm.runs.machine_events import (
    MemoryGrows as MemoryGrows,
)
from trm.runs.machine_events import (
    MicroBatchChanged as MicroBatchChanged,
)
from trm.runs.machine_events import (
    Profiled as Profiled,
)
from trm.runs.machine_events import (
    ThreadsChanged as ThreadsChanged,
)
from trm.runs.machine_events import (
    ThrottlingInferred as ThrottlingInferred,
)
from trm.runs.machine_events import (
    ThrottlingOver as ThrottlingOver,
)
from trm.runs.machine_events import (
    TrainingContinued as TrainingContinued,
)
from trm.runs.machine_events import (
    TrainingPaused as TrainingPaused,
)

EARLY_STOPPING = "early stopping"  # as a reason of `Stopped`


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
class LimitsSet(Event):
    """This start ends at one of these, if the run does not end before; recorded only where there is one."""

    name = "limits"
    step: int
    max_step: int | None
    max_seconds: float | None  # from here on


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
    """The loading of the training split from here on: "memory", "mapped" or "streaming"."""

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
class Advised(Event):
    """A diagnosis of the running training; each kind is recorded once until its cause has gone."""

    name = "advice"
    step: int
    diagnosis: str  # its kind, such as "contention"
    evidence: str  # what was measured
    advice: str  # what to change
    gain: str | None = None  # what to expect from it; None in rows of earlier versions


STARTS = (Crashed.name, Resumed.name, Restarted.name)  # with which a start of an existing run begins
