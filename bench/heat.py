"""Measure what lowers the load of training, and so its heat: `python bench/heat.py [RECIPE [THREADS]]`.

1. Training steps run in several configurations that take turns: as planned, with smaller micro-batches, with
   fewer threads, and with a duty cycle. Reported are the cores that they keep busy (CPU time of this process
   over the time that passed) and the speed, as medians over the rounds.
2. A stand-in sensor closes the loop: its temperature follows the measured load with a delay (first order),
   and `PowerControl` reacts to it as in a run. A minute takes two seconds here. The load without any
   reaction, measured first, would lead to 100 °C. This shows that the reaction finds a sustainable load; real
   temperatures need a real machine.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
from training_step import recipe_learner, seconds_of_step

from macbook_optimization.duty_cycle import DutyCycle
from macbook_optimization.resource_monitoring import PowerMonitor, RunningClock, ThermalState
from trm.config import RunConfig, load_config
from trm.display import Silent
from trm.plan import Execution
from trm.runs.directory import Run
from trm.training.log import RunLog
from trm.training.power import PowerControl

ROUNDS = 5
ROUND_SECONDS = 3.0
FACTOR = 0.75
CALIBRATION_SECONDS = 5.0
LOOP_SECONDS = 30.0
SPEED_UP = 30.0  # of the stand-in: a minute takes two seconds
AMBIENT_CELSIUS = 40.0
FULL_LOAD_CELSIUS = 100.0  # at the load without a reaction, in the end
LIMIT_CELSIUS = 85.0
DELAY_SECONDS = 2.0  # time constant of the stand-in

Step = Callable[[], object]


def measure(step: Step, duty: DutyCycle, seconds: float) -> tuple[float, float]:
    """Return the cores kept busy and the steps per second."""
    steps = 0
    duty.restart()
    started, cpu_started = time.monotonic(), time.process_time()
    while (passed := time.monotonic() - started) < seconds:
        step()
        duty.rest()
        steps += 1
    return (time.process_time() - cpu_started) / passed, steps / passed


def compare_configurations(config: RunConfig, cores: int) -> None:
    learner, batch = recipe_learner(config, Execution(threads=cores, workers=cores))
    cycles = max(config.training.depths.values())
    size = min(len(batch), config.plan.micro_batch_size or 32)
    smaller = max(cores, int(size * FACTOR))
    full = DutyCycle()
    variants = {
        f"{cores} threads, micro-batch {size}": (cores, size, full, 1.0),
        f"micro-batch {smaller}": (cores, smaller, full, 1.0),
        f"micro-batch {max(cores, size // 4)}": (cores, max(cores, size // 4), full, 1.0),
        "1 thread": (1, size, full, 1.0),
        f"duty cycle {FACTOR}": (cores, size, DutyCycle(), FACTOR),
        "duty cycle 0.5": (cores, size, DutyCycle(), 0.5),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for round_number in range(1 + ROUNDS):
        for name, (threads, micro_batch_size, duty, share) in variants.items():
            learner.reconfigure(replace(Execution(), threads=threads, workers=threads))
            duty.set_share(share)

            def step(size: int = micro_batch_size) -> None:
                seconds_of_step(learner, batch, cycles, size)

            step()
            measured = measure(step, duty, ROUND_SECONDS)
            if round_number:  # the first round is the warm-up
                found[name].append(measured)
    for name, rounds in found.items():
        busy, speed = (statistics.median(column) for column in zip(*rounds, strict=True))
        low, high = min(each[0] for each in rounds), max(each[0] for each in rounds)
        sys.stdout.write(
            f"{name:42s} {busy:4.2f} cores busy ({low:.2f} to {high:.2f}), "
            f"{speed * len(batch):6.0f} samples/s, {busy / speed / len(batch) * 1000:.2f} CPU ms per sample\n"
        )


class StandIn(PowerMonitor):
    """A temperature that follows the CPU time of this process with a delay."""

    def __init__(self, full_load_cores: float) -> None:
        super().__init__()
        self.degrees_per_core = (FULL_LOAD_CELSIUS - AMBIENT_CELSIUS) / full_load_cores
        self.temperature = AMBIENT_CELSIUS
        self.sampled = time.monotonic(), time.process_time()
        self.history: list[float] = []

    def start_monitoring(self, interval: float = 0.1) -> None:
        super().start_monitoring(interval)

    def sample(self) -> None:
        now = time.monotonic(), time.process_time()
        seconds, cpu_seconds = (after - before for after, before in zip(now, self.sampled, strict=True))
        self.sampled = now
        if seconds <= 0:
            return
        target = AMBIENT_CELSIUS + self.degrees_per_core * cpu_seconds / seconds
        self.temperature += min(1.0, seconds / DELAY_SECONDS) * (target - self.temperature)
        self.history.append(self.temperature)
        self.thermal = ThermalState(None, self.temperature, None, None)


def close_the_loop(config: RunConfig, cores: int, *, reduce: bool) -> None:
    limits = {
        "thermal_throttle_threshold": LIMIT_CELSIUS,
        "cooling_delay_seconds": 3.0 / SPEED_UP,
        "thermal_batch_reduction": reduce,
        "thermal_batch_reduction_factor": FACTOR,
    }
    config = config.model_copy(update={"limits": config.limits.model_copy(update=limits)})
    learner, batch = recipe_learner(config, Execution(threads=cores, workers=cores))
    cycles = max(config.training.depths.values())
    batch_step = partial(seconds_of_step, learner, batch, cycles, 32)
    batch_step()
    full_load_cores, full_speed = measure(batch_step, DutyCycle(), CALIBRATION_SECONDS)
    sensor = StandIn(full_load_cores)
    clock = RunningClock()
    with tempfile.TemporaryDirectory() as directory, sensor, clock:
        power = PowerControl(config, sensor, RunLog(Run(Path(directory)), Silent()), clock)
        power.HEAT_INTERVAL_SECONDS /= SPEED_UP  # type: ignore[misc]
        power.RECOVERY_SECONDS /= SPEED_UP  # type: ignore[misc]
        shares: list[float] = []
        started, cpu_started = time.monotonic(), time.process_time()
        while (passed := time.monotonic() - started) < LOOP_SECONDS:
            batch_step()
            power.react(len(shares), lambda: True, lambda: None)
            shares.append(power.duty.share)
        busy = (time.process_time() - cpu_started) / passed
    second_half = sensor.history[len(sensor.history) // 2 :]
    above = sum(each > LIMIT_CELSIUS for each in second_half) / len(second_half)
    sys.stdout.write(
        f"thermal_batch_reduction={str(reduce).lower()}, second half: {statistics.fmean(second_half):.0f} °C "
        f"on average, {max(second_half):.0f} at most, {above:.0%} of the time above {LIMIT_CELSIUS:.0f}; "
        f"{busy / full_load_cores:.0%} of the load and {len(shares) / passed / full_speed:.0%} of the speed "
        f"without a reaction, "
        f"shares {sorted({round(each, 2) for each in shares})}\n"
    )


def main(recipe: str = "sudoku-6x6", threads: str | None = None) -> None:
    config = load_config(recipe)
    cores = int(threads or psutil.cpu_count(logical=False) or 1)
    compare_configurations(config, cores)
    for reduce in (False, True):
        close_the_loop(config, cores, reduce=reduce)


if __name__ == "__main__":
    main(*sys.argv[1:])
