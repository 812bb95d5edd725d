"""Display of progress: live bars on a terminal, a plain line every few seconds elsewhere.

Progress is written to standard error, so that standard output holds only results. Texts may contain names
that others chose, so their control characters are shown as codes.

The cursor rests at the start of the live lines. A terminal that becomes narrower wraps them, but keeps the
cursor at the character where it was: erasing from there to the end of the screen removes all of them, however
many rows they take by then.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import IO, Protocol, Self, TextIO, cast

from rich.console import Console
from rich.text import Text

from macbook_optimization.progress_lines import (
    ASCII_MARKS,
    CLEAR_LIVE_LINES,
    COUNT_ONLY_BELOW_COLUMNS,
    FILLED,
    REST,
    Bar,
    fit_bar,
    fit_status,
)
from macbook_optimization.terminal_text import visible, wrap_words

REFRESH_SECONDS = 0.2
SHOWN_AFTER_SECONDS = 0.5  # a bar beside another one, so that short work does not flicker
_BEGIN = "\033[?25l\033[?7l\r"  # hide the cursor; do not wrap, in case the terminal has just become narrower
_END = "\033[J\033[?7h"
_REST_OF_LINE = "\033[K"


class Panel(Protocol):
    """Lines that are shown instead of one bar."""

    def lines(self, columns: int, *, ascii_only: bool) -> list[str]:
        """Return lines of at most this many columns; no lines leave the bar in place."""
        ...

    def summary(self) -> str:
        """Return what a plain line says in addition, without a terminal."""
        ...


class ProgressDisplay:
    """A context manager for the duration of the work. `update` is cheap and may be called often."""

    def __init__(
        self,
        plain_every_seconds: float = 5.0,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or _stderr_console()
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._every_seconds = plain_every_seconds
        self._now = now
        self._next_line: dict[str, float] = {}
        self._bars: dict[str, Bar] = {}
        self._status: tuple[str, float] | None = None  # and since when
        self._panel: Panel | None = None
        self._panel_replaces = ""
        self._coloured_lines: dict[str, str] = {}  # of the last frame
        self._lines: list[str] = []  # on the screen
        self._size = self._console.size
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._refresher = threading.Thread(target=self._refresh, daemon=True)
        self._stderr = sys.stderr
        self._above = _LinesAbove(self._console.file, self.draw)

    @property
    def is_live(self) -> bool:
        """Return whether there is a terminal that can be drawn on."""
        return self._live

    def __enter__(self) -> Self:
        if self._live:
            self._stderr = sys.stderr
            sys.stderr = cast(TextIO, self._above)
            self._refresher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._stopped.set()
            self._refresher.join()
            self._above.close()
            sys.stderr = self._stderr
            self._write(CLEAR_LIVE_LINES)
            self._lines = []

    def update(self, what: str, done: int, total: int, *facts: str) -> None:
        """Show how much of some work is done; `facts` in order of importance. Finished work disappears."""
        what = visible(what)
        facts = tuple(map(visible, facts))
        if not self._live:
            self._print_if_due(what, done, total, facts)
            return
        now = self._now()
        with self._lock:
            self._status = None
            if done >= total:
                self._bars.pop(what, None)
                return
            bar = self._bars.get(what)
            if bar is None or done < bar.done:  # it has begun again
                bar = self._bars[what] = Bar(what, total, began=now)
            bar.record(now, done, total, facts)

    def status(self, text: str, *, plain: bool = False) -> None:
        """Show what is happening until there is progress or another status; elsewhere only if `plain`."""
        if self._live:
            with self._lock:
                self._status = (visible(text), self._now()) if text else None
            self.draw()
        elif plain:
            self.message(f"{text}.")

    def panel(self, panel: Panel | None, instead_of: str = "") -> None:
        """Show a panel while the work `instead_of` is in progress, in place of its bar."""
        with self._lock:
            self._panel = panel
            self._panel_replaces = instead_of

    def message(self, text: str) -> None:
        text = visible(text)
        if self._live:
            self.draw(above=wrap_words(text, self._console.width - 1))
        else:
            self._write(f"{text}\n")

    def draw(self, above: str | None = None) -> None:
        """Bring the live lines up to date, below a text that remains."""
        with self._lock:
            size = self._console.size
            lines = self._fit(size.width - 1)[: max(1, size.height - 1)]
            as_before = lines == self._lines and (size == self._size or not lines)
            if above is None and as_before:
                return
            self._lines = lines
            self._size = size
            self._write(self._frame(lines, above))

    def _frame(self, lines: list[str], above: str | None) -> str:
        permanent = "" if above is None else f"\r\033[J{above}\n"
        coloured = {line: self._coloured_lines.get(line) or self._coloured(line) for line in lines}
        self._coloured_lines = coloured  # most lines of the next frame are the same
        rows = f"{_REST_OF_LINE}\n".join(coloured[line] for line in lines)
        if not rows:
            return permanent or CLEAR_LIVE_LINES
        up = f"\033[{len(lines) - 1}A" if len(lines) > 1 else ""
        return f"{permanent}{_BEGIN}{rows}{_END}{up}\r"

    def _fit(self, columns: int) -> list[str]:
        now = self._now()
        ascii_only = self._console.options.ascii_only
        marks = ASCII_MARKS if ascii_only else FILLED + REST
        bars = list(self._bars.values())
        panel: list[str] = []
        if self._panel is not None and (not self._panel_replaces or self._panel_replaces in self._bars):
            panel = self._panel.lines(columns, ascii_only=ascii_only)
        if panel:
            bars = [bar for bar in bars if bar.what != self._panel_replaces]
        at_once = None if panel or not bars else bars[0]
        shown = [bar for bar in bars if bar is at_once or now - bar.began >= SHOWN_AFTER_SECONDS]
        if columns + 1 < COUNT_ONLY_BELOW_COLUMNS:
            shown = shown[:1]
        if not panel and not shown and self._status is not None:
            text, since = self._status
            return [fit_status(text, now - since, columns)]
        return [*panel, *(fit_bar(bar, now, columns, *marks) for bar in shown)]

    def _coloured(self, line: str) -> str:
        text = Text(line, no_wrap=True)
        text.highlight_regex("[━#]{2,}", "bar.complete")
        text.highlight_regex("[─-]{2,}", "bar.back")
        with self._console.capture() as captured:
            self._console.print(text, end="", soft_wrap=True)
        return captured.get()

    def _refresh(self) -> None:
        while not self._stopped.wait(REFRESH_SECONDS):
            self.draw()

    def _print_if_due(self, what: str, done: int, total: int, facts: tuple[str, ...]) -> None:
        now = self._now()
        due = self._next_line.setdefault(what, now + self._every_seconds)
        if done >= total:
            del self._next_line[what]
        elif now >= due:
            self._next_line[what] = now + self._every_seconds
            if self._panel is not None and what == self._panel_replaces:
                facts = (*facts, visible(self._panel.summary()))
            self.message(f"{what}: {done}/{total} {'  '.join(filter(None, facts))}".rstrip())

    def _write(self, text: str) -> None:
        with suppress(OSError):  # a closed terminal or a log on a full disk must not stop the work
            self._console.file.write(text)
            self._console.file.flush()


def _stderr_console() -> Console:
    """Return a console of standard error, which may be closed. Only a terminal gets control codes, whatever
    the environment says about colours."""
    stream = sys.stderr
    is_terminal = stream is not None and stream.isatty()
    return Console(file=stream, stderr=True, highlight=False, force_terminal=is_terminal)


class _LinesAbove(io.TextIOBase):
    """Replaces `sys.stderr` during a live display: warnings of libraries appear above the live lines."""

    def __init__(self, file: IO[str], write_above: Callable[[str], None]) -> None:
        self._file = file
        self._write_above = write_above
        self._incomplete = ""

    def write(self, text: str) -> int:
        complete, newline, self._incomplete = (self._incomplete + text).rpartition("\n")
        if newline:
            self._write_above(visible(complete, keep_styles=True))
        return len(text)

    def close(self) -> None:
        if self._incomplete:
            self.write("\n")

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()
