"""Process settings that make training faster on this CPU, each with the measurement behind it.

A setting is enabled only where a measurement showed a gain. `settings_before_torch` and `LEFT_ALONE` give the
reasons. Environment variables must be set before torch is loaded, so they are passed to the child that
trains. Precision is never derived from a feature flag: bfloat16 products have killed processes (SIGILL) on
CPUs that advertise them, and are many times slower on others. A child process measures it instead.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TypedDict

from macbook_optimization.children import ChildDied, Send, run_in_child
from macbook_optimization.hardware_detection import CPUSpecs, HardwareDetector, is_available
from macbook_optimization.json_types import JsonObject
from macbook_optimization.units import MIB

PRECISIONS = ("float32", "bfloat16")
BFLOAT16_GAIN = 1.2  # the lower precision must be at least this many times faster
_PROBE_TIMEOUT_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    value: str | None  # None: left at its default
    why: str


@dataclass(frozen=True, slots=True)
class CPUConfig:
    torch_threads: int
    interop_threads: int | None  # None: left at its default
    dataloader_workers: int
    mkl_enabled: bool
    onednn_enabled: bool
    vectorization_enabled: bool  # torch uses AVX2, AVX-512 or NEON kernels
    settings: tuple[Setting, ...]


def settings_before_torch(threads: int, platform: str = sys.platform, compact: bool = False) -> list[Setting]:
    """Return the environment variables that must be set before torch is loaded.

    `compact` selects an allocator that returns freed memory immediately.
    """
    chosen = [
        Setting("OMP_NUM_THREADS", str(threads), "one thread pool, of the measured size"),
        Setting("MKL_NUM_THREADS", str(threads), "matrix products use the same pool"),
        Setting("OPENBLAS_NUM_THREADS", "1", "NumPy computes no products here; saves 40 MB of address space"),
    ]
    if platform == "darwin":
        why = "Accelerate ignores torch's thread count (documented; not yet run on a Mac)"
        chosen.append(Setting("VECLIB_MAXIMUM_THREADS", str(threads), why))
    if platform == "linux":
        # By default, waiting threads of GNU OpenMP spin 300,000 times before they sleep.
        why = "next to one busy program, 68 to 76 steps in 8 s instead of 5 to 30; no cost on idle cores"
        chosen.append(Setting("GOMP_SPINCOUNT", "2000", why))
        why = "one heap per thread takes 64 MB more address space each; steps are as fast with one heap"
        chosen.append(Setting("MALLOC_ARENA_MAX", "1", why))
        chosen += _allocator(compact)
    return chosen


def _allocator(compact: bool) -> list[Setting]:
    """Return settings of glibc's malloc: when it returns freed memory to the system."""
    if compact:
        why = "freed memory is returned immediately: lower peak, more page faults"
        return [Setting("MALLOC_MMAP_THRESHOLD_", "65536", why)]
    why = "a step of sudoku-9x9 spent 6 % of its CPU time on 12,000 pages that it had returned before"
    return [
        Setting("MALLOC_TRIM_THRESHOLD_", str(128 * MIB), why),
        Setting("MALLOC_MMAP_THRESHOLD_", str(32 * MIB), why),  # the most it may be
    ]


# Measured with bench/cpu_settings.py on two x86 cores: no gain above the noise.
LEFT_ALONE = (
    Setting("interop_threads", None, "a step is one chain of operations: nothing runs in parallel to it"),
    Setting("flush_denormal", None, "no gain on the real step"),
    Setting("OMP_WAIT_POLICY", None, "PASSIVE halved the speed on idle cores"),
    Setting("oneDNN", None, "enabled by default; a step is as fast without it"),
)


MPS_FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"


def environment(threads: int, *, compact: bool = False) -> dict[str, str]:
    """Return the variables for a child that loads torch, without those that the user has set."""
    chosen = settings_before_torch(threads, compact=compact)
    ours = {s.name: s.value for s in chosen if s.value is not None and s.name not in os.environ}
    if MPS_FALLBACK in os.environ:  # torch would compute what the GPU lacks on the CPU, without saying so
        ours[MPS_FALLBACK] = "0"
    return ours


class CPUOptimizer:
    """Configures this process. `trm train` applies the same settings to its trainer before it starts."""

    def __init__(self, cpu: CPUSpecs | None = None) -> None:
        self.cpu = cpu or HardwareDetector().detect_cpu_specs()

    def configure_torch_threads(self) -> int:
        """Use one thread per performance core, within the quota: a product waits for its slowest thread."""
        import torch

        torch.set_num_threads(self.cpu.compute_threads)
        return torch.get_num_threads()

    def setup_mkl_optimization(self) -> bool:
        """Set MKL's threads for child processes that have not loaded it yet; return whether MKL is used."""
        import torch

        os.environ.update(environment(self.cpu.compute_threads))
        return is_available(torch.backends.mkl)

    def optimize_tensor_operations(self) -> tuple[Setting, ...]:
        return TensorOperationOptimizer(self.cpu).optimize_for_training()

    def configure_dataloader_workers(self) -> int:
        return HardwareDetector().get_optimal_worker_count()

    def configure_all(self) -> CPUConfig:
        import torch

        mkl_enabled = self.setup_mkl_optimization()
        return CPUConfig(
            torch_threads=self.configure_torch_threads(),
            interop_threads=None,
            dataloader_workers=self.configure_dataloader_workers(),
            mkl_enabled=mkl_enabled,
            onednn_enabled=is_available(torch.backends.mkldnn),
            vectorization_enabled=torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "NO AVX"),
            settings=self.optimize_tensor_operations(),
        )


