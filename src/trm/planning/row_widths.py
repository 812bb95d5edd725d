"""The widths of the rows of a training step, where examples differ in length.

A step computes its rows from the longest to the shortest, and each worker trims its slice to the longest row
in it. So the memory of a micro-batch is about proportional to the positions that are computed at a time, and
the first micro-batch, of the longest rows, decides the peak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trm.arrays import FloatArray, IntArray
from trm.batch import LENGTH_MULTIPLE
from trm.config import RunConfig
from trm.schedule import word_dropout_of_step
from trm.tasks.dataset import Split, open_split

# About one step in a thousand has more rows of some length than the mean, this many standard deviations and
# one row.
_DEVIATIONS = 3


def row_widths(config: RunConfig) -> tuple[int, ...] | None:
    """Return the widths of a step's rows, at most, from the widest on; None if all rows are full.

    Most recipes draw new examples evenly for every step. A step of another one may consist of the longest.
    """
    if not any(config.data.path.glob("train/*__lengths.npy")):
        return None
    split = open_split(config.data.path, "train", verified={})  # the caller has verified the data
    num_slots = config.training.effective_batch_size
    widths = _widths(config, split)
    if not _draws_evenly(config, split):
        return (int(widths.max()),) * num_slots
    found = np.full(num_slots, widths.min())
    for width in np.unique(widths):
        share = float((widths >= width).mean())
        spread = math.sqrt(num_slots * share * (1 - share))
        found[: math.floor(num_slots * share + _DEVIATIONS * spread + 1)] = width
    return tuple(found.tolist())


def computed_positions(widths: Sequence[int], size: int, workers: int) -> int:
    """Return the positions that a micro-batch of this size computes at a time: those of the longest rows."""
    slices = workers if size >= workers else 1  # as `ThreadWorkers` shares them
    rows = size // slices
    return sum(rows * widths[first] for first in range(0, slices * rows, rows))


def _draws_evenly(config: RunConfig, split: Split) -> bool:
    """Return whether long and short examples are equally likely. Deep supervision keeps hard ones longer."""
    training = config.training
    by_group = split.num_groups < len(split)
    return training.supervision == "terminal" and training.curriculum is None and not by_group


def _widths(config: RunConfig, split: Split) -> IntArray:
    """Return the width of every example: its length without dropped words, rounded as `trimmed` does."""
    assert split.lengths is not None
    kept = _kept(split.lengths.astype(np.float64), _least_dropout(config))
    multiples = np.ceil(kept / LENGTH_MULTIPLE).astype(np.int64) * LENGTH_MULTIPLE
    return np.minimum(multiples, split.spec.max_len)


def _kept(lengths: FloatArray, dropout: float) -> FloatArray:
    """Return how many tokens of a row remain, at most, if each one is left out with this probability."""
    spread = np.sqrt(lengths * dropout * (1 - dropout))
    return np.asarray(np.minimum(lengths, lengths * (1 - dropout) + _DEVIATIONS * spread))


def _least_dropout(config: RunConfig) -> float:
    first_steps = [start + 1 for start in config.training.phase_starts] or [1]
    return min(word_dropout_of_step(step, config.training) for step in first_steps)
