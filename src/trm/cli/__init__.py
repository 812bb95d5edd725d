"""The command line: parse, call one function, print.

Torch, pydantic and rich are imported inside the commands, so that `trm --help` answers immediately.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any

import click

from macbook_optimization.errors import LaptopError
from macbook_optimization.file_errors import hint_for, reason_of
from trm.cli.checkpoints import checkpoint
from trm.cli.common import echo, for_terminal
from trm.cli.data import data
from trm.cli.email import email
from trm.cli.evaluate import evaluate
from trm.cli.join import join
from trm.cli.machine import bench, doctor
from trm.cli.predict import predict
from trm.cli.recipes import recipes
from trm.cli.report import report
from trm.cli.runs import runs
from trm.cli.selfcheck import selfcheck
from trm.cli.streams import flush, open_closed_streams
from trm.cli.train import train
from trm.cli.tune import tune
from trm.cli.watch import watch


class _PipeError(Exception):
    def __init__(self, cause: BrokenPipeError) -> None:
        super().__init__(cause)
        self.cause = cause


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        """Hide broken pipes from click, which ends the program silently, whichever pipe is broken."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _PipeError(error) from error


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(package_name="macbook-trm", prog_name="trm")
def cli() -> None:
    """Train a Tiny Recursive Model on the laptop you own."""
    try:
        os.getcwd()
    except FileNotFoundError as error:  # libraries abort there
        raise LaptopError(
            "The working directory has been deleted.", hint="Change to a directory that exists."
        ) from error


for command in (
    data, checkpoint, doctor, bench, train, join, tune, evaluate, predict, email, recipes, report, runs,
    watch, selfcheck,
):  # fmt: skip
    cli.add_command(command)


def main() -> None:
    """Run a command; this is the one place where errors become text and exit codes."""
    open_closed_streams()
    code = _run()
    unwritten = flush(sys.stdout)
    if unwritten is not None and not code:
        _report_unwritten(unwritten)
        code = 1
    flush(sys.stderr)
    sys.exit(code)


def _run() -> int:
    """Run the command that was given, report its error, and return the exit code."""
    try:
        code = cli.main(standalone_mode=False)
    except SystemExit as request:
        return request.code if isinstance(request.code, int) else 1
    except click.ClickException as error:
        usage = io.StringIO()
        error.show(usage)
        _print(usage.getvalue().rstrip("\n"))
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):  # Ctrl-C where nothing had to be saved
        _print_message("Stopped.")
        return 130
    except LaptopError as error:
        _report(str(error), error.hint)
        return error.exit_code
    except (MemoryError, ImportError) as error:
        if isinstance(error, ImportError) and "map segment" not in str(error):  # of a shared library
            raise
        _report("There is not enough memory.", "Close other programs, or raise the limit of this process.")
        return 1
    except _PipeError as error:
        return _report_system_error(error.cause)
    except OSError as error:
        return _report_system_error(error)
    return code if isinstance(code, int) else 0  # what `--help` exits with, or the None of a command


def _report_system_error(error: OSError) -> int:
    """Report what the system refused, and return the exit code; raise an error that only a bug explains.

    The error is one of a stream if that stream cannot be flushed. Any other either names the path, or has a
    cause that a user can remove, such as a full disk.
    """
    unwritten = flush(sys.stdout)
    if unwritten is not None:
        _report_unwritten(unwritten)
    elif flush(sys.stderr) is None:
        hint = hint_for(error)
        if error.filename is None and hint is None:
            raise error from None
        place = "" if error.filename is None else f": {os.fsdecode(error.filename)}"
        _report(f"{reason_of(error)}{place}", hint)
    return 1


def _report_unwritten(error: OSError) -> None:
    if error.errno != errno.EPIPE:  # after EPIPE, nobody reads the rest of the output
        _report(f"Cannot write to standard output: {reason_of(error)}", hint_for(error))


def _report(message: str, hint: str | None = None) -> None:
    _print_message(f"error: {message}")
    if hint:
        _print_message(f"hint: {hint}")


def _print_message(text: str) -> None:
    _print(for_terminal(text, sys.stderr))


def _print(text: str) -> None:
    with suppress(OSError):  # standard error may be full, too
        echo(text, err=True)
