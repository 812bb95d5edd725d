"""The interface for progress and messages of long operations. `ProgressDisplay` shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Display(Protocol):
    def update(self, what: str, done: int, total: int, *facts: str) -> None: ...

    def status(self, text: str, *, plain: bool = False) -> None: ...

    def message(self, text: str) -> None: ...


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


class ProgressOnly(Silent):
    """A display that passes progress on, and shows nothing else."""

    def __init__(self, progress: Callable[[str, int, int], None]) -> None:
        self.progress = progress

    def update(self, what: str, done: int, total: int, *facts: str) -> None:
        self.progress(what, done, total)
