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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from macbook_optimization.errors import AllocationFailed, ConfigError, MemoryBudgetError, NonFiniteError
from macbook_optimization.json_types import JsonObject
from trm.arrays import Float32Array, IntArray
from trm.backends.base import Program, StepResult, StepSettings, World, owned_slots
from trm.backends.pytorch.decoder import Decoder
from trm.backends.pytorch.device import prepare, to_array, to_tensor
from trm.backends.pytorch.gradients import Float32Sums, GradientStream, UpdateInBackward, connect
from trm.backends.pytorch.language_model import TorchLanguageModel
from trm.backends.pytorch.layers import RECOMPUTE_EVERY
from trm.backends.pytorch.losses import SlotLosses
from trm.backends.pytorch.memory import allocations
from trm.backends.pytorch.model import TinyRecursiveModel, check_shapes
from trm.backends.pytorch.models import new_model
from trm.backends.pytorch.optim import OPTIMIZERS, average_into, sign_descent
from trm.backends.pytorch.predictor import TorchPredictor
from trm.backends.pytorch.step_tensors import StepTensors
from trm.backends.pytorch.workers import ThreadWorkers
from trm.batch import Batch, exact_rows
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
        self.stream = self._gradient_stream(world)
        self.workers = self._new_workers(execution)
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
        if world.size > 1 and program.model.puzzle_emb_ndim:
            raise ConfigError("Puzzle embeddings cannot be trained by several processes yet.")

    def _gradient_stream(self, world: World) -> GradientStream | None:
        """Return what takes the gradients out of the parameters, or None if they stay there."""
        in_backward = self.execution.optimizer_in_backward
        in_bfloat16 = any(each.dtype == torch.bfloat16 for each in self.parameters.values())
        if not in_backward and not in_bfloat16:
            return None
        if world.size > 1:
            what = "plan.optimizer_in_backward" if in_backward else "model.weights_dtype=bfloat16"
            raise ConfigError(f"{what} cannot be combined with training by several processes.")
        stream: GradientStream = (UpdateInBackward if in_backward else Float32Sums)(self.optimizer)
        connect(stream, self.optimizer)
        return stream

    def _new_workers(self, execution: Execution) -> ThreadWorkers:
        """Return the workers; gradients that leave their parameter need one, as it is the same for all."""
        return ThreadWorkers(execution.threads, execution.workers if self.stream is None else 1)

    def reconfigure(self, execution: Execution) -> None:
        if (execution.backend, execution.device) != (self.execution.backend, self.execution.device):
            raise ValueError("backend and device of a learner are fixed")
        workers = self._new_workers(execution)
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
        self.model.zero_grad(set_to_none=True)
        if self.stream is not None:
            self.stream.begin(settings.step, settings.learning_rate)
        if self.execution.optimizer_in_backward:
            next_size(0)  # which may stop the step; there is one micro-batch, whatever its size
            next_size = partial(max, len(batch))
        losses: list[SlotLosses] = []
        times = _Times()

        def add(computed: _Computed) -> None:
            losses.append(computed.losses)
            times.add(computed)
            for tensor, gradient in zip(tensors.learned, computed.gradients, strict=True):
                if tensor.grad is None:
                    tensor.grad = gradient
                elif gradient is not None:
                    tensor.grad.add_(gradient)

        by_length = batch.by_length()
        with allocations(torn=self.execution.optimizer_in_backward):
            tensors = StepTensors.of(self, batch, by_length)
            compute = partial(self._gradients, tensors, settings)
            self.workers.map(len(batch), next_size, compute, add)
        times.computed = time.monotonic()
        total = float(sum(each.total for each in losses))
        in_slot_order = partial(_in_slot_order, by_length)
        correct = in_slot_order([each.correct_tokens for each in losses])
        labelled = in_slot_order([each.labelled_tokens for each in losses])
        exact = exact_rows(correct, labelled)
        counts = np.array([total, float(correct.sum()), float(labelled.sum()), float(exact.sum())])
        self._sum_over_ranks(counts)
        loss = float(counts[0]) / self.program.num_slots
        with allocations(torn=True), self.phase("optimizer"):
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
            seconds=times.shares(),
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
            losses, new_latents = self.model.losses(taken, settings, self.training)
            mean = losses.total / self.program.num_slots
        forward = time.monotonic()
        with self.phase("backward"):
            gradients: Sequence[Tensor | None] = [None] * len(tensors.learned)
            if self.stream is None:
                gradients = torch.autograd.grad(mean, tensors.learned, allow_unused=True)
            else:
                mean.backward()  # type: ignore[no-untyped-call]
        tensors.keep(rows, new_latents)
        losses = losses._replace(total=losses.total.detach())
        return _Computed(list(gradients), losses, forward - started, time.monotonic() - forward)

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

    def _update(self, loss: float, tensors: StepTensors, settings: StepSettings) -> float:
        limit = self.training.max_grad_norm
        if self.stream is not None:
            grad_norm = self.stream.norm(limit)
        else:
            parameters = self.parameters.values()
            grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit or float("inf")))
        rows_gradient = tensors.rows.grad if tensors.rows is not None else None
        row_norm = 0.0 if rows_gradient is None else float(rows_gradient.norm())
        if not np.isfinite(loss + grad_norm + row_norm):  # before the update: the weights are still good
            raise NonFiniteError(
                f"The loss is {loss:.4g} and the gradient norm {grad_norm + row_norm:.4g} at step "
                f"{settings.step}.",
                hint="Start a new run (--run or --fresh) with a lower training.learning_rate.",
            )
        if self.stream is not None:
            self.stream.update()
        else:
            self.optimizer.update(settings.step, settings.learning_rate)
        if tensors.rows is not None and rows_gradient is not None:
            decay = self.training.puzzle_emb_weight_decay
            updated = sign_descent(tensors.rows, rows_gradient, settings.puzzle_emb_lr, decay)
            tensors.set_rows(updated)
        if self.training.ema:
            averages = dict(self.averaged.named_parameters())
            average_into(averages, self.parameters, self.training.ema_rate)
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

    def add(self, computed: _Computed) -> None:
        self.forward += computed.forward_seconds
        self.backward += computed.backward_seconds

    def shares(self) -> dict[str, float]:
        passed = self.computed - self.started
        forward = passed * self.forward / max(self.forward + self.backward, 1e-9)
        optimizer = time.monotonic() - self.computed
        return {"forward": forward, "backward": passed - forward, "optimizer": optimizer}


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
