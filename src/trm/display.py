"""The interface for progress and messages of long operations. `ProgressDisplay` shows them."""

from __future__ import annotations

from typing import Protocol


class Display(Protocol):
    def update(self, what: str, done: int, total: int, *facts: str) -> None: ...

    def status(self, text: str, *, plain: bool = False) -> None: ...

    def message(self, text: str) -> None: ...


class Silent:
    """A display that shows nothing."""

    def update(self, what: str, done: int, total: int, *facts: str) -> None:
        return None

    def status(self, text: str, *, plain: bool = False) -> None:
        return None

    def message(self, text: str) -> None:
        return None
