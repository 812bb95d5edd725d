"""The messages of an mbox, one after the other, in constant memory.

An mbox is a concatenation of messages, each behind a separator line `From sender date` that follows an empty
line. The file is searched in chunks, so neither its size nor that of a message matters: a message beyond the
limit is skipped without being kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from macbook_optimization.errors import DataError
from trm.tasks.documents.mime import MAX_MESSAGE_BYTES

_CHUNK_BYTES = 2**20
_LOOK_AHEAD_BYTES = 4096  # enough for a separator and the name of the header below it
_LOOK_BACK_BYTES = 2  # the end of the empty line before it
_TIME = re.compile(rb"\d:\d\d")
_HEADER = re.compile(rb"[!-9;-~]{1,200}[ \t]?:|>From ")
_QUOTED = re.compile(rb"^>(>*From )", re.MULTILINE)


class Slice(NamedTuple):
    """One message of an mbox."""

    offset: int  # of its separator line
    end_offset: int  # of the next separator: where to continue
    raw: bytes | None  # None: larger than the limit


def split_mbox(stream: BinaryIO, offset: int = 0, limit: int = MAX_MESSAGE_BYTES) -> Iterator[Slice]:
    """Yield the messages of a stream that is positioned at `offset`, which must be a separator."""
    buffer = bytearray(stream.read(_CHUNK_BYTES))
    skipped = len(buffer) - len(buffer.lstrip(b"\r\n"))
    del buffer[:skipped]
    if not buffer:
        return
    if not buffer.startswith(b"From "):
        raise DataError(
            f"There is no message of an mbox at byte {offset}: it would begin with 'From '.",
            hint="Check the format. If the file has changed since an interrupted import, import it again.",
        )
    base = start = offset + skipped  # of the buffer, and of the message
    position = 1  # where the next separator can be
    too_large = is_end = False
    while True:
        found, position = _next_separator(buffer, position, is_end)
        if found is not None or is_end:
            end = len(buffer) if found is None else found
            raw = None if too_large else _message(buffer, end, limit)
            yield Slice(start, base + end, raw)
            if found is None:
                return
            del buffer[:end]
            base = start = base + end
            position = 1
            too_large = False
            continue
        if len(buffer) > limit + _CHUNK_BYTES:
            too_large = True
        if too_large:
            passed = max(0, position - _LOOK_BACK_BYTES)
            del buffer[:passed]
            base += passed
            position -= passed
        chunk = stream.read(_CHUNK_BYTES)
        is_end = not chunk
        buffer += chunk


def _next_separator(buffer: bytearray, position: int, is_end: bool) -> tuple[int | None, int]:
    """Return where the next separator is, or None, and from where to search again."""
    while True:
        found = buffer.find(b"\nFrom ", position)
        if found < 0:
            return None, max(position, len(buffer) - len(b"\nFrom"))
        if found + _LOOK_AHEAD_BYTES > len(buffer) and not is_end:
            return None, found
        follows_empty_line = buffer[found - 1 : found] == b"\n" or buffer[found - 2 : found] == b"\n\r"
        if follows_empty_line and _is_separator(bytes(buffer[found + 1 : found + _LOOK_AHEAD_BYTES])):
            return found + 1, found + 1
        position = found + 1


def _is_separator(text: bytes) -> bool:
    """Return whether a line after 'From ' is a separator: it has a time, or a header follows."""
    line, _, rest = text.partition(b"\n")
    return bool(_TIME.search(line) or _HEADER.match(rest))


def _message(buffer: bytearray, end: int, limit: int) -> bytes | None:
    """Return a message without its separator and the empty line after it. Quoted From lines are restored."""
    start = buffer.find(b"\n", 0, end) + 1
    if start == 0:
        return b""
    if end - start > limit:
        return None
    with memoryview(buffer) as view:  # a slice of the buffer itself would be a second copy
        raw = bytes(view[start:end])
    for empty_line in (b"\n\r\n", b"\n\n"):
        if raw.endswith(empty_line):
            raw = raw[: 1 - len(empty_line)]
            break
    if b">From " in raw:
        raw = _QUOTED.sub(rb"\1", raw)
    return raw
