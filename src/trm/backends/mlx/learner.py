"""One training step: the recursion applied to slots.

The sum of the slots' losses is divided once, by the number of slots of all ranks. That is why any split of a
step into micro-batches or ranks gives the same update. Arrays of MLX are not changed but replaced, and only
once all new ones are computed: an interrupted step has not happened.

MLX is lazy: results are requested after every recursion and every micro-batch, so that the pending graph does
not grow with the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from macbook_optimization.errors import ConfigError
from macbook_optimization.json_types import JsonObject
from trm.arrays import Float32Array, IntArray
from trm.backends.base import Program, StepResult, StepSettings
from trm.backends.draws import Draws
from trm.backends.failures import allocations, creating_a_learner, require_finite
from trm.backends.mlx.compile import Compilations, Functions, functions_of, recursed
from trm.backends.mlx.decoder import Decoder
from trm.backends.mlx.device import prepare, to_array
from trm.backends.mlx.language_model import MlxLanguageModel
from trm.backends.mlx.layers import Weights, with_rows
from trm.backends.mlx.learner_state import Groups, copied_from_writer, digest, loaded_state, whole_state
from trm.backends.mlx.losses import SlotLosses
from trm.backends.mlx.message import StepMessage, StepTotals
from trm.backends.mlx.model import PUZZLE_ROWS, TinyRecursiveModel
from trm.backends.mlx.models import new_network
from trm.backends.mlx.optim import OPTIMIZERS, averaged, clipped, global_norm, sign_descent
from trm.backends.mlx.predictor import MlxPredictor
from trm.backends.mlx.step_arrays import MicroBatch, StepArrays
from trm.backends.sizes import RECOMPUTE_EVERY
from trm.backends.step_times import StepTimes
from trm.backends.world import World, owned_slots
from trm.batch import Batch
from trm.plan import Execution


class MlxLearner:
    """Weights, their moving average, the optimizer's moments and the latents of this rank's slots."""

    def __init__(self, program: Program, execution: Execution, world: World) -> None:
        _refuse(execution)
        self.program = program
        self.training = program.training
        self.execution = execution
        self.world = world
        self.network = new_network(program, execution.precision)
        self.network.recompute_every = RECOMPUTE_EVERY[execution.gradient_checkpointing]
        self.recursion = self.network if isinstance(self.network, TinyRecursiveModel) else None
        self.weights: dict[str, mx.array] = self.network.draw(Draws(program.seed))
        self.has_puzzle_rows = PUZZLE_ROWS in self.weights
        self.optimizer = OPTIMIZERS[self.training.optimizer](self.training, self.network.undecayed)
        self.moments = self.optimizer.all_moments(self.parameters)
        self.averages: dict[str, mx.array] | None = None
        if self.training.ema:  # puzzle embeddings are not averaged: most rows occur too rarely
            self.averages = {name: each for name, each in self.weights.items() if name != PUZZLE_ROWS}
        self.latents: mx.array | None = None
        if self.training.supervision == "deep" and self.recursion is not None:
            owned = owned_slots(world)
            self.latents = self.recursion.start(self.weights, owned.stop - owned.start)
        mx.eval(self.weights, self.moments, self.latents)
        # Exchanged with other ranks, if there are any.
        self.message = StepMessage.of(program, self.parameters) if world.size > 1 else None
        self.plain = functions_of(self.network, program)
        self.compilations = Compilations(program)
        self.compiled = self._compiled(execution)

    @property
    def parameters(self) -> dict[str, mx.array]:
        """The weights that the optimizer changes."""
        buffers = self.network.buffers
        return {name: each for name, each in self.weights.items() if name not in buffers}

    def reconfigure(self, execution: Execution) -> None:
        if (execution.backend, execution.device) != (self.execution.backend, self.execution.device):
            raise ValueError("backend and device of a learner are fixed")
        _refuse(execution)
        self.compiled = self._compiled(execution)
        prepare(execution)
        if execution.precision != self.network.precision and self.latents is not None:
            precise = mx.bfloat16 if execution.precision == "bfloat16" else mx.float32
            self.latents = self.latents.astype(precise)
        self.network.precision = execution.precision
        self.network.recompute_every = RECOMPUTE_EVERY[execution.gradient_checkpointing]
        self.execution = execution

    def _compiled(self, execution: Execution) -> Functions | None:
        learned = self._learned(np.zeros(1, dtype=np.int32) if self.has_puzzle_rows else None)
        return self.compilations.get(execution.compiled_size, execution.precision, self.weights, learned)

    def step(self, batch: Batch, settings: StepSettings, next_size: Callable[[int], int]) -> StepResult:
        times = StepTimes()
        arrays = StepArrays.of(self, batch)
        try:
            with allocations(torn=False):
                totals, gradients = self._compute(arrays, settings, next_size, times)
        except BaseException:
            if self.message is not None:
                num_rows = 0 if arrays.row_ids is None else len(arrays.row_ids)
                self.message.abandon(self.world, num_rows)
            raise
        times.computed = time.monotonic()
        if self.message is not None:
            totals, gradients = self.message.exchange(self.world, arrays.first_slot, totals, gradients)
            times.waited = self.message.waited_seconds
        loss = totals.loss / self.program.num_slots
        with allocations(torn=self.message is not None):  # other ranks may have updated theirs
            grad_norm = self._update(loss, arrays, settings, dict(gradients))
        return StepResult.of(loss, grad_norm, totals[1:], times.shares())

    def _compute(
        self, arrays: StepArrays, settings: StepSettings, next_size: Callable[[int], int], times: StepTimes
    ) -> tuple[StepTotals, Weights]:
        """Compute every micro-batch, and add up gradients and losses."""
        losses: list[SlotLosses] = []
        summed: dict[str, mx.array] = {}
        done = 0
        num_slots = len(arrays.batch)
        while done < num_slots:
            part = slice(done, min(done + max(1, next_size(done)), num_slots))
            found, gradients, new_latents = self._gradients(arrays, settings, part, times)
            wide = {name: each.astype(mx.float32) for name, each in gradients.items()}
            summed = {name: summed[name] + each if summed else each for name, each in wide.items()}
            arrays.keep(new_latents)
            mx.eval(summed, arrays.parts[-1:])
            losses.append(found)
            done = part.stop
        counted = ([each[field] for each in losses] for field in (1, 2, 3))
        per_slot = (to_array(arrays.in_slot_order(parts).astype(mx.float32)) for parts in counted)
        return StepTotals(sum(float(each.total) for each in losses), *per_slot), summed

    def _gradients(
        self, arrays: StepArrays, settings: StepSettings, part: slice, times: StepTimes
    ) -> tuple[SlotLosses, Weights, mx.array | None]:
        """Compute a micro-batch: its losses, its gradients divided by the slots of all ranks, new latents."""
        started = time.monotonic()
        taken = arrays.take(part)
        learned = self._learned(arrays.row_ids)
        cycle, gradients_of = self.plain
        if self.compiled is not None and _has_shape(taken, self.execution.compiled_size):
            cycle, gradients_of = self.compiled
            taken = taken._replace(noise_seeds=None)  # what is not an array would be compiled anew
        if self.recursion is not None:
            taken = recursed(cycle, learned, taken, settings.cycles - 1)
        (_, losses, new_latents), gradients = gradients_of(learned, taken, settings.smoothing(self.training))
        if arrays.row_ids is not None:
            gradients[PUZZLE_ROWS] = gradients[PUZZLE_ROWS][: len(arrays.row_ids)]
        mx.eval(losses, new_latents)
        forward = time.monotonic()
        mx.eval(gradients)
        times.add(forward - started, time.monotonic() - forward)
        return SlotLosses(*losses), gradients, new_latents

    def _learned(self, row_ids: IntArray | None) -> dict[str, mx.array]:
        """Return what the gradient is taken for: parameters, and the puzzle embeddings of a step.

        Rows are padded to the number of slots, so that the shape is always the same.
        """
        if row_ids is None:
            return self.parameters
        padded = np.zeros(self.program.num_slots, dtype=np.int32)
        padded[: len(row_ids)] = row_ids
        return {**self.parameters, PUZZLE_ROWS: self.weights[PUZZLE_ROWS][mx.array(padded)]}

    def _update(
        self, loss: float, arrays: StepArrays, settings: StepSettings, gradients: dict[str, mx.array]
    ) -> float:
        rows_gradient = gradients.pop(PUZZLE_ROWS, None)
        grad_norm = global_norm(gradients)
        row_norm = 0.0 if rows_gradient is None else global_norm({PUZZLE_ROWS: rows_gradient})
        require_finite(loss, grad_norm + row_norm, settings.step)  # the weights are still good
        clip = clipped(gradients, grad_norm, self.training.max_grad_norm)
        weights, moments = self.optimizer.updated(self.weights, self.moments, clip, settings)
        averages = self.averages
        if averages is not None:
            parameters = {name: weights[name] for name in gradients}
            averages = averaged(averages, parameters, self.training.ema_rate)
        if rows_gradient is not None and arrays.row_ids is not None:
            table = self.weights[PUZZLE_ROWS]
            rows = table[mx.array(arrays.row_ids.astype(np.int32))]
            decay = self.training.puzzle_emb_weight_decay
            updated = sign_descent(rows, rows_gradient, settings.puzzle_emb_lr, decay)
            weights[PUZZLE_ROWS] = with_rows(table, arrays.row_ids, updated)
        latents = arrays.new_latents()
        mx.eval(weights, moments, averages, latents)
        self.weights, self.moments, self.averages, self.latents = weights, moments, averages, latents
        return grad_norm

    def _for_inference(self) -> dict[str, mx.array]:
        """Return the moving average of the weights, or the weights where there is none."""
        return self.weights if self.averages is None else {**self.weights, **self.averages}

    def predictor(self) -> MlxPredictor:
        assert self.recursion is not None
        return MlxPredictor(self.recursion, self.training, self._for_inference())

    def language_model(self) -> MlxLanguageModel:
        assert isinstance(self.network, Decoder)
        return MlxLanguageModel(self.network, self.training, self._for_inference())

    def set_embeddings(self, tokens: IntArray, vectors: Float32Array) -> None:
        assert self.recursion is not None  # whose recipes may set them
        name = self.recursion.token_table
        for group in (self.weights, self.averages):
            if group is not None:
                group[name] = with_rows(group[name], tokens, mx.array(vectors))
        mx.eval(self.weights, self.averages)

    def state(self) -> Groups:
        return whole_state(self._shared_state(), self.latents, self.world)

    def _shared_state(self) -> Groups:
        """Return what is the same on every rank."""
        groups = {"weights": dict(self.weights), "optimizer": dict(self.moments)}
        if self.averages is not None:
            groups["ema"] = self._for_inference()
        return groups

    def load_state(self, groups: dict[str, JsonObject]) -> None:
        shared, latents = loaded_state(self._shared_state(), self.latents, groups, self.world)
        self._take(shared)
        self.latents = latents

    def _take(self, shared: Groups) -> None:
        self.weights = shared["weights"]
        self.moments = shared["optimizer"]
        if self.averages is not None:
            self.averages = {name: each for name, each in shared["ema"].items() if name != PUZZLE_ROWS}

    def digest(self) -> str:
        return digest(self.weights)

    def copy_from_writer(self) -> None:
        self._take(copied_from_writer(self._shared_state(), self.world))

    def message_seconds(self) -> float:
        return 0.0 if self.message is None else self.message.time_one(self.world)


def _has_shape(taken: MicroBatch, compiled_size: int | None) -> bool:
    """Return whether a micro-batch has the shape that its functions were compiled for."""
    is_full = taken.padding is None and taken.places is None and taken.weights is None
    return is_full and len(taken.inputs) == compiled_size


def _refuse(execution: Execution) -> None:
    if execution.optimizer_in_backward:
        raise ConfigError(
            "The MLX backend keeps gradients until the update.",
            hint="Set plan.optimizer_in_backward=false, or plan.backend=pytorch.",
        )


def learner(program: Program, execution: Execution, world: World) -> MlxLearner:
    with creating_a_learner():
        return MlxLearner(program, execution, world)
