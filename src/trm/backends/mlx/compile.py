"""The two functions that a step computes: a recursion without gradient, and the last one with it.

Compiled, they serve one micro-batch size and full rows; any other shape would be compiled anew. On Linux MLX
needs a C++ compiler for that, and a minute where nothing has been compiled before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from macbook_optimization.errors import CompilationError
from trm.backends.base import Program
from trm.backends.mlx.decoder import Decoder
from trm.backends.mlx.device import start_computing
from trm.backends.mlx.layers import Weights
from trm.backends.mlx.model import TinyRecursiveModel
from trm.backends.mlx.models import new_network
from trm.backends.mlx.step_arrays import MicroBatch

Cycle = Callable[[Weights, MicroBatch, mx.array], mx.array]
Gradients = Callable[[Weights, MicroBatch, float], tuple[Any, dict[str, mx.array]]]
Functions = tuple[Cycle, Gradients]


def functions_of(network: TinyRecursiveModel | Decoder, program: Program) -> Functions:
    """Return the functions of a network; gradients are of the loss divided by the slots of all ranks."""

    def losses(learned: Weights, taken: MicroBatch, smoothing: float) -> tuple[Any, ...]:
        found, new_latents = network.losses(learned, taken, program.training, smoothing)
        return found.total / program.num_slots, found, new_latents

    def cycle(weights: Weights, taken: MicroBatch, latents: mx.array) -> mx.array:
        assert isinstance(network, TinyRecursiveModel)
        return network.cycle(weights, taken, latents)

    return cycle, mx.value_and_grad(losses)


def recursed(cycle: Cycle, weights: Weights, taken: MicroBatch, num_cycles: int) -> MicroBatch:
    """Return the micro-batch with its latents after this many recursions without gradient."""
    for _ in range(num_cycles):
        assert taken.latents is not None
        latents = cycle(weights, taken, taken.latents)
        start_computing(latents)
        taken = taken._replace(latents=latents)
    return taken


class Compilations:
    """The functions that were compiled for one program, by micro-batch size and precision."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.compiled: dict[tuple[int, str], Functions] = {}

    def get(self, size: int | None, precision: str, weights: Weights, learned: Weights) -> Functions | None:
        """Compile unless that has happened; None if there is no size."""
        if size is None:
            return None
        if (size, precision) not in self.compiled:
            self.compiled[size, precision] = self._compile(size, precision, weights, learned)
        return self.compiled[size, precision]

    def _compile(self, size: int, precision: str, weights: Weights, learned: Weights) -> Functions:
        network = new_network(self.program, precision)
        if isinstance(network, Decoder):
            raise CompilationError("A decoder is not compiled; its layers differ in their weights.")
        cycle, gradients = functions_of(network, self.program)
        compiled = mx.compile(cycle), mx.compile(gradients)
        zeros = mx.zeros((size, self.program.data.max_len), dtype=mx.int32)
        rows = mx.zeros((size,), dtype=mx.int32) if network.config.puzzle_emb_ndim else None
        latents = network.start(weights, size)
        taken = MicroBatch(zeros, zeros, puzzle_rows=rows, latents=latents)
        try:
            mx.eval(compiled[0](learned, taken, latents))
            mx.eval(compiled[1](learned, taken, self.program.training.label_smoothing))
        except (RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise CompilationError(f"The recursion cannot be compiled here: {reason}") from error
        return compiled
