"""Display of progress: a live bar on a terminal, a plain line every few seconds elsewhere.

Progress is written to standard error, so that standard output holds only results.
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
    """A context manager for the duration of the work. `update` is cheap and may be called often."""

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
            transient=True,  # only messages and results remain on the terminal
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
            self._print_if_due(what, done, total, facts)
            return
        if what not in self._bars:
            self._bars[what] = self._progress.add_task(what, total=total, facts=facts, completed=done)
        is_running = done < total  # a finished bar disappears
        self._progress.update(self._bars[what], completed=done, total=total, facts=facts, visible=is_running)

    def _print_if_due(self, what: str, done: int, total: int, facts: str) -> None:
        now = time.monotonic()
        due = self._next_line.setdefault(what, now + self._every_seconds)
        if done >= total:
            del self._next_line[what]
        elif now >= due:
            self._next_line[what] = now + self._every_seconds
            self.message(f"{what}: {done}/{total} {facts}".rstrip())

    def message(self, text: str) -> None:
        with suppress(OSError):  # a closed terminal or a log on a full disk must not stop the work
            self._progress.console.print(text, markup=False, soft_wrap=True)
