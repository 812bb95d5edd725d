"""The device: decided once, from the execution. No other module creates a tensor from an array.

Only the CPU has been run so far.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from macbook_optimization.memory_management import peak_bytes as resident_peak_bytes
from trm.plan import Execution


def devices() -> tuple[str, ...]:
    return ("cpu",)


def peak_bytes() -> int:
    """Return the peak of the process, which on the CPU holds every tensor."""
    return resident_peak_bytes()


def prepare(execution: Execution) -> None:
    """Apply what belongs to the process: the number of threads and deterministic kernels."""
    torch.set_num_threads(execution.threads)
    wanted = execution.deterministic
    if wanted != torch.are_deterministic_algorithms_enabled():  # the call imports the compiler: 2 s
        torch.use_deterministic_algorithms(wanted)


def warm_up() -> None:
    """Start the threads and load the libraries that a first product starts and loads."""
    torch.randn(256, 256) @ torch.randn(256, 256)


def to_tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array on the device; on the CPU they share memory."""
    return torch.from_numpy(array).to(device)


def to_array(tensor: Tensor) -> NDArray[Any]:
    """Return the tensor as an array; on the CPU they share memory."""
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array
