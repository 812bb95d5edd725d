"""Parse the output of macOS's command-line tools.

Only `run_tool` runs anything. The other functions are pure and tested with recorded output; they have not
been run on a Mac yet. A line that is missing, truncated or not understood gives `None`, never an exception,
because these tools change with every macOS release.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping

from macbook_optimization.units import GIB, KIB, MIB

# Some names must be requested individually: `sysctl hw` omits hw.model, and the pressure level is hidden from
# every listing. https://github.com/giampaolo/psutil/issues/2725
SYSCTL = (
    "/usr/sbin/sysctl",
    "hw",
    "machdep.cpu",
    "hw.model",
    "kern.osproductversion",
    "kern.memorystatus_vm_pressure_level",
    "vm.swapusage",
    "sysctl.proc_translated",
)
MEMORY_MODULES = ("/usr/sbin/system_profiler", "-json", "SPMemoryDataType")
VM_STAT = ("/usr/bin/vm_stat",)
BATTERY = ("/usr/bin/pmset", "-g", "batt")
SPEED_LIMITS = ("/usr/bin/pmset", "-g", "therm")
THERMAL_PRESSURE = ("/usr/bin/notifyutil", "-g", "com.apple.system.thermalpressurelevel")

_UNIT_BYTES = {"K": KIB, "M": MIB, "G": GIB, "T": KIB * GIB}
_NUMBER = re.compile(r"[0-9]{1,19}")  # longer ones are not counts, and int() rejects very long ones
_MODULE_TYPE = re.compile(r'(?:"dimm_type"|\bType)\s*:\s*"?(\w*DDR\w*)', re.IGNORECASE)
_MODULE_SPEED = re.compile(r'(?:"dimm_speed"|\bSpeed)\s*:\s*"?([0-9]{1,6}) (?:MHz|MT/s)')
_AMOUNT = r"([0-9]{1,12}(?:[.,][0-9]{1,6})?)([KMGT])"
_SWAP = re.compile(rf"total = {_AMOUNT}\s+used = {_AMOUNT}")
_PAGES = re.compile(r"^([\w -]+):\s+([0-9]{1,18})\.", re.MULTILINE)
THERMAL_LEVELS = ("nominal", "moderate", "heavy", "trapping", "sleeping")  # 0 to 4
_MEMORY_PRESSURES = {"1": "normal", "2": "warning", "4": "critical"}
_TOOL_TIMEOUT_SECONDS = 10
_ARM64 = "16777228"  # CPU_TYPE_ARM64; a process under Rosetta gets 7 (x86)
_ARM_NAMES = {"hw.optional.neon": "NEON", "hw.optional.neon_fp16": "FP16"}  # the only names in macOS 11


def run_tool(*command: str) -> str | None:
    """Return the output of a tool, or None if it is absent, hangs or prints nothing.

    The exit status is ignored: sysctl prints the names that exist and then fails for the others.
    """
    environment = {**os.environ, "LC_ALL": "C"}  # without it, sysctl formats numbers for the user's locale
    try:
        finished = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TOOL_TIMEOUT_SECONDS,
            check=False,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return finished.stdout or None


def parse_sysctl(text: str | None) -> dict[str, str]:
    lines = (line.partition(":") for line in _complete_lines(text).splitlines())
    return {name.strip(): value.strip() for name, colon, value in lines if colon}


def count(facts: Mapping[str, str], name: str) -> int | None:
    """Return a positive number, or None: zero cores, bytes or hertz mean that nothing is reported."""
    value = facts.get(name, "")
    return (int(value) or None) if _NUMBER.fullmatch(value) else None


def is_apple_silicon(facts: Mapping[str, str]) -> bool:
    return facts.get("hw.optional.arm64") == "1"


def is_translated(facts: Mapping[str, str]) -> bool:
    """Return whether sysctl ran under Rosetta, and therefore also the process that started it."""
    return facts.get("sysctl.proc_translated") == "1"


def core_levels(facts: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return the numbers of fast and slow physical cores; (None, None) where all cores are alike.

    Levels are ordered from fast to slow. Where they have names (macOS 12 has none), the names decide: an
    M5 Pro has "Super" and "Performance" cores, and no slow ones.
    """
    fast = slow = level = 0
    while cores := count(facts, f"hw.perflevel{level}.physicalcpu"):
        name = facts.get(f"hw.perflevel{level}.name")
        if name == "Efficiency" or (level > 0 and not name):
            slow += cores
        else:
            fast += cores
        level += 1
    return (fast, slow) if level > 1 else (None, None)


