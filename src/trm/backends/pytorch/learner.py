"""One training step: the recursion applied to slots.

The sum of the slots' losses is divided once, by the number of slots of all ranks. That is why any split of a
step into micro-batches or ranks gives the same update. New latents and gradients are kept aside until the
update, so an interrupted step has not happened.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from macbook_optimization.json_types import JsonObject
from trm.arrays import Float32Array, IntArray
from trm.backends.base import Program, StepResult, StepSettings
from trm.backends.failures import allocations, creating_a_learner, require_finite
from trm.backends.pytorch.decoder import Decoder
from trm.backends.pytorch.device import one_thread, prepare, synchronize, to_array, to_tensor
from trm.backends.pytorch.gradients import GradientStream, gradient_stream
from trm.backends.pytorch.language_model import TorchLanguageModel
from trm.backends.pytorch.learner_state import Groups, copy_from_writer, digest, load_state, whole_state
from trm.backends.pytorch.losses import SlotLosses
from trm.backends.pytorch.message import StepMessage, StepTotals
from trm.backends.pytorch.model import TinyRecursiveModel
from trm.backends.pytorch.models import new_model
from trm.backends.pytorch.optim import OPTIMIZERS, average_into, clip_gradients, sign_descent
from trm.backends.pytorch.predictor import TorchPredictor
from trm.backends.pytorch.step_tensors import StepTensors
from trm.backends.pytorch.workers import ThreadWorkers
from trm.backends.sizes import RECOMPUTE_EVERY
from trm.backends.step_times import StepTimes
from trm.backends.world import World, owned_slots
from trm.batch import Batch
from trm.plan import Execution


class TorchLearner:
    """Weights, their moving average, the optimizer's moments and the latents of this rank's slots."""

    def __init__(self, program: Program, execution: Execution, world: World) -> None:
        self.program = program
        self.training = program.training
        self.execution = execution
        self.world = world
        self.device = torch.device(execution.device)
        self.phase: Callable[[str], AbstractContextManager[object]] = not_recorded  # marks it in a profile
        # Weights are drawn on the CPU, so that a seed means the same model on every device.
        self.model = new_model(program, program.seed, execution.precision).to(self.device)
        self.model.recompute_every = RECOMPUTE_EVERY[execution.gradient_checkpointing]
        self.parameters = dict(self.model.named_parameters())
        optimizer = OPTIMIZERS[self.training.optimizer]
        self.optimizer = optimizer(self.parameters, self.training, self.model.undecayed)
        # Exchanged with other ranks, if there are any.
        self.message = StepMessage.of(program, list(self.parameters.values())) if world.size > 1 else None
        self.stream = gradient_stream(self.optimizer, execution, self.message)
        self.workers = _workers_of(execution, self.stream)
        rows = getattr(self.model, "puzzle_emb", None)  # not averaged: most rows occur too rarely
        self.averaged = self.model
        if self.training.ema:
            self.averaged = copy.deepcopy(self.model, {id(rows): rows}).requires_grad_(False)
        self.latents: Tensor | None = None
        self.spare: Tensor | None = None  # becomes the latents with the update
        if self.training.supervision == "deep" and isinstance(self.model, TinyRecursiveModel):
            owned = owned_slots(world)
            self.latents = self.model.start(owned.stop - owned.start).contiguous()
            self.spare = self.latents.clone()

    def reconfigure(self, execution: Execution) -> None:
        if (execution.backend, execution.device) != (self.execution.backend, self.execution.device):
            raise ValueError("backend and device of a learner are fixed")
        workers = _workers_of(execution, self.stream)
        if execution.compiled_size is None:
            self.model.discard_compiled()
        else:  # only the training model: the average runs too rarely to be worth it
            self.model.compile_for(execution.precision, *workers.share(execution.compiled_size))
        prepare(execution)
        self.model.recompute_every = RECOMPUTE_EVERY[execution.gradient_checkpointing]
        for model in (self.model, self.averaged):
            model.precision = execution.precision
        self.workers = workers
        self.execution = execution

    def step(self, batch: Batch, settings: StepSettings, next_size: Callable[[int], int]) -> StepResult:
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.stream is not None:
            self.stream.begin(settings.step, settings.learning_rate)
        if self.execution.optimizer_in_backward:
            next_size(0)  # which may stop the step; there is one micro-batch, whatever its size
            next_size = partial(max, len(batch))
        times = StepTimes()
        message = self.message
        if message is not None:
            message.begin(len(batch.puzzle_rows) if message.row_size else 0)
        try:
            with allocations(torn=self.execution.optimizer_in_backward):
                tensors = StepTensors.of(self, batch, batch.by_length())
                totals = self._compute(tensors, settings, next_size, times)
        except BaseException:
            if message is not None:
                message.abandon(self.world)
            raise
        times.computed = time.monotonic()
        if message is not None:
            totals = message.exchange(self.world, tensors.first_slot, totals)
            if self.stream is None:  # which otherwise reads the message itself
                message.set_gradients(self.parameters.values())
            if tensors.rows is not None:
                tensors.rows.grad = message.rows.to(tensors.rows)
            times.waited = message.waited_seconds
        loss = totals.loss / self.program.num_slots
        # Ranks have the same gradients and each its own number of threads; their weights must stay the same.
        alike = nullcontext() if message is None else one_thread()
        with allocations(torn=True), self.phase("optimizer"), alike:
            grad_norm = self._update(loss, tensors, settings)
        self.latents, self.spare = self.spare, self.latents
        if message is not None:
            message.keep_remainder()
        numbers = (totals.correct, totals.labelled, totals.halt_margins.float())
        return StepResult.of(loss, grad_norm, [to_array(each) for each in numbers], times.shares())

    def _compute(
        self, tensors: StepTensors, settings: StepSettings, next_size: Callable[[int], int], times: StepTimes
    ) -> StepTotals:
        """Compute every micro-batch, and add up gradients: in the message, or in the tensors themselves."""
        losses: list[SlotLosses] = []

        def add(computed: _Computed) -> None:
            losses.append(computed.losses)
            times.add(computed.forward_seconds, computed.backward_seconds)
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

    def _gradients(self, tensors: StepTensors, settings: StepSettings, rows: slice) -> _Computed:
        """Compute a micro-batch: its losses, and its gradients divided by the slots of all ranks."""
        started = time.monotonic()
        with self.phase("forward"):
            taken = tensors.take(rows)
            losses, new_latents = self.model.losses(taken, settings, self.training)
            mean = losses.total / self.program.num_slots
            synchronize(self.device)
        forward = time.monotonic()
        with self.phase("backward"):
            gradients: Sequence[Tensor | None] = [None] * len(tensors.learned)
            if self.stream is None:
                gradients = torch.autograd.grad(mean, tensors.learned, allow_unused=True)
            else:
                mean.backward()  # type: ignore[no-untyped-call]
            synchronize(self.device)
        tensors.keep(rows, new_latents)
        losses = losses._replace(total=losses.total.detach())
        return _Computed(list(gradients), losses, forward - started, time.monotonic() - forward)

    def _update(self, loss: float, tensors: StepTensors, settings: StepSettings) -> float:
        limit = self.training.max_grad_norm
        if self.stream is not None:
            grad_norm = self.stream.norm(limit)
        elif self.message is not None:
            grad_norm = clip_gradients(self.parameters.values(), limit)
        else:
            parameters = self.parameters.values()
            grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit or float("inf")))
        rows_gradient = tensors.rows.grad if tensors.rows is not None else None
        row_norm = 0.0 if rows_gradient is None else float(rows_gradient.norm())
        torn = self.stream is not None and self.stream.has_updated
        require_finite(loss, grad_norm + row_norm, settings.step, torn=torn)
        if self.stream is not None:
            self.stream.update()
        else:
            self.optimizer.update(settings.step, settings.learning_rate)
        if tensors.rows is not None and rows_gradient is not None:
            decay = self.training.puzzle_emb_weight_decay
            updated = sign_descent(tensors.rows, rows_gradient, settings.puzzle_emb_lr, decay)
            tensors.set_rows(updated)
        if self.training.ema:
            average_into(dict(self.averaged.named_parameters()), self.parameters, self.training.ema_rate)
        synchronize(self.device)
        return grad_norm

    def predictor(self) -> TorchPredictor:
        assert isinstance(self.averaged, TinyRecursiveModel)
        return TorchPredictor(self.averaged, self.training, self.workers)

    def language_model(self) -> TorchLanguageModel:
        assert isinstance(self.averaged, Decoder)
        return TorchLanguageModel(self.averaged, self.training, self.workers)

    @torch.no_grad()
    def set_embeddings(self, tokens: IntArray, vectors: Float32Array) -> None:
        rows = to_tensor(tokens, self.device)
        for model in (self.model, self.averaged):
            assert isinstance(model, TinyRecursiveModel)  # whose recipes may set them
            table = model.embed_tokens.embedding_weight
            table[rows] = to_tensor(vectors, self.device).to(table.dtype)

    def state(self) -> Groups:
        return whole_state(self._shared_state(), self.latents, self.world)

    def _shared_state(self) -> Groups:
        """Return what is the same on every rank."""
        groups = {"weights": self.model.state_dict(), "optimizer": self.optimizer.moments}
        if self.training.ema:
            groups["ema"] = self.averaged.state_dict()
        return groups

    def load_state(self, groups: dict[str, JsonObject]) -> None:
        load_state(self._shared_state(), self.latents, groups, self.world)
        if self.message is not None:
            self.message.forget_remainder()

    def digest(self) -> str:
        return digest(self.model.state_dict())

    def copy_from_writer(self) -> None:
        copy_from_writer(self._shared_state(), self.world)

    def message_seconds(self) -> float:
        return 0.0 if self.message is None else self.message.time_one(self.world)


def _workers_of(execution: Execution, stream: GradientStream | None) -> ThreadWorkers:
    """Return the workers. Gradients that leave their parameter need one, as it is the same for all, and so
    does a device that computes one operation after the other."""
    may_share = stream is None and torch.device(execution.device).type == "cpu"
    return ThreadWorkers(execution.threads, execution.workers if may_share else 1)


def not_recorded(phase: str) -> AbstractContextManager[object]:
    """Mark nothing, as long as no profile is recorded."""
    return nullcontext()


class _Computed(NamedTuple):
    gradients: list[Tensor | None]
    losses: SlotLosses
    forward_seconds: float
    backward_seconds: float


def _in_slot_order(by_length: IntArray | None, parts: list[Tensor]) -> Tensor:
    """Join what was computed per micro-batch, row i for the i-th slot."""
    joined = torch.cat(parts)
    if by_length is None:
        return joined
    return joined[to_tensor(np.argsort(by_length), joined.device)]


def learner(program: Program, execution: Execution, world: World) -> TorchLearner:
    with creating_a_learner():
        return TorchLearner(program, execution, world)
