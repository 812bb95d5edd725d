"""Files that are whole or absent, whatever happens while they are written.

A file is written beside its place, synced, renamed into it, and its directory is synced. Every operation is
a plain call of `os`, one after the other: the fault tests fail, tear, kill at and replay each of them.
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
from typing import Any

import psutil

_WRITE_BYTES = 8 * 2**20


def write_synced(path: Path, parts: Iterable[Any]) -> dict[str, Any]:
    """A new file of these buffers. Its size and sha256 are of what was to be written, not of what a disk
    that fails would give back."""
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for part in parts:
            content = memoryview(part).cast("B")
            for start in range(0, len(content), _WRITE_BYTES):
                chunk = content[start : start + _WRITE_BYTES]
                digest.update(chunk)
                size += len(chunk)
                while chunk:
                    chunk = chunk[os.write(descriptor, chunk) :]
        _flush(descriptor)
    finally:
        os.close(descriptor)
    return {"bytes": size, "sha256": digest.hexdigest()}


def replace_file(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        write_synced(partial, [content])
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            os.unlink(partial)
        raise
    sync(path.parent)


def beside(path: Path) -> Path:
    """Where this process may put together what will be renamed to `path`. What processes left there that were
    killed is removed; living ones may be at work on the same."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        process, _, _ = left.name.split(".")[-2].partition("-")
        if process.isdigit() and not psutil.pid_exists(int(process)):
            shutil.rmtree(left, ignore_errors=True)
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")


def make_directory(path: Path) -> None:
    """And its parents, so that none of them is gone after a power loss."""
    missing = [each for each in (path, *path.parents) if not each.is_dir()]
    for each in reversed(missing):
        try:
            os.mkdir(each)
        except FileExistsError:
            if not each.is_dir():  # otherwise somebody else was faster
                raise
        sync(each.parent)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _flush(descriptor)
    finally:
        os.close(descriptor)


def _flush(descriptor: int) -> None:
    """To the medium: on macOS, `fsync` alone leaves the data in the drive's cache (man 2 fsync)."""
    if sys.platform == "darwin":
        with suppress(OSError):  # network and foreign file systems lack it
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def remove_directory(path: Path) -> None:
    """Renamed first: a directory that is half removed must not be taken for a damaged one."""
    removed = path.with_name(f".{path.name}.removed")
    with suppress(OSError):  # what is left is removed the next time
        if removed.exists():
            shutil.rmtree(removed)
        os.rename(path, removed)
        shutil.rmtree(removed)


@contextmanager
def exclusive_lock(path: Path) -> Iterator[int | str]:
    """Yields the open file's descriptor, or what the process that holds the lock has to say of itself.

    The system lets go of the lock when the last process that inherited the descriptor is gone, however it
    ended: there are no stale locks. The file is removed before that, so one that was opened just before
    may be nobody's any more and is opened again.
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
            with suppress(OSError):  # a full disk
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
    """Of the file system on which `path` is, or will be."""
    existing = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    return shutil.disk_usage(existing).free
