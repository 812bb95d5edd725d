"""Files are complete or absent. Tests that inject faults are in tests/faults."""

import fcntl
import hashlib
import os

import pytest

from macbook_optimization import durable_files
from macbook_optimization.durable_files import (
    free_bytes,
    make_directory,
    partial_path,
    replace_file,
    sync,
    write_synced,
)


def test_size_and_hash_describe_the_bytes_that_were_passed_in(tmp_path):
    parts = [b"one", memoryview(b"two"), b"", b"x" * 20_000_000]
    described = write_synced(tmp_path / "file", parts)
    content = (tmp_path / "file").read_bytes()
    assert content == b"".join(parts)
    assert described == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_short_writes_are_completed(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: real(descriptor, content[:7]))
    write_synced(tmp_path / "file", [b"a sentence that is longer than seven"])
    assert (tmp_path / "file").read_bytes() == b"a sentence that is longer than seven"


def test_a_failed_replacement_keeps_the_old_file(tmp_path, monkeypatch):
    replace_file(tmp_path / "file", b"old")

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_leftovers_of_killed_processes_are_removed_and_not_followed(tmp_path):
    (tmp_path / "precious").write_text("text")
    reused = partial_path(tmp_path / "file")  # a process of the same PID was killed
    reused.symlink_to("precious")
    (tmp_path / ".file.999999999-1.partial").write_text("half")
    (tmp_path / f".file.{os.getpid()}-1.partial").write_text("another thread is writing it")
    replace_file(tmp_path / "file", b"new")
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found.pop(f".file.{os.getpid()}-1.partial")
    assert found == {"precious": "text", "file": "new"}


def test_an_existing_file_is_never_truncated(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        write_synced(tmp_path / "file", [b"new"])
    assert (tmp_path / "file").read_text() == "mine"


def test_missing_parents_are_created(tmp_path):
    make_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b")
    assert free_bytes(tmp_path / "a" / "not" / "there") > 0


@pytest.mark.parametrize("supported", [True, False])
def test_on_a_mac_the_cache_of_the_drive_is_flushed(tmp_path, monkeypatch, supported):
    """With `fcntl(F_FULLFSYNC)`, or `fsync` where that is not supported. Not yet run on a Mac."""
    calls = []

    def full_sync(descriptor, command):
        calls.append(command)
        if not supported:
            raise OSError(45, "Operation not supported")

    monkeypatch.setattr(durable_files.sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", full_sync)
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))
    sync(tmp_path)
    assert calls == ([51] if supported else [51, "fsync"])
