"""Several sources of mail as one stream of messages, which can be continued where it was interrupted."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from macbook_optimization.json_types import JsonObject
from trm.tasks.base import Progress
from trm.tasks.documents.folders import find_files, open_regular
from trm.tasks.documents.mailboxes import (
    CONTINUABLE,
    STANDARD_INPUT,
    Format,
    Message,
    detect_format,
    num_source_bytes,
    read_messages,
)

_HASHED_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class Position:
    """The message after which a stream continues."""

    source: int = 0  # its number among the sources
    num_messages: int = 0  # of this source, up to here
    end_offset: int = 0

    def after(self, message: Message) -> Position:
        earlier = self.num_messages if message.source == self.source else 0
        return Position(message.source, earlier + 1, message.end_offset)


_BEGINNING = Position()


def messages_of(
    sources: Iterable[str | Path],
    format: Format = "auto",
    progress: Progress | None = None,
    start: Position = _BEGINNING,
) -> Iterator[Message]:
    """Yield the messages of several sources in order, and report how many bytes were read."""
    named = list(sources)
    sizes = [0 if progress is None else num_source_bytes(source) or 0 for source in named]
    total = max(1, sum(sizes))
    for number, source in enumerate(named[start.source :], start.source):
        done = sum(sizes[:number])
        for message in _read(source, format, start if number == start.source else _BEGINNING):
            if progress is not None:
                progress("reading mail", min(done + message.end_offset, total - 1), total)
            yield replace(message, source=number)
    if progress is not None:
        progress("reading mail", total, total)


def _read(source: str | Path, format: Format, start: Position) -> Iterator[Message]:
    if start.num_messages and str(source) != STANDARD_INPUT:
        found = detect_format(Path(source)) if format == "auto" else format
        if found in CONTINUABLE:
            return read_messages(source, found, start.end_offset)
    return read_messages(source, format, num_skipped=start.num_messages)


def describe_source(source: str | Path) -> JsonObject | None:
    """Return facts that differ if a source has changed; None for standard input, which is read only once."""
    if str(source) == STANDARD_INPUT:
        return None
    path = Path(source)
    if path.is_dir():
        return {"path": str(source), **_describe_directory(path)}
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        start = hashlib.sha256(file.read(_HASHED_BYTES)).hexdigest()
    facts = {"bytes": status.st_size, "modified_ns": status.st_mtime_ns, "sha256_of_start": start}
    return {"path": str(source), **facts}


def _describe_directory(path: Path) -> JsonObject:
    """Describe a directory by the names, sizes and times of its files. Flags of a Maildir do not count."""
    digest = hashlib.sha256()
    num_files = 0
    for found in find_files(path):
        num_files += 1
        num_bytes, modified_ns = found.size_and_time()
        facts = f"{found.key}\0{num_bytes}\0{modified_ns}\0"
        digest.update(facts.encode("utf-8", "surrogateescape"))
    return {"files": num_files, "sha256_of_names": digest.hexdigest()}
