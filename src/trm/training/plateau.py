"""A lower learning rate when the primary metric stops improving.

The decision depends on the results of evaluations and on nothing else, and its state is in every checkpoint,
so an interruption changes nothing. `learning_rate_scale` of a run is a different factor: a roll-back halves
it and keeps it, while this state returns to what the checkpoint had.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trm.config import PlateauConfig
from trm.tasks.metrics import EXACT, gain


@dataclass(frozen=True, slots=True)
class Plateau:
    """The best value of the primary metric, how long ago it was, and the resulting factor."""

    best: float | None = None
    waited: int = 0  # evaluations since the best one, or since the last reduction
    scale: float = 1.0  # of the learning rate

    def after(self, value: float, settings: PlateauConfig, metric: str = EXACT) -> Plateau:
        """Return the state after an evaluation."""
        if self.best is None or gain(metric, value, self.best) > 0:
            return replace(self, best=value, waited=0)
        if self.waited + 1 < settings.patience:
            return replace(self, waited=self.waited + 1)
        return replace(self, waited=0, scale=max(settings.min_ratio, self.scale * settings.factor))
