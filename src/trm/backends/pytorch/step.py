"""One training step: the recursion applied to slots.

The sum of the slots' losses is divided once, by the number of all slots. That is why any cut of a step into
micro-batches gives the same update. New latents and gradients are put aside until the update, so a step
that is interrupted has not happened.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from macbook_optimization.errors import AllocationFailed, MemoryBudgetError, NonFiniteError
from macbook_optimization.training_config_adapter import Checkpointing
from trm.backends.base import StepBatch, StepResult, StepSettings
from trm.backends.pytorch.answering import TorchAnswerer
from trm.backends.pytorch.compiling import compile_level
from trm.backends.pytorch.lanes import Lanes
from trm.backends.pytorch.losses import SlotLosses, slot_losses
from trm.backends.pytorch.memory import allocations
from trm.backends.pytorch.model import RECOMPUTE_EVERY, TinyRecursiveModel, check_shapes
from trm.backends.pytorch.optim import Adam, average_into, sign_descent
from trm.config import ModelConfig, TrainingConfig
from trm.tasks.base import TaskShape


def prepare(*, threads: int, deterministic: bool) -> None:
    torch.set_num_threads(threads)
    if deterministic != torch.are_deterministic_algorithms_enabled():  # the call imports the compiler: 2 s
        torch.use_deterministic_algorithms(deterministic)


def warm_up() -> None:
    """Starts the threads and loads the libraries that a first product starts and loads."""
    torch.randn(256, 256) @ torch.randn(256, 256)


class TorchLearner:
    """Weights, their average, Adam's moments and the slots' latents."""

    def __init__(
        self,
        model: ModelConfig,
        training: TrainingConfig,
        shape: TaskShape,
        seed: int,
        gradient_checkpointing: Checkpointing = "none",
        lanes: int = 1,
    ) -> None:
        self.training = training
        self.lanes = Lanes(lanes)
        self.model = TinyRecursiveModel(model, shape, seed)
        self.model.L_level.recompute_every = RECOMPUTE_EVERY[gradient_checkpointing]
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = Adam(self.parameters, training)
        rows = getattr(self.model, "puzzle_emb", None)  # not averaged: most are too rarely seen
        self.averaged = copy.deepcopy(self.model, {id(rows): rows}).requires_grad_(False)
        self.latents: Tensor | None = None
        self.spare: Tensor | None = None  # becomes the latents with the update
        if training.supervision == "deep":
            self.latents = self.model.start(training.effective_batch_size).contiguous()
            self.spare = self.latents.clone()

    def set_lanes(self, count: int) -> None:
        self.lanes = Lanes(count)

    def compile(self, micro_batch_size: int | None) -> None:
        """Of the two levels, the learner's only: averaged weights answer, which is over soon."""
        if micro_batch_size is None:
            self.model.L_level.compiled_size = None
        else:
            compile_level(self.model, *self.lanes.piece(micro_batch_size))

    def step(self, batch: StepBatch, settings: StepSettings, next_cut: Callable[[int], int]) -> StepResult:
        num_slots = len(batch.inputs)
        pieces: list[SlotLosses] = []
        self.model.zero_grad(set_to_none=True)

        def add(piece: tuple[list[Tensor | None], SlotLosses]) -> None:
            gradients, losses = piece
            pieces.append(losses)
            for tensor, gradient in zip(tensors.learned, gradients, strict=True):
                if tensor.grad is None:
                    tensor.grad = gradient
                elif gradient is not None:
                    tensor.grad.add_(gradient)

        with allocations(torn=False):
            tensors = _Cuttable(self.model, batch, self.latents, self.spare, self.training.noise)
            compute = partial(self._gradients, tensors, settings.cycles, num_slots)
            self.lanes.each(num_slots, next_cut, compute, add)
        loss = float(sum(piece.total for piece in pieces)) / num_slots
        with allocations(torn=True):
            grad_norm = self._update(loss, tensors, settings)
        self.latents, self.spare = self.spare, self.latents
        correct, labelled, halt_margins = (
            torch.cat(column) for column in list(zip(*pieces, strict=True))[1:]
        )
        return StepResult(
            loss=loss,
            grad_norm=grad_norm,
            token_accuracy=float(correct.sum() / labelled.sum().clamp(min=1)),
            exact=(correct == labelled).numpy(),
            halt_margins=halt_margins.float().numpy(),
        )

    def _gradients(
        self, tensors: _Cuttable, cycles: int, num_slots: int, cut: slice
    ) -> tuple[list[Tensor | None], SlotLosses]:
        inputs, labels, puzzle_rows, latents = tensors.cut(cut)
        new_latents = self.model(inputs, puzzle_rows, latents, cycles)
        losses = slot_losses(self.model, new_latents[0], labels, self.training)
        gradients = torch.autograd.grad(losses.total / num_slots, tensors.learned, allow_unused=True)
        tensors.keep(cut, new_latents)
        return list(gradients), losses._replace(total=losses.total.detach())

    def _update(self, loss: float, tensors: _Cuttable, settings: StepSettings) -> float:
        limit = self.training.max_grad_norm
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit or float("inf")))
        rows = tensors.rows.grad if tensors.rows is not None else None
        row_norm = 0.0 if rows is None else float(rows.norm())
        if not np.isfinite(loss + grad_norm + row_norm):  # before the update: the weights are still good
            raise NonFiniteError(
                f"The loss is {loss:.4g} and the gradient norm {grad_norm + row_norm:.4g} at step "
                f"{settings.step}.",
                hint="Start a new run (--run or --fresh) with a lower training.learning_rate.",
            )
        self.optimizer.update(settings.step, settings.learning_rate)
        if tensors.rows is not None and tensors.rows.grad is not None:
            self.model.puzzle_emb.weights[tensors.row_ids] = sign_descent(
                tensors.rows, tensors.rows.grad, settings.puzzle_emb_lr, self.training.puzzle_emb_weight_decay
            )
        if self.training.ema:
            averages = dict(self.averaged.named_parameters())
            average_into(averages, self.parameters, self.training.ema_rate)
        return grad_norm

    def answerer(self) -> TorchAnswerer:
        return TorchAnswerer(self.averaged if self.training.ema else self.model, self.training, self.lanes)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        tensors = {"weights": self.model.state_dict(), "optimizer": self.optimizer.moments}
        if self.training.ema:
            tensors["ema"] = self.averaged.state_dict()
        if self.latents is not None:
            tensors["latents"] = {"latents": self.latents}
        return tensors

    def restore(self, tensors: dict[str, dict[str, Any]]) -> None:
        for group, ours in self.tensors().items():
            check_shapes(ours, tensors.get(group, {}), f"The {group} of the checkpoint do")
        for group, ours in self.tensors().items():
            theirs = tensors.pop(group)
            for name, tensor in ours.items():
                tensor.copy_(theirs[name])


