"""The message that ranks exchange in a step: one flat tensor, summed once.

Its parts are the gradients of the weights, the loss, the number of ranks that abandon the step, three numbers
per slot (right tokens, labelled tokens, halting margin) and the gradients of puzzle embedding rows. Each rank
adds to its own slots and leaves zeros elsewhere, so that the sum of these parts is exact. The gradients that
the optimizer reads are views of the message.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from trm.backends.base import Program
from trm.backends.pytorch.sparse_gradients import SparseGradients
from trm.backends.world import StepAbandoned, World
from trm.config import ModelConfig, TrainingConfig

_PER_SLOT = 3


class StepTotals(NamedTuple):
    """The sum of the slots' losses, and numbers per slot."""

    loss: float
    correct: Tensor
    labelled: Tensor
    halt_margins: Tensor


class StepMessage:
    """The message of one learner, used again in every step.

    `row_size` is that of a puzzle embedding row, of which a step has at most one per slot. The recipe may say
    that gradients cross the wire rounded to bfloat16, or only in part; all else is exact.
    """

    def __init__(
        self, parameters: Sequence[Tensor], num_slots: int, row_size: int, training: TrainingConfig
    ) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        double = any(parameter.dtype == torch.float64 for parameter in parameters)
        dtype = torch.float64 if double else torch.float32
        self.num_weights = sum(sizes)
        self.num_slots = num_slots
        self.row_size = row_size
        self.in_bfloat16 = training.gradient_message == "bfloat16"
        self.before_rows = self.num_weights + 2 + _PER_SLOT * num_slots
        length = self.before_rows + num_slots * row_size
        self.whole = torch.zeros(length, dtype=dtype, device="cpu")  # where gloo sums it
        self.sparse: SparseGradients | None = None
        if training.gradient_message == "topk":
            self.sparse = SparseGradients(self.whole[: self.num_weights], training.gradient_share)
        parts = torch.split(self.whole[: self.num_weights], sizes)
        self.weights = [part.view_as(each) for part, each in zip(parts, parameters, strict=True)]
        self.totals = self.whole[self.num_weights : self.num_weights + 2]  # loss, ranks that abandon the step
        self.slots = self.whole[self.num_weights + 2 : self.before_rows].view(_PER_SLOT, num_slots)
        self.begin(0)

    @classmethod
    def of(cls, program: Program, parameters: Sequence[Tensor]) -> Self:
        model = program.model
        row_size = model.puzzle_emb_ndim if isinstance(model, ModelConfig) else 0
        return cls(parameters, program.num_slots, row_size, program.training)

    def begin(self, num_rows: int) -> None:
        """Start a step in which this many puzzle embedding rows take part."""
        self.flat = self.whole[: self.before_rows + num_rows * self.row_size]
        self.flat.zero_()
        self.rows = self.flat[self.before_rows :].view(num_rows, self.row_size)
        self.has_gradient = [False] * len(self.weights)
        self.waited_seconds = 0.0

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of the weights and, if there are any, those of the rows."""
        for place, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if place == len(self.weights):
                self.rows.add_(gradient.to(self.whole))
            else:
                self.add_weight(place, gradient)

    def add_weight(self, place: int, gradient: Tensor) -> None:
        """Add the gradient of one weight, which may have a smaller type than the message."""
        self.weights[place].add_(gradient.to(self.whole.device))
        self.has_gradient[place] = True

    def set_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Let the optimizer read the message. A weight that no loss depends on has no gradient."""
        for parameter, gradient, known in zip(parameters, self.weights, self.has_gradient, strict=True):
            parameter.grad = gradient.to(parameter) if known else None

    def abandon(self, world: World) -> None:
        """Inform all ranks that this one cannot complete the step."""
        self.flat.zero_()
        self.totals[1] = 1
        self.sum(world)

    def exchange(self, world: World, first_slot: int, own: StepTotals) -> StepTotals:
        """Add what this rank computed of its slots, and return the results of all of them."""
        self.totals[0] = own.loss
        columns = self.slots[:, first_slot : first_slot + len(own.correct)]
        for row, values in zip(columns, own[1:], strict=True):
            row.copy_(values)
        self.sum(world)
        if self.totals[1] > 0:
            raise StepAbandoned
        return StepTotals(float(self.totals[0]), *self.slots.clone())

    def keep_remainder(self) -> None:
        """Note that the update has happened, if gradients are sent in part."""
        if self.sparse is not None:
            self.sparse.keep_remainder()

    def forget_remainder(self) -> None:
        if self.sparse is not None:
            self.sparse.forget()

    def time_one(self, world: World) -> float:
        """Return the seconds that an exchange takes, with a message of zeros."""
        self.begin(0)
        self.sum(world)
        return self.waited_seconds

    def sum(self, world: World) -> None:
        started = time.monotonic()
        if self.sparse is not None:
            self.sparse.sum(world)
            world.sum(self.flat[self.num_weights :])
        elif self.in_bfloat16:
            rounded = self.whole[: self.num_weights].to(torch.bfloat16)
            world.sum(rounded)
            self.whole[: self.num_weights] = rounded
            world.sum(self.flat[self.num_weights :])
        else:
            world.sum(self.flat)
        self.waited_seconds = time.monotonic() - started
