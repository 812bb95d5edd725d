"""Intercept every operation of `os` that changes a file: record it, let it fail, tear it, or kill the process
at it."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NAMES = ("open", "write", "fchmod", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


@dataclass(frozen=True)
class Operation:
    name: str
    path: str  # of the file; of the source, for a rename
    target: str = ""  # of a rename
    content: bytes = b""  # of a write
    creates: bool = False  # an open with O_CREAT

    def __str__(self):
        name = re.sub(r"(\.[0-9]+-[0-9]+)?\.partial", "", Path(self.target or self.path).name)
        return f"{self.name} {name.lstrip('.')}"


def _path(path, dir_fd):
    path = os.fsdecode(path)
    if dir_fd is not None and not os.path.isabs(path):
        path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
    return os.path.abspath(path)


def _describe(name, arguments, keywords) -> Operation:
    if name in ("write", "fchmod", "fsync"):
        path = os.readlink(f"/proc/self/fd/{arguments[0]}")
        return Operation(name, path, content=bytes(arguments[1]) if name == "write" else b"")
    if name in ("rename", "replace"):
        return Operation("rename", *(_path(path, None) for path in arguments[:2]))
    creates = name == "open" and bool(arguments[1] & os.O_CREAT)
    return Operation(name, _path(arguments[0], keywords.get("dir_fd")), creates=creates)


def _only_reads(operation, arguments):
    """Return whether a file is opened to be read; a directory is opened to be synced."""
    if operation.name != "open" or os.path.isdir(operation.path):
        return False
    return not arguments[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)


@contextmanager
def intercepted(root: Path, decide: Callable[[Operation, Callable], object]) -> Iterator[None]:
    """Call `decide` for each operation on files below `root`, with the function that performs it."""
    real = {name: getattr(os, name) for name in NAMES}
    below = os.path.abspath(root)

    def replacement(name):
        def call(*arguments, **keywords):
            operation = _describe(name, arguments, keywords)
            is_below = f"{operation.path}/".startswith(f"{below}/")
            if not is_below or _only_reads(operation, arguments):
                return real[name](*arguments, **keywords)
            return decide(operation, lambda *instead: real[name](*(instead or arguments), **keywords))

        return call

    for name in NAMES:
        setattr(os, name, replacement(name))
    try:
        yield
    finally:
        for name in NAMES:
            setattr(os, name, real[name])


def recorded(root: Path, function: Callable[[], object]) -> list[Operation]:
    log: list[Operation] = []

    def record(operation, perform):
        log.append(operation)
        return perform()

    with intercepted(root, record):
        function()
    return log


def killing(at: int, share: float | None) -> Callable[[Operation, Callable], object]:
    """Kill the process at this operation: before it, after this share of a write, or after it."""
    count = 0

    def decide(operation, perform):
        nonlocal count
        count += 1
        if count - 1 != at:
            return perform()
        if share and operation.name != "write":
            perform()
        elif share:
            descriptor = next(fd for fd in _descriptors() if _points_to(fd, operation.path))
            perform(descriptor, operation.content[: int(share * len(operation.content))])
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    return decide


def _descriptors():
    return sorted((int(name) for name in os.listdir("/proc/self/fd")), reverse=True)


def _points_to(descriptor, path):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}") == path
    except OSError:
        return False


def in_fork(function: Callable[[], object]) -> int:
    """Run the function in a fork of this process and return its wait status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]