class TensorOperationOptimizer:
    """Applies the settings of tensor operations to this process."""

    def __init__(self, cpu: CPUSpecs | None = None) -> None:
        self.cpu = cpu or HardwareDetector().detect_cpu_specs()

    def optimize_for_training(self) -> tuple[Setting, ...]:
        """Apply the settings that help; return these and the ones left alone, each with its reason.

        Environment variables affect child processes, and this process if it has not loaded torch yet.
        """
        os.environ.update(environment(self.cpu.compute_threads))
        threads = CPUOptimizer(self.cpu).configure_torch_threads()
        thread_setting = Setting("torch_threads", str(threads), "one per core that runs at full speed")
        return (thread_setting, *settings_before_torch(threads), *LEFT_ALONE)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measured speed of this CPU."""

    products: dict[str, dict[int, float]]  # FLOP/s by precision and threads, without precisions that crashed
    bandwidth: float | None  # bytes per second of a large copy; reads and writes both count


def fastest_precision() -> str:
    """Return "bfloat16" if a measurement shows that it is faster, else "float32"."""
    speeds, _ = measure_speeds([HardwareDetector().detect_cpu_specs().compute_threads])
    return choose_precision({name: max(rates.values()) for name, rates in speeds.products.items()})


def choose_precision(rates: Mapping[str, float]) -> str:
    """Choose by work per second; a precision that crashed or was not measured is missing from `rates`."""
    float32_rate = rates.get("float32", 0.0)
    bfloat16_rate = rates.get("bfloat16", 0.0)
    is_faster = float32_rate > 0 and bfloat16_rate >= BFLOAT16_GAIN * float32_rate
    return "bfloat16" if is_faster else "float32"


def measure_speeds(threads: list[int]) -> tuple[Speeds, JsonObject | None]:
    """Measure products and memory bandwidth; also return the platform, since the child has loaded torch.

    Each precision runs in its own child process, so that one that crashes is only left out.
    """
    products: dict[str, dict[int, float]] = {}
    platform: JsonObject | None = None
    bandwidth: float | None = None
    for precision in PRECISIONS:
        try:
            measured: Survey = run_in_child(
                f"{__name__}:survey", {"precision": precision, "threads": threads},
                environment=environment(max(threads)), timeout_seconds=_PROBE_TIMEOUT_SECONDS,
            )  # fmt: skip
        except ChildDied:
            continue
        products[precision] = {int(count): rate for count, rate in measured["products"].items()}
        platform = measured["platform"] or platform
        bandwidth = measured["bandwidth"] or bandwidth
    return Speeds(products, bandwidth), platform


class Survey(TypedDict):
    """The result of one child process. Keys of `products` become strings on the way, as JSON requires."""

    products: dict[int, float]
    bandwidth: float | None
    platform: JsonObject | None


def survey(precision: str, threads: list[int], send: Send) -> Survey:
    """Measure one precision, in a child. Bandwidth and platform do not depend on it: float32 reports them."""
    products = time_products(precision, threads)
    if precision != "float32":
        return {"products": products, "bandwidth": None, "platform": None}
    platform = HardwareDetector().detect_platform_capabilities(measure_precision=False)
    return {"products": products, "bandwidth": time_copies(), "platform": asdict(platform)}


def time_products(
    precision: str, threads: list[int], shape: tuple[int, int, int] = (1024, 512, 1024)
) -> dict[int, float]:
    """Return the median FLOP/s by threads. The shape is about one micro-batch of the paper's model."""
    import torch

    rows, inner, columns = shape
    left = torch.randn(rows, inner).to(getattr(torch, precision))
    right = torch.randn(inner, columns).to(getattr(torch, precision))
    rates = {}
    for count in threads:
        torch.set_num_threads(count)
        seconds = _median_seconds(lambda: left @ right)
        rates[count] = 2 * rows * inner * columns / seconds
    return rates


def time_copies() -> float:
    """Return the bytes per second of copying 128 MiB; reads and writes both count."""
    import torch

    source = torch.ones(32 * MIB)  # elements of four bytes
    target = torch.empty_like(source)
    seconds = _median_seconds(lambda: target.copy_(source))
    return 2 * source.numel() * source.element_size() / seconds


def _median_seconds(work: Callable[[], object], enough_seconds: float = 0.3) -> float:
    """Return the median time after one warm-up call, or the time of that call if it took long enough."""
    times: list[float] = []
    while len(times) < 2 or sum(times[1:]) < enough_seconds:
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
        if times[0] > enough_seconds:
            return times[0]
    return statistics.median(times[1:])
