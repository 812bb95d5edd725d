"""Files that are complete or absent, whatever happens while they are written.

A file is written under a temporary name, synced and renamed, and then its directory is synced. Every
operation is a plain `os` call, in sequence: the fault tests make each of them fail, write partially, kill
the process, or be lost in a simulated power failure.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import re
import shutil
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypedDict

import psutil

from macbook_optimization.units import MIB

Buffer = bytes | memoryview
_WRITE_BYTES = 8 * MIB
_WRITER = re.compile(r"([0-9]{1,9})-[0-9]+")  # PID and thread, in the name of a temporary file


class FileDigest(TypedDict):
    """Size and hash of a file, as they appear in a manifest."""

    bytes: int
    sha256: str


def write_synced(path: Path, parts: Iterable[Buffer], permissions: int | None = None) -> FileDigest:
    """Write a new file from these buffers and return its size and sha256.

    Both describe the bytes passed in, not the bytes on disk: a later comparison detects a failing disk.
    `permissions` are those of the file [default: what the umask leaves]. An existing path is an error.
    """
    digest = hashlib.sha256()
    size = 0
    initial = 0o666 if permissions is None else permissions & 0o600  # never readable by more people
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, initial)
    try:
        if permissions is not None and stat.S_IMODE(os.fstat(descriptor).st_mode) != permissions:
            os.fchmod(descriptor, permissions)
        for part in parts:
            content = memoryview(part).cast("B")
            for start in range(0, len(content), _WRITE_BYTES):
                chunk = content[start : start + _WRITE_BYTES]
                digest.update(chunk)
                size += len(chunk)
                while chunk:  # os.write may write less than requested
                    num_written = os.write(descriptor, chunk)
                    chunk = chunk[num_written:]
        _flush(descriptor)
    finally:
        os.close(descriptor)
    return {"bytes": size, "sha256": digest.hexdigest()}


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers see the old content or the new, never a mixture.

    The permissions of an existing file are kept.
    """
    partial = partial_path(path)
    try:
        write_synced(partial, [content], _permissions(path))
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            os.unlink(partial)
        raise
    sync(path.parent)


def _permissions(path: Path) -> int | None:
    """Return who may read, write and execute a file; None if there is none."""
    try:
        return os.stat(path).st_mode & 0o777
    except FileNotFoundError:
        return None


def partial_path(path: Path) -> Path:
    """Return a temporary path next to `path`, unique to this thread, to be renamed to `path` when complete.

    Leftovers of processes that were killed are removed. Those of running processes stay: they may be writing
    the same thing.
    """
    own = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        pid = _WRITER.fullmatch(leftover.name.split(".")[-2])
        if leftover == own or (pid is not None and not psutil.pid_exists(int(pid[1]))):
            _remove(leftover)
    return own


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        os.unlink(path)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes `path` at the end. After an exception, nothing is left."""
    partial = partial_path(path)
    missing = [directory for directory in path.parents if not directory.is_dir()]
    try:
        make_directory(partial)
        yield partial
        os.rename(partial, path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in missing:
            with suppress(OSError):  # something else is in it by now, or it was never created
                os.rmdir(parent)
        raise


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Create a directory and its parents, and sync each so that all of them survive a power failure.

    `mode` is that of the directory itself, less the umask.
    """
    missing = [directory for directory in (path, *path.parents) if not directory.is_dir()]
    for directory in reversed(missing):
        try:
            os.mkdir(directory, mode if directory == path else 0o777)
        except FileExistsError:
            if not directory.is_dir():  # a directory means that another process created it first
                raise
        sync(directory.parent)


def sync(path: Path) -> None:
    """Write a file or a directory entry through to the storage device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _flush(descriptor)
    finally:
        os.close(descriptor)


def _flush(descriptor: int) -> None:
    """Flush to the medium: on macOS, `fsync` alone leaves the data in the drive's cache (man 2 fsync)."""
    if sys.platform == "darwin":
        with suppress(OSError):  # not supported on network and foreign file systems
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def remove_directory(path: Path) -> None:
    """Remove a directory by renaming it first: a partly removed one must not look like a damaged one."""
    removed = path.with_name(f".{path.name}.removed")
    with suppress(OSError):  # the next call removes what is left
        if removed.exists():
            shutil.rmtree(removed)
        os.rename(path, removed)
        shutil.rmtree(removed)


@contextmanager
def exclusive_lock(path: Path) -> Iterator[int | str]:
    """Yield the descriptor of the locked file, or the content of a lock file that another process holds.

    The system releases the lock when the last process that inherited the descriptor ends, for whatever
    reason, so there are no stale locks. The holder removes the file before that. A file that was opened just
    before its removal is therefore no longer the lock, and is opened again.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield os.read(descriptor, 100).decode(errors="replace")
                return
            if not _is_open_file(path, descriptor):
                continue
            with suppress(OSError):  # a full disk: the lock holds, only the PID is missing
                os.ftruncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
            try:
                yield descriptor
            finally:
                with suppress(OSError):
                    os.unlink(path)
            return
        finally:
            os.close(descriptor)


def _is_open_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def free_bytes(path: Path) -> int:
    """Return the free space of the file system that holds `path`, which need not exist yet."""
    candidates = (path.absolute(), *path.absolute().parents)
    existing = next(candidate for candidate in candidates if candidate.exists())
    return shutil.disk_usage(existing).free
