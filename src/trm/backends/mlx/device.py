"""The device: decided once, from the execution; and arrays between NumPy and MLX.

On Linux there is only the CPU. The GPU path has not been run on a Mac yet.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from macbook_optimization.errors import ConfigError
from macbook_optimization.memory_management import peak_bytes as resident_peak_bytes
from trm.plan import Execution

_UNLIMITED = 2**62


def devices() -> tuple[str, ...]:
    return ("cpu", "gpu") if mx.metal.is_available() else ("cpu",)


def prepare(execution: Execution) -> None:
    """Apply what belongs to the process: the device, and whether freed memory is kept for the next array."""
    if execution.deterministic:
        raise ConfigError(
            "MLX does not promise the same bits again, so training.deterministic needs PyTorch.",
            hint="Set plan.backend=pytorch, or training.deterministic=false.",
        )
    mx.set_default_device(mx.gpu if execution.device == "gpu" else mx.cpu)
    mx.set_cache_limit(0 if execution.allocator == "compact" else _UNLIMITED)


def warm_up() -> None:
    """Load the libraries that a first product loads."""
    mx.eval(mx.ones((256, 256)) @ mx.ones((256, 256)))


def peak_bytes(execution: Execution) -> int:
    """Return the peak of the process, which on the CPU holds every array.

    On a GPU the arrays are added: whether the system counts their buffers as memory of the process has not
    been checked on a Mac, and counting them twice errs on the safe side.
    """
    on_gpu = mx.get_peak_memory() + mx.get_cache_memory() if execution.device == "gpu" else 0
    return resident_peak_bytes() + int(on_gpu)


def held_bytes(execution: Execution) -> int:
    return int(mx.get_active_memory() + mx.get_cache_memory()) if execution.device == "gpu" else 0


def release_memory(execution: Execution) -> int:
    """Release the buffers that MLX keeps for future arrays."""
    released = int(mx.get_cache_memory())
    mx.clear_cache()
    return released


def start_computing(*arrays: mx.array) -> None:
    """Start computing arrays in the background, so that few pending operations accumulate."""
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]


def to_mlx(array: Any) -> mx.array:
    """Convert a NumPy array or a torch tensor to MLX; an MLX array is returned unchanged."""
    if isinstance(array, mx.array):
        return array
    if isinstance(array, np.ndarray):
        return mx.array(array)
    if "bfloat16" in str(array.dtype):  # NumPy does not have it; a longer number holds it exactly
        return mx.array(array.detach().float().numpy()).astype(mx.bfloat16)
    return mx.array(array.detach().numpy())


def to_array(array: mx.array) -> NDArray[Any]:
    """Return a copy in NumPy, in float32 where NumPy lacks the precision."""
    if array.dtype == mx.bfloat16:
        array = array.astype(mx.float32)
    return np.array(array)
