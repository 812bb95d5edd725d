"""An evaluation that all ranks share: each answers some rows of every batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from macbook_optimization.errors import AllocationFailed
from trm.backends.world import World
from trm.batch import Batch
from trm.config import InferenceConfig
from trm.inference.search import AfterStep, Answers, Search
from trm.training.shares import largest_remainder


@dataclass(frozen=True, slots=True)
class SharedSearch:
    """Answers batches as a `Search` does, together with the other ranks.

    `batch_size` returns how many rows this rank may answer at a time; `make_room` lowers it after a failed
    allocation, or raises. `check` is called by all ranks before each batch, and may raise on all of them.
    """

    search: Search
    world: World
    batch_size: Callable[[], int]
    make_room: Callable[[], None]
    check: Callable[[], None]

    @property
    def settings(self) -> InferenceConfig:
        return self.search.settings

    def agreed_size(self) -> int:
        """Return the rows of a batch in which no rank has more than it can answer at a time."""
        shares = self.world.shares
        rows = self.batch_size() * sum(shares) // shares[self.world.rank]
        return max(1, -self.world.agree([-rows])[0])

    def answer(self, batch: Batch, *, probabilities: bool = False, after_step: AfterStep) -> Answers:
        self.check()
        parts = largest_remainder(len(batch), self.world.shares)
        first = sum(parts[: self.world.rank])
        own = np.arange(first, first + parts[self.world.rank])
        answers = _Sums(batch, self.search, probabilities=probabilities)
        while len(own):
            rows = own[: self.batch_size()]
            try:
                found = self.search.answer(
                    batch[rows].trimmed(), probabilities=probabilities, after_step=after_step
                )
            except AllocationFailed:
                self.make_room()
                continue
            answers.add(rows, found)
            own = own[len(rows) :]
        return answers.summed(self.world)


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

    def add(self, rows: np.ndarray[tuple[int], np.dtype[np.int64]], answers: Answers) -> None:
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
