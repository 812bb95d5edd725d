"""Computing for only a share of the time, which is what cools a machine and saves its battery.

Heat follows from how busy the cores are. A smaller batch keeps them as busy as a larger one, because it takes
less time and the next one follows immediately; `bench/heat.py` measures this. Sleeping between two
computations does lower the load, by any share, and changes no bit of a result, as fewer threads would.
"""

from __future__ import annotations

import time
from collections.abc import Callable

CHECK_SECONDS = 0.2  # between two checks for a request to stop
MIN_REST_SECONDS = 0.02  # shorter rests are collected: a sleep is only precise to milliseconds


def sleep_with_checks(seconds: float, check: Callable[[], None]) -> None:
    """Sleep; `check` is called several times per second and may raise to end it."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        check()
        time.sleep(min(CHECK_SECONDS, left))


class DutyCycle:
    """Makes a process compute for `share` of the time, if `rest` is called between its computations.

    `clock` returns seconds. It may leave out pauses of the process, which would otherwise count as work.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.share = 1.0
        self.rested_seconds = 0.0  # in total
        self._clock = clock
        self._busy_since = clock()

    def set_share(self, share: float) -> None:
        self.share = share
        self.restart()

    def restart(self) -> None:
        """Count work from now on, after a wait of another kind."""
        self._busy_since = self._clock()

    def rest(self, check: Callable[[], None] = lambda: None) -> float:
        """Sleep as long as the work since the last rest requires, and return for how many seconds."""
        if self.share >= 1:
            return 0.0
        due_seconds = (self._clock() - self._busy_since) * (1 / self.share - 1)
        if due_seconds < MIN_REST_SECONDS:
            return 0.0
        started = time.monotonic()
        sleep_with_checks(due_seconds, check)
        rested = time.monotonic() - started
        self.rested_seconds += rested
        self.restart()
        return rested
