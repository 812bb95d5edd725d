"""`trm doctor`: what this machine can do, the plan that a recipe gets here, and what to change."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from macbook_optimization.cpu_optimization import (
    LEFT_ALONE,
    Setting,
    Speeds,
    measure_speeds,
    settings_before_torch,
)
from macbook_optimization.errors import LaptopError
from macbook_optimization.hardware_detection import HardwareDetector, HardwareSpecs
from macbook_optimization.json_types import JsonMapping, JsonObject
from macbook_optimization.memory_management import read_memory
from macbook_optimization.resource_monitoring import (
    BUSY_PERCENT,
    ResourceMonitor,
    ThermalState,
    other_cpu_percent,
)
from macbook_optimization.training_config_adapter import (
    OptimizedTrainingConfig,
    TrainingConfigAdapter,
    profile_for,
)
from macbook_optimization.units import GIB, MIB
from trm.config import DataConfig, load_config
from trm.display import Display
from trm.machine.devices import DeviceResult, examine_devices
from trm.plan import Plan
from trm.planning.fitting import too_large
from trm.planning.planner import Planner
from trm.tasks.registry import load_task

DEFAULT_RECIPE = "sudoku-6x6"
NUM_EXAMPLES = 32  # memory and speed depend on the shape of the examples, not on their number
MIN_AVAILABLE_BYTES = 2 * GIB
MAX_STALL_PERCENT = 1
MIN_THREAD_EFFICIENCY = 0.7  # speed with all threads, as a share of their number times the speed of one

PlatformFacts: TypeAlias = JsonMapping  # the fields of PlatformCapabilities


@dataclass(frozen=True, slots=True)
class Recommendation:
    problem: str
    action: str  # a command, or what to do where no command does it


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions that change from minute to minute and slow training down."""

    thermal: ThermalState
    stall_percent: float | None  # time for which programs waited for memory; Linux only
    other_cpu_percent: float  # share of all cores that other programs use


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything that `trm doctor` reports."""

    hardware: HardwareSpecs
    platform: PlatformFacts | None  # None if torch could not be loaded
    speeds: Speeds
    conditions: Conditions
    plan: Plan | None  # None if the default recipe cannot be trained here
    devices: tuple[DeviceResult, ...]  # with the default recipe
    profile: str
    defaults: OptimizedTrainingConfig
    settings: tuple[Setting, ...]
    recommendations: tuple[Recommendation, ...]

    def to_json(self) -> JsonObject:
        conditions = self.conditions
        return {
            **self.hardware.to_json(),
            "platform": self.platform,
            "measured": asdict(self.speeds),
            "thermal": asdict(conditions.thermal),
            "stall_percent": conditions.stall_percent,
            "other_cpu_percent": conditions.other_cpu_percent,
            "recipe": DEFAULT_RECIPE,
            "plan": self.plan.to_json() if self.plan else None,
            "devices": [asdict(each) for each in self.devices],
            "profile": self.profile,
            "defaults": asdict(self.defaults),
            "settings": [asdict(setting) for setting in self.settings],
            "recommendations": [asdict(each) for each in self.recommendations],
        }


def examine(display: Display) -> Examination:
    """Detect and measure this machine, and plan the default recipe on it. This takes some seconds."""
    hardware = HardwareDetector().detect(with_torch=False)
    conditions = _read_conditions()
    max_threads = hardware.cpu.compute_threads
    display.message("Measuring matrix products and memory bandwidth.")
    speeds, platform = measure_speeds(sorted({1, max(1, max_threads // 2), max_threads}))
    recommendations = list(recommend(hardware, platform, speeds, conditions))
    plan = None
    devices: tuple[DeviceResult, ...] = ()
    try:
        plan, devices = _plan_default_recipe(hardware, display)
    except LaptopError as error:
        problem = f"{DEFAULT_RECIPE} cannot be trained here: {error}"
        recommendations.insert(0, Recommendation(problem, error.hint or ""))
    threads = plan.execution.threads if plan else max_threads
    return Examination(
        hardware=hardware,
        platform=platform,
        speeds=speeds,
        conditions=conditions,
        plan=plan,
        devices=devices,
        profile=profile_for(hardware.memory.total_memory).name,
        defaults=TrainingConfigAdapter(hardware).calculate_training_parameters(dataset_size=1000),
        settings=(*settings_before_torch(threads), *LEFT_ALONE),
        recommendations=tuple(recommendations),
    )


def _read_conditions() -> Conditions:
    monitor = ResourceMonitor()
    monitor.get_thermal_state()  # a counter of throttling is compared with its next reading
    other_percent = other_cpu_percent()
    return Conditions(monitor.get_thermal_state(), read_memory().stall_percent, other_percent)


def _plan_default_recipe(hardware: HardwareSpecs, display: Display) -> tuple[Plan, tuple[DeviceResult, ...]]:
    config = load_config(DEFAULT_RECIPE)
    task = load_task(config.task)
    options = {**(config.data.build or {}), "train": NUM_EXAMPLES, "test": NUM_EXAMPLES}
    with tempfile.TemporaryDirectory() as directory:
        dataset = Path(directory) / "dataset"
        task.build(options, dataset, lambda what, done, total: None)
        config = config.model_copy(update={"data": DataConfig(path=dataset)})
        planner = Planner(config, task.complete(task.spec(options)), hardware, display)
        plan = planner.choose()
        if plan is None:
            raise too_large(planner)
        return plan, examine_devices(planner)


def recommend(
    hardware: HardwareSpecs, platform: PlatformFacts | None, speeds: Speeds, conditions: Conditions
) -> Iterator[Recommendation]:
    """List what slows training down here, each with what to do about it."""
    yield from _recommend_installation(platform)
    yield from _recommend_memory(hardware, conditions)
    if hardware.power.on_battery:
        yield Recommendation("On battery, the system may slow the CPU down.", "plug in the charger")
    if conditions.thermal.is_throttling:
        yield Recommendation(
            "The CPU is throttled because of heat.", "improve the airflow, and pause other programs"
        )
    elif conditions.thermal.is_at_limit:
        yield Recommendation(
            "The CPU is at its critical temperature.", "improve the airflow, and pause other programs"
        )
    yield from _recommend_quiet_cores(platform, speeds, conditions)


def _recommend_installation(platform: PlatformFacts | None) -> Iterator[Recommendation]:
    if platform is None:
        yield Recommendation("PyTorch cannot be loaded.", "python -m pip install -c constraints/dev.txt -e .")
    elif platform["rosetta"]:
        yield Recommendation(
            "Python runs under Rosetta, which translates every instruction.",
            "arch -arm64 /usr/bin/python3 -m venv .venv",
        )


def _recommend_memory(hardware: HardwareSpecs, conditions: Conditions) -> Iterator[Recommendation]:
    memory = hardware.memory
    if memory.available_memory < MIN_AVAILABLE_BYTES:
        yield Recommendation(
            f"Only {memory.available_memory / MIB:,.0f} MiB of memory is available.",
            "close other programs, the browser first",
        )
    if memory.swap_total and memory.swap_used and memory.swap_used > memory.swap_total / 2:
        yield Recommendation(
            "More than half of the swap space is in use, which slows every step.", "close other programs"
        )
    stall = conditions.stall_percent
    if stall is not None and stall > MAX_STALL_PERCENT:
        yield Recommendation(f"Programs wait for memory {stall:.0f} % of the time.", "close other programs")


def _recommend_quiet_cores(
    platform: PlatformFacts | None, speeds: Speeds, conditions: Conditions
) -> Iterator[Recommendation]:
    """Recommend closing other programs if they are busy, or if more threads are hardly faster than one."""
    if conditions.other_cpu_percent > BUSY_PERCENT:
        yield Recommendation(
            f"Other programs use {conditions.other_cpu_percent:.0f} % of the CPU.",
            "close them, and run trm doctor again",
        )
        return  # which explains slow threads, too
    rates = speeds.products.get("float32", {})
    if platform is None or platform["has_accelerate"] or not rates:  # Accelerate uses threads of its own
        return
    threads = max(rates)
    gain = rates[threads] / rates[min(rates)]
    if gain < MIN_THREAD_EFFICIENCY * threads:
        yield Recommendation(
            f"{threads} threads are only {gain:.1f} times as fast as one: other programs use the cores, or "
            "the cores are hot.",
            "close other programs, and run trm doctor again",
        )
