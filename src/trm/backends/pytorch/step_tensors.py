"""The tensors of one training step, read and written by micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trm.arrays import IntArray
from trm.backends.pytorch.decoder import Decoder
from trm.backends.pytorch.device import to_tensor
from trm.backends.pytorch.model import TinyRecursiveModel
from trm.backends.world import owned_slots
from trm.batch import IGNORE_LABEL, Batch

if TYPE_CHECKING:
    from trm.backends.pytorch.learner import TorchLearner


class MicroBatch(NamedTuple):
    inputs: Tensor
    labels: Tensor
    padding: Tensor | None
    puzzle_rows: Tensor | None
    latents: Tensor | None  # None: the model has none
    weights: Tensor | None
    noise_seeds: IntArray | None = None


@dataclass
class StepTensors:
    """The tensors of one step, read and written slice by slice. Row i belongs to this rank's i-th slot.

    With `by_length`, a slice is one of that order, so that rows of similar length share a micro-batch and
    little of it is padding.
    """

    model: TinyRecursiveModel | Decoder
    batch: Batch
    inputs: Tensor
    labels: Tensor
    fresh: Tensor
    padding: Tensor | None
    learned: list[Tensor]  # what the gradient is taken for
    latents: Tensor | None
    new_latents: Tensor | None
    noise: float
    first_row: int  # of the latents
    by_length: IntArray | None  # the order in which rows are computed; None for the order of the slots
    rows: Tensor | None = None  # puzzle embedding rows that take part in the step
    row_ids: Tensor | None = None
    row_of_slot: Tensor | None = None

    @classmethod
    def of(cls, learner: TorchLearner, batch: Batch, by_length: IntArray | None) -> StepTensors:
        model = learner.model
        device = learner.device
        padding = None if batch.padding is None else to_tensor(batch.padding, device)
        labels = to_tensor(batch.labels, device)
        tensors = cls(
            model=model,
            batch=batch,
            inputs=to_tensor(batch.inputs, device),
            labels=labels if padding is None else labels.masked_fill(padding, IGNORE_LABEL),
            fresh=to_tensor(batch.fresh, device),
            padding=padding,
            learned=list(learner.parameters.values()),
            latents=learner.latents,
            new_latents=learner.spare,
            noise=learner.training.noise,
            first_row=batch.first_row(owned_slots(learner.world)),
            by_length=by_length,
        )
        if isinstance(model, TinyRecursiveModel) and model.config.puzzle_emb_ndim:
            ids = batch.puzzle_rows
            tensors.row_ids = to_tensor(ids, device)
            tensors.row_of_slot = to_tensor(np.searchsorted(ids, batch.puzzle_identifiers), device)
            tensors.rows = model.puzzle_emb.weights[tensors.row_ids].requires_grad_()
            tensors.learned.append(tensors.rows)
        return tensors

    @property
    def first_slot(self) -> int:
        """The slot of the first row, counted over all ranks."""
        return int(self.batch.slots[0])

    def take(self, part: slice) -> MicroBatch:
        """Return a micro-batch, trimmed to its own longest row."""
        rows = self._rows(part)
        taken = self.batch[rows].trimmed()
        length = taken.inputs.shape[1]
        at = self._on_device(rows)
        puzzle_rows = None
        if self.rows is not None and self.row_of_slot is not None:
            puzzle_rows = self.rows[self.row_of_slot[at]]
        padding = None if self.padding is None else self.padding[at, :length]
        weights = None
        if taken.weights is not None:
            rounded = to_tensor(taken.weights, torch.device("cpu")).to(self.learned[0].dtype)
            weights = rounded.to(self.inputs.device)  # which may lack double precision
        return MicroBatch(
            inputs=self.inputs[at, :length],
            labels=self.labels[at, :length],
            padding=padding,
            puzzle_rows=puzzle_rows,
            latents=self._latents(taken, rows),
            weights=weights,
            noise_seeds=taken.noise_seeds,
        )

    def _latents(self, taken: Batch, rows: slice | IntArray) -> Tensor | None:
        """Return the initial latents of these rows, with noise, or those that they carry."""
        if not isinstance(self.model, TinyRecursiveModel):
            return None
        length = taken.inputs.shape[1]
        latents = self.model.start(len(taken), length)
        if taken.noise_seeds is not None:
            generators = (torch.Generator().manual_seed(int(seed)) for seed in taken.noise_seeds)
            drawn = [self.model.noise(generator, length) for generator in generators]
            latents = latents + self.noise * torch.cat(drawn, dim=2)
        if self.latents is not None:
            carried = self.latents[:, : latents.shape[1], self._own(rows)]
            latents = torch.where(self.fresh[self._on_device(rows)][:, None], latents, carried)
        return latents

    def keep(self, part: slice, new_latents: Tensor | None) -> None:
        if self.new_latents is not None and new_latents is not None:
            own = self._own(self._rows(part))
            positions = new_latents.shape[1]
            self.new_latents[:, :positions, own] = new_latents.detach()
            # What remains of an earlier, wider step would not survive a checkpoint.
            self.new_latents[:, positions:, own] = 0

    def set_rows(self, updated: Tensor) -> None:
        """Write the puzzle embedding rows of this batch back into their table."""
        assert isinstance(self.model, TinyRecursiveModel)
        self.model.puzzle_emb.weights[self.row_ids] = updated

    def _rows(self, part: slice) -> slice | IntArray:
        """Return the rows of a slice of the order of computation."""
        return part if self.by_length is None else self.by_length[part]

    def _own(self, rows: slice | IntArray) -> slice | Tensor:
        """Return the place of these rows in this rank's latents."""
        if isinstance(rows, slice):
            return slice(self.first_row + rows.start, self.first_row + rows.stop)
        return to_tensor(self.first_row + rows, self.inputs.device)

    def _on_device(self, rows: slice | IntArray) -> slice | Tensor:
        return rows if isinstance(rows, slice) else to_tensor(rows, self.inputs.device)
