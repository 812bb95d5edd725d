"""The PyTorch backend: implements `trm.backends.base.Backend`."""

from trm.backends.pytorch.device import (
    devices,
    held_bytes,
    peak_bytes,
    prepare,
    release_memory,
    to_array,
    warm_up,
)
from trm.backends.pytorch.language_model import language_model
from trm.backends.pytorch.learner import learner
from trm.backends.pytorch.memory import estimate, state_bytes
from trm.backends.pytorch.predictor import predictor
from trm.backends.pytorch.profiling import recorder
from trm.backends.pytorch.rendezvous import guest_meeting, host_meeting

__all__ = [
    "devices",
    "estimate",
    "guest_meeting",
    "held_bytes",
    "host_meeting",
    "language_model",
    "learner",
    "peak_bytes",
    "predictor",
    "prepare",
    "recorder",
    "release_memory",
    "state_bytes",
    "to_array",
    "warm_up",
]
