"""The standard streams of the process, which may be closed, full, or a pipe that nobody reads any more."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


def open_closed_streams() -> None:
    """Open what was closed before the program started.

    Without this, the next file that is opened gets the descriptor of a standard stream, and a child process
    would write its messages into it. Writing to a standard output that was closed still fails, as its
    descriptor is only opened for reading; messages to a closed standard error are dropped.
    """
    for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, mode), True)  # the lowest free descriptor is this one
    # Python sets these to None when they are closed. Names of files may contain what cannot be encoded.
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    sys.stdout = _reconfigured(sys.stdout)
    sys.stderr = _reconfigured(sys.stderr)


def _reconfigured(stream: TextIO) -> TextIO:
    """Return a stream that writes any text, and keeps what it could not write for `flush`.

    With PYTHONUNBUFFERED, it has no buffer and would drop that.
    """
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    if isinstance(stream.buffer, io.RawIOBase):
        encoding = stream.encoding
        stream = io.TextIOWrapper(io.BufferedWriter(stream.detach()), encoding, line_buffering=True)
    stream.reconfigure(errors="backslashreplace")
    return stream


def flush(stream: TextIO) -> OSError | None:
    """Write what is buffered. If that is impossible, discard it and return the error.

    Without this, the interpreter would try again at its end, print the error and change the exit code.
    """
    try:
        stream.flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        return error
    return None
