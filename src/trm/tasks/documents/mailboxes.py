"""Sources of mail: mbox, Maildir, directories of messages, tables, single files, standard input.

All sources are streams of messages in a fixed order. What cannot be read is a message too, with the reason,
so that the counts of a report add up.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, get_args

from macbook_optimization.errors import DataError
from trm.tasks.documents.charsets import decode_bytes
from trm.tasks.documents.folders import (
    Found,
    find_files,
    is_mailbox_name,
    is_maildir,
    maildir_files,
    open_regular,
)
from trm.tasks.documents.mail import TOO_LARGE
from trm.tasks.documents.mbox import split_mbox
from trm.tasks.documents.mime import MAX_MESSAGE_BYTES
from trm.tasks.documents.tables import find_columns, guess_delimiter, read_csv, read_json, read_jsonl

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Format = Literal["auto", "eml", "mbox", "maildir", "directory", "csv", "json", "jsonl"]
FORMATS: tuple[Format, ...] = get_args(Format)
CONTINUABLE: tuple[Format, ...] = ("mbox", "jsonl")  # at the offset of a message
STANDARD_INPUT = "-"
_SNIFFED_BYTES = 64 * 2**10
_SUFFIXES: dict[str, Format] = {
    ".eml": "eml", ".emlx": "eml", ".mbox": "mbox", ".mbx": "mbox", ".csv": "csv", ".tsv": "csv",
    ".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl",
}  # fmt: skip
_COMPRESSED = {b"\x1f\x8b": "gzip -dk", b"\xfd7zXZ": "xz -dk", b"BZh": "bzip2 -dk", b"PK\x03\x04": "unzip"}


@dataclass(frozen=True, slots=True)
class Message:
    """One message before it is parsed."""

    key: str  # its path, or "path#number" in a file with several: unique and stable
    raw: bytes
    labels: tuple[str, ...] = ()  # of the source: a folder or a column
    path: str = ""  # the file it is in
    end_offset: int = 0  # bytes of the source up to its end; where an mbox or JSON Lines file continues
    problem: str = ""  # why it could not be read
    source: int = 0  # the number of its source, where there are several


def read_messages(
    source: str | Path, format: Format = "auto", start_offset: int = 0, num_skipped: int = 0
) -> Iterator[Message]:
    """Yield the messages of a file, a directory, or "-" for standard input.

    `start_offset` continues an mbox or JSON Lines file after a message, with its `end_offset`. For all other
    sources there is `num_skipped`, the messages to leave out; those of a directory are not even opened.
    """
    if str(source) == STANDARD_INPUT:
        return islice(read_stream(sys.stdin.buffer, STANDARD_INPUT, format), num_skipped, None)
    path = Path(source)
    if _is_address(path):
        return _read_address(path, format)
    found = detect_format(path) if format == "auto" else format
    if start_offset and found not in CONTINUABLE:
        raise DataError(f"{path} is read as {found}, which cannot be continued at byte {start_offset}.")
    if found in ("maildir", "directory"):
        return _read_directory(path, found, num_skipped)
    return islice(_read_file(path, found, start_offset), num_skipped, None)


def _is_address(path: Path) -> bool:
    """Return whether this is the key of a message in a file with several, as `Message.key` has it."""
    name, mark, place = path.name.rpartition("#")
    return bool(name and mark) and place.isdecimal() and not path.exists() and path.with_name(name).is_file()


def _read_address(address: Path, format: Format) -> Iterator[Message]:
    name, _, place = address.name.rpartition("#")
    path = address.with_name(name)
    found = detect_format(path) if format == "auto" else format
    messages = _read_file(path, found, int(place) if found == "mbox" else 0)
    message = next((each for each in messages if each.key == str(address)), None)
    if message is None:
        raise DataError(f"{path} has no message {place}.", hint="`trm email classify` shows their numbers.")
    yield message


def read_maildir_folder(directory: Path, root: Path) -> Iterator[Message]:
    """Yield the messages of one folder of the Maildir `root`, without those of its subfolders."""
    for found in maildir_files(directory, (), root.resolve()):
        yield from _messages_of_file(found)


def read_stream(stream: BinaryIO, name: str, format: Format = "auto") -> Iterator[Message]:
    """Yield the messages of a stream that cannot be positioned."""
    start = stream.read(_SNIFFED_BYTES)
    found = detect_content(start, name) if format == "auto" else format
    if found in ("maildir", "directory"):
        raise DataError(f"{name} is not a directory.")
    return _read_open(io.BufferedReader(_Rejoined(start, stream)), name, found)


def detect_format(path: Path) -> Format:
    """Return what a path is: a directory by its layout, a file by its name and first bytes."""
    if path.is_dir():
        return "maildir" if is_maildir(path) else "directory"
    with open_regular(path) as file:
        return detect_content(file.read(_SNIFFED_BYTES), path.name)


def detect_content(start: bytes, name: str) -> Format:
    for magic, command in _COMPRESSED.items():
        if start.startswith(magic):
            raise DataError(f"{name} is compressed.", hint=f"Unpack it first, for example with {command}.")
    suffix = Path(name).suffix.lower()
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    first_line = text.partition(b"\n")[0]
    if text.startswith(b"From "):
        return "mbox"
    if text.startswith(b"["):
        return "json"
    if text.startswith(b"{"):
        return "jsonl" if _is_json(first_line) else "json"
    return "csv" if _is_csv_header(first_line) else "eml"


def num_source_bytes(source: str | Path) -> int | None:
    """Return how many bytes a source has, for a progress bar; None for standard input."""
    if str(source) == STANDARD_INPUT:
        return None
    path = Path(source)
    if not path.is_dir():
        return path.stat().st_size if path.exists() else 0
    return sum(found.size_and_time()[0] for found in find_files(path))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _is_csv_header(line: bytes) -> bool:
    text = decode_bytes(line[:1000], "").rstrip("\r")
    delimiter = guess_delimiter(text)
    names = [name.strip('" ') for name in text.split(delimiter)]
    return len(names) > 1 and len(find_columns(names)) > 1


def _read_file(path: Path, format: Format, start_offset: int) -> Iterator[Message]:
    with open_regular(path) as file:
        file.seek(start_offset)
        yield from _read_open(file, str(path), format, start_offset)


def _read_open(stream: BinaryIO, path: str, format: Format, offset: int = 0) -> Iterator[Message]:
    if format == "eml":
        yield _single(stream, path, path, ())
    elif format == "mbox":
        yield from _mbox_messages(stream, path, (), offset)
    else:
        yield from _table_messages(stream, path, format, offset)


def _table_messages(stream: BinaryIO, path: str, format: Format, offset: int) -> Iterator[Message]:
    if format == "csv":
        rows = read_csv(stream, path)
    elif format == "json":
        rows = read_json(stream, path)
    else:
        rows = read_jsonl(stream, path, offset)
    for row in rows:
        key = f"{path}#{row.number}"
        yield Message(key, row.raw, row.labels, path, row.end_offset, row.problem)


def _mbox_messages(
    stream: BinaryIO, path: str, labels: tuple[str, ...], offset: int = 0
) -> Iterator[Message]:
    for found in split_mbox(stream, offset):
        problem = "" if found.raw is not None else TOO_LARGE
        key = f"{path}#{found.offset}"
        yield Message(key, found.raw or b"", labels, path, found.end_offset, problem)


def _single(stream: BinaryIO, key: str, path: str, labels: tuple[str, ...]) -> Message:
    raw = stream.read(MAX_MESSAGE_BYTES + 1)
    size = len(raw)
    if path.endswith(".emlx"):  # of Apple Mail: its length, the message, a property list
        length, _, rest = raw[:MAX_MESSAGE_BYTES].partition(b"\n")
        raw = rest[: int(length)] if length.strip().isdigit() else raw
    if size > MAX_MESSAGE_BYTES:
        return Message(key, b"", labels, path, size, TOO_LARGE)
    return Message(key, raw, labels, path, size)


def _read_directory(root: Path, format: Format, num_skipped: int) -> Iterator[Message]:
    num_files = num_bytes = num_in_maildirs = 0
    for found in find_files(root):
        num_files += 1
        num_in_maildirs += found.in_maildir
        if num_skipped and not _may_be_mailbox(found):
            num_skipped -= 1
        else:
            for message in _messages_of_file(found):
                if num_skipped:
                    num_skipped -= 1
                else:
                    yield replace(message, end_offset=num_bytes + message.end_offset)
        num_bytes += found.size_and_time()[0]
    if num_files == 0 or (format == "maildir" and num_in_maildirs == 0):
        raise DataError(
            f"{root} has no mail that is read as {format}.",
            hint="Give an mbox, a Maildir with the directories cur and new, or a directory of .eml files.",
        )


def _may_be_mailbox(found: Found) -> bool:
    """Return whether a file may have several messages; any other has exactly one."""
    return not found.in_maildir and is_mailbox_name(found.path)


def _messages_of_file(found: Found) -> Iterator[Message]:
    path, labels = str(found.path), _labels(found.folder)
    try:
        if found.problem:
            raise DataError(found.problem)
        stream = open_regular(found.path)
    except DataError as error:
        yield Message(found.key, b"", labels, path, problem=str(error))
        return
    with closing(stream):
        is_mailbox = _may_be_mailbox(found) and stream.read(5) == b"From "
        stream.seek(0)
        if not is_mailbox:
            yield _single(stream, found.key, path, labels)
            return
        name = "" if found.path.name == "mbox" else found.path.stem  # Apple Mail: Work.mbox/mbox
        messages = _mbox_messages(stream, path, _labels((*found.folder, name) if name else found.folder))
        first = next(messages)
        second = next(messages, None)
        if second is None and not found.path.suffix:  # one message in a file without a suffix: not a folder
            yield replace(first, key=found.key, labels=labels)
            return
        yield first
        if second is not None:
            yield second
        yield from messages


def _labels(folder: tuple[str, ...]) -> tuple[str, ...]:
    return ("/".join(folder),) if folder else ()


class _Rejoined(io.RawIOBase):
    """A stream whose first bytes were read already."""

    def __init__(self, start: bytes, rest: BinaryIO) -> None:
        self._start = start
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        chunk = self._start[: len(view)] or self._rest.read(len(view))
        self._start = self._start[len(chunk) :]
        view[: len(chunk)] = chunk
        return len(chunk)
