"""Writing files that people name: regular files only, and nothing is replaced but an earlier output.

The same rules hold for every output option. A symbolic link is followed and stays a link. A file of another
kind is replaced only on request, and a device, a pipe or a directory never. The check is made before the work
that leads to the output, and again when it is written.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from macbook_optimization.durable_files import replace_file
from macbook_optimization.errors import DataError
from macbook_optimization.file_errors import dangling_link, hint_for, reason_of
from macbook_optimization.input_files import TooLargeError, kind_of, open_input, read_json
from macbook_optimization.units import MIB

_MAX_JSON_BYTES = 64 * MIB
_PAGE_HEAD_BYTES = 1024  # in which the generator of a page is named, before anything that varies
_OTHER_FILE = "Choose another file."


@dataclass(frozen=True, slots=True)
class FileKind:
    """The kind of an output, so that an earlier one is recognised by its content.

    Without `matches`, no file is replaced unless that is requested: people edit files of this kind.
    """

    name: str  # with an article, for messages
    matches: Callable[[Path], bool] | None


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file that will be written; `force` replaces a file of any kind."""

    path: Path
    kind: FileKind
    force: bool = False

    def check(self) -> Path:
        """Return the file behind symbolic links; raise `DataError` if it must not or cannot be written."""
        try:
            target = _target(self.path)
            if target.exists():
                self._refuse_to_replace(target)
            if not os.access(target.parent, os.W_OK | os.X_OK):
                raise _refusal(self.path, f"the directory {target.parent} is not writable")
        except OSError as error:
            raise self.failure(error) from error
        return target

    def write(self, content: bytes) -> None:
        """Replace the file, or leave everything as it is and raise `DataError`."""
        target = self.check()
        try:
            replace_file(target, content)
        except OSError as error:
            raise self.failure(error) from error

    def failure(self, error: OSError) -> DataError:
        return _refusal(self.path, reason_of(error), hint_for(error, _OTHER_FILE))

    def _refuse_to_replace(self, target: Path) -> None:
        if (kind := kind_of(os.stat(target).st_mode)) is not None:
            raise _refusal(self.path, f"it is {kind}")
        if self.force:
            return
        hint = f"{_OTHER_FILE[:-1]}, or add --force to replace this one."
        if not os.access(target, os.W_OK):
            raise _refusal(self.path, "the file is write-protected", hint)
        if self.kind.matches is None:
            raise _refusal(self.path, "it already exists", hint)
        if os.path.getsize(target) > 0 and not self.kind.matches(target):
            raise _refusal(self.path, f"there is a file that is not {self.kind.name}", hint)


def _target(path: Path) -> Path:
    """Return the path that a new file is renamed to: the end of the links, whose directory exists."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        if (problem := dangling_link(path)) is not None:
            raise _refusal(path, f"it is {problem}") from None
        return _directory(path) / path.name
    if (kind := kind_of(status.st_mode)) is not None:
        raise _refusal(path, f"it is {kind}")
    if any(os.path.samestat(status, standard) for standard in _standard_streams()):
        raise _refusal(path, "the messages of this command go there")
    return Path(os.path.realpath(path, strict=True))


def _directory(path: Path) -> Path:
    try:
        return Path(os.path.realpath(path.parent, strict=True))
    except FileNotFoundError:
        raise _refusal(path, f"there is no directory {path.parent}") from None


def _standard_streams() -> list[os.stat_result]:
    """Return the status of the open ones: /dev/stdout may lead to the regular file that has our output."""
    found = []
    for descriptor in (1, 2):
        with suppress(OSError):
            found.append(os.fstat(descriptor))
    return found


def _refusal(path: Path, reason: str, hint: str | None = _OTHER_FILE) -> DataError:
    return DataError(f"{path} cannot be written: {reason}", hint=hint)


def check_new_directory(path: Path) -> None:
    """Raise `DataError` if a directory cannot be created at `path`, before work is spent on its content."""
    hint = "Choose another path, or remove this one first."
    if (problem := dangling_link(path)) is not None:
        raise DataError(f"{path} is {problem}", hint=hint)
    if os.path.exists(path):
        raise DataError(f"{path} already exists", hint=hint)
    try:
        absolute = Path(os.path.realpath(path))
        ancestor = next(parent for parent in absolute.parents if os.path.lexists(parent))
        if not ancestor.is_dir():
            raise NotADirectoryError(f"{ancestor} is not a directory")
    except OSError as error:
        raise DataError(f"{path} cannot be created: {reason_of(error)}", hint_for(error, hint)) from error
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise DataError(f"{path} cannot be created: {ancestor} is not writable", hint="Choose another path.")


def _starts_with(magic: bytes) -> Callable[[Path], bool]:
    def matches(path: Path) -> bool:
        with open_input(path) as file:
            return file.read(len(magic)) == magic

    return matches


def page_of(generator: str, earlier_head: str) -> Callable[[Path], bool]:
    """Recognise our pages by the generator that they name; earlier ones named none, but all began alike.

    The doctype alone would also match a page that somebody wrote.
    """
    tag = f'<meta name="generator" content="{generator}">'.encode()

    def matches(path: Path) -> bool:
        with open_input(path) as file:
            head = file.read(_PAGE_HEAD_BYTES)
        return head.startswith(earlier_head.encode()) or (head.startswith(b"<!doctype html>") and tag in head)

    return matches


def json_like(is_ours: Callable[[Any], bool]) -> Callable[[Path], bool]:
    def matches(path: Path) -> bool:
        try:
            return is_ours(read_json(path, _MAX_JSON_BYTES))
        except (TooLargeError, ValueError):
            return False

    return matches


def _is_state_dict(path: Path) -> bool:
    try:
        with open_input(path) as file, zipfile.ZipFile(file) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, ValueError):
        return False


PNG = FileKind("a PNG image", _starts_with(b"\x89PNG\r\n\x1a\n"))
GIF = FileKind("a GIF image", _starts_with(b"GIF8"))
STATE_DICT = FileKind("a state dict of PyTorch", _is_state_dict)
