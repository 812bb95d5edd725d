"""Current memory use of the machine and of this process, and a monitor that samples it in the background."""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from macbook_optimization import macos_readers as macos
from macbook_optimization.background_monitor import BackgroundMonitor
from macbook_optimization.hardware_detection import available_memory, linux_memory, macos_memory, on_macos
from macbook_optimization.units import KIB


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """One sample of memory use. A value that the system does not report is None."""

    total_memory: int
    available_memory: int
    process_bytes: int  # physical memory of this process
    swap_used: int | None
    stall_percent: float | None  # of the last 10 s, during which some process waited for memory (Linux PSI)
    pressure: str | None  # macOS: "normal", "warning" or "critical"

    @property
    def percent_used(self) -> float:
        return 100 * (1 - self.available_memory / self.total_memory)


def read_memory(root: Path = Path("/")) -> MemoryStats:
    """Sample memory use. Cheap enough for once per second: on macOS, `system_profiler` is not run."""
    if on_macos():
        sysctl = macos.parse_sysctl(macos.run_tool(*macos.SYSCTL))
        specs = macos_memory(sysctl, None, available_memory())
    else:
        sysctl = {}
        specs = linux_memory(root)
    return MemoryStats(
        total_memory=specs.total_memory,
        available_memory=specs.available_memory,
        process_bytes=own_bytes(),
        swap_used=specs.swap_used,
        stall_percent=read_stall(root / "proc/pressure/memory"),
        pressure=macos.memory_pressure(sysctl),
    )


def own_bytes() -> int:
    """Return the physical memory of this process.

    On macOS this is the unique set size, which excludes shared libraries. Neither it nor the resident set
    size includes compressed pages there.
    """
    process = psutil.Process()
    return int(process.memory_full_info().uss if on_macos() else process.memory_info().rss)


def peak_bytes() -> int:
    """Return the highest resident memory that this process has had.

    `ru_maxrss` is only the fallback: on Linux it starts at the peak of the process that started this one, so
    a small child of a large program would look large.
    """
    peak = _status_bytes("VmHWM")
    if peak is not None:
        return peak
    maxrss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return maxrss if on_macos() else maxrss * KIB


def peak_address_space() -> int | None:
    """Return the largest address space that this process has had; None where that is not reported."""
    return _status_bytes("VmPeak")


def _status_bytes(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * KIB for line in lines if line.startswith(f"{name}:")), None)


def read_stall(path: Path) -> float | None:
    """Return `some avg10` of a Linux pressure file, or None if there is no such file."""
    try:
        words = path.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        return None
    prefix = "avg10="
    try:
        return next((float(word.removeprefix(prefix)) for word in words if word.startswith(prefix)), None)
    except ValueError:
        return None


def return_freed_memory() -> int:
    """Collect garbage, return free heap pages to the system, and return how many bytes that released.

    The macOS call follows its documentation and has not been run on a Mac yet.
    """
    before = own_bytes()
    gc.collect()
    library = ctypes.CDLL(None)
    if on_macos():
        library.malloc_zone_pressure_relief(None, ctypes.c_size_t(0))
    elif hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
    return max(0, before - own_bytes())


class MemoryMonitor(BackgroundMonitor):
    """Samples memory use and calls the callbacks with the fraction in use (0 to 1) above the threshold."""

    def __init__(self, threshold: float = 0.85, read: Callable[[], MemoryStats] = read_memory) -> None:
        super().__init__()
        self.threshold = threshold
        self.read = read
        self.callbacks: list[Callable[[float], None]] = []
        self.latest: MemoryStats | None = None

    def begin(self) -> None:
        self.sample()

    def sample(self) -> None:
        stats = self.read()
        self.latest = stats
        fraction = stats.percent_used / 100
        if fraction > self.threshold:
            for callback in self.callbacks:
                callback(fraction)
