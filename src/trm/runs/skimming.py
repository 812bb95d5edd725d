"""Reading a long file of rows in bounded time and memory: a sample of its training rows, and all others.

A week of training writes half a million rows, and a curve needs a few thousand of them. Of a long file, every
k-th training row is parsed, and so are the first ones, all rows of the last part and all rows of other kinds.
The seconds (`spent`, `waited_for`) of the rows in between are added to those of the next one, so the sums are
exact.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedReader

from macbook_optimization.json_types import parse_json
from macbook_optimization.units import MIB
from trm.runs.rows import Row, kind_of

NUM_FIRST_ROWS = 3  # of training, always parsed: what the loss was at the beginning
MAX_SAMPLED_ROWS = 30_000
WHOLE_BYTES = 8 * MIB  # a file up to this size is read in full
_TAIL_BYTES = MIB // 2  # at the end, in full: about a thousand rows
_MAX_LINE_BYTES = 4 * MIB
_SAMPLE_BYTES = 64 * 1024
_TRAIN = b'{"kind": "train"'
_SUMMED = ("spent", "waited_for")  # objects without objects in them


def skim_lines(file: BufferedReader, begin: int, end: int) -> Iterator[Row]:
    """Yield rows with their `kind` from the complete lines between two offsets."""
    file.seek(begin)
    skim = _Skim(_stride(file, begin, end), end - _TAIL_BYTES)
    offset = begin
    while offset < end:
        line = file.readline(min(_MAX_LINE_BYTES, end - offset))
        if not line:
            return
        offset += len(line)
        row = skim.row_of(line, offset)
        if row is not None:
            yield row


def _stride(file: BufferedReader, begin: int, end: int) -> int:
    """Return of how many training rows one is parsed; the mean length of a row is that of the first ones."""
    if end - begin <= WHOLE_BYTES:
        return 1
    sample = file.read(_SAMPLE_BYTES)
    file.seek(begin)
    num_rows = (end - begin) * max(1, sample.count(b"\n")) / len(sample)
    return 1 + int(num_rows / MAX_SAMPLED_ROWS)


@dataclass
class _Skim:
    stride: int
    tail_begin: int
    num_train: int = 0
    passed_over: dict[str, list[bytes]] = field(default_factory=dict)  # of rows that were not parsed, by name

    def row_of(self, line: bytes, offset: int) -> Row | None:
        """Return the row, or None if it is damaged or one of many."""
        if line.startswith(_TRAIN):
            self.num_train += 1
            is_first = self.num_train <= NUM_FIRST_ROWS
            if self.num_train % self.stride and offset < self.tail_begin and not is_first:
                self._pass_over(line)
                return None
        row = _parse_line(line)
        if row is not None and self.passed_over and row["kind"] == "train":
            for name, objects in self.passed_over.items():
                row[name] = _total([*_parse_all(objects), row.get(name)])
            self.passed_over.clear()
        return row

    def _pass_over(self, line: bytes) -> None:
        for name in _SUMMED:
            key = f'"{name}": {{'.encode()
            begin = line.rfind(key)
            end = line.find(b"}", begin)
            if begin >= 0 and end >= 0:
                self.passed_over.setdefault(name, []).append(line[begin + len(key) - 1 : end + 1])


def _parse_all(objects: Sequence[bytes]) -> list[object]:
    """Parse many small objects at once, which is several times as fast; one by one if any is damaged."""
    try:
        found: list[object] = json.loads(b"[" + b",".join(objects) + b"]")
        return found
    except ValueError:
        return [_parse_line(each) for each in objects]


def _total(spent: Sequence[object]) -> dict[str, float]:
    total: dict[str, float] = {}
    for seconds in spent:
        if isinstance(seconds, dict):
            for name, value in seconds.items():
                if isinstance(value, float | int):
                    total[name] = total.get(name, 0.0) + value
    return total


def _parse_line(line: bytes) -> Row | None:
    try:
        row = parse_json(line.decode("utf-8", errors="replace"))
    except ValueError:
        return None
    return {**row, "kind": kind_of(row)} if isinstance(row, dict) else None
