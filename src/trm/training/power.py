"""Reactions to heat and batteries: a run saves, rests, or waits.

Resting is a duty cycle: training computes for a share of the time and sleeps between steps and micro-batches.
It changes no bit of what is learned, so deterministic runs do the same. A resumed run starts at full speed
and reacts to what the machine reports then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from macbook_optimization.duty_cycle import DutyCycle, sleep_with_checks
from macbook_optimization.keep_awake import KeepAwake
from macbook_optimization.resource_monitoring import PowerMonitor, RunningClock
from trm.config import RunConfig
from trm.runs.events import CoolingBreak, DutyCycleChanged, LowBattery, TrainingContinued, TrainingPaused
from trm.training.log import RunLog

Check = Callable[[], None]  # raises if a stop was requested


class PowerControl:
    """Reactions to heat and batteries: saving before the machine may switch off, cooling, and waiting."""

    HEAT_INTERVAL_SECONDS = 60.0  # between two reactions; a pause of a few seconds per minute costs little
    RECOVERY_SECONDS = 300.0  # without heat, before training computes for a larger share of the time
    LEAST_SHARE = 0.25  # of the time, however long the machine is hot
    WAIT_SECONDS = 1.0  # at a time, while training is paused

    def __init__(
        self,
        config: RunConfig,
        monitor: PowerMonitor,
        log: RunLog,
        clock: RunningClock,
        awake: KeepAwake | None = None,
    ) -> None:
        self.limits = config.limits
        self.last_step = config.training.last_step
        self.monitor = monitor
        self.log = log
        self.clock = clock
        self.awake = awake
        self.duty = DutyCycle(lambda: clock.seconds)
        self.saved_at_percent = self.limits.low_battery_percent
        self.cooled_at: float | None = None  # the last cooling break, as long as the heat lasts
        self.hot_at = -math.inf  # when the machine was last too hot, or the share of the time last raised
        self.reductions = 0  # of the share, because of heat
        self.paused_at: float | None = None  # by the clock; None while training
        self.earlier_pauses_seconds = 0.0
        self.is_pause_saved = True

    @property
    def paused_seconds(self) -> float:
        """Seconds that training waited for mains power, which do not count as training."""
        now = 0.0 if self.paused_at is None else self.clock.seconds - self.paused_at
        return self.earlier_pauses_seconds + now

    @property
    def on_battery(self) -> bool:
        return self.monitor.power is not None and bool(self.monitor.power.on_battery)

    def react(self, step: int, save: Callable[[], bool], check: Check) -> None:
        """Between two steps: save if the machine may switch off, let it cool, and rest."""
        percent = self.battery_fell()
        if percent is not None:
            self.log.event(LowBattery(percent, step))
            self.log.message(f"The battery is at {percent:.0f} %; saving.")
        if percent is not None or not self.is_pause_saved:
            self.is_pause_saved = True
            save()
        if self.paused_at is None:
            self._react_to_heat(step, save, check)
            self._react_to_battery(step)
        self._rest(check)

    def check_and_rest(self, check: Check) -> None:
        """Within a step or an evaluation: check for a request to stop, and rest."""
        check()
        self._rest(check)

    def _rest(self, check: Check) -> None:
        if rested := self.duty.rest(check):
            self.log.count({"waiting": rested})

    def battery_fell(self) -> float | None:
        """Return the percentage each time the battery is low and has fallen by one."""
        power = self.monitor.power
        if power is None or not power.on_battery or power.battery_percent is None:
            self.saved_at_percent = self.limits.low_battery_percent
            return None
        percent = math.floor(power.battery_percent)  # some systems report fractions
        if percent >= self.saved_at_percent:
            return None
        self.saved_at_percent = percent
        return percent

    def too_hot(self) -> str | None:
        """Return why the machine is too hot, if it is: above a limit, or throttled by the system.

        A limit replaces no report of throttling: a Mac has no temperatures to compare with it.
        """
        thermal = self.monitor.thermal
        if not self.limits.enable_thermal_monitoring or thermal is None:
            return None
        limit = self.limits.thermal_throttle_threshold
        if limit is not None and thermal.temperature is not None and thermal.temperature > limit:
            return f"the processor is at {thermal.temperature:.0f} °C, above {limit:g}"
        if thermal.is_throttling:
            return "the system throttles the processor"
        if thermal.is_at_limit:
            return "the processor is at the critical temperature of its sensor"
        return None

    def _react_to_heat(self, step: int, save: Callable[[], bool], check: Check) -> None:
        reason = self.too_hot()
        now = time.monotonic()
        if reason is None:
            if now - self.hot_at >= self.HEAT_INTERVAL_SECONDS:
                self.cooled_at = None
            if self.reductions and now - self.hot_at >= self.RECOVERY_SECONDS:
                self.hot_at = now
                self.reductions -= 1
                self._use_share("the processor has cooled", step)
            return
        self.hot_at = now
        if self.cooled_at is not None and now - self.cooled_at < self.HEAT_INTERVAL_SECONDS:
            return
        if self.cooled_at is None:  # the first of several breaks; later saves come when due
            save()
        self._cool(reason, step, check)
        if self.limits.thermal_batch_reduction and self._heat_share > self.LEAST_SHARE:
            self.reductions += 1
            self._use_share(reason, step)

    def _cool(self, reason: str, step: int, check: Check) -> None:
        seconds = self.limits.cooling_delay_seconds
        self.log.event(CoolingBreak(reason, seconds, step))
        self.log.message(f"Pausing for {seconds:g} s: {reason}.")
        with self.log.timed("waiting"):
            sleep_with_checks(seconds, check)
        self.cooled_at = time.monotonic()
        self.duty.restart()

    def _react_to_battery(self, step: int) -> None:
        if self.limits.on_battery == "slow":
            self._use_share("the machine is on battery" if self.on_battery else "mains power is back", step)

    @property
    def _heat_share(self) -> float:
        share: float = self.limits.thermal_batch_reduction_factor**self.reductions
        return max(self.LEAST_SHARE, share)

    def _use_share(self, reason: str, step: int) -> None:
        """Compute for the share of the time that heat and battery allow, and record a change."""
        is_slow = self.limits.on_battery == "slow" and self.on_battery
        share = self._heat_share * (self.limits.on_battery_factor if is_slow else 1.0)
        before = self.duty.share
        if share == before:
            return
        self.duty.set_share(share)
        self.log.event(DutyCycleChanged(step, before, share, reason))
        if share == 1:
            self.log.message(f"Training computes all the time again: {reason}.")
        elif before == 1:
            self.log.message(f"Training rests {1 - share:.0%} of the time: {reason}.")

    @property
    def wants_to_wait(self) -> bool:
        return self.limits.on_battery == "pause" and self.on_battery

    def waits(self, step: int, check: Check) -> bool:
        """Return whether training pauses on battery, after waiting for a moment if it already did.

        The first time, it returns immediately, so that the caller saves before it waits (see `react`).
        """
        if not self.wants_to_wait:
            if self.paused_at is not None:
                self._continue(step)
            return False
        if self.paused_at is None:
            self._pause(step)
            return True
        self.log.display.update("training", step, self.last_step, "waiting for mains power")
        with self.log.timed("waiting"):
            sleep_with_checks(self.WAIT_SECONDS, check)
        return True

    def _pause(self, step: int) -> None:
        self.paused_at = self.clock.seconds
        self.is_pause_saved = False
        self.log.event(TrainingPaused(step, "the machine is on battery"))
        self.log.message("On battery: training waits for mains power (limits.on_battery).")
        if self.awake is not None:
            self.awake.release()  # a machine that only waits may sleep

    def _continue(self, step: int) -> None:
        self.earlier_pauses_seconds = self.paused_seconds
        since, self.paused_at = self.paused_at or 0.0, None
        self.log.event(TrainingContinued(step, self.clock.seconds - since))
        self.log.message("Mains power is back: training continues.")
        self.duty.restart()
        if self.awake is not None:
            self.awake.hold()
