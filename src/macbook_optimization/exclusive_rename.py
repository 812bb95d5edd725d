"""Rename a file without ever replacing another one.

`os.rename` replaces its target silently. Linux and macOS have a system call that fails instead, which Python
does not offer. Where a file system does not know it, a second name is made and the first one removed: a crash
in between leaves the file with both names, never without one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP})
_CURRENT_DIRECTORY = -100  # AT_FDCWD of Linux
_LINUX_NO_REPLACE = 1  # RENAME_NOREPLACE, linux/fs.h
_MACOS_EXCLUSIVE = 4  # RENAME_EXCL, sys/stdio.h

Rename = Callable[[bytes, bytes], int]


def rename_exclusively(source: Path, target: Path) -> None:
    """Rename a file in one step; raise `FileExistsError` if there is anything at `target`."""
    rename = _system_call()
    if rename is not None:
        if rename(os.fsencode(source), os.fsencode(target)) == 0:
            return
        number = ctypes.get_errno()
        if number not in _UNSUPPORTED:
            raise OSError(number, os.strerror(number), str(source), None, str(target))
    os.link(source, target, follow_symlinks=False)
    os.unlink(source)


@cache
def _system_call() -> Rename | None:
    library = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux" and hasattr(library, "renameat2"):  # glibc 2.28 and newer
        return lambda source, target: int(
            library.renameat2(_CURRENT_DIRECTORY, source, _CURRENT_DIRECTORY, target, _LINUX_NO_REPLACE)
        )
    if sys.platform == "darwin" and hasattr(library, "renamex_np"):
        return lambda source, target: int(library.renamex_np(source, target, _MACOS_EXCLUSIVE))
    return None
