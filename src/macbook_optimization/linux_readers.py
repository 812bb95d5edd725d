"""Read /proc and /sys of Linux, below a root directory that tests can replace.

The limits of a container are files as well. The kernel enforces those of its control group and of all
ancestors, so the tightest one applies. A file that is absent or not understood gives `None`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from macbook_optimization.units import KIB

# One spelling for features that Linux and macOS, x86 and ARM name differently.
_FEATURE_NAMES = {
    "sse4_1": "SSE4.1",
    "sse4_2": "SSE4.2",
    "pni": "SSE3",
    "asimd": "NEON",
    "asimdhp": "FP16",
    "asimddp": "DOTPROD",
    "asimdfhm": "FHM",
}
# Per version: file of the limit, file of the usage, and the key in memory.stat of the page cache, which the
# kernel reclaims before it runs out of memory.
_MEMORY_FILES = (
    ("cgroup v2", "memory.max", "memory.current", "inactive_file"),
    ("cgroup v1", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    limit_bytes: int
    unused_bytes: int
    source: str  # "cgroup v2" or "cgroup v1"


def read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    except OSError:
        return None


def read_number(path: Path) -> int | None:
    """Return the number in a file; None also for "max" and -1, which mean that there is no limit."""
    text = read_text(path) or ""
    return int(text) if re.fullmatch(r"[0-9]{1,19}", text) else None


def cpu_brand_and_features(root: Path) -> tuple[str | None, tuple[str, ...]]:
    """Describe the first processor. ARM kernels report no brand."""
    first: dict[str, str] = {}
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            first.setdefault(name.strip(), value.strip())
    flags = first.get("flags") or first.get("Features") or ""
    names = {_FEATURE_NAMES.get(flag, flag.upper()) for flag in flags.split()}
    return first.get("model name") or None, tuple(sorted(names))


def cache_bytes(root: Path) -> dict[str, int]:
    """Return the sizes of l1d, l2 and l3 of the first processor, as far as they are reported."""
    sizes = {}
    for index in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (read_text(index / name) or "" for name in ("level", "type", "size"))
        if kind != "Instruction" and re.fullmatch(r"[0-9]{1,9}K", size):
            sizes["l1d" if level == "1" else f"l{level}"] = int(size[:-1]) * KIB
    return sizes


def frequencies(root: Path) -> tuple[float | None, float | None]:
    """Return base and maximum frequency in MHz. Virtual machines report neither, some drivers no base."""
    directory = root / "sys/devices/system/cpu/cpu0/cpufreq"
    base_khz = read_number(directory / "base_frequency")
    max_khz = read_number(directory / "cpuinfo_max_freq")
    return (base_khz / 1000 if base_khz else None), (max_khz / 1000 if max_khz else None)


def memory_bytes(root: Path) -> dict[str, int]:
    lines = re.findall(r"^(\w+):\s+([0-9]{1,15}) kB", read_text(root / "proc/meminfo") or "", re.MULTILINE)
    return {name: int(kibibytes) * KIB for name, kibibytes in lines}


def machine_model(root: Path) -> str | None:
    return read_text(root / "sys/class/dmi/id/product_name") or None


def mapped_libraries(root: Path) -> set[str]:
    """Return the file names of the shared libraries in this process."""
    return set(re.findall(r"/([^/\n]+\.so[^/\n]*)$", read_text(root / "proc/self/maps") or "", re.MULTILINE))


def throttle_count(root: Path) -> int | None:
    """Return how often the processors were throttled since boot. Intel only."""
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/*_throttle_count")
    counts = [number for number in map(read_number, files) if number is not None]
    return sum(counts) if counts else None


def oom_kills(root: Path = Path("/")) -> int | None:
    """Return the number of processes that the OOM killer has killed since boot."""
    found = re.search(r"^oom_kill ([0-9]{1,19})$", read_text(root / "proc/vmstat") or "", re.MULTILINE)
    return int(found[1]) if found else None


def memory_limit(root: Path, machine_bytes: int) -> MemoryLimit | None:
    """Return the limit of the control groups, if any is below the memory of the machine.

    cgroup v1 reports a number near 2**63 where there is no limit.
    """
    limits = [limit for limit in _memory_limits(root) if limit.limit_bytes < machine_bytes]
    if not limits:
        return None
    tightest = min(limits, key=lambda limit: limit.limit_bytes)
    unused = min(limit.unused_bytes for limit in limits)
    return MemoryLimit(tightest.limit_bytes, unused, tightest.source)


def cpu_quota(root: Path) -> float | None:
    """Return the number of CPUs whose time the tightest control group allows; None without a limit."""
    quotas = []
    for group in _control_groups(root, "cpu"):
        quota_and_period = read_text(group / "cpu.max")
        if quota_and_period is None:  # v1 has two files instead of one
            quota = read_text(group / "cpu.cfs_quota_us") or ""
            period = read_text(group / "cpu.cfs_period_us") or ""
            quota_and_period = f"{quota} {period}"
        limit = re.fullmatch(r"([0-9]{1,12}) ([1-9][0-9]{0,11})", quota_and_period)  # not "max" or -1
        if limit:
            quotas.append(int(limit[1]) / int(limit[2]))
    return min(quotas, default=None)


def _memory_limits(root: Path) -> Iterator[MemoryLimit]:
    for group in _control_groups(root, "memory"):
        for source, limit_file, usage_file, cache_name in _MEMORY_FILES:
            limit = read_number(group / limit_file)
            if limit is None:
                continue
            statistics = read_text(group / "memory.stat") or ""
            cache = re.search(rf"^{cache_name} ([0-9]{{1,19}})$", statistics, re.MULTILINE)
            cache_bytes = int(cache[1]) if cache else 0
            used_bytes = max(0, (read_number(group / usage_file) or 0) - cache_bytes)
            yield MemoryLimit(limit, max(0, limit - used_bytes), source)


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of this process's control group and its ancestors, in both hierarchies.

    Inside a container, the named group often does not exist, and the container's own group is mounted as the
    root. Walking up to the root finds it in either case.
    """
    mount = root / "sys/fs/cgroup"
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        parts = [part for part in group.split("/") if part not in ("", "..")]
        # v1 mounts "cpu,cpuacct" under that name, often with a link named "cpu"; v2 has no controllers here.
        tops = dict.fromkeys([mount / controllers, mount / controller]) if controllers else [mount]
        for top in tops:
            for depth in range(len(parts), -1, -1):
                yield top.joinpath(*parts[:depth])
