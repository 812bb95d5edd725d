"""The socket of the server: only for its owner, and nothing else is ever replaced."""

import os
import shutil
import socket
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from macbook_optimization.errors import DataError
from trm.mail import sockets
from trm.mail.sockets import TooManyBytesError, listening, receive, request_answer


@pytest.fixture
def directory():
    """Return a directory with a short path, as sockets need one."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    yield path
    shutil.rmtree(path)


def test_only_the_owner_can_use_the_socket_and_it_is_removed(directory):
    mask = os.umask(0)
    try:
        with listening(directory / "s"):
            facts = os.lstat(directory / "s")
            assert stat.S_ISSOCK(facts.st_mode)
            assert facts.st_mode & 0o777 == 0o600
    finally:
        os.umask(mask)
    assert not list(directory.iterdir())


def abandoned(path):
    """Leave a socket behind, as a server that was killed does."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def test_the_socket_of_a_killed_server_is_replaced(directory):
    abandoned(directory / "s")
    (directory / "s.lock").write_text("1")
    with listening(directory / "s"), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(directory / "s"))
    assert not list(directory.iterdir())


@pytest.mark.parametrize("kind", ["file", "directory", "link", "fifo", "socket of another program"])
def test_nothing_else_is_replaced(directory, kind):
    path = directory / "s"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("nowhere")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        abandoned(path)  # without a lock file
    before = os.lstat(path)
    with pytest.raises(DataError, match="exists, and is not a socket"), listening(path):
        pass
    assert os.path.samestat(os.lstat(path), before)


def test_a_socket_that_another_program_uses_is_not_replaced(directory):
    (directory / "s.lock").touch()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(directory / "s"))
        other.listen()
        with pytest.raises(DataError, match="Another program is listening"), listening(directory / "s"):
            pass
    assert (directory / "s").exists()


def test_a_second_server_is_refused(directory):
    with listening(directory / "s"):
        with pytest.raises(DataError, match="Another server is listening"), listening(directory / "s"):
            pass
        assert (directory / "s").exists()


def test_a_directory_that_others_can_change_is_refused(directory):
    directory.chmod(0o777)
    with pytest.raises(DataError, match="Other users can change"), listening(directory / "s"):
        pass
    directory.chmod(0o1777)  # sticky, as /tmp: others cannot replace what is ours
    with listening(directory / "s"):
        pass


def test_impossible_paths_are_refused(directory):
    for path, message in (
        (directory / "below" / "s", "cannot be created"),
        (directory / ("s" * 100), "too long for a socket"),
    ):
        with pytest.raises(DataError, match=message), listening(path):
            pass


def test_receiving_has_limits_of_bytes_and_time():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"x" * 1000)
        with pytest.raises(TooManyBytesError):
            receive(ours, 999, 10)
        with pytest.raises(TimeoutError):
            receive(ours, 999, 0.05)
        theirs.sendall(b"message")
        theirs.shutdown(socket.SHUT_WR)
        assert receive(ours, 7, 10) == b"message"


def test_a_drip_does_not_extend_the_time(directory):
    """Each byte arrives in time, but the message does not."""
    ours, theirs = socket.socketpair()
    stopped = threading.Event()

    def drip():
        while not stopped.wait(0.01):
            theirs.send(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(TimeoutError):
        receive(ours, 10**6, 0.2)
    stopped.set()
    thread.join()
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "without an answer"),
        (b"nonsense\n", "without an answer"),
        (b"[]\n", "without an answer"),
        (b'{"category": "work"}\n', "without an answer"),
        (b'{"error": "It is full", "hint": "Wait."}\n', "It is full"),
        (b"x" * 5000, "does not stop sending"),
    ],
)
def test_a_client_reports_what_is_wrong_with_a_server(directory, answer, message, monkeypatch):
    monkeypatch.setattr(sockets, "MAX_ANSWER_BYTES", 4096)

    def serve(listener):
        connection, _ = listener.accept()
        with connection:
            receive(connection, 10**6, 10)
            connection.sendall(answer)

    with listening(directory / "s") as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        with pytest.raises(DataError, match=message):
            request_answer(directory / "s", b"message", "-")
        thread.join()


def test_a_client_sends_mail_only_to_a_socket_of_its_user(directory):
    (directory / "file").touch()
    with pytest.raises(DataError, match="is not a socket of yours"):
        request_answer(directory / "file", b"message", "-")
    with pytest.raises(DataError, match="No server answers"):
        request_answer(directory / "missing", b"message", "-")
    abandoned(directory / "s")
    with pytest.raises(DataError, match="No server answers"):
        request_answer(directory / "s", b"message", "-")
