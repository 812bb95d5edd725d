"""The device: decided once, from the execution. No other module creates a tensor from an array.

Weights, noise and guesses are drawn on the CPU and moved, so that a seed means the same on every device. Only
the CPU and a device that the tests make up have been run so far; MPS has not yet been run on a Mac.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from macbook_optimization.hardware_detection import is_available
from macbook_optimization.memory_management import peak_bytes as resident_peak_bytes
from trm.plan import Execution


def devices() -> tuple[str, ...]:
    """List the CPU, the GPU of a Mac, and a device that an installed package adds to torch."""
    added: str = torch._C._get_privateuse1_backend_name()
    module = getattr(torch, added, None)
    works = {
        "mps": is_available(torch.backends.mps),
        added: module is not None and is_available(module),
    }
    return ("cpu", *(name for name, here in works.items() if here))


def peak_bytes(execution: Execution) -> int:
    """Return the peak of the process, and what the driver of a GPU holds for it.

    The driver returns memory only when its cache is released, so what it holds is nearly its peak. If the
    resident memory contains it, it is counted twice.
    """
    return resident_peak_bytes() + held_bytes(execution)


def held_bytes(execution: Execution) -> int:
    """Return what the driver of a GPU holds. A run on the CPU must not call it: that would start it."""
    return int(torch.mps.driver_allocated_memory()) if execution.device == "mps" else 0


def prepare(execution: Execution) -> None:
    """Apply what belongs to the process: the number of threads and deterministic kernels."""
    torch.set_num_threads(execution.threads)
    wanted = execution.deterministic
    if wanted != torch.are_deterministic_algorithms_enabled():  # the call imports the compiler: 2 s
        torch.use_deterministic_algorithms(wanted)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: how many share an operation decides how its last bits are rounded."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def warm_up() -> None:
    """Start the threads and load the libraries that a first product starts and loads."""
    torch.randn(256, 256) @ torch.randn(256, 256)


def release_memory(execution: Execution) -> int:
    """Return what the driver of a GPU keeps for later tensors.

    On the CPU, freed memory belongs to the C library.
    """
    before = held_bytes(execution)
    if before:
        torch.mps.empty_cache()
    return before - held_bytes(execution)


def to_tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array on the device; on the CPU they share memory."""
    return torch.from_numpy(array).to(device)


def to_array(tensor: Tensor) -> NDArray[Any]:
    """Return the tensor as an array; on the CPU they share memory. NumPy lacks bfloat16: that is copied."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array


def synchronize(device: torch.device) -> None:
    """Wait until everything that was started on the device is computed; on the CPU it always is."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