def cpu_features(facts: Mapping[str, str]) -> tuple[str, ...]:
    """Return the instruction sets that this process can execute; under Rosetta, the translated x86 ones.

    Apple's AMX is absent because no feature flag reports it.
    """
    listed = (facts.get(f"machdep.cpu.{name}", "") for name in ("features", "leaf7_features"))
    names = {"AVX" if name == "AVX1.0" else name.upper() for name in " ".join(listed).split()}
    if facts.get("hw.cputype") == _ARM64:  # of the process, not of the chip
        present = [name for name, value in facts.items() if value == "1"]
        names |= {_ARM_NAMES[name] for name in present if name in _ARM_NAMES}
        names |= {name.partition(".FEAT_")[2].upper() for name in present if ".FEAT_" in name}
    return tuple(sorted(names))


def frequencies(facts: Mapping[str, str]) -> tuple[float | None, float | None]:
    """Return base and maximum frequency in MHz. Intel only; macOS gives the base for both, without turbo."""
    if is_apple_silicon(facts):  # reports none; under Rosetta it claims 2.4 GHz
        return None, None
    base_hertz = count(facts, "hw.cpufrequency")
    max_hertz = count(facts, "hw.cpufrequency_max")
    return base_hertz and base_hertz / 1e6, max_hertz and max_hertz / 1e6


def cache_bytes(facts: Mapping[str, str], cache: str) -> int | None:
    """Return the size of l1d, l2 or l3 of the fast cores; names without a level mean the slowest core."""
    return count(facts, f"hw.perflevel0.{cache}cachesize") or count(facts, f"hw.{cache}cachesize")


def swap_bytes(facts: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return total and used swap. macOS creates swap files on demand, so the total grows."""
    found = _SWAP.search(facts.get("vm.swapusage", ""))
    if found is None:
        return None, None
    total, total_unit, used, used_unit = found.groups()
    return _bytes(total, total_unit), _bytes(used, used_unit)


def memory_pressure(facts: Mapping[str, str]) -> str | None:
    return _MEMORY_PRESSURES.get(facts.get("kern.memorystatus_vm_pressure_level", ""))


def memory_module(text: str | None) -> tuple[str | None, int | None]:
    """Return type and MT/s (which macOS calls MHz) of the first module; Apple Silicon reports no speed.

    Accepts the plain and the JSON form of the report. An M1 on macOS 11 reports "lp_ddr4".
    """
    report = _complete_lines(text)
    kind = _MODULE_TYPE.search(report)
    speed = _MODULE_SPEED.search(report)
    return kind and kind[1].replace("_", "").upper(), speed and int(speed[1])


def available_bytes(text: str | None) -> int | None:
    """Return the size of free, file-backed and purgeable pages: memory available without compression.

    This is the remainder next to App, Wired and Compressed in Activity Monitor, and corresponds to
    MemAvailable on Linux. Inactive pages, which psutil counts, are mostly anonymous: on the recorded 8 GB
    machine, which was already swapping, they are 1.8 GB and the pages counted here 0.4 GB. File-backed pages
    include speculative ones.
    """
    size = re.search(r"page size of ([0-9]{1,9}) bytes", text or "")
    pages = dict(_PAGES.findall(text or ""))
    counted = [pages.get(name) for name in ("Pages free", "File-backed pages", "Pages purgeable")]
    if size is None or None in counted:
        return None
    return int(size[1]) * sum(int(number) for number in counted if number is not None)


def power_source(text: str | None) -> tuple[bool | None, float | None]:
    """Return whether the machine runs on battery, and its charge in percent; None for a desktop Mac."""
    source = re.search(r"Now drawing from '(AC|Battery) Power'", text or "")
    charge = re.search(r"InternalBattery.*?\b([0-9]{1,2}|100)%", text or "")
    return source and source[1] == "Battery", charge and float(charge[1])


def speed_limits(text: str | None) -> tuple[int | None, int | None]:
    """Return the limits on CPU speed and on scheduled CPU time, in percent. Intel only."""
    limits = dict(re.findall(r"\bCPU_(\w+)_Limit\s*=\s*([0-9]{1,2}|100)\n", _complete_lines(text)))
    speed = limits.get("Speed")
    scheduler = limits.get("Scheduler")
    return speed and int(speed), scheduler and int(scheduler)


def thermal_pressure(text: str | None) -> str | None:
    """Return the level that powermetrics shows to root, here without root.

    "nominal" is weak evidence: notifyutil also prints 0 for a name that nobody publishes.
    """
    found = re.fullmatch(r"com\.apple\.system\.thermalpressurelevel ([0-4])\s*", text or "")
    return found and THERMAL_LEVELS[int(found[1])]


def _complete_lines(text: str | None) -> str:
    """Drop a truncated last line: a truncated number would still look like a number."""
    report = text or ""
    return report[: report.rfind("\n") + 1]


def _bytes(amount: str, unit: str) -> int:
    return round(float(amount.replace(",", ".")) * _UNIT_BYTES[unit])
