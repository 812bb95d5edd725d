"""Load, memory, temperature and power of the machine while it works.

Temperatures are reported on Linux only. A Mac reports a thermal level and, with an Intel processor, a speed
limit; neither requires root. A value that the system does not report is `None`.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple, Protocol

import psutil

from macbook_optimization import linux_readers as linux
from macbook_optimization import macos_readers as macos
from macbook_optimization.background_monitor import BackgroundMonitor as BackgroundMonitor
from macbook_optimization.hardware_detection import (
    HardwareDetector,
    PowerSpecs,
    available_memory,
    on_macos,
)

# Measurements are unreliable while other programs use more than this share of all cores.
BUSY_PERCENT = 25
# hwmon names of sensors in or near the processor; other sensors are on disks, radios and batteries.
_CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal", "acpitz")
_THROTTLED_LEVELS = ("heavy", "trapping", "sleeping")


@dataclass(frozen=True, slots=True)
class ThermalState(Mapping[str, bool | float | str | None]):
    """Temperature and throttling, as attributes and as a mapping: `state["is_throttling"]`."""

    is_throttling: bool | None
    temperature: float | None  # degrees Celsius, of the hottest sensor near the processor
    level: str | None  # on macOS: nominal, moderate, heavy, trapping, sleeping
    speed_limit_percent: int | None
    is_at_limit: bool | None = None  # a sensor near the processor is at its critical temperature, on Linux

    def __getitem__(self, name: str) -> bool | float | str | None:
        if name not in tuple(self):
            raise KeyError(name)
        value: bool | float | str | None = getattr(self, name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))

    def is_too_hot(self, limit_celsius: float = 85.0) -> bool | None:
        """Return whether the processor is above the limit, at that of its sensor, or throttling.

        None if the system reports none of these, which is false in an `if`, so a machine that reports nothing
        is never paused. A Mac reports no temperature, so there the answer depends on throttling alone.
        """
        if self.temperature is not None and self.temperature > limit_celsius:
            return True
        if self.temperature is None and self.is_throttling is None:
            return None
        return bool(self.is_throttling or self.is_at_limit)


@dataclass(frozen=True, slots=True)
class ResourceSample:
    time: float  # time.monotonic()
    cpu_percent: float  # of all cores, since the previous sample
    process_cpu_percent: float  # of one core, so it may exceed 100
    rss_bytes: int
    available_bytes: int
    temperature: float | None
    speed_limit_percent: int | None


class Reading(Protocol):
    """The part of psutil's sensor records that is used here."""

    @property
    def current(self) -> float: ...
    @property
    def high(self) -> float | None: ...
    @property
    def critical(self) -> float | None: ...


Sensors = Mapping[str, Iterable[Reading]]  # by their name


@dataclass(frozen=True, slots=True)
class LoadReading:
    """CPU time between two readings, in cores: 1.5 is one and a half cores kept busy."""

    cores: int  # logical cores of the machine
    own_cores: float  # used by this process
    other_cores: float  # used by all other processes

    @property
    def other_percent(self) -> float:
        """The load of other processes, in percent of all cores."""
        return 100 * self.other_cores / self.cores


