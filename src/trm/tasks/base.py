"""The interface of a task: it turns files into token arrays, and answers into something readable.

Training needs a `Task` only. `trm predict` needs an `Interactive` one, and `--png` and `--gif` a `Drawable`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from macbook_optimization.json_types import JsonMapping, JsonObject
from trm.arrays import Float32Array, FloatArray, IntArray
from trm.batch import Batch
from trm.display import Display

if TYPE_CHECKING:
    from trm.tasks.dataset import Split

Progress = Callable[[str, int, int], None]  # what is being done, how much is done, of how much
Options = JsonMapping  # `data.build` of a recipe, which each task validates itself


@dataclass(frozen=True, slots=True)
class GridLayout:
    """All that grid-aware layers may know about a task."""

    rows: int
    columns: int
    box: tuple[int, int] | None = None  # rows and columns of a box, where the grid has boxes


@dataclass(frozen=True, slots=True)
class DataSpec:
    """The facts about a dataset that a model must know."""

    max_len: int
    vocab_size: int
    num_outputs: int  # output vocabulary, or number of classes
    num_puzzle_identifiers: int = 1
    layout: GridLayout | None = None
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerBatch:
    """The final answers to a batch, row by row."""

    tokens: IntArray  # (n, L)
    halt_logits: Float32Array  # (n,) positive where the halting head is confident
    steps: IntArray  # (n,) steps that were computed
    probabilities: Float32Array | None = None  # (n, L, num_outputs), if the scorer needs them
    losses: FloatArray | None = None  # (n, L) of every label, of a decoder


Table = list[list[float]]


@dataclass(frozen=True, slots=True)
class Metrics:
    """The results of an evaluation: named scalars, and tables such as a confusion matrix."""

    scalars: Mapping[str, float]
    tables: Mapping[str, Table] = field(default_factory=dict)


class Scorer(Protocol):
    """Collects the answers of an evaluation. One scorer serves one evaluation."""

    needs_probabilities: bool

    def add(self, batch: Batch, answers: AnswerBatch) -> None:
        """Take in one batch with its labels and the answers to it."""
        ...

    def metrics(self) -> Metrics: ...


@runtime_checkable
class Submittable(Protocol):
    """A scorer whose answers can be written in the format of a competition."""

    def require_all_tests(self, split: Split, limit: int | None) -> None:
        """Raise `DataError` if an evaluation of `limit` examples would leave a test of the competition
        without an answer; None evaluates all examples."""
        ...

    def submission(self) -> Any:
        """Return the answers as JSON-able values; raise `DataError` if a test was not asked."""
        ...

    def unanswered(self) -> int:
        """Return how many tests were asked, but have no answer that could be submitted."""
        ...

    def answered_once(self) -> int:
        """Return how many tests have a single answer, which all attempts repeat."""
        ...


class Task(Protocol):
    """All that training needs."""

    name: str
    num_draws: int  # random numbers per augmented example

    @property
    def primary_metric(self) -> str:
        """Return the name of the scalar that decides which checkpoint is the best."""
        ...

    def build(self, options: Options, directory: Path, progress: Progress, jobs: int = 1) -> None:
        """Build a dataset with this many processes; their number does not change the result."""
        ...

    def check_options(self, options: Options) -> None:
        """Raise `ConfigError` if `build` would not accept these options."""
        ...

    def spec(self, options: Options) -> DataSpec:
        """Return the spec of the dataset that `build` would make."""
        ...

    def complete(self, spec: DataSpec) -> DataSpec:
        """Add what a dataset's files do not say, such as the grid layout.

        Raises `DataError` if a dataset with this spec cannot belong to this task.
        """
        ...

    def augment(self, batch: Batch, draws: FloatArray) -> Batch:
        """Replace each row by a random symmetric copy, chosen by its row of draws from [0, 1)."""
        ...

    def scorer(self, split: Split) -> Scorer:
        """Return a new scorer for answers to this split."""
        ...


@runtime_checkable
class ShowsBuild(Protocol):
    """A task whose `build` has more to say than how much is done."""

    def build_shown(self, options: Options, directory: Path, display: Display, jobs: int = 1) -> JsonObject:
        """Build as `build` does, and return facts about what was built."""
        ...


@runtime_checkable
class MadeFromFiles(Protocol):
    """A task whose `spec` must read the files that `build` reads."""

    def least_spec(self) -> DataSpec:
        """Return the smallest spec that a dataset of this task can have, without reading a file."""
        ...


@runtime_checkable
class HasWords(Protocol):
    """The part of a task that `training.word_dropout` needs."""

    def without_words(self, batch: Batch, draws: FloatArray, share: float) -> Batch:
        """Leave out this share of the words of each row, chosen by its row of draws from [0, 1)."""
        ...


@runtime_checkable
class HasVocabulary(Protocol):
    """A task whose datasets have vocabularies of their own: what `training.initial_weights` needs of it."""

    def vocabulary(self, dataset: Path) -> str | None:
        """Return a digest of a dataset's vocabulary, None if there is none. With another one, the same token
        is another word."""
        ...


@runtime_checkable
class HasWordVectors(Protocol):
    """A task whose tokens are words: what `training.initial_embeddings` needs of it."""

    def word_vectors(self, split: Split, width: int) -> tuple[IntArray, Float32Array]:
        """Return tokens (n,) and vectors (n, width) of length 1, similar for words with similar neighbours.

        Tokens may be left out. The result depends on the split only.
        """
        ...


class Tokenizer(Protocol):
    """A tokenizer: text to tokens, and back."""

    def encode(self, text: str) -> IntArray: ...

    def bytes_of(self, token: int) -> bytes: ...


@runtime_checkable
class Generative(Protocol):
    """A task of text, which needs a decoder (`model.kind: decoder`), and which such a model continues."""

    def tokenizer(self, dataset: Path) -> Tokenizer:
        """Read the vocabulary of a dataset."""
        ...


@dataclass(frozen=True, slots=True)
class Question:
    """One input of `trm predict`, as tokens without padding."""

    tokens: IntArray  # (L,), at most `DataSpec.max_len`
    identifier: int = 0
    label: IntArray | None = None  # the right answer, where it is known


@runtime_checkable
class Interactive(Protocol):
    """The part of a task that `trm predict` needs."""

    verified: str  # what can be said of an answer in which `verify` finds no mistake
    one_question_per_line: bool  # whether standard input may hold several questions

    def read(self, source: bytes, spec: DataSpec) -> Question:
        """Parse a question that a person typed, or the content of a file; `DataError` says what is wrong."""
        ...

    def text(self, tokens: IntArray) -> str:
        """Return tokens as one line of text that `read` accepts."""
        ...

    def show(self, question: IntArray, answer: IntArray, before: IntArray | None, color: bool) -> str:
        """Render the answer as text, with givens marked, and what changed since `before`."""
        ...

    def legend(self, shown: str, changes: bool, color: bool) -> str:
        """Explain the marks in what `show` returned; `changes`: those of changes, too."""
        ...

    def verify(self, question: IntArray, answer: IntArray, label: IntArray | None = None) -> str | None:
        """Return the first mistake, or None. A task without rules of its own compares with the label."""
        ...


Color = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Tile:
    """One cell of a picture."""

    fill: Color
    text: str = ""
    ink: Color = (0, 0, 0)
    wrong: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    tiles: list[list[Tile]]
    box: tuple[int, int] = (0, 0)  # rows and columns between heavy lines; 0 for none


@runtime_checkable
class Drawable(Protocol):
    """The part of a task that `--png` and `--gif` need: grids only."""

    def solution(self, question: IntArray) -> IntArray | None:
        """Return the right answer if the task can compute it."""
        ...

    def picture(self, question: IntArray, answer: IntArray, label: IntArray | None) -> Picture:
        """Draw an answer; cells that differ from the label are marked wrong if the label is known."""
        ...
