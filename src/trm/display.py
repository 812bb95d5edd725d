"""The interface for progress and messages of long operations. `ProgressDisplay` implements it."""

from __future__ import annotations

from typing import Protocol


class Display(Protocol):
    def update(self, what: str, done: int, total: int, facts: str = "") -> None: ...

    def message(self, text: str) -> None: ...
