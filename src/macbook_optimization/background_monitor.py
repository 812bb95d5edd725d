"""A thread that takes samples at an interval and survives what the system refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self


class BackgroundMonitor:
    """Samples something in a background thread between start and stop.

    A monitor observes and never acts: the training loop reads the latest sample at a step boundary and
    decides. A second thread that changed the batch size would race the step that is using it.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Run once in the thread, before the first interval. Override this."""

    def sample(self) -> None:
        """Take a sample, after every interval. Override this."""

    def failed(self, error: OSError, times: int) -> None:
        """Run after the system refused `times` samples in a row; the next one is taken all the same."""

    def __enter__(self) -> Self:
        self.start_monitoring()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_monitoring()

    def start_monitoring(self, interval: float = 1.0) -> None:
        """Start sampling every `interval` seconds; starting again changes the interval."""
        self.stop_monitoring()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(interval, self._stop), daemon=True)
        self._thread.start()

    def stop_monitoring(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, interval: float, stop: threading.Event) -> None:
        failures = self._attempt(self.begin, 0)
        while not stop.wait(interval):
            failures = self._attempt(self.sample, failures)

    def _attempt(self, take: Callable[[], None], failures: int) -> int:
        """Return how many samples in a row have failed, for example while too many files are open."""
        try:
            take()
        except OSError as error:
            self.failed(error, failures + 1)
            return failures + 1
        return 0
