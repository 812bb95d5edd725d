"""The message that ranks exchange in a step: one flat float32 array, summed once.

Its parts are those of the PyTorch backend: gradients of the weights, the loss, the number of ranks that
abandon the step, three numbers per slot (right tokens, labelled tokens, halting margin) and the gradients of
puzzle embedding rows. Each rank adds to its own slots and leaves zeros elsewhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import NamedTuple, Self

import mlx.core as mx
import numpy as np

from trm.arrays import Float32Array
from trm.backends.base import Program
from trm.backends.mlx.device import to_array
from trm.backends.mlx.layers import Weights
from trm.backends.mlx.model import PUZZLE_ROWS
from trm.backends.world import StepAbandoned, World
from trm.config import ModelConfig, TrainingConfig
from trm.config.kinds import check_exchange

_PER_SLOT = 3


class StepTotals(NamedTuple):
    """The sum of the slots' losses, and numbers per slot."""

    loss: float
    correct: Float32Array
    labelled: Float32Array
    halt_margins: Float32Array


class StepMessage:
    """The message of one learner. `shapes` are those of its parameters, in their order."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], training: TrainingConfig, row_size: int
    ) -> None:
        check_exchange(training, "mlx")
        self.shapes = shapes
        self.num_slots = training.effective_batch_size
        self.row_size = row_size
        self.num_weights = sum(math.prod(shape) for shape in shapes.values())
        self.waited_seconds = 0.0

    @classmethod
    def of(cls, program: Program, parameters: Weights) -> Self:
        shapes = {name: each.shape for name, each in parameters.items()}
        model = program.model
        row_size = model.puzzle_emb_ndim if isinstance(model, ModelConfig) else 0
        return cls(shapes, program.training, row_size)

    def new(self, num_rows: int) -> Float32Array:
        """Return a message of zeros for a step in which this many puzzle embedding rows take part."""
        size = self.num_weights + 2 + _PER_SLOT * self.num_slots + num_rows * self.row_size
        return np.zeros(size, dtype=np.float32)

    def abandon(self, world: World, num_rows: int) -> None:
        """Inform all ranks that this one cannot complete the step."""
        flat = self.new(num_rows)
        flat[self.num_weights + 1] = 1
        self.sum(world, flat)

    def exchange(
        self, world: World, first_slot: int, own: StepTotals, gradients: Weights
    ) -> tuple[StepTotals, Weights]:
        """Add what this rank computed of its slots; return totals and gradients of all of them."""
        rows = gradients.get(PUZZLE_ROWS)
        flat = self.new(0 if rows is None else len(rows))
        shapes = dict(self.shapes) if rows is None else {**self.shapes, PUZZLE_ROWS: rows.shape}
        parts = self._parts(flat, shapes)
        for name, part in parts.items():
            part[:] = to_array(gradients[name]).reshape(-1)
        totals = flat[self.num_weights : self.num_weights + 2]
        slots = flat[self.num_weights + 2 :][: _PER_SLOT * self.num_slots].reshape(_PER_SLOT, -1)
        totals[0] = own.loss
        slots[:, first_slot : first_slot + len(own.correct)] = np.stack(own[1:])
        self.sum(world, flat)
        if totals[1] > 0:
            raise StepAbandoned
        summed = {name: mx.array(part.reshape(shapes[name])) for name, part in parts.items()}
        return StepTotals(float(totals[0]), *slots), summed

    def _parts(self, flat: Float32Array, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Float32Array]:
        """Return the parts of the message that hold gradients; those of puzzle embedding rows are its end."""
        found = {}
        start = 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            start = len(flat) - size if name == PUZZLE_ROWS else start
            found[name] = flat[start : start + size]
            start += size
        return found

    def time_one(self, world: World) -> float:
        """Return the seconds that an exchange takes, with a message of zeros."""
        self.sum(world, self.new(0))
        return self.waited_seconds

    def sum(self, world: World, flat: Float32Array) -> None:
        started = time.monotonic()
        world.sum(flat)
        self.waited_seconds = time.monotonic() - started