class CpuLoad:
    """Measures how busy this and other processes keep the CPU. Create it once and read it regularly.

    The first period starts at construction. Each object measures for itself; `psutil.cpu_percent` would
    measure since its last call by anything in the same thread.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before = self._read_times()

    def read(self) -> LoadReading:
        """Return the load since the previous call."""
        now = self._read_times()
        before, self._before = self._before, now
        cores = psutil.cpu_count() or 1
        busy_cores = cores * (now.busy - before.busy) / max(now.all - before.all, 1e-9)
        own_cores = (now.own - before.own) / max(now.time - before.time, 1e-9)
        return LoadReading(cores, own_cores, other_cores=max(0.0, busy_cores - own_cores))

    def _read_times(self) -> _CpuTimes:
        machine = psutil.cpu_times()._asdict()
        guests = machine.get("guest", 0.0) + machine.get("guest_nice", 0.0)  # Linux counts them as user, too
        all_seconds = sum(machine.values()) - guests
        idle = machine["idle"] + machine.get("iowait", 0.0)
        own = self._process.cpu_times()
        return _CpuTimes(time.monotonic(), all_seconds, all_seconds - idle, own.user + own.system)


class _CpuTimes(NamedTuple):
    """Seconds of CPU time since the start of the machine or of this process, on all cores together."""

    time: float
    all: float
    busy: float
    own: float


def other_cpu_percent(seconds: float = 0.2) -> float:
    """Measure the share of all cores that other programs use at the moment."""
    load = CpuLoad()
    time.sleep(seconds)
    return load.read().other_percent


class ResourceMonitor(BackgroundMonitor):
    """Samples CPU load, memory and temperature.

    `root` is where /proc and /sys are found, and `sensors` reads the temperatures.
    """

    def __init__(self, root: Path = Path("/"), sensors: Callable[[], Sensors] | None = None) -> None:
        super().__init__()
        self._root = root
        self._sensors = read_sensors if sensors is None else sensors
        self._process = psutil.Process()
        self._latest: ResourceSample | None = None
        self._throttle_count: int | None = None

    @property
    def latest(self) -> ResourceSample | None:
        """The latest sample; None until the first interval has passed. It is kept after the stop."""
        return self._latest

    def get_thermal_state(self) -> ThermalState:
        """Read temperature and throttling now; monitoring need not be running.

        On Linux, throttling shows as a counter that rises between two calls, so the first call cannot know
        it. Where there is no counter it stays unknown: a warm sensor does not show that anything is slower.
        """
        if on_macos():
            level = macos.thermal_pressure(macos.run_tool(*macos.THERMAL_PRESSURE))
            return macos_thermal_state(_speed_limit(), level)
        temperature, is_at_limit = hottest(self._sensors())
        before = self._throttle_count
        self._throttle_count = linux.throttle_count(self._root)
        has_risen = None
        if self._throttle_count is not None and before is not None:
            has_risen = self._throttle_count > before
        return ThermalState(has_risen, temperature, None, None, is_at_limit)

    def begin(self) -> None:
        psutil.cpu_percent()  # both measure since the previous call
        self._process.cpu_percent()

    def sample(self) -> None:
        self._latest = ResourceSample(
            time=time.monotonic(),
            cpu_percent=psutil.cpu_percent(),
            process_cpu_percent=self._process.cpu_percent(),
            rss_bytes=self._process.memory_info().rss,
            available_bytes=available_memory(self._root),
            temperature=hottest(self._sensors())[0],
            speed_limit_percent=_speed_limit(),
        )


class PowerMonitor(BackgroundMonitor):
    """Samples battery and temperature, rarely: on a Mac, each sample starts a program or two."""

    MAX_FAILURES = 4  # in a row, for which the last readings count: a minute

    def __init__(self) -> None:
        super().__init__()
        self._resources = ResourceMonitor()
        self.power: PowerSpecs | None = None
        self.thermal: ThermalState | None = None

    def start_monitoring(self, interval: float = 15.0) -> None:
        super().start_monitoring(interval)

    def begin(self) -> None:
        self.sample()

    def sample(self) -> None:
        self.power = HardwareDetector().detect_power()
        self.thermal = self._resources.get_thermal_state()

    def failed(self, error: OSError, times: int) -> None:
        if times > self.MAX_FAILURES:
            self.power = self.thermal = None


class RunningClock(BackgroundMonitor):
    """Counts the seconds during which this process really ran.

    Its thread ticks regularly. A gap between two ticks longer than `pause_seconds` means that the process was
    paused (SIGSTOP, Ctrl-Z, a sleeping machine) and is not counted.
    """

    def __init__(self, pause_seconds: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.pause_seconds = pause_seconds
        self._clock = clock
        self._lock = threading.Lock()  # `seconds` is read from other threads
        self._counted_seconds = 0.0
        self._last_tick: float | None = None  # None while the clock is stopped

    @property
    def seconds(self) -> float:
        """Seconds counted so far, including the time since the last tick unless that is already a pause."""
        with self._lock:
            return self._counted_seconds + self._running_seconds(self._clock())

    def start_monitoring(self, interval: float = 0.5) -> None:
        super().start_monitoring(interval)

    def stop_monitoring(self) -> None:
        super().stop_monitoring()
        self.sample()
        with self._lock:
            self._last_tick = None

    def begin(self) -> None:
        with self._lock:
            self._last_tick = self._clock()

    def sample(self) -> None:
        with self._lock:
            now = self._clock()
            self._counted_seconds += self._running_seconds(now)
            if self._last_tick is not None:
                self._last_tick = now

    def _running_seconds(self, now: float) -> float:
        """Return the time since the last tick, or 0 if the process was paused or the clock is stopped."""
        if self._last_tick is None:
            return 0.0
        gap = now - self._last_tick
        return gap if gap <= self.pause_seconds else 0.0


def hottest(sensors: Sensors) -> tuple[float | None, bool | None]:
    """Return the highest temperature near the processor, and whether a sensor there is at its own limit.

    That is its critical temperature: at `high`, which may be 20 degrees below, only the fans become faster.
    """
    readings = [reading for name in _CPU_SENSORS for reading in sensors.get(name, ())]
    limits = [(reading.current, reading.critical or reading.high) for reading in readings]
    at_limit = [current >= limit for current, limit in limits if limit]
    highest = max((reading.current for reading in readings), default=None)
    return highest, any(at_limit) if at_limit else None


def macos_thermal_state(speed_limit_percent: int | None, level: str | None) -> ThermalState:
    """Combine what a Mac reports.

    A nominal level alone leaves throttling unknown: M1 machines were seen to report it while throttled.
    https://github.com/angristan/MacThrottle/issues/19
    """
    is_limited = None if speed_limit_percent is None else speed_limit_percent < 100
    has_throttled_level = True if level in _THROTTLED_LEVELS else None
    return ThermalState(_either(is_limited, has_throttled_level), None, level, speed_limit_percent)


def read_sensors() -> Sensors:
    return psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}


def _speed_limit() -> int | None:
    if not on_macos() or platform.machine() == "arm64":  # Apple Silicon never reports one
        return None
    return macos.speed_limits(macos.run_tool(*macos.SPEED_LIMITS))[0]


def _either(*answers: bool | None) -> bool | None:
    """Return True if any source says so, False if some source denies it, None if no source reports it."""
    reported = [answer for answer in answers if answer is not None]
    return any(reported) if reported else None
