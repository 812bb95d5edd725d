"""Reading files that people give us: regular files only, and never more than a stated limit.

Opening a pipe may block, a device may never end, and a small compressed file may unpack to more than the
disk holds. Functions raise `OSError`, as those of Python do, with the reason in words.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from macbook_optimization.errors import DataError
from macbook_optimization.json_types import parse_json
from macbook_optimization.units import MIB

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
}


class TooLargeError(OSError):
    """A file has more bytes than may be read."""


def kind_of(mode: int) -> str | None:
    """Return what `st_mode` describes, in words, or None for a regular file."""
    if stat.S_ISREG(mode):
        return None
    return _KINDS.get(stat.S_IFMT(mode), "not a file")


def open_descriptor(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file without blocking; raise `OSError` for anything else.

    Opening a device can have effects of its own, so the path is checked first. It may be replaced just then,
    so the open file is checked as well.
    """
    _refuse_other_kinds(os.stat(path).st_mode, path)
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for its writer
    try:
        _refuse_other_kinds(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_other_kinds(mode: int, path: str | Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if (kind := kind_of(mode)) is not None:
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def open_input(path: str | Path) -> io.BufferedReader:
    """Open a regular file to read bytes from it."""
    return open(path, "rb", opener=open_descriptor)


def read_input(path: str | Path, max_bytes: int) -> bytes:
    """Return the content of a regular file; raise `OSError` if there is more than `max_bytes`."""
    with open_input(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise TooLargeError(errno.EINVAL, f"it is larger than {max_bytes / MIB:.4g} MiB", str(path))
    return content


def read_json(path: str | Path, max_bytes: int) -> Any:
    """Return the value in a JSON file; raise `OSError` as `read_input` does, or `ValueError` for bad JSON."""
    return parse_json(read_input(path, max_bytes))


class LimitedStream(io.RawIOBase):
    """Passes lines of text on; raises `DataError` at `max_bytes`, or at `max_line_bytes` without a newline.

    The bytes are counted as they arrive: of a compressed file, after it is unpacked.
    """

    def __init__(self, stream: BinaryIO, label: str, max_bytes: int, max_line_bytes: int, hint: str) -> None:
        self.stream = stream
        self.label = label
        self.max_bytes = max_bytes
        self.max_line_bytes = max_line_bytes
        self.hint = hint  # how to raise `max_bytes`
        self.num_bytes = 0
        self.num_lines = 0
        self.line_start = 0  # of the last line, in bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        content = self.stream.read(len(buffer))
        newline = max(content.rfind(b"\n"), content.rfind(b"\r"))  # \r alone on old Macs
        if newline >= 0:
            self.num_lines += content.count(b"\n")
            self.line_start = self.num_bytes + newline + 1
        self.num_bytes += len(content)
        if self.num_bytes > self.max_bytes:
            raise DataError(
                f"{self.label} has more than {self.max_bytes / MIB:,.4g} MiB of text", hint=self.hint
            )
        if self.num_bytes - self.line_start > self.max_line_bytes:
            line = f"line {self.num_lines + 1}"
            raise DataError(f"{self.label}: {line} has more than {self.max_line_bytes:,} bytes")
        buffer[: len(content)] = content
        return len(content)
