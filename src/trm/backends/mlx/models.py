"""The kinds of models, by their config, and what the learner needs of each."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from trm.backends.base import Program
from trm.backends.draws import Draws
from trm.backends.mlx.decoder import Decoder
from trm.backends.mlx.layers import Drawn, Weights
from trm.backends.mlx.losses import SlotLosses
from trm.backends.mlx.model import TinyRecursiveModel
from trm.backends.mlx.step_arrays import MicroBatch
from trm.config import DecoderConfig, TrainingConfig


class Network(Protocol):
    """A model without weights: its methods take them as an argument."""

    precision: str
    recompute_every: int

    @property
    def undecayed(self) -> frozenset[str]:
        """Names of parameters without weight decay."""
        ...

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names among the weights that the optimizer does not change."""
        ...

    def draw(self, draws: Draws) -> Drawn:
        """Draw the initial weights, buffers included, in the order of the PyTorch backend."""
        ...

    def losses(
        self, weights: Weights, taken: MicroBatch, training: TrainingConfig, smoothing: float
    ) -> tuple[SlotLosses, mx.array | None]:
        """Return the losses of a micro-batch, with gradient, and its new latents."""
        ...


def new_network(program: Program, precision: str) -> TinyRecursiveModel | Decoder:
    if isinstance(program.model, DecoderConfig):
        return Decoder(program.model, program.data, precision)
    return TinyRecursiveModel(program.model, program.data, precision)
