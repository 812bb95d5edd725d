"""Facts that all candidates of a search share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trm.config import RunConfig
from trm.tasks.base import DataSpec
from trm.tuning.holdout import ChoosingData
from trm.tuning.space import Values, with_values


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that all candidates of a search share."""

    start: RunConfig
    directory: Path
    data: ChoosingData
    spec: DataSpec  # completed by the task
    metric: str
    seconds: float  # of training, per candidate

    def candidate(self, values: Values) -> RunConfig:
        """Return a candidate as it is trained: on the data to choose on, and without a target."""
        config = with_values(self.start, values)
        tree = config.model_dump(mode="json")
        tree["data"].update(path=str(self.data.path), build=None)
        tree["evaluation"].update(target_accuracy=None, target_loss=None)
        tree["evaluation"]["every_steps"] = config.evaluation.every_steps or config.training.max_steps
        tree["checkpoints"]["keep"] = 1
        return RunConfig.model_validate(tree)
