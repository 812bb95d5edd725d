"""The remaining time of a run.

The schedule is known: the steps that are left, the recursions of each, the evaluations between them. What a
recursion, the rest of a step and an evaluation take is measured, recent steps counting more, so that the
estimate follows another program that comes or goes, a plan that changes, and breaks for cooling. Steps of
different depth show what one more recursion costs before the schedule makes them deeper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from trm.config import RunConfig
from trm.reports.ending import Ending
from trm.runs.rows import Row, number
from trm.schedule import cycles_of_step, value_at
from trm.tasks.metrics import smaller_is_better

HALF_LIFE_SHARE = 0.03  # of the time that the run takes: half of the weight is on steps newer than this
_HALF_LIFE_SECONDS = (2.0, 300.0)  # at least, at most
_LINE_HALF_LIFE_STEPS = 2000  # what a recursion costs beside the rest of a step changes slowly
_CYCLES_OF_GRADIENT = 2  # by operations: backward and optimizer cost as much as two recursions
_WEIGHT_OF_OPERATIONS = 2.0  # of that, as the sum of squared deviations of steps that would show it
_BREAKS_HALF_LIFE_SECONDS = 300.0  # saves and cooling breaks are rare
_BREAKS = ("saving", "waiting")
_MAX_STEP = 2**40  # of a row that is not damaged
_MAX_DIGITS = 6  # of a number of recursions
_MAX_EXACT_STEPS = 200  # whose recursions are counted one by one: 50 microseconds each
_TYPICAL_SHRINKING = 0.5  # measured on 6x6 Sudoku; the run's own evaluations count more
_NUM_TREND_POINTS = 4  # evaluations that the way to the target is extrapolated from


class Eta(NamedTuple):
    """Seconds until training ends: as it looks now, and if it takes all steps within the limits."""

    about_seconds: float
    at_most_seconds: float


@dataclass
class _Rate:
    """A ratio of sums whose older parts fade with time."""

    amount: float = 0.0
    work: float = 0.0

    def add(self, amount: float, work: float, keep: float) -> None:
        self.amount = keep * self.amount + amount
        self.work = keep * self.work + work

    @property
    def value(self) -> float:
        return self.amount / self.work if self.work else 0.0


@dataclass
class _StepCost:
    """Seconds of steps by their recursions: a line that is fitted to all steps, times a recent factor."""

    steps: float = 0.0
    cycles: float = 0.0
    squares: float = 0.0  # of cycles
    seconds: float = 0.0
    products: float = 0.0  # of cycles and seconds
    factor: _Rate = field(default_factory=_Rate)

    def add(self, groups: Sequence[tuple[float, int, float]], half_life: float) -> None:
        """Add steps: the recursions of each, how many there are, and their seconds together."""
        num_steps = sum(count for _, count, _ in groups)
        keep = 0.5 ** (num_steps / _LINE_HALF_LIFE_STEPS)
        self.steps = keep * self.steps + num_steps
        self.cycles = keep * self.cycles + sum(cycles * count for cycles, count, _ in groups)
        self.squares = keep * self.squares + sum(cycles**2 * count for cycles, count, _ in groups)
        self.seconds = keep * self.seconds + sum(seconds for _, _, seconds in groups)
        self.products = keep * self.products + sum(cycles * seconds for cycles, _, seconds in groups)
        took = sum(seconds for _, _, seconds in groups)
        expected = self._on_line(num_steps, sum(cycles * count for cycles, count, _ in groups))
        self.factor.add(took, expected, 0.5 ** (took / half_life))

    def of(self, steps: float, cycles: float) -> float:
        return self.factor.value * self._on_line(steps, cycles)

    def _on_line(self, steps: float, cycles: float) -> float:
        mean_cycles = self.cycles / self.steps
        mean_seconds = self.seconds / self.steps
        spread = max(0.0, self.squares - self.steps * mean_cycles**2)
        common = self.products - mean_cycles * self.seconds
        by_operations = mean_seconds / (mean_cycles + _CYCLES_OF_GRADIENT)
        slope = (common + _WEIGHT_OF_OPERATIONS * by_operations) / (spread + _WEIGHT_OF_OPERATIONS)
        slope = min(max(slope, 0.0), mean_seconds / mean_cycles)
        return steps * (mean_seconds - slope * mean_cycles) + slope * cycles


@dataclass
class EtaEstimator:
    """Receives the rows of a run and estimates the time that is left."""

    config: RunConfig
    metric: str  # the primary one
    num_examples: int | None = None  # per evaluation
    step: int = 0
    _counted: int = 0  # steps whose time is in the rates
    time: float | None = None  # of the last row, in seconds since the epoch
    evaluations: list[Row] = field(default_factory=list)
    ending: Ending = field(init=False)
    _cost: _StepCost = field(default_factory=_StepCost)
    _per_cycle: _Rate = field(default_factory=_Rate)  # seconds of the forward pass, for all slots
    _breaks: _Rate = field(default_factory=_Rate)  # seconds of saving and waiting per second of steps

    def __post_init__(self) -> None:
        self.ending = Ending(self.config, self.metric)

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.ending.add(row)
            if row.get("kind") == "train":
                self._add_steps(row)
            elif row.get("kind") == "eval":
                self._add_evaluation(row)
            if row.get("kind") in ("train", "eval") and math.isfinite(number(row.get("time"))):
                self.time = number(row.get("time"))

    def _add_evaluation(self, row: Row) -> None:
        step = number(row.get("step"))
        if 0 <= step <= _MAX_STEP:
            self.step = max(self.step, int(step))  # the row of the last steps comes after it
            self.evaluations = [*self.evaluations[1 - _NUM_TREND_POINTS :], row]

    def _add_steps(self, row: Row) -> None:
        step, rate = number(row.get("step")), number(row.get("samples_per_second"))
        before = self._counted
        if not 0 <= step <= _MAX_STEP:
            return
        self.step = self._counted = int(step)
        num_steps = self.step - before
        if num_steps <= 0 or not rate > 0:  # rolled back or resumed
            return
        seconds = num_steps * self.config.training.effective_batch_size / rate
        given = row.get("spent")
        spent: Mapping[str, float] = given if isinstance(given, dict) else {}
        forward = min(seconds, _known(spent.get("forward", seconds)))
        shortest, longest = _HALF_LIFE_SECONDS
        half_life = min(max(HALF_LIFE_SHARE * self._whole_seconds(), shortest), longest)
        cycles = self._cycles_of_row(before, self.step)
        self._cost.add(_groups(row, num_steps) or [(cycles / num_steps, num_steps, seconds)], half_life)
        self._per_cycle.add(forward, cycles, 0.5 ** (seconds / half_life))
        breaks = sum(_known(spent.get(name)) for name in _BREAKS)
        self._breaks.add(breaks, seconds, 0.5 ** (seconds / _BREAKS_HALF_LIFE_SECONDS))

    def _whole_seconds(self) -> float:
        return self._seconds_of_steps(0, self.config.training.last_step) if self._cost.steps else 0.0

    def estimate(self, now: float | None = None) -> Eta | None:
        """Return the time that is left at `now`, or None before the first row."""
        if not self._cost.steps:
            return None
        passed = 0.0 if now is None or self.time is None else max(0.0, now - self.time)
        last_step = self.ending.last_step
        end = min(last_step, self._step_of_target(), self.ending.step_of_early_stop())
        limit = self.ending.seconds_left(math.nan if self.time is None else self.time + passed)
        about = self._seconds_between(self.step, int(end)) - passed
        at_most = self._seconds_between(self.step, last_step) - passed
        return Eta(min(max(0.0, about), limit), min(max(0.0, at_most), limit))

    def _seconds_between(self, step: int, last_step: int) -> float:
        steps = self._seconds_of_steps(step, last_step) * (1 + self._breaks.value)
        every = self.config.evaluation.every_steps
        if every is None:
            return steps
        num_evaluations = max(0, last_step // every - step // every + (last_step % every > 0))
        return steps + self._seconds_of_evaluations(num_evaluations)

    def _seconds_of_steps(self, step: int, last_step: int) -> float:
        return self._cost.of(max(0, last_step - step), self._cycles(step, last_step))

    def _cycles_of_row(self, step: int, last_step: int) -> float:
        """Return the recursions of steps that were taken: exactly for few of them."""
        if last_step - step > _MAX_EXACT_STEPS:
            return self._cycles(step, last_step)
        config = self.config
        steps = range(step + 1, last_step + 1)
        return sum(cycles_of_step(each, config.model, config.training, config.seed) for each in steps)

    def _cycles(self, step: int, last_step: int) -> float:
        """Return the recursions to expect of the steps after `step`, up to `last_step`."""
        training = self.config.training
        if training.supervision == "deep":
            return max(0, last_step - step) * self.config.model.cycles_per_step
        starts = sorted({step, last_step, *(start for start in training.depths if step < start < last_step)})
        parts = pairwise(starts)
        return sum((end - start) * (1 + value_at(training.depths, start + 1)) / 2 for start, end in parts)

    def _seconds_of_evaluations(self, count: int) -> float:
        """Return what the next evaluations will take. They become shorter as answers need fewer steps."""
        per_step, steps = self._last_evaluation()
        least = self._least_steps()
        shrinking = self._shrinking(least) if steps > least else 0.0
        sum_of_powers = shrinking * (1 - shrinking**count) / (1 - shrinking)
        return per_step * (count * least + (steps - least) * sum_of_powers)

    def _last_evaluation(self) -> tuple[float, float]:
        """Return the seconds per inference step, and the steps that an answer took on average."""
        depth = self.config.inference.depth
        if self.evaluations:
            row = self.evaluations[-1]
            steps = _known(row.get("mean_steps")) or depth
            return _known(row.get("evaluation_seconds")) / steps, steps
        if self.num_examples is None:
            return 0.0, depth
        model, training = self.config.model, self.config.training
        cycles = model.cycles_per_step if training.supervision == "deep" else 1
        slots = training.effective_batch_size
        return self._per_cycle.value * cycles * self.num_examples / slots, depth

    def _least_steps(self) -> float:
        """Return the inference steps below which the recipe's early exit does not go."""
        inference = self.config.inference
        if inference.converged_after is not None:
            return min(inference.depth, inference.converged_after + 1)
        return 1 if inference.halt else inference.depth

    def _shrinking(self, least: float) -> float:
        """Return the factor by which the steps beyond the least shrink from one evaluation to the next."""
        steps = [_known(row.get("mean_steps")) - least for row in self.evaluations]
        ratios = [min(1.0, after / before) for before, after in pairwise(steps) if before > 0.5 and after > 0]
        return min(0.99, float(np.mean([_TYPICAL_SHRINKING, *ratios])))

    def _step_of_target(self) -> int:
        """Return the step of the evaluation that will reach the target, by the trend of the last ones."""
        training, target = self.config.training, self.config.evaluation.target
        every = self.config.evaluation.every_steps
        found = {number(row.get("step")): number(row.get(self.metric)) for row in self.evaluations}
        points = [(at, value) for at, value in found.items() if 0 <= at <= _MAX_STEP and math.isfinite(value)]
        if target is None or every is None or len(points) < _NUM_TREND_POINTS - 1:
            return training.last_step
        steps, values = zip(*points, strict=True)
        progress = _falling_loss if smaller_is_better(self.metric) else _logit
        slope, offset = np.polyfit(steps, [progress(value) for value in values], 1)
        if not slope > 0:
            return training.last_step
        reached = max(self.step + 1, (progress(target) - offset) / slope)
        return int(min(training.last_step, every * math.ceil(min(reached, 1e12) / every)))


def _groups(row: Row, num_steps: int) -> list[tuple[float, int, float]]:
    """Return the steps of a row by their recursions; nothing if it does not say, or is damaged."""
    given = row.get("by_cycles")
    groups = []
    for cycles, pair in given.items() if isinstance(given, dict) else ():
        count, seconds = pair if isinstance(pair, list) and len(pair) == 2 else (0, 0.0)
        depth = int(cycles) if cycles.isdecimal() and len(cycles) <= _MAX_DIGITS else None
        group = (number(depth), number(count), number(seconds))
        if not all(math.isfinite(value) and value > 0 for value in group):
            return []
        groups.append((group[0], int(group[1]), group[2]))
    return groups if sum(count for _, count, _ in groups) == num_steps else []


def _known(value: object) -> float:
    found = number(value)
    return found if math.isfinite(found) else 0.0


def _logit(share: float) -> float:
    share = min(max(share, 0.002), 0.998)
    return math.log(share / (1 - share))


def _falling_loss(loss: float) -> float:
    return -math.log(max(loss, 1e-6))
