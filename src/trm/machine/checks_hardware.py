"""Checks of what is read about the hardware, against the system's own tools."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from macbook_optimization import macos_readers as macos
from macbook_optimization.hardware_detection import HardwareDetector, on_macos
from macbook_optimization.resource_monitoring import ResourceMonitor
from trm.machine.selfcheck import Check, Finding, Surroundings, failed, passed, skipped

Facts = Mapping[str, Any]
RunTool = Callable[..., str | None]
MEMORY_TOLERANCE = 0.01  # tools round, and a kernel keeps some for itself
_POWER_LINE = re.compile(r"'(AC|Battery) Power'")


def hardware_checks() -> list[Check]:
    return [
        Check("CPU", check_cpu),
        Check("memory", check_memory),
        Check("battery", check_battery),
        Check("heat", check_heat),
    ]


def compare(ours: Facts, theirs: Facts, tolerance: float = 0.0) -> Finding:
    """Compare what both report; at least one fact has to be known."""
    known = [name for name in ours if theirs.get(name) is not None]
    facts: dict[str, Any] = {"read": dict(ours), "tools": dict(theirs)}
    if not known:
        return skipped("no tool of the system reports this", **facts)
    wrong = [name for name in known if not _agree(ours[name], theirs[name], tolerance)]
    if wrong:
        texts = (f"{name} is {ours[name]}, but the system's tools say {theirs[name]}" for name in wrong)
        return failed("; ".join(texts), **facts)
    return passed(**facts)


def _agree(ours: Any, theirs: Any, tolerance: float) -> bool:
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return abs(ours - theirs) <= tolerance * abs(theirs)
    return bool(ours == theirs)


def check_cpu(here: Surroundings) -> Finding:
    cpu = here.hardware.cpu
    ours = {"cores": cpu.cores, "threads": cpu.threads, "brand": cpu.brand}
    return compare(ours, cpu_of_tools(macos.run_tool, macos_system=on_macos()))


def cpu_of_tools(run_tool: RunTool, *, macos_system: bool) -> Facts:
    if macos_system:
        names = ("hw.physicalcpu", "hw.logicalcpu", "machdep.cpu.brand_string")
        facts = macos.parse_sysctl(run_tool("/usr/sbin/sysctl", *names))
        return {
            "cores": macos.count(facts, names[0]),
            "threads": macos.count(facts, names[1]),
            "brand": facts.get(names[2]),
        }
    rows = [line.split(",") for line in (run_tool("lscpu", "-p=CPU,CORE,SOCKET") or "").splitlines()]
    cpus = [row for row in rows if len(row) == 3 and row[0].isdigit()]
    named = re.search(r"^Model name:\s*(.+)$", run_tool("lscpu") or "", re.MULTILINE)
    return {
        "cores": len({tuple(row[1:]) for row in cpus}) or None,
        "threads": len(cpus) or None,
        "brand": None if named is None else named[1].strip(),
    }


def check_memory(here: Surroundings) -> Finding:
    memory = here.hardware.memory
    if memory.limited_by is not None:
        return skipped(f"the memory of this process is limited ({memory.limited_by})")
    theirs = memory_of_tools(macos.run_tool, macos_system=on_macos())
    if not 0 < memory.available_memory <= memory.total_memory:
        return failed(f"{memory.available_memory} of {memory.total_memory} bytes are available")
    return compare({"total_bytes": memory.total_memory}, theirs, MEMORY_TOLERANCE)


def memory_of_tools(run_tool: RunTool, *, macos_system: bool) -> Facts:
    if macos_system:
        return {
            "total_bytes": macos.count(
                macos.parse_sysctl(run_tool("/usr/sbin/sysctl", "hw.memsize")), "hw.memsize"
            )
        }
    found = re.search(r"^Mem:\s+(\d{1,20})", run_tool("free", "-b") or "", re.MULTILINE)
    return {"total_bytes": None if found is None else int(found[1])}


def check_battery(here: Surroundings) -> Finding:
    power = HardwareDetector().detect_power()
    if power.on_battery is None and power.battery_percent is None:
        return skipped("this machine reports no battery")
    text = macos.run_tool(*macos.BATTERY) if on_macos() else None  # Linux has no tool of its own
    return compare({"on_battery": power.on_battery}, battery_of_tools(text))


def battery_of_tools(text: str | None) -> Facts:
    """Read `pmset -g batt` differently from the program."""
    found = _POWER_LINE.search(text or "")
    return {"on_battery": None if found is None else found[1] == "Battery"}


def check_heat(here: Surroundings) -> Finding:
    state = ResourceMonitor().get_thermal_state()
    facts: dict[str, Any] = dict(state)
    if all(value is None for value in facts.values()):
        return skipped("this machine reports neither temperatures nor throttling")
    if state.temperature is not None and not -20 < state.temperature < 130:
        return failed(f"a temperature of {state.temperature} degrees Celsius is impossible", **facts)
    return passed(**facts, load_average=os.getloadavg()[0])
