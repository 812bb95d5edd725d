"""An examination by `trm doctor` as one page of text."""

from __future__ import annotations

from collections.abc import Mapping

from macbook_optimization.cpu_optimization import PRECISIONS, Setting, Speeds, choose_precision
from macbook_optimization.hardware_detection import CPUSpecs, MemorySpecs, PowerSpecs
from macbook_optimization.resource_monitoring import ThermalState
from macbook_optimization.units import GIB, KIB, MIB, counted
from trm.machine.devices import DeviceResult
from trm.machine.doctor import DEFAULT_RECIPE, Examination, PlatformFacts
from trm.machine.text import NOT_REPORTED, significant
from trm.planning.device_choice import REFERENCE

_INSTRUCTION_SETS = (
    "AVX", "AVX2", "FMA", "AVX512F", "AVX512_BF16", "AMX_BF16", "NEON", "BF16", "FP16", "SME"
)  # fmt: skip


def format_examination(found: Examination) -> str:
    sections = {
        "This machine": _machine_lines(found),
        "Measured": _speed_lines(found.speeds),
        f"Plan for {DEFAULT_RECIPE}": found.plan.explain() if found.plan else ["none; see below"],
        "Backends and devices": [_device_line(each) for each in found.devices] or ["not examined; see below"],
        "Default sizes for this machine": _profile_lines(found),
        "Set before PyTorch is loaded": [
            _setting_line(setting) for setting in found.settings if setting.value is not None
        ],
        "Left at the default": [
            _setting_line(setting) for setting in found.settings if setting.value is None
        ],
        "Recommendations": _recommendation_lines(found),
    }
    return "\n\n".join(f"{title}\n  " + "\n  ".join(lines) for title, lines in sections.items())


def _machine_lines(found: Examination) -> list[str]:
    hardware = found.hardware
    return [
        *_cpu_lines(hardware.cpu),
        *_memory_lines(hardware.memory),
        *_platform_lines(found.platform or {}),
        _power_line(hardware.power),
        _heat_line(found.conditions.thermal),
        f"load       {found.conditions.other_cpu_percent:.0f} % of the CPU is used by other programs",
    ]


def _cpu_lines(cpu: CPUSpecs) -> list[str]:
    kinds = ""
    if cpu.performance_cores:
        kinds = f", {cpu.performance_cores} performance and {cpu.efficiency_cores} efficiency cores"
    quota = "" if cpu.quota is None else f"; this process may use {cpu.quota:g}"
    supported = [name for name in _INSTRUCTION_SETS if name in cpu.features]
    return [
        f"CPU        {_known(cpu.brand)}, {cpu.architecture}",
        f"cores      {cpu.cores} ({counted(cpu.threads, 'thread')}{kinds}){quota}",
        f"clock      {_clock(cpu)}",
        f"caches     L1 {_size(cpu.l1d_cache)}, L2 {_size(cpu.l2_cache)}, L3 {_size(cpu.l3_cache)}",
        f"features   {' '.join(supported) or NOT_REPORTED}",
    ]


def _memory_lines(memory: MemorySpecs) -> list[str]:
    limit = f" ({memory.limited_by} limit)" if memory.limited_by else ""
    speed = NOT_REPORTED if memory.memory_speed is None else f"{memory.memory_speed} MT/s"
    swap = NOT_REPORTED
    if memory.swap_total is not None:
        swap = (
            f"{_size(memory.swap_used)} of {_size(memory.swap_total)} in use" if memory.swap_total else "none"
        )
    return [
        f"memory     {_size(memory.total_memory)}{limit}, {_size(memory.available_memory)} available, "
        f"type {_known(memory.memory_type)}, speed {speed}",
        f"swap       {swap}",
    ]


def _platform_lines(platform: PlatformFacts) -> list[str]:
    devices = ["cpu", *(name for name in ("mps", "cuda") if platform.get(f"has_{name}"))]
    blas = ", ".join(platform.get("blas", ())) or NOT_REPORTED
    return [
        f"system     {_known(platform.get('system'))} {_known(platform.get('os_version'))}, "
        f"model {_known(platform.get('machine_model'))}, Python {_known(platform.get('python_version'))}",
        f"PyTorch    {_known(platform.get('torch_version'))}, BLAS {blas}, devices {', '.join(devices)}",
    ]


def _power_line(power: PowerSpecs) -> str:
    source = {True: "battery", False: "mains", None: NOT_REPORTED}[power.on_battery]
    charge = "" if power.battery_percent is None else f", {power.battery_percent:.0f} % charged"
    return f"power      {source}{charge}"


def _heat_line(state: ThermalState) -> str:
    reported = []
    if state.temperature is not None:
        reported.append(f"{state.temperature:.0f} degrees Celsius")
    if state.level is not None:
        reported.append(f"level {state.level}")
    if state.is_throttling is not None:
        reported.append("throttled" if state.is_throttling else "not throttled")
    if state.is_at_limit:
        reported.append("at the critical temperature of a sensor")
    return f"heat       {', '.join(reported) or NOT_REPORTED}"


def _speed_lines(speeds: Speeds) -> list[str]:
    lines = [f"{precision:10} {_rates(speeds.products.get(precision, {}))}" for precision in PRECISIONS]
    best = {name: max(rates.values()) for name, rates in speeds.products.items() if rates}
    bandwidth = NOT_REPORTED
    if speeds.bandwidth is not None:
        bandwidth = f"{significant(speeds.bandwidth / 1e9)} GB/s"
    return [*lines, f"use        {choose_precision(best)}", f"memory     {bandwidth} when copying"]


def _rates(rates: Mapping[int, float]) -> str:
    if not rates:
        return "crashes on this CPU"
    return ", ".join(
        f"{significant(rate / 1e9)} GFLOP/s with {counted(count, 'thread')}"
        for count, rate in sorted(rates.items())
    )


def _device_line(found: DeviceResult) -> str:
    if found.problem is not None:
        where = "" if found.tensor is None else f"{found.tensor}: "
        return f"{found.place}: failed the check before a run ({where}{found.problem})"
    verdict = "" if found.place == REFERENCE else "agrees with the CPU, "
    rate = found.samples_per_second
    speed = "not measured" if rate is None else f"{significant(rate)} samples/s of {DEFAULT_RECIPE}"
    return f"{found.place}: {verdict}{speed}"


def _profile_lines(found: Examination) -> list[str]:
    defaults = found.defaults
    return [
        f"{found.profile} profile, for a recipe without a model section (rules of thumb, not measured)",
        f"batch {defaults.batch_size} x {defaults.gradient_accumulation_steps}, "
        f"sequences up to {defaults.max_sequence_length} tokens, {defaults.memory_limit_mb:,} MiB",
    ]


def _setting_line(setting: Setting) -> str:
    value = "" if setting.value is None else f"={setting.value}"
    return f"{setting.name}{value} ({setting.why})"


def _recommendation_lines(found: Examination) -> list[str]:
    if not found.recommendations:
        return ["none"]
    return [f"{each.problem}\n      {each.action}".rstrip() for each in found.recommendations]


def _known(value: object) -> str:
    return NOT_REPORTED if value is None else str(value)


def _clock(cpu: CPUSpecs) -> str:
    frequencies = {"nominal": cpu.base_frequency, "maximum": cpu.max_frequency}
    reported = [f"{value:.0f} MHz {name}" for name, value in frequencies.items() if value is not None]
    return ", ".join(reported) or NOT_REPORTED


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return NOT_REPORTED
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if num_bytes >= size:
            return f"{significant(num_bytes / size)} {unit}"
    return f"{num_bytes} bytes"
