"""An evaluation that all ranks share: each answers some rows of every batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from macbook_optimization.errors import AllocationFailed
from trm.arrays import FloatArray, IntArray
from trm.backends.base import LanguageModel
from trm.backends.world import World
from trm.batch import Batch
from trm.config import InferenceConfig
from trm.inference.search import AfterStep, Answers, Search
from trm.training.shares import largest_remainder

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Sharing:
    """The division of the rows of a batch among ranks.

    `batch_size` returns how many rows this rank may answer at a time; `make_room` lowers it after a failed
    allocation, or raises. `check` is called by all ranks before each batch, and may raise on all of them.
    """

    world: World
    batch_size: Callable[[], int]
    make_room: Callable[[], None]
    check: Callable[[], None]

    def agreed_size(self) -> int:
        """Return the rows of a batch in which no rank has more than it can answer at a time."""
        shares = self.world.shares
        rows = self.batch_size() * sum(shares) // shares[self.world.rank]
        return max(1, -self.world.agree([-rows])[0])

    def computed(self, batch: Batch, compute: Callable[[Batch], Found]) -> Iterator[tuple[IntArray, Found]]:
        """Compute this rank's rows of a batch, as many at a time as fit; yield them with the results."""
        self.check()
        parts = largest_remainder(len(batch), self.world.shares)
        first = sum(parts[: self.world.rank])
        own = np.arange(first, first + parts[self.world.rank])
        while len(own):
            rows = own[: self.batch_size()]
            try:
                found = compute(batch[rows])
            except AllocationFailed:
                self.make_room()
                continue
            yield rows, found
            own = own[len(rows) :]


@dataclass(frozen=True, slots=True)
class SharedSearch:
    """Answers batches as a `Search` does, together with the other ranks."""

    search: Search
    sharing: Sharing

    @property
    def settings(self) -> InferenceConfig:
        return self.search.settings

    def answer(self, batch: Batch, *, probabilities: bool = False, after_step: AfterStep) -> Answers:
        def compute(rows: Batch) -> Answers:
            return self.search.answer(rows.trimmed(), probabilities=probabilities, after_step=after_step)

        answers = _Sums(batch, self.search, probabilities=probabilities)
        for rows, found in self.sharing.computed(batch, compute):
            answers.add(rows, found)
        return answers.summed(self.sharing.world)


@dataclass(frozen=True, slots=True)
class SharedLosses:
    """Computes the losses of text as a `LanguageModel` does, together with the other ranks."""

    model: LanguageModel
    sharing: Sharing

    def token_losses(self, batch: Batch) -> FloatArray:
        losses = np.zeros(batch.labels.shape)
        for rows, found in self.sharing.computed(batch, self.model.token_losses):
            losses[rows] = found
        self.sharing.world.sum(losses.reshape(-1))
        return losses


class _Sums:
    """The answers to all rows in one flat array: zeros where another rank answers, so that sums are exact."""

    def __init__(self, batch: Batch, search: Search, *, probabilities: bool) -> None:
        rows, width = batch.inputs.shape
        depth = search.settings.depth
        shapes = {"tokens": (depth, rows, width), "halt_logits": (depth, rows), "steps": (rows,)}
        if probabilities:
            shapes["probabilities"] = (rows, width, search.data.num_outputs)
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        self.flat = np.zeros(sum(sizes), dtype=np.float32)
        parts = np.split(self.flat, np.cumsum(sizes)[:-1])
        self.parts = {
            name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    def add(self, rows: IntArray, answers: Answers) -> None:
        width = answers.tokens.shape[-1]
        self.parts["tokens"][:, rows, :width] = answers.tokens
        self.parts["halt_logits"][:, rows] = answers.halt_logits
        self.parts["steps"][rows] = answers.steps
        if answers.probabilities is not None:
            self.parts["probabilities"][rows, :width] = answers.probabilities

    def summed(self, world: World) -> Answers:
        world.sum(self.flat)
        parts = self.parts
        return Answers(
            tokens=parts["tokens"].astype(np.int32),
            halt_logits=parts["halt_logits"],
            steps=parts["steps"].astype(np.int64),
            probabilities=parts.get("probabilities"),
        )
