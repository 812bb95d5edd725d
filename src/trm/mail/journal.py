"""The journal of `trm email sort`: the moves that it is about to make, so that they can be taken back.

The journal is a file of JSON Lines in the Maildir that only its owner can read. A line is written and synced
before what it describes is done. After a crash it may therefore name moves that did not happen, but never
lacks one that did. Its last line may be torn, and is then ignored.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from macbook_optimization.durable_files import exclusive_lock, replace_file, sync
from macbook_optimization.errors import DataError
from macbook_optimization.input_files import read_input
from macbook_optimization.json_types import JsonObject
from macbook_optimization.units import MIB
from trm.mail.maildir import INBOX, PARTS, Place

FILE_NAME = "trm-sort.jsonl"  # without a dot in front, it cannot be the name of a folder
LOCK_NAME = "trm-sort.lock"
_MAX_BYTES = 256 * MIB
_MAX_KEPT_MOVES = 100_000  # of earlier sorts; one move is about 200 bytes


class Move(NamedTuple):
    source: Place
    target: Place


@dataclass(slots=True)
class Sort:
    """The moves that one call of `trm email sort` made, or was about to make."""

    started: str
    folders: list[str] = field(default_factory=list)  # that it created
    moves: list[Move] = field(default_factory=list)

    def lines(self) -> Iterator[JsonObject]:
        yield {"sort": self.started}
        yield from ({"folder": folder} for folder in self.folders)
        yield from (_move_line(move) for move in self.moves)


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Keep every other sort of this Maildir out."""
    with exclusive_lock(root / LOCK_NAME) as holder:
        if isinstance(holder, str):
            raise DataError(
                f"{root} is being sorted by another process (PID {holder})", hint="Wait for it to end."
            )
        yield


def read_journal(root: Path) -> list[Sort]:
    """Return the sorts that can be taken back, oldest first."""
    path = root / FILE_NAME
    try:
        _check_owner(path)
        content = read_input(path, _MAX_BYTES)
    except FileNotFoundError:
        return []
    sorts: list[Sort] = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):  # the last one is empty or torn
        try:
            _add_line(sorts, json.loads(line))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise DataError(
                f"{path} is damaged in line {number}: {error}",
                hint="Move it away: sorting works without it, but earlier sorts cannot be taken back.",
            ) from error
    return sorts


def write_journal(root: Path, sorts: Sequence[Sort]) -> None:
    """Write a journal of these sorts in place of the present one; without any, remove it."""
    path = root / FILE_NAME
    if sorts:
        replace_file(path, b"".join(_encoded(line) for each in sorts for line in each.lines()))
        return
    path.unlink(missing_ok=True)
    sync(root)


@contextmanager
def appended_sort(root: Path) -> Iterator[JournalWriter]:
    """Open the journal for a new sort. The oldest sorts are dropped when they have very many moves."""
    earlier = read_journal(root)
    kept = list(earlier)
    while kept and sum(len(each.moves) for each in kept) > _MAX_KEPT_MOVES:
        del kept[0]
    if len(kept) < len(earlier):
        write_journal(root, kept)
    descriptor = _open(root / FILE_NAME)
    writer = JournalWriter(root, descriptor)
    try:
        yield writer
    finally:
        os.close(descriptor)
        if not writer.has_begun and not kept:
            write_journal(root, [])


@dataclass(slots=True)
class JournalWriter:
    root: Path
    descriptor: int
    has_begun: bool = False

    def record(self, folders: Sequence[str], moves: Sequence[Move]) -> None:
        """Write and sync what is about to be done."""
        lines: list[JsonObject] = []
        if not self.has_begun:
            lines.append({"sort": datetime.now(UTC).isoformat(timespec="seconds")})
        lines += [{"folder": folder} for folder in folders]
        lines += [_move_line(move) for move in moves]
        content = memoryview(b"".join(_encoded(line) for line in lines))
        while content:
            content = content[os.write(self.descriptor, content) :]
        os.fsync(self.descriptor)
        if not self.has_begun:
            sync(self.root)  # the name of a new journal
            self.has_begun = True


def _open(path: Path) -> int:
    """Open the journal to append to it, without a line that a crash tore."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        _check_owner(path)
        size = os.fstat(descriptor).st_size
        content = os.pread(descriptor, size, 0)
        os.ftruncate(descriptor, content.rfind(b"\n") + 1)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_owner(path: Path) -> None:
    """Refuse a journal that others could have written: it says which files to move."""
    facts = os.lstat(path)
    is_ours = stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077
    if not is_ours:
        raise DataError(
            f"{path} is not a file that only you can read and write",
            hint="Move it away: sorting works without it, but earlier sorts cannot be taken back.",
        )


def _move_line(move: Move) -> JsonObject:
    return {
        name: [each.folder, each.part, each.name] for name, each in zip(("from", "to"), move, strict=True)
    }


def _encoded(line: JsonObject) -> bytes:
    return json.dumps(line).encode() + b"\n"  # ASCII: names that are not UTF-8 are escaped


def _add_line(sorts: list[Sort], line: JsonObject) -> None:
    if "sort" in line:
        sorts.append(Sort(str(line["sort"])))
    elif "folder" in line:
        sorts[-1].folders.append(_folder(line["folder"]))
    else:
        sorts[-1].moves.append(Move(_place(line["from"]), _place(line["to"])))


def _place(values: Sequence[object]) -> Place:
    folder, part, name = values
    if part not in PARTS:
        raise ValueError(f"{part!r} is not a directory of messages")
    return Place(_folder(folder), str(part), _file_name(name))


def _folder(value: object) -> str:
    name = INBOX if value == INBOX else _file_name(value)
    if name and not name.startswith("."):
        raise ValueError(f"{name!r} is not a folder")
    return name


def _file_name(value: object) -> str:
    if not isinstance(value, str) or value in ("", ".", "..") or "/" in value or "\0" in value:
        raise ValueError(f"{value!r} is not the name of a file")
    return value
