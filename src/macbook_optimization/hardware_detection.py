"""Detect the CPU, memory, power supply and platform of this machine.

`HardwareDetector` returns frozen records and changes nothing. A value that the operating system does not
report is `None`, never a typical value: plans are derived from these numbers. Sizes are in bytes,
frequencies in MHz. Inside a container, its limits are those of the machine.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from macbook_optimization import linux_readers as linux
from macbook_optimization import macos_readers as macos
from macbook_optimization.json_types import JsonObject
from macbook_optimization.units import GIB as GIB

_ARCHITECTURES = {"aarch64": "arm64", "AMD64": "x86_64"}
_BLAS_NAMES = {"open": "openblas", "veclib": "accelerate"}  # as named in torch's build settings


@dataclass(frozen=True, slots=True)
class CPUSpecs:
    brand: str | None
    architecture: str  # of this process: "arm64" or "x86_64"; under Rosetta the latter
    cores: int  # physical
    threads: int  # logical
    performance_cores: int | None  # None where all cores are alike, and always on Linux
    efficiency_cores: int | None
    features: tuple[str, ...]
    base_frequency: float | None
    max_frequency: float | None
    l1d_cache: int | None
    l2_cache: int | None
    l3_cache: int | None
    quota: float | None  # number of CPUs that a container or an affinity mask allows

    @property
    def compute_threads(self) -> int:
        """Threads to use for matrix products: at the barrier, fast cores would wait for slow ones."""
        fast_cores = self.performance_cores or self.cores
        if self.quota is None:
            return fast_cores
        return max(1, min(fast_cores, int(self.quota)))


@dataclass(frozen=True, slots=True)
class MemorySpecs:
    total_memory: int
    available_memory: int
    memory_type: str | None  # for instance "LPDDR5"; Linux reports it to root only
    memory_speed: int | None  # million transfers per second, which macOS calls MHz
    swap_total: int | None
    swap_used: int | None
    limited_by: str | None  # "cgroup v2" or "cgroup v1" if a container limits the total


@dataclass(frozen=True, slots=True)
class PowerSpecs:
    on_battery: bool | None
    battery_percent: float | None


@dataclass(frozen=True, slots=True)
class PlatformCapabilities:
    system: str  # "macOS", "Linux"
    os_version: str | None  # product version of macOS, kernel release elsewhere
    machine_model: str | None
    apple_silicon: bool
    rosetta: bool | None
    python_version: str
    has_mkl: bool | None
    has_accelerate: bool | None
    has_onednn: bool | None
    blas: tuple[str, ...]  # BLAS libraries in this process; NumPy may load its own
    torch_version: str | None
    optimal_dtype: Any  # a torch.dtype, which cannot be named without importing torch
    has_mps: bool | None
    has_cuda: bool | None


@dataclass(frozen=True, slots=True)
class HardwareSpecs:
    cpu: CPUSpecs
    memory: MemorySpecs
    power: PowerSpecs
    platform: PlatformCapabilities | None

    def to_json(self) -> JsonObject:
        facts = asdict(self)
        if self.platform is not None and self.platform.optimal_dtype is not None:
            facts["platform"]["optimal_dtype"] = str(self.platform.optimal_dtype).removeprefix("torch.")
        return facts


class HardwareDetector:
    """Reads the facts of this machine.

    `root` is where /proc and /sys are found. Core counts and the battery always come from the real system.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def detect_cpu_specs(self) -> CPUSpecs:
        return macos_cpu(_sysctl()) if on_macos() else linux_cpu(self.root)

    def detect_memory_specs(self) -> MemorySpecs:
        if not on_macos():
            return linux_memory(self.root)
        modules = macos.run_tool(*macos.MEMORY_MODULES)
        return macos_memory(_sysctl(), modules, available_memory(self.root))

    def detect_power(self) -> PowerSpecs:
        if on_macos():
            return PowerSpecs(*macos.power_source(macos.run_tool(*macos.BATTERY)))
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
        if battery is None:
            return PowerSpecs(None, None)
        is_plugged = battery.power_plugged
        return PowerSpecs(None if is_plugged is None else not is_plugged, battery.percent)

    def detect_platform_capabilities(self, measure_precision: bool = True) -> PlatformCapabilities:
        """Import torch and, with `measure_precision`, find the fastest precision; each takes seconds."""
        import torch

        from macbook_optimization.cpu_optimization import fastest_precision

        sysctl = _sysctl() if on_macos() else {}
        architecture = _architecture()
        apple_silicon = on_macos() and (architecture == "arm64" or macos.is_apple_silicon(sysctl))
        is_translated = macos.is_translated(sysctl) or (apple_silicon and architecture == "x86_64")
        blas = blas_libraries(torch.__config__.show(), linux.mapped_libraries(self.root))
        return PlatformCapabilities(
            system="macOS" if on_macos() else platform.system(),
            os_version=sysctl.get("kern.osproductversion") if on_macos() else platform.release(),
            machine_model=sysctl.get("hw.model") if on_macos() else linux.machine_model(self.root),
            apple_silicon=apple_silicon,
            rosetta=is_translated if on_macos() else None,
            python_version=platform.python_version(),
            has_mkl=is_available(torch.backends.mkl),
            has_accelerate="accelerate" in blas,
            has_onednn=is_available(torch.backends.mkldnn),
            blas=blas,
            torch_version=str(torch.__version__),
            optimal_dtype=getattr(torch, fastest_precision()) if measure_precision else None,
            has_mps=is_available(torch.backends.mps),
            has_cuda=is_available(torch.cuda),
        )

    def get_optimal_worker_count(self) -> int:
        """Return the number of data loading processes.

        0 on macOS, where starting them and copying to them costs more than they save (reported, not measured
        here), and 0 on a small machine, where they compete with the matrix products for cores and each needs
        the memory of another Python process. Elsewhere one per four cores, at most two: datasets are small or
        memory-mapped, so steps do not wait for loading.
        """
        if on_macos() or self.detect_memory_specs().total_memory < 16 * GIB:
            return 0
        return min(2, self.detect_cpu_specs().compute_threads // 4)

    def detect(self, with_torch: bool = True) -> HardwareSpecs:
        return HardwareSpecs(
            cpu=self.detect_cpu_specs(),
            memory=self.detect_memory_specs(),
            power=self.detect_power(),
            platform=self.detect_platform_capabilities() if with_torch else None,
        )


def on_macos() -> bool:
    return platform.system() == "Darwin"


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that could be allocated now. Cheap enough for once per second."""
    if not on_macos():
        return linux_memory(root).available_memory
    available = macos.available_bytes(macos.run_tool(*macos.VM_STAT))
    if available is None or macos.memory_pressure(_sysctl()) == "normal":
        # psutil counts inactive pages as well, which macOS hands out readily while there is no pressure.
        return psutil.virtual_memory().available
    return available


def macos_cpu(facts: Mapping[str, str]) -> CPUSpecs:
    threads = macos.count(facts, "hw.logicalcpu") or _logical_cpus()
    performance_cores, efficiency_cores = macos.core_levels(facts)
    base_frequency, max_frequency = macos.frequencies(facts)
    return CPUSpecs(
        brand=facts.get("machdep.cpu.brand_string") or None,
        architecture=_architecture(),
        cores=macos.count(facts, "hw.physicalcpu") or psutil.cpu_count(logical=False) or threads,
        threads=threads,
        performance_cores=performance_cores,
        efficiency_cores=efficiency_cores,
        features=macos.cpu_features(facts),
        base_frequency=base_frequency,
        max_frequency=max_frequency,
        l1d_cache=macos.cache_bytes(facts, "l1d"),
        l2_cache=macos.cache_bytes(facts, "l2"),
        l3_cache=macos.cache_bytes(facts, "l3"),
        quota=None,  # macOS has neither containers nor affinity masks
    )


def macos_memory(facts: Mapping[str, str], modules: str | None, available: int) -> MemorySpecs:
    memory_type, memory_speed = macos.memory_module(modules)
    swap_total, swap_used = macos.swap_bytes(facts)
    return MemorySpecs(
        total_memory=macos.count(facts, "hw.memsize") or psutil.virtual_memory().total,
        available_memory=available,
        memory_type=memory_type,
        memory_speed=memory_speed,
        swap_total=swap_total,
        swap_used=swap_used,
        limited_by=None,
    )


def linux_cpu(root: Path) -> CPUSpecs:
    brand, features = linux.cpu_brand_and_features(root)
    base_frequency, max_frequency = linux.frequencies(root)
    caches = linux.cache_bytes(root)
    threads = _logical_cpus()
    return CPUSpecs(
        brand=brand,
        architecture=_architecture(),
        cores=psutil.cpu_count(logical=False) or threads,
        threads=threads,
        performance_cores=None,
        efficiency_cores=None,
        features=features,
        base_frequency=base_frequency,
        max_frequency=max_frequency,
        l1d_cache=caches.get("l1d"),
        l2_cache=caches.get("l2"),
        l3_cache=caches.get("l3"),
        quota=_allowed_cpus(linux.cpu_quota(root), threads),
    )


def linux_memory(root: Path) -> MemorySpecs:
    machine = linux.memory_bytes(root)
    total = machine.get("MemTotal") or psutil.virtual_memory().total
    available = machine.get("MemAvailable", psutil.virtual_memory().available)
    limit = linux.memory_limit(root, total)
    swap_total, swap_free = machine.get("SwapTotal"), machine.get("SwapFree")
    return MemorySpecs(
        total_memory=limit.limit_bytes if limit else total,
        available_memory=min(available, limit.unused_bytes) if limit else available,
        memory_type=None,
        memory_speed=None,
        swap_total=swap_total,
        swap_used=None if swap_total is None or swap_free is None else swap_total - swap_free,
        limited_by=limit.source if limit else None,
    )


def blas_libraries(build: str, mapped: Iterable[str]) -> tuple[str, ...]:
    """List the BLAS libraries named in torch's build settings or mapped into this process.

    Both are needed: torch's wheels link MKL statically, so it is not among the mapped files.
    """
    built_with = re.search(r"\bBLAS_INFO=(\w+)", build)
    names = set()
    if built_with:
        name = built_with[1].lower()
        names.add(_BLAS_NAMES.get(name, name))
    for name in ("mkl", "openblas", "blis", "accelerate"):
        if any(name in library.lower() for library in mapped):
            names.add(name)
    return tuple(sorted(names))


class TorchBackend(Protocol):
    """One of the modules in `torch.backends`, or `torch.cuda`."""

    def is_available(self) -> bool: ...


def is_available(backend: TorchBackend) -> bool:
    return bool(backend.is_available())


def _sysctl() -> dict[str, str]:
    return macos.parse_sysctl(macos.run_tool(*macos.SYSCTL))


def _architecture() -> str:
    return _ARCHITECTURES.get(platform.machine(), platform.machine())


def _logical_cpus() -> int:
    return psutil.cpu_count() or 1


def _allowed_cpus(quota: float | None, threads: int) -> float | None:
    """Return the number of CPUs that quota and affinity mask allow; None if they allow all."""
    mask_size = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else threads
    allowed = min(mask_size, threads if quota is None else quota)
    return float(allowed) if allowed < threads else None
