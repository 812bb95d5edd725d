"""The kinds of models, by their config."""

from __future__ import annotations

from trm.backends.base import Program
from trm.backends.pytorch.decoder import Decoder
from trm.backends.pytorch.model import TinyRecursiveModel
from trm.config import DecoderConfig


def new_model(
    program: Program, seed: int | None = 0, precision: str | None = None
) -> TinyRecursiveModel | Decoder:
    """Build the model of a program; without a seed it has shapes, but no weights."""
    if isinstance(program.model, DecoderConfig):
        return Decoder(program.model, program.data, seed, precision)
    return TinyRecursiveModel(program.model, program.data, seed, precision)
