"""Test-time search on top of single steps: early exit, retries, and guess-and-verify. NumPy only.

- Early exit: a row stops when its answer has converged or, with `halt`, when the halting head is confident.
- Retries: where the halting head is not confident in the first answer, more attempts are made with noise in
  the initial latents or with guesses, and the most confident answer wins.
- Guess-and-verify: an attempt fixes some of its own predictions as givens, one after the other. Its answer
  counts only if the halting head is confident, and if it stays stable once the guesses are removed. No rule
  of the task is used.

The answer to a row does not depend on the other rows of its batch, except for rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from macbook_optimization.errors import ConfigError
from trm.arrays import BoolArray, Float32Array, FloatArray, IntArray
from trm.backends.base import Predictor
from trm.batch import Batch
from trm.config import InferenceConfig
from trm.tasks.base import AnswerBatch, DataSpec

AfterStep: TypeAlias = Callable[[int, int], None]  # the attempt, 0 is the first, and its step, from 1

_NEGLIGIBLE = 1e-9  # a weight below comes from rounding, or from a prediction that is certainly wrong


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers after each of `depth` steps; a row that stopped earlier repeats its last answer."""

    tokens: NDArray[np.int32]  # (depth, n, L)
    halt_logits: Float32Array  # (depth, n)
    steps: IntArray  # (n,) steps that were computed, in the attempt that counts
    probabilities: Float32Array | None = None  # (n, L, num_outputs) after the last step, if requested

    def final(self) -> AnswerBatch:
        return AnswerBatch(
            self.tokens[-1].astype(np.int64), self.halt_logits[-1], self.steps, self.probabilities
        )

    def replace_where_better(self, rows: IntArray, others: Answers) -> None:
        """Take the other answers to these rows where the halting head is more confident in them."""
        better = others.halt_logits[-1] > self.halt_logits[-1, rows]
        changed = rows[better]
        self.tokens[:, changed] = others.tokens[:, better]
        self.halt_logits[:, changed] = others.halt_logits[:, better]
        self.steps[changed] = others.steps[better]
        if self.probabilities is not None and others.probabilities is not None:
            self.probabilities[changed] = others.probabilities[better]


@dataclass(frozen=True, slots=True)
class Search:
    """A predictor and the settings to apply it with."""

    predictor: Predictor
    settings: InferenceConfig
    data: DataSpec

    def __post_init__(self) -> None:
        if self.settings.guesses and self.data.num_outputs != self.data.vocab_size:
            raise ConfigError(
                "inference.guesses copies predictions into the input, so both must share one vocabulary; "
                f"this dataset has {self.data.vocab_size} input tokens and {self.data.num_outputs} outputs"
            )

    def answer(
        self,
        batch: Batch,
        *,
        probabilities: bool = False,
        after_step: AfterStep = lambda attempt, step: None,
    ) -> Answers:
        """Answer a batch. `after_step` is called after every step of every attempt, and may raise to stop."""
        first = _Attempt.first(batch, self.settings)
        answers, stopped = self._attempt(first, probabilities, after_step)
        unconfident = answers.halt_logits[-1] < 0
        if self.settings.converged_after or self.settings.halt:
            unconfident |= ~stopped
        rows = np.flatnonzero(unconfident)
        if len(rows):
            kept = (answers.tokens[-1] == batch.inputs)[rows]
            for number in range(1, self.settings.retries + 1):
                retry = _Attempt.retry(batch[rows], self.settings, number, kept)
                others, _ = self._attempt(retry, probabilities, after_step)
                answers.replace_where_better(rows, others)
        return answers

    def _attempt(
        self, attempt: _Attempt, probabilities: bool, after_step: AfterStep
    ) -> tuple[Answers, BoolArray]:
        """Return the answers, and which rows stopped by themselves."""
        depth = self.settings.depth
        batch = attempt.batch
        answers = Answers(
            tokens=np.zeros((depth, *batch.inputs.shape), dtype=np.int32),
            halt_logits=np.zeros((depth, len(batch)), dtype=np.float32),
            steps=np.zeros(len(batch), dtype=np.int64),
            probabilities=self._no_probabilities(batch) if probabilities else None,
        )
        noise = self.settings.noise if attempt.number else 0.0
        self.predictor.begin(batch, noise, attempt.number)
        active = np.arange(len(batch))
        for step in range(depth):
            guesses_now = attempt.guesses_after(step + 1)
            output = self.predictor.advance(
                active, attempt.inputs[active], probabilities=probabilities or guesses_now
            )
            if step:
                answers.tokens[step] = answers.tokens[step - 1]
                answers.halt_logits[step] = answers.halt_logits[step - 1]
            answers.tokens[step, active] = output.tokens
            answers.halt_logits[step, active] = output.halt_logits
            answers.steps[active] += 1
            if answers.probabilities is not None and output.probabilities is not None:
                answers.probabilities[active] = output.probabilities
            if step:
                attempt.compare(active, (output.tokens == answers.tokens[step - 1, active]).all(-1))
            confident = attempt.keeps_givens(active, output.tokens) & (output.halt_logits >= 0)
            done = attempt.finished(active, confident, output.probabilities if guesses_now else None)
            active = active[~done]
            after_step(attempt.number, step + 1)
            if not len(active):
                answers.tokens[step + 1 :] = answers.tokens[step]
                answers.halt_logits[step + 1 :] = answers.halt_logits[step]
                break
        stopped = np.ones(len(batch), dtype=bool)
        stopped[active] = False
        if attempt.num_guesses:
            answers.halt_logits[:, ~stopped] = -np.inf  # an attempt without a verified answer
        return answers, stopped

    def _no_probabilities(self, batch: Batch) -> Float32Array:
        return np.zeros((*batch.inputs.shape, self.data.num_outputs), dtype=np.float32)


