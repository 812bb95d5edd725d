"""A decoder without gradients: the loss of given text, and the next token of a text that grows.

Sampling keeps the keys and values of all positions, so a token costs one pass of one position. When the
context is full, its later half is encoded again, and the text continues from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from trm.arrays import Float32Array, FloatArray, IntArray
from trm.backends.base import Program
from trm.backends.draws import Draws
from trm.backends.failures import allocations, check_shapes
from trm.backends.mlx.decoder import Decoder, KeyValueCache
from trm.backends.mlx.device import to_array, to_mlx
from trm.backends.mlx.layers import Weights, linear, widened
from trm.backends.mlx.models import new_network
from trm.batch import Batch
from trm.config import TrainingConfig
from trm.plan import Execution


class MlxLanguageModel:
    def __init__(self, model: Decoder, training: TrainingConfig, weights: Weights) -> None:
        self.model = model
        self.weights = weights
        self.loss = training.loss
        self.text: list[int] = []  # tokens that the caches hold
        self.caches: list[KeyValueCache] = []

    def token_losses(self, batch: Batch) -> FloatArray:
        labels = mx.array(batch.labels.astype(np.int32))
        with allocations(torn=False):
            hidden = self.model.hidden(self.weights, mx.array(batch.inputs.astype(np.int32)))
            losses, _ = self.model.judged(self.weights, hidden, labels, self.loss)
            return to_array(losses).astype(np.float64)

    def begin(self, tokens: IntArray) -> Float32Array:
        self.text = tokens.tolist()[-self.model.data.max_len :]
        self.caches = [KeyValueCache() for _ in range(self.model.config.num_layers)]
        return self._next_logits(self.text)

    def append(self, token: int) -> Float32Array:
        max_len = self.model.data.max_len
        if len(self.text) == max_len:
            return self.begin(np.array([*self.text[max_len // 2 + 1 :], token]))
        self.text.append(token)
        return self._next_logits([token])

    def _next_logits(self, tokens: list[int]) -> Float32Array:
        with allocations(torn=False):
            hidden = self.model.hidden(self.weights, mx.array([tokens]), caches=self.caches)
            return to_array(widened(linear(hidden[:, -1], self.model.head(self.weights))[0]))


def language_model(program: Program, execution: Execution, weights: Mapping[str, Any]) -> MlxLanguageModel:
    model = new_network(program, execution.precision)
    assert isinstance(model, Decoder)
    check_shapes(model.draw(Draws(0)), weights, "The weights do")
    return MlxLanguageModel(model, program.training, {name: to_mlx(each) for name, each in weights.items()})