class _Cuttable:
    """The tensors of one step, to be read and written slice by slice."""

    def __init__(
        self,
        model: TinyRecursiveModel,
        batch: StepBatch,
        latents: Tensor | None,
        new_latents: Tensor | None,
        noise: float,
    ) -> None:
        self.inputs = torch.from_numpy(batch.inputs)
        self.labels = torch.from_numpy(batch.labels)
        self.fresh = torch.from_numpy(batch.fresh)
        self.model, self.latents, self.new_latents = model, latents, new_latents
        self.noise, self.noise_seeds = noise, batch.noise_seeds
        self.rows: Tensor | None = None
        if model.config.puzzle_emb_ndim:
            identifiers = torch.from_numpy(batch.puzzle_identifiers)
            self.row_ids, self.row_of_slot = torch.unique(identifiers, return_inverse=True)
            self.rows = model.puzzle_emb.weights[self.row_ids].requires_grad_()
        self.learned = [*model.parameters(), *([] if self.rows is None else [self.rows])]

    def cut(self, cut: slice) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        latents = self.model.start(cut.stop - cut.start)
        if self.noise_seeds is not None:
            lucks = (torch.Generator().manual_seed(int(seed)) for seed in self.noise_seeds[cut])
            each = [self.model.noise(luck) for luck in lucks]
            latents = latents + self.noise * torch.cat(each, dim=2)
        if self.latents is not None:
            latents = torch.where(self.fresh[cut][:, None], latents, self.latents[:, :, cut])
        puzzle_rows = None if self.rows is None else self.rows[self.row_of_slot[cut]]
        return self.inputs[cut], self.labels[cut], puzzle_rows, latents

    def keep(self, cut: slice, new_latents: Tensor) -> None:
        if self.new_latents is not None:
            self.new_latents[:, :, cut] = new_latents.detach()


def learner(
    model: ModelConfig,
    training: TrainingConfig,
    shape: TaskShape,
    seed: int,
    gradient_checkpointing: Checkpointing = "none",
    lanes: int = 1,
) -> TorchLearner:
    try:
        with allocations(torn=False):
            return TorchLearner(model, training, shape, seed, gradient_checkpointing, lanes)
    except AllocationFailed as error:
        raise MemoryBudgetError(
            "The model and its slots do not fit into memory.",
            hint="Lower model.hidden_size or training.effective_batch_size.",
        ) from error
