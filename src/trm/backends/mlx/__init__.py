"""The MLX backend: implements `trm.backends.base.Backend`."""

from trm.backends.mlx.device import (
    devices,
    held_bytes,
    peak_bytes,
    prepare,
    release_memory,
    to_array,
    warm_up,
)
from trm.backends.mlx.language_model import language_model
from trm.backends.mlx.learner import learner
from trm.backends.mlx.memory import estimate, state_bytes
from trm.backends.mlx.predictor import predictor
from trm.backends.mlx.recording import recorder
from trm.backends.mlx.world import guest_meeting, host_meeting

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
