"""The PyTorch backend: what `trm.backends.base.Backend` asks for."""

from trm.backends.pytorch.memory import estimate_memory
from trm.backends.pytorch.step import answerer, learner, prepare

__all__ = ["answerer", "estimate_memory", "learner", "prepare"]
