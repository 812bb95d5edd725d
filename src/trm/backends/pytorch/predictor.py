"""The recursion without gradients, step by step. What to do between steps is not decided here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trm.arrays import IntArray
from trm.backends.base import Program, StepOutput
from trm.backends.failures import allocations
from trm.backends.pytorch.device import to_array, to_tensor
from trm.backends.pytorch.losses import probabilities as probabilities_of
from trm.backends.pytorch.model import TinyRecursiveModel, load_weights
from trm.backends.pytorch.models import new_model
from trm.backends.pytorch.workers import ThreadWorkers
from trm.backends.sizes import LOGITS_AT_A_TIME
from trm.batch import PAD_TOKEN, Batch
from trm.config import TrainingConfig
from trm.plan import Execution


class TorchPredictor:
    """Holds the latents of the rows that are still being computed."""

    def __init__(self, model: TinyRecursiveModel, training: TrainingConfig, workers: ThreadWorkers) -> None:
        self.model = model
        self.workers = workers
        self.loss = training.loss
        # Terminal supervision may stop after any recursion.
        self.cycles = 1 if training.supervision == "terminal" else model.config.cycles_per_step
        self.device = model.initial_latents.device

    def begin(self, batch: Batch, noise: float = 0.0, noise_seed: int = 0) -> None:
        length = batch.inputs.shape[1]
        self.rows: IntArray = np.arange(len(batch))  # rows of the batch that have latents, in order
        self.padding = None if batch.padding is None else to_tensor(batch.padding, self.device)
        self.puzzle_rows: Tensor | None = None
        if self.model.config.puzzle_emb_ndim:
            identifiers = to_tensor(batch.puzzle_identifiers, self.device)
            self.puzzle_rows = self.model.puzzle_emb.weights[identifiers]
        self.latents = self.model.start(len(batch), length)
        if noise:
            generator = torch.Generator().manual_seed(noise_seed)
            self.latents = self.latents + noise * self.model.noise(generator, length)

    def advance(self, rows: IntArray, inputs: IntArray, *, probabilities: bool = False) -> StepOutput:
        with allocations(torn=False):
            self._keep_only(rows)
            return self._step(to_tensor(inputs, self.device), probabilities)

    def _keep_only(self, rows: IntArray) -> None:
        """Forget rows that are finished. A forgotten row cannot come back before the next `begin`."""
        if np.array_equal(rows, self.rows):
            return
        places = to_tensor(np.searchsorted(self.rows, rows), self.device)
        self.latents = self.latents[:, :, places]
        self.rows = rows

    def _step(self, inputs_BL: Tensor, with_probabilities: bool) -> StepOutput:
        new_latents = torch.empty(self.latents.shape, dtype=self.latents.dtype, device=self.device)
        places = to_tensor(self.rows, self.device)
        outputs: list[tuple[Tensor, Tensor, Tensor | None]] = []

        @torch.no_grad()
        def compute(part: slice) -> tuple[Tensor, Tensor, Tensor | None]:
            here = places[part]
            padding = None if self.padding is None else self.padding[here]
            puzzle_rows = None if self.puzzle_rows is None else self.puzzle_rows[here]
            latents = self.model(inputs_BL[part], puzzle_rows, self.latents[:, :, part], self.cycles, padding)
            new_latents[:, :, part] = latents
            positions = self.model.answer_positions(latents[0])
            probabilities = None
            if with_probabilities:
                logits = self.model.token_logits(positions)
                tokens = logits.argmax(-1)
                probabilities = probabilities_of(logits, self.loss)
            else:
                tokens = self._likeliest(positions)
            if padding is not None:
                tokens = tokens.masked_fill(padding, PAD_TOKEN)
            return tokens, self.model.halt_logits(latents[0])[:, 0], probabilities

        count = len(self.rows)
        if count < self.workers.count:  # then all threads work on the same products
            outputs.append(compute(slice(0, count)))
        else:
            self.workers.map(count, lambda done: count, compute, outputs.append)
        self.latents = new_latents
        computed = [each[2] for each in outputs if each[2] is not None]
        return StepOutput(
            tokens=to_array(torch.cat([each[0] for each in outputs])),
            halt_logits=to_array(torch.cat([each[1] for each in outputs]).float()),
            probabilities=to_array(torch.cat(computed).float()) if computed else None,
        )

    def _likeliest(self, positions: Tensor) -> Tensor:
        """Return the tokens of the largest logits, a few rows at a time.

        The logits of all rows together would take gigabytes where the outputs are a vocabulary of words.
        """
        logits_per_row = positions.shape[1] * self.model.data.num_outputs
        parts = torch.split(positions, max(1, LOGITS_AT_A_TIME // logits_per_row))
        return torch.cat([self.model.token_logits(part).argmax(-1) for part in parts])


def predictor(program: Program, execution: Execution, weights: Mapping[str, Any]) -> TorchPredictor:
    model = new_model(program, precision=execution.precision)
    assert isinstance(model, TinyRecursiveModel)
    load_weights(model, weights)
    model = model.requires_grad_(False).to(torch.device(execution.device))
    workers = execution.workers if model.initial_latents.device.type == "cpu" else 1
    return TorchPredictor(model, program.training, ThreadWorkers(execution.threads, workers))
