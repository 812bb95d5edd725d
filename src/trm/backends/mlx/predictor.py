"""The recursion without gradients, step by step. What to do between steps is not decided here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from trm.arrays import IntArray
from trm.backends.base import Program, StepOutput
from trm.backends.draws import Draws
from trm.backends.failures import allocations, check_shapes
from trm.backends.mlx.device import start_computing, to_array, to_mlx
from trm.backends.mlx.layers import Weights
from trm.backends.mlx.losses import log_probabilities
from trm.backends.mlx.model import TinyRecursiveModel
from trm.backends.mlx.models import new_network
from trm.backends.mlx.step_arrays import MicroBatch
from trm.backends.sizes import LOGITS_AT_A_TIME
from trm.batch import PAD_TOKEN, Batch
from trm.config import TrainingConfig
from trm.plan import Execution


class MlxPredictor:
    """Holds the latents of the rows that are still being computed."""

    def __init__(self, model: TinyRecursiveModel, training: TrainingConfig, weights: Weights) -> None:
        self.model = model
        self.weights = weights
        self.loss = training.loss
        # Terminal supervision may stop after any recursion.
        self.cycles = 1 if training.supervision == "terminal" else model.config.cycles_per_step

    def begin(self, batch: Batch, noise: float = 0.0, noise_seed: int = 0) -> None:
        length = batch.inputs.shape[1]
        self.rows: IntArray = np.arange(len(batch))  # rows of the batch that have latents, in order
        self.padding = batch.padding
        self.puzzle_identifiers = batch.puzzle_identifiers.astype(np.int32)
        self.latents = self.model.start(self.weights, len(batch), length)
        if noise:
            self.latents = self.latents + noise * self.model.noise(noise_seed, length)

    def advance(self, rows: IntArray, inputs: IntArray, *, probabilities: bool = False) -> StepOutput:
        with allocations(torn=False):
            if not np.array_equal(rows, self.rows):  # a forgotten row cannot come back
                places = mx.array(np.searchsorted(self.rows, rows).astype(np.int32))
                self.latents = self.latents[:, :, places]
                self.rows = rows
            return self._step(inputs, probabilities)

    def _step(self, inputs_BL: IntArray, with_probabilities: bool) -> StepOutput:
        padding = None if self.padding is None else mx.array(self.padding[self.rows])
        inputs = mx.array(inputs_BL.astype(np.int32))
        identifiers = None
        if self.model.config.puzzle_emb_ndim:
            identifiers = mx.array(self.puzzle_identifiers[self.rows])
        taken = MicroBatch(inputs, inputs, padding=padding, puzzle_rows=identifiers)
        latents = self.latents
        for _ in range(self.cycles):
            latents = self.model.cycle(self.weights, taken, latents)
            start_computing(latents)
        positions = self.model.answer_positions(latents[0])
        probabilities = None
        if with_probabilities:
            logits = self.model.token_logits(self.weights, positions)
            tokens = mx.argmax(logits, axis=-1)
            probabilities = mx.exp(log_probabilities(logits, self.loss))
        else:
            tokens = self._likeliest(positions)
        if padding is not None:
            tokens = mx.where(padding, PAD_TOKEN, tokens)
        halting = self.model.halt_logits(self.weights, latents[0])[:, 0]
        mx.eval(latents, tokens, halting, probabilities)
        self.latents = latents
        return StepOutput(
            tokens=to_array(tokens).astype(np.int64),
            halt_logits=to_array(halting),
            probabilities=None if probabilities is None else to_array(probabilities),
        )

    def _likeliest(self, positions: mx.array) -> mx.array:
        """Return the tokens of the largest logits, a few rows at a time.

        The logits of all rows together would take gigabytes where the outputs are a vocabulary of words.
        """
        logits_per_row = positions.shape[1] * self.model.data.num_outputs
        at_a_time = max(1, LOGITS_AT_A_TIME // logits_per_row)
        found = []
        for first in range(0, len(positions), at_a_time):
            logits = self.model.token_logits(self.weights, positions[first : first + at_a_time])
            found.append(mx.argmax(logits, axis=-1))
            start_computing(found[-1])
        return mx.concatenate(found)


def predictor(program: Program, execution: Execution, weights: Mapping[str, Any]) -> MlxPredictor:
    model = new_network(program, execution.precision)
    assert isinstance(model, TinyRecursiveModel)
    check_shapes(model.draw(Draws(0)), weights, "The weights do")
    return MlxPredictor(model, program.training, {name: to_mlx(each) for name, each in weights.items()})
