"""The end of training when the primary metric stops improving.

The decision depends on the results of evaluations and on nothing else, and its state is in every checkpoint,
so neither the plan nor an interruption changes where a run ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trm.config import EarlyStoppingConfig
from trm.tasks.metrics import EXACT, gain


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """The value of the primary metric that must be exceeded, and how many evaluations have not done so."""

    best: float | None = None
    waited: int = 0

    def after(self, value: float, settings: EarlyStoppingConfig, metric: str = EXACT) -> EarlyStopping:
        """Return the state after an evaluation.

        Small improvements add up: `best` stays where it is until it is exceeded by `min_delta`.
        """
        if self.best is None or gain(metric, value, self.best) > settings.min_delta:
            return EarlyStopping(best=value)
        return replace(self, waited=self.waited + 1)

    def is_over(self, settings: EarlyStoppingConfig | None) -> bool:
        return settings is not None and self.waited >= settings.patience
