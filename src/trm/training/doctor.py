"""`trm doctor`: this machine, what it can do, the plan that a recipe gets here, and what to mend."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from macbook_optimization.cpu_optimization import (
    LEFT_ALONE,
    Setting,
    Speeds,
    choose_precision,
    measure_speeds,
    settings_before_torch,
)
from macbook_optimization.errors import LaptopError
from macbook_optimization.hardware_detection import GIB, HardwareDetector, HardwareSpecs
from macbook_optimization.memory_management import MIB, read_memory
from macbook_optimization.resource_monitoring import ResourceMonitor, ThermalState
from macbook_optimization.training_config_adapter import (
    OptimizedTrainingConfig,
    TrainingConfigAdapter,
    profile_for,
)
from trm.config import DataConfig, load_config
from trm.runs import Plan
from trm.tasks import load_task
from trm.training.fitting import too_large
from trm.training.planning import Planner
from trm.training.watching import Say

DEFAULT_RECIPE = "sudoku-6x6"
NOT_REPORTED = "not reported"
_INSTRUCTIONS = ("AVX", "AVX2", "FMA", "AVX512F", "AVX512_BF16", "AMX_BF16", "NEON", "BF16", "FP16", "SME")


@dataclass(frozen=True, slots=True)
class Advice:
    problem: str
    command: str  # or what to do, where no command does it


@dataclass(frozen=True, slots=True)
class Examination:
    hardware: HardwareSpecs
    platform: Mapping[str, Any] | None  # None if torch could not be loaded
    speeds: Speeds
    plan: Plan | None
    profile: str
    defaults: OptimizedTrainingConfig
    settings: tuple[Setting, ...]
    advice: tuple[Advice, ...]
    thermal: ThermalState

    def to_json(self) -> dict[str, Any]:
        return {
            **{**self.hardware.to_json(), "platform": self.platform},
            "measured": asdict(self.speeds),
            "recipe": DEFAULT_RECIPE,
            "plan": self.plan.to_json() if self.plan else None,
            "profile": self.profile,
            "defaults": asdict(self.defaults),
            "settings": [asdict(setting) for setting in self.settings],
            "advice": [asdict(advice) for advice in self.advice],
            "thermal": asdict(self.thermal),
        }


def examine(say: Say) -> Examination:
    hardware = HardwareDetector().detect(with_torch=False)
    most = hardware.cpu.compute_threads
    say.message("Measuring matrix products and memory bandwidth.")
    speeds, platform = measure_speeds(sorted({1, max(1, most // 2), most}))
    problems = []
    plan = None
    try:
        plan = _plan_of_default_recipe(hardware, say)
    except LaptopError as error:
        problems.append(Advice(f"{DEFAULT_RECIPE} cannot be trained here: {error}", error.hint or ""))
    thermal = ResourceMonitor().get_thermal_state()
    if thermal.is_throttling:
        problems.append(Advice("The CPU is slowed down by heat", "give it air, and pause other programs"))
    return Examination(
        thermal=thermal,
        hardware=hardware,
        platform=platform,
        speeds=speeds,
        plan=plan,
        profile=profile_for(hardware.memory.total_memory).name,
        defaults=TrainingConfigAdapter(hardware).calculate_training_parameters(dataset_size=1000),
        settings=(*settings_before_torch(plan.threads if plan else most), *LEFT_ALONE),
        advice=tuple(problems + _advice(hardware, platform, speeds)),
    )


def _plan_of_default_recipe(hardware: HardwareSpecs, say: Say) -> Plan:
    """On a few puzzles: memory and speed depend on their shape, not on their number."""
    config = load_config(DEFAULT_RECIPE)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "set"
        task = load_task(config.task)
        options = {**(config.data.build or {}), "train": 32, "test": 32}
        task.build(options, path, lambda what, done, total: None)
        config = config.model_copy(update={"data": DataConfig(path=path)})
        planner = Planner(config, task.shape(options), hardware, say)
        plan = planner.choose()
        if plan is None:
            raise too_large(planner)
        return plan


def _advice(hardware: HardwareSpecs, platform: Mapping[str, Any] | None, speeds: Speeds) -> list[Advice]:
    found = []
    memory = hardware.memory
    if platform is None:
        install = "python -m pip install -c constraints/dev.txt -e ."
        found.append(Advice("PyTorch cannot be loaded", install))
    elif platform["rosetta"]:
        found.append(
            Advice("Python runs translated, under Rosetta", "arch -arm64 /usr/bin/python3 -m venv .venv")
        )
    if memory.available_memory < 2 * GIB:
        free = f"Only {memory.available_memory / MIB:,.0f} MiB of memory are available"
        found.append(Advice(free, "close other programs, the browser first"))
    if memory.swap_total and memory.swap_used and memory.swap_used > memory.swap_total / 2:
        found.append(
            Advice("Most of the swap is in use, which makes every step slow", "close other programs")
        )
    if hardware.power.on_battery:
        found.append(Advice("On battery: the system may slow the CPU down", "plug the charger in"))
    float32 = speeds.products.get("float32", {})
    follows = platform is not None and not platform["has_accelerate"]  # Accelerate has threads of its own
    if follows and float32 and float32[max(float32)] < 0.7 * max(float32) * float32[min(float32)]:
        most = max(float32)
        found.append(
            Advice(
                f"{most} threads are only {float32[most] / float32[min(float32)]:.1f} times as fast as one: "
                "other programs use the cores, or they are hot",
                "close other programs and run trm doctor again",
            )
        )
    stall = read_memory().stall_percent
    if stall is not None and stall > 1:
        found.append(Advice(f"Programs wait for memory {stall:.0f} % of the time", "close other programs"))
    return found


def page(found: Examination) -> str:
    """Everything in one readable page."""
    sections = (
        ("This machine", _machine_lines(found)),
        ("Measured", _speed_lines(found.speeds)),
        (f"Plan for {DEFAULT_RECIPE}", found.plan.explain() if found.plan else ["none; see below"]),
        ("A machine of this size", _profile_lines(found)),
        ("Set before PyTorch is loaded", [_setting_line(s) for s in found.settings if s.value is not None]),
        ("Left alone", [_setting_line(s) for s in found.settings if s.value is None]),
        ("To mend", [f"{a.problem}\n      {a.command}" for a in found.advice] or ["nothing found"]),
    )
    return "\n\n".join(f"{title}\n  " + "\n  ".join(lines) for title, lines in sections)


def _machine_lines(found: Examination) -> list[str]:
    cpu, memory, power = found.hardware.cpu, found.hardware.memory, found.hardware.power
    platform = found.platform or {}
    kinds = f", {cpu.performance_cores} fast and {cpu.efficiency_cores} slow" if cpu.performance_cores else ""
    quota = f", of which {cpu.quota:g} may be used" if cpu.quota is not None else ""
    useful = [name for name in _INSTRUCTIONS if name in cpu.features]
    inside = f" ({memory.limited_by} limit)" if memory.limited_by else ""
    charge = "" if power.battery_percent is None else f", {power.battery_percent:.0f} %"
    source = {True: "battery", False: "mains", None: NOT_REPORTED}[power.on_battery]
    devices = ["cpu", *(name for name in ("mps", "cuda") if platform.get(f"has_{name}"))]
    blas = ", ".join(platform.get("blas", ())) or NOT_REPORTED
    return [
        f"CPU        {_known(cpu.brand)}, {cpu.architecture}",
        f"cores      {cpu.cores} ({cpu.threads} threads{kinds}){quota}",
        f"clock      {_mhz(cpu.base_frequency)} nominal, {_mhz(cpu.max_frequency)} greatest",
        f"caches     L1 {_size(cpu.l1d_cache)}, L2 {_size(cpu.l2_cache)}, L3 {_size(cpu.l3_cache)}",
        f"features   {' '.join(useful) or NOT_REPORTED}",
        f"memory     {_size(memory.total_memory)}{inside}, {_size(memory.available_memory)} available, "
        f"type {_known(memory.memory_type)}, speed {_known(memory.memory_speed)}",
        f"swap       {_size(memory.swap_used)} of {_size(memory.swap_total)} in use",
        f"system     {_known(platform.get('system'))} {_known(platform.get('os_version'))}, "
        f"model {_known(platform.get('machine_model'))}, Python {_known(platform.get('python_version'))}",
        f"PyTorch    {_known(platform.get('torch_version'))}, BLAS {blas}, devices {', '.join(devices)}",
        f"power      {source}{charge}",
        f"heat       {_heat(found.thermal)}",
    ]


def _speed_lines(speeds: Speeds) -> list[str]:
    lines = []
    for precision in ("float32", "bfloat16"):
        rates = speeds.products.get(precision)
        text = "does not survive on this CPU"
        if rates:
            text = ", ".join(f"{rate / 1e9:.0f} GFLOP/s with {t}" for t, rate in sorted(rates.items()))
        lines.append(f"{precision:10} {text} threads" if rates else f"{precision:10} {text}")
    best = {name: max(rates.values()) for name, rates in speeds.products.items() if rates}
    lines.append(f"fastest    {choose_precision(best)}")
    bandwidth = NOT_REPORTED if speeds.bandwidth is None else f"{speeds.bandwidth / 1e9:.1f} GB/s"
    lines.append(f"memory     {bandwidth}, copying")
    return lines


def _profile_lines(found: Examination) -> list[str]:
    defaults = found.defaults
    return [
        f"{found.profile} profile: what a recipe without a model gets; rules of thumb, not measured",
        f"batch {defaults.batch_size} x {defaults.gradient_accumulation_steps}, "
        f"sequences up to {defaults.max_sequence_length}, {defaults.memory_limit_mb} MiB",
    ]


def _setting_line(setting: Setting) -> str:
    value = "" if setting.value is None else f"={setting.value}"
    return f"{setting.name}{value} ({setting.why})"


def _known(value: Any) -> str:
    return NOT_REPORTED if value is None else str(value)


def _heat(state: ThermalState) -> str:
    degrees = NOT_REPORTED if state.temperature is None else f"{state.temperature:.0f} degrees Celsius"
    slowed = {True: "slowed down", False: "not slowed down", None: "slowing down not reported"}
    return f"{degrees}, level {_known(state.level)}, {slowed[state.is_throttling]}"


def _mhz(value: float | None) -> str:
    return NOT_REPORTED if value is None else f"{value:.0f} MHz"


def _size(value: int | None) -> str:
    if value is None:
        return NOT_REPORTED
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value} bytes"
