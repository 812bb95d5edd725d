"""MLX has no recorder of single operations."""

from __future__ import annotations

from macbook_optimization.errors import ConfigError
from trm.backends.base import Learner, StepRecorder


def recorder(learner: Learner) -> StepRecorder:
    raise ConfigError(
        "The MLX backend cannot record the operations of a step.",
        hint="Profile with plan.backend=pytorch, or use Xcode's Metal capture.",
    )
