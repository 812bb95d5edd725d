"""`trm watch`."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trm.cli.common import PATH, echo, json_option, show, showing

if TYPE_CHECKING:
    from trm.reports.watching import Watched

INTERVAL_SECONDS = 1.0
PLAIN_SECONDS = 10.0  # between two frames where there is no terminal


@click.command()
@click.argument("run", type=PATH)
@click.option("--once", is_flag=True, help="Print one frame and exit.")
@json_option
def watch(run: Path, once: bool, as_json: bool) -> None:
    """Show RUN live, from any terminal: one that is being trained, has stopped, or has died.

    The view ends when the run has finished, or with Ctrl-C, which does not affect the training. --json prints
    one frame as JSON.
    """
    with showing("Reading the run"):
        from trm.reports.watching import Watched

        watched = Watched.open(run)
    if not once and not as_json:
        with suppress(KeyboardInterrupt):
            _follow(watched)
    show(watched.facts(), as_json, _frame(watched))


def _follow(watched: Watched) -> None:
    """Show the run until it has finished."""
    from macbook_optimization.progress_monitoring import ProgressDisplay

    with ProgressDisplay() as display:
        display.panel(watched)
        next_frame_at = time.monotonic()
        while not watched.view.state.has_ended:
            if display.is_live:
                display.draw()
            elif time.monotonic() >= next_frame_at:
                next_frame_at = time.monotonic() + PLAIN_SECONDS
                echo(f"{_frame(watched)}\n")
            time.sleep(INTERVAL_SECONDS)
            watched.update()


def _frame(watched: Watched) -> str:
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    ascii_only = not encoding.lower().startswith("utf")
    return "\n".join(watched.lines(shutil.get_terminal_size().columns, ascii_only=ascii_only))
