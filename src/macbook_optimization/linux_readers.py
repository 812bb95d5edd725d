"""What Linux says in /proc and /sys, below a root that tests put in a temporary directory.

A container's limits are files as well: the tightest one of its control group and all ancestors counts, since
the kernel enforces each of them. A file that is absent or strange makes its fact `None`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# One spelling for what Linux and macOS, x86 and ARM name differently.
_FEATURE_NAMES = {
    "sse4_1": "SSE4.1",
    "sse4_2": "SSE4.2",
    "pni": "SSE3",
    "asimd": "NEON",
    "asimdhp": "FP16",
    "asimddp": "DOTPROD",
    "asimdfhm": "FHM",
}
# The files of limit and use, and in memory.stat the page cache that is given up when memory is short.
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
    """None for "max" and -1 too, which is how a limit says that there is none."""
    text = read_text(path) or ""
    return int(text) if re.fullmatch(r"[0-9]{1,19}", text) else None


def cpu_brand_and_features(root: Path) -> tuple[str | None, tuple[str, ...]]:
    """Of the first processor. ARM has no "model name"."""
    found: dict[str, str] = {}
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    flags = found.get("flags") or found.get("Features") or ""
    names = {_FEATURE_NAMES.get(flag, flag.upper()) for flag in flags.split()}
    return found.get("model name") or None, tuple(sorted(names))


def cache_bytes(root: Path) -> dict[str, int]:
    """l1d, l2 and l3 of the first processor, those that are reported."""
    found = {}
    for index in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (read_text(index / name) or "" for name in ("level", "type", "size"))
        if kind != "Instruction" and re.fullmatch(r"[0-9]{1,9}K", size):
            found["l1d" if level == "1" else f"l{level}"] = int(size[:-1]) * 1024
    return found


def frequencies(root: Path) -> tuple[float | None, float | None]:
    """Nominal and greatest MHz; virtual machines report neither, and not every driver the nominal one."""
    directory = root / "sys/devices/system/cpu/cpu0/cpufreq"
    base, greatest = (read_number(directory / name) for name in ("base_frequency", "cpuinfo_max_freq"))
    return (base / 1000 if base else None), (greatest / 1000 if greatest else None)


def memory_bytes(root: Path) -> dict[str, int]:
    lines = re.findall(r"^(\w+):\s+([0-9]{1,15}) kB", read_text(root / "proc/meminfo") or "", re.MULTILINE)
    return {name: int(kibibytes) * 1024 for name, kibibytes in lines}


def machine_model(root: Path) -> str | None:
    return read_text(root / "sys/class/dmi/id/product_name") or None


def mapped_libraries(root: Path) -> set[str]:
    """File names of the shared libraries in this process."""
    return set(re.findall(r"/([^/\n]+\.so[^/\n]*)$", read_text(root / "proc/self/maps") or "", re.MULTILINE))


def throttle_count(root: Path) -> int | None:
    """How often the processors have slowed down for heat since the machine started; Intel only."""
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/*_throttle_count")
    counts = [number for number in map(read_number, files) if number is not None]
    return sum(counts) if counts else None


def oom_kills(root: Path = Path("/")) -> int | None:
    """Processes that the kernel has killed for want of memory since the machine started."""
    found = re.search(r"^oom_kill ([0-9]{1,19})$", read_text(root / "proc/vmstat") or "", re.MULTILINE)
    return int(found[1]) if found else None


def memory_limit(root: Path, machine_bytes: int) -> MemoryLimit | None:
    """None unless a control group allows less than the machine has. (v1 says 2**63 where it allows all.)"""
    limits = [limit for limit in _memory_limits(root) if limit.limit_bytes < machine_bytes]
    if not limits:
        return None
    tightest = min(limits, key=lambda limit: limit.limit_bytes)
    unused = min(limit.unused_bytes for limit in limits)
    return MemoryLimit(tightest.limit_bytes, unused, tightest.source)


def cpu_quota(root: Path) -> float | None:
    """Processors' worth of time that the tightest control group allows; None if that is no matter."""
    quotas = []
    for group in _control_groups(root, "cpu"):
        both = read_text(group / "cpu.max")  # v2; the two files are v1
        if both is None:
            both = " ".join(read_text(group / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
        limited = re.fullmatch(r"([0-9]{1,12}) ([1-9][0-9]{0,11})", both)  # neither "max" nor -1
        if limited:
            quotas.append(int(limited[1]) / int(limited[2]))
    return min(quotas, default=None)


def _memory_limits(root: Path) -> Iterator[MemoryLimit]:
    for group in _control_groups(root, "memory"):
        for source, limit_file, use_file, cache_name in _MEMORY_FILES:
            limit = read_number(group / limit_file)
            if limit is not None:
                statistics = read_text(group / "memory.stat") or ""
                cache = re.search(rf"^{cache_name} ([0-9]{{1,19}})$", statistics, re.MULTILINE)
                used = (read_number(group / use_file) or 0) - (int(cache[1]) if cache else 0)
                yield MemoryLimit(limit, max(0, limit - max(0, used)), source)


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """The directories of this process's group and its ancestors, in both hierarchies.

    Inside a container the named group often is not there, and what is mounted as the top is the container's
    own: walking up finds it in either case.
    """
    mounted = root / "sys/fs/cgroup"
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        parts = [part for part in group.split("/") if part not in ("", "..")]
        for top in dict.fromkeys([mounted / controllers, mounted / controller] if controllers else [mounted]):
            yield from (top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))
