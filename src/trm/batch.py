"""A batch: the examples of some slots, as arrays.

Row i belongs to slot `slots[i]` of the effective batch. A rank holds the rows of its slots and a micro-batch
is a slice of them, so what belongs together always travels together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trm.arrays import BoolArray, FloatArray, IntArray

IGNORE_LABEL = -100  # the reference implementation's mark for a position without a label
PAD_TOKEN = 0
LENGTH_MULTIPLE = 32  # few different lengths, so that few shapes are allocated, tuned and compiled


@dataclass(frozen=True, slots=True)
class Batch:
    slots: IntArray  # (n,) global slot ids
    inputs: IntArray  # (n, L)
    labels: IntArray  # (n, L), IGNORE_LABEL where there is no label
    puzzle_identifiers: IntArray  # (n,)
    fresh: BoolArray  # (n,) slots that start a new example, from the initial latents
    lengths: IntArray | None = None  # (n,) tokens per row; None: every row is full
    noise_seeds: IntArray | None = None  # (n,) one per slot, for the noise in its initial latents
    weights: FloatArray | None = None  # (n,) factor of the loss of each row; None: all count the same
    all_puzzle_identifiers: IntArray | None = None  # (N,) of all ranks' slots; None: there is one rank

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: slice | IntArray | BoolArray) -> Batch:
        return Batch(
            slots=self.slots[rows],
            inputs=self.inputs[rows],
            labels=self.labels[rows],
            puzzle_identifiers=self.puzzle_identifiers[rows],
            fresh=self.fresh[rows],
            lengths=None if self.lengths is None else self.lengths[rows],
            noise_seeds=None if self.noise_seeds is None else self.noise_seeds[rows],
            weights=None if self.weights is None else self.weights[rows],
            all_puzzle_identifiers=self.all_puzzle_identifiers,
        )

    def trimmed(self, multiple: int = LENGTH_MULTIPLE) -> Batch:
        """Remove columns beyond the longest row, rounded up to a multiple.

        Rounding keeps the number of different shapes small. A batch without lengths is returned as it is.
        """
        if self.lengths is None:
            return self
        longest = int(self.lengths.max(initial=1))
        width = min(self.inputs.shape[1], -(-longest // multiple) * multiple)
        return replace(self, inputs=self.inputs[:, :width], labels=self.labels[:, :width])

    def cut(self, length: int) -> Batch:
        """Remove all tokens and labels after this many of every row."""
        if self.lengths is None:
            raise ValueError("rows without lengths cannot be cut")
        after = np.arange(self.inputs.shape[1]) >= length
        return replace(
            self,
            inputs=np.where(after, PAD_TOKEN, self.inputs),
            labels=np.where(after, IGNORE_LABEL, self.labels),
            lengths=np.minimum(self.lengths, length),
        )

    def by_length(self) -> IntArray | None:
        """Return the rows from the longest to the shortest, equal ones in their order; None if all are full.

        The longest come first because they take the most memory and time: a step that does not fit fails
        early, and worker threads end at about the same time.
        """
        return None if self.lengths is None else np.argsort(-self.lengths, kind="stable")

    @property
    def puzzle_rows(self) -> IntArray:
        """The puzzle embedding rows that take part in a step, on all ranks, in ascending order."""
        everybody = self.all_puzzle_identifiers
        return np.unique(self.puzzle_identifiers if everybody is None else everybody)

    def first_row(self, owned: slice) -> int:
        """Return which of a rank's slots the first row belongs to; the others must follow in order."""
        first = int(self.slots[0])
        in_order = np.array_equal(self.slots, first + np.arange(len(self)))
        if not (in_order and owned.start <= first and first + len(self) <= owned.stop):
            raise ValueError(f"a batch of slots {self.slots} is not a range of {owned.start}:{owned.stop}")
        return first - int(owned.start)

    @property
    def padding(self) -> BoolArray | None:
        """(n, L), true where a row has no token; None if every row is full."""
        if self.lengths is None:
            return None
        return np.asarray(np.arange(self.inputs.shape[1]) >= self.lengths[:, None])


def exact_rows(correct: Any, labelled: Any) -> Any:
    """Return which rows have labels and have all of them right, from the two counts per row.

    This is the one definition of an exact answer, for arrays and for the tensors of any backend. A row
    without labels is not exact.
    """
    return (correct == labelled) & (labelled > 0)
