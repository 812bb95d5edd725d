"""What a backend must do.

The seam is the training step, not single operations: arrays of one effective batch go in, numbers come
out, and everything between (cuts, gradients, optimizer, averaged weights) is the backend's own business.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trm.config import ModelConfig, TrainingConfig
from trm.tasks.base import TaskShape


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One effective batch; row i belongs to slot i."""

    inputs: NDArray[np.int64]  # (N, L)
    labels: NDArray[np.int64]  # (N, L), IGNORE_LABEL where nothing is asked
    puzzle_identifiers: NDArray[np.int64]  # (N,)
    fresh: NDArray[np.bool_]  # (N,) slots that start a new example, from the initial latents


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What the schedule decided for this step, and the cut that the plan wants."""

    step: int  # counted from 1
    cycles: int
    learning_rate: float
    puzzle_emb_lr: float
    micro_batch_size: int


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
    steps: NDArray[np.int64]  # (B,) steps really computed


class Answerer(Protocol):
    def answer(
        self,
        inputs: NDArray[np.int64],
        puzzle_identifiers: NDArray[np.int64],
        *,
        depth: int,
        settle: int | None = None,
    ) -> Answers: ...


class Learner(Protocol):
    """The state of training: weights, their average, optimizer moments, carried latents."""

    def step(self, batch: StepBatch, settings: StepSettings, after_cut: Callable[[int], None]) -> StepResult:
        """One update. `after_cut` hears how many slots are done, and may raise: nothing has changed then."""
        ...

    def answerer(self) -> Answerer: ...

    def tensors(self) -> dict[str, dict[str, Any]]:
        """Everything that resuming needs, by file name and tensor name."""
        ...

    def restore(self, tensors: Mapping[str, Mapping[str, Any]]) -> None: ...


class Backend(Protocol):
    def prepare(self, *, threads: int, deterministic: bool) -> None:
        """Settings of the whole process, before the first tensor."""
        ...

    def learner(
        self, model: ModelConfig, training: TrainingConfig, shape: TaskShape, seed: int
    ) -> Learner: ...

    def answerer(
        self, model: ModelConfig, training: TrainingConfig, shape: TaskShape, weights: Mapping[str, Any]
    ) -> Answerer: ...


def load_backend() -> Backend:
    """Imported on demand: torch takes two seconds, and most commands do not need it.

    Threads of GNU OpenMP that wait spin 300,000 rounds before they sleep. Beside one other busy program, that
    made two threads finish 5 to 30 steps where 2,000 rounds finish 68 to 76 (6x6 recipe, 8 s); on quiet cores
    it costs nothing (160 and 176 steps against 150 and 169). It must be set before torch is loaded.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    from trm.backends.pytorch import step

    return step
