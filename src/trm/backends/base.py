"""What a backend must do.

The seam is the training step, not single operations: arrays of one effective batch go in, numbers come
out, and everything between (cuts, gradients, optimizer, averaged weights) is the backend's own business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from macbook_optimization.errors import LaptopError
from macbook_optimization.memory_management import MemoryModel
from macbook_optimization.training_config_adapter import Checkpointing
from trm.config import EvaluationConfig, ModelConfig, TrainingConfig
from trm.tasks.base import TaskShape


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One effective batch; row i belongs to slot i."""

    inputs: NDArray[np.int64]  # (N, L)
    labels: NDArray[np.int64]  # (N, L), IGNORE_LABEL where nothing is asked
    puzzle_identifiers: NDArray[np.int64]  # (N,)
    fresh: NDArray[np.bool_]  # (N,) slots that start a new example, from the initial latents
    noise_seeds: NDArray[np.int64] | None = None  # (N,) each decides the noise in its slot's initial latents

    def first(self, count: int) -> StepBatch:
        """Of these slots only."""
        return StepBatch(
            self.inputs[:count],
            self.labels[:count],
            self.puzzle_identifiers[:count],
            self.fresh[:count],
            None if self.noise_seeds is None else self.noise_seeds[:count],
        )


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What the schedule decided for this step."""

    step: int  # counted from 1
    cycles: int
    learning_rate: float
    puzzle_emb_lr: float


@dataclass(frozen=True, slots=True)
class StepResult:
    loss: float
    grad_norm: float
    token_accuracy: float
    exact: NDArray[np.bool_]  # (N,)
    halt_margins: NDArray[np.float32]  # (N,), positive where the slot wants to halt


@dataclass(frozen=True, slots=True)
class Answers:
    """What the model answered after each of `depth` steps; a puzzle that settled keeps its answer."""

    tokens: NDArray[np.int32]  # (depth, B, L)
    halt_logits: NDArray[np.float32]  # (depth, B)
    steps: NDArray[np.int64]  # (B,) steps really computed, in the try that counts

    def reconsider(self, puzzles: NDArray[np.int64], others: Answers) -> None:
        """Takes the other answer to each of these puzzles if the halting head believes in it more."""
        rather = others.halt_logits[-1] > self.halt_logits[-1, puzzles]
        changed = puzzles[rather]
        self.tokens[:, changed] = others.tokens[:, rather]
        self.halt_logits[:, changed] = others.halt_logits[:, rather]
        self.steps[changed] = others.steps[rather]


class Answerer(Protocol):
    def answer(
        self,
        inputs: NDArray[np.int64],
        puzzle_identifiers: NDArray[np.int64],
        thinking: EvaluationConfig,
    ) -> Answers:
        """A puzzle leaves the batch, and keeps its answer, when that has stood for `settle` steps or, with
        `halt`, when the halting head believes in it. If the head does not, or the puzzle never left although
        it might have, there are more `tries`, all of which are made: of those the one counts that the head
        believes in most. They begin with latents that are `noise` apart.

        A try with `guesses` takes one of its own beliefs for given after each of `guess_moments`. It has an
        answer only if that stands, and is believed in, and then stands again when the guesses are taken back;
        there it leaves."""
        ...


class Learner(Protocol):
    """The state of training: weights, their average, optimizer moments, carried latents."""

    def step(self, batch: StepBatch, settings: StepSettings, next_cut: Callable[[int], int]) -> StepResult:
        """One update. `next_cut` hears how many slots are done and says how many come next; it may raise,
        and nothing has changed then. It is not asked after the last slot."""
        ...

    def set_lanes(self, count: int) -> None:
        """From now on, of the threads that the backend was prepared for."""
        ...

    def compile(self, micro_batch_size: int | None) -> None:
        """Compiles for cuts of this size, which takes seconds to a minute; None goes back to what it was.
        Raises CompilationError, and nothing has changed then."""
        ...

    def answerer(self) -> Answerer: ...

    def tensors(self) -> dict[str, dict[str, Any]]:
        """Everything that resuming needs, by file name and tensor name."""
        ...

    def restore(self, tensors: dict[str, dict[str, Any]]) -> None:
        """Takes the groups out of `tensors` one by one: files that were read count as memory while held."""
        ...


class Backend(Protocol):
    def warm_up(self) -> None:
        """Takes what every process takes that computes anything at all."""
        ...

    def prepare(self, *, threads: int, deterministic: bool) -> None:
        """Settings of the whole process, before the first tensor."""
        ...

    def learner(
        self,
        model: ModelConfig,
        training: TrainingConfig,
        shape: TaskShape,
        seed: int,
        gradient_checkpointing: Checkpointing = "none",
        lanes: int = 1,
    ) -> Learner:
        """`lanes` pieces of a step are computed side by side, each with its share of the threads."""
        ...

    def state_bytes(self, model: ModelConfig, training: TrainingConfig, shape: TaskShape) -> int:
        """What a run should keep in memory, worked out without taking it, and without the examples."""
        ...

    def estimate_memory(
        self,
        model: ModelConfig,
        training: TrainingConfig,
        shape: TaskShape,
        gradient_checkpointing: Checkpointing = "none",
    ) -> MemoryModel:
        """What a step should take on top of an empty process, worked out without taking it."""
        ...

    def answerer(
        self,
        model: ModelConfig,
        training: TrainingConfig,
        shape: TaskShape,
        weights: Mapping[str, Any],
        lanes: int = 1,
    ) -> Answerer: ...


def load_backend() -> Backend:
    """Imported on demand: torch takes two seconds, and most commands do not need it."""
    try:
        from trm.backends import pytorch
    except ModuleNotFoundError as error:
        raise LaptopError(
            f"The Python package {error.name} is missing.",
            hint="Install it from the project's directory: python -m pip install -c constraints/dev.txt -e .",
        ) from error
    return pytorch
