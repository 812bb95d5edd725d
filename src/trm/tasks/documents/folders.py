"""The files of a directory of mail, in a fixed order, with the folder that each of them is in.

Only regular files are opened. A symbolic link is followed only to a file inside the directory; pipes, devices
and everything else that cannot be read is returned with the reason.
"""

from __future__ import annotations

import binascii
import os
import re
import stat
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from macbook_optimization.errors import DataError

# Files beside mail that are not mail. Tables are read when they are named.
_OTHER_SUFFIXES = frozenset((
    ".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".yaml", ".yml", ".md", ".msf", ".dat", ".gz", ".xz",
    ".bz2", ".zip", ".tar", ".pdf", ".html",
))  # fmt: skip
_MAIL_SUFFIXES = frozenset((".eml", ".emlx", ".mbox", ".mbx"))
_FLAGS = re.compile(r"[:;!]2,[A-Za-z]*$")  # of a message in a Maildir; they change when it is read
_ENCODED_NAME = re.compile(r"&([A-Za-z0-9+,]*)-")
_SEPARATORS = frozenset("./~:")  # letters that Courier encodes as well: they mean something in paths


@dataclass(frozen=True, slots=True)
class Found:
    """One file."""

    path: Path
    key: str  # like the path, but stable when a Maildir's flags change
    folder: tuple[str, ...]
    in_maildir: bool
    problem: str = ""  # why it cannot be read

    def size_and_time(self) -> tuple[int, int]:
        """Return bytes and nanoseconds; zeros if it cannot be read, or is gone: mail programs move files."""
        try:
            status = None if self.problem else self.path.stat()
        except OSError:
            status = None
        return (0, 0) if status is None else (status.st_size, status.st_mtime_ns)


def is_maildir(directory: Path) -> bool:
    return (directory / "cur").is_dir() or (directory / "new").is_dir()


def unique_part(name: str) -> str:
    """Return a message's file name in a Maildir without its flags, which change when it is read."""
    return _FLAGS.sub("", name)


def find_files(root: Path) -> Iterator[Found]:
    """Yield the files below a directory. If some are named as mail (.eml, .mbox), the others are left out."""
    only_mail = any(found.path.suffix.lower() in _MAIL_SUFFIXES for found in _walk(root))
    for found in _walk(root):
        suffix = found.path.suffix.lower()
        is_mail = found.in_maildir or suffix in _MAIL_SUFFIXES or is_mailbox_name(found.path)
        if is_mail or not (only_mail or suffix in _OTHER_SUFFIXES):
            yield found


def is_mailbox_name(path: Path) -> bool:
    """Return whether a file in a directory may be an mbox: Thunderbird and others use no suffix."""
    return path.suffix.lower() in ("", ".mbox", ".mbx")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Anything else is refused without waiting for it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{path} is not a regular file.", hint="Use - for standard input.")
    return open(descriptor, "rb")


def _walk(root: Path) -> Iterator[Found]:
    """Yield all files in the order of their names, without recursion.

    Only names are kept of a directory: it may have a million files.
    """
    inside = root.resolve()
    pending: list[tuple[Path, tuple[str, ...]]] = [(root, ())]
    while pending:
        directory, folder = pending.pop()
        try:
            directories, files = _names(directory)
        except OSError as error:
            yield Found(directory, f"{directory}/", folder, False, f"cannot be read: {error.strerror}")
            continue
        if "cur" in directories or "new" in directories:
            yield from maildir_files(directory, folder or ("Inbox",), inside)
            below = [name for name in directories if name not in ("cur", "new", "tmp")]
        else:
            for name in files:
                if not name.startswith("."):
                    path = directory / name
                    yield Found(path, str(path), folder, False, _problem(path, inside))
            below = [name for name in directories if not name.startswith(".")]
        pending.extend((directory / name, (*folder, *_folder_names(name))) for name in reversed(below))


def _names(directory: Path) -> tuple[list[str], list[str]]:
    """Return the names of the directories and of all other files in a directory, both sorted."""
    directories: list[str] = []
    files: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            (directories if entry.is_dir(follow_symlinks=False) else files).append(entry.name)
    return sorted(directories), sorted(files)


def maildir_files(directory: Path, folder: tuple[str, ...], inside: Path) -> Iterator[Found]:
    """Yield the messages of one folder, without those of its subfolders. Links may not leave `inside`."""
    names: list[str] = []
    for part in ("cur", "new"):
        if (directory / part).is_dir():
            names += [f"{part}/{name}" for name in _names(directory / part)[1] if not name.startswith(".")]
    names.sort(key=_without_flags)
    for name in names:
        path = directory / name
        if not path.is_dir():  # a link to one
            yield Found(path, str(directory / _without_flags(name)), folder, True, _problem(path, inside))


def _without_flags(name: str) -> str:
    """Return the name of a message in a Maildir that stays when it is read, answered or moved to `cur`."""
    return unique_part(name.partition("/")[2])


def _problem(path: Path, inside: Path) -> str:
    try:
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            return "a symbolic link that leaves the directory"
        mode = path.stat().st_mode
    except (OSError, RuntimeError):  # a link to nothing, or to itself
        return "cannot be read"
    return "" if stat.S_ISREG(mode) else "not a regular file"


def _folder_names(name: str) -> list[str]:
    """Return the folders in a directory's name: `.Work.Projects` of a Maildir, `Work.sbd` of Thunderbird."""
    if name.startswith("."):
        return [decode_folder_name(part) for part in name.split(".") if part]
    return [decode_folder_name(name.removesuffix(".sbd").removesuffix(".mbox"))]


def decode_folder_name(name: str) -> str:
    """Decode the modified UTF-7 of IMAP, `&ATA-` for a dotted capital i, and compose letters with accents."""
    decoded = _ENCODED_NAME.sub(_decode_letters, name) if "&" in name else name
    return unicodedata.normalize("NFC", decoded)


def encode_folder_name(name: str) -> str:
    """Encode the name of one folder, so that it has no letter that separates folders or directories.

    Where IMAP allows it, the result is what IMAP prescribes; `decode_folder_name` is the inverse.
    """
    return "".join(
        _encode_letters(kind, "".join(letters)) for kind, letters in groupby(name, _kind_of_letter)
    )


def _kind_of_letter(letter: str) -> str:
    if letter == "&":
        return "shift"
    return "plain" if " " <= letter <= "\x7e" and letter not in _SEPARATORS else "encoded"


def _encode_letters(kind: str, letters: str) -> str:
    if kind == "plain":
        return letters
    if kind == "shift":
        return "&-" * len(letters)
    digits = binascii.b2a_base64(letters.encode("utf-16-be", "surrogatepass"), newline=False).decode()
    return f"&{digits.rstrip('=').replace('/', ',')}-"


def _decode_letters(match: re.Match[str]) -> str:
    if not match[1]:
        return "&"
    digits = match[1].replace(",", "/")
    try:
        return binascii.a2b_base64(digits + "=" * (-len(digits) % 4)).decode("utf-16-be")
    except (binascii.Error, UnicodeDecodeError):
        return match[0]
