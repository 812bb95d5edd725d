"""What macOS's own tools say: text in, facts out.

`run_tool` is the only function here that touches the machine. The others read recorded output as they read
live output, and that is how they are tested: nobody has run them on a Mac yet. A line that is missing, cut
off or not understood makes its fact `None`, never an exception, because these tools change with every macOS.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping

# Names are asked for one by one where `sysctl hw` leaves them out: hw.model is one, and the pressure level is
# hidden from every listing. https://github.com/giampaolo/psutil/issues/2725
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

_BYTES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = re.compile(r"[0-9]{1,19}")  # longer ones are not counts, and int() refuses very long ones
_MODULE_TYPE = re.compile(r'(?:"dimm_type"|\bType)\s*:\s*"?(\w*DDR\w*)', re.IGNORECASE)
_MODULE_SPEED = re.compile(r'(?:"dimm_speed"|\bSpeed)\s*:\s*"?([0-9]{1,6}) (?:MHz|MT/s)')
_AMOUNT = r"([0-9]{1,12}(?:[.,][0-9]{1,6})?)([KMGT])"
_SWAP = re.compile(rf"total = {_AMOUNT}\s+used = {_AMOUNT}")
_PAGES = re.compile(r"^([\w -]+):\s+([0-9]{1,18})\.", re.MULTILINE)
_THERMAL_PRESSURES = ("nominal", "moderate", "heavy", "trapping", "sleeping")  # 0 to 4
_MEMORY_PRESSURES = {"1": "normal", "2": "warning", "4": "critical"}
_ARM64 = "16777228"  # CPU_TYPE_ARM64; a translated process is told 7, x86
_ARM_NAMES = {"hw.optional.neon": "NEON", "hw.optional.neon_fp16": "FP16"}  # all that macOS 11 has


def run_tool(*command: str) -> str | None:
    """What the tool prints, or None where it is absent, hangs or says nothing.

    The exit status does not count: sysctl answers for the names it knows and then fails for the others.
    """
    plain = {**os.environ, "LC_ALL": "C"}  # sysctl prints numbers in the user's way otherwise
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=10, check=False, env=plain
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout or None


def parse_sysctl(text: str | None) -> dict[str, str]:
    lines = (line.partition(":") for line in _whole_lines(text).splitlines())
    return {name.strip(): value.strip() for name, colon, value in lines if colon}


def count(facts: Mapping[str, str], name: str) -> int | None:
    """None for zero too: nothing has zero cores, bytes or hertz."""
    value = facts.get(name, "")
    return (int(value) or None) if _NUMBER.fullmatch(value) else None


def is_apple_silicon(facts: Mapping[str, str]) -> bool:
    return facts.get("hw.optional.arm64") == "1"


def is_translated(facts: Mapping[str, str]) -> bool:
    """Whether sysctl itself ran under Rosetta, which it does when the process that started it does."""
    return facts.get("sysctl.proc_translated") == "1"


def core_levels(facts: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Fast and slow physical cores; None and None where all cores are alike.

    Levels go from fast to slow. Their names decide where there are any (macOS 12 has none), because an M5 Pro
    has "Super" and "Performance" cores and no slow ones.
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
    """What this process may execute. Under Rosetta that is the translated x86 set, and macOS reports it.

    Apple's AMX is missing on purpose: no feature flag tells of it.
    """
    listed = (facts.get(f"machdep.cpu.{name}", "") for name in ("features", "leaf7_features"))
    names = {"AVX" if name == "AVX1.0" else name.upper() for name in " ".join(listed).split()}
    if facts.get("hw.cputype") == _ARM64:  # the process's, not the chip's
        present = [name for name, value in facts.items() if value == "1"]
        names |= {_ARM_NAMES[name] for name in present if name in _ARM_NAMES}
        names |= {name.partition(".FEAT_")[2].upper() for name in present if ".FEAT_" in name}
    return tuple(sorted(names))


def frequencies(facts: Mapping[str, str]) -> tuple[float | None, float | None]:
    """Nominal and greatest MHz. Intel only, and macOS gives the nominal clock for both, without turbo."""
    if is_apple_silicon(facts):  # silent by nature; under Rosetta an invented 2.4 GHz
        return None, None
    base, greatest = (count(facts, name) for name in ("hw.cpufrequency", "hw.cpufrequency_max"))
    return base and base / 1e6, greatest and greatest / 1e6


def cache_bytes(facts: Mapping[str, str], cache: str) -> int | None:
    """`cache` is l1d, l2 or l3, of the fast cores: the plain names tell of the slowest core, says Apple."""
    return count(facts, f"hw.perflevel0.{cache}cachesize") or count(facts, f"hw.{cache}cachesize")


def swap_bytes(facts: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Total and used. macOS makes swap files as it needs them, so the total grows."""
    found = _SWAP.search(facts.get("vm.swapusage", ""))
    if found is None:
        return None, None
    total, total_unit, used, used_unit = found.groups()
    return _bytes(total, total_unit), _bytes(used, used_unit)


