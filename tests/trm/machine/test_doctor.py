"""`trm doctor`: what it recommends, and the page that it prints."""

import json
from dataclasses import replace

import pytest

from macbook_optimization.cpu_optimization import LEFT_ALONE, Speeds, settings_before_torch
from macbook_optimization.hardware_detection import CPUSpecs, HardwareSpecs, MemorySpecs, PowerSpecs
from macbook_optimization.resource_monitoring import ThermalState
from macbook_optimization.training_config_adapter import TrainingConfigAdapter
from macbook_optimization.units import GIB, KIB, MIB
from trm.machine.devices import DeviceResult
from trm.machine.doctor import Conditions, Examination, Recommendation, recommend
from trm.machine.doctor_report import format_examination
from trm.plan import Execution, Plan

CPU = CPUSpecs(
    brand="Some CPU", architecture="arm64", cores=8, threads=8, performance_cores=4, efficiency_cores=4,
    features=("NEON", "BF16"), base_frequency=None, max_frequency=3200.0, l1d_cache=64 * KIB,
    l2_cache=4 * MIB, l3_cache=None, quota=None,
)  # fmt: skip
MEMORY = MemorySpecs(
    total_memory=16 * GIB, available_memory=8 * GIB, memory_type="LPDDR5", memory_speed=6400,
    swap_total=2 * GIB, swap_used=0, limited_by=None,
)  # fmt: skip
HARDWARE = HardwareSpecs(CPU, MEMORY, PowerSpecs(on_battery=False, battery_percent=80.0), None)
PLATFORM = {"rosetta": False, "has_accelerate": False, "system": "macOS", "torch_version": "2.13.0"}
SPEEDS = Speeds({"float32": {1: 1e11, 4: 3.9e11}, "bfloat16": {1: 4.2e8, 4: 4.5e8}}, bandwidth=6e10)
COOL = ThermalState(is_throttling=False, temperature=45.0, level="nominal", speed_limit_percent=None)
QUIET = Conditions(COOL, stall_percent=0.0, other_cpu_percent=3.0)


def problems(hardware=HARDWARE, platform=PLATFORM, speeds=SPEEDS, conditions=QUIET):
    return [each.problem for each in recommend(hardware, platform, speeds, conditions)]


def with_memory(**changes):
    return replace(HARDWARE, memory=replace(MEMORY, **changes))


def examination(**changes):
    plan = Plan.of(Execution(threads=4), 16, 32, reasons={"threads": "measured"})
    found = Examination(
        hardware=HARDWARE,
        platform=PLATFORM,
        speeds=SPEEDS,
        conditions=QUIET,
        plan=plan,
        devices=(DeviceResult("pytorch", "cpu", None, None, 123.4),),
        profile="16gb",
        defaults=TrainingConfigAdapter(HARDWARE).calculate_training_parameters(dataset_size=1000),
        settings=(*settings_before_torch(4), *LEFT_ALONE),
        recommendations=(),
    )
    return replace(found, **changes)


def test_a_healthy_machine_needs_no_recommendation():
    assert problems() == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"platform": None}, "PyTorch cannot be loaded"),
        ({"platform": {**PLATFORM, "rosetta": True}}, "Rosetta"),
        ({"hardware": with_memory(available_memory=GIB)}, "Only 1,024 MiB of memory is available"),
        ({"hardware": with_memory(swap_used=2 * GIB)}, "More than half of the swap space is in use"),
        ({"hardware": replace(HARDWARE, power=PowerSpecs(True, 50.0))}, "On battery"),
        ({"conditions": replace(QUIET, stall_percent=7.0)}, "wait for memory 7 % of the time"),
        ({"conditions": replace(QUIET, thermal=replace(COOL, is_throttling=True))}, "throttled"),
        ({"conditions": replace(QUIET, thermal=replace(COOL, is_at_limit=True))}, "critical temperature"),
        ({"conditions": replace(QUIET, other_cpu_percent=60.0)}, "Other programs use 60 % of the CPU"),
        ({"speeds": Speeds({"float32": {1: 1e11, 4: 1.1e11}}, None)}, "4 threads are only 1.1 times as fast"),
    ],
)
def test_each_problem_has_one_recommendation(change, words):
    (problem,) = problems(**change)
    assert words in problem


