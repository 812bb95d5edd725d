"""Throughput is measured by real training; leaks and regressions are reported only when real."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny import run_config, sudoku_dataset

from macbook_optimization.errors import ConfigError, DataError, LaptopError
from macbook_optimization.performance_reporting import (
    MIB,
    MachineLoad,
    MemoryLeakDetector,
    PerformanceBenchmark,
    PerformanceRegression,
    analyze_performance_bottlenecks,
    diagnose_slow_training,
    measure_load,
    summarise_rows,
)

CALM = MachineLoad(memory_percent=50, cpu_percent=95, is_throttling=None)


def row(step, rate, rss_mb=100, cpu=150):
    return {
        "step": step,
        "seconds": step / 2,
        "samples_per_second": rate,
        "rss_bytes": rss_mb * MIB,
        "cpu_percent": cpu,
    }


def leaks(resident_mb, **settings):
    detector = MemoryLeakDetector(**settings)
    found = [detector.check_for_leaks(step, int(mb * MIB)) for step, mb in enumerate(resident_mb)]
    return [leak for leak in found if leak is not None]


@pytest.mark.slow
def test_the_benchmark_trains_and_measures(tmp_path):
    dataset = sudoku_dataset(tmp_path / "set")
    # A whole recipe, which would end after 20 steps and train on another dataset.
    config = run_config(tmp_path / "elsewhere", data__build={"size": 4}).model_dump()
    result = PerformanceBenchmark().run_full_benchmark(config, dataset, duration_minutes=0.1)
    assert result["samples_per_second"] == result.samples_per_second > 0
    assert 0 < result["memory_efficiency"] < 100
    assert 10 < result["cpu_utilization"] <= 110, "above 100 because clocks are coarse"
    assert result.peak_memory_mb > 100, "torch alone needs that much"
    assert result.steps > 20
    assert 5 < result.seconds < 30
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.slow
def test_a_benchmark_that_cannot_train_gives_the_reason(tmp_path):
    benchmark = PerformanceBenchmark()
    with pytest.raises(LaptopError, match="could not train: There is no dataset at") as caught:
        benchmark.run_full_benchmark({}, tmp_path / "nowhere", 0.1)
    assert caught.value.hint == f"Build one: trm data build TASK --out {tmp_path / 'nowhere'}"
    with pytest.raises(ConfigError, match="did you mean hidden_size"):
        benchmark.run_full_benchmark({"hiden_size": 64}, tmp_path, 0.1)
    with pytest.raises(ConfigError, match="duration_minutes is 0"):
        benchmark.run_full_benchmark({}, tmp_path, 0)
    (tmp_path / "build.json").write_text("[]")
    with pytest.raises(DataError, match=r"build\.json does not describe how"):
        benchmark.run_full_benchmark({}, tmp_path, 0.1)


def test_a_benchmark_leaves_out_the_warm_up_and_evaluations():
    rows = [row(2, 1), row(4, 30, rss_mb=300), {"step": 4, "exact_accuracy": 0.5}, row(6, 10), row(8, 20)]
    result = summarise_rows(rows, peak_bytes=200 * MIB, budget_bytes=400 * MIB, num_cores=2)
    assert result.samples_per_second == 20  # median of 30, 10 and 20
    assert result.cpu_utilization == 75  # 150 % of one core
    assert (result.peak_memory_mb, result.memory_efficiency) == (300, 75)  # the row has more than 200
    assert (result.steps, result.seconds) == (8, 4)
    with pytest.raises(KeyError):
        result["speed"]


def test_rows_are_distinguished_by_their_kind_where_they_have_one():
    evaluation = {**row(3, 1000), "kind": "eval"}
    rows = [{**row(1, 7), "kind": "train"}, evaluation, {**row(2, 9), "kind": "train"}, evaluation]
    result = summarise_rows(rows, peak_bytes=0, budget_bytes=MIB, num_cores=1)
    assert (result.samples_per_second, result.steps) == (9, 2)
    older = [row(1, 7), {"step": 1, "exact_accuracy": 0.5}, row(2, 9)]
    assert summarise_rows(older, peak_bytes=0, budget_bytes=MIB, num_cores=1) == result


def test_a_benchmark_needs_at_least_one_row():
    assert summarise_rows([row(1, 7)], 0, MIB, 1).samples_per_second == 7
    with pytest.raises(LaptopError, match="before its first step"):
        summarise_rows([], 0, MIB, 1)


def test_every_bottleneck_has_a_recommendation():
    metrics = {
        "memory_usage_mb": [5000, 7400, 6000],
        "cpu_usage_percent": [20, 69],
        "thermal_throttling_events": [3.5, 8.0],
    }
    found = analyze_performance_bottlenecks(metrics, total_memory_mb=8192)  # 90 % of it is 7373
    advice = found.pop("recommendations")
    assert found == {"memory_bottleneck": True, "cpu_underutilization": True, "thermal_issues": 2}
    assert len(advice) == 3


def test_a_run_without_bottlenecks_gets_no_advice():
    metrics = {
        "memory_usage_mb": [7300],
        "cpu_usage_percent": [20, 71],
        "thermal_throttling_events": [],
    }
    assert analyze_performance_bottlenecks(metrics, total_memory_mb=8192) == {
        "memory_bottleneck": False,
        "cpu_underutilization": False,
        "thermal_issues": 0,
        "recommendations": [],
    }


@pytest.mark.parametrize("metrics", [{}, {"memory_usage_mb": [], "cpu_usage_percent": []}])
def test_what_was_not_measured_is_unknown(metrics):
    assert analyze_performance_bottlenecks(metrics) == {
        "memory_bottleneck": None,
        "cpu_underutilization": None,
        "thermal_issues": None,
        "recommendations": [],
    }


def test_cpu_usage_of_one_core_is_divided_by_the_number_of_cores():
    metrics = {"cpu_usage_percent": [100, 200]}
    assert not analyze_performance_bottlenecks(metrics, num_cores=2)["cpu_underutilization"]
    assert analyze_performance_bottlenecks(metrics, num_cores=4)["cpu_underutilization"]


@pytest.mark.parametrize(
    ("current", "severity"), [(12, "none"), (8, "none"), (7.9, "moderate"), (5, "moderate"), (4.9, "severe")]
)
def test_the_severity_of_slow_training_follows_from_the_rate(current, severity):
    diagnosis = diagnose_slow_training(current, 10, CALM)
    assert (diagnosis.severity, diagnosis.issues) == (severity, ())


@pytest.mark.parametrize(
    ("load", "problem"),
    [
        (MachineLoad(91, 95, None), "91 % of memory is in use"),
        (MachineLoad(50, 49, False), "only 49 % of the CPU"),
        (MachineLoad(50, 95, True), "it is too hot"),
    ],
)
def test_slow_training_is_explained_by_the_load(load, problem):
    (issue,) = diagnose_slow_training(1, 10, load).issues
    assert problem in issue.problem
    assert issue.advice.endswith(".")
    assert diagnose_slow_training(10, 10, load).issues == ()


def test_the_load_of_this_machine_is_measured():
    load = measure_load(seconds=0.05)
    assert 0 < load.memory_percent <= 100
    assert 0 <= load.cpu_percent <= 100
    assert diagnose_slow_training(1, 10).severity == "severe"


@pytest.mark.parametrize("per_step_mb", [0.5, 3.0])
def test_a_steady_leak_is_found_once_its_windows_are_full(per_step_mb):
    noise = np.random.default_rng(0).normal(0, per_step_mb, 150)
    leak, *_ = leaks(300 + per_step_mb * np.arange(150) + noise)
    assert leak.last_step < 120
    assert leak.last_step - leak.first_step == 99
    assert leak.mb_per_step == pytest.approx(per_step_mb, rel=0.1)
    assert leak.growth_mb == pytest.approx(90 * per_step_mb, rel=0.1)
    assert leak.suggestions


def test_a_leak_is_reported_again_only_after_another_two_windows():
    found = leaks(300 + 0.5 * np.arange(305))
    assert [leak.last_step for leak in found] == [99, 199, 299]


@given(st.integers(2, 90), st.floats(1, 1000), st.integers(0, 90), st.floats(0, 3))
def test_a_sawtooth_is_not_a_leak(period, height, phase, noise_mb):
    steps = np.arange(400) + phase
    noise = np.random.default_rng(phase).normal(0, noise_mb, 400)
    assert not leaks(2000 + height * (steps % period) / period + noise)


@given(st.integers(0, 70), st.floats(0, 2000), st.floats(0, 50), st.booleans())
def test_a_plateau_after_a_warm_up_is_not_a_leak(warm_up, height, noise_mb, bends):
    steps = np.arange(300)
    ramp = 1 - np.exp(-steps / 20) if bends else np.minimum(steps / max(warm_up, 1), 1)
    noise = np.random.default_rng(warm_up).normal(0, noise_mb, 300)
    assert not leaks(2000 + height * ramp + noise)


@given(st.integers(0, 2**32 - 1), st.floats(0, 300))
def test_noise_is_not_a_leak(seed, spread_mb):
    assert not leaks(np.random.default_rng(seed).normal(2000, spread_mb, 500))


def test_small_growth_is_not_a_leak():
    creep = 300 + 0.1 * np.arange(200)  # 9 MB from the first block to the last
    assert not leaks(creep)
    assert leaks(creep, min_growth_mb=5)
    assert leaks(creep, window=200, min_growth_mb=5) == []  # two such windows are not full yet


@pytest.mark.slow
def test_without_a_value_the_detector_measures_this_process():
    detector = MemoryLeakDetector(window=5, min_growth_mb=50)
    assert all(detector.check_for_leaks(step) is None for step in range(9))
    kept = []
    found = None
    for step in range(9, 30):  # 16 MiB per step, written to so that it is resident
        kept.append(np.ones(16 * MIB, dtype=np.uint8))
        found = found or detector.check_for_leaks(step)
    assert found is not None
    assert found.mb_per_step == pytest.approx(16, rel=0.3)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 1000))
def test_a_regression_is_an_average_below_four_fifths_of_the_baseline(rates, baseline):
    regression = PerformanceRegression(baseline)
    found = [regression.check_regression(rate) for rate in rates]
    assert not any(found[:19])
    if len(rates) < 20:
        assert regression.degradation_percent is None
        return
    total = sum(rates[-20:])
    assume(10 * total != 8 * 20 * baseline)  # rounding decides there
    assert found[-1] == (10 * total < 8 * 20 * baseline)
    assert regression.degradation_percent == pytest.approx(100 - 100 * total / 20 / baseline)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: PerformanceRegression(0),
        lambda: PerformanceRegression(10, window=0),
        lambda: diagnose_slow_training(1, float("nan"), CALM),
        lambda: MemoryLeakDetector(window=4),
        lambda: MemoryLeakDetector(min_growth_mb=0),
    ],
)
def test_invalid_settings_are_refused(wrong):
    with pytest.raises(ConfigError, match="must be"):
        wrong()
