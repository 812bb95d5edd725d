"""The interface of a backend.

The interface is the training step, not single operations: the arrays of one effective batch go in, numbers
come out, and everything between (micro-batches, gradients, optimizer, moving average) belongs to the backend.
Two values cross it: `Program` says what is computed, `Execution` says how.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from numpy.typing import NDArray

from macbook_optimization.errors import ConfigError, LaptopError
from macbook_optimization.json_types import JsonObject
from macbook_optimization.memory_management import MemoryModel
from trm.arrays import BoolArray, Float32Array, FloatArray, IntArray
from trm.backends.world import Address, GuestMeeting, HostMeeting, World
from trm.backends.world import SingleProcess as SingleProcess
from trm.batch import Batch, exact_rows
from trm.config import AnyModelConfig, RunConfig, TrainingConfig, did_you_mean
from trm.plan import Execution
from trm.tasks.base import DataSpec

EXCHANGE = "exchange"  # what a step spends on the message between ranks, and on waiting for slower ones
Weights: TypeAlias = dict[str, Any]  # name -> tensor of the backend; predictors take NumPy arrays as well
TensorGroups: TypeAlias = dict[str, Weights]  # file name of a checkpoint -> its tensors


@dataclass(frozen=True, slots=True)
class Program:
    """The computation: model, training and data."""

    model: AnyModelConfig
    training: TrainingConfig  # objective and optimizer
    data: DataSpec
    seed: int = 0

    @classmethod
    def of(cls, config: RunConfig, data: DataSpec) -> Program:
        return cls(config.model, config.training, data, config.seed)

    @property
    def num_slots(self) -> int:
        """Slots of all ranks: the one divisor of the loss."""
        return self.training.effective_batch_size


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The decisions of the schedule for this step."""

    step: int  # counted from 1
    cycles: int
    learning_rate: float
    puzzle_emb_lr: float
    label_smoothing: float | None = None  # None: the recipe's

    def smoothing(self, training: TrainingConfig) -> float:
        return training.label_smoothing if self.label_smoothing is None else self.label_smoothing


@dataclass(frozen=True, slots=True)
class StepResult:
    loss: float  # mean over the slots of all ranks
    grad_norm: float
    token_accuracy: float
    exact: BoolArray  # (N,) per slot, of all ranks
    num_exact: int  # slots of all ranks that were answered exactly
    halt_margins: Float32Array  # (N,) positive where the slot wants to halt
    seconds: Mapping[str, float] = field(default_factory=dict)  # of forward, backward, optimizer, exchange

    @classmethod
    def of(
        cls, loss: float, grad_norm: float, per_slot: Sequence[NDArray[Any]], seconds: Mapping[str, float]
    ) -> StepResult:
        """Return the result of a step. `per_slot`: right tokens, labelled tokens and halting margins."""
        correct, labelled, halt_margins = per_slot
        exact = exact_rows(correct, labelled)
        token_accuracy = float(correct.sum()) / max(1.0, float(labelled.sum()))
        return cls(loss, grad_norm, token_accuracy, exact, int(exact.sum()), halt_margins, seconds)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The answers of some rows after one more supervision step."""

    tokens: IntArray  # (n, L); PAD_TOKEN beyond a row's length
    halt_logits: Float32Array  # (n,)
    probabilities: Float32Array | None  # (n, L, num_outputs), if requested


class Predictor(Protocol):
    """The recursion without gradients, step by step; `trm.inference.search` decides what follows."""

    def begin(self, batch: Batch, noise: float = 0.0, noise_seed: int = 0) -> None:
        """Start from the initial latents, with the same noise for every row if there is any."""
        ...

    def advance(self, rows: IntArray, inputs: IntArray, *, probabilities: bool = False) -> StepOutput:
        """Take these rows of the batch through one more step, with these inputs.

        Rows are in ascending order, and a subset of those of the previous call.
        """
        ...


class LanguageModel(Protocol):
    """A decoder without gradients: the loss of given text, and the next token of a text that grows."""

    def token_losses(self, batch: Batch) -> FloatArray:
        """Return the loss of every label, (n, L); 0 where there is none."""
        ...

    def begin(self, tokens: IntArray) -> Float32Array:
        """Start a text with at most `max_len` of these tokens, and return the logits of the next one."""
        ...

    def append(self, token: int) -> Float32Array:
        """Add a token, and return the logits of the next one."""
        ...


class Learner(Protocol):
    """The state of training: weights, their moving average, optimizer moments, carried latents."""

    def step(self, batch: Batch, settings: StepSettings, next_size: Callable[[int], int]) -> StepResult:
        """Make one update.

        `batch` has the rows of this rank's slots. `next_size` receives the number of slots already computed
        and returns how many to compute next. It may raise; the state is then unchanged, and the other ranks
        raise `StepAbandoned`.
        """
        ...

    def reconfigure(self, execution: Execution) -> None:
        """Compute differently from the next step on: threads, workers, checkpointing, compilation.

        Compiling takes seconds to minutes; `CompilationError` leaves the execution as it was.
        """
        ...

    def predictor(self) -> Predictor:
        """Return the recursion without gradients; a decoder has none."""
        ...

    def language_model(self) -> LanguageModel:
        """Return the decoder without gradients; only `model.kind: decoder` has one."""
        ...

    def set_embeddings(self, tokens: IntArray, vectors: Float32Array) -> None:
        """Replace the embeddings of these tokens, in the weights and in their moving average."""
        ...

    def state(self) -> TensorGroups:
        """Return everything that resuming needs, by file name and tensor name; whole only at the writer.

        All ranks call this and the following methods together.
        """
        ...

    def load_state(self, groups: TensorGroups) -> None:
        """Restore the state from what the writer passes. Groups are removed from the mapping one by one, as
        they occupy memory."""
        ...

    def digest(self) -> str:
        """Return a sha256 of the weights of this rank, which those of all ranks should equal."""
        ...

    def copy_from_writer(self) -> None:
        """Replace weights, moments and moving average by those of the writer."""
        ...

    def message_seconds(self) -> float:
        """Exchange a message as large as that of a step, and return how long it took."""
        ...


class Span(NamedTuple):
    """An operation, or a phase around operations. Times are in microseconds of one clock for all threads."""

    name: str
    thread: int
    start: float
    end: float


class Allocation(NamedTuple):
    """Memory that was allocated or, if `num_bytes` is negative, freed."""

    time: float  # in microseconds, as those of spans
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Recording:
    """The activity of every thread that computed while steps were recorded."""

    spans: list[Span]
    allocations: list[Allocation]


class StepRecorder(Protocol):
    """Records steps of one learner. Recording slows them down and changes no result."""

    def start(self) -> None: ...

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Mark what this thread does inside. The learner marks forward, backward and optimizer itself."""
        ...

    def stop(self, trace: Path | None) -> Recording:
        """Stop recording, and write a trace that Perfetto and chrome://tracing open."""
        ...