def test_busy_programs_explain_slow_threads():
    slow = Speeds({"float32": {1: 1e11, 4: 1.1e11}}, None)
    (problem,) = problems(speeds=slow, conditions=replace(QUIET, other_cpu_percent=60.0))
    assert "Other programs" in problem


def test_accelerate_is_not_judged_by_threads_which_it_ignores():
    same = Speeds({"float32": {1: 1e11, 4: 1e11}}, None)
    assert problems(platform={**PLATFORM, "has_accelerate": True}, speeds=same) == []


def test_the_page_shows_slow_products_with_three_digits():
    text = format_examination(examination())
    assert "float32    100 GFLOP/s with 1 thread, 390 GFLOP/s with 4 threads" in text
    assert "bfloat16   0.420 GFLOP/s with 1 thread, 0.450 GFLOP/s with 4 threads" in text
    assert "memory     60.0 GB/s when copying" in text


def test_the_page_has_every_section_and_no_unknown_value():
    text = format_examination(examination())
    for title in ("This machine", "Measured", "Plan for sudoku-6x6", "Recommendations"):
        assert f"{title}\n" in text
    assert "cores      8 (8 threads, 4 performance and 4 efficiency cores)" in text
    assert "caches     L1 64.0 KiB, L2 4.00 MiB, L3 not reported" in text
    assert "heat       45 degrees Celsius, level nominal, not throttled" in text
    assert text.endswith("Recommendations\n  none")
    assert "None" not in text


def test_the_page_of_a_machine_that_reports_little_says_so():
    cpu = replace(CPU, brand=None, max_frequency=None, performance_cores=None, efficiency_cores=None)
    memory = replace(MEMORY, memory_type=None, memory_speed=None, swap_total=None, swap_used=None)
    found = examination(
        hardware=HardwareSpecs(cpu, memory, PowerSpecs(None, None), None),
        platform=None,
        speeds=Speeds({}, None),
        conditions=Conditions(ThermalState(None, None, None, None), None, 0.0),
        plan=None,
        recommendations=(Recommendation("PyTorch cannot be loaded.", "install it"),),
    )
    text = format_examination(found)
    assert "None" not in text
    for line in ("clock      not reported", "swap       not reported", "heat       not reported"):
        assert f"{line}\n" in text
    assert "bfloat16   crashes on this CPU\n" in text
    assert text.endswith("PyTorch cannot be loaded.\n      install it")


def test_an_examination_is_json():
    facts = json.loads(json.dumps(examination().to_json()))
    assert facts["cpu"]["cores"] == 8
    assert facts["measured"]["products"]["float32"]["1"] == 1e11
    assert facts["plan"]["micro_batch_size"] == 16
    assert facts["recommendations"] == []


@pytest.mark.parametrize(
    ("device", "line"),
    [
        (DeviceResult("pytorch", "cpu", None, None, 277.4), "pytorch on cpu: 277 samples/s of sudoku-6x6"),
        (DeviceResult("mlx", "gpu", None, None, None), "mlx on gpu: agrees with the CPU, not measured"),
        (
            DeviceResult("pytorch", "mps", "it did not change in step 1", "ema/q_head.bias", None),
            "pytorch on mps: failed the check before a run (ema/q_head.bias: it did not change in step 1)",
        ),
    ],
)
def test_every_device_has_its_verdict_and_its_speed(device, line):
    found = examination(devices=(device,))
    assert f"\n\nBackends and devices\n  {line}\n" in format_examination(found)
    assert found.to_json()["devices"][0]["problem"] == device.problem
