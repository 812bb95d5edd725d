"""The PyTorch backend: what `trm.backends.base.Backend` asks for."""

from trm.backends.pytorch.answering import answerer
from trm.backends.pytorch.memory import estimate_memory, state_bytes
from trm.backends.pytorch.step import learner, prepare, warm_up

__all__ = ["answerer", "estimate_memory", "learner", "prepare", "state_bytes", "warm_up"]
