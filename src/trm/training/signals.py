"""Requests to stop: Ctrl-C, SIGTERM, a closed terminal, a parent process that is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from macbook_optimization.children import parent_is_gone
from macbook_optimization.progress_lines import CLEAR_LIVE_LINES
from macbook_optimization.terminal_text import wrap_words


class Interrupted(Exception):  # noqa: N818 - a request, not an error
    """A request to stop was noticed; the state is that of the last complete step."""


class StopRequest:
    """Set by a signal handler, read by the loop between steps and micro-batches."""

    def __init__(self) -> None:
        self.arrived = False

    @property
    def requested(self) -> bool:
        return self.arrived or parent_is_gone()

    def check(self) -> None:
        """Raise `Interrupted` if a stop was requested."""
        if self.requested:
            raise Interrupted


def _notice(*, again: bool) -> str:
    """Return what the terminal is to show, in place of a live display and of the "^C" within it."""
    text = "" if again else "Stopping; saving the last complete step (Ctrl-C again exits immediately).\n"
    if not os.isatty(2):
        return text
    return CLEAR_LIVE_LINES + wrap_words(text, os.get_terminal_size(2).columns - 1) + "\n" * (not again)


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Turn the first Ctrl-C, SIGTERM or hang-up into a request; a second one exits immediately.

    Exiting is safe: the last checkpoint is already complete. The handler may interrupt any line of ours, even
    a print, so it writes to the terminal itself.
    """
    stop = StopRequest()

    def on_signal(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):  # the terminal may be gone
            os.write(2, _notice(again=stop.arrived).encode())
        if stop.arrived:
            os._exit(130)
        stop.arrived = True

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup, the run outlives the terminal
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
