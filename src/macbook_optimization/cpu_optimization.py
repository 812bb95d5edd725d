"""Settings of the process that make training faster on this CPU, and only those.

A setting is switched on where a measurement showed a gain; `SETTINGS` says which measurement, and what was
tried and left alone. Variables must stand in the environment before torch is loaded, so they are given to
the child that trains. Precision is never read from a feature flag: bfloat16 products have killed processes
(SIGILL) on CPUs that advertise them, and are many times slower on others. A child multiplies, and we look.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from macbook_optimization.children import ChildDied, Tell, run_in_child
from macbook_optimization.hardware_detection import CPUSpecs, HardwareDetector, is_available

PRECISIONS = ("float32", "bfloat16")
BFLOAT16_GAIN = 1.2  # a coarser number must be at least this much faster
_PROBE_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    value: str | None  # None: left alone
    why: str


@dataclass(frozen=True, slots=True)
class CPUConfig:
    torch_threads: int
    interop_threads: int | None  # None: left alone
    dataloader_workers: int
    mkl_enabled: bool
    onednn_enabled: bool
    vectorization_enabled: bool  # torch chose AVX2, AVX-512 or NEON kernels
    settings: tuple[Setting, ...]


def settings_before_torch(threads: int, platform: str = sys.platform, compact: bool = False) -> list[Setting]:
    """What must be in the environment when torch is loaded."""
    chosen = [
        Setting("OMP_NUM_THREADS", str(threads), "one pool, as large as the measured thread count"),
        Setting("MKL_NUM_THREADS", str(threads), "the matrix products of the same pool"),
        Setting("OPENBLAS_NUM_THREADS", "1", "NumPy multiplies nothing here; 40 MB less address space"),
    ]
    if platform == "darwin":
        why = "Accelerate does not follow torch's thread count (documented; not yet run on a Mac)"
        chosen.append(Setting("VECLIB_MAXIMUM_THREADS", str(threads), why))
    if platform == "linux":
        # Threads of GNU OpenMP that wait spin 300,000 rounds before they sleep.
        why = "beside one busy program 68 to 76 steps instead of 5 to 30 in 8 s; on quiet cores no cost"
        chosen.append(Setting("GOMP_SPINCOUNT", "2000", why))
        why = "a heap for every thread takes 64 MB more address space; steps are as fast with one"
        chosen.append(Setting("MALLOC_ARENA_MAX", "1", why))
    if compact and platform == "linux":
        why = "freed memory goes back at once: lower peak, more page faults"
        chosen.append(Setting("MALLOC_MMAP_THRESHOLD_", "65536", why))
    return chosen


# Tried with bench/cpu_settings.py on two x86 cores, and without a gain that stands out of the noise.
LEFT_ALONE = (
    Setting("interop_threads", None, "the step is one chain of operations: nothing runs beside it"),
    Setting("flush_denormal", None, "no gain on the real step"),
    Setting("OMP_WAIT_POLICY", None, "PASSIVE halved the speed on quiet cores"),
    Setting("oneDNN", None, "on by default; a step is as fast without it"),
)


def environment(threads: int, *, compact: bool = False) -> dict[str, str]:
    """For the child that loads torch. What the user has set stands."""
    chosen = settings_before_torch(threads, compact=compact)
    return {s.name: s.value for s in chosen if s.value is not None and s.name not in os.environ}


class CPUOptimizer:
    """Configures this process; `trm train` does the same to its trainer before it starts."""

    def __init__(self, cpu: CPUSpecs | None = None) -> None:
        self.cpu = cpu or HardwareDetector().detect_cpu_specs()

    def configure_torch_threads(self) -> int:
        """Performance cores only, within the quota: every product waits for its slowest thread."""
        import torch

        torch.set_num_threads(self.cpu.compute_threads)
        return torch.get_num_threads()

    def setup_mkl_optimization(self) -> bool:
        """Whether MKL does the products; its threads are set for children that have not loaded it yet."""
        import torch

        os.environ.update(environment(self.cpu.compute_threads))
        return is_available(torch.backends.mkl)

    def optimize_tensor_operations(self) -> tuple[Setting, ...]:
        return TensorOperationOptimizer(self.cpu).optimize_for_training()

    def configure_dataloader_workers(self) -> int:
        return HardwareDetector().get_optimal_worker_count()

    def configure_all(self) -> CPUConfig:
        import torch

        mkl = self.setup_mkl_optimization()
        return CPUConfig(
            torch_threads=self.configure_torch_threads(),
            interop_threads=None,
            dataloader_workers=self.configure_dataloader_workers(),
            mkl_enabled=mkl,
            onednn_enabled=is_available(torch.backends.mkldnn),
            vectorization_enabled=torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "NO AVX"),
            settings=self.optimize_tensor_operations(),
        )


class TensorOperationOptimizer:
    def __init__(self, cpu: CPUSpecs | None = None) -> None:
        self.cpu = cpu or HardwareDetector().detect_cpu_specs()

    def optimize_for_training(self) -> tuple[Setting, ...]:
        """Sets what helps, and tells what was set and what was left alone, each with its reason. Variables
        count for children, and for this process if it has not loaded torch before."""
        os.environ.update(environment(self.cpu.compute_threads))
        threads = CPUOptimizer(self.cpu).configure_torch_threads()
        counted = Setting("torch_threads", str(threads), "one for every core that computes at full speed")
        return (counted, *settings_before_torch(threads), *LEFT_ALONE)


@dataclass(frozen=True, slots=True)
class Speeds:
    """`products` are operations per second by precision and threads; a precision that died is missing."""

    products: dict[str, dict[int, float]]
    bandwidth: float | None  # bytes per second of a large copy, read and write counted


def fastest_precision() -> str:
    """bfloat16 where products in it are measured to be faster, float32 everywhere else."""
    speeds, _ = measure_speeds([HardwareDetector().detect_cpu_specs().compute_threads])
    return choose_precision({name: max(rates.values()) for name, rates in speeds.products.items()})


def choose_precision(rates: Mapping[str, float]) -> str:
    """`rates` is work per second by precision; one that died or was not tried is missing."""
    faster = rates.get("bfloat16", 0.0) >= BFLOAT16_GAIN * rates.get("float32", 0.0) > 0
    return "bfloat16" if faster else "float32"


def measure_speeds(threads: list[int]) -> tuple[Speeds, dict[str, Any] | None]:
    """Also what torch says of the platform, since a child has loaded it anyway.

    Each precision has a child of its own: one that dies is left out, and costs nothing.
    """
    products: dict[str, dict[int, float]] = {}
    platform = bandwidth = None
    for precision in PRECISIONS:
        try:
            found = run_in_child(
                f"{__name__}:survey", {"precision": precision, "threads": threads},
                environment=environment(max(threads)), timeout_seconds=_PROBE_SECONDS,
            )  # fmt: skip
        except ChildDied:
            continue
        products[precision] = {int(count): rate for count, rate in found["products"].items()}
        platform, bandwidth = found["platform"] or platform, found["bandwidth"] or bandwidth
    return Speeds(products, bandwidth), platform


def survey(precision: str, threads: list[int], tell: Tell) -> dict[str, Any]:
    """The body of the child. Copies and the platform are the same in every precision."""
    products = time_products(precision, threads)
    if precision != "float32":
        return {"products": products, "bandwidth": None, "platform": None}
    platform = HardwareDetector().detect_platform_capabilities(measure_precision=False)
    return {"products": products, "bandwidth": time_copies(), "platform": asdict(platform)}


def time_products(
    precision: str, threads: list[int], shape: tuple[int, int, int] = (1024, 512, 1024)
) -> dict[int, float]:
    """Operations per second by threads, medians; the shape is about one micro-batch of the paper's model."""
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
    """Bytes per second moved by copying 128 MiB, read and write counted."""
    import torch

    source = torch.ones(32 * 2**20)
    target = torch.empty_like(source)
    seconds = _median_seconds(lambda: target.copy_(source))
    return 2 * source.numel() * source.element_size() / seconds


def _median_seconds(work: Callable[[], object], at_most_seconds: float = 0.3) -> float:
    """After a warm-up, unless that took long enough to be the measurement."""
    times: list[float] = []
    while len(times) < 2 or sum(times[1:]) < at_most_seconds:
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
        if times[0] > at_most_seconds:
            return times[0]
    return statistics.median(times[1:])
