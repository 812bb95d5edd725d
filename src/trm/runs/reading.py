"""Reading the JSON lines of a run: all of them, the last one, or those that are new."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from macbook_optimization.input_files import open_input
from macbook_optimization.json_types import parse_json
from trm.runs.rows import Row, kind_of

_TAIL_BYTES = 1 << 16
_MAX_TAIL_BYTES = 1 << 25  # no row is this long: the file is damaged
_CHUNK_BYTES = 1 << 23  # that a follower reads at a time; no row is this long either


def read_rows(path: Path) -> list[Row]:
    try:
        with open_input(path) as file:
            content = file.read()
    except FileNotFoundError:
        return []
    return _parse(content)


def read_last_row(path: Path, accept: Callable[[Row], bool] = lambda row: True) -> Row | None:
    """Return the last complete row that `accept` returns true for.

    Only the end of the file is read, and more of it only if no such row is there.
    """
    tail_bytes = _TAIL_BYTES
    try:
        with open_input(path) as file:
            size = file.seek(0, os.SEEK_END)
            while True:
                file.seek(max(0, size - tail_bytes))
                rows = [row for row in _parse(file.read()) if accept(row)]
                if rows or tail_bytes >= min(size, _MAX_TAIL_BYTES):
                    return rows[-1] if rows else None
                tail_bytes *= 8
    except FileNotFoundError:
        return None


@dataclass
class Follower:
    """Reads what was appended since the last call, at most 8 MiB of each file at a time, so that a long run
    needs several calls, until one returns nothing. It never blocks and never writes.

    A file that does not exist yet is empty; one that became shorter or was replaced is read from its start,
    so a follower survives restarts of the run.
    """

    paths: tuple[Path, ...]
    _offsets: dict[Path, tuple[int, int]] = field(default_factory=dict)  # inode, bytes read

    def read(self) -> list[Row]:
        """Return new rows in the order of the files, each with a `kind`: train, eval, event or resources."""
        return [{"kind": kind_of(row), **row} for path in self.paths for row in self._new_rows(path)]

    def _new_rows(self, path: Path) -> list[Row]:
        try:
            with open_input(path) as file:
                status = os.fstat(file.fileno())
                inode, offset = self._offsets.get(path, (status.st_ino, 0))
                if inode != status.st_ino or offset > status.st_size:
                    offset = 0
                file.seek(offset)
                content = file.read(_CHUNK_BYTES)
        except FileNotFoundError:
            return []
        complete = content[: content.rfind(b"\n") + 1]  # the last line may still be being written
        if not complete and len(content) == _CHUNK_BYTES:  # damaged
            complete = content
        self._offsets[path] = (status.st_ino, offset + len(complete))
        return _parse(complete)


def _parse(content: bytes) -> list[Row]:
    lines = content.decode("utf-8", errors="replace").splitlines()
    return [row for line in lines if (row := _parse_line(line)) is not None]


def _parse_line(line: str) -> Row | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
