"""How the machine fares while it works: load, memory and heat.

Temperatures exist on Linux only. A Mac tells its thermal level and, with an Intel processor, by how much that
is slowed down; neither takes root. What is not told is `None`.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import psutil

from macbook_optimization import linux_readers as linux
from macbook_optimization import macos_readers as macos
from macbook_optimization.hardware_detection import (
    HardwareDetector,
    PowerSpecs,
    available_memory,
    on_macos,
)

# hwmon names of sensors in or beside the processor; the others sit on disks, radios and batteries.
_CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal", "acpitz")
_SLOWED_DOWN = ("heavy", "trapping", "sleeping")


@dataclass(frozen=True, slots=True)
class ThermalState:
    is_throttling: bool | None
    temperature: float | None  # degrees Celsius of the hottest sensor at the processor
    level: str | None  # macOS's word: nominal, moderate, heavy, trapping, sleeping
    speed_limit_percent: int | None

    def __getitem__(self, name: str) -> bool | float | int | str | None:
        if name not in {field.name for field in fields(self)}:
            raise KeyError(name)
        value: bool | float | int | str | None = getattr(self, name)
        return value


@dataclass(frozen=True, slots=True)
class ResourceSample:
    time: float  # time.monotonic()
    cpu_percent: float  # of all cores, since the sample before
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


class BackgroundMonitor:
    """Looks in a background thread, and only between start and stop.

    It observes and never acts: the training loop reads the latest look at a step boundary and decides.
    A second thread that changed the batch size would race the step that is using it.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Once, in the thread, before the first interval."""

    def look(self) -> None:
        """After every interval."""

    def __enter__(self) -> Self:
        self.start_monitoring()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_monitoring()

    def start_monitoring(self, interval: float = 1.0) -> None:
        """Every `interval` seconds; starting again changes the interval."""
        self.stop_monitoring()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(interval, self._stop), daemon=True)
        self._thread.start()

    def stop_monitoring(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self, interval: float, stop: threading.Event) -> None:
        self.begin()
        while not stop.wait(interval):
            self.look()


class ResourceMonitor(BackgroundMonitor):
    def __init__(self, root: Path = Path("/")) -> None:
        super().__init__()
        self._root = root
        self._process = psutil.Process()
        self._latest: ResourceSample | None = None
        self._throttled_before: int | None = None

    @property
    def latest(self) -> ResourceSample | None:
        """None until the first interval has passed, since load is a difference; kept after the stop."""
        return self._latest

    def get_thermal_state(self) -> ThermalState:
        """Needs no monitoring. On Linux the first call can only compare temperatures: counters need two."""
        if on_macos():
            level = macos.thermal_pressure(macos.run_tool(*macos.THERMAL_PRESSURE))
            return macos_thermal_state(_speed_limit(), level)
        temperature, too_hot = hottest(_sensors())
        throttled, before = linux.throttle_count(self._root), self._throttled_before
        self._throttled_before = throttled
        rose = None if throttled is None or before is None else throttled > before
        return ThermalState(_either(rose, too_hot), temperature, level=None, speed_limit_percent=None)

    def begin(self) -> None:
        psutil.cpu_percent()  # both measure from the call before
        self._process.cpu_percent()

    def look(self) -> None:
        self._latest = ResourceSample(
            time=time.monotonic(),
            cpu_percent=psutil.cpu_percent(),
            process_cpu_percent=self._process.cpu_percent(),
            rss_bytes=self._process.memory_info().rss,
            available_bytes=available_memory(self._root),
            temperature=hottest(_sensors())[0],
            speed_limit_percent=_speed_limit(),
        )


class PowerMonitor(BackgroundMonitor):
    """Battery and heat, which change slowly: on a Mac every look starts a program or two."""

    def __init__(self) -> None:
        super().__init__()
        self._resources = ResourceMonitor()
        self.power: PowerSpecs | None = None
        self.thermal: ThermalState | None = None

    def start_monitoring(self, interval: float = 15.0) -> None:
        super().start_monitoring(interval)

    def begin(self) -> None:
        self.look()

    def look(self) -> None:
        self.power = HardwareDetector().detect_power()
        self.thermal = self._resources.get_thermal_state()


def hottest(sensors: Mapping[str, Iterable[Reading]]) -> tuple[float | None, bool | None]:
    """The greatest temperature at the processor, and whether any sensor there has reached its own limit."""
    readings = [reading for name in _CPU_SENSORS for reading in sensors.get(name, ())]
    limited = [reading.current >= reading.high for reading in readings if reading.high]
    return max((reading.current for reading in readings), default=None), any(limited) if limited else None


def macos_thermal_state(speed_limit_percent: int | None, level: str | None) -> ThermalState:
    """A nominal level alone leaves throttling unknown: M1 machines were seen to report it while slowed down.

    https://github.com/angristan/MacThrottle/issues/19
    """
    limited = None if speed_limit_percent is None else speed_limit_percent < 100
    slowed = True if level in _SLOWED_DOWN else None
    return ThermalState(_either(limited, slowed), None, level, speed_limit_percent)


def _sensors() -> Mapping[str, Iterable[Reading]]:
    return psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}


def _speed_limit() -> int | None:
    if not on_macos() or platform.machine() == "arm64":  # Apple Silicon never tells it
        return None
    return macos.speed_limits(macos.run_tool(*macos.SPEED_LIMITS))[0]


def _either(*answers: bool | None) -> bool | None:
    """True if any source says so, False if some source denies it, None if none knows."""
    known = [answer for answer in answers if answer is not None]
    return any(known) if known else None
