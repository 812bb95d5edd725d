"""Gradients that leave their parameter as soon as the backward pass has completed them.

Kept together, the gradients of a model take as much memory as its weights. Here each is either added to a
float32 sum over micro-batches, because sums of many small bfloat16 numbers lose most of them, or used for the
update immediately. The former is part of the message if there are other processes. The latter needs no memory
for gradients, but it cannot wait for other micro-batches, for the norm of all gradients, or for others.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from macbook_optimization.errors import ConfigError
from trm.backends.pytorch.message import StepMessage
from trm.backends.pytorch.optim import AdamW, Update, clip
from trm.plan import Execution


class GradientStream(Protocol):
    has_updated: bool  # whether a parameter has changed in this step

    def begin(self, step: int, learning_rate: float) -> None:
        """Start a step, before its first backward pass."""
        ...

    def take(self, name: str, gradient: Tensor) -> None:
        """Receive the gradient of a parameter, once per micro-batch."""
        ...

    def norm(self, limit: float | None) -> float:
        """Return the norm of all gradients, after scaling them down to the limit if there is one."""
        ...

    def update(self) -> None:
        """Change the parameters, unless that has happened."""
        ...


def gradient_stream(
    optimizer: AdamW, execution: Execution, message: StepMessage | None
) -> GradientStream | None:
    """Return what takes the gradients out of the parameters, or None if they stay there.

    `message` is what this process exchanges with others, if there are any.
    """
    in_backward = execution.optimizer_in_backward
    in_bfloat16 = any(each.dtype == torch.bfloat16 for each in optimizer.parameters.values())
    if not in_backward and not in_bfloat16:
        return None
    if in_backward and message is not None:
        raise ConfigError("plan.optimizer_in_backward cannot be combined with training by several processes.")
    stream: GradientStream
    if message is not None:
        stream = SumsInMessage(optimizer, message)
    else:
        stream = (UpdateInBackward if in_backward else Float32Sums)(optimizer)
    _connect(stream, optimizer)
    return stream


def _connect(stream: GradientStream, optimizer: AdamW) -> None:
    """Pass every gradient that a backward pass completes to the stream."""

    def completed(name: str, parameter: Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is not None:
            stream.take(name, gradient)

    for name, parameter in optimizer.parameters.items():
        hook = partial(completed, name)
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


class Float32Sums:
    """The sum of the gradients of all micro-batches, in float32 whatever the precision of the weights."""

    has_updated = False  # until the step is complete

    def __init__(self, optimizer: AdamW) -> None:
        self.optimizer = optimizer
        self.sums: dict[str, Tensor] = {}

    def begin(self, step: int, learning_rate: float) -> None:
        self.sums = {}
        self.step = step
        self.learning_rate = learning_rate

    @torch.no_grad()
    def take(self, name: str, gradient: Tensor) -> None:
        if name in self.sums:
            self.sums[name].add_(gradient)
        else:
            self.sums[name] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))

    def norm(self, limit: float | None) -> float:
        norm = math.sqrt(sum(float(torch.linalg.vector_norm(each)) ** 2 for each in self.sums.values()))
        if limit is not None and norm > limit:
            for each in self.sums.values():
                each.mul_(limit / (norm + 1e-6))
        return norm

    def update(self) -> None:
        while self.sums:
            name, gradient = self.sums.popitem()
            self.optimizer.update_one(Update(name, gradient, self.step, self.learning_rate))


class SumsInMessage:
    """The same sums as views of the message, which adds those of all ranks before the update."""

    has_updated = False  # until the step is complete

    def __init__(self, optimizer: AdamW, message: StepMessage) -> None:
        self.optimizer = optimizer
        self.message = message
        self.places = {name: place for place, name in enumerate(optimizer.parameters)}

    def begin(self, step: int, learning_rate: float) -> None:
        self.step = step
        self.learning_rate = learning_rate

    @torch.no_grad()
    def take(self, name: str, gradient: Tensor) -> None:
        self.message.add_weight(self.places[name], gradient)

    def norm(self, limit: float | None) -> float:
        known = zip(self.message.weights, self.message.has_gradient, strict=True)
        return clip([gradient for gradient, is_known in known if is_known], limit)

    def update(self) -> None:
        for name, place in self.places.items():
            if self.message.has_gradient[place]:
                gradient = self.message.weights[place]
                self.optimizer.update_one(Update(name, gradient, self.step, self.learning_rate))


class UpdateInBackward:
    """Changes each parameter as soon as its gradient is known; one that is not finite is skipped."""

    def __init__(self, optimizer: AdamW) -> None:
        self.optimizer = optimizer
        self.square = 0.0
        self.has_updated = False

    def begin(self, step: int, learning_rate: float) -> None:
        self.square = 0.0
        self.has_updated = False
        self.step = step
        self.learning_rate = learning_rate

    def take(self, name: str, gradient: Tensor) -> None:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        norm = float(torch.linalg.vector_norm(gradient, dtype=wide))
        self.square += norm**2
        if math.isfinite(norm):
            self.has_updated = True
            self.optimizer.update_one(Update(name, gradient, self.step, self.learning_rate))

    def norm(self, limit: float | None) -> float:
        return math.sqrt(self.square) if math.isfinite(self.square) else math.nan

    def update(self) -> None:
        return None