def memory_pressure(facts: Mapping[str, str]) -> str | None:
    return _MEMORY_PRESSURES.get(facts.get("kern.memorystatus_vm_pressure_level", ""))


def memory_module(text: str | None) -> tuple[str | None, int | None]:
    """Type and MT/s (which macOS calls MHz) of the first module; Apple Silicon does not tell the speed.

    Reads the plain form of the report as well as the JSON form. An M1 on macOS 11 says "lp_ddr4".
    """
    report = _whole_lines(text)
    kind, speed = _MODULE_TYPE.search(report), _MODULE_SPEED.search(report)
    return kind and kind[1].replace("_", "").upper(), speed and int(speed[1])


def available_bytes(text: str | None) -> int | None:
    """Free, file-backed and purgeable pages: what can be had without compressing anybody's memory.

    That is what Activity Monitor leaves over beside App, Wired and Compressed, and what Linux calls
    MemAvailable. Inactive pages, which psutil counts, are mostly anonymous: on the recorded 8 GB machine,
    swapping already, they are 1.8 GB and the pages counted here 0.4 GB. File-backed includes speculative.
    """
    size = re.search(r"page size of ([0-9]{1,9}) bytes", text or "")
    pages = dict(_PAGES.findall(text or ""))
    counted = [pages.get(name) for name in ("Pages free", "File-backed pages", "Pages purgeable")]
    if size is None or None in counted:
        return None
    return int(size[1]) * sum(int(number) for number in counted if number is not None)


def power_source(text: str | None) -> tuple[bool | None, float | None]:
    """Whether the battery feeds the machine, and its percentage. A desktop Mac has no percentage."""
    source = re.search(r"Now drawing from '(AC|Battery) Power'", text or "")
    charge = re.search(r"InternalBattery.*?\b([0-9]{1,2}|100)%", text or "")
    return source and source[1] == "Battery", charge and float(charge[1])


def speed_limits(text: str | None) -> tuple[int | None, int | None]:
    """The percentages of its speed and of its scheduled time that the processor may use. Intel only."""
    limits = dict(re.findall(r"\bCPU_(\w+)_Limit\s*=\s*([0-9]{1,2}|100)\n", _whole_lines(text)))
    speed, scheduler = limits.get("Speed"), limits.get("Scheduler")
    return speed and int(speed), scheduler and int(scheduler)


def thermal_pressure(text: str | None) -> str | None:
    """The level that powermetrics shows to root, here without root.

    "nominal" proves little: notifyutil says 0 for a name that nobody publishes, too.
    """
    found = re.fullmatch(r"com\.apple\.system\.thermalpressurelevel ([0-4])\s*", text or "")
    return found and _THERMAL_PRESSURES[int(found[1])]


def _whole_lines(text: str | None) -> str:
    """Without a last line that was cut off: half a number is still a number."""
    return (text or "")[: (text or "").rfind("\n") + 1]


def _bytes(amount: str, unit: str) -> int:
    return round(float(amount.replace(",", ".")) * _BYTES[unit])
