"""The section of a recipe that says how a trained model is applied."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from trm.config.values import Count, CountOrZero, PositiveOrZero, Section


class InferenceConfig(Section):
    """Settings for applying a trained model; `trm eval` and `trm predict` read them too."""

    depth: Count = 16
    """Maximum number of supervision steps per example (single recursions after terminal supervision)."""
    converged_after: Count | None = None
    """Stop an example when its answer has not changed for this many steps; null to use the full depth."""
    halt: bool = False
    """Stop an example when the halting head is confident."""
    retries: CountOrZero = 0
    """Retry up to this many times when the halting head is not confident; keep the most confident answer."""
    noise: Annotated[PositiveOrZero, Field(le=100)] = 0.0
    """Standard deviation of noise added to the initial latents of every retry."""
    guesses: CountOrZero = 0
    """Per retry, fix up to this many of the model's own predictions as givens; the answer must be stable
    again without them (guess-and-verify)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.retries and not (self.noise or self.guesses):
            raise ValueError("retries are all the same without noise or guesses")
        if self.guesses and not self.retries:
            raise ValueError("guesses are made in retries only, so retries must be 1 or more")
        if self.guesses and not self.guess_steps:
            raise ValueError(f"guesses need a depth of more than {2 * self.stable_steps + 1} steps")
        return self

    @property
    def stable_steps(self) -> int:
        """Steps for which an answer found by guessing must not change."""
        return self.converged_after or 2

    @property
    def guess_steps(self) -> range:
        """The steps after which a guess is made, counted from 1.

        They leave time for the answer to become stable after the last guess, and again without guesses.
        """
        last = self.depth - (2 * self.stable_steps + 1)
        every = max(1, last // max(1, self.guesses))
        return range(every, min(last, self.guesses * every) + 1, every)
