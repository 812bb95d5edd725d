"""Only regular files are read, without blocking, and never more than the limit."""

import io
import os
import socket
from pathlib import Path

import pytest

from macbook_optimization.errors import DataError
from macbook_optimization.input_files import LimitedStream, open_input, read_input, read_json
from macbook_optimization.units import MIB
from trm.tasks.grids.options import GridOptions


def listening_socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


OTHERS = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": listening_socket,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_not_a_regular_file_is_refused_immediately(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    OTHERS[kind](Path("file"))
    with pytest.raises(OSError, match=f"it is {kind}, not a regular file"):
        open_input("file")


def test_a_pipe_that_takes_the_place_of_a_file_is_refused_after_it_is_opened(tmp_path, monkeypatch):
    """Opening it does not wait for a writer, as it would without O_NONBLOCK."""
    (tmp_path / "file").write_bytes(b"text")
    os.mkfifo(tmp_path / "pipe")
    before = os.stat(tmp_path / "file")
    real = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **how: before if path == tmp_path / "pipe" else real(path))
    with pytest.raises(OSError, match="it is a pipe"):
        open_input(tmp_path / "pipe")


def test_a_directory_and_a_missing_file_are_the_usual_errors(tmp_path):
    with pytest.raises(IsADirectoryError):
        open_input(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_input(tmp_path / "missing")


def test_a_link_to_a_regular_file_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    assert read_input(tmp_path / "link", 4) == b"text"


def test_a_file_beyond_the_limit_is_refused_and_not_read(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match="it is larger than 1 MiB"):
        read_input(tmp_path / "sparse", MIB)


class Endless(io.RawIOBase):
    """Produces zeros as they are read."""

    def __init__(self):
        self.num_bytes = 0

    def read(self, size=-1):
        self.num_bytes += size
        return bytes(size)


def read_all(stream):
    while stream.read(4 * MIB):
        pass


@pytest.mark.parametrize("max_bytes", [10, GridOptions().max_input_mb * MIB])
def test_a_stream_ends_in_an_error_at_its_limit(max_bytes):
    source = Endless()
    stream = io.BufferedReader(LimitedStream(source, "zeros", max_bytes, 2**40, "Raise it."), 4 * MIB)
    with pytest.raises(DataError, match=r"zeros has more than .* MiB of text") as refused:
        read_all(stream)
    assert max_bytes < source.num_bytes <= max_bytes + 4 * MIB
    assert refused.value.hint == "Raise it."


def test_a_stream_within_its_limit_is_passed_on():
    stream = io.BufferedReader(LimitedStream(io.BytesIO(b"0123456789"), "digits", 10, 10, ""), 3)
    assert stream.read() == b"0123456789"


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_a_line_beyond_its_limit_is_named(newline):
    def read(content):
        return io.BufferedReader(LimitedStream(io.BytesIO(content), "digits", 1000, 10, ""), 4).read()

    within = (b"01234567" + newline) * 50
    assert read(within) == within
    with pytest.raises(DataError, match=r"digits: line \d+ has more than 10 bytes"):
        read(within + b"x" * 20)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"a": 1, "a": 2}', "the key 'a' is given twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ', "Expecting value"),
        (b"\xff\xfe\xff", "decode"),
    ],
)
def test_bad_json_is_a_value_error(tmp_path, content, problem):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=problem):
        read_json(tmp_path / "file", MIB)


def test_json_is_read_from_regular_files_within_the_limit_only(tmp_path):
    (tmp_path / "file").write_text('{"a": 1}')
    assert read_json(tmp_path / "file", 8) == {"a": 1}
    with pytest.raises(OSError, match="it is larger than"):
        read_json(tmp_path / "file", 7)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a pipe"):
        read_json(tmp_path / "pipe", MIB)
