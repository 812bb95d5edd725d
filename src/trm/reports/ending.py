"""The end of training before its last step: at a limit of this start, or by early stopping."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from trm.config import RunConfig
from trm.runs.events import STARTS, LimitsSet, Stopped
from trm.runs.rows import Row, number
from trm.training.early_stopping import EarlyStopping

_NUM_KEPT = 1000  # evaluations, of which a crash may lose some
_USED_PATIENCE = (
    0.5  # from which on nothing better is expected: one evaluation alone is often worse by chance
)


@dataclass
class Ending:
    """Receives the rows of a run in the order in which they were written."""

    config: RunConfig
    metric: str  # the primary one
    max_step: float = math.inf
    ends_at: float = math.inf  # in seconds since the epoch
    _stopping: deque[tuple[float, EarlyStopping]] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))

    def add(self, row: Row) -> None:
        name = row.get("event")
        if name in (*STARTS, Stopped.name):
            self.max_step = self.ends_at = math.inf
        elif name == LimitsSet.name:
            self.max_step = _or_infinite(row.get("max_step"))
            self.ends_at = number(row.get("time")) + _or_infinite(row.get("max_seconds"))
        elif row.get("kind") == "eval":
            self._add_evaluation(number(row.get("step")), number(row.get(self.metric)))

    def _add_evaluation(self, step: float, value: float) -> None:
        settings = self.config.training.early_stopping
        if settings is None or not (math.isfinite(step) and math.isfinite(value)):
            return
        while self._stopping and self._stopping[-1][0] >= step:  # repeated after a crash
            self._stopping.pop()
        before = self._stopping[-1][1] if self._stopping else EarlyStopping()
        self._stopping.append((step, before.after(value, settings, self.metric)))

    @property
    def last_step(self) -> int:
        """The last step within the limits."""
        return int(min(self.config.training.last_step, max(self.max_step, 0)))

    def seconds_left(self, now: float) -> float:
        """Return the time until the limit of this start; a machine that sleeps meanwhile needs longer."""
        return max(0.0, self.ends_at - now) if math.isfinite(now) else math.inf

    def step_of_early_stop(self) -> float:
        """Return where training ends if the metric does not improve any more; inf while that is not near."""
        settings, every = self.config.training.early_stopping, self.config.evaluation.every_steps
        if settings is None or every is None or not self._stopping:
            return math.inf
        step, state = self._stopping[-1]
        if state.waited < _USED_PATIENCE * settings.patience:
            return math.inf
        return every * (step // every + settings.patience - state.waited)


def _or_infinite(value: object) -> float:
    found = number(value)
    return found if math.isfinite(found) else math.inf
