"""The arrays of one training step, read by micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx
import numpy as np

from trm.arrays import IntArray
from trm.backends.world import owned_slots
from trm.batch import IGNORE_LABEL, LENGTH_MULTIPLE, Batch

if TYPE_CHECKING:
    from trm.backends.mlx.learner import MlxLearner


class MicroBatch(NamedTuple):
    inputs: mx.array  # (B, L)
    labels: mx.array  # (B, M), of all positions or of `places`
    places: mx.array | None = None  # (B, M) positions that the labels belong to; None: all, in their order
    padding: mx.array | None = None  # (B, L), true where a row has no token
    puzzle_rows: mx.array | None = None  # (B,) places in the table of puzzle embeddings that is passed along
    latents: mx.array | None = None  # (K, positions, B, D); None: the model has none
    weights: mx.array | None = None  # (B,)
    noise_seeds: IntArray | None = None


def labelled_places(labels: IntArray) -> IntArray | None:
    """Return the positions (B, M) with labels, which come first in each row; None if M would be nearly all.

    M is rounded up to a multiple of `LENGTH_MULTIPLE`, so that few different shapes occur.
    """
    labelled = labels != IGNORE_LABEL
    most = int(labelled.sum(1).max(initial=1))
    width = 1 if most <= 1 else -(-most // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    if width >= labels.shape[1]:
        return None
    return np.argsort(~labelled, axis=1, kind="stable")[:, :width]


@dataclass
class StepArrays:
    """The batch of one step, and what is added up over its micro-batches. Row i is this rank's i-th slot.

    With `by_length`, a micro-batch is a slice of that order, so that rows of similar length share one and
    little of it is padding.
    """

    learner: MlxLearner
    batch: Batch
    by_length: IntArray | None  # the order in which rows are computed; None for the order of the slots
    first_row: int  # of the latents
    row_ids: IntArray | None  # puzzle embedding rows that take part; None: the model has none
    parts: list[mx.array]  # new latents, in the order of computation

    @classmethod
    def of(cls, learner: MlxLearner, batch: Batch) -> StepArrays:
        ids = batch.puzzle_rows if learner.has_puzzle_rows else None
        first_row = batch.first_row(owned_slots(learner.world))
        return cls(learner, batch, batch.by_length(), first_row, ids, [])

    @property
    def first_slot(self) -> int:
        """The slot of the first row, counted over all ranks."""
        return int(self.batch.slots[0])

    def take(self, part: slice) -> MicroBatch:
        """Return a micro-batch, trimmed to its own longest row."""
        rows = self._rows(part)
        taken = self.batch[rows].trimmed()
        padding = taken.padding
        labels = taken.labels if padding is None else np.where(padding, IGNORE_LABEL, taken.labels)
        places = labelled_places(labels)
        if places is not None:
            labels = np.take_along_axis(labels, places, axis=1)
        table = None
        if self.row_ids is not None:
            table = mx.array(np.searchsorted(self.row_ids, taken.puzzle_identifiers).astype(np.int32))
        return MicroBatch(
            inputs=mx.array(taken.inputs.astype(np.int32)),
            labels=mx.array(labels.astype(np.int32)),
            places=None if places is None else mx.array(places.astype(np.int32)),
            padding=None if padding is None else mx.array(padding),
            puzzle_rows=table,
            latents=self._latents(taken, rows),
            weights=None if taken.weights is None else mx.array(taken.weights.astype(np.float32)),
            noise_seeds=taken.noise_seeds,
        )

    def _latents(self, taken: Batch, rows: slice | IntArray) -> mx.array | None:
        """Return the initial latents of these rows, with noise, or those that they carry."""
        model = self.learner.recursion
        if model is None:
            return None
        length = taken.inputs.shape[1]
        latents = model.start(self.learner.weights, len(taken), length)
        if taken.noise_seeds is not None:
            drawn = [model.noise(int(seed), length) for seed in taken.noise_seeds]
            latents = latents + self.learner.training.noise * mx.concatenate(drawn, axis=2)
        carried = self.learner.latents
        if carried is not None:
            own = carried[:, : latents.shape[1], self._own(rows)]
            latents = mx.where(mx.array(taken.fresh)[:, None], latents, own)
        return latents

    def keep(self, new_latents: mx.array | None) -> None:
        """Keep the new latents of the micro-batch that was computed last."""
        if self.learner.latents is not None and new_latents is not None:
            missing = self.learner.latents.shape[1] - new_latents.shape[1]
            # What remains of an earlier, wider step would not survive a checkpoint.
            self.parts.append(mx.pad(new_latents, [(0, 0), (0, missing), (0, 0), (0, 0)]))

    def new_latents(self) -> mx.array | None:
        """Return the latents of all of this rank's slots after the step."""
        before = self.learner.latents
        if before is None:
            return None
        joined = self.in_slot_order(self.parts, axis=2)
        if joined.shape == before.shape:
            return joined
        after = self.first_row + len(self.batch)
        return mx.concatenate([before[:, :, : self.first_row], joined, before[:, :, after:]], axis=2)

    def in_slot_order(self, parts: list[mx.array], axis: int = 0) -> mx.array:
        """Join what was computed per micro-batch, row i for the i-th slot."""
        joined = mx.concatenate(parts, axis=axis)
        if self.by_length is None:
            return joined
        return mx.take(joined, mx.array(np.argsort(self.by_length).astype(np.int32)), axis=axis)

    def _rows(self, part: slice) -> slice | IntArray:
        """Return the rows of a slice of the order of computation."""
        return part if self.by_length is None else self.by_length[part]

    def _own(self, rows: slice | IntArray) -> slice | mx.array:
        """Return the place of these rows in this rank's latents."""
        if isinstance(rows, slice):
            return slice(self.first_row + rows.start, self.first_row + rows.stop)
        return mx.array((self.first_row + rows).astype(np.int32))
