"""A sorted copy of any mail: a new Maildir with a folder per category, complete or absent.

Messages keep their bytes. Those of a Maildir keep their names and flags as well; others look as if they had
just been delivered.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from macbook_optimization.durable_files import new_directory, sync, write_synced
from trm.mail.maildir import INBOX, PARTS, folder_of, make_folder
from trm.mail.model import Decision
from trm.mail.reading import Read
from trm.tasks.documents.folders import open_regular, unique_part
from trm.tasks.documents.mail import TOO_LARGE
from trm.tasks.documents.mailboxes import STANDARD_INPUT, Message

_CHUNK_BYTES = 2**20
_LAST_SECOND = 2**32  # of the dates that file systems take


@dataclass(slots=True)
class Copied:
    by_category: dict[str, int] = field(default_factory=dict)
    unsure: int = 0  # in the inbox
    skipped: int = 0  # in the inbox: they could not be classified
    left_out: dict[str, str] = field(default_factory=dict)  # key and reason: they could not be read


def copy_sorted(
    decided: Iterable[tuple[Read, Decision | None]], directory: Path, dry_run: bool = False
) -> Copied:
    """Write the messages to a new Maildir; with `dry_run`, only count them."""
    copied = Copied()
    with nullcontext(None) if dry_run else new_directory(directory) as partial:
        writer = None if partial is None else _Writer(partial)
        for number, (read, decision) in enumerate(decided):
            folder = _count(read, decision, copied)
            if folder is not None and writer is not None:
                writer.write(read, folder, number)
        if writer is not None:
            writer.sync()
    return copied


def _count(read: Read, decision: Decision | None, copied: Copied) -> str | None:
    """Count a message; return its folder, or None if it cannot be copied."""
    message = read.message
    if message.problem and not _is_whole_file(message):
        copied.left_out[message.key] = message.problem
        return None
    if decision is None:
        copied.skipped += 1
    elif decision.unsure:
        copied.unsure += 1
    else:
        copied.by_category[decision.category] = copied.by_category.get(decision.category, 0) + 1
        return folder_of(decision.category)
    return INBOX


def _is_whole_file(message: Message) -> bool:
    """Return whether a message that is too large to be parsed is a file of its own."""
    return message.problem == TOO_LARGE and _has_own_file(message) and not message.path.endswith(".emlx")


def _has_own_file(message: Message) -> bool:
    """Return whether the file of a message has no other: the key of an mbox or a table has a number."""
    is_file = message.path not in ("", STANDARD_INPUT)
    return is_file and not message.key.startswith(f"{message.path}#")


class _Writer:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: set[str] = set()
        self._uniques: set[tuple[str, str]] = set()
        os.chmod(root, 0o700)
        self._make(INBOX)

    def write(self, read: Read, folder: str, number: int) -> None:
        self._make(folder)
        message = read.message
        part, name = _name(message, number)
        if (folder, unique_part(name)) in self._uniques:  # of two folders of the source
            name = f"{number}.{name}"
        self._uniques.add((folder, unique_part(name)))
        path = self._root / folder / part / name
        write_synced(path, _content(message), 0o600)
        if (seconds := _seconds(read)) is not None:
            os.utime(path, (seconds, seconds))

    def sync(self) -> None:
        for folder in self._folders:
            for part in PARTS:
                sync(self._root / folder / part)

    def _make(self, folder: str) -> None:
        if folder not in self._folders:
            make_folder(self._root, folder)
            self._folders.add(folder)


def _name(message: Message, number: int) -> tuple[str, str]:
    path = Path(message.path)
    if path.parent.name in PARTS:
        return path.parent.name, path.name
    digest = hashlib.sha256(message.raw).hexdigest()[:16]
    return "new", f"{number}.{digest}.sorted"


def _content(message: Message) -> Iterator[bytes]:
    if not message.problem:
        yield message.raw
        return
    with open_regular(Path(message.path)) as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _seconds(read: Read) -> float | None:
    """Return the time that IMAP servers show as that of the arrival: of the file, or in the message."""
    if _has_own_file(read.message):
        with suppress(OSError):  # it has been moved in the meantime
            return os.stat(read.message.path).st_mtime
    date = read.features.mail.date
    return date if date is not None and 0 <= date < _LAST_SECOND else None
