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
import shutil
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


class FileDigest(TypedDict):
    """Size and hash of a file, as they appear in a manifest."""

    bytes: int
    sha256: str


def write_synced(path: Path, parts: Iterable[Buffer]) -> FileDigest:
    """Write a new file from these buffers and return its size and sha256.

    Both describe the bytes passed in, not the bytes on disk: a later comparison detects a failing disk.
    """
    digest = hashlib.sha256()
    size = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
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
    """Replace a file atomically: readers see the old content or the new, never a mixture."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        write_synced(partial, [content])
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            os.unlink(partial)
        raise
    sync(path.parent)


def partial_path(path: Path) -> Path:
    """Return a temporary path next to `path`, unique to this thread, to be renamed to `path` when complete.

    Leftovers of processes that were killed are removed. Those of running processes stay: they may be writing
    the same thing.
    """
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        pid, _, _ = leftover.name.split(".")[-2].partition("-")
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(leftover, ignore_errors=True)
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")


def make_directory(path: Path) -> None:
    """Create a directory and its parents, and sync each so that all of them survive a power failure."""
    missing = [directory for directory in (path, *path.parents) if not directory.is_dir()]
    for directory in reversed(missing):
        try:
            os.mkdir(directory)
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
