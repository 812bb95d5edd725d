"""The time of one training step by phase, measured alike in every backend."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from trm.backends.base import EXCHANGE


@dataclass
class StepTimes:
    """`forward` and `backward` are summed over workers, whose seconds overlap."""

    started: float = field(default_factory=time.monotonic)
    computed: float = field(default_factory=time.monotonic)  # when all gradients of this rank were known
    forward: float = 0.0
    backward: float = 0.0
    waited: float = 0.0  # for other ranks and their message

    def add(self, forward: float, backward: float) -> None:
        self.forward += forward
        self.backward += backward

    def shares(self) -> dict[str, float]:
        """Divide the seconds that passed until now among the phases of the step."""
        passed = self.computed - self.started
        forward = passed * self.forward / max(self.forward + self.backward, 1e-9)
        optimizer = time.monotonic() - self.computed - self.waited
        shares = {"forward": forward, "backward": passed - forward, "optimizer": optimizer}
        return {**shares, EXCHANGE: self.waited} if self.waited else shares
