"""The interface for progress and messages of long operations. `ProgressDisplay` shows them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from macbook_optimization.progress_monitoring import Panel


class Display(Protocol):
    def update(self, what: str, done: int, total: int, *facts: str) -> None: ...

    def status(self, text: str, *, plain: bool = False) -> None: ...

    def message(self, text: str) -> None: ...

    def panel(self, panel: Panel | None, instead_of: str = "") -> None: ...


PROGRESS_SECONDS = 0.2  # between two updates that are sent to another process


class Forwarded:
    """A display in another process: `send` takes what it is to show, `show_forwarded` shows it there."""

    def __init__(self, send: Callable[[Any], None], now: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._now = now
        self._sent: dict[str, float] = {}  # unfinished work, and when it was last shown

    def update(self, what: str, done: int, total: int, *facts: str) -> None:
        if done >= total:
            if self._sent.pop(what, None) is None:
                return  # it was never shown
        elif self._now() - self._sent.get(what, -PROGRESS_SECONDS) < PROGRESS_SECONDS:
            return
        else:
            self._sent[what] = self._now()
        self._try_to_send(["update", what, done, total, *facts])

    def status(self, text: str, *, plain: bool = False) -> None:
        self._try_to_send(["status", text, plain])

    def message(self, text: str) -> None:
        self._try_to_send(["message", text])

    def panel(self, panel: Panel | None, instead_of: str = "") -> None:
        return None  # it belongs to the process that displays it

    def _try_to_send(self, row: list[Any]) -> None:
        with suppress(OSError):  # whoever displays it may have been killed
            self._send(row)


def show_forwarded(display: Display, row: list[Any]) -> None:
    """Show what a `Forwarded` has sent."""
    kind, *values = row
    if kind == "update":
        display.update(*values)
    elif kind == "status":
        text, plain = values
        display.status(text, plain=plain)
    else:
        display.message(*values)


def building(display: Display) -> Callable[[str, int, int], None]:
    """Show that a dataset is built: its progress, and that it is written after the last of it."""
    display.status("Building the dataset")

    def progress(what: str, done: int, total: int) -> None:
        display.update(what, done, total)
        if done >= total:
            display.status("Writing the dataset")

    return progress


class Silent:
    """A display that shows nothing."""

    def update(self, what: str, done: int, total: int, *facts: str) -> None:
        return None

    def status(self, text: str, *, plain: bool = False) -> None:
        return None

    def message(self, text: str) -> None:
        return None

    def panel(self, panel: Panel | None, instead_of: str = "") -> None:
        return None


class ProgressOnly(Silent):
    """A display that passes progress on, and shows nothing else."""

    def __init__(self, progress: Callable[[str, int, int], None]) -> None:
        self.progress = progress

    def update(self, what: str, done: int, total: int, *facts: str) -> None:
        self.progress(what, done, total)
