"""Thresholds of problems. `docs/troubleshooting.md` explains each of them.

Thresholds that `macbook_optimization` documents (90 % of memory, 70 % of the CPU, 80 % of the throughput) are
not repeated here: the diagnoses call its functions.
"""

from __future__ import annotations

from dataclasses import dataclass

from macbook_optimization.units import MIB


@dataclass(frozen=True, slots=True)
class Thresholds:
    machine_seconds: float = 30.0  # for which a state of the machine must last
    slow_seconds: float = 60.0  # for which training must be slow; the baseline is measured for as long
    loss_seconds: float = 60.0  # for which the loss must be high
    min_rows: int = 10  # in each of these periods
    gone_seconds: float = 30.0  # without the cause, after which a kind may be reported again
    data_share: float = 0.25  # of the time of a step, spent waiting for its data
    swapped_bytes: int = 256 * MIB  # that swap grew by
    swapping_rows: int = 3  # in which it grew
    slow_rows_share: float = 0.75  # of the rows that must be slow, beside their average
    loss_deviation: float = 5.0  # standard deviation around the trend
    loss_swing: float = 0.08  # likewise, as a share of the loss of the first rows, if the loss does not fall
    falling_ratio: float = 0.9  # of the second half of the period to the first: below, the loss falls
    loss_rise: float = 2.0  # relative to the lowest level with the same settings
    risen_share: float = 0.5  # of the loss of the first rows of the run, which such a loss must exceed
    stuck_ratio: float = 0.9  # of the loss to that of the first rows: above, nothing was learned
    stuck_steps: int = 200  # after the warm-up, until when something must have been learned
    diverged_ratio: float = 1.5  # of the loss to that of the first rows of the run
    skipped_steps: int = 3  # with NaN or Inf, in the recent rows
    plateau_evaluations: int = 5  # in a row without a new best value
    plateau_share: float = 0.25  # of all steps of the run, for which this lasts
    plateau_loss_ratio: float = 0.98  # of the training loss, second half of that time to the first half
    solved: float = 0.995  # a primary metric above this has little left to improve