class Backend(Protocol):
    """A library that computes: a module with these functions."""

    def devices(self) -> tuple[str, ...]:
        """List the devices that work on this machine."""
        ...

    def prepare(self, execution: Execution) -> None:
        """Apply settings of the whole process, before the first tensor."""
        ...

    def warm_up(self) -> None:
        """Load what every process loads that computes anything at all."""
        ...

    def learner(self, program: Program, execution: Execution, world: World) -> Learner: ...

    def host_meeting(
        self, address: Address, descriptor: int, host: str, timeout_seconds: float, facts: JsonObject
    ) -> HostMeeting:
        """Let other machines find this one. `descriptor` is a socket that listens at the address; `facts` is
        what they must know to prepare."""
        ...

    def guest_meeting(self, address: Address, host: str, timeout_seconds: float, local: str) -> GuestMeeting:
        """Connect to a host; raise `PeerLost` if it does not answer."""
        ...

    def predictor(self, program: Program, execution: Execution, weights: Weights) -> Predictor: ...

    def language_model(self, program: Program, execution: Execution, weights: Weights) -> LanguageModel: ...

    def to_array(self, tensor: Any) -> NDArray[Any]:
        """Return a tensor of this backend in NumPy, in float32 where NumPy lacks the precision."""
        ...

    def recorder(self, learner: Learner) -> StepRecorder:
        """Return what records the steps of this learner, for a profile."""
        ...

    def held_bytes(self, execution: Execution) -> int:
        """Return what the driver of a GPU holds for this process. On the CPU, resident memory is all."""
        ...

    def release_memory(self, execution: Execution) -> int:
        """Return memory that is kept for speed only, when the machine is short of it: how many bytes."""
        ...

    def peak_bytes(self, execution: Execution) -> int:
        """Return the most memory that computing has occupied so far in this process."""
        ...

    def state_bytes(self, program: Program) -> int:
        """Estimate what a run keeps in memory, without examples and without allocating it."""
        ...

    def estimate(self, program: Program, execution: Execution) -> MemoryModel:
        """Estimate what a step adds to an empty process, without allocating it."""
        ...


_BACKENDS = {"pytorch": "trm.backends.pytorch", "mlx": "trm.backends.mlx"}
LIBRARIES = {"pytorch": "torch", "mlx": "mlx"}  # what a backend computes with
_INSTALLED_BY = {"mlx": "-e '.[mlx]'"}  # what pip installs a backend from; others come with the package


def is_installed(backend: str) -> bool:
    """Return whether the library of a backend is installed, without importing it.

    A directory of the same name is not enough: `mlx` is a namespace, which other packages add to.
    """
    try:
        return backend in LIBRARIES and bool(importlib.metadata.version(LIBRARIES[backend]))
    except importlib.metadata.PackageNotFoundError:
        return False


def tensor_library(backend: str) -> str:
    """Return the library, as safetensors names it, whose tensors a backend loads without converting them."""
    return "mlx" if backend == "mlx" else "torch"


def load_backend(execution: Execution) -> Backend:
    """Import a backend by name, and check its device. Torch takes two seconds, so this happens on demand."""
    if execution.backend not in _BACKENDS:
        raise ConfigError(
            f"There is no backend {execution.backend!r}{did_you_mean(execution.backend, _BACKENDS)}",
            hint=f"Set plan.backend to one of: {', '.join(_BACKENDS)}",
        )
    try:
        backend = cast(Backend, importlib.import_module(_BACKENDS[execution.backend]))
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        # Other errors of the core library are those of an import that ran out of memory.
        if not missing and (execution.backend not in _INSTALLED_BY or "map segment" in str(error)):
            raise
        raise LaptopError(
            f"The Python package {error.name} is missing."
            if missing
            else f"The backend {execution.backend} cannot be loaded: {error}",
            hint="Install it from the project's directory: python -m pip install -c constraints/dev.txt "
            + _INSTALLED_BY.get(execution.backend, "-e ."),
        ) from error
    if execution.device not in backend.devices():
        raise ConfigError(
            f"The backend {execution.backend} has no device {execution.device!r} here",
            hint=f"Set plan.device to one of: {', '.join(backend.devices())}",
        )
    return backend
