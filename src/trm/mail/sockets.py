"""A Unix socket that only its owner can use, and the protocol on it.

A client connects, sends one raw message, and closes its sending side. The server answers with one JSON object
in a line and closes the connection. Both sides bound bytes and time.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from macbook_optimization.durable_files import exclusive_lock
from macbook_optimization.errors import DataError
from macbook_optimization.file_errors import reason_of
from trm.mail.answers import Answer

ANSWER_SECONDS = 60.0  # until a client gives up: a busy server parses one message after the other
MAX_ANSWER_BYTES = 2**20
_CHUNK_BYTES = 2**16
_BACKLOG = 64  # clients that wait to be accepted
_MAX_PATH_BYTES = 103  # of a socket on macOS; Linux takes four more


class TooManyBytesError(Exception):
    """The other side sends more than was agreed."""


def receive(connection: socket.socket, max_bytes: int, seconds: float) -> bytes:
    """Return what arrives until the other side stops sending.

    Raises `TooManyBytesError`, `TimeoutError`, or `ConnectionError` if the other side is gone.
    """
    content = bytearray()
    end = time.monotonic() + seconds
    while True:
        connection.settimeout(max(end - time.monotonic(), 1e-3))
        chunk = connection.recv(_CHUNK_BYTES)
        if not chunk:
            return bytes(content)
        content += chunk
        if len(content) > max_bytes:
            raise TooManyBytesError
        if time.monotonic() > end:
            raise TimeoutError


def discard(connection: socket.socket) -> None:
    """Take no more, and drop what has arrived: closing would otherwise reset the connection, and the other
    side could not read the answer that it was sent."""
    with suppress(OSError):  # it is gone
        connection.shutdown(socket.SHUT_RD)
        while connection.recv(_CHUNK_BYTES):
            pass


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Yield a socket that accepts connections at `path`; remove the path at the end.

    Nothing at `path` is replaced except the socket of a server that was killed, which is recognised by its
    lock file. The lock is held as long as this process lives.
    """
    _check_directory(path)
    lock = path.with_name(f"{path.name}.lock")
    may_be_stale = lock.exists()
    _refuse_other_kinds(path, may_be_stale)
    with exclusive_lock(lock) as holder:
        if isinstance(holder, str):
            raise DataError(f"Another server is listening at {path} (PID {holder})", hint="Stop it first.")
        _remove_stale(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            _bind(listener, path)
            own = os.lstat(path)
            try:
                listener.listen(_BACKLOG)
                yield listener
            finally:
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.lstat(path), own):
                        os.unlink(path)


def _check_directory(path: Path) -> None:
    """Refuse a directory in which others could replace the socket, and a path that is too long for one."""
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise DataError(
            f"{path} is too long for a socket: it has more than {_MAX_PATH_BYTES} bytes",
            hint="Choose a shorter path.",
        )
    try:
        facts = os.stat(path.parent)
    except OSError as error:
        raise DataError(f"{path} cannot be created: {reason_of(error)}") from error
    if not stat.S_ISDIR(facts.st_mode):
        raise DataError(f"{path.parent} is not a directory")
    is_shared = facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX
    if is_shared or facts.st_uid not in (0, os.geteuid()):
        raise DataError(
            f"Other users can change {path.parent}, where the socket would be",
            hint="Choose a directory of your own, such as the one that XDG_RUNTIME_DIR names.",
        )


def _refuse_other_kinds(path: Path, may_be_stale: bool) -> None:
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return
    if not (stat.S_ISSOCK(facts.st_mode) and facts.st_uid == os.geteuid() and may_be_stale):
        raise DataError(
            f"{path} exists, and is not a socket that `trm email serve` left behind",
            hint="Choose another path, or remove it.",
        )


def _remove_stale(path: Path) -> None:
    """Remove the socket of a server that was killed. The lock is ours, so no server of ours uses it."""
    if not os.path.lexists(path):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
    raise DataError(f"Another program is listening at {path}", hint="Choose another path.")


def _bind(listener: socket.socket, path: Path) -> None:
    mask = os.umask(0o177)  # before any thread is started
    try:
        listener.bind(str(path))
    except OSError as error:
        raise DataError(f"{path} cannot be created: {reason_of(error)}") from error
    finally:
        os.umask(mask)


def is_trusted_peer(connection: socket.socket) -> bool:
    """Return whether the other side is this user or root, where the system says so (Linux)."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # the permissions of the socket have to do
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return user in (0, os.geteuid())


def request_answer(path: Path, raw: bytes, name: str) -> Answer:
    """Return what the server at `path` says about a message."""
    try:
        if not _is_own_socket(path):
            raise DataError(f"{path} is not a socket of yours", hint="Name the one of `trm email serve`.")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(str(path))
            if not is_trusted_peer(connection):
                raise DataError(f"Another user is listening at {path}")
            with suppress(BrokenPipeError, ConnectionResetError):  # it has refused, and says why
                connection.sendall(raw)
                connection.shutdown(socket.SHUT_WR)
            content = receive(connection, MAX_ANSWER_BYTES, ANSWER_SECONDS)
    except TimeoutError as error:
        raise DataError(f"The server at {path} did not answer within {ANSWER_SECONDS:.0f} s") from error
    except (OSError, TooManyBytesError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else "it does not stop sending"
        raise DataError(
            f"No server answers at {path}: {reason}",
            hint="Start one with: trm email serve RUN --socket PATH",
        ) from error
    return _parsed(content, path, name)


def _is_own_socket(path: Path) -> bool:
    facts = os.stat(path)
    return stat.S_ISSOCK(facts.st_mode) and facts.st_uid in (0, os.geteuid())


def _parsed(content: bytes, path: Path, name: str) -> Answer:
    try:
        facts = json.loads(content)
        if "error" in facts:
            raise DataError(str(facts["error"]), hint=facts.get("hint"))
        return replace(Answer(**facts), path=name)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"The server at {path} ended the connection without an answer", hint="See its messages."
        ) from error
