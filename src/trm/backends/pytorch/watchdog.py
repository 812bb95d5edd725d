"""Heartbeats: each process of a world shows the others that it lives.

A process that computes a long step, evaluates, compiles or waits for disk space cannot take part in an
operation of gloo, which can only wait for a fixed time. So a thread counts up a number in the store, and
checks that those of the other processes grow. A frozen, sleeping or unreachable machine is found after the
same time, however long a step takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from trm.backends.world import OnLost

BEATS_PER_TIMEOUT = 10
MAX_INTERVAL_SECONDS = 1.0


class Watchdog:
    """Two threads: one counts and reads in the store, the other notices when that takes too long.

    `on_lost` is called in one of the threads. `store` must not be used by others, as requests to a machine
    that is gone block.
    """

    def __init__(self, store: Any, key: str, host: str, timeout_seconds: float, on_lost: OnLost) -> None:
        self.store = store
        self.key = key
        self.host = host  # name of the machine that holds the store
        self.timeout_seconds = timeout_seconds
        self.on_lost = on_lost
        self.interval_seconds = min(MAX_INTERVAL_SECONDS, timeout_seconds / BEATS_PER_TIMEOUT)
        self.peers: dict[str, str] = {}  # key -> name
        self._counts: dict[str, int] = {}
        self._seen: dict[str, float] = {}  # when a count last grew, or a round in the store was completed
        self._stopped = threading.Event()

    def start(self) -> None:
        self._seen[self.key] = time.monotonic()
        for target in (self._beat, self._check):
            threading.Thread(target=target, daemon=True).start()

    def watch(self, peers: Mapping[str, str]) -> None:
        """Expect heartbeats of these processes from now on."""
        now = time.monotonic()
        self._seen.update(dict.fromkeys(peers, now))
        self.peers = dict(peers)

    def stop(self) -> None:
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(self.interval_seconds):
            try:
                self.store.add(self.key, 1)
                counts = {key: self.store.add(key, 0) for key in self.peers}
            except RuntimeError:
                self._report([self.host], f"the connection to {self.host} was closed")
                return
            now = time.monotonic()
            self._seen[self.key] = now
            grown = [key for key, count in counts.items() if count != self._counts.get(key)]
            self._seen.update(dict.fromkeys(grown, now))
            self._counts = counts

    def _check(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(self.interval_seconds):
            now = time.monotonic()
            if now - before > self.timeout_seconds / 2:  # this process was frozen, or the machine slept
                self._seen = dict.fromkeys(self._seen, now)
            before = now
            if silent := self._silent(now):
                self._report(silent, f"no sign of life for {self.timeout_seconds:g} s")
                return

    def _silent(self, now: float) -> list[str]:
        """Return who is lost. While the store does not answer, nothing is known about the others."""
        answered = self._seen[self.key]
        if now - answered > self.timeout_seconds:
            return [self.host]
        late = (key for key in self.peers if answered - self._seen[key] > self.timeout_seconds)
        return [self.peers[key] for key in late]

    def _report(self, names: list[str], cause: str) -> None:
        if not self._stopped.is_set():
            self._stopped.set()
            self.on_lost(names, cause)
