"""Lines of a stream, as they arrive: the stream may be endless, slow, or not text at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from macbook_optimization.errors import DataError
from macbook_optimization.units import MIB

MAX_LINE_BYTES = 1 * MIB
MAX_SKIPPED_BYTES = 256 * MIB  # of a longer line, before the stream is given up


@dataclass(frozen=True, slots=True)
class Line:
    number: int  # counted from 1, blank lines included
    content: bytes  # of a line that is too long, the first `MAX_LINE_BYTES` and one more

    def check_length(self) -> None:
        if len(self.content) > MAX_LINE_BYTES:
            raise DataError(f"It is longer than {MAX_LINE_BYTES:,} bytes")


def batches_of_lines(read: Callable[[], bytes], most: int) -> Iterator[list[Line]]:
    """Yield the lines that are not blank, as soon as they have arrived and at most `most` at a time.

    `read` waits for input and returns what there is, or nothing at the end.
    """
    for lines in _arrivals(read):
        filled = [line for line in lines if line.content.strip()]
        for start in range(0, len(filled), most):
            yield filled[start : start + most]


def _arrivals(read: Callable[[], bytes]) -> Iterator[list[Line]]:
    number = 0
    pending = b""
    skipped = 0
    while chunk := read():
        *complete, pending = (pending + chunk).split(b"\n")
        if complete:
            skipped = 0
            yield [Line(number + i, content) for i, content in enumerate(complete, start=1)]
            number += len(complete)
        excess = len(pending) - (MAX_LINE_BYTES + 1)
        if excess > 0:
            pending = pending[:-excess]
            skipped += excess
        if skipped > MAX_SKIPPED_BYTES:
            raise DataError(f"Line {number + 1} does not end after {MAX_SKIPPED_BYTES:,} bytes")
    yield [Line(number + 1, pending)]
