"""The training rows that a crash has lost: those whose steps are repeated from the checkpoint on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from trm.runs.rows import Row, number


class Place(NamedTuple):
    """The end of a training row."""

    step: float
    seconds: float  # of training, over all starts

    @classmethod
    def of(cls, row: Row) -> Place:
        return cls(number(row.get("step")), number(row.get("seconds")))


@dataclass(frozen=True, slots=True)
class Repetition:
    """The steps that a row repeats. It may end beyond the lost rows, as it reports several steps at once."""

    step: float  # with which the row ends
    after_step: float  # the last one that is not repeated; NaN if the row does not say
    after_seconds: float

    def covers(self, earlier: Place) -> bool:
        """Return whether an earlier row is lost."""
        if earlier.step >= self.step:
            return True
        if math.isfinite(self.after_step):
            return earlier.step > self.after_step
        return earlier.seconds > self.after_seconds


def repetition(before: Place, row: Row) -> Repetition | None:
    """Return what a row repeats of those until `before`; None if it simply follows.

    Earlier versions did not record how many steps a row has. Its time then shows where it began, roughly: the
    activities of a row take a little longer than its steps.
    """
    place = Place.of(row)
    num_steps = number(row.get("num_steps"))
    after_step = place.step - num_steps if 1 <= num_steps <= place.step else math.nan  # else it is damaged
    if math.isfinite(after_step):
        goes_back = before.step > after_step
    else:
        goes_back = place.seconds < before.seconds or place.step <= before.step
    if not goes_back:
        return None
    return Repetition(place.step, after_step, place.seconds - sum(seconds_of(row, "spent").values()))


def seconds_of(row: Row, name: str) -> dict[str, float]:
    """Return the seconds by activity, or by machine, of a training row."""
    found = row.get(name)
    if not isinstance(found, Mapping):
        return {}
    return {str(key): number(value) for key, value in found.items() if 0 <= number(value) < math.inf}
