"""Showing long work: a live bar on a terminal, and elsewhere a plain line every few seconds.

Progress goes to standard error, so that standard output holds results only.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as EtaColumn


class ProgressDisplay:
    """Open while the work lasts. `update` may be called as often as one likes."""

    def __init__(self, plain_every_seconds: float = 5.0) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._every_seconds = plain_every_seconds
        self._next_line: dict[str, float] = {}
        self._bars: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            EtaColumn(),
            console=self._console,
            transient=True,  # what remains are messages and results
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, what: str, done: int, total: int, facts: str = "") -> None:
        if self._progress.disable:
            now = time.monotonic()
            due = self._next_line.setdefault(what, now + self._every_seconds)
            if done >= total:
                del self._next_line[what]
            elif now >= due:
                self._next_line[what] = now + self._every_seconds
                self.message(f"{what}: {done}/{total} {facts}".rstrip())
            return
        if what not in self._bars:
            self._bars[what] = self._progress.add_task(what, total=total, facts=facts, completed=done)
        going_on = done < total  # a finished bar makes room
        self._progress.update(self._bars[what], completed=done, total=total, facts=facts, visible=going_on)

    def message(self, text: str) -> None:
        with suppress(OSError):  # a terminal that is gone, or a log on a full disk, is no reason to stop
            self._progress.console.print(text, markup=False, soft_wrap=True)
