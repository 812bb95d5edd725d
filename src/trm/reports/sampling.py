"""Samples of the machine and of the trainer, in `resources.jsonl`.

They are taken by the process that waits for the trainer, so they cost a training step nothing but the
processor time of the reading: 2 ms per sample, measured on Linux.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from macbook_optimization.errors import RunError
from macbook_optimization.hardware_detection import HardwareDetector, PowerSpecs, available_memory
from macbook_optimization.resource_monitoring import ResourceMonitor, ThermalState
from macbook_optimization.units import MIB
from trm.runs.directory import RESOURCES, Run, is_run
from trm.runs.rows import ResourceRow

MAX_BYTES = 8 * MIB  # of the file: about nine hours of samples; it is thinned beyond that
KEPT_ROWS = 1800  # newest samples that thinning keeps: half an hour
POWER_SECONDS = 15.0  # between two readings of heat and battery: on a Mac, each starts a program or two


class Sampler:
    """Takes samples. Use it from one thread: CPU percentages are those since the sample before.

    `root` is where the counters of throttling are found.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._trainer: psutil.Process | None = None
        self._machine = ResourceMonitor(root)
        self._power_read_at: float | None = None
        self._thermal = ThermalState(None, None, None, None)
        self._power = PowerSpecs(None, None)

    def begin(self) -> None:
        """Start to measure, in the thread that will take the samples."""
        psutil.cpu_percent(percpu=True)

    def watch(self, pid: int) -> None:
        """Measure this process from now on."""
        with suppress(psutil.NoSuchProcess):
            self._trainer = psutil.Process(pid)

    def sample(self) -> ResourceRow:
        self._read_power()
        process_percent, rss_bytes = self._read_trainer()
        return ResourceRow(
            cpu_percent=psutil.cpu_percent(percpu=True),
            process_cpu_percent=process_percent,
            rss_bytes=rss_bytes,
            available_bytes=available_memory(),
            total_bytes=psutil.virtual_memory().total,
            swap_bytes=psutil.swap_memory().used,
            temperature=self._thermal.temperature,
            thermal_level=self._thermal.level,
            is_throttling=self._thermal.is_throttling,
            speed_limit_percent=self._thermal.speed_limit_percent,
            battery_percent=self._power.battery_percent,
            on_battery=self._power.on_battery,
        )

    def _read_power(self) -> None:
        now = time.monotonic()
        if self._power_read_at is None or now - self._power_read_at >= POWER_SECONDS:
            self._power_read_at = now
            self._thermal = self._machine.get_thermal_state()
            self._power = HardwareDetector().detect_power()

    def _read_trainer(self) -> tuple[float | None, int | None]:
        if self._trainer is None:
            return None, None
        try:
            return self._trainer.cpu_percent(), self._trainer.memory_info().rss
        except psutil.Error:  # it has ended
            self._trainer = None
            return None, None


class SampleFile:
    """The samples of a run. A file that becomes too long loses every other one of its older samples."""

    def __init__(self, run: Run, max_bytes: int = MAX_BYTES, kept_rows: int = KEPT_ROWS) -> None:
        self.run = run
        self.max_bytes = max_bytes
        self.kept_rows = kept_rows

    def append(self, row: ResourceRow) -> None:
        """Add a sample. One that a full disk refuses is lost: the next one comes in a second."""
        if not is_run(self.run.path):  # the trainer has not created it yet
            return
        with suppress(RunError, OSError):
            self.run.append(RESOURCES, row.to_json())
            if os.path.getsize(self.run.path / RESOURCES) > self.max_bytes:
                self._thin()

    def _thin(self) -> None:
        rows = self.run.rows(RESOURCES)
        older = rows[: -self.kept_rows]
        kept = [*older[::2], *rows[len(older) :]]
        self.run.write(RESOURCES, "".join(f"{json.dumps(row)}\n" for row in kept))
