"""The monitor measures while it runs, and heat is reported where the machine tells of it."""

import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from macbook_optimization.resource_monitoring import (
    ResourceMonitor,
    ThermalState,
    hottest,
    macos_thermal_state,
)

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /sys")


def wait_for(condition, seconds=2.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def test_samples_arrive_between_start_and_stop_only():
    threads = threading.active_count()
    monitor = ResourceMonitor()
    assert monitor.latest is None
    assert threading.active_count() == threads, "nothing runs before the start"
    monitor.start_monitoring(interval=0.01)
    assert wait_for(lambda: monitor.latest is not None)
    first = monitor.latest
    assert wait_for(lambda: monitor.latest.time > first.time)
    monitor.stop_monitoring()
    assert threading.active_count() == threads
    last = monitor.latest
    time.sleep(0.05)
    assert monitor.latest == last


def test_a_sample_holds_what_psutil_measures():
    with ResourceMonitor() as monitor:
        monitor.start_monitoring(interval=0.1)  # another interval, not another thread
        end = time.monotonic() + 0.3
        while time.monotonic() < end:  # keeps one core busy
            pass
        assert wait_for(lambda: monitor.latest is not None)
        sample = monitor.latest
    assert sample.process_cpu_percent > 10
    assert 0 < sample.cpu_percent <= 100
    assert sample.rss_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert 0 < sample.available_bytes <= psutil.virtual_memory().total
    assert sample.time <= time.monotonic()


def test_stopping_twice_or_never_having_started_is_fine():
    monitor = ResourceMonitor()
    monitor.stop_monitoring()
    monitor.start_monitoring(interval=60)
    monitor.stop_monitoring()  # returns at once, not after the interval
    monitor.stop_monitoring()


def test_the_thermal_state_answers_by_attribute_and_by_name():
    state = ResourceMonitor().get_thermal_state()
    assert state["is_throttling"] == state.is_throttling
    assert state["temperature"] == state.temperature
    with pytest.raises(KeyError):
        state["humidity"]
    assert state.temperature is None or -50 < state.temperature < 150


@linux_only
def test_rising_throttle_counts_are_throttling(tmp_path):
    counts = [
        tmp_path / f"sys/devices/system/cpu/cpu{n}/thermal_throttle/core_throttle_count" for n in (0, 1)
    ]
    for path in counts:
        path.parent.mkdir(parents=True)
        path.write_text("7\n", encoding="utf-8")
    monitor = ResourceMonitor(tmp_path)
    too_hot = hottest(psutil.sensors_temperatures())[1]
    assert monitor.get_thermal_state().is_throttling is too_hot, "one look shows no rise"
    assert monitor.get_thermal_state().is_throttling is bool(too_hot)
    counts[1].write_text("8\n", encoding="utf-8")
    assert monitor.get_thermal_state().is_throttling is True
    assert monitor.get_thermal_state().is_throttling is bool(too_hot)


def reading(current, high=None):
    return SimpleNamespace(current=current, high=high)


@pytest.mark.parametrize(
    ("sensors", "expected"),
    [
        ({}, (None, None)),
        ({"nvme": [reading(80.0, 70.0)]}, (None, None)),
        (
            {"coretemp": [reading(61.0, 100.0), reading(64.5, 100.0)], "acpitz": [reading(27.8)]},
            (64.5, False),
        ),
        ({"k10temp": [reading(95.0, 95.0)]}, (95.0, True)),
        ({"acpitz": [reading(50.0, 0.0)]}, (50.0, None)),
    ],
)
def test_the_hottest_sensor_at_the_processor_counts(sensors, expected):
    assert hottest(sensors) == expected


@pytest.mark.parametrize(
    ("speed_limit", "level", "throttling"),
    [
        (100, "nominal", False),
        (35, "nominal", True),
        (None, "heavy", True),
        (100, "heavy", True),
        (None, "moderate", None),
        (None, "nominal", None),
        (None, None, None),
    ],
)
def test_a_mac_throttles_when_its_speed_is_limited_or_its_level_is_heavy(speed_limit, level, throttling):
    expected = ThermalState(throttling, temperature=None, level=level, speed_limit_percent=speed_limit)
    assert macos_thermal_state(speed_limit, level) == expected