@dataclass
class _Attempt:
    """The inputs of one attempt, guesses included, and when a row is finished."""

    batch: Batch
    settings: InferenceConfig
    number: int = 0  # 0 is the first attempt, without noise and guesses
    kept: BoolArray | None = None  # (n, L) givens that the first answer kept, and guesses must keep too
    num_guesses: int = 0
    inputs: IntArray = field(init=False)
    guessed: BoolArray = field(init=False)  # (n,) rows whose inputs contain guesses
    unchanged: IntArray = field(init=False)  # (n,) steps for which the answer has not changed
    rounds: int = 0  # of guesses so far

    @classmethod
    def first(cls, batch: Batch, settings: InferenceConfig) -> _Attempt:
        return cls(batch, settings)

    @classmethod
    def retry(cls, batch: Batch, settings: InferenceConfig, number: int, kept: BoolArray) -> _Attempt:
        return cls(batch, settings, number, kept, settings.guesses)

    def __post_init__(self) -> None:
        self.inputs = self.batch.inputs.copy() if self.num_guesses else self.batch.inputs
        self.guessed = np.zeros(len(self.batch), dtype=bool)
        self.unchanged = np.zeros(len(self.batch), dtype=np.int64)

    def guesses_after(self, step: int) -> bool:
        return bool(self.num_guesses) and step in self.settings.guess_steps

    def compare(self, rows: IntArray, same: BoolArray) -> None:
        self.unchanged[rows] = np.where(same, self.unchanged[rows] + 1, 0)

    def keeps_givens(self, rows: IntArray, tokens: IntArray) -> BoolArray:
        if self.kept is None or not self.num_guesses:
            return np.ones(len(rows), dtype=bool)
        broken = (tokens != self.batch.inputs[rows]) & self.kept[rows]
        return np.asarray(~broken.any(-1))

    def finished(self, rows: IntArray, confident: BoolArray, probabilities: Float32Array | None) -> BoolArray:
        """Return which of these rows stop here. With probabilities, the others may guess."""
        settings = self.settings
        unchanged = self.unchanged[rows]
        if not self.num_guesses:
            converged = unchanged >= (settings.converged_after or settings.depth)
            return converged | confident if settings.halt else converged
        guessed = self.guessed[rows]  # a copy
        stable = confident & (unchanged >= settings.stable_steps)
        self._remove_guesses(rows[stable & guessed])
        if probabilities is not None:
            exponentials = self._chances(probabilities.shape[1:])
            unsure = ~confident | (guessed & ~stable)
            self._guess(rows[unsure], probabilities[unsure], exponentials)
        return np.asarray(stable & ~guessed)

    def _chances(self, shape: tuple[int, ...]) -> FloatArray:
        """Draw (L, V) numbers for one round of guesses.

        They serve all rows alike, and a wider batch only has more of them: no row depends on the others.
        """
        self.rounds += 1
        key = np.array([self.number, self.rounds], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key)).standard_exponential(shape)

    def _remove_guesses(self, rows: IntArray) -> None:
        self.inputs[rows] = self.batch.inputs[rows]
        self.guessed[rows] = False
        self.unchanged[rows] = 0

    def _guess(self, rows: IntArray, probabilities: Float32Array, exponentials: FloatArray) -> None:
        padding = self.batch.padding
        if padding is not None:
            probabilities = np.where(padding[rows][..., None], 0.0, probabilities)
        self.inputs[rows] = with_a_guess(self.inputs[rows], probabilities, exponentials)
        self.guessed[rows] = True


def with_a_guess(inputs: IntArray, probabilities: NDArray[np.floating], exponentials: FloatArray) -> IntArray:
    """Fix one more prediction in each row, drawn with the weight p^2 (1 - p).

    The weight prefers likely predictions, but not certain ones, which would add nothing. `exponentials`
    (L, V) come from an exponential distribution and are the same for all rows.
    """
    weights = np.square(probabilities) * (1 - probabilities)
    np.put_along_axis(weights, inputs[..., None], 0, axis=-1)
    race = np.where(weights < _NEGLIGIBLE, 0, weights / exponentials).reshape(len(inputs), exponentials.size)
    chosen = race.argmax(1)
    rows = np.flatnonzero(race[np.arange(len(race)), chosen] > 0)
    position, token = np.divmod(chosen[rows], weights.shape[-1])
    guessed = inputs.copy()
    guessed[rows, position] = token
    return guessed
