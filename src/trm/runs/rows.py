"""The rows of `metrics.jsonl`, one kind for training and one for evaluations, and of `resources.jsonl`.

Every row has the `time` at which it was written, in seconds since the epoch, so that rows of different files
and events can be put in order. Earlier versions wrote none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from macbook_optimization.json_types import JsonMapping, JsonObject

Row = JsonObject  # as read from a file, of this or an earlier version
Kind = Literal["train", "eval", "resources"]
NAN = math.nan
MAX_RATE = 1e12  # samples per second: a row that claims more is damaged


@dataclass(frozen=True, slots=True)
class TrainRow:
    """Averages over the steps since the last row."""

    step: int
    seconds: float  # of training, over all starts of the run
    loss: float
    grad_norm: float
    samples_per_second: float
    learning_rate: float
    micro_batch_size: int
    train_token_accuracy: float
    train_exact_accuracy: float
    rss_bytes: int
    cpu_percent: float
    curriculum_stage: int | None = None  # after this step; absent without a curriculum
    phase: str | None = None  # of this step; absent without phases
    max_length: int | None = None  # to which rows are cut; absent without `training.adaptive_min_length`
    spent: Mapping[str, float] = field(default_factory=dict)  # seconds since the last row, by activity
    waited_for: Mapping[str, float] | None = None  # likewise, by machine for which all others waited
    by_cycles: Mapping[str, tuple[int, float]] | None = None  # steps and their seconds, if depths differ
    num_steps: int | None = None  # that this row is the average of; earlier versions did not record it
    device_bytes: int | None = None  # that the driver of a GPU holds, beside the resident memory

    def to_json(self) -> Row:
        facts = {name: value for name, value in asdict(self).items() if value is not None}
        return {"kind": "train", "time": time.time(), **facts}


@dataclass(frozen=True, slots=True)
class EvalRow:
    """One evaluation on the test split."""

    step: int
    seconds: float
    examples: int
    metrics: Mapping[str, float]  # the scorer's scalars
    tables: Mapping[str, list[list[float]]]
    mean_steps: float
    accuracy_by_depth: list[float]  # exact accuracy after 1, 2, ... steps
    evaluation_seconds: float
    tasks_evaluated: int | None = None  # with at least one of the examples; None if each is its own task
    tasks_total: int | None = None

    def to_json(self) -> Row:
        """Return a flat row; the scalars are entries of their own."""
        facts = {name: value for name, value in asdict(self).items() if value is not None}
        metrics = facts.pop("metrics")
        tables = facts.pop("tables")
        return {
            "kind": "eval",
            "time": time.time(),
            **metrics,
            **facts,
            **({"tables": tables} if tables else {}),
        }


@dataclass(frozen=True, slots=True)
class ResourceRow:
    """The machine and the trainer, about once per second. What the system does not report is None."""

    cpu_percent: list[float]  # per logical core, since the row before
    process_cpu_percent: float | None  # of the trainer, in percent of one core; None if it is not running
    rss_bytes: int | None  # of the trainer
    available_bytes: int  # memory of the machine that programs could still take
    total_bytes: int
    swap_bytes: int  # in use
    temperature: float | None  # degrees Celsius
    thermal_level: str | None  # on macOS: nominal, moderate, heavy, trapping, sleeping
    is_throttling: bool | None
    speed_limit_percent: int | None
    battery_percent: float | None
    on_battery: bool | None

    def to_json(self) -> Row:
        return {"kind": "resources", "time": time.time(), **asdict(self)}


def kind_of(row: JsonMapping) -> str:
    """Return the kind of a row; earlier versions wrote none."""
    kind = row.get("kind")
    if isinstance(kind, str):
        return kind
    if "event" in row:
        return "event"
    return "train" if "samples_per_second" in row else "eval"


def memory_of(row: JsonMapping) -> float:
    """Return the resident memory that a row reports, and what the driver of a GPU holds, if anything."""
    device = number(row.get("device_bytes"))
    return number(row.get("rss_bytes")) + (device if math.isfinite(device) else 0.0)


def number(value: object) -> float:
    """Return a number that a file claims, or NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NAN
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return NAN
