"""Being asked to stop: Ctrl-C, SIGTERM, a closed terminal, a parent that is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from macbook_optimization.children import parent_is_gone


class Interrupted(Exception):  # noqa: N818 - a request, not an error
    """Ctrl-C or SIGTERM arrived; the state is that of the last whole step."""


@contextmanager
def stop_signals() -> Iterator[Callable[[], None]]:
    """Yields a function that raises `Interrupted` once Ctrl-C, SIGTERM or a closed terminal has arrived. A
    second one leaves at once, which is safe: the last checkpoint is already complete.

    The handler may interrupt any line of ours, a print included, so it writes to the terminal by itself.
    """
    arrived = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal arrived
        with suppress(OSError):  # the terminal may be gone
            if arrived and os.isatty(2):
                os.write(2, b"\033[?25h\n")  # a live display had hidden the cursor
            elif not arrived:
                os.write(2, b"\nStopping; saving the last whole step (Ctrl-C again leaves at once).\n")
        if arrived:
            os._exit(130)
        arrived = True

    def check() -> None:
        if arrived or parent_is_gone():
            raise Interrupted

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup asks us to outlive the terminal
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
