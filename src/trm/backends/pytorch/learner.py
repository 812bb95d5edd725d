"""One training step: the recursion applied to slots.

The sum of the slots' losses is divided once, by the number of slots of all ranks. That is why any split of a
step into micro-batches or ranks gives the same update. New latents and gradients are kept aside until the
update, so an interrupted step has not happened.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from macbook_optimization.errors import AllocationFailed, ConfigError, MemoryBudgetError, NonFiniteError
from macbook_optimization.json_types import JsonObject
from trm.arrays import Float32Array, IntArray
from trm.backends.base import Program, StepResult, StepSettings, World, owned_slots
from trm.backends.pytorch.compile import compile_block
from trm.backends.pytorch.device import prepare, to_array, to_tensor
from trm.backends.pytorch.layers import RECOMPUTE_EVERY
from trm.backends.pytorch.losses import SlotLosses, slot_losses
from trm.backends.pytorch.memory import allocations
from trm.backends.pytorch.model import TinyRecursiveModel, check_shapes
from trm.backends.pytorch.optim import OPTIMIZERS, average_into, sign_descent
from trm.backends.pytorch.predictor import TorchPredictor
from trm.backends.pytorch.workers import ThreadWorkers
from trm.batch import IGNORE_LABEL, Batch, exact_rows
from trm.plan import Execution


class TorchLearner:
    """Weights, their moving average, the optimizer's moments and the latents of this rank's slots."""

    def __init__(self, program: Program, execution: Execution, world: World) -> None:
        self.program = program
        self.training = program.training
        self.execution = execution
        self.world = world
        self.device = torch.device(execution.device)
        self.workers = ThreadWorkers(execution.threads, execution.workers)
        # Weights are drawn on the CPU, so that a seed means the same model on every device.
        model = TinyRecursiveModel(program.model, program.data, program.seed, execution.precision)
        self.model = model.to(self.device)
        self.model.L_level.recompute_every = RECOMPUTE_EVERY[execution.gradient_checkpointing]
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = OPTIMIZERS[self.training.optimizer](self.parameters, self.training)
        rows = getattr(self.model, "puzzle_emb", None)  # not averaged: most rows occur too rarely
        self.averaged = copy.deepcopy(self.model, {id(rows): rows}).requires_grad_(False)
        self.latents: Tensor | None = None
        self.spare: Tensor | None = None  # becomes the latents with the update
        if self.training.supervision == "deep":
            owned = owned_slots(world)
            self.latents = self.model.start(owned.stop - owned.start).contiguous()
            self.spare = self.latents.clone()
        if world.size > 1 and program.model.puzzle_emb_ndim:
            raise ConfigError("Puzzle embeddings cannot be trained by several processes yet.")

    def reconfigure(self, execution: Execution) -> None:
        if (execution.backend, execution.device) != (self.execution.backend, self.execution.device):
            raise ValueError("backend and device of a learner are fixed")
        workers = ThreadWorkers(execution.threads, execution.workers)
        block = self.model.L_level
        if execution.compiled_size is None:
            block.compiled_size = None
        else:  # only the training model: the average runs too rarely to be worth it
            compile_block(self.model, execution.precision, *workers.share(execution.compiled_size))
        prepare(execution)
        block.recompute_every = RECOMPUTE_EVERY[execution.gradient_checkpointing]
        for model in (self.model, self.averaged):
            model.precision = execution.precision
        self.workers = workers
        self.execution = execution

    def step(self, batch: Batch, settings: StepSettings, next_size: Callable[[int], int]) -> StepResult:
        self.model.zero_grad(set_to_none=True)
        losses: list[SlotLosses] = []

        def add(computed: _Computed) -> None:
            losses.append(computed.losses)
            for tensor, gradient in zip(tensors.learned, computed.gradients, strict=True):
                if tensor.grad is None:
                    tensor.grad = gradient
                elif gradient is not None:
                    tensor.grad.add_(gradient)

        by_length = batch.by_length()
        with allocations(torn=False):
            tensors = _StepTensors.of(self, batch, by_length)
            compute = partial(self._gradients, tensors, settings)
            self.workers.map(len(batch), next_size, compute, add)
        total = float(sum(each.total for each in losses))
        in_slot_order = partial(_in_slot_order, by_length)
        correct = in_slot_order([each.correct_tokens for each in losses])
        labelled = in_slot_order([each.labelled_tokens for each in losses])
        exact = exact_rows(correct, labelled)
        counts = np.array([total, float(correct.sum()), float(labelled.sum()), float(exact.sum())])
        self._sum_over_ranks(counts)
        loss = float(counts[0]) / self.program.num_slots
        with allocations(torn=True):
            grad_norm = self._update(loss, tensors, settings)
        self.latents, self.spare = self.spare, self.latents
        halt_margins = in_slot_order([each.halt_margins for each in losses])
        return StepResult(
            loss=loss,
            grad_norm=grad_norm,
            token_accuracy=float(counts[1]) / max(1.0, float(counts[2])),
            exact=to_array(exact),
            num_exact=round(counts[3]),
            halt_margins=to_array(halt_margins.float()),
        )

    def first_row(self, batch: Batch) -> int:
        """Return which of this rank's slots the first row belongs to; the others must follow in order."""
        owned = owned_slots(self.world)
        first = int(batch.slots[0])
        in_order = np.array_equal(batch.slots, first + np.arange(len(batch)))
        if not (in_order and owned.start <= first and first + len(batch) <= owned.stop):
            raise ValueError(f"a batch of slots {batch.slots} is not a range of {owned.start}:{owned.stop}")
        return first - int(owned.start)

    def _gradients(self, tensors: _StepTensors, settings: StepSettings, rows: slice) -> _Computed:
        """Compute a micro-batch: its losses, and its gradients divided by the slots of all ranks."""
        taken = tensors.take(rows)
        new_latents = self.model(
            taken.inputs, taken.puzzle_rows, taken.latents, settings.cycles, taken.padding
        )
        losses = slot_losses(
            self.model,
            new_latents[0],
            taken.labels,
            self.training,
            taken.weights,
            settings.label_smoothing,
        )
        mean = losses.total / self.program.num_slots
        gradients = torch.autograd.grad(mean, tensors.learned, allow_unused=True)
        tensors.keep(rows, new_latents)
        return _Computed(list(gradients), losses._replace(total=losses.total.detach()))

    def _sum_over_ranks(self, counts: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """Sum gradients and counts in one message, so that every rank makes the same update."""
        if self.world.size == 1:
            return
        gradients = [each.grad for each in self.parameters.values() if each.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        message = np.concatenate([to_array(flat), counts.astype(to_array(flat).dtype)])
        self.world.sum(message)
        counts[:] = message[-len(counts) :]
        summed = to_tensor(message[: -len(counts)], self.device)
        parts = torch.split(summed, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def _update(self, loss: float, tensors: _StepTensors, settings: StepSettings) -> float:
        limit = self.training.max_grad_norm
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit or float("inf")))
        rows_gradient = tensors.rows.grad if tensors.rows is not None else None
        row_norm = 0.0 if rows_gradient is None else float(rows_gradient.norm())
        if not np.isfinite(loss + grad_norm + row_norm):  # before the update: the weights are still good
            raise NonFiniteError(
                f"The loss is {loss:.4g} and the gradient norm {grad_norm + row_norm:.4g} at step "
                f"{settings.step}.",
                hint="Start a new run (--run or --fresh) with a lower training.learning_rate.",
            )
        self.optimizer.update(settings.step, settings.learning_rate)
        if tensors.rows is not None and rows_gradient is not None:
            decay = self.training.puzzle_emb_weight_decay
            updated = sign_descent(tensors.rows, rows_gradient, settings.puzzle_emb_lr, decay)
            self.model.puzzle_emb.weights[tensors.row_ids] = updated
        if self.training.ema:
            averages = dict(self.averaged.named_parameters())
            average_into(averages, self.parameters, self.training.ema_rate)
        return grad_norm

    def predictor(self) -> TorchPredictor:
        model = self.averaged if self.training.ema else self.model
        return TorchPredictor(model, self.training, self.workers)

    @torch.no_grad()
    def set_embeddings(self, tokens: IntArray, vectors: Float32Array) -> None:
        rows = to_tensor(tokens, self.device)
        for model in (self.model, self.averaged):
            table = model.embed_tokens.embedding_weight
            table[rows] = to_tensor(vectors, self.device).to(table.dtype)

    def state(self) -> dict[str, dict[str, Tensor]]:
        groups = {"weights": self.model.state_dict(), "optimizer": self.optimizer.moments}
        if self.training.ema:
            groups["ema"] = self.averaged.state_dict()
        if self.latents is not None:
            groups["latents"] = {"latents": self.latents}
        return groups

    def load_state(self, groups: dict[str, JsonObject]) -> None:
        for name, ours in self.state().items():
            check_shapes(ours, groups.get(name, {}), f"The {name} of the checkpoint do")
        for name, ours in self.state().items():
            theirs = groups.pop(name)
            for key, tensor in ours.items():
                tensor.copy_(theirs[key])


class _Computed(NamedTuple):
    gradients: list[Tensor | None]
    losses: SlotLosses


class _MicroBatch(NamedTuple):
    inputs: Tensor
    labels: Tensor
    padding: Tensor | None
    puzzle_rows: Tensor | None
    latents: Tensor
    weights: Tensor | None


@dataclass
class _StepTensors:
    """The tensors of one step, read and written slice by slice. Row i belongs to this rank's i-th slot.

    With `by_length`, a slice is one of that order, so that rows of similar length share a micro-batch and
    little of it is padding.
    """

    model: TinyRecursiveModel
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
    rows: Tensor | None = None  # puzzle embedding rows that occur in this batch
    row_ids: Tensor | None = None
    row_of_slot: Tensor | None = None

    @classmethod
    def of(cls, learner: TorchLearner, batch: Batch, by_length: IntArray | None) -> _StepTensors:
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
            learned=list(model.parameters()),
            latents=learner.latents,
            new_latents=learner.spare,
            noise=learner.training.noise,
            first_row=learner.first_row(batch),
            by_length=by_length,
        )
        if model.config.puzzle_emb_ndim:
            identifiers = to_tensor(batch.puzzle_identifiers, device)
            tensors.row_ids, tensors.row_of_slot = torch.unique(identifiers, return_inverse=True)
            tensors.rows = model.puzzle_emb.weights[tensors.row_ids].requires_grad_()
            tensors.learned.append(tensors.rows)
        return tensors

    def take(self, part: slice) -> _MicroBatch:
        """Return a micro-batch, trimmed to its own longest row."""
        rows = self._rows(part)
        taken = self.batch[rows].trimmed()
        length = taken.inputs.shape[1]
        latents = self.model.start(len(taken), length)
        if taken.noise_seeds is not None:
            generators = (torch.Generator().manual_seed(int(seed)) for seed in taken.noise_seeds)
            drawn = [self.model.noise(generator, length) for generator in generators]
            latents = latents + self.noise * torch.cat(drawn, dim=2)
        if self.latents is not None:
            carried = self.latents[:, : latents.shape[1], self._own(rows)]
            latents = torch.where(self.fresh[rows][:, None], latents, carried)
        puzzle_rows = None
        if self.rows is not None and self.row_of_slot is not None:
            puzzle_rows = self.rows[self.row_of_slot[rows]]
        padding = None if self.padding is None else self.padding[rows, :length]
        weights = None
        if taken.weights is not None:
            weights = to_tensor(taken.weights, self.inputs.device).to(self.model.initial_latents.dtype)
        return _MicroBatch(
            inputs=self.inputs[rows, :length],
            labels=self.labels[rows, :length],
            padding=padding,
            puzzle_rows=puzzle_rows,
            latents=latents,
            weights=weights,
        )

    def keep(self, part: slice, new_latents: Tensor) -> None:
        if self.new_latents is not None:
            own = self._own(self._rows(part))
            positions = new_latents.shape[1]
            self.new_latents[:, :positions, own] = new_latents.detach()
            # What remains of an earlier, wider step would not survive a checkpoint.
            self.new_latents[:, positions:, own] = 0

    def _rows(self, part: slice) -> slice | IntArray:
        """Return the rows of a slice of the order of computation."""
        return part if self.by_length is None else self.by_length[part]

    def _own(self, rows: slice | IntArray) -> slice | IntArray:
        """Return the place of these rows in this rank's latents."""
        if isinstance(rows, slice):
            return slice(self.first_row + rows.start, self.first_row + rows.stop)
        return self.first_row + rows


def _in_slot_order(by_length: IntArray | None, parts: list[Tensor]) -> Tensor:
    """Join what was computed per micro-batch, row i for the i-th slot."""
    joined = torch.cat(parts)
    if by_length is None:
        return joined
    return joined[to_tensor(np.argsort(by_length), joined.device)]


def learner(program: Program, execution: Execution, world: World) -> TorchLearner:
    try:
        with allocations(torn=False):
            return TorchLearner(program, execution, world)
    except AllocationFailed as error:
        raise MemoryBudgetError(
            "The model and its slots do not fit into memory.",
            hint="Lower model.hidden_size or training.effective_batch_size.",
        ) from error
