"""Monitors sample only while they run; what the machine does not report is unknown."""

import errno
import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from types import SimpleNamespace

import psutil
import pytest

from macbook_optimization.hardware_detection import PowerSpecs
from macbook_optimization.resource_monitoring import (
    CpuLoad,
    LoadReading,
    PowerMonitor,
    ResourceMonitor,
    RunningClock,
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


def test_samples_are_taken_only_between_start_and_stop():
    threads = threading.active_count()
    monitor = ResourceMonitor()
    assert monitor.latest is None
    assert threading.active_count() == threads, "no thread runs before the start"
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


class Refused(PowerMonitor):
    """The system refuses some samples, as it does while too many files are open."""

    def __init__(self, refused):
        super().__init__()
        self.refused = refused
        self.num_samples = 0
        self.num_failures = []

    def sample(self):
        self.num_samples += 1
        if self.num_samples in self.refused:
            raise OSError(errno.EMFILE, "Too many open files")
        self.power = PowerSpecs(True, 50.0)

    def failed(self, error, times):
        super().failed(error, times)
        self.num_failures.append(times)


def test_a_monitor_survives_what_the_system_refuses():
    monitor = Refused({1, 3, 4})
    monitor.start_monitoring(interval=0.005)
    assert wait_for(lambda: monitor.num_samples >= 6)
    monitor.stop_monitoring()
    assert monitor.num_failures == [1, 1, 2]
    assert monitor.power == PowerSpecs(True, 50.0)


def test_readings_of_a_minute_ago_do_not_count():
    monitor = Refused(range(2, 10_000))
    monitor.start_monitoring(interval=0.005)
    assert wait_for(lambda: monitor.num_failures[-1:] == [4])
    assert wait_for(lambda: monitor.power is None)
    monitor.stop_monitoring()
    assert monitor.num_failures[-1] > 4


def test_stopping_twice_or_without_a_start_is_allowed():
    monitor = ResourceMonitor()
    monitor.stop_monitoring()
    monitor.start_monitoring(interval=60)
    monitor.stop_monitoring()  # returns immediately, not after the interval
    monitor.stop_monitoring()


def test_the_thermal_state_has_attributes_and_is_a_mapping():
    state = ResourceMonitor().get_thermal_state()
    assert state["is_throttling"] == state.is_throttling
    assert "is_throttling" in state
    assert "humidity" not in state
    assert list(state) == ["is_throttling", "temperature", "level", "speed_limit_percent", "is_at_limit"]
    assert len(state) == 5
    assert dict(state) == asdict(state)
    assert state.get("temperature", 0.0) == state.temperature
    assert state.get("humidity") is None
    with pytest.raises(KeyError, match="humidity"):
        state["humidity"]
    assert state.temperature is None or -50 < state.temperature < 150


@pytest.mark.parametrize(
    ("temperature", "is_throttling", "expected"),
    [
        (None, None, None),
        (None, True, True),
        (None, False, False),
        (80.0, None, False),
        (90.5, None, True),
        (90.5, False, True),
        (80.0, True, True),
    ],
)
def test_a_machine_is_too_hot_above_the_limit_or_when_it_throttles(temperature, is_throttling, expected):
    state = ThermalState(is_throttling, temperature, level=None, speed_limit_percent=None)
    assert state.is_too_hot(limit_celsius=90) is expected


def test_the_usual_limit_is_85_degrees():
    assert ThermalState(None, 85.5, level=None, speed_limit_percent=None).is_too_hot()
    assert not ThermalState(None, 84.5, level=None, speed_limit_percent=None).is_too_hot()


@linux_only
def test_rising_throttle_counts_are_throttling(tmp_path):
    counts = [
        tmp_path / f"sys/devices/system/cpu/cpu{n}/thermal_throttle/core_throttle_count" for n in (0, 1)
    ]
    for path in counts:
        path.parent.mkdir(parents=True)
        path.write_text("7\n", encoding="utf-8")
    monitor = ResourceMonitor(tmp_path)
    assert monitor.get_thermal_state().is_throttling is None, "one reading shows no rise"
    assert monitor.get_thermal_state().is_throttling is False
    counts[1].write_text("8\n", encoding="utf-8")
    assert monitor.get_thermal_state().is_throttling is True
    assert monitor.get_thermal_state().is_throttling is False


@linux_only
def test_a_warm_sensor_is_not_throttling(tmp_path):
    monitor = ResourceMonitor(tmp_path, lambda: {"coretemp": [reading(82.0, 80.0, 100.0)]})
    expected = ThermalState(None, 82.0, level=None, speed_limit_percent=None, is_at_limit=False)
    assert [monitor.get_thermal_state() for _ in range(2)] == [expected, expected]
    assert not expected.is_too_hot()


@linux_only
def test_a_sensor_at_its_critical_temperature_is_too_hot_whatever_the_counter_says(tmp_path):
    counter = tmp_path / "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count"
    counter.parent.mkdir(parents=True)
    counter.write_text("7\n", encoding="utf-8")
    monitor = ResourceMonitor(tmp_path, lambda: {"coretemp": [reading(100.0, 80.0, 100.0)]})
    monitor.get_thermal_state()
    state = monitor.get_thermal_state()
    assert (state.is_throttling, state.is_at_limit) == (False, True)
    assert state.is_too_hot(limit_celsius=110)


def reading(current, high=None, critical=None):
    return SimpleNamespace(current=current, high=high, critical=critical)


@pytest.mark.parametrize(
    ("sensors", "expected"),
    [
        ({}, (None, None)),
        ({"nvme": [reading(80.0, 70.0)]}, (None, None)),
        (
            {"coretemp": [reading(61.0, 100.0), reading(64.5, 100.0)], "acpitz": [reading(27.8)]},
            (64.5, False),
        ),
        ({"coretemp": [reading(82.0, 80.0, 100.0)]}, (82.0, False)),
        ({"coretemp": [reading(100.0, 80.0, 100.0)]}, (100.0, True)),
        ({"k10temp": [reading(95.0, 95.0)]}, (95.0, True)),
        ({"acpitz": [reading(50.0, 0.0)]}, (50.0, None)),
    ],
)
def test_the_temperature_is_that_of_the_hottest_sensor_near_the_processor(sensors, expected):
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


def test_the_load_is_divided_between_this_process_and_others():
    load = CpuLoad()
    end = time.monotonic() + 0.4
    while time.monotonic() < end:  # keeps one core busy
        pass
    reading = load.read()
    assert reading.cores == psutil.cpu_count()
    assert 0.2 < reading.own_cores < reading.cores + 0.5, "less than one core if other programs are busy"
    assert 0 <= reading.other_cores <= reading.cores
    time.sleep(0.3)
    assert load.read().own_cores < 0.5, "measured since the previous call"


def test_the_load_of_others_is_a_share_of_all_cores():
    assert LoadReading(cores=8, own_cores=3.0, other_cores=2.0).other_percent == 25


class Clock:
    """A clock that a test sets by hand; `pass_time` ticks in place of the thread."""

    def __init__(self, pause_seconds):
        self.now = 100.0
        self.running = RunningClock(pause_seconds, clock=lambda: self.now)
        self.running.begin()

    def pass_time(self, seconds, tick=True):
        self.now += seconds
        if tick:
            self.running.sample()


def test_a_running_clock_does_not_count_pauses():
    clock = Clock(pause_seconds=5.0)
    for seconds in (0.5, 0.5, 60.0, 0.5, 5.0):
        clock.pass_time(seconds)
    assert clock.running.seconds == 6.5
    clock.pass_time(3.0, tick=False)
    assert clock.running.seconds == 9.5, "the time since the last tick counts"
    clock.pass_time(3.0, tick=False)
    assert clock.running.seconds == 6.5, "until it is as long as a pause"


def test_a_stopped_clock_stands_still_and_can_be_started_again():
    clock = RunningClock()
    assert clock.seconds == 0
    with clock:
        assert wait_for(lambda: clock.seconds > 0.05)
    stopped_at = clock.seconds
    time.sleep(0.05)
    assert clock.seconds == stopped_at
    with clock:
        assert wait_for(lambda: clock.seconds > stopped_at + 0.05)


@pytest.mark.slow
def test_a_process_that_was_stopped_did_not_run():
    code = """
import json, sys, time
from macbook_optimization.resource_monitoring import RunningClock
with RunningClock(pause_seconds=0.5) as clock:
    clock.start_monitoring(interval=0.02)
    started = time.monotonic()
    print("started", flush=True)
    sys.stdin.readline()
    print(json.dumps([clock.seconds, time.monotonic() - started]), flush=True)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "started\n"
    time.sleep(0.3)
    child.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    child.send_signal(signal.SIGCONT)
    time.sleep(0.2)
    running, elapsed = json.loads(child.communicate("\n", timeout=20)[0])
    assert elapsed - running > 1.3
    assert 0 < running < elapsed - 1.3
