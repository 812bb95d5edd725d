"""Advice after a failed file operation: one hint per cause, for every message about files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

# These say that the file itself may be fine: the system could not open it now.
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})

_HINTS = {
    errno.ENOSPC: "Free some disk space.",
    errno.EDQUOT: "Free some disk space: your quota is used up.",
    errno.EFBIG: "Raise the limit on the size of files: `ulimit -f unlimited`.",
    errno.EACCES: "Check the permissions, or choose another path.",
    errno.EPERM: "Check the permissions, or choose another path.",
    errno.EROFS: "Choose a path that is not on a read-only disk.",
    errno.EEXIST: "Choose another path: a file is in its place.",
    errno.ENOTDIR: "Choose another path: a file is in the place of a directory.",
    errno.EISDIR: "Name a file, not a directory.",
    errno.ELOOP: "Choose another path: its symbolic links lead in a circle.",
    errno.ENAMETOOLONG: "Choose a shorter path.",
    errno.EMFILE: "Raise the limit of open files, for example with `ulimit -n 1024`.",
    errno.ENFILE: "Close other programs: the system has too many open files.",
    errno.ENOMEM: "Close other programs.",
}


def hint_for(error: OSError, default: str | None = None) -> str | None:
    """Return what to do about the cause of an error, or `default` where the cause does not say."""
    return _HINTS.get(error.errno or 0, default)


def dangling_link(path: Path) -> str | None:
    """Describe a symbolic link that leads nowhere, or in a circle; return None for everything else."""
    if os.path.islink(path) and not os.path.exists(path):
        return f"a symbolic link that leads nowhere ({os.readlink(path)})"
    return None


def reason_of(error: OSError) -> str:
    """Return the cause in words."""
    return error.strerror or str(error)
