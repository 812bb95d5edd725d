"""Folders and messages of a Maildir, as Maildir++ lays them out.

The folder `Work` is the directory `.Work` beside `cur`, `new` and `tmp` of the inbox, and `Work/Projects` is
`.Work.Projects`. A message is a file whose name has a unique part and, behind `:2,`, flags that mail readers
change.
"""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from macbook_optimization.durable_files import sync
from macbook_optimization.errors import DataError
from trm.tasks.documents.folders import encode_folder_name, is_maildir, unique_part

INBOX = ""  # the directory of the inbox, below the Maildir
PARTS = ("cur", "new")  # where the messages of a folder are
_ALL_PARTS = (*PARTS, "tmp")
_FOLDER_MARK = "maildirfolder"  # an empty file by which delivery programs recognise a folder
_MAX_NAME_BYTES = 200  # of a directory; file systems allow 255, IMAP servers add to it
_BETWEEN_FOLDERS = re.compile(r"(?<=[^/])/(?=[^/])")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a message in a Maildir."""

    folder: str  # name of a directory, as `folder_of` returns it
    part: str  # cur or new
    name: str

    @property
    def unique(self) -> str:
        return unique_part(self.name)

    def below(self, root: Path) -> Path:
        return root / self.folder / self.part / self.name

    def __str__(self) -> str:
        return "/".join(part for part in (self.folder, self.part, self.name) if part)


def folder_of(category: str) -> str:
    """Return the directory of a category: one name without a slash that begins with a dot, or the inbox.

    Slashes between other letters separate folders; everything that could leave the Maildir is encoded. A
    name that is too long for a file system is cut and marked with a hash.
    """
    if not category:
        raise DataError("A category without a name has no folder", hint="Train with a mapping that names it.")
    if category.casefold() == "inbox":
        return INBOX
    directory = "".join(f".{encode_folder_name(part)}" for part in _BETWEEN_FOLDERS.split(category))
    if len(directory) <= _MAX_NAME_BYTES:
        return directory
    digest = hashlib.sha256(category.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    kept = category[:_MAX_NAME_BYTES]
    while len(directory) > _MAX_NAME_BYTES:
        kept = kept[:-1]
        directory = f".{encode_folder_name(f'{kept} {digest}')}"
    return directory


def open_maildir(path: Path) -> Path:
    """Return the path of a Maildir without symbolic links; raise `DataError` if it is not one."""
    if not is_maildir(path):
        raise DataError(
            f"{path} is not a Maildir: it has no directories cur and new",
            hint="Write a sorted copy of other mail with --out DIR.",
        )
    return path.resolve()


def check_folder(root: Path, folder: str) -> None:
    """Raise `DataError` if a Maildir has no such folder."""
    if not is_maildir(root / folder):
        names = sorted(entry.name for entry in root.glob(".*") if is_maildir(entry))
        raise DataError(
            f"{root} has no folder {folder}", hint=f"Its folders are {', '.join(names) or 'only the inbox'}."
        )


def make_folder(root: Path, folder: str) -> None:
    """Create a folder, or what is missing of it, for its owner only."""
    directory = root / folder
    _make_directory(directory)
    for part in _ALL_PARTS:
        _make_directory(directory / part)
    if folder != INBOX:
        with suppress(FileExistsError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            os.close(os.open(directory / _FOLDER_MARK, flags, 0o600))
    sync(directory)


def _make_directory(path: Path) -> None:
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
        sync(path.parent)
    if path.is_symlink() or not path.is_dir():
        raise DataError(f"{path} is not a directory", hint="Move it out of the way.")


def remove_empty_folder(root: Path, folder: str) -> bool:
    """Remove a folder if it has no messages and no files of other programs; return whether it is gone."""
    directory = root / folder
    expected = {*_ALL_PARTS, _FOLDER_MARK}
    try:
        names = set(os.listdir(directory))
        if not names <= expected or any(os.listdir(directory / part) for part in names & {*_ALL_PARTS}):
            return False
        for part in names & {*_ALL_PARTS}:
            os.rmdir(directory / part)
        with suppress(FileNotFoundError):
            os.unlink(directory / _FOLDER_MARK)
        os.rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError:  # a message arrived just now, or the directory is not ours to remove
        return False
    sync(root)
    return True


@dataclass(slots=True)
class Listing:
    """Finds messages by their unique part. Each folder is listed once, when it is needed."""

    root: Path
    _folders: dict[str, dict[str, Place]] = field(default_factory=dict)

    def find(self, place: Place) -> Place | None:
        """Return where a message is now: in its place, or elsewhere in the folder with other flags."""
        if os.path.lexists(place.below(self.root)):
            return place
        found = self._messages(place.folder).get(place.unique)
        return found if found is not None and os.path.lexists(found.below(self.root)) else None

    def has(self, folder: str, unique: str) -> bool:
        return unique in self._messages(folder)

    def add(self, place: Place) -> None:
        self._messages(place.folder)[place.unique] = place

    def refresh(self, folder: str) -> None:
        """List a folder again when it is needed: another program has changed it."""
        self._folders.pop(folder, None)

    def _messages(self, folder: str) -> dict[str, Place]:
        if folder not in self._folders:
            found = [
                Place(folder, part, name)
                for part in PARTS
                for name in _names(self.root / folder / part)
                if not name.startswith(".")
            ]
            self._folders[folder] = {place.unique: place for place in found}
        return self._folders[folder]


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
