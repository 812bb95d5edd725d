"""A decoder without gradients: the loss of given text, and the next token of a text that grows.

Sampling keeps the keys and values of all positions, so a token costs one pass of one position. When the
context is full, its later half is encoded again, and the text continues from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trm.arrays import Float32Array, FloatArray, IntArray
from trm.backends.base import Program
from trm.backends.failures import allocations
from trm.backends.pytorch.decoder import Decoder, KeyValueCache
from trm.backends.pytorch.device import to_array, to_tensor
from trm.backends.pytorch.losses import token_losses
from trm.backends.pytorch.model import load_weights
from trm.backends.pytorch.models import new_model
from trm.backends.pytorch.workers import ThreadWorkers
from trm.backends.sizes import LOGITS_AT_A_TIME
from trm.batch import IGNORE_LABEL, Batch
from trm.config import TrainingConfig
from trm.plan import Execution


class TorchLanguageModel:
    def __init__(self, model: Decoder, training: TrainingConfig, workers: ThreadWorkers) -> None:
        self.model = model
        self.loss = training.loss
        self.workers = workers
        self.device = model.rope_cos.device
        self.text: list[int] = []  # tokens that the caches hold
        self.caches: list[KeyValueCache] = []

    def token_losses(self, batch: Batch) -> FloatArray:
        inputs = to_tensor(batch.inputs, self.device)
        labels = to_tensor(batch.labels, self.device)
        parts: list[Tensor] = []

        @torch.no_grad()
        def compute(rows: slice) -> Tensor:
            return self._losses(self.model(inputs[rows]), labels[rows])

        with allocations(torn=False):
            count = len(batch)
            if count < self.workers.count:  # then all threads work on the same products
                parts.append(compute(slice(0, count)))
            else:
                self.workers.map(count, lambda done: count, compute, parts.append)
        losses: FloatArray = to_array(torch.cat(parts)).astype(np.float64)
        return losses

    def _losses(self, hidden_BLD: Tensor, labels_BL: Tensor) -> Tensor:
        """Return (B, L), a few positions at a time; 0 where there is no label."""
        labelled = labels_BL != IGNORE_LABEL
        hidden, labels = hidden_BLD[labelled], labels_BL[labelled]
        at_a_time = max(1, LOGITS_AT_A_TIME // self.model.data.num_outputs)
        found = [
            token_losses(self.model.token_logits(part), labels_of_part, self.loss)
            for part, labels_of_part in zip(
                torch.split(hidden, at_a_time), torch.split(labels, at_a_time), strict=True
            )
        ]
        joined = torch.cat(found)
        return torch.zeros(labels_BL.shape, dtype=joined.dtype, device=self.device).masked_scatter_(
            labelled, joined
        )

    def begin(self, tokens: IntArray) -> Float32Array:
        self.text = tokens.tolist()[-self.model.data.max_len :]
        self.caches = self.model.new_caches()
        return self._next_logits(self.text)

    def append(self, token: int) -> Float32Array:
        max_len = self.model.data.max_len
        if len(self.text) == max_len:
            return self.begin(np.array([*self.text[max_len // 2 + 1 :], token]))
        self.text.append(token)
        return self._next_logits([token])

    @torch.no_grad()
    def _next_logits(self, tokens: list[int]) -> Float32Array:
        inputs = to_tensor(np.array([tokens]), self.device)
        with allocations(torn=False):
            hidden = self.model(inputs, caches=self.caches)
            return to_array(self.model.token_logits(hidden[0, -1]).float())


def language_model(program: Program, execution: Execution, weights: Mapping[str, Any]) -> TorchLanguageModel:
    model = new_model(program, precision=execution.precision)
    assert isinstance(model, Decoder)
    load_weights(model, weights)
    model = model.requires_grad_(False).to(torch.device(execution.device))
    workers = execution.workers if model.rope_cos.device.type == "cpu" else 1
    return TorchLanguageModel(model, program.training, ThreadWorkers(execution.threads, workers))
