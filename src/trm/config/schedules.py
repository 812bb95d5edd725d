"""Sections that change training while it runs: curriculum, phases, and what follows a plateau or ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field, model_validator

from trm.config.values import BelowOne, Count, Fraction, Positive, Rate, Section


class CurriculumConfig(Section):
    """Easy examples first. Training starts with the easiest `share` of the groups and widens whenever enough
    of the recent examples were answered exactly."""

    share: Annotated[Fraction, Field(gt=0)] = 0.2
    """Share of the training groups, easiest first, that training starts with."""
    threshold: Fraction = 0.5
    """Exact accuracy over `every_steps` steps that widens the curriculum."""
    widen: Annotated[Positive, Field(gt=1, le=1000)] = 1.5
    """Factor by which the share grows each time, up to all groups."""
    every_steps: Count = 50
    """Steps between two decisions."""


class PhaseConfig(Section):
    """One phase, an entry of the list. It lasts for `steps` or for a `share` of `training.max_steps`; the
    last phase lasts until the end of training and needs neither."""

    name: Annotated[str, Field(min_length=1, max_length=100)]
    """Name in messages, events and rows."""
    steps: Count | None = None
    """Steps that the phase lasts."""
    share: Annotated[Fraction, Field(gt=0)] | None = None
    """Share of `training.max_steps` that the phase lasts."""
    learning_rate_factor: Annotated[Fraction, Field(gt=0)] = 1.0
    """Factor of the learning rate that warm-up and decay give; both continue across phases."""
    word_dropout: BelowOne | None = None
    """`training.word_dropout` in this phase; null for the recipe's."""
    label_smoothing: BelowOne | None = None
    """`training.label_smoothing` in this phase; null for the recipe's."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.steps is not None and self.share is not None:
            raise ValueError(f"phase {self.name} has both steps and share; it needs one of them")
        return self


def phase_starts(phases: Sequence[PhaseConfig], max_steps: int) -> dict[int, PhaseConfig]:
    """Return the phases by the step after which each one begins, as a schedule."""
    starts: dict[int, PhaseConfig] = {}
    steps = 0
    share = 0.0
    for phase in phases:
        starts[steps + round(share * max_steps)] = phase
        steps += phase.steps or 0
        share += phase.share or 0.0
    return starts


def check_phases(phases: Sequence[PhaseConfig], max_steps: int) -> None:
    """Raise `ValueError` unless every phase has a length and at least one step."""
    names = [phase.name for phase in phases]
    if len(set(names)) < len(names):
        raise ValueError(f"phases must have different names, not {', '.join(names)}")
    for phase in phases[:-1]:
        if phase.steps is None and phase.share is None:
            raise ValueError(f"phase {phase.name} needs steps or share, as it is not the last one")
    total = sum(phase.share or 0.0 for phase in phases)
    if total > 1 + 1e-9:  # of rounding
        raise ValueError(f"the shares of the phases add up to {total:g}, which is more than 1")
    starts = phase_starts(phases, max_steps)
    if len(starts) < len(phases) or max(starts, default=0) >= max_steps:
        begin = ", ".join(f"{phase.name} after step {start}" for start, phase in starts.items())
        raise ValueError(f"every phase must have a step among the {max_steps} of training: {begin}")


class PlateauConfig(Section):
    """A lower learning rate whenever the primary metric stops improving. Only the evaluations every
    `evaluation.every_steps` steps count, so they decide what is learned: `evaluation.every_steps`,
    `evaluation.examples` and `inference` cannot change when such a run is resumed."""

    patience: Count = 3
    """Evaluations in a row without a new best value that lower the learning rate."""
    factor: Rate = 0.5
    """Factor by which the learning rate is lowered each time."""
    min_ratio: Annotated[Fraction, Field(gt=0)] = 0.01
    """Lowest factor of the learning rate that all reductions together may reach."""


class EarlyStoppingConfig(Section):
    """The end of training when the primary metric no longer improves. Only the evaluations every
    `evaluation.every_steps` steps count. The weights of a step do not depend on this section, so it may
    change when a run is resumed."""

    patience: Count = 10
    """Evaluations in a row without an improvement that end training."""
    min_delta: BelowOne = 0.0
    """Amount by which the primary metric must exceed its best value to count as improved; 0.001 is 0.1
    percentage points of an accuracy."""
