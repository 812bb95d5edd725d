"""One training step: the recursion applied to slots.

The sum of the slots' losses is divided once, by the number of slots of all ranks. That is why any split of a
step into micro-batches or ranks gives the same update. New latents and gradients are kept aside until the
update, so an interrupted step has not happened.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from macbook_optimization.errors import AllocationFailed, MemoryBudgetError, NonFiniteError
from macbook_optimization.json_types import JsonObject
from trm.arrays import Float32Array, IntArray
from trm.backends.base import EXCHANGE, Program, StepResult, StepSettings
from trm.backends.pytorch.compile import compile_block
from trm.backends.pytorch.device import prepare, to_array, to_tensor
from trm.backends.pytorch.layers import RECOMPUTE_EVERY
from trm.backends.pytorch.losses import SlotLosses, slot_losses
from trm.backends.pytorch.memory import allocations
from trm.backends.pytorch.message import StepMessage, StepTotals
from trm.backends.pytorch.model import TinyRecursiveModel, check_shapes
from trm.backends.pytorch.optim import OPTIMIZERS, average_into, clip_gradients, sign_descent
from trm.backends.pytorch.predictor import TorchPredictor
from trm.backends.pytorch.step_tensors import StepTensors, puzzle_rows
from trm.backends.pytorch.workers import ThreadWorkers
from trm.backends.sharing import at_writer
from trm.backends.world import World, owned_slots
from trm.batch import Batch, exact_rows
from trm.plan import Execution

_SLOT_DIMENSION = 2  # of latents


class TorchLearner:
    """Weights, their moving average, the optimizer's moments and the latents of this rank's slots."""

    def __init__(self, program: Program, execution: Execution, world: World) -> None:
        self.program = program
        self.training = program.training
        self.execution = execution
        self.world = world
        self.device = torch.device(execution.device)
        self.phase: Callable[[str], AbstractContextManager[object]] = not_recorded  # marks it in a profile
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
        self.message: StepMessage | None = None  # exchanged with other ranks, if there are any
        if world.size > 1:
            self.message = StepMessage(
                list(self.parameters.values()),
                program.num_slots,
                program.model.puzzle_emb_ndim,
                in_bfloat16=self.training.gradient_message == "bfloat16",
            )

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
        times = _Times()
        message = self.message
        if message is not None:
            message.begin(len(puzzle_rows(batch)) if self.program.model.puzzle_emb_ndim else 0)
        try:
            with allocations(torn=False):
                tensors = StepTensors.of(self, batch, batch.by_length())
                totals = self._compute(tensors, settings, next_size, times)
        except BaseException:
            if message is not None:
                message.abandon(self.world)
            raise
        times.computed = time.monotonic()
        if message is not None:
            totals = self._sum_over_ranks(message, tensors, totals)
            times.waited = message.waited_seconds
        exact = exact_rows(totals.correct, totals.labelled)
        loss = totals.loss / self.program.num_slots
        with allocations(torn=True), self.phase("optimizer"):
            grad_norm = self._update(loss, tensors, settings)
        self.latents, self.spare = self.spare, self.latents
        return StepResult(
            loss=loss,
            grad_norm=grad_norm,
            token_accuracy=float(totals.correct.sum()) / max(1.0, float(totals.labelled.sum())),
            exact=to_array(exact),
            num_exact=int(exact.sum()),
            halt_margins=to_array(totals.halt_margins.float()),
            seconds=times.shares(),
        )

    def _compute(
        self, tensors: StepTensors, settings: StepSettings, next_size: Callable[[int], int], times: _Times
    ) -> StepTotals:
        """Compute every micro-batch, and add up gradients: in the message, or in the tensors themselves."""
        losses: list[SlotLosses] = []

        def add(computed: _Computed) -> None:
            losses.append(computed.losses)
            times.add(computed)
            if self.message is not None:
                self.message.add(computed.gradients)
                return
            for tensor, gradient in zip(tensors.learned, computed.gradients, strict=True):
                if tensor.grad is None:
                    tensor.grad = gradient
                elif gradient is not None:
                    tensor.grad.add_(gradient)

        compute = partial(self._gradients, tensors, settings)
        self.workers.map(len(tensors.batch), next_size, compute, add)
        in_slot_order = partial(_in_slot_order, tensors.by_length)
        return StepTotals(
            loss=float(sum(each.total for each in losses)),
            correct=in_slot_order([each.correct_tokens for each in losses]),
            labelled=in_slot_order([each.labelled_tokens for each in losses]),
            halt_margins=in_slot_order([each.halt_margins for each in losses]),
        )

    def first_row(self, batch: Batch) -> int:
        """Return which of this rank's slots the first row belongs to; the others must follow in order."""
        owned = owned_slots(self.world)
        first = int(batch.slots[0])
        in_order = np.array_equal(batch.slots, first + np.arange(len(batch)))
        if not (in_order and owned.start <= first and first + len(batch) <= owned.stop):
            raise ValueError(f"a batch of slots {batch.slots} is not a range of {owned.start}:{owned.stop}")
        return first - int(owned.start)

    def _gradients(self, tensors: StepTensors, settings: StepSettings, rows: slice) -> _Computed:
        """Compute a micro-batch: its losses, and its gradients divided by the slots of all ranks."""
        started = time.monotonic()
        with self.phase("forward"):
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
        forward = time.monotonic()
        with self.phase("backward"):
            gradients = torch.autograd.grad(mean, tensors.learned, allow_unused=True)
        tensors.keep(rows, new_latents)
        losses = losses._replace(total=losses.total.detach())
        return _Computed(list(gradients), losses, forward - started, time.monotonic() - forward)

    def _sum_over_ranks(self, message: StepMessage, tensors: StepTensors, own: StepTotals) -> StepTotals:
        """Exchange one message, so that every rank has the gradients and results of all slots."""
        first = owned_slots(self.world).start + tensors.first_row
        totals = message.exchange(self.world, first, own)
        for place, parameter in enumerate(self.parameters.values()):
            parameter.grad = message.gradient(place, parameter)
        if tensors.rows is not None:
            tensors.rows.grad = message.rows.to(tensors.rows)
        return totals

    def _update(self, loss: float, tensors: StepTensors, settings: StepSettings) -> float:
        limit = self.training.max_grad_norm
        if self.message is None:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit or float("inf"))
            grad_norm = float(norm)
        else:
            grad_norm = clip_gradients(self.parameters.values(), limit)
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
        groups = self._shared_state()
        if self.latents is not None:
            whole = self.world.gather(self.latents, _SLOT_DIMENSION)
            groups["latents"] = {"latents": self.latents if whole is None else whole}
        return groups

    def _shared_state(self) -> dict[str, dict[str, Tensor]]:
        """Return what is the same on every rank."""
        groups = {"weights": self.model.state_dict(), "optimizer": self.optimizer.moments}
        if self.training.ema:
            groups["ema"] = self.averaged.state_dict()
        return groups

    def load_state(self, groups: dict[str, JsonObject]) -> None:
        at_writer(self.world, partial(self._check_state, groups))
        for name, ours in self._shared_state().items():
            theirs = groups.pop(name, {})
            for key, tensor in ours.items():
                if self.world.writes:
                    tensor.copy_(theirs[key])
                self.world.copy_from_writer(tensor)
        if self.latents is not None:
            whole = groups.pop("latents", {}).get("latents")
            self.world.scatter(whole, self.latents, _SLOT_DIMENSION)

    def _check_state(self, groups: dict[str, JsonObject]) -> None:
        expected = self._shared_state()
        if self.latents is not None:
            shape = list(self.latents.shape)
            shape[_SLOT_DIMENSION] = self.program.num_slots
            expected["latents"] = {"latents": torch.empty(shape, device="meta")}
        for name, ours in expected.items():
            check_shapes(ours, groups.get(name, {}), f"The {name} of the checkpoint do")

    def digest(self) -> str:
        digest = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            digest.update(to_array(tensor.detach().contiguous().view(-1).view(torch.uint8)).data)
        return digest.hexdigest()

    def copy_from_writer(self) -> None:
        for group in self._shared_state().values():
            for tensor in group.values():
                self.world.copy_from_writer(tensor)

    def message_seconds(self) -> float:
        if self.message is None:
            return 0.0
        self.message.begin(0)
        self.message.sum(self.world)
        return self.message.waited_seconds


def not_recorded(phase: str) -> AbstractContextManager[object]:
    """Mark nothing, as long as no profile is recorded."""
    return nullcontext()


class _Computed(NamedTuple):
    gradients: list[Tensor | None]
    losses: SlotLosses
    forward_seconds: float
    backward_seconds: float


class _Times:
    """Where the time of one step goes. Workers overlap, so their seconds are scaled to those that passed."""

    def __init__(self) -> None:
        self.started = self.computed = time.monotonic()
        self.forward = self.backward = 0.0
        self.waited = 0.0  # for other ranks and their message

    def add(self, computed: _Computed) -> None:
        self.forward += computed.forward_seconds
        self.backward += computed.backward_seconds

    def shares(self) -> dict[str, float]:
        passed = self.computed - self.started
        forward = passed * self.forward / max(self.forward + self.backward, 1e-9)
        optimizer = time.monotonic() - self.computed - self.waited
        shares = {"forward": forward, "backward": passed - forward, "optimizer": optimizer}
        return {**shares, EXCHANGE: self.waited} if self.waited else shares


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
